"""Chats with declared tools: single and parallel calls, results and final answers, and no call if no tool fits."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from training.data.chats import Chat, Message
from training.data.kinds import arithmetic, conversations, definitions, facts, handwritten, smalltalk, writing
from training.data.material import knowledge, topics
from training.data.material.made_up import made_up_word
from training.data.material.simple_definitions import GLOSSES, VERBS
from training.data.material.table import Table, capitalised
from training.data.material.tool_families import CITIES, COMPANIES, FAMILIES, NAMES, TEST_NAMES, TOPICS, Family

_TABLE = Table("tools")

_VERBS = _TABLE["verbs"]
_NOUNS = _TABLE["nouns"]
_VALUES = _TABLE["values"]
_KEYS = _TABLE["keys"]


@dataclass(frozen=True)
class Declared:
    """A tool as it is declared in one chat."""

    name: str
    declaration: dict[str, Any]


def declare(name: str, text: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    """Return a declaration in OpenAI's form."""
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    return {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}


def value_of(values: tuple[str, ...] | str, kind: str, rng: random.Random, made_up: float = 0.0) -> Any:
    """Return one of the values or, for names, a made-up one with probability `made_up`."""
    if isinstance(values, str):
        _, low, high = values.split()
        return rng.randint(int(low), int(high))
    if made_up and values in (CITIES, NAMES, COMPANIES) and rng.random() < made_up:
        return made_up_word(rng).capitalize()
    chosen = rng.choice(values)
    return int(chosen) if kind == "integer" else chosen


def declare_family(family: Family, rng: random.Random, name: str | None = None) -> Declared:
    """Declare a tool of the family under one of its names, with or without its optional parameters."""
    properties: dict[str, Any] = {}
    required = []
    for key, (kind, text, values) in family.parameters.items():
        schema: dict[str, Any] = {"type": kind}
        if rng.random() < 0.8:
            schema["description"] = text
        if kind == "string" and isinstance(values, tuple) and len(values) <= 4:
            schema["enum"] = list(values)
        properties[key.rstrip("?")] = schema
        if not key.endswith("?"):
            required.append(key)
    chosen = name or (random_name(rng) if rng.random() < 0.75 else _varied(rng.choice(family.names), rng))
    return Declared(chosen, declare(chosen, rng.choice(family.texts), properties, required))


_TEXTS = (
    *GLOSSES,
    *GLOSSES.values(),
    *VERBS,
    *VERBS.values(),
    *_VERBS,
    *_NOUNS,
    *topics.QUESTIONS,
    *topics.ACTIVITIES,
    *topics.EVENTS,
    *(text for entry in (*handwritten.WORLD, *handwritten.ADVICE, *handwritten.EVERYDAY) for texts in entry for text in texts),
    *(text for texts in knowledge.SENTENCES.values() for text in texts),
    *(animal.fact for animal in knowledge.ANIMALS),
    *(subject for relation in facts.RELATIONS.values() for subject, _ in relation.rows),
)
_WORDS = tuple(sorted({word for text in _TEXTS for word in re.findall(r"\b[a-z]{3,11}\b", text.lower())}))
_TESTED = frozenset(name for names in TEST_NAMES.values() for name in names)


def random_name(rng: random.Random) -> str:
    """Return a name unrelated to what the tool does, which can only be copied from the declaration."""
    while True:
        words = [
            made_up_word(rng) if rng.random() < 0.25 else rng.choice(_WORDS)
            for _ in range(rng.choices((1, 2, 3), (0.15, 0.65, 0.2))[0])
        ]
        if rng.random() < 0.12:
            name = words[0] + "".join(word.capitalize() for word in words[1:])
        else:
            name = "_".join(words)
        if name not in _TESTED:
            return name


def _varied(name: str, rng: random.Random) -> str:
    """Sometimes add a prefix or a suffix, so that the model reads names instead of remembering them."""
    chance = rng.random()
    if chance < 0.12:
        return f"{rng.choice(('my', 'do', 'home', 'app', 'api', 'tool', 'city', 'user', 'fast'))}_{name}"
    if chance < 0.24:
        return f"{name}_{rng.choice(('tool', 'service', 'now', 'api', 'v2', 'info', 'data', 'for_user'))}"
    if chance < 0.3:
        return rng.choice(_VERBS) + "_" + name
    return name


