"""Bad input on the command line gives a one-line error, a hint, exit code 1, and no traceback."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from culet import LLM, SamplingParams
from culet.cli.main import run
from culet.errors import BadRequest, ConfigError, ContextTooLong, UserError
from culet.testing.tiny import write_checkpoint


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("good"), "31B")


@pytest.fixture
def checkpoint(good: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint for tests to break."""
    return Path(shutil.copytree(good, tmp_path / "copy"))


def change_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def truncate_config(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text()[:200])


def truncate_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def truncate_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"{}")


def drop_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.language_model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path)


def add_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.language_model.layers.1.mlp.side_proj.weight"] = tensors["model.language_model.norm.weight"].clone()
    save_file(tensors, path)


def bend_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.language_model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, path)


BROKEN_FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing folder": (shutil.rmtree, "no such folder"),
    "no config.json": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "broken JSON": (truncate_config, "not valid JSON"),
    "another architecture": (
        lambda folder: change_config(folder, model_type="llama", architectures=["LlamaForCausalLM"]),
        "'llama'",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
    "truncated weights": (truncate_weights, "model.safetensors"),
    "truncated header": (truncate_header, "model.safetensors"),
    "missing tensor": (drop_tensor, "layers.1.mlp.up_proj.weight"),
    "unexpected tensor": (add_tensor, "layers.1.mlp.side_proj.weight"),
    "misshapen tensor": (bend_tensor, "layers.1.mlp.up_proj.weight"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json"),
    "broken tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer.json"),
}


def check_report(code: int, out: str, err: str, message: str) -> None:
    """Check the common form of all errors."""
    lines = [line for line in err.splitlines() if " INFO " not in line and " WARNING " not in line]
    assert code in (1, 2), err
    assert out == ""
    assert "Traceback" not in err
    assert len(lines) == 2, err
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert lines[1].startswith("hint: ")


@pytest.mark.parametrize("name", BROKEN_FOLDERS)
def test_broken_folders(name: str, checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    breaks, message = BROKEN_FOLDERS[name]
    breaks(checkpoint)
    code = run(["generate", "hello", "--model", str(checkpoint), "--max-tokens", "2"])
    check_report(code, *capfd.readouterr(), message)


REQUESTS: dict[str, tuple[list[str], str]] = {
    "NaN temperature": (["hello", "--temperature", "nan"], "temperature"),
    "negative max_tokens": (["hello", "--max-tokens", "-1"], "max_tokens"),
    "prompt longer than the model": (["stone " * 3000, "--max-tokens", "4"], "the context holds only 2048"),
    "prompt longer than max-model-len": (["stone " * 100, "--max-model-len", "64"], "the context holds only 64"),
    "prompt + max_tokens longer than the model": (["hello", "--max-tokens", "2048"], "output tokens = "),
    "request that can never fit the cache": (
        ["hello", "--max-tokens", "600", "--kv-cache-memory-bytes", "KV"],
        "the context holds",
    ),
    "cache without a page": (["hello", "--kv-cache-memory-bytes", "1000"], "slabs"),
    "max-model-len beyond the cache": (["hello", "--kv-cache-memory-bytes", "KV", "--max-model-len", "2000"], "slabs"),
    "max-model-len without room for an output": (["hello", "--max-model-len", "1"], "max-model-len: got 1"),
    "more tokens than a launch": (["hello", "--max-num-batched-tokens", "65536"], "max-num-batched-tokens: got 65536"),
    "max-model-len beyond the model": (["hello", "--max-model-len", "5000"], "max-model-len: got 5000"),
    "unknown dtype": (["hello", "--dtype", "int3"], "--dtype"),
    "unknown device": (["hello", "--device", "tpu"], "device: got 'tpu'"),
    "unknown backend": (["hello", "--attention-backend", "magic"], "unknown attention backend: 'magic'"),
    "backend that cannot": (["hello", "--device", "cpu", "--attention-backend", "triton"], "triton"),
    "seed out of range": (["hello", "--seed", "-5"], "seed"),
    "stop token beyond the vocabulary": (["hello", "--stop-token-id", "999999"], "stop_token_ids"),
    "too many samples": (["hello", "--n", "64", "--max-num-seqs", "2"], "n: got 64"),
}


def cache_bytes(folder: Path, num_slabs: int) -> int:
    """Return the bytes of a float32 cache of `num_slabs` slabs."""
    from culet.cache.spec import plan_cache
    from culet.models.checkpoint import open_checkpoint

    return num_slabs * plan_cache(open_checkpoint(str(folder)).spec.kv_specs(4)).slab_bytes


@pytest.mark.parametrize("name", REQUESTS)
def test_bad_requests(name: str, good: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments, message = REQUESTS[name]
    arguments = [str(cache_bytes(good, 4)) if argument == "KV" else argument for argument in arguments]
    code = run(["generate", *arguments, "--model", str(good)])
    check_report(code, *capfd.readouterr(), message)


def test_in_a_separate_process(checkpoint: Path) -> None:
    """Run once in a real process, with its exit code and streams."""
    drop_tensor(checkpoint)
    done = subprocess.run(
        [sys.executable, "-m", "culet.cli.main", "generate", "hello", "-m", str(checkpoint)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    check_report(done.returncode, done.stdout, done.stderr, "layers.1.mlp.up_proj.weight")


@pytest.mark.parametrize(
    ("prompts", "error"),
    [
        ([[]], BadRequest),
        ([[1, 2, -1]], BadRequest),
        ([[1, 2, 10**9]], BadRequest),
        ([[1, 2.5]], BadRequest),
        ([[1] * 5000], ContextTooLong),
        ([None], UserError),
        (7, UserError),
        ([[True, False]], BadRequest),
    ],
)
def test_bad_prompts_do_not_affect_others(llm: LLM, prompts: object, error: type[UserError]) -> None:
    """A bad prompt in a batch is reported by its index before any work is done, and the engine keeps working."""
    batch = [[5, 6, 7], *prompts] if isinstance(prompts, list) else prompts
    with pytest.raises(error) as caught:
        llm.generate(batch, SamplingParams(max_tokens=2))
    if isinstance(prompts, list):
        assert "prompt 1" in caught.value.message
    assert not llm.engine.has_work
    assert len(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2


@pytest.fixture(scope="module")
def llm(good: Path) -> LLM:
    return LLM(str(good), device="cpu")


def test_unknown_keyword(good: Path) -> None:
    with pytest.raises(ConfigError, match="max_seq_len") as caught:
        LLM(str(good), max_seq_len=4)
    assert "max_model_len" in caught.value.hint


def test_wrong_number_of_params(llm: LLM) -> None:
    with pytest.raises(BadRequest, match="got 1 for 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()])


@pytest.mark.parametrize("messages", [[{"role": "wizard", "content": "x"}], [{"content": "x"}], [{"role": "user"}]])
def test_bad_messages(llm: LLM, messages: list[dict[str, str]]) -> None:
    with pytest.raises(UserError):
        llm.chat(messages, SamplingParams(max_tokens=2))


def test_a_media_part_is_refused_with_a_reason(llm: LLM) -> None:
    part = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    with pytest.raises(UserError, match="image"):
        llm.chat([{"role": "user", "content": [{"type": "text", "text": "what is this?"}, part]}])


def test_a_closed_llm_says_so(good: Path) -> None:
    with LLM(str(good), device="cpu") as llm:
        pass
    with pytest.raises(ConfigError, match="closed"):
        llm.generate("x")
