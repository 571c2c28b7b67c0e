"""The settings that turn kinds of media off, and the size of their cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from culet.config import build_config
from culet.engine.resolve import _resolve_media
from culet.errors import ConfigError


def test_every_kind_is_on_by_default():
    media = build_config({}).media
    assert media.limits == {"image": None, "video": None, "audio": None}
    assert media.kinds == {"image", "video", "audio"}


@pytest.mark.parametrize("value", ['{"image": 4, "audio": 0}', {"image": 4, "audio": 0}])
def test_limits(value):
    media = build_config({"limit_mm_per_prompt": value}).media
    assert media.limits == {"image": 4, "video": None, "audio": 0}
    assert media.kinds == {"image", "video"}


def test_language_model_only_turns_all_off():
    media = build_config({"language_model_only": True, "limit_mm_per_prompt": '{"image": 4}'}).media
    assert media.limits == {"image": 0, "video": 0, "audio": 0}
    assert media.kinds == frozenset()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("image=4", "not valid JSON"),
        ("[4]", "expected a JSON object"),
        ('{"picture": 4}', "unknown kind 'picture'"),
        ('{"image": -1}', "image: got -1"),
        ('{"image": true}', "image: got True"),
        ('{"image": {"count": 1}}', "expected a whole number"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_bad_limits(value, message):
    with pytest.raises(ConfigError, match="limit-mm-per-prompt") as caught:
        build_config({"limit_mm_per_prompt": value})
    assert message in str(caught.value)
    assert caught.value.hint


def test_a_small_gpu_caches_fewer_features(monkeypatch: pytest.MonkeyPatch) -> None:
    def cached(gib: int, **settings: Any) -> int:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, gib << 30))
        return _resolve_media(build_config({"model": "built-in"} | settings), torch.device("cuda")).media_cache_memory_bytes

    assert cached(80) == 512 << 20
    assert cached(24) == 128 << 20
    assert cached(24, media_cache_memory_bytes=1 << 20) == 1 << 20
    assert cached(24, media_cache_memory_bytes=600 << 20) == 600 << 20