def fill(
    family: Family, rng: random.Random, asks: tuple[str, ...] | None = None, made_up: float = 0.0
) -> tuple[str, dict[str, Any], str]:
    """Return a question, its arguments, and the template it came from."""
    ask = rng.choice(asks or family.asks)
    named = set(re.findall(r"\{(\w+)\}", ask))
    arguments: dict[str, Any] = {}
    for key, (kind, _, values) in family.parameters.items():
        bare = key.rstrip("?")
        if bare in named:
            arguments[bare] = value_of(values, kind, rng, made_up)
    if {"start", "end"} <= named and arguments["start"] == arguments["end"]:
        return fill(family, rng, asks, made_up)
    return capitalised(_wrapped(_without_on(ask.format(**arguments)), rng)), arguments, ask


_ORDERS = frozenset(_TABLE["orders"])
_WRAPPERS = _TABLE["wrappers"]


def _wrapped(text: str, rng: random.Random) -> str:
    """Sometimes turn an order into a wish or a question."""
    first, _, rest = text.partition(" ")
    if first.lower() not in _ORDERS or not text.endswith(".") or ". " in text or "please" in rest or rng.random() < 0.5:
        return text
    return rng.choice([form for form in _WRAPPERS if not ("me?" in form and " me " in text)]).format(
        first.lower() + " " + rest.removesuffix(".")
    )


def _without_on(text: str) -> str:
    """Drop "on" before today and tomorrow."""
    return re.sub(r"\b([Oo]n) (today|tomorrow)\b", lambda match: match[2].capitalize() if match[1] == "On" else match[2], text)


def _result(family: Family, rng: random.Random) -> dict[str, Any]:
    return {key: value_of(values, "string", rng) for key, values in family.result.items()}


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


_SYSTEMS = (None, None, None, None, *_TABLE["systems"])


def _messages(system: str | None, *messages: Message) -> tuple[Message, ...]:
    return (*([{"role": "system", "content": system}] if system else []), *messages)


def _others(rng: random.Random, excluded: set[str], families: list[str]) -> list[Declared]:
    """Return up to four more tools of other families."""
    count = rng.choices((0, 1, 2, 3, 4), (0.2, 0.25, 0.3, 0.15, 0.1))[0]
    chosen = rng.sample([name for name in families if name not in excluded], count)
    return [declare_family(FAMILIES[name], rng) for name in chosen]


def _shuffled(rng: random.Random, tools: list[Declared]) -> tuple[dict[str, Any], ...]:
    unique = list({tool.name: tool.declaration for tool in tools}.values())
    rng.shuffle(unique)
    return tuple(unique)


# Families that could be mistaken for one another are not declared together.
_NEAR = _TABLE["near"]


def _calling(rng: random.Random) -> Iterator[Chat]:
    """Yield a chat with a question for a tool, the call, and sometimes its result and the answer."""
    key = rng.choice(list(FAMILIES))
    family = FAMILIES[key]
    tool = declare_family(family, rng)
    question, arguments, _ = fill(family, rng, made_up=0.15)
    tools = _shuffled(rng, [tool, *_others(rng, {key, *_NEAR.get(key, ())}, list(FAMILIES))])
    user: Message = {"role": "user", "content": question}
    calls: Message = {"role": "assistant", "tool_calls": [_call(tool.name, arguments)]}
    thinking = rng.random() < 0.1
    if thinking:
        calls["reasoning"] = rng.choice(_TABLE["thoughts"]).format(t=tool.name)
    system = rng.choice(_SYSTEMS)
    yield Chat("tools", _messages(system, user, calls), tools, thinking)
    if thinking or rng.random() < 0.45:
        return
    result = _result(family, rng)
    if rng.random() < 0.08:
        result = {"error": rng.choice(("not found", "no connection", "try again later", "not available"))}
        answer = rng.choice(_TABLE["failed"]).format(**result)
    else:
        answer = capitalised(
            rng.choice(
                [text for text in family.answers if set(re.findall(r"\{(\w+)\}", text)) <= {*arguments, *result}]
            ).format(**{**arguments, **result})
        )
        answer = _without_on(answer)
    tool_message: Message = {"role": "tool", "name": tool.name, "content": result}
    yield Chat("tools", _messages(system, user, calls, tool_message, {"role": "assistant", "content": answer}), tools)


