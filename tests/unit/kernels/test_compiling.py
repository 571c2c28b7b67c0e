"""Compiled kernels are kept on disk and counted, and compilations during serving are reported."""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver

from culet.cli.main import run
from culet.kernels import compiling
from culet.kernels.cross_compile import compile_for
from culet.kernels.triton import launch
from culet.kernels.triton.launch import Launch, only_warm
from culet.kernels.triton.norms import residual


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("CULET_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    yield tmp_path
    triton.knobs.compilation.listener = None
    triton.knobs.cache.dir = str(Path.home() / ".triton" / "cache")


def a_kernel(size: int, device: str = "meta") -> Launch:
    x_TD = torch.empty(3, size, dtype=torch.bfloat16, device=device)
    return residual.describe_rms_norm(x_TD, torch.empty(size, device=device), 1e-6, torch.empty_like(x_TD), True)


@pytest.mark.slow
def test_kernels_are_compiled_once(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    count = compiling.use_disk_cache()
    compile_for(a_kernel(48), 90)
    assert (count.compiled, count.found) == (1, 0)
    assert count.seconds > 0
    assert any((cache / "triton").rglob("*.cubin"))
    again = compiling.use_disk_cache()  # as another process would
    compile_for(a_kernel(48), 90)
    assert (again.compiled, again.found) == (0, 1)
    again.begin_serving()
    with caplog.at_level("WARNING", logger="culet"):
        compile_for(a_kernel(48), 90)
        assert not caplog.records
        compile_for(a_kernel(96), 90)
    assert "while serving" in caplog.text
    assert "_rms_norm_kernel" in caplog.text
    assert (count.while_serving, again.while_serving) == (0, 1)


def test_triton_cache_dir_wins(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "own"))
    before = triton.knobs.cache.dir
    compiling.use_disk_cache()
    assert triton.knobs.cache.dir == before


def test_marks_differ(cache: Path) -> None:
    mark = compiling.mark_of("31B", 90)
    assert mark == compiling.mark_of("31B", 90)
    assert mark != compiling.mark_of("31B", 89)
    assert mark.is_relative_to(cache)


def test_another_rehearsal_has_another_mark(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may launch kernels that an older one has not compiled."""
    mark, read = compiling.mark_of("31B", 90), Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + (b"#" if path.name == "rehearsal.py" else b""))
    assert compiling.mark_of("31B", 90) != mark


def test_warmup_without_a_gpu_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["warmup", "random:E2B", "--device", "cpu"]) == 1
    assert "needs a GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("num_compiled", "parts", "text"),
    [
        (4, {"kernels": 2.5}, "4 kernels compiled in 2.5 s and stored"),
        (4, {"ranks": 9.0}, "4 kernels compiled and stored"),
        (0, {"kernels": 2.5}, "nothing to compile"),
    ],
)
def test_warmup_says_what_it_compiled(
    num_compiled: int, parts: dict[str, float], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks do not say how long it took."""
    engine = SimpleNamespace(kernels_compiled=num_compiled, start_times=SimpleNamespace(parts=parts))
    monkeypatch.setattr("culet.engine.engine.Engine", lambda config: engine)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert run(["warmup", "random:E2B"]) == 0
    assert capsys.readouterr().out.startswith(text)


def test_only_warm_launches_nothing() -> None:
    class Kernel:
        def __init__(self) -> None:
            self.seen: list[str] = []

        def __getitem__(self, grid: tuple[int, ...]) -> object:
            return lambda **arguments: self.seen.append("run")

        def warmup(self, **arguments: object) -> None:
            self.seen.append("warm")

    kernel = Kernel()
    launched = Launch(kernel, (1,), {})
    launched.run()
    with only_warm():
        launched.run()
    launched.run()
    assert kernel.seen == ["run", "warm", "run"]


class Driver:
    """A stand-in for the driver of the GPU that Triton compiles for."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def on_a_gpu(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the loaded kernels."""
    loaded: list[str] = []
    monkeypatch.setattr(driver, "_active", Driver())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(CompiledKernel, "_init_handles", lambda kernel: loaded.append(kernel.name))
    monkeypatch.setattr(compiling, "_num_workers", lambda: 1)
    monkeypatch.setattr(launch, "_warmed", set())
    yield loaded
    residual._rms_norm_kernel.device_caches.clear()


def rehearse(sizes: tuple[int, ...]) -> compiling.CompileCount:
    """Load kernels of these sizes as a new process would, and return its counts."""
    residual._rms_norm_kernel.device_caches.clear()
    launch._warmed.clear()
    count = compiling.use_disk_cache()
    with compiling.compile_ahead():
        for size in sizes:
            a_kernel(size, "cpu").run()
    return count


def test_processes_compile_and_the_next_start_finds_the_kernels(on_a_gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    compiling.use_disk_cache()
    compiling.expect_compiling()
    [started] = compiling._expected
    count = rehearse((48, 96))
    assert (count.compiled, count.found) == (2, 0)
    assert count.seconds > 0
    assert on_a_gpu == ["_rms_norm_kernel"] * 2
    assert started._is_closed
    assert not compiling._expected
    # Kernels on disk need no compiler process, so none is started.
    monkeypatch.setattr(compiling, "CompilerProcesses", None)
    count = rehearse((48, 96))
    assert (count.compiled, count.found) == (0, 2)


def test_a_kernel_is_compiled_here_if_a_process_fails(on_a_gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling.LineProcess, "ask", lambda *_: {"error": "broken"})
    count = rehearse((48,))
    assert (count.compiled, count.found) == (1, 0)
    assert on_a_gpu == ["_rms_norm_kernel"]
    monkeypatch.setattr(compiling.LineProcess, "ask", _gone)
    assert rehearse((96,)).compiled == 1


def _gone(*_: object) -> None:
    raise ConnectionError("the process exited unexpectedly")


def test_processes_are_not_expected_after_a_warm_start(cache: Path) -> None:
    mark = compiling.mark_of("31B", 90)
    mark.parent.mkdir()
    mark.touch()
    compiling.expect_compiling()
    assert not compiling._expected


@pytest.mark.slow
def test_launchers_are_loaded_one_after_the_other(on_a_gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that load launchers at once may get each other's, because Python sees them as one module."""
    loading, most = [0], []

    def load(kernel: CompiledKernel) -> None:
        loading[0] += 1
        most.append(loading[0])
        time.sleep(0.05)
        loading[0] -= 1

    rehearse((48, 96, 112))  # now they are on disk, so all threads load at the same time
    monkeypatch.setattr(CompiledKernel, "_init_handles", load)
    monkeypatch.setattr(compiling, "_num_workers", lambda: 3)
    rehearse((48, 96, 112))
    assert most == [1, 1, 1]


# Several processes


def test_the_mark_exists_before_the_next_process_continues(on_a_gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    mark, seen = compiling.mark_of("31B"), []

    @contextmanager
    def alone_in(folder: Path) -> Iterator[None]:
        assert folder == Path(triton.knobs.cache.dir)
        try:
            yield
        finally:
            seen.append(mark.exists())

    monkeypatch.setattr(compiling, "_alone_in", alone_in)
    with pytest.raises(ValueError, match="broken"), compiling.compile_ahead(mark):
        raise ValueError("broken")
    with compiling.compile_ahead(mark):
        assert not mark.exists()
    assert seen == [False, True]


COMPILER = """
import sys
from pathlib import Path
from culet.kernels.compiling import _alone_in
with _alone_in(Path(sys.argv[1])):
    print("alone", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def another_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process that holds the folder until it reads a line."""
    command = [sys.executable, "-c", COMPILER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "alone\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("dies", [False, True])
def test_one_process_at_a_time_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, dies: bool
) -> None:
    monkeypatch.setattr(compiling, "_SILENT_WAIT_S", 0.05)
    folder, is_in = tmp_path / "kernels", threading.Event()

    def compile_here() -> None:
        with compiling._alone_in(folder):
            is_in.set()

    with another_process(folder) as process, caplog.at_level("INFO", logger="culet"):
        ours = threading.Thread(target=compile_here)
        ours.start()
        while not caplog.records:  # the test's own time limit ends this
            time.sleep(0.01)
        assert not is_in.is_set()
        assert [record.getMessage() for record in caplog.records] == [
            f"waiting for another process that is compiling kernels into {folder}"
        ]
        if dies:
            process.kill()
        else:
            process.communicate("go on\n")
        assert is_in.wait(120)
        ours.join()
    caplog.clear()
    compile_here()
    time.sleep(0.1)
    assert not caplog.records  # nothing to wait for


def test_a_folder_without_locks_is_used_anyway(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with compiling._alone_in(tmp_path / "file" / "kernels"):
        pass


@pytest.mark.slow
def test_names_on_disk_do_not_depend_on_the_order() -> None:
    """Two kernels that call the same function get the same names on disk, whichever a process compiles first."""
    script = """
import os
from culet.kernels.compiling import use_disk_cache
from culet.kernels.triton.sampling import draw as sampling
use_disk_cache()
for names in (("_draw_kernel", "_logprobs_kernel"), ("_logprobs_kernel", "_draw_kernel")):
    if (child := os.fork()) == 0:  # neither has the names that the other found
        print({name: getattr(sampling, name).cache_key for name in names}, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    first, second = (ast.literal_eval(line) for line in done.stdout.splitlines())
    assert len(set(first.values())) == 2
    assert first == second
