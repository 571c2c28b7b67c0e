"""Log-probabilities after every token equal those of transformers' one prefill, for every kind of model and of media.

Each engine computes all prompts at once, in odd chunks, beside prompts without media (trap 4: transformers itself is wrong in
chunks, so it never sees any).
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from culet.engine.engine import Engine
from culet.media.items import MediaItem, MediaKind
from tests.engine.media.media_rig import (
    AUDIO,
    IMAGE,
    SHAPES,
    VOCAB,
    WINDOW,
    Prompt,
    ask,
    check_answer,
    check_scores,
    clip,
    image,
    make,
    oracle,
    oracle_logprobs,
    run,
    table,
    text,
    types_of,
    waveform,
)

LONG = image(5, 8, 3)  # 40 tokens, more than two windows


def sound(shape: str, num_tokens: int, seed: int = 0) -> MediaItem:
    return waveform(num_tokens, seed) if shape == "12B" else clip(4 * num_tokens, seed)


def prompts(shape: str) -> dict[str, Prompt]:
    assert LONG.num_tokens > 2 * WINDOW
    frames = [part for index in range(3) for part in (text(5, 20 + index), image(2, 2, 30 + index, MediaKind.VIDEO))]
    found = {
        "one image": Prompt.of(shape, text(9), image(2, 3, 1), text(6, 1)),
        "an image first": Prompt.of(shape, image(3, 3, 2), text(21, 2)),
        "several": Prompt.of(shape, text(3), image(2, 3, 1), image(1, 7, 4), text(4, 3), image(2, 3, 1), text(2, 4)),
        "longer than the window": Prompt.of(shape, text(18), LONG, text(19, 5)),
        "video": Prompt.of(shape, text(4), *frames, text(5, 6)),
    }
    if shape in ("E4B", "12B"):
        found["image and audio"] = Prompt.of(shape, text(5), image(2, 4, 5), text(3), sound(shape, 21), text(7, 7))
    return found


@functools.cache
def engine_of(shape: str, **settings: Any) -> Engine:
    return make(shape, **settings)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_position(shape: str) -> None:
    """The budget is odd and small, so that prompts are computed in many chunks, mixed with others and with decoding."""
    engine = engine_of(shape, max_num_batched_tokens=LONG.num_tokens + 8 + 3, enable_prefix_caching=False)
    found = prompts(shape)
    texts = {f"text {count}": Prompt.of(shape, text(count, count)) for count in (1, 37)}
    requests = [ask(engine, name, prompt, prompt_logprobs=VOCAB, logprobs=VOCAB) for name, prompt in (found | texts).items()]
    for prompt, told in zip((found | texts).values(), run(engine, *requests), strict=True):
        if len(prompt.token_ids) > 1:
            check_scores(shape, prompt, told)
        check_answer(shape, prompt, told)
    assert engine.stats().counters.encoded_items == len({item.key for prompt in found.values() for item in prompt.items})


@pytest.mark.parametrize("shape", ["E4B", "31B", *(pytest.param(shape, marks=pytest.mark.slow) for shape in SHAPES[1:3])])
def test_answers_without_scores(shape: str) -> None:
    """Without scores, only the last token continues after the last layer with KV, and skipped keys are not stored."""
    engine = engine_of(shape, max_num_batched_tokens=LONG.num_tokens + 8 + 3, enable_prefix_caching=False)
    found = prompts(shape)
    requests = [ask(engine, name, prompt, 6, logprobs=VOCAB) for name, prompt in found.items()]
    for prompt, told in zip(found.values(), run(engine, *requests), strict=True):
        check_answer(shape, prompt, told)


def test_the_oracle_sees_whole_images() -> None:
    """Trap 21: a harness that forgets the token types, or uses a static cache, would compare causal images."""
    masks: list[torch.Tensor] = []
    prompt = prompts("31B")["longer than the window"]
    layer = oracle("31B").model.language_model.layers[0].self_attn

    def capture(module: Any, args: Any, kwargs: Any) -> None:
        masks.append(kwargs["attention_mask"])

    hook = layer.register_forward_pre_hook(capture, with_kwargs=True)
    oracle_logprobs.__wrapped__("31B", prompt)
    hook.remove()
    seen = masks[0][0, 0] if masks[0].dtype == torch.bool else masks[0][0, 0] == 0
    first, last = prompt.media[0].start, prompt.media[0].end - 1
    assert bool(seen[first, last])
    assert not bool(seen[last, first])  # trap 3: the window still ends on the left
    assert not bool(seen[first - 1, first])
    assert int(types_of(prompt).sum()) == LONG.num_tokens


def test_images_of_small_models_are_causal() -> None:
    """Trap 2: token types change nothing on E2B and E4B, and neither does a span that claims to be whole."""
    prompt = prompts("E4B")["several"]
    assert torch.equal(oracle_logprobs("E4B", prompt), oracle_logprobs("E4B", prompt, with_types=False))
    large = prompts("31B")["several"]
    assert (oracle_logprobs("31B", large) - oracle_logprobs("31B", large, with_types=False)).abs().max() > 1e-2
    whole = Prompt(prompt.token_ids, large.media, prompt.items)
    assert all(span.is_whole for span in whole.media)
    engine = engine_of("E4B", max_num_batched_tokens=LONG.num_tokens + 8 + 3, enable_prefix_caching=False)
    (told,) = run(engine, ask(engine, "whole", whole, prompt_logprobs=VOCAB))
    check_scores("E4B", prompt, told)


def test_the_rules_of_12b_differ() -> None:
    """Trap 1: by default 12B does not follow transformers' mask. The settings give different results from the image on."""
    prompt = prompts("12B")["longer than the window"]
    expected = oracle_logprobs("12B", prompt)[:-1]
    (told,) = run(trained := engine_of("12B", image_mask="trained"), ask(trained, "a", prompt, prompt_logprobs=VOCAB))
    first = prompt.media[0].start
    difference = (table(told.scores) - expected).abs().amax(-1)
    assert difference[:first].max() < 1e-4
    assert difference[first:].max() > 1e-2


