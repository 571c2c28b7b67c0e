"""Media across turns, samples, preemptions and cancels: what is computed again, and what is given back."""

from __future__ import annotations

import functools
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from culet.engine.engine import Engine
from culet.errors import BadRequest, ContextTooLong
from culet.scheduler import sequence
from culet.types import StructuredOutputs
from tests.engine.llm.oracle import folder_of as folder_with_tokenizer
from tests.engine.media.media_rig import (
    AUDIO,
    IMAGE,
    SHAPES,
    VIDEO,
    VOCAB,
    Prompt,
    Told,
    ask,
    check_answer,
    check_scores,
    clip,
    folder_of,
    image,
    make,
    note,
    oracle_logprobs,
    run,
    table,
    text,
)

CAT, DOG = image(3, 7, 1), image(3, 7, 2)  # 21 tokens each


@functools.cache
def engine_of(shape: str, **settings: Any) -> Engine:
    return make(shape, **settings)


def encoded(engine: Engine) -> int:
    return engine.stats().counters.encoded_items


def computed(engine: Engine) -> int:
    return engine.stats().counters.step_tokens


def test_a_conversation_of_twenty_turns() -> None:
    """From the second turn on, only new tokens are computed, and no image is encoded twice."""
    engine = make("31B", max_model_len=1024)
    prompt = Prompt.of("31B", text(12), CAT, text(20, 1))
    (told,) = run(engine, ask(engine, "0", prompt, 5, logprobs=VOCAB))
    check_answer("31B", prompt, told)
    for turn in range(1, 20):
        before, known = computed(engine), len(prompt.token_ids) + 4  # the last token of an answer has no KV
        prompt = prompt.then(*told.tokens[0], *text(7, 10 + turn))
        (told,) = run(engine, ask(engine, str(turn), prompt, 5))
        assert told.num_cached == known
        assert computed(engine) - before == len(prompt.token_ids) - known + 4
    check_answer("31B", prompt, told)
    assert encoded(engine) == 1


@pytest.mark.parametrize("shape", ["E4B", "12B", *(pytest.param(shape, marks=pytest.mark.slow) for shape in SHAPES[2:])])
def test_the_second_turn(shape: str) -> None:
    """Trap 15: the same image hits, another one with the same tokens does not. Both answers are exact."""
    engine = engine_of(shape)
    first, other = (Prompt.of(shape, text(9), one, text(25, 1)) for one in (CAT, DOG))
    before = encoded(engine)
    (told,) = run(engine, ask(engine, "a", first, 3))
    second = first.then(*told.tokens[0], *text(6, 2))
    (told,) = run(engine, ask(engine, "b", second, 4, logprobs=VOCAB))
    assert told.num_cached == len(first.token_ids) + 2
    check_answer(shape, second, told)
    (told,) = run(engine, ask(engine, "c", other, 4, logprobs=VOCAB))
    assert told.num_cached <= other.media[0].start
    check_answer(shape, other, told)
    assert encoded(engine) - before == 2


def test_nothing_resumes_inside_an_image() -> None:
    """A prompt that ends with an image is computed again from its start. A longer one continues after it."""
    engine = engine_of("31B")
    prompt = Prompt.of("31B", text(11, 3), CAT)
    ending = Prompt(prompt.token_ids[:-1], prompt.media, prompt.items)  # without the closing token
    for name in "ab":
        (told,) = run(engine, ask(engine, name, ending, 3, logprobs=VOCAB))
        assert told.num_cached <= ending.media[0].start
        check_answer("31B", ending, told)
    longer = prompt.then(*text(5, 4))
    (told,) = run(engine, ask(engine, "c", longer, 3, logprobs=VOCAB))
    assert told.num_cached == ending.media[0].end
    check_answer("31B", longer, told)


