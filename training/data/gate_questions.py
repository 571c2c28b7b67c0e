"""The questions of the quality gate, in phrasings that no training chat has: `python -m training.data.gate_questions` writes training/questions.

questions.jsonl  200 short questions: facts, arithmetic within 20 (half of it with pairs that were never trained), definitions
tools.jsonl      prompts with declared tools under names that were never trained, which fit the question or do not
json.jsonl       prompts that ask for JSON to a schema
open.jsonl       30 prompts whose answers are there to be read
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

from training.data import arithmetic, definitions, facts, json_answers, tools
from training.data.chats import Message
from training.data.gate_tools import TEST_NAMES
from training.data.tool_families import CITIES, FAMILIES

FOLDER = Path(__file__).parent.parent / "questions"
# Relation -> (how many questions, phrasings)
_FACTS: dict[str, tuple[int, str]] = {
    "capital": (
        16,
        "Please name the capital city of {s}. | Which city serves as the capital of {s}? | What is the name of {s}'s capital city?",
    ),
    "country of a capital": (6, "Name the country whose capital is {s}. | To which country does the capital {s} belong?"),
    "continent": (5, "Name the continent where {s} is located. | Where on the globe, on which continent, is {s}?"),
    "language": (6, "Which language would I hear in {s}? | Name the language that people speak in {s}."),
    "currency": (4, "Which money would I need in {s}? | Name the currency that is used in {s}."),
    "opposite": (10, "Name a word that means the opposite of {s}. | What word is the opposite of {s}?"),
    "plural": (6, "Please give me the plural form of {s}. | What would be the plural of {s}?"),
    "past tense": (6, "Please give me the past tense of {s}. | What would be the past tense of the verb {s}?"),
    "author": (6, "Name the author of {s}. | By whom was {s} written?"),
    "young animal": (5, "Name the word for a young {s}. | How is a baby {s} called?"),
    "number of legs": (3, "What is the number of legs of a {s}? | Say how many legs a {s} has."),
    "colour": (6, "Name the colour of {s}. | Of what colour is {s}?"),
    "next day": (3, "Name the day that comes after {s}."),
    "next month": (3, "Name the month that comes after {s}."),
    "element symbol": (4, "Please give me the chemical symbol of {s}. | Which letters stand for {s} in chemistry?"),
    "superlative": (6, "Please name the {s}. | Can you tell me what the {s} is?"),
    "count of units": (5, "Say how many {s} there are. | Can you tell me how many {s} there are?"),
    "inventor": (2, "Name the inventor of {s}."),
    "artist": (2, "Name the artist who painted {s}."),
    "use of a tool": (3, "Name a thing that one uses to {s}."),
    "material": (3, "Name the material that {s} is made of."),
    "job": (3, "Name the job of a person who {s}."),
    "days of a month": (2, "Say how many days there are in {s}."),
}
_ADD = (
    "If you add {a} to {b}, what is the total?",
    "Work out {a} plus {b}, please.",
    "What total do {a} and {b} make?",
    "Say the result of {a} + {b}.",
)
_SUBTRACT = ("Work out {a} minus {b}, please.", "Say the result of {a} - {b}.", "If you take {b} off {a}, how much stays?")
_DEFINE = (
    "In simple words, what is {a}?",
    "What is the definition of {w}?",
    "How would you define {w}?",
    "Please tell me the meaning of the word {w}.",
)
_COMMON = frozenset(
    """that with from which used when where their into some someone something other than usually have having being made especially person people part large small thing things place time
    between after before without your very most many more done does make makes under over such also each only they them this these those kind used using called about
    the and for can you are its who its not not your has get way all out one two natural various particular single similar larger long added action anything several great high hard good white kinds any uses body""".split()
)


def fact_questions(rng: random.Random) -> list[dict[str, Any]]:
    found = []
    for name, (count, asks) in _FACTS.items():
        relation = facts.RELATIONS[name]
        phrasings = asks.split(" | ")
        for index, (subject, _) in enumerate(rng.sample(relation.rows, count)):
            question = facts.capitalised(phrasings[index % len(phrasings)].format(s=subject))
            answers = sorted({re.sub(r"^(?:the|an?) ", "", other) for key, other in relation.rows if key == subject})
            if name == "author" or name in ("inventor", "artist"):
                answers += [answer.split()[-1] for answer in answers]
            if name == "currency":
                answers = [answer.split()[-1] for answer in answers]
            found.append({"kind": "fact", "question": question, "answers": list(dict.fromkeys(answers))})
    return found


def arithmetic_questions(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Half of them with held-out pairs."""
    pairs = [(a, b, "+") for a in range(1, 21) for b in range(1, 21) if a + b <= 20] + [
        (a, b, "-") for a in range(1, 21) for b in range(1, a)
    ]
    held = [pair for pair in pairs if arithmetic.is_held_out(*pair)]
    known = [pair for pair in pairs if not arithmetic.is_held_out(*pair)]
    chosen = rng.sample(held, count // 2) + rng.sample(known, count - count // 2)
    found = []
    for index, (a, b, operation) in enumerate(chosen):
        phrasings = _ADD if operation == "+" else _SUBTRACT
        result = a + b if operation == "+" else a - b
        found.append(
            {"kind": "arithmetic", "question": phrasings[index % len(phrasings)].format(a=a, b=b), "answers": [str(result)]}
        )
    return found


def definition_questions(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Right is an answer with a word of the gloss that says something."""
    found = []
    words = [word for word in definitions.simple_words() if word.kind == "n"]
    for index, word in enumerate(rng.sample(words, count)):
        keys = [key for key in re.findall(r"[a-z]+", word.gloss) if len(key) >= 3 and key not in _COMMON and key != word.word]
        question = _DEFINE[index % len(_DEFINE)].format(w=word.word, a=word.named)
        found.append({"kind": "definition", "question": question, "answers": list(dict.fromkeys(keys))})
    return found


# Phrasings of the tool tests, by family; arguments are named as in the families.
_TOOL_ASKS = {
    "weather": ("Can you check the weather in {city} for me?", "Is it nice outside in {city} right now?"), "time": ("Can you tell me how late it is now in {city}?", "Which time do they have in {city}?"),
    "calculator": ("Could you {operation} {a} and {b}?", "I would like to {operation} {a} and {b}."), "alarm": ("Could you set an alarm for {time}?", "I have to get up at {time}, so set an alarm."),
    "timer": ("Could you start a timer for {minutes} minutes?", "Let a timer run for {minutes} minutes."), "reminder": ("On {day} I have to {text}. Remind me, please.", "Could you remind me to {text} on {day}?"),
    "email": ("Could you send an email to {to} about {subject}?", "I want to send {to} an email: {subject}."), "message": ("Could you send {name} this message: {text}?", "Let {name} know this: {text}."),
    "call": ("Could you call {name} for me?", "Start a phone call with {name}."), "translate": ("Could you translate {text} into {language}?", "I need {text} translated into {language}."),
    "search": ("Could you search the web for {query}?", "Find me some pages about {query}."), "music": ("Could you play the song {song}?", "Let me hear the song {song}."),
    "light": ("Could you turn {state} the light in the {room}?", "I want the light in the {room} to be {state}."), "heating": ("Could you set the {room} to {degrees} degrees?", "Bring the {room} to {degrees} degrees."),
    "shopping": ("Could you put {item} on my shopping list?", "We need {item}. Add it to the list."), "stock": ("Could you look up the share price of {company}?", "What does one share of {company} cost?"),
    "currency": ("Could you convert {amount} {source} to {target}?", "I have {amount} {source}. How much is that in {target}?"), "route": ("Could you find the way from {start} to {end}?", "Which way leads from {start} to {end}?"),
    "hotel": ("Could you book a hotel in {city} for {nights} nights?", "We want to stay {nights} nights in {city}. Book a hotel."), "table": ("Could you book a table for {people} people at {time}?", "We are {people} people and want a table at {time}."),
    "event": ("Could you put {title} on {day} at {time} into my calendar?",), "note": ("Could you make a note: {text}?", "Keep this as a note: {text}."), "population": ("Could you look up how many people live in {city}?", "Say how many inhabitants {city} has."),
    "dice": ("Could you roll a die with {sides} sides?", "Let a die with {sides} sides roll."), "recipe": ("Could you find a recipe for {dish}?", "I am hungry for {dish}. Find me a recipe."), "book": ("Could you find a book about {topic}?", "I would like to read a book about {topic}. Find one."),
    "train": ("Could you tell me when the next train to {destination} leaves?",), "contact": ("Could you find the phone number of {name}?", "Which phone number does {name} have?"), "order": ("Could you track my order {order_id}?", "Is my order {order_id} on its way?"),
    "flight": ("Could you find a flight from {origin} to {destination} on {day}?",),
}  # fmt: skip
_NO_TOOL = (
    "What is your name, my friend?", "Could you tell me a funny joke?", "Name the capital city of France, please.", "What word is the opposite of hot?", "Hello, how are you doing this morning?",
    "Could you tell me a little story about a dog?", "Thanks, that was very nice of you!", "Name a colour that you see in grass.", "What would be the plural of mouse?", "In simple words, what is a teacher?",
    "Could you explain why people sleep?", "Name three fruits that are sweet.", "By whom was Hamlet written?", "Say hello to my mother.", "I feel a little sad this evening.", "Could you spell the word garden?",
    "Are you a real person, or what are you?", "Name the largest ocean of the world.", "Which animal is called the king of animals?", "Tell me something about the moon, please.", "Good evening, my friend!",
    "Name the month that comes after May.", "Could you say that you are happy?", "What can you do for me today?", "Name the author of Oliver Twist.", "Say how many legs a spider has.", "What makes honey sweet?",
    "I like to read in the evening.", "Goodbye, and see you next week!", "Give me a riddle that is easy.",
)  # fmt: skip


def tool_prompts(rng: random.Random) -> list[dict[str, Any]]:
    """For every test name a question that fits it, and as many that fit no declared tool."""
    found: list[dict[str, Any]] = []
    named = {family: names.split() for family, names in TEST_NAMES.items()}

    def others(taken: set[str], count: int) -> list[dict[str, Any]]:
        near = {near for key in taken for near in tools._NEAR.get(key, ())}
        keys = rng.sample([key for key in named if key not in taken | near], count)
        return [tools.declare_family(FAMILIES[key], rng, rng.choice(named[key])).declaration for key in keys]

    for key, names in named.items():
        for index, name in enumerate(names):
            question, arguments, _ = tools.fill(FAMILIES[key], rng, (_TOOL_ASKS[key][index % len(_TOOL_ASKS[key])],))
            declared = [tools.declare_family(FAMILIES[key], rng, name).declaration, *others({key}, rng.choice((0, 1, 2)))]
            rng.shuffle(declared)
            found.append(
                {
                    "tools": declared,
                    "messages": [{"role": "user", "content": question}],
                    "expect": {"name": name, "arguments": arguments},
                }
            )
    for question in _NO_TOOL:
        found.append(
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
        found.append(
            {
                "tools": others({key, "search", "calculator"}, rng.choice((1, 2))),
                "messages": [{"role": "user", "content": question}],
                "expect": None,
            }
        )
    return found


def json_prompts(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Texts and rules in other words than those of training, with schemas put together anew."""
    rules = (
        "Write one JSON object that matches this JSON schema: {s}",
        "The reply has to be valid JSON for the schema {s}",
        "Return JSON. The schema is {s}",
    )
    asks = (
        "What does this text say? {t}",
        "Please put this into JSON: {t}",
        "Note the data of this text: {t}",
        "{t} Put that into the JSON.",
    )
    found = []
    for index in range(count):
        messages, schema = _json_prompt(rng, rules[index % 3], asks[index % 4], kind=index % 6)
        found.append({"messages": messages, "schema": schema})
    return found


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
        text = f"{rng.choice(('The soup', 'The game', 'The play', 'The weather'))} was {rng.choice(('great', 'terrible', 'lovely', 'awful'))}."
        schema = json_answers.schema_of(
            [(rng.choice(("sentiment", "mood")), {"type": "string", "enum": ["positive", "negative"]})]
        )
    rule, ask = rule.format(s=json.dumps(schema)), ask.format(t=text)
    if rng.random() < 0.4:
        return [{"role": "system", "content": rule}, {"role": "user", "content": ask}], schema
    return [{"role": "user", "content": f"{ask}\n{rule}"}], schema


_OPEN: tuple[tuple[str, ...], ...] = (
    ("Hello! Nice to see you.",), ("Who are you, and what can you do?",), ("Tell me a short story about a brave cat.",), ("Why do we need sleep?",), ("What do you think about rainy days?",), ("Explain what a bridge is to a child.",),
    ("I had a long day and I am tired.",), ("Give me a tip for learning English.",), ("What is the difference between a cat and a dog?",), ("How does a plant grow?",), ("Write two sentences about the sea.",), ("Why is it dark at night?",),
    ("What should I cook tonight?",), ("Tell me something about Italy.",), ("Can you make this sentence shorter: The weather was so bad that we all stayed at home the whole day.",), ("What is friendship?",),
    ("How can I steal my neighbour's bicycle?",), ("Which animals live in the sea?",), ("Say good night to me.",), ("Do you like music?",),
    ("Hi! My name is Oliver.", "What do bees make?", "And what is my name?"), ("What is the capital city of Japan?", "What do people speak there?", "Thank you, goodbye!"), ("I am sad today.", "My friend moved away.", "Thank you for listening."),
    ("Tell me a joke, please.", "Another one!", "Ha, that was good."), ("What is a whale?", "Where does it live?", "Is it a fish?"), ("How are you today?", "I am fine too. What can you do?", "Then add 2 and 3, please."),
    ("I want to visit Greece.", "What is its capital?", "Which money do they use?"), ("What does the word brave mean?", "Use it in a sentence, please.", "What word is the opposite?"), ("Tell me about the sun.", "Is it a planet?", "Say that in five words."),
    ("Can you help me with a letter to my grandmother?", "I want to thank her for the cake.", "Make it a little longer."),
)  # fmt: skip


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
