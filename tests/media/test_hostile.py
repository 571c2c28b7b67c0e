"""Hostile media: each is refused with a clear error, or decoded if it is harmless, at little cost."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from culet.errors import BadRequest
from culet.media.reader import MediaReader
from culet.media.sources import MediaSource
from tests.media.hostile_files import ATTACKS, OK, Attack

# What decoders say, in their own words. None of it may reach a client.
DECODER_WORDS = re.compile(r"0x[0-9a-f]{6}|Traceback|BytesIO|/usr|\.py|libsndfile|ffmpeg|Errno|cannot identify|zlib", re.I)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("something was looked up or fetched")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def cpu_seconds(process_id: int) -> float:
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_bytes(process_id: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process_id}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def decoder_id(reader: MediaReader) -> int:
    if not reader.pool._idle:
        reader.warm_up()
    return reader.pool._idle[0].process_id


def test_there_are_enough_attacks():
    assert len(ATTACKS) >= 40
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS)
    num_decoded = sum(attack.problem == OK for attack in ATTACKS)
    told = f"Of {len(ATTACKS)} hostile files, {len(ATTACKS) - num_decoded} are refused"
    assert told in (Path(__file__).parents[2] / "docs/results.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_attack(served: MediaReader, attack: Attack):
    built = attack.build()
    where = {"url": built} if isinstance(built, str) else {"data": built}
    process_id = decoder_id(served)
    before_s, before_bytes = cpu_seconds(process_id), peak_bytes(process_id)
    source = MediaSource(attack.kind, "messages[0].content[1]", **where)
    if attack.problem == OK:
        assert served.read_now([source])[0].num_tokens > 0
    else:
        with pytest.raises(BadRequest, match=attack.problem) as raised:
            served.read_now([source])
        assert raised.value.message.startswith("messages[0].content[1]: ")
        assert DECODER_WORDS.search(str(raised.value)) is None
    assert decoder_id(served) == process_id, "the decoder died"
    assert cpu_seconds(process_id) - before_s < 10
    assert peak_bytes(process_id) - before_bytes < 300 << 20
