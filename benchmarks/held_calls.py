"""Show that tool calls of `auto` always parse and fit their schemas, and that thinking budgets hold exactly.

The built-in model answers at temperature 1. Questions come from `training/questions/tools.jsonl`, with the tool that fits, more
tools, and random properties in all of them.

    python benchmarks/held_calls.py                      # 2,000 calls for each drafter, 500 budgets (an hour on a slow CPU)
    python benchmarks/held_calls.py --calls 50 --budgets 40

Calls: every call parses, calls a declared tool, and fits its schema. In every eighth batch, the same seeds are run with the
switch off, which must give the same tokens up to each first call. With other seeds, a chi-squared test compares the texts
before the call with the switch on and off.

Budgets: each thought has as many tokens as without a budget, but at most the budget.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import torch

from culet import LLM, SamplingParams
from culet.engine.llm import Result

QUESTIONS = Path(__file__).parents[1] / "training" / "questions" / "tools.jsonl"
DRAFTERS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "mtp": {"method": "mtp", "model": "built-in:assistant", "adaptive": False},
    "dflash": {"method": "dflash", "model": "built-in:dflash", "adaptive": False},
}
BUDGETS = (0, 1, 7, 64)
BATCH = 32
COMPARED = 8  # one batch in this many is also run with the switch off
WORDS = ("stone", "cut", "carat", "colour", "shape", "origin", "price", "count", "polish", "angle", "table", "girdle")
Tool = dict[str, Any]
Check = Callable[[bool, str], None]
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER


def random_schema(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a random schema of a value, using the keywords that a grammar for tool calls enforces."""
    kinds = ["string", "bounded", "pattern", "format", "integer", "range", "multiple", "number", "boolean", "enum", "nullable"]
    kinds += ["combined", "constant"] + ["array", "tuple", "object", "map"] * (depth < 2)
    match chance.choice(kinds):
        case "pattern":
            return {
                "type": "string",
                "pattern": chance.choice(["^[A-Z]{2}-[0-9]{1,4}$", "^(round|oval)", "^\\w+$"]),
                "maxLength": 12,
            }
        case "format":
            return {"type": "string", "format": chance.choice(["date", "date-time", "time", "email", "uuid", "ipv4"])}
        case "range":
            low, kind = chance.randrange(-50, 50), chance.choice(["integer", "number"])
            return {"type": kind, "minimum": low, "exclusiveMaximum": low + chance.choice([2, 0.5, 1000])}
        case "multiple":
            return {"type": "integer", "multipleOf": chance.choice([2, 5, 7]), "minimum": 0}
        case "combined":
            return {"type": ["integer", "string"], "anyOf": [{"minimum": 3, "maxLength": 4}, {"enum": ["red", 1, None]}]}
        case "constant":
            return {"enum": [[1, "two"], {"three": 4, "a key": None}, "five"]}
        case "tuple":
            first = [random_schema(chance, depth + 1), {"type": "boolean"}]
            return {"type": "array", "prefixItems": first, "items": False, "minItems": chance.randrange(3)}
        case "map":
            values = {"type": "integer", "minimum": 0}
            return {"type": "object", "patternProperties": {"^n_": values}, "additionalProperties": False, "maxProperties": 2}
        case "bounded":
            low = chance.randrange(3)
            return {"type": "string", "minLength": low, "maxLength": low + chance.randrange(1, 12)}
        case "enum":
            return {"enum": chance.sample(["red", "green", "blue green", 3, 2.5, True, None], chance.randrange(1, 5))}
        case "nullable":
            return {"anyOf": [{"type": "integer"}, {"type": "null"}]}
        case "array":
            low = chance.randrange(3)
            return {"type": "array", "items": random_schema(chance, depth + 1), "minItems": low, "maxItems": low + 2}
        case "object":
            return random_object(chance, depth + 1)
        case kind:
            return {"type": kind}


