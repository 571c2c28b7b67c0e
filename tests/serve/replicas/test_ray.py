"""Culet on Ray Serve, on a real cluster of one machine that the test starts. The engines run the built-in model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
import torch
import yaml
from openai import OpenAI

from culet.errors import ConfigError
from culet.testing.tiny import write_checkpoint
from tests.ports import Claim
from tests.serve.replicas.conversations import hit_share, talk
from tests.serve.running import Running, wait_for
from tests.serve.test_media import ask, image

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
ENGINE = {"device": "cpu", "max_model_len": 1024, "max_num_seqs": 32}
APP = "culet"
EVENTS = '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}'
SETTINGS = {
    "PYTHONPATH": str(Path(__file__).parents[3]),
    "OMP_NUM_THREADS": "1",
    "RAY_AUTH_MODE": "disabled",
    # Ray's own limits suit an idle machine.
    "RAY_gcs_server_port_wait_time_s": "300",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_metrics_report_interval_ms": "1000",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
}
MOST_STARTS = 8


class Cluster:
    """A running cluster with Culet on it."""

    def __init__(self, folder: str) -> None:
        self._claim = Claim(7)
        head_port, client_port, self.metrics_port, *agent_ports, self.port = range(self._claim.port, self._claim.port + 7)
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port", str(head_port)]
        command += ["--num-cpus", "2", "--object-store-memory", str(80 << 20), "--temp-dir", folder]
        command += ["--include-dashboard", "false", "--disable-usage-stats", "--ray-client-server-port", str(client_port)]
        # Ray gives up if its agents take more than 15 s to choose their ports, so they get them here.
        command += ["--metrics-export-port", str(self.metrics_port)]
        agents = ("dashboard-agent-listen", "dashboard-agent-grpc", "runtime-env-agent")
        for agent, port in zip(agents, agent_ports, strict=True):
            command += [f"--{agent}-port", str(port)]
        self._command = command
        self._head = self._start()
        os.environ["RAY_AUTH_MODE"] = SETTINGS["RAY_AUTH_MODE"]
        import ray
        from ray import serve

        num_starts = 1

        def connect() -> bool:
            nonlocal num_starts
            if self._head.poll() is not None:  # on a busy machine, Ray gives up before its agents have started
                assert num_starts < MOST_STARTS, "the cluster did not start"
                num_starts += 1
                self._head = self._start()
            try:
                ray.init(address=f"127.0.0.1:{head_port}", log_to_driver=False)
            except ConnectionError:
                return False
            return True

        wait_for(connect, 60, "the cluster")
        self.url = f"http://127.0.0.1:{self.port}"
        serve.start(http_options={"host": "127.0.0.1", "port": self.port})
        self.http = httpx.Client(base_url=self.url, timeout=300)

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, env=os.environ | SETTINGS, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def run(self, **args: Any) -> None:
        """Deploy Culet and wait until it answers."""
        from ray import serve

        from culet.serve.ray import build_app

        serve.run(build_app({"engine": ENGINE, "num_cpus": 0.5, **args}), name=APP, route_prefix="/")
        wait_for(lambda: self.http.get("/ready").status_code == 200, 60, "the ingress")

    def chat(self, body: dict[str, Any]) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json=body)

    def close(self) -> None:
        import ray
        from ray import serve

        self.http.close()
        serve.shutdown()
        ray.shutdown()
        self._head.terminate()
        self._head.wait()
        self._claim.close()


def replica_processes() -> dict[int, Any]:
    """Return the actors of the engine replicas by process id."""
    import ray

    found = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["name"].startswith(f"SERVE_REPLICA::{APP}#Engine#"):
            try:
                handle = ray.get_actor(actor["name"], namespace=actor["namespace"])
                found[ray.get(handle.__ray_call__.remote(lambda replica: os.getpid()))] = handle
            except (ValueError, ray.exceptions.RayActorError):  # it has just ended
                continue
    return found


def num_ongoing(replica: Any) -> int:
    """Return how many requests a replica is answering. Short questions about its cache may come in between."""
    import ray

    return min(ray.get(replica.get_num_ongoing_requests.remote()) for _ in range(5))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with TemporaryDirectory(prefix="ray-") as folder:  # its sockets need a short path
        running = Cluster(folder)
        try:
            yield running
        finally:
            running.close()


@pytest.fixture(scope="module")
def pair(cluster: Cluster) -> Cluster:
    """Two replicas."""
    cluster.run(num_replicas=2)
    return cluster


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_openai_client_streams(pair: Cluster) -> None:
    client = OpenAI(base_url=f"{pair.url}/v1", api_key="none", max_retries=0)
    stream = client.chat.completions.create(
        model="built-in", messages=[{"role": "user", "content": "Hello!"}], max_tokens=12, temperature=0, stream=True
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert sum(bool(piece) for piece in pieces) > 3
    answer = client.chat.completions.create(
        model="built-in", messages=[{"role": "user", "content": "Hello!"}], max_tokens=12, temperature=0
    )
    assert answer.choices[0].message.content == "".join(pieces)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_later_turns_find_their_prefix(pair: Cluster) -> None:
    begun = time.monotonic()
    turns = talk(pair.chat)
    assert len(turns) == 200
    assert [turn.error for turn in turns if turn.error] == []
    print(f"{hit_share(turns):.3f} of the later turns found their prefix, in {time.monotonic() - begun:.0f} s")
    assert hit_share(turns) >= 0.95


def generated(cluster: Cluster) -> dict[str, int]:
    """Return how many tokens each replica has generated, from Ray's metrics."""
    text = httpx.get(f"http://127.0.0.1:{cluster.metrics_port}/metrics", timeout=60).text
    found = re.findall(r'^ray_culet_generation_tokens{.*replica="(\w+)".*} (.*)$', text, re.MULTILINE)
    return {replica: int(float(count)) for replica, count in found}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_replica_reports_metrics(pair: Cluster) -> None:
    wait_for(lambda: sum(map(bool, generated(pair).values())) == 2, 30, "the metrics of two replicas")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_client_that_leaves_costs_nothing_more(pair: Cluster) -> None:
    before = sum(generated(pair).values())
    body = {"prompt": "A long story: ", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with pair.http.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    wait_for(lambda: not any(map(num_ongoing, replica_processes().values())), 60, "the end of the request")
    time.sleep(5)  # until the metrics have followed
    assert 0 < sum(generated(pair).values()) - before < 900


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_replica_loses_only_its_own_requests(pair: Cluster) -> None:
    begun: list[int] = []

    def ask(index: int) -> list[str]:
        """Return the lines of a stream."""
        body = {"prompt": f"Story {index}: ", "max_tokens": 300, "ignore_eos": True, "stream": True}
        lines: list[str] = []
        with pair.http.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if not lines:
                    begun.append(index)
                if line:
                    lines.append(line)
        return lines

    before = replica_processes()
    assert len(before) == 2
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(ask, index) for index in range(6)]
        wait_for(lambda: len(begun) == 6, 60, "six streams")
        process_id, replica = next(iter(before.items()))
        num_own = num_ongoing(replica)
        os.kill(process_id, signal.SIGKILL)
        later = pair.chat({"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4})
        assert later.status_code == 200, later.text
        streams = [answer.result() for answer in answers]
    whole = [lines for lines in streams if not any("the engine died" in line for line in lines)]
    print(f"{len(whole)} of 6 streams went on, {num_own} were at the killed replica")
    assert 1 <= num_own <= 5
    assert len(whole) == 6 - num_own
    assert all(any('"finish_reason":"length"' in line for line in lines) for lines in whole)
    wait_for(lambda: len(replica_processes()) == 2, 60, "the new replica")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_scaling_fails_no_request(cluster: Cluster) -> None:
    scaling = {
        "min_replicas": 1,
        "max_replicas": 2,
        "target_ongoing_requests": 3,
        "upscale_delay_s": 1,
        "downscale_delay_s": 5,
        "metrics_interval_s": 0.5,
        "look_back_period_s": 2,
    }
    cluster.run(autoscaling=scaling)
    wait_for(lambda: len(replica_processes()) == 1, 60, "one replica")
    is_over = threading.Event()
    problems: list[str] = []
    num_answers = [0]

    def load(is_wanted: Callable[[], bool], num_tokens: int) -> None:
        while not is_over.is_set():
            if not is_wanted():
                time.sleep(0.1)
                continue
            num_answers[0] += 1
            question = {"role": "user", "content": f"{num_answers[0]}: tell me a story"}
            answer = cluster.chat({"messages": [question], "max_tokens": num_tokens, "ignore_eos": True})
            if answer.status_code != 200:
                problems.append(answer.text)

    is_busy = threading.Event()
    is_busy.set()
    with ThreadPoolExecutor(8) as pool:
        clients = [pool.submit(load, is_busy.is_set, 24) for _ in range(6)]
        clients += [pool.submit(load, lambda: True, 100) for _ in range(2)]  # so that replicas are busy when one is to end
        try:
            wait_for(lambda: sum(map(bool, map(num_ongoing, replica_processes().values()))) == 2, 60, "the second replica")
            time.sleep(5)
            is_busy.clear()
            wait_for(lambda: len(replica_processes()) == 1, 60, "the second replica's end")
            time.sleep(2)
        finally:
            is_over.set()
    for client in clients:
        client.result()
    print(f"{num_answers[0]} answers, {len(problems)} errors")
    assert problems == []
    assert num_answers[0] > 20


def descendants(process_id: int) -> set[int]:
    """Return the ids of a process's children and of theirs."""
    threads = Path(f"/proc/{process_id}/task").iterdir()
    children = {int(child) for thread in threads for child in (thread / "children").read_text().split()}
    return children.union(*map(descendants, children))


def is_gone(process_id: int) -> bool:
    """Return whether a process has ended. Nobody may have waited for it yet."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_tensor_parallel_group_is_one_replica(cluster: Cluster, folder: Path) -> None:
    """Two ranks start as one replica, end with it, and come back."""
    cluster.run(engine={**ENGINE, "model": str(folder), "dtype": "float32", "tensor_parallel_size": 2})
    body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    first = cluster.chat(body)
    assert first.status_code == 200, first.text
    wait_for(lambda: len(replica_processes()) == 1, 60, "one replica")
    (process_id,) = replica_processes()
    family = descendants(process_id)
    print(f"the replica has {len(family)} processes")
    assert len(family) >= 3  # the engine and two ranks
    os.kill(process_id, signal.SIGKILL)
    wait_for(lambda: all(map(is_gone, family)), 60, "the end of all ranks")
    again = cluster.chat(body)
    assert again.status_code == 200, again.text
    assert again.json()["choices"] == first.json()["choices"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_picture_reaches_a_replica(cluster: Cluster, tmp_path: Path) -> None:
    """Its content goes beside the request. The answer is that of a server without Ray."""
    folder = write_checkpoint(tmp_path / "tiny", "E4B", towers=True, dtype=torch.float32)
    engine = {**ENGINE, "model": str(folder), "dtype": "float32"}
    body = {"messages": ask(image(7, "auto")), "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with Running(folder, config=engine) as server:
        want = server.http.post("/v1/chat/completions", json=body | {"model": "gemma"}).json()
    cluster.run(engine=engine)
    answer = cluster.chat(body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"] == want["choices"]
    assert answer.json()["usage"]["prompt_tokens"] == want["usage"]["prompt_tokens"] > 200


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({"replicas": 2}, "unknown argument"),
        ({"engine": {"max_num_seqs": 0}}, "max-num-seqs"),
        ({"serve": {"data_parallel_size": 2}}, "Ray starts the replicas"),
        ({"engine": {"enable_prefix_caching": False}, "serve": {"kv_events_config": EVENTS}}, "no-enable-prefix-caching"),
        ({"num_replicas": 2, "autoscaling": {"max_replicas": 2}}, "pass only one|autoscaling decides"),
    ],
)
def test_bad_arguments_are_named(args: dict[str, Any], problem: str) -> None:
    from culet.serve.ray import build_app

    with pytest.raises(ConfigError, match=problem):
        build_app(args)


@pytest.mark.parametrize(
    ("events", "limit"),
    [(None, None), (EVENTS, 1), ('{"enable_kv_cache_events": true, "endpoint": "tcp://router:5557"}', None)],
)
def test_replicas_with_the_same_endpoint_are_on_different_machines(events: str | None, limit: int | None) -> None:
    from culet.config import build_config, build_serve_config
    from culet.serve.ray.app import _engine_deployment

    settings = build_serve_config({"kv_events_config": events})
    deployment = _engine_deployment({}, build_config(ENGINE), settings).options(num_replicas=2)
    assert deployment._replica_config.max_replicas_per_node == limit


def test_the_guides_yaml_is_valid() -> None:
    from ray.serve.schema import ServeDeploySchema

    from culet.serve.ray import build_app

    guide = (Path(__file__).parents[3] / "docs/guides/replicas.md").read_text()
    content = yaml.safe_load(guide.split("```yaml\n")[1].split("```")[0])
    (application,) = ServeDeploySchema.model_validate(content).applications
    assert application.import_path == "culet.serve.ray:build_app"
    build_app(application.args)
