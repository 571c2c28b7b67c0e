"""Which engine gets a request, and what the router knows about the engines' caches."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from culet.cache.arena import Arena
from culet.cache.changes import PointStored
from culet.cache.content import UNIT, PrefixContent
from culet.cache.mirror import Overlap, PrefixMirror
from culet.cache.prefix import PrefixCache
from culet.config import Config, ModelConfig, ParallelConfig, build_config
from culet.engine.resolve import given_settings, resolve_device
from culet.errors import ConfigError
from culet.scheduler.stats import Counters, SchedulerStats
from culet.serve.engines.placement import places, visible_gpus
from culet.serve.engines.routing import Candidate, ranked
from culet.serve.engines.totals import total
from culet.serve.process.wire import Stats
from culet.types import MediaSpan, PageTable
from tests.engine.scheduler.drive import make_layout


def best(*candidates: Candidate, prompt_len: int = 100, num_new: int = 1) -> int:
    return ranked(candidates, prompt_len, num_new)[0]


def test_a_prefix_wins_over_a_little_load() -> None:
    assert best(Candidate(0, 16, Overlap()), Candidate(4, 16, Overlap(80))) == 1


def test_a_prefix_does_not_win_over_an_idle_engine_if_its_own_has_a_long_queue() -> None:
    assert best(Candidate(0, 16, Overlap()), Candidate(40, 16, Overlap(80))) == 0
    assert best(Candidate(0, 16, Overlap()), Candidate(5, 16, Overlap(80))) == 0
    assert best(Candidate(0, 64, Overlap()), Candidate(16, 64, Overlap(80))) == 1  # a quarter of its slots
    assert best(Candidate(0, 64, Overlap()), Candidate(17, 64, Overlap(80))) == 0


def test_a_request_does_not_wait_for_a_prefix_if_another_engine_has_room() -> None:
    assert best(Candidate(13, 16, Overlap()), Candidate(16, 16, Overlap(80))) == 0
    assert best(Candidate(16, 16, Overlap()), Candidate(17, 16, Overlap(80))) == 1  # it waits everywhere
    assert best(Candidate(11, 16, Overlap()), Candidate(13, 16, Overlap(80)), num_new=4) == 0  # all samples count
    assert best(Candidate(13, 16, Overlap()), Candidate(14, 16, Overlap(80)), num_new=4) == 1


def test_the_longer_prefix_wins_then_the_known_pages_then_the_load() -> None:
    assert best(Candidate(0, 16, Overlap(40)), Candidate(1, 16, Overlap(80))) == 1
    assert best(Candidate(0, 16, Overlap(400, 400)), Candidate(1, 16, Overlap(400, 800)), prompt_len=1000) == 1
    assert best(Candidate(2, 16, Overlap(40)), Candidate(1, 16, Overlap(40))) == 1
    assert best(Candidate(1, 16, Overlap(), 9), Candidate(1, 16, Overlap(), 5)) == 1


def test_a_few_shared_tokens_do_not_attract_every_conversation() -> None:
    assert best(Candidate(1, 16, Overlap(20, 20)), Candidate(0, 16, Overlap())) == 1
    assert best(Candidate(1, 16, Overlap(0, 60)), Candidate(0, 16, Overlap())) == 1
    assert best(Candidate(1, 16, Overlap(1024)), Candidate(0, 16, Overlap()), prompt_len=100_000) == 0


def test_an_engine_that_may_hang_gets_nothing_if_another_one_answers() -> None:
    silent = Candidate(1, 16, Overlap(80), silent_s=6.0)
    assert best(Candidate(9, 16, Overlap()), silent) == 0
    assert best(Candidate(16, 16, Overlap()), silent) == 0
    assert best(Candidate(9, 16, Overlap(), silent_s=9.0), silent) == 1
    assert best(Candidate(9, 16, Overlap()), Candidate(1, 16, Overlap(80), silent_s=2.0)) == 1  # a long step
    assert best(Candidate(9, 16, Overlap()), Candidate(10, 16, Overlap(80)), silent) == 1  # its load is no measure


def test_the_router_knows_what_the_cache_knows() -> None:
    """The mirror resumes random prompts exactly where the cache does, while points come and go."""
    rng = random.Random(3)
    layout = make_layout((None, 4), (6, 4))
    arena = Arena(300)
    cache = PrefixCache(arena, layout)
    cache.record_changes()
    mirror, late = PrefixMirror(), PrefixMirror()
    stems = [[rng.randrange(40) for _ in range(60)] for _ in range(8)]
    num_hits = num_parted = 0
    for step in range(1500):
        stem = rng.choice(stems)
        tokens = stem[: rng.randrange(1, 60)] + [rng.randrange(40) for _ in range(rng.randrange(1, 6))]
        salt = rng.choice(("", "salt"))
        match = cache.find(tokens, PrefixContent(salt), len(tokens) - 1)
        assert mirror.find(tokens, PrefixContent(salt)) == Overlap(match.resume, match.known)
        num_hits += match.resume > 0
        num_parted += match.point is not None and match.resume < match.point.length
        length = rng.randrange(1, len(tokens) + 1)
        tables = []
        for group in layout.groups:
            cache.make_room(20)
            tables.append(PageTable(0, tuple(arena.take(group.pages_for(length)))))
        cache.insert(tokens, length, PrefixContent(salt), tables, [0, 0])
        for table in tables:
            arena.give_back(table.pages)
        mirror.apply(cache.drain_changes())
        if step == 700:
            snapshot = mirror.snapshot()
            late.apply(snapshot)
            num_sent, num_whole = (sum(lens) for lens in zip(*((len(p.rest), UNIT * p.length) for p in snapshot), strict=True))
            assert num_sent < 0.8 * num_whole, "points share beginnings"
            assert late.find(tokens, PrefixContent(salt)) == mirror.find(tokens, PrefixContent(salt))
    assert num_hits > 500
    assert num_parted > 100
    assert mirror.num_points == cache.num_resume_points < 1000
    cache.clear()
    mirror.apply(cache.drain_changes())
    assert mirror.num_points == 0
    assert mirror.find([1, 0, 1], PrefixContent()) == Overlap()


def test_the_router_compares_media() -> None:
    """A prompt resumes after an image only if it has the same one."""
    spans = [MediaSpan(20, 10, key) for key in (b"a", b"b")]
    units = PrefixContent("", spans[:1]).upto(list(range(40)), 40)
    mirror = PrefixMirror()
    mirror.apply([PointStored(1, 40, 0, "", ((20, 10, b"a"),), 0, 0, bytes(units))])
    prompt = [*range(40), 50]
    assert mirror.find(prompt, PrefixContent("", spans[:1])) == Overlap(40, 40)
    assert mirror.find(prompt, PrefixContent("", spans[1:])) == Overlap(20, 20)


def environments(config: Config, num_engines: int, inherited: Mapping[str, str]) -> list[Mapping[str, str]]:
    return [place.environment for place in places(config, num_engines, inherited)]


def test_each_engine_gets_its_gpus() -> None:
    config = Config()
    assert environments(config, 1, {}) == [{}]
    assert environments(config, 2, {"CUDA_VISIBLE_DEVICES": "4,GPU-9,6"}) == [
        {"CUDA_VISIBLE_DEVICES": "4"},
        {"CUDA_VISIBLE_DEVICES": "GPU-9"},
    ]
    pairs = Config(parallel=ParallelConfig(tensor_parallel_size=2))
    assert environments(pairs, 2, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}) == [
        {"CUDA_VISIBLE_DEVICES": "4,5"},
        {"CUDA_VISIBLE_DEVICES": "6,7"},
    ]
    with pytest.raises(ConfigError, match="2 engines with 2 GPUs each need 4 GPUs, but 3 were found"):
        environments(pairs, 2, {"CUDA_VISIBLE_DEVICES": "4,5,6"})
    with pytest.raises(ConfigError, match="need 4 GPUs, but 3 were found"):
        environments(config, 4, {"CUDA_VISIBLE_DEVICES": "0,1,2"})
    with pytest.raises(ConfigError, match="names a single GPU"):
        environments(Config(model=ModelConfig(device="cuda:1")), 2, {"CUDA_VISIBLE_DEVICES": "0,1"})
    with pytest.raises(ConfigError, match="2 engines with 1 GPUs each need 2 GPUs, but 0 were found"):
        environments(Config(model=ModelConfig(device="cuda")), 2, {"CUDA_VISIBLE_DEVICES": ""})


def test_an_engine_with_a_gpu_does_not_go_on_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs on its GPU or fails, and so do its ranks, which get the settings that were given."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for place in places(build_config({}), 2, {"CUDA_VISIBLE_DEVICES": "4,GPU-9"}):
        assert given_settings(place.config) == {"device": "cuda"}
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", place.environment["CUDA_VISIBLE_DEVICES"])
        with pytest.raises(ConfigError) as caught:
            resolve_device(place.config.model.device)
        named = place.environment["CUDA_VISIBLE_DEVICES"]
        assert caught.value.message == f"device: got 'cuda', but 0 CUDA GPUs were found (CUDA_VISIBLE_DEVICES={named})"
    assert [place.config for place in places(build_config({}), 2, {"CUDA_VISIBLE_DEVICES": ""})] == [build_config({})] * 2
    assert places(build_config({}), 1, {"CUDA_VISIBLE_DEVICES": "4"})[0].config == build_config({})


def test_on_a_cpu_engines_share_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))
    config = Config(model=ModelConfig(device="cpu"))
    assert environments(config, 2, {}) == [{"OMP_NUM_THREADS": "4"}] * 2
    assert environments(config, 16, {}) == [{"OMP_NUM_THREADS": "1"}] * 16
    assert environments(config, 2, {"OMP_NUM_THREADS": "3"}) == [{}, {}]


def test_gpus_are_counted_without_cuda(tmp_path: Path) -> None:
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    assert visible_gpus({}, tmp_path) == ["0", "1"]
    assert visible_gpus({}, tmp_path / "none") == []
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []


def test_reports_add_up() -> None:
    def report(scale: int) -> Stats:
        counters = Counters(steps=scale, drafted_at=[scale] * scale)
        scheduler = SchedulerStats(scale, 0, 10, 5, 1, {"a": scale}, 3, counters)
        return Stats(scheduler, scale, 2 * scale, 100)

    assert total([]) is None
    assert total([report(1)]) == report(1)
    both = total([report(1), report(2)])
    assert both is not None
    assert (both.num_prompt_tokens, both.num_generated_tokens, both.memory_bytes) == (3, 6, 200)
    assert both.scheduler.num_held_pages == {"a": 3}
    assert both.scheduler.counters.drafted_at == [3, 2]