def random_object(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    names = chance.sample((*WORDS, "facet count", "a:b"), chance.randrange(1, 4))
    required = [name for name in names if chance.random() < 0.6]
    properties = {name: random_schema(chance, depth) for name in names}
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {**schema, "minProperties": 1} if chance.random() < 0.2 else schema


def random_tools(line: dict[str, Any], chance: random.Random) -> list[Tool]:
    """Return the tools of a question with more properties, and up to two other tools."""
    tools = json.loads(json.dumps(line["tools"]))
    for tool in tools:
        own, more = tool["function"]["parameters"], random_object(chance)
        own["properties"] = more["properties"] | own["properties"]
        own["required"] = [*own.get("required", []), *more["required"]]
        own["additionalProperties"] = False
    for index in range(chance.randrange(3)):
        name = f"{chance.choice(WORDS)}_{index}"
        other = {"name": name, "description": f"Look up a {name}.", "parameters": random_object(chance)}
        tools.append({"type": "function", "function": other})
    return tools


def questions() -> list[dict[str, Any]]:
    """Return the questions that one of their tools fits."""
    lines = [json.loads(line) for line in QUESTIONS.read_text().splitlines()]
    return [line for line in lines if line["expect"]]


def check_calls(result: Result, tools: Sequence[Tool], check: Check) -> int:
    """Check every complete call of an answer. Return their number."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    complete = [call for call in result.tool_calls if call.is_complete]
    for call in complete:
        try:
            jsonschema.validate(json.loads(call.arguments_json), schemas[call.name], format_checker=FORMATS)
        except (KeyError, ValueError, jsonschema.ValidationError) as error:
            check(False, f"{call.name}{call.arguments_json}: {type(error).__name__}")
    is_cut = result.finish_reason == "length"
    check("<|tool_call>" not in result.text or is_cut, f"a malformed call: {result.text!r}")
    return len(complete)


def rounds(seed: int) -> Iterator[tuple[list[Tool], list[Any], list[SamplingParams], bool]]:
    """Yield (tools, chats, settings, whether to think), each with new random tools."""
    chance, lines = random.Random(seed), questions()
    for number in itertools.count():
        line, first = lines[number % len(lines)], seed + number * BATCH
        settings = [SamplingParams(temperature=1.0, max_tokens=96, seed=first + place) for place in range(BATCH)]
        yield random_tools(line, chance), [line["messages"]] * BATCH, settings, number % 12 == 8


def show_calls(llm: LLM, num_wanted: int, check: Check) -> dict[str, Any]:
    """Make calls until there are enough, and compare each answer with that of the switch off up to the first call."""
    opens = llm.engine.tokenizer.token_id("<|tool_call>")
    counts: Counter[str] = Counter()
    for number, (tools, chats, settings, thinks) in enumerate(rounds(seed=1)):
        held = llm.chat(chats, settings, tools=tools, enable_thinking=thinks, use_tqdm=False)
        num_calls = [check_calls(result, tools, check) for result in held]
        counts["answers"] += len(held)
        counts["calls"] += sum(num_calls)
        counts["answers with several calls"] += sum(count > 1 for count in num_calls)
        if number % COMPARED == 0:
            free = llm.chat(chats, settings, tools=tools, enable_thinking=thinks, constrain_tool_calls=False, use_tqdm=False)
            counts["compared"] += len(free)
            for ours, theirs in zip(held, free, strict=True):
                is_same = before_call(ours.token_ids, opens) == before_call(theirs.token_ids, opens)
                check(is_same, f"the text before the call changed: {ours.token_ids} and {theirs.token_ids}")
                counts["wrong calls with the switch off"] += not fits(theirs, tools)
        if counts["calls"] >= num_wanted:
            return dict(counts)
    raise AssertionError("there are always more rounds")


def fits(result: Result, tools: Sequence[Tool]) -> bool:
    faults: list[str] = []
    check_calls(result, tools, lambda is_right, why: None if is_right else faults.append(why))
    return not faults


def before_call(token_ids: Sequence[int], opens: int | None) -> tuple[int, ...]:
    """Return the tokens before the first call, or all if there is none."""
    return tuple(token_ids[: token_ids.index(opens)]) if opens in token_ids else tuple(token_ids)


def show_distribution(llm: LLM, num_samples: int) -> dict[str, Any]:
    """Compare the texts before the call with the switch on and off, with different seeds, by a chi-squared test."""
    opens = llm.engine.tokenizer.token_id("<|tool_call>")
    counts: list[Counter[Any]] = [Counter(), Counter()]
    chance = random.Random(5)
    for place, line in enumerate(questions()[::7][:8]):
        tools = random_tools(line, chance)
        for side, is_on in enumerate((True, False)):
            for begin in range(0, num_samples // 8, BATCH):
                first = 10**6 * (1 + side) + 10**4 * place + begin
                settings = [SamplingParams(temperature=1.0, max_tokens=48, seed=first + index) for index in range(BATCH)]
                results = llm.chat(
                    [line["messages"]] * BATCH,
                    settings,
                    tools=tools,
                    enable_thinking=place % 2 == 0,
                    constrain_tool_calls=is_on,
                    use_tqdm=False,
                )
                # Whole texts are too many kinds, so their first tokens and their length stand for them.
                for result in results:
                    before = before_call(result.token_ids, opens)
                    counts[side][place, before[:6], len(before) // 8, opens in result.token_ids] += 1
    statistic, freedom, p_value = chi_squared(*counts)
    return {"samples": sum(map(Counter.total, counts)), "chi squared": statistic, "degrees": freedom, "p": p_value}


def chi_squared(ours: Counter[Any], theirs: Counter[Any], least: int = 10) -> tuple[float, int, float]:
    """Compare two samples of equal size. Kinds with fewer than `least` samples count as one."""
    kinds: Counter[Any] = Counter()
    merged = [Counter[Any](), Counter[Any]()]
    for kind in {*ours, *theirs}:
        name = kind if ours[kind] + theirs[kind] >= least else "rare"
        kinds[name] += 1
        merged[0][name] += ours[kind]
        merged[1][name] += theirs[kind]
    statistic = sum((merged[0][k] - merged[1][k]) ** 2 / max(1, merged[0][k] + merged[1][k]) for k in kinds)
    freedom = max(1, len(kinds) - 1)
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return statistic, freedom, float(torch.special.gammaincc(half[0], half[1]))


def show_budgets(llm: LLM, num_requests: int, check: Check) -> dict[str, Any]:
    """Compare the lengths of thoughts with and without a budget. Half of the thoughts would never end by themselves."""
    tokenizer = llm.engine.tokenizer
    closes = tokenizer.token_id("<channel|>")
    lines = questions()
    chats = [lines[index % len(lines)]["messages"] for index in range(-(-num_requests // len(BUDGETS)))]
    biases = [{closes: -100.0} if index % 2 and closes is not None else None for index in range(len(chats))]
    outcome: dict[str, Any] = {"requests": 0, "thoughts that reached the budget": 0}

    def ask(budget: int | None) -> list[int]:
        settings = [
            SamplingParams(temperature=1.0, max_tokens=96, seed=index, thinking_token_budget=budget, logit_bias=bias)
            for index, bias in enumerate(biases)
        ]
        results = llm.chat(chats, settings, enable_thinking=True, use_tqdm=False)
        return [result.samples[0].num_thought_tokens for result in results]

    free = ask(None)
    for budget in BUDGETS:
        for index, (got, natural) in enumerate(zip(ask(budget), free, strict=True)):
            check(got == min(budget, natural), f"budget {budget}, chat {index}: {got} tokens, {natural} without a budget")
            outcome["requests"] += 1
            outcome["thoughts that reached the budget"] += got == budget
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calls", type=int, default=2000, help="tool calls for each drafter (default: 2000)")
    parser.add_argument("--samples", type=int, default=512, help="samples of each side of the test (default: 512)")
    parser.add_argument("--budgets", type=int, default=500, help="requests with a budget for each drafter (default: 500)")
    parser.add_argument("--drafters", default="none,mtp,dflash")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    faults: list[str] = []

    def check(is_right: bool, why: str) -> None:
        if not is_right:
            faults.append(why)
            print("WRONG:", why, flush=True)

    for name in given.drafters.split(","):
        settings = {"speculative_config": DRAFTERS[name], "max_num_seqs": BATCH, "max_model_len": 1024, "device": given.device}
        with LLM(**settings) as llm:
            parts = {
                "calls": lambda llm=llm: show_calls(llm, given.calls, check) if given.calls else {},
                "budgets": lambda llm=llm: show_budgets(llm, given.budgets, check) if given.budgets else {},
                "distribution": lambda llm=llm: show_distribution(llm, given.samples) if given.samples else {},
            }
            for part, show in parts.items():
                begin = time.monotonic()
                outcome = show()
                if outcome:
                    line = {"drafter": name, "part": part, **outcome, "seconds": round(time.monotonic() - begin)}
                    print(json.dumps(line), flush=True)
    print(f"{len(faults)} wrong")
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    main()
