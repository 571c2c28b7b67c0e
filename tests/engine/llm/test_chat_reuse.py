"""Each turn of a growing conversation computes only the last answer and what follows it.

Models without per-layer embeddings begin an answer with an empty thought. The template omits it from past turns, as it does
real thoughts. So the end of a prompt is not a prefix of the next prompt, but the beginning of the model's turn is.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from culet import LLM, SamplingParams
from culet.config import DraftChoice
from culet.engine.jobs import Result
from culet.engine.requests import RESULT_TOKEN, TURN_TOKEN
from culet.testing.tiny import SPECIAL_TOKENS, write_checkpoint
from tests.engine.drafting import dflash_rig, draft_drive
from tests.engine.runner.real_steps import make_prompt
from tests.matrix import matrix

NUM_TURNS = 5
QUESTION = "Why is the sky blue, and who could cut the diamond? Tell me a story about a fox."
# Answers are plain words, because tokens that steer the template would not come back as they were drawn.
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logit_bias=dict.fromkeys(SPECIAL_TOKENS, -100.0))
TOOLS = [{"type": "function", "function": {"name": "weigh", "parameters": {"type": "object", "properties": {}}}}]
BUDGETS = [512, 40]


@pytest.fixture(scope="module", params=BUDGETS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[LLM, LLM]]:
    """The same model with and without prefix reuse. Prompts take one chunk, or chunks a little longer than the window of 32."""
    folder = write_checkpoint(Path(tempfile.mkdtemp(prefix="culet-chat-")), "31B", dtype=torch.float32)
    settings = {"device": "cpu", "dtype": "float32", "max_model_len": 2048, "max_num_seqs": 2}
    settings |= {"kv_cache_memory_bytes": 16 << 20, "max_num_batched_tokens": request.param}
    with LLM(str(folder), **settings) as warm, LLM(str(folder), **settings, enable_prefix_caching=False) as cold:
        yield warm, cold


def last(llm: LLM, result: Result, token: str) -> int:
    """Return the position of the last `token` in the prompt."""
    token_id = llm.engine.tokenizer.token_id(token)
    return max(place for place, each in enumerate(result.prompt_token_ids) if each == token_id)


def ask(pair: tuple[LLM, LLM], messages: list[dict[str, Any]], **options: Any) -> Result:
    """Return the answer, and check that it is the same with and without reuse."""
    warm, cold = pair
    [result], [computed] = warm.chat(messages, PARAMS, **options), cold.chat(messages, PARAMS, **options)
    assert result.token_ids == computed.token_ids
    assert computed.num_cached_tokens == 0
    return result


@matrix({"pair": BUDGETS, "thinking": [True, False]}, fixtures=["pair"])
def test_each_turn_computes_the_last_answer_and_what_follows(pair: tuple[LLM, LLM], thinking: bool) -> None:
    pair[0].engine._scheduler.drop_resume_points()
    messages: list[dict[str, Any]] = []
    reusable = 0
    for turn in range(NUM_TURNS):
        messages.append({"role": "user", "content": f"{turn}: {QUESTION}"})
        result = ask(pair, messages, enable_thinking=thinking)
        if thinking:  # nothing follows the turn's beginning, so that or even an unchanged answer is found
            assert result.num_cached_tokens >= reusable
        else:  # the few tokens that open the turn are found too, if a window reaches back that far
            assert reusable <= result.num_cached_tokens <= reusable + 8
        reusable = last(pair[0], result, TURN_TOKEN)
        messages.append({"role": "assistant", "content": result.text})


@matrix({"pair": BUDGETS, "thinking": [False, True]}, fixtures=["pair"])
def test_tool_results_go_on_from_the_turn_they_belong_to(pair: tuple[LLM, LLM], thinking: bool) -> None:
    """Each turn has two calls, and clients omit thoughts from what they send back."""
    pair[0].engine._scheduler.drop_resume_points()
    options = {"tools": TOOLS, "enable_thinking": thinking}
    messages: list[dict[str, Any]] = []
    reusable = 0
    for turn in range(3):
        messages.append({"role": "user", "content": f"{turn}: {QUESTION}"})
        result = ask(pair, messages, **options)
        assert result.num_cached_tokens >= reusable
        begin = reusable = last(pair[0], result, TURN_TOKEN)
        for call in range(2):
            called = {"id": str(call), "type": "function", "function": {"name": "weigh", "arguments": {"stone": call}}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [called]})
            messages.append({"role": "tool", "tool_call_id": str(call), "content": f"{turn} and {call} carats, by the wheel"})
            result = ask(pair, messages, **options)
            assert result.num_cached_tokens >= reusable
            reusable = last(pair[0], result, RESULT_TOKEN) + 1
            assert (len(result.prompt_token_ids) > reusable) is thinking  # a thought has then been started after the result
        messages.append({"role": "assistant", "content": result.text})
        # A thought before the first call would be gone by now. Without one, everything up to the last result is the same.
        reusable = begin if thinking else reusable


@pytest.mark.parametrize("num_shared", [40, 100, 200, 500, 1000])
def test_the_third_prompt_with_the_same_beginning_recomputes_at_most_16_of_its_tokens(
    pair: tuple[LLM, LLM], num_shared: int
) -> None:
    """Draws are random, with a seed, and every answer is that of the model without reuse."""
    shared, seeded = make_prompt(num_shared), SamplingParams(temperature=1.0, seed=num_shared, max_tokens=4, ignore_eos=True)
    for number in range(3):
        prompt = {"prompt_token_ids": [*shared, *range(200 + number, 230 + number)]}
        [result], [computed] = (llm.generate([prompt], seeded) for llm in pair)
        assert result.token_ids == computed.token_ids
    assert num_shared - 16 <= result.num_cached_tokens <= num_shared


def test_texts_with_the_same_beginning(pair: tuple[LLM, LLM]) -> None:
    shared = "The stone is held to the wheel, and the wheel is older than the stone. " * 6
    for ending in ("A fox saw it.", "A fox asked who could cut the diamond.", "An owl did not."):
        [result], [computed] = (llm.generate([shared + ending], PARAMS) for llm in pair)
        assert result.token_ids == computed.token_ids
    assert result.num_cached_tokens >= len(pair[0].engine.tokenizer.encode(shared.strip())) - 16


def test_the_second_chat_reuses_the_system_turn_of_the_first(pair: tuple[LLM, LLM]) -> None:
    """The system's turn ends with the tools, before the second turn begins."""
    system = {"role": "system", "content": "You cut diamonds. " + "Each stone is held to the wheel until it shines. " * 12}
    results = []
    for question in (QUESTION, "How old is the wheel?"):
        results.append(ask(pair, [system, {"role": "user", "content": question}], tools=TOOLS))
    turn_id = pair[0].engine.tokenizer.token_id(TURN_TOKEN)
    _, user_turn, *_ = [place for place, token_id in enumerate(results[1].prompt_token_ids) if token_id == turn_id]
    assert results[1].num_cached_tokens >= user_turn > 100