def _parallel(rng: random.Random) -> Iterator[Chat]:
    """Yield a chat with two or three parallel calls: one tool for several cities, or two tools."""
    if rng.random() < 0.6:
        key, ask = rng.choice(_TABLE["several_cities"])
        tool = declare_family(FAMILIES[key], rng)
        cities = rng.sample(CITIES, rng.choice((2, 2, 2, 3)))
        question = ask.format(", ".join(cities[:-1]) + " and " + cities[-1])
        calls = [_call(tool.name, {"city": city}) for city in cities]
        declared = [tool]
        results = [_result(FAMILIES[key], rng) for _ in cities]
        parts = [FAMILIES[key].answers[0].format(city=city, **result) for city, result in zip(cities, results, strict=True)]
        answer = " ".join(parts)
    else:
        first, second = rng.sample(
            ["alarm", "timer", "light", "music", "message", "note", "reminder", "shopping", "heating"], 2
        )
        if second in _NEAR.get(first, ()):
            return
        declared, calls, texts, results, parts = [], [], [], [], []
        for key in (first, second):
            family = FAMILIES[key]
            tool = declare_family(family, rng)
            text, arguments, _ = fill(family, rng, tuple(ask for ask in family.asks if not ask.endswith("?")), made_up=0.15)
            declared.append(tool)
            calls.append(_call(tool.name, arguments))
            texts.append(text.rstrip(".!"))
            results.append(_result(family, rng))
            parts.append(capitalised(family.answers[0].format(**{**arguments, **results[-1]})))
        question = (
            f"{texts[0]}. {rng.choice(('And ', 'Also, ', 'Then ', ''))}"
            + (texts[1] if rng.random() < 0.3 else texts[1][0].lower() + texts[1][1:])
            + "."
        )
        question = question.replace(". i ", ". I ")
        answer = " ".join(parts)
    if len({tool.name for tool in declared}) < len(declared):
        return
    tools = _shuffled(
        rng,
        [
            *declared,
            *(
                _others(rng, set(FAMILIES) - {"door", "dice", "stock", "recipe"}, ["door", "dice", "stock", "recipe"])
                if rng.random() < 0.4
                else []
            ),
        ],
    )
    user: Message = {"role": "user", "content": question}
    asked: Message = {"role": "assistant", "tool_calls": calls}
    system = rng.choice(_SYSTEMS)
    yield Chat("tools", _messages(system, user, asked), tools)
    if rng.random() < 0.5:
        results_said: list[Message] = [
            {"role": "tool", "name": call["function"]["name"], "content": result}
            for call, result in zip(calls, results, strict=True)
        ]
        yield Chat("tools", _messages(system, user, asked, *results_said, {"role": "assistant", "content": answer}), tools)


_CANNOT = _TABLE["cannot"]


def _not_calling(rng: random.Random, plain: list[Chat]) -> Iterator[Chat]:
    """Yield a chat with declared tools whose question needs none of them, or one that is missing."""
    if rng.random() < 0.68:
        chat = rng.choice(plain)
        tools = [
            declare_family(FAMILIES[name], rng)
            for name in rng.sample(
                [n for n in FAMILIES if n not in ("calculator", "population", "translate")], rng.choice((1, 1, 2, 3))
            )
        ]
        if chat.messages[0]["role"] == "system" or len(chat.messages) > 4:
            return
        yield Chat("tools", _messages(rng.choice(_SYSTEMS), *chat.messages), _shuffled(rng, tools))
        return
    key = rng.choice(list(FAMILIES))
    question, _, _ = fill(FAMILIES[key], rng, made_up=0.15)
    tools = _others(rng, {key, *_NEAR.get(key, ())}, list(FAMILIES)) or [
        declare_family(FAMILIES[rng.choice([n for n in FAMILIES if n != key and n not in _NEAR.get(key, ())])], rng)
    ]
    user: Message = {"role": "user", "content": question}
    yield Chat(
        "tools",
        _messages(rng.choice(_SYSTEMS), user, {"role": "assistant", "content": rng.choice(_CANNOT)}),
        _shuffled(rng, tools),
    )