@pytest.mark.parametrize("shape", ["E4B", "12B", *(pytest.param(shape, marks=pytest.mark.slow) for shape in SHAPES[2:])])
def test_a_placeholder_without_media_is_token_0(shape: str) -> None:
    """Trap 13: in all variants, whichever kind of media it would stand for."""
    ids = [*text(7), IMAGE, *text(3, 1), AUDIO, *text(4, 2), IMAGE]
    zeros = [0 if token_id in (IMAGE, AUDIO) else token_id for token_id in ids]
    engine = engine_of(shape, max_num_batched_tokens=LONG.num_tokens + 8 + 3, enable_prefix_caching=False)
    plain, zero = (Prompt.of(shape, tokens) for tokens in (ids, zeros))
    told, same = run(engine, *(ask(engine, name, p, logprobs=VOCAB) for name, p in (("a", plain), ("b", zero))))
    assert told.tokens == same.tokens
    torch.testing.assert_close(table(told.logprobs[0]), table(same.logprobs[0]), rtol=0, atol=1e-5)
    check_answer(shape, plain, told, with_types=False)
    # Next to real media, and with a prompt's last token.
    mixed = Prompt.of(shape, [IMAGE], text(4), image(2, 3, 1), [IMAGE])
    stray = Prompt.of(shape, [0], text(4), image(2, 3, 1), [0])
    told, same = run(engine, *(ask(engine, name, p, logprobs=VOCAB) for name, p in (("c", mixed), ("d", stray))))
    torch.testing.assert_close(table(told.logprobs[0]), table(same.logprobs[0]), rtol=0, atol=1e-5)


def test_features_are_the_decoders_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 12: the first layer reads the rows as they are, and per-layer embeddings look up token 0 there."""
    engine = engine_of("E4B", max_num_batched_tokens=LONG.num_tokens + 8 + 3, enable_prefix_caching=False)
    model = engine._worker.target.model  # type: ignore[attr-defined]
    prompt = prompts("E4B")["one image"]
    inputs: list[torch.Tensor] = []
    ids: list[torch.Tensor] = []
    first, per_layer = model._layers[0].forward, model._per_layer

    def spied(x_TD: torch.Tensor, *others: Any) -> Any:
        inputs.append(x_TD.clone())
        return first(x_TD, *others)

    def spied_ids(token_ids_T: torch.Tensor, *others: Any) -> Any:
        ids.append(token_ids_T.clone())
        return per_layer(token_ids_T, *others)

    monkeypatch.setattr(model._layers[0], "forward", spied)
    monkeypatch.setattr(model, "_per_layer", spied_ids)
    run(engine, ask(engine, "a", prompt, 1))
    (span,) = prompt.media
    rows = engine._worker.media.store.rows(span.key)  # type: ignore[attr-defined]
    assert torch.equal(inputs[0][span.start : span.end], rows)
    assert ids[0][span.start : span.end].eq(0).all()
    assert ids[0][: span.start].tolist() == list(prompt.token_ids[: span.start])


@pytest.mark.slow
@pytest.mark.parametrize("budget", [48, 50, 57, 64, 97, 400])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_position_in_many_chunks(shape: str, budget: int) -> None:
    engine = make(shape, max_num_batched_tokens=budget, max_num_seqs=8, enable_prefix_caching=False)
    found = prompts(shape)
    for scored in ({"prompt_logprobs": VOCAB}, {}):
        requests = [ask(engine, name, prompt, 5, logprobs=VOCAB, **scored) for name, prompt in found.items()]
        for prompt, told in zip(found.values(), run(engine, *requests), strict=True):
            check_answer(shape, prompt, told)
            if scored:
                check_scores(shape, prompt, told)
