"""Endpoints of KV events that cannot be opened are refused before a model is loaded, with a hint that fits."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from culet.config import Config, ServeConfig
from culet.errors import ConfigError
from culet.limits import Limits
from culet.serve.engines.group import Engines
from culet.serve.process.kv_events import check_kv_events
from tests.ports import Claim

EVENTS = '"enable_kv_cache_events": true'


@pytest.fixture
def used_port() -> Iterator[int]:
    """A port that another program listens on, on all interfaces."""
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        yield int(other.getsockname()[1])


def make_engines(events: str, num_engines: int = 1) -> None:
    Engines(Config(), ServeConfig(kv_events_config=f"{{{EVENTS}, {events}}}", data_parallel_size=num_engines), Limits())


@pytest.mark.parametrize("name", ["endpoint", "replay_endpoint"])
@pytest.mark.parametrize("endpoint", ["*:5557", "5557", "http://*:5557", "tcp:/*:5557", ""])
def test_a_wrong_scheme(name: str, endpoint: str) -> None:
    """Also where the engines run on other machines, whose ports cannot be tried."""
    with pytest.raises(ConfigError) as caught:
        check_kv_events(f'{{{EVENTS}, "{name}": "{endpoint}"}}', num_engines=1, has_prefix_caching=True)
    assert caught.value.message == f"kv-events-config: {name}: got {endpoint!r}, expected tcp://HOST:PORT or ipc://PATH"
    assert "tcp://*:5557" in caught.value.hint


@pytest.mark.parametrize("name", ["endpoint", "replay_endpoint"])
def test_a_port_in_use(name: str, used_port: int) -> None:
    other = "" if name == "endpoint" else '"endpoint": "tcp://*:*", '
    with pytest.raises(ConfigError, match=f"cannot use 'tcp://.*:{used_port}': Address already in use\n") as caught:
        make_engines(f'{other}"{name}": "tcp://*:{used_port}"')
    assert caught.value.hint.startswith("choose another port")


def test_the_port_of_the_second_engine() -> None:
    with Claim(2) as claim:
        endpoint = f'"endpoint": "tcp://0.0.0.0:{claim.port}"'
        make_engines(endpoint, num_engines=2)
        with (
            socket.create_server(("0.0.0.0", claim.port + 1)),
            pytest.raises(ConfigError, match=f"cannot use 'tcp://.*:{claim.port + 1}': Address already in use\n"),
        ):
            make_engines(endpoint, num_engines=2)


@pytest.mark.parametrize(
    ("endpoints", "hint"),
    [
        ('"endpoint": "tcp://*"', "example: "),
        ('"endpoint": "tcp://router"', "example: "),
        ('"endpoint": "tcp://router:5557", "replay_endpoint": "tcp://192.0.2.1:5558"', "use * or an address of this machine"),
        ('"endpoint": "tcp://*:*", "replay_endpoint": "tcp://eth99:5558"', "use * or an address of this machine"),
    ],
)
def test_an_address_that_this_machine_does_not_have(endpoints: str, hint: str) -> None:
    with pytest.raises(ConfigError, match="kv-events-config: cannot use") as caught:
        make_engines(endpoints)
    assert caught.value.hint.startswith(hint)


def test_what_was_tried_is_free_again_and_paths_are_left_alone(used_port: int, tmp_path: object) -> None:
    """A listener at an ipc:// path would take it away from the server that this one replaces."""
    for _ in range(2):
        make_engines(f'"endpoint": "ipc://{tmp_path}/none/events", "replay_endpoint": "tcp://127.0.0.1:*"')