def _made_up(rng: random.Random) -> Iterator[Chat]:
    """Yield a chat with random tool names and parameters, asked for by name. It teaches copying from the declaration."""
    name = (
        f"{rng.choice(_VERBS)}_{rng.choice(_NOUNS)}"
        if rng.random() < 0.7
        else rng.choice(_VERBS) + rng.choice(_NOUNS).capitalize()
    )
    properties: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    for _ in range(rng.choice((1, 1, 2, 3))):
        kind = rng.choices(("string", "integer", "boolean"), (0.55, 0.35, 0.1))[0]
        key = rng.choice(_KEYS[kind])
        if key in properties:
            continue
        properties[key] = {"type": kind}
        arguments[key] = (
            rng.choice((*_VALUES, *CITIES[:20], *TOPICS))
            if kind == "string"
            else rng.randint(1, 99)
            if kind == "integer"
            else rng.random() < 0.5
        )
    spoken = [f"{key} {str(value).lower() if isinstance(value, bool) else value}" for key, value in arguments.items()]
    verb, noun = re.match(r"([a-z]+)_?([A-Za-z]+)", name).groups()  # type: ignore[union-attr]
    ask = rng.choice(_TABLE["ask_by_name"])
    question = ask.format(v=verb, V=verb.capitalize(), n=noun.lower(), t=name, k=" and ".join(spoken))
    text = rng.choice(_TABLE["description"]).format(v=verb, V=verb.capitalize(), n=noun.lower())
    tool = Declared(name, declare(name, text, properties, list(properties)))
    tools = _shuffled(rng, [tool, *_others(rng, set(), list(FAMILIES))])
    calls: Message = {"role": "assistant", "tool_calls": [_call(name, arguments)]}
    yield Chat("tools", _messages(rng.choice(_SYSTEMS), {"role": "user", "content": capitalised(question)}, calls), tools)


def make_series(rng: random.Random, count: int) -> Iterator[Chat]:
    """Yield chats with several tools and several questions. The model chooses a tool each time."""
    while count > 0:
        keys: list[str] = []
        for key in rng.sample(list(FAMILIES), rng.choice((2, 3, 3, 3, 4, 4))):
            if not any(key in _NEAR.get(chosen, ()) or chosen in _NEAR.get(key, ()) for chosen in keys):
                keys.append(key)
        declared = {key: declare_family(FAMILIES[key], rng, random_name(rng) if rng.random() < 0.7 else None) for key in keys}
        if len({tool.name for tool in declared.values()} - _TESTED) < len(keys):
            continue
        messages: list[Message] = []
        wanted = [rng.choice(keys) for _ in range(rng.choice((2, 3, 3)))]
        for number, key in enumerate(wanted, start=1):
            family, name = FAMILIES[key], declared[key].name
            question, arguments, _ = fill(family, rng, made_up=0.15)
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "tool_calls": [_call(name, arguments)]})
            if number < len(wanted) or rng.random() < 0.3:
                result = _result(family, rng)
                fitting = [text for text in family.answers if set(re.findall(r"\{(\w+)\}", text)) <= {*arguments, *result}]
                answer = _without_on(rng.choice(fitting).format(**{**arguments, **result}))
                messages.append({"role": "tool", "name": name, "content": result})
                messages.append({"role": "assistant", "content": capitalised(answer)})
        yield Chat("tools", _messages(rng.choice(_SYSTEMS), *messages), _shuffled(rng, list(declared.values())))
        count -= 1


def make(rng: random.Random, count: int) -> Iterator[Chat]:
    """Yield at least `count` chats with tools."""
    plain = [
        *facts.make(rng, 1),
        *arithmetic.make(rng, 300),
        *definitions.make_simple(rng, 1),
        *smalltalk.make(rng, 700),
        *writing.make(rng, 300),
        *writing.make_stories(rng, 100),
        *conversations.make(rng, 200),
    ]
    num_chats = 0
    while num_chats < count:
        chance = rng.random()
        chats = (
            _calling(rng)
            if chance < 0.55
            else _parallel(rng)
            if chance < 0.62
            else _made_up(rng)
            if chance < 0.72
            else _not_calling(rng, plain)
        )
        for chat in chats:
            if not any(tool["function"]["name"] in _TESTED for tool in chat.tools):
                yield chat
                num_chats += 1
