"""`open_checkpoint`: folders, hub ids, defaults, and everything that can be wrong with a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from culet.errors import CheckpointError, ConfigError
from culet.models.checkpoint import open_checkpoint
from culet.models.folder import read_config
from culet.models.spec import read_spec
from culet.models.variants import VARIANTS
from culet.types import ModelDefaults


def write(folder: Path, config: Any = None, generation: Any = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(VARIANTS["12B"] if config is None else config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_folder(tmp_path: Path):
    checkpoint = open_checkpoint(str(write(tmp_path)))
    assert checkpoint.folder == tmp_path
    assert checkpoint.config == VARIANTS["12B"]
    assert checkpoint.spec == read_spec(VARIANTS["12B"])
    assert checkpoint.defaults == ModelDefaults(eos_token_ids=(1, 106))


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "gemma")
    assert open_checkpoint("~/gemma").folder == tmp_path / "gemma"


def test_what_transformers_writes_is_read(tmp_path: Path):
    import transformers

    config = transformers.Gemma4TextConfig(num_hidden_layers=6, eos_token_id=[1, 106])
    config.save_pretrained(tmp_path)
    generation = transformers.GenerationConfig(do_sample=True, temperature=0.7, top_k=5, top_p=0.5, eos_token_id=[1, 106, 50])
    generation.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    assert len(checkpoint.spec.layers) == 6
    assert checkpoint.defaults == ModelDefaults(temperature=0.7, top_k=5, top_p=0.5, eos_token_ids=(1, 106, 50))


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, {}),
        ({"eos_token_id": [1, 106, 50]}, {"eos_token_ids": (1, 106, 50)}),
        ({"eos_token_id": 7}, {"eos_token_ids": (7,)}),
        ({"eos_token_id": None}, {}),
        ({"do_sample": True, "temperature": 1.0, "top_k": 64, "top_p": 0.95}, {}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
        (
            {"temperature": 0.3, "top_k": 0, "top_p": 0.5, "min_p": 0.1},
            {"temperature": 0.3, "top_k": 0, "top_p": 0.5, "min_p": 0.1},
        ),
        ({"top_k": -1, "repetition_penalty": 1.2}, {"top_k": 0, "repetition_penalty": 1.2}),
        ({"suppress_tokens": [258883, 258882]}, {"suppress_token_ids": (258883, 258882)}),
        ({"suppress_tokens": [5, 262144]}, {"suppress_token_ids": (5,)}),  # the second is outside the vocabulary
    ],
)
def test_sampling_defaults(tmp_path: Path, generation, expected):
    defaults = open_checkpoint(str(write(tmp_path, generation=generation))).defaults
    assert defaults == ModelDefaults(**{"eos_token_ids": (1, 106)} | expected)


@pytest.mark.parametrize(
    ("generation", "words"),
    [
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_p": "high"}, "top_p"),
        ({"do_sample": "yes"}, "do_sample"),
        ({"eos_token_id": "end"}, "eos_token_id"),
        ({"eos_token_id": [1, -2]}, "eos_token_id"),
        ({"suppress_tokens": [True]}, "suppress_tokens"),
        ([1], "JSON object"),
    ],
)
def test_bad_sampling_defaults(tmp_path: Path, generation, words):
    with pytest.raises(CheckpointError, match=words) as caught:
        open_checkpoint(str(write(tmp_path, generation=generation)))
    assert "generation_config.json" in caught.value.message


# Invalid folders


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "./missing", "../missing", "missing", "a/b/c", "", "a" * 5000, "nul\0l", "~nobody/x"]
)
def test_missing_folder(name):
    with pytest.raises(CheckpointError, match=r"no such folder|no model was given") as caught:
        open_checkpoint(name)
    assert caught.value.hint


def test_folder_without_config(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_checkpoint(str(tmp_path))


def test_file_instead_of_folder(tmp_path: Path):
    file = tmp_path / "model.bin"
    file.write_bytes(b"?")
    with pytest.raises(CheckpointError, match="expected a checkpoint folder or a GGUF file"):
        open_checkpoint(str(file))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"model_type": ', "line 1, column 16"),
        (b"", "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[1, 2]", "got list, expected a JSON object"),
        (b"null", "expected a JSON object"),
        (b'{"model_type": "llama"}', "model_type: got 'llama'"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_broken_config(tmp_path: Path, content, words):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(tmp_path))
    assert words in caught.value.message
    assert "\n" not in caught.value.message


def test_config_that_is_a_folder(tmp_path: Path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_checkpoint(str(tmp_path))


def test_revision_of_a_folder_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="revision"):
        open_checkpoint(str(write(tmp_path)), revision="main")


# The hub


def cached_model(hub: Path, config: Any) -> Path:
    """Return a model in the hub's cache, as if it had been downloaded."""
    folder = hub / "models--google--gemma-4-tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    return write(snapshot, config)


def test_offline_hub_serves_what_was_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    snapshot = cached_model(tmp_path, VARIANTS["31B"])
    assert open_checkpoint("google/gemma-4-tiny").folder.resolve() == snapshot.resolve()
    assert read_config("google/gemma-4-tiny") == VARIANTS["31B"]


def test_offline_hub_without_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE") as caught:
        open_checkpoint("google/gemma-4-31B-it")
    assert caught.value.hint


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("RepositoryNotFoundError", "neither a local folder nor a model on the Hub"),
        ("GatedRepoError", "account"),
        ("RevisionNotFoundError", "revision 'v9'"),
        ("LocalEntryNotFoundError", "cannot be reached"),
        ("HfHubHTTPError", "the download from the Hub failed"),
    ],
)
def test_errors_of_the_hub(monkeypatch: pytest.MonkeyPatch, name, words):
    import httpx
    import huggingface_hub

    kind = getattr(huggingface_hub.errors, name)
    response = httpx.Response(404, request=httpx.Request("GET", "https://hub.invalid"))

    def fail(*_: object, **__: object) -> None:
        raise (
            kind("it failed\nwith many\nlines")
            if name == "LocalEntryNotFoundError"
            else kind("it failed\nlines", response=response)
        )

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(CheckpointError, match=words) as caught:
        open_checkpoint("google/gemma-4-31B-it", revision="v9")
    assert "\n" not in caught.value.message


def test_any_other_failure_of_the_network(monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub

    def fail(*_: object, **__: object) -> None:
        raise ConnectionResetError("peer went away")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match="peer went away"):
        open_checkpoint("google/gemma-4-31B-it")


# Only config.json


def test_read_config_of_folder_and_file(tmp_path: Path):
    write(tmp_path)
    assert read_config(str(tmp_path)) == read_config(str(tmp_path / "config.json")) == VARIANTS["12B"]