def test_where_a_prompt_can_be_resumed(pair: tuple[LLM, LLM]) -> None:
    rules, params = pair[0].engine.rules, SamplingParams()
    turn, result, system = rules.marks.turn_id, rules.marks.result_id, rules.marks.system_ids
    assert turn is not None
    assert result is not None
    for prompt, points in {
        (200, 201, 202): (),
        (turn, 200, 201): (),  # nothing comes before it
        (2, turn, 200, turn, 201, 202): (3,),
        (2, turn, 200, result, 201, turn, 202): (5,),  # a result of an earlier turn
        (2, turn, 200, result, 201, result): (1,),  # a prompt's end is always kept
        (2, turn, 200, result, 201, result, 202): (1, 6),
        (2, turn, *system, 200, turn, 201, turn, 202): (3 + len(system), 5 + len(system)),
        (2, turn, 200, turn, *system, 201, turn, 202): (4 + len(system) + 1,),  # a later system message
        (2, turn, *system, 200): (1,),
    }.items():
        assert rules.make_request("x", prompt, params).resume_lengths == points


# Drafters


def turns(rig: Any, make_request: Any, words: list[int]) -> list[tuple[int, ...]]:
    """Return what is drawn in six turns of a conversation. Each turn omits the last five tokens of the previous prompt."""
    history, drawn = words[:37], []
    for turn in range(6):
        asked = [*history, *words[40 + turn : 49 + turn], 130, 131, 132, 133, 134]
        request = replace(make_request(f"turn{turn}", asked), resume_lengths=(len(asked) - 5,))
        ((_, answer),) = rig.run(request).items()
        drawn.append(tuple(answer))
        history = [*asked[:-5], *answer]
    return drawn


def check_hits(rig: Any) -> None:
    """Check for five hits that compute at most the last answer of 10 tokens and 14 new tokens. The first resumes at 46."""
    counters = rig.scheduler.counters
    assert counters.prefix_hits == 5
    assert 51 + 5 * 20 <= counters.prefix_query_tokens - counters.prefix_hit_tokens <= 51 + 5 * 24
    rig.check_pages()


@pytest.mark.parametrize("budget", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_turns_with_an_assistant(tmp_path: Path, budget: int) -> None:
    """The assistant sees one key behind the target's window. Unwritten memory is NaN."""
    target = draft_drive.make_target(tmp_path, "31B")

    def make_request(name: str, prompt: list[int]) -> Any:
        return draft_drive.make_request(name, prompt, draft_drive.greedy(), 10)

    words = make_prompt(60)
    mtp = DraftChoice("mtp", "random:", num_speculative_tokens=3)
    rig = draft_drive.DraftDrive(target, mtp, prefix_caching=True, budget=budget)
    assert turns(rig, make_request, words) == turns(draft_drive.DraftDrive(target, None), make_request, words)
    check_hits(rig)


@pytest.mark.parametrize("budget", [pytest.param(40, marks=pytest.mark.slow), 200])
def test_turns_with_a_drafter_that_has_pages(tmp_path: Path, budget: int) -> None:
    """After a hit, the drafter's blocks are those that a dense oracle computes from all tokens."""
    pair = dflash_rig.make_pair(tmp_path, "31B")

    def make_request(name: str, prompt: list[int]) -> Any:
        return dflash_rig.make_request(name, prompt, 10)

    words = make_prompt(60)
    rig = dflash_rig.Rig(pair, prefix_caching=True, budget=budget)
    assert turns(rig, make_request, words) == turns(dflash_rig.Rig(pair, drafts=False), make_request, words)
    dflash_rig.assert_like_oracle(pair, rig.rounds, at_least=6 * 8)
    check_hits(rig)
