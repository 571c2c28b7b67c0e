"""The quality gate's questions, in phrasings that no training chat uses.

`python -m training.data.gate_questions` writes training/questions:

    questions.jsonl  200 short questions: facts, definitions, arithmetic within 20 (half of it with held-out pairs)
    tools.jsonl      prompts with tools under names that were never trained, which fit the question or do not
    json.jsonl       prompts that ask for JSON according to a schema
    open.jsonl       30 prompts whose answers people read
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

from training.data.chats import Message
from training.data.kinds import arithmetic, definitions, facts, json_answers, tools
from training.data.material.table import Table, capitalised
from training.data.material.tool_families import CITIES, FAMILIES, TEST_NAMES

_TABLE = Table("gate_questions")

FOLDER = Path(__file__).parent.parent / "questions"
# Relation -> (number of questions, phrasings)
_FACTS: dict[str, tuple[int, str]] = _TABLE["facts"]
_ADD = _TABLE["add"]
_SUBTRACT = _TABLE["subtract"]
_DEFINE = _TABLE["define"]
_COMMON = frozenset(_TABLE["common"])


def fact_questions(rng: random.Random) -> list[dict[str, Any]]:
    lines = []
    for name, entry in _FACTS.items():
        relation = facts.RELATIONS[name]
        phrasings = entry["asks"]
        for index, (subject, _) in enumerate(rng.sample(relation.rows, entry["count"])):
            question = capitalised(phrasings[index % len(phrasings)].format(s=subject))
            answers = sorted({re.sub(r"^(?:the|an?) ", "", value) for key, value in relation.rows if key == subject})
            if name == "author" or name in ("inventor", "artist"):
                answers += [answer.split()[-1] for answer in answers]
            if name == "currency":
                answers = [answer.split()[-1] for answer in answers]
            lines.append({"kind": "fact", "question": question, "answers": list(dict.fromkeys(answers))})
    return lines


def arithmetic_questions(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Return sums and differences, half of them with held-out pairs."""
    pairs = [(a, b, "+") for a in range(1, 21) for b in range(1, 21) if a + b <= 20] + [
        (a, b, "-") for a in range(1, 21) for b in range(1, a)
    ]
    held = [pair for pair in pairs if arithmetic.is_held_out(*pair)]
    known = [pair for pair in pairs if not arithmetic.is_held_out(*pair)]
    chosen = rng.sample(held, count // 2) + rng.sample(known, count - count // 2)
    lines = []
    for index, (a, b, operation) in enumerate(chosen):
        phrasings = _ADD if operation == "+" else _SUBTRACT
        result = a + b if operation == "+" else a - b
        lines.append(
            {"kind": "arithmetic", "question": phrasings[index % len(phrasings)].format(a=a, b=b), "answers": [str(result)]}
        )
    return lines


def definition_questions(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Return questions about words. An answer is right if it contains a content word of the gloss."""
    lines = []
    words = [word for word in definitions.simple_words() if word.kind == "n"]
    for index, word in enumerate(rng.sample(words, count)):
        keys = [key for key in re.findall(r"[a-z]+", word.gloss) if len(key) >= 3 and key not in _COMMON and key != word.word]
        question = _DEFINE[index % len(_DEFINE)].format(w=word.word, a=word.named)
        lines.append({"kind": "definition", "question": question, "answers": list(dict.fromkeys(keys))})
    return lines


# Phrasings of the tool tests, by family. Arguments are named as in the families.
_TOOL_ASKS = _TABLE["tool_asks"]
_NO_TOOL = _TABLE["no_tool"]


def tool_prompts(rng: random.Random) -> list[dict[str, Any]]:
    """Return a question for each test tool, and as many questions that fit no declared tool."""
    lines: list[dict[str, Any]] = []
    named = TEST_NAMES

    def others(excluded: set[str], count: int) -> list[dict[str, Any]]:
        near = {near for key in excluded for near in tools._NEAR.get(key, ())}
        keys = rng.sample([key for key in named if key not in excluded | near], count)
        return [tools.declare_family(FAMILIES[key], rng, rng.choice(named[key])).declaration for key in keys]

    for key, names in named.items():
        for index, name in enumerate(names):
            question, arguments, _ = tools.fill(FAMILIES[key], rng, (_TOOL_ASKS[key][index % len(_TOOL_ASKS[key])],))
            declared = [tools.declare_family(FAMILIES[key], rng, name).declaration, *others({key}, rng.choice((0, 1, 2)))]
            rng.shuffle(declared)
            lines.append(
                {
                    "tools": declared,
                    "messages": [{"role": "user", "content": question}],
                    "expect": {"name": name, "arguments": arguments},
                }
            )
    for question in _NO_TOOL:
        lines.append(
            {
                "tools": others(
                    {"calculator", "population", "translate", "search", "book", "message", "call"}, rng.choice((1, 2, 3))
                ),
                "messages": [{"role": "user", "content": question}],
                "expect": None,
            }
        )
    for key in rng.sample(list(named), 30):
        question, _, _ = tools.fill(FAMILIES[key], rng, (_TOOL_ASKS[key][0],))
        lines.append(
            {
                "tools": others({key, "search", "calculator"}, rng.choice((1, 2))),
                "messages": [{"role": "user", "content": question}],
                "expect": None,
            }
        )
    return lines


def json_prompts(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Return prompts with texts and rules worded differently from training, and with new combinations of fields."""
    rules = _TABLE["json_rules"]
    asks = _TABLE["json_asks"]
    lines = []
    for index in range(count):
        messages, schema = _json_prompt(rng, rules[index % 3], asks[index % 4], kind=index % 6)
        lines.append({"messages": messages, "schema": schema})
    return lines


def _json_prompt(rng: random.Random, rule: str, ask: str, kind: int) -> tuple[list[Message], dict[str, Any]]:
    if kind < 4:
        text, fields = json_answers._RECORDS[(kind + rng.randrange(5)) % 5](rng)
        chosen = rng.sample(fields, rng.choice((2, 3, 4)))
        schema = json_answers.schema_of([(name, spec) for name, spec, _ in chosen])
    elif kind == 4:
        words = rng.sample(CITIES, 3)
        text, schema = (
            f"The trip goes to {words[0]}, {words[1]} and {words[2]}.",
            json_answers.schema_of(
                [(rng.choice(("cities", "stops", "places")), {"type": "array", "items": {"type": "string"}})]
            ),
        )
    else:
        what, how = (
            rng.choice(("The soup", "The game", "The play", "The weather")),
            rng.choice(("great", "terrible", "lovely", "awful")),
        )
        text = f"{what} was {how}."
        schema = json_answers.schema_of(
            [(rng.choice(("sentiment", "mood")), {"type": "string", "enum": ["positive", "negative"]})]
        )
    rule, ask = rule.format(s=json.dumps(schema)), ask.format(t=text)
    if rng.random() < 0.4:
        return [{"role": "system", "content": rule}, {"role": "user", "content": ask}], schema
    return [{"role": "user", "content": f"{ask}\n{rule}"}], schema


_OPEN: tuple[tuple[str, ...], ...] = _TABLE["open_chats"]


def main() -> None:
    """Write the four files."""
    rng = random.Random(20261115)
    short = [*fact_questions(rng), *definition_questions(rng, 43)]
    short += arithmetic_questions(rng, 200 - len(short))
    files: dict[str, list[Any]] = {
        "questions": short,
        "tools": tool_prompts(rng),
        "json": json_prompts(rng, 60),
        "open": [{"turns": list(turns)} for turns in _OPEN],
    }
    FOLDER.mkdir(exist_ok=True)
    for name, lines in files.items():
        (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        print(f"{name}.jsonl: {len(lines)} lines")


if __name__ == "__main__":
    main()
