"""SGLang's router in front of two plain servers."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from tests.ports import Claim
from tests.serve.replicas.conversations import hit_share, talk
from tests.serve.running import Running, wait_for

CONFIG = {"device": "cpu", "max_model_len": 2048, "max_num_seqs": 64}


@pytest.fixture(scope="module")
def router(folder: Path) -> Iterator[tuple[str, list[Running]]]:
    """The address of the router, and the servers behind it."""
    pytest.importorskip("sglang_router")
    with ExitStack() as stack:
        servers = [stack.enter_context(Running(folder, config=CONFIG)) for _ in range(2)]
        port = stack.enter_context(Claim(2)).port
        command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--policy", "cache_aware", "--prometheus-port", str(port + 1)]
        command += ["--worker-urls", *(server.url for server in servers)]
        log = stack.enter_context(tempfile.TemporaryFile("w+"))
        process = subprocess.Popen(command, stdout=log, stderr=log)
        stack.callback(process.wait)
        stack.callback(process.kill)
        url = f"http://127.0.0.1:{port}"

        def is_up() -> bool:
            log.seek(0)
            assert process.poll() is None, log.read()
            try:
                return httpx.get(f"{url}/v1/models", timeout=30).status_code == 200
            except httpx.TransportError:
                return False

        wait_for(is_up, 60, "the router")
        yield url, servers


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_router_streams_and_keeps_conversations_together(router: tuple[str, list[Running]]) -> None:
    url, servers = router
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    stream = client.chat.completions.create(
        model="gemma", messages=[{"role": "user", "content": "Hello"}], max_tokens=6, temperature=0, stream=True
    )
    assert list(stream)[-1].choices[0].finish_reason is not None
    with httpx.Client(base_url=url, timeout=300) as http:
        turns = talk(lambda body: http.post("/v1/chat/completions", json={"model": "gemma", **body}), num_conversations=12)
    assert [turn.error for turn in turns if turn.error] == []
    print(f"{hit_share(turns):.3f} of the later turns found their prefix")
    assert hit_share(turns) >= 0.8
    for server in servers:
        assert "/server_info 404" not in server.log()
        assert "/model_info 404" not in server.log()
        assert "/get_load 404" not in server.log()
