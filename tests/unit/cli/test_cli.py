"""The command line's behaviour: help, versions, flags from config fields, errors and exit codes. No test here loads a model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence

import click
import pytest

from culet import __version__, env
from culet.cli import main as main_module
from culet.cli.main import COMMANDS, cli, run
from culet.cli.vllm_flags import ADVICE
from culet.config import build_config, config_fields
from culet.errors import BadRequest, CheckpointError, ConfigError, InternalError, QueueFull, WorkerDied
from culet.registry import load


def culet(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "culet.cli.main", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )


def imported(arguments: Sequence[str]) -> set[str]:
    """Return the modules that are imported after a command line has run."""
    code = f"import sys; from culet.cli.main import run; run({list(arguments)!r}); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    return set(done.stderr.split())


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["generate", "--help"], ["plan", "--help"], []])
def test_help_needs_no_torch(arguments: list[str]) -> None:
    modules = imported(arguments)
    assert "culet.cli.main" in modules
    assert "torch" not in modules


def test_version_and_help_go_to_stdout() -> None:
    done = culet("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"culet {__version__}\n", "")
    done = culet()
    assert done.returncode == 0
    assert all(name in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", [None, *COMMANDS])
def test_help_opens_with_three_examples(name: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*([name] if name else []), "--help"]) == 0
    head = capsys.readouterr().out.split("Options:")[0]
    examples = [
        line for line in head.splitlines() if line.strip().startswith(("culet", "cat", "echo")) and line.startswith("    ")
    ]
    assert len(examples) >= 3, head


def test_every_config_field_is_a_flag_with_its_doc() -> None:
    command = load(COMMANDS["generate"])
    options = {option.name: option for option in command.params if isinstance(option, click.Option)}
    for name, (_, entry) in config_fields().items():
        assert options[name].help.startswith(entry.metadata["doc"])
        assert options[name].default is None, "a default would hide whether the user set it"
    flags = {flag for option in options.values() for flag in option.opts + option.secondary_opts}
    vllm = {"--model", "--dtype", "--max-model-len", "--gpu-memory-utilization", "--max-num-seqs", "--max-num-batched-tokens"}
    vllm |= {
        "--tensor-parallel-size",
        "--kv-cache-dtype",
        "--enable-prefix-caching",
        "--no-enable-prefix-caching",
        "--revision",
    }
    assert vllm <= flags


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["serv"], "No such command 'serv'. Did you mean 'serve'?"),
        (["generate", "hello", "--no-such-flag"], "No such option"),
        (["generate", "hello", "--dtype", "int3"], "Invalid value for '--dtype': 'int3'"),
        (["generate", "hello", "--max-tokens", "many"], "Invalid value for '--max-tokens': 'many'"),
        (["generate", "hello", "--max-tokens", "-3", "-m", "x"], "max_tokens: got -3"),
        (["generate", "hello", "--max-tokens", "0", "-m", "x"], "max_tokens: got 0"),
        (["generate", "hello", "--temperature", "nan", "-m", "x"], "temperature: got nan"),
        (["generate", "hello", "--temperature", "-1", "-m", "x"], "temperature: got -1.0"),
        (["generate", "hello", "--top-p", "-0.5", "-m", "x"], "top_p: got -0.5"),
        (["generate", "hello", "--max-num-seqs", "0", "-m", "x"], "max-num-seqs: got 0"),
        (["generate", "hello", "--gpu-memory-utilization", "nan", "-m", "x"], "gpu-memory-utilization: got nan"),
        (["generate", "hello", "--swap-space", "-1", "-m", "x"], "swap-space: got -1.0, expected a number of GiB"),
        (["generate", "hello", "--swap-space", "inf", "-m", "x"], "swap-space: got inf"),
        (["generate", "hello", "--tensor-parallel-size", "0", "-m", "x"], "tensor-parallel-size: got 0"),
        (["chat", "--n", "2", "-m", "x"], "n: got 2"),
    ],
)
def test_mistakes_of_users(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert message in lines[0]
    assert lines[0].startswith("error: ")
    assert len(lines) == 2, "one line and a hint"
    assert lines[1].startswith("hint: ")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--lora-modules", "a=b"], "hint: Culet does not support LoRA adapters"),
        (["--cpu-offload-gb=4"], "hint: Culet does not move weights"),
        (["built-in", "-tp", "2"], "hint: use --tensor-parallel-size"),
        (["-dcp", "2"], "hint: use --tensor-parallel-size, which also divides the cache"),
        (["--decode-context-parallel-size=2"], "hint: use --tensor-parallel-size, which also divides the cache"),
        (["--data-parallel-size-local", "2"], "hint: use --data-parallel-size, which counts the engines of this machine"),
        (["--data-parallel-rank", "0"], "hint: omit it: --data-parallel-size starts all engines"),
        (["--data-parallel-backend", "ray"], "hint: omit it: --data-parallel-size starts all engines"),
        (["--data-parallel-address", "10.0.0.1"], "hint: an engine of Culet runs on one machine"),
        (["--nnodes", "2"], "hint: an engine of Culet runs on one machine"),
        (["--node-rank", "1"], "hint: an engine of Culet runs on one machine"),
        (["--master-addr", "10.0.0.1"], "hint: an engine of Culet runs on one machine"),
        (["-O3"], "hint: omit it: CUDA graphs need no setting"),
        (["--speculative-config.method", "mtp"], "hint: pass one JSON object to --speculative-config"),
    ],
)
def test_flags_of_vllm_that_are_missing(arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", *arguments]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("Culet does not have this flag of vLLM")
    assert second.startswith(hint)


def test_advice_is_not_for_flags_that_exist() -> None:
    serve = load(COMMANDS["serve"])
    existing = {flag for option in serve.params for flag in option.opts + option.secondary_opts}
    assert not existing & ADVICE.keys()
    named = {flag for advice in ADVICE.values() for flag in re.findall(r"--[a-z-]+", advice)}
    assert named <= existing


def test_a_misspelt_flag_is_corrected(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--max_model_len", "4096"]) == 2
    assert "'--max-model-len'" in capsys.readouterr().err


def test_usage_errors_have_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    run(["generate", "hello", "--dtype", "int3"])
    assert "hint: see `culet generate --help`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (click.UsageError("no such option"), 2),
        (BadRequest("bad", hint="good"), 2),
        (ConfigError("first\nsecond"), 2),
        (CheckpointError("no model"), 1),
        (QueueFull("busy"), 1),
        (InternalError("fault"), 3),
        (WorkerDied("died"), 2),
        (RuntimeError("unexpected"), 3),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(main_module.cli, "main", fail)
    assert run([]) == code
    err = capsys.readouterr().err
    assert "Traceback" not in err
    if code != 130:
        assert err.startswith("error: ")
        assert len(err.splitlines()) <= 2


def test_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.NO_COLOR.name, "1")
    assert main_module._color() is False
    monkeypatch.delenv(env.NO_COLOR.name)
    assert main_module._color() is None


def test_doctor_reports_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 0
    out, _ = capsys.readouterr()
    report = json.loads(out)
    assert set(report) == {"culet", "packages", "cpu", "gpu", "models", "environment"}
    assert report["culet"]["version"] == __version__
    assert report["packages"]["torch"]
    assert set(report["environment"]) == {variable.name for variable in env.VARIABLES}
    assert not any("failed" in section for section in report.values())
    assert run(["doctor"]) == 0
    text = capsys.readouterr().out
    assert all(f"{section}:" in text for section in report)


def test_doctor_reports_a_section_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from culet.cli import doctor

    def fail() -> dict[str, object]:
        raise OSError("no driver")

    monkeypatch.setattr(doctor, "_gpu", fail)
    report = doctor.examine()
    assert report["gpu"] == {"failed": "OSError: no driver"}
    assert "version" in report["culet"]


def test_build_config_records_what_was_given() -> None:
    config = build_config({"model": "x", "max_num_seqs": 4})
    assert config.given == {"model", "max_num_seqs"}
    assert config.schedule.max_num_seqs == 4
    with pytest.raises(ConfigError, match="unknown setting: 'max_num_seq'") as caught:
        build_config({"max_num_seq": 4})
    assert "max_num_seqs" in caught.value.hint
    with pytest.raises(ConfigError, match="unknown setting: 'data_parallel_size'") as caught:
        build_config({"data_parallel_size": 2})
    assert caught.value.hint.startswith("only `culet serve` has this setting")


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_num_seqs", "8"), ("max_num_seqs", True), ("max_num_seqs", 2.5), ("latent", 1), ("dtype", "int3"), ("device", None)],
)
def test_build_config_refuses_wrong_types(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name.replace("_", "-")):
        build_config({name: value})


def test_commands_are_listed_in_order() -> None:
    assert cli.list_commands(click.Context(cli)) == list(COMMANDS)