@pytest.mark.parametrize("shape", ["12B", pytest.param("E4B", marks=pytest.mark.slow)])
def test_samples_share_a_prompt(shape: str) -> None:
    engine = engine_of(shape)
    before = encoded(engine)
    prompt = Prompt.of(shape, text(5, 8), image(2, 4, 9), text(4))
    (told,) = run(engine, ask(engine, "a", prompt, 5, n=3, temperature=2.0, top_k=0, top_p=1.0, logprobs=VOCAB))
    assert len({tuple(tokens) for tokens in told.tokens.values()}) > 1
    assert encoded(engine) - before == 1
    (again,) = run(engine, ask(engine, "b", prompt, 5, n=3, temperature=2.0, top_k=0, top_p=1.0))
    assert again.tokens == told.tokens
    for sample in range(3):
        one = Prompt(prompt.token_ids, prompt.media, prompt.items).then(*told.tokens[sample])
        (scored,) = run(engine, ask(engine, f"scored {sample}", one, 1, prompt_logprobs=VOCAB))
        check_scores(shape, one, scored)
        torch.testing.assert_close(table(scored.scores)[-5:], table(told.logprobs[sample]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("is_parked", [False, True])
@pytest.mark.parametrize("shape", ["26B-A4B", pytest.param("E4B", marks=pytest.mark.slow)])
def test_after_preemption(shape: str, is_parked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences that lose their pages are computed again. Their features may be gone by then, and are encoded again.

    Those that are parked need no features any more.
    """
    monkeypatch.setattr(sequence, "MIN_PARKED", 1)
    room_for_one = CAT.num_tokens * 80 * 4
    engine = make(shape, max_num_seqs=4, enable_prefix_caching=False, media_cache_memory_bytes=room_for_one)
    prompts = [Prompt.of(shape, text(9, seed), one, text(13, seed)) for seed, one in enumerate((CAT, DOG, CAT))]
    told = [Told({}, {}, [], {}) for _ in prompts]
    num_encoded = 0  # before the preemption
    for number, prompt in enumerate(prompts):
        engine.add(ask(engine, str(number), prompt, 12, logprobs=VOCAB))
    while engine.has_work:
        for delta in engine.step():
            note(told[int(delta.request_id)], delta)
        if engine.stats().counters.preemptions == 0 and all(one.tokens for one in told):
            num_encoded = encoded(engine)
            for seq in list(engine._scheduler._running):
                assert not is_parked or seq.park(engine._scheduler.page_allocator)
                engine._scheduler._preempt(seq)
    for prompt, one in zip(prompts, told, strict=True):
        assert len(one.tokens[0]) == 12
        check_answer(shape, prompt, one)
    assert engine.stats().counters.preemptions == 3
    assert engine.stats().counters.restored == (3 if is_parked else 0)
    assert encoded(engine) - num_encoded == (0 if is_parked else 2)


@pytest.mark.parametrize("shape", ["31B", pytest.param("12B", marks=pytest.mark.slow)])
def test_parked_before_and_between_images(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt goes on after the images that were computed. Only the others are encoded afterwards."""
    monkeypatch.setattr(sequence, "MIN_PARKED", 1)
    engine = make(shape, max_num_batched_tokens=40, enable_prefix_caching=False)
    prompt = Prompt.of(shape, text(19), CAT, text(30, 1), DOG, text(8, 2))
    told, scheduler, lengths = Told({}, {}, [], {}), engine._scheduler, set[int]()
    engine.add(ask(engine, "a", prompt, 6, logprobs=VOCAB))
    while engine.has_work:
        for delta in engine.step():
            note(told, delta)
        for seq in list(scheduler._running):
            if seq.num_computed not in lengths and seq.park(scheduler.page_allocator):
                lengths.add(seq.num_computed)
                scheduler._preempt(seq)
    check_answer(shape, prompt, told)
    counters = engine.stats().counters
    assert counters.restored == len(lengths) > 6
    assert encoded(engine) == 2
    assert counters.step_tokens == len(prompt.token_ids) + 6 - 1


def test_a_placeholder_that_the_model_draws_is_no_image() -> None:
    """It is embedded as token 0, also after a preemption, and nothing is encoded for it."""
    engine = make("E4B", max_num_seqs=2, enable_prefix_caching=False)
    prompt = Prompt.of("E4B", text(9), CAT, text(3))
    force: dict[str, Any] = {"logprobs": VOCAB, "logit_bias": {IMAGE: 100.0}}
    (undisturbed,) = run(engine, ask(engine, "a", prompt, 8, **force))
    assert undisturbed.tokens[0] == [IMAGE] * 8
    told = Told({}, {}, [], {})
    engine.add(ask(engine, "b", prompt, 8, **force))
    while engine.has_work:
        for delta in engine.step():
            note(told, delta)
        if engine.stats().counters.preemptions == 0 and len(told.tokens.get(0, ())) >= 4:
            for seq in list(engine._scheduler._running):
                engine._scheduler._preempt(seq)
    assert engine.stats().counters.preemptions == 1
    torch.testing.assert_close(table(told.logprobs[0]), table(undisturbed.logprobs[0]), rtol=0, atol=1e-4)
    assert encoded(engine) == 1


@pytest.mark.parametrize("shape", ["31B", "E4B"])
@pytest.mark.parametrize("kind", [IMAGE, VIDEO, AUDIO])
def test_a_placeholder_that_the_model_draws_is_token_0(shape: str, kind: int) -> None:
    """Trap 13: as transformers computes it. So the next turn, in whose prompt it is, reuses its KV."""
    engine = make(shape)
    prompt = Prompt.of(shape, text(15))
    (told,) = run(engine, ask(engine, "a", prompt, 6, logit_bias={kind: 100.0}))
    assert told.tokens[0] == [kind] * 6
    turn = prompt.then(*told.tokens[0], *text(7, 5))
    (again,) = run(engine, ask(engine, "b", turn, 3, logprobs=VOCAB))
    assert again.num_cached == len(prompt.token_ids) + 5
    check_answer(shape, turn, again, with_types=False)


@pytest.mark.slow
def test_an_fp8_cache() -> None:
    """Chunks do not change a result, because a key is rounded whether or not it passes through a page."""
    prompt = Prompt.of("31B", text(19), CAT, text(17, 1), DOG, text(3))
    results = []
    for budget in (8 + 24, 400):
        engine = make("31B", kv_cache_dtype="fp8", max_num_batched_tokens=budget)
        (told,) = run(engine, ask(engine, "a", prompt, 5, logprobs=VOCAB, prompt_logprobs=VOCAB))
        results.append(table([*told.scores, *told.logprobs[0]]))
    torch.testing.assert_close(*results, rtol=0, atol=2e-2)
    exact = oracle_logprobs("31B", prompt)[:-1]
    assert (results[0][: len(exact)] - exact).abs().max() > 2e-2, "the cache is not rounded"


def test_a_grammar(tmp_path: Path) -> None:
    folder = shutil.copytree(folder_of("31B"), tmp_path / "with-tokenizer")
    for name in ("tokenizer.json", "generation_config.json"):
        shutil.copy(folder_with_tokenizer("31B") / name, folder / name)
    engine = make("31B", model=str(folder), skip_tokenizer_init=False)
    prompt = Prompt.of("31B", text(6), CAT, text(5))
    request = ask(engine, "a", prompt, 6, structured_outputs=StructuredOutputs(regex="(abc|bca)+"))
    engine.check_grammar(request)
    (told,) = run(engine, request)
    assert set(engine.tokenizer.decode(told.tokens[0])) <= set("abc")


def test_what_is_refused() -> None:
    engine = make("31B", max_num_batched_tokens=8 + 20)
    with pytest.raises(ContextTooLong, match="media: 22 tokens must be computed in one step") as caught:
        engine.add(ask(engine, "a", Prompt.of("31B", text(3), image(2, 11), text(3))))
    assert "--max-num-batched-tokens" in caught.value.hint
    plain = make("31B", language_model_only=True)
    assert plain._worker.media.store is None  # type: ignore[attr-defined]
    with pytest.raises(BadRequest, match="no tower"):
        plain.add(ask(plain, "a", Prompt.of("31B", text(3), CAT, text(3))))
    sees = make("E4B", limit_mm_per_prompt='{"audio": 0}')
    with pytest.raises(BadRequest, match="no tower for audio"):
        sees.add(ask(sees, "a", Prompt.of("E4B", text(3), clip(8), text(3))))


@pytest.mark.parametrize("shape", ["31B", pytest.param("E4B", marks=pytest.mark.slow)])
def test_cancels_give_everything_back(shape: str) -> None:
    chance = random.Random(5)
    engine = make(shape, media_cache_memory_bytes=60 * 80 * 4, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256)
    told: dict[str, Told] = {}
    for number in range(60):
        if chance.random() < 0.6:
            images = [image(2, chance.randint(2, 6), chance.randint(0, 3)) for _ in range(chance.randint(0, 2))]
            parts = [part for one in images for part in (text(chance.randint(1, 9)), one)]
            prompt = Prompt.of(shape, *parts, text(chance.randint(1, 20), chance.randint(0, 3)))
            told[str(number)] = Told({}, {}, [], {})
            engine.add(ask(engine, str(number), prompt, chance.randint(1, 6), n=chance.choice((1, 2))))
        for name in told:
            if chance.random() < 0.05:
                engine.cancel(name)
        for delta in engine.step():
            note(told[delta.request_id], delta)
    while engine.has_work:
        engine.step()
    features, arena = engine._scheduler.features, engine._scheduler.page_allocator.arena
    store = engine._worker.media.store  # type: ignore[attr-defined]
    assert features is not None
    assert features.num_requests == features.num_item_bytes == 0
    assert store.num_bytes == features.num_bytes <= features.max_bytes
    assert store.keys == features._held.keys()
    assert arena.num_free + arena.num_reclaimable == arena.num_pages
    assert sorted(engine._scheduler._free_slots) == list(range(4))
    assert engine.stats().counters.cancelled > 5
