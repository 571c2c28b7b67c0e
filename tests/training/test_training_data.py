"""The training data: formats as served, what is held out, filters, and answers that fit their questions."""

from __future__ import annotations

import json
import random
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as RawTokenizer

from culet.text.output_reader import ChatReader
from culet.text.template import BUILT_IN, ChatTemplate
from culet.text.tokenizer import Tokenizer
from culet.text.tool_schema import tool_schemas
from training.data import tokenizer as own_tokenizer
from training.data.chats import EMPTY_THOUGHT, Chat, Encoder, document, is_plain, plain_document, render, talk
from training.data.corpus import tidy_turn
from training.data.distill import Interview
from training.data.filters import good_answer, plain_answer
from training.data.held_out import QUESTIONS, fault, gate_turns, normalised, without_faults
from training.data.kinds import (
    arithmetic,
    compositions,
    conversations,
    definitions,
    dialogues,
    everyday,
    facts,
    handwritten,
    json_answers,
    requests,
    smalltalk,
    tools,
    writing,
)
from training.data.material import memories
from training.data.material.table import FOLDER as TABLES
from training.data.material.table import phrase
from training.data.material.tool_families import FAMILIES, TEST_NAMES
from training.data.mixture import cut
from training.data.pack import write_part
from training.data.questions import Prompt


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer trained on some chats."""
    folder = tmp_path_factory.mktemp("tokenizer")
    rng = random.Random(0)
    chats = [*facts.make(rng, 1), *smalltalk.make(rng, 200), *tools.make(rng, 100), *json_answers.make(rng, 100)]
    own_tokenizer.write(own_tokenizer.build((chat.spoken for chat in chats), vocab_size=1024), folder)
    return folder


def read_questions(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (QUESTIONS / f"{name}.jsonl").read_text().splitlines()]


# The tables


@pytest.mark.parametrize("path", sorted(TABLES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_table_is_used_by_its_module(path: Path) -> None:
    """A module opens a table, and others in its folder may import it."""
    modules = [module for module in TABLES.parent.rglob("*.py") if f'Table("{path.stem}")' in module.read_text()]
    assert modules
    for module in [*modules]:
        imports = rf"from \S+\.{module.stem} import .*\bTABLE\b"
        modules += [other for other in module.parent.glob("*.py") if re.search(imports, other.read_text())]
    source = "".join(module.read_text() for module in modules)
    text = path.read_text()
    if path.stem != "relations":  # it is read as a whole
        # A list is used by the module, or by name in another entry of the table.
        assert not {key for key in tomllib.loads(text) if f'"{key}"' not in source + text}


def test_a_phrase_is_filled_in_and_capitalised() -> None:
    assert phrase(random.Random(0), ("{what} apple is {what} fruit.",), what="a") == "An apple is a fruit."


# The tokenizer


def test_tokenizer_keeps_any_text_in_both_libraries(folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    ours, theirs = Tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    text = '<bos><|turn>user\nIs 12 + 7 = 19? naïve 日本 🙂  {"a": [1, 2]}\n\n<turn|>\n'
    text += "<|turn>model\n<|channel>thought\n<channel|>Yes!<turn|>"
    ids = ours.encode(text)
    assert ours.decode(ids, skip_special=False) == text
    assert theirs(text, add_special_tokens=False)["input_ids"] == ids
    assert ours.vocab_size == len(theirs) == 1024
    assert "日本" in ours.decode(ids)  # byte tokens are not special
    named = {
        name: ours.token_id(name)
        for name in ("<pad>", "<eos>", "<bos>", "<mask>", "<|tool_response>", '<|"|>', "<|turn>", "<turn|>")
    }
    assert list(named.values()) == [0, 1, 2, 4, 50, 52, 105, 106]
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [1, 106, 50]


def test_digits_are_single_tokens(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    pieces = [tokenizer.piece(token) for token in tokenizer.encode("2048, 17")]
    assert pieces == [b"2", b"0", b"4", b"8", b",", b" ", b"1", b"7"]


# Rendering


def test_documents_begin_with_the_prompt_that_serving_makes() -> None:
    template = ChatTemplate({"default": BUILT_IN.read_text()}, origin="built-in", empty_thought=True)
    rng = random.Random(1)
    chats = [*tools.make(rng, 30), *conversations.make(rng, 10), *arithmetic.make(rng, 40), *smalltalk.make(rng, 10)]
    for chat in chats:
        prompt = template.render(list(chat.messages[:-1]), tools=list(chat.tools) or None, enable_thinking=chat.thinking)
        assert document(chat).startswith(prompt)
        assert document(chat).endswith(("<turn|>", "<|tool_response>"))
    template.close()


def test_plain_chats_are_written_as_the_template_writes_them() -> None:
    rng = random.Random(11)
    chats = [
        *conversations.make(rng, 20),
        *smalltalk.make(rng, 40),
        *handwritten.make(rng, 20),
        talk("x", "  Hi \n", "\nHo  ", system=" S "),
    ]
    assert all(map(is_plain, chats))
    for chat in chats:
        prompt = render(chat, chat.messages[:-1], add_generation_prompt=True)
        whole = render(chat, chat.messages, add_generation_prompt=False).removesuffix("\n")
        assert plain_document(chat) == prompt + whole.removeprefix(prompt.removesuffix(EMPTY_THOUGHT))


def test_loss_is_on_what_the_model_writes(folder: Path) -> None:
    raw = RawTokenizer.from_file(str(folder / "tokenizer.json"))
    encoder = Encoder(raw)

    def written(chat: Chat) -> str:
        ids, mask = encoder.encode(document(chat))
        return raw.decode([token for token, is_written in zip(ids, mask, strict=True) if is_written], skip_special_tokens=False)

    assert written(talk("x", "Hi", "Hello!", "Bye", "See you.")) == "Hello!<turn|>See you.<turn|>"
    thought = talk("x", "Hi", "Hello!", thought="A greeting.")
    assert written(thought) == "<|channel>thought\nA greeting.\n<channel|>Hello!<turn|>"
    call = {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "clock", "arguments": {"city": "Rome"}}}],
    }
    declared = (tools.declare("clock", "The time.", {"city": {"type": "string"}}, ["city"]),)
    user = {"role": "user", "content": "Time in Rome?"}
    calling = Chat("x", (user, call), declared)
    assert written(calling) == '<|tool_call>call:clock{city:<|"|>Rome<|"|>}<tool_call|><|tool_response>'
    result = {"role": "tool", "name": "clock", "content": {"time": "8:00"}}
    answered = Chat("x", (user, call, result, {"role": "assistant", "content": "It is 8:00."}), declared)
    assert written(answered).endswith("<|tool_response>It is 8:00.<turn|>")
    assert "time" not in written(answered)
    assert EMPTY_THOUGHT in document(calling)


# What is held out


def test_a_fifth_of_the_pairs_is_held_out_in_both_orders() -> None:
    pairs = [(a, b) for a in range(1, 20) for b in range(1, 20) if a + b <= 20]
    held = [pair for pair in pairs if arithmetic.is_held_out(*pair, "+")]
    assert 0.15 < len(held) / len(pairs) < 0.3
    assert all(arithmetic.is_held_out(b, a, "+") for a, b in held)
    assert not arithmetic.is_held_out(13, 8, "+")
    a, b = held[0]
    for text in (
        f"What is {a} + {b}?",
        f"{arithmetic.WORDS[a].capitalize()} plus {arithmetic.WORDS[b]}",
        f"Add {b} and {a}.",
        f"{a}+{b}={a + b}",
    ):
        assert arithmetic.mentions_held_out(text)
    for text in (f"1{a} + {b}", f"{a} + {b}0", f"{a} or {b}"):
        assert not arithmetic.mentions_held_out(text)


def test_no_training_chat_has_a_held_out_pair() -> None:
    rng = random.Random(2)
    chats = [*arithmetic.make(rng, 3000), *conversations.make(rng, 500)]
    assert not [chat.spoken for chat in chats if fault(chat) == "number pair"]


def test_sums_are_right() -> None:
    import re

    for chat in arithmetic.make(random.Random(3), 2000):
        for a, sign, b, c in re.findall(r"(\d+) ([+-]) (\d+) = (\d+)", chat.spoken):
            assert (int(a) + int(b) if sign == "+" else int(a) - int(b)) == int(c)


def test_gate_phrasings_are_dropped_and_everyday_ones_are_not() -> None:
    question = read_questions("questions")[0]["question"]
    assert fault(talk("x", question.upper() + "!!", "Paris.")) == "phrasing"
    assert fault(talk("x", "A question that nobody asks.", "Yes.")) is None
    name = TEST_NAMES["weather"][0]
    assert (
        fault(
            Chat(
                "x",
                ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi"}),
                (tools.declare(name, "", {}, []),),
            )
        )
        == "tool name"
    )
    assert without_faults(f"A good line.\nUse {name} here.") == "A good line."


def test_templated_questions_are_not_phrased_as_in_the_gate() -> None:
    asked = {normalised(item["question"]) for item in read_questions("questions")}
    rng = random.Random(4)
    chats = [*facts.make(rng, 4), *definitions.make_simple(rng, 4), *arithmetic.make(rng, 3000)]
    assert not [turn for chat in chats for message in chat.messages if (turn := normalised(str(message["content"]))) in asked]


def test_gate_files_hold_what_the_gate_promises() -> None:
    questions = read_questions("questions")
    assert len(questions) == len({item["question"] for item in questions}) == 200
    assert all(item["answers"] and all(item["answers"]) for item in questions)
    sums = [item["question"] for item in questions if item["kind"] == "arithmetic"]
    assert len(sums) >= 40
    prompts = read_questions("tools")
    fitting = [item for item in prompts if item["expect"]]
    assert len(fitting) >= 50
    assert len(prompts) - len(fitting) >= 50
    test_names = {name for names in TEST_NAMES.values() for name in names}
    assert {tool["function"]["name"] for item in prompts for tool in item["tools"]} <= test_names
    for item in fitting:
        (tool,) = [tool for tool in item["tools"] if tool["function"]["name"] == item["expect"]["name"]]
        assert set(tool["function"]["parameters"]["required"]) <= set(item["expect"]["arguments"])
    assert len(read_questions("json")) >= 60
    assert len(read_questions("open")) == 30
    assert len(gate_turns()) > 350
    assert not test_names & {name for family in FAMILIES.values() for name in family.names}


# Answers fit what was asked


def test_tool_calls_are_read_by_the_server_and_fit_their_schemas(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    num_calls = 0
    for chat in tools.make(random.Random(5), 150):
        calls = chat.messages[-1].get("tool_calls")
        text = document(chat)
        answer = text.rpartition("<|turn>model\n")[2]
        reader = ChatReader(tokenizer, schemas=tool_schemas(chat.tools))
        if not calls:
            assert "<|tool_call>" not in answer or "<tool_response|>" in answer
            continue
        for token in tokenizer.encode(answer.removeprefix(EMPTY_THOUGHT)):
            reader.push([token])
        reader.finish()
        output = reader.output()
        assert output.num_malformed == 0
        assert [(call.name, call.arguments) for call in output.tool_calls] == [
            (call["function"]["name"], call["function"]["arguments"]) for call in calls
        ]
        for call in calls:
            (schema,) = [
                tool["function"]["parameters"] for tool in chat.tools if tool["function"]["name"] == call["function"]["name"]
            ]
            arguments = call["function"]["arguments"]
            assert set(schema.get("required", ())) <= set(arguments) <= set(schema["properties"])
            for key, value in arguments.items():
                assert {"string": str, "integer": int, "boolean": bool}[schema["properties"][key]["type"]] is type(value)
                assert value in schema["properties"][key].get("enum", [value])
            num_calls += 1
    assert num_calls > 50


def test_json_answers_are_json_with_the_keys_of_their_schema() -> None:
    for chat in json_answers.make(random.Random(6), 300):
        answer = json.loads(chat.messages[-1]["content"])
        prompt = " ".join(message["content"] for message in chat.messages[:-1])
        assert all(key in prompt for key in answer)


def test_facts_are_answered_with_their_value() -> None:
    rng = random.Random(7)
    for relation in facts.RELATIONS.values():
        assert len(relation.rows) >= 3
        for subject, value in relation.rows:
            chat = facts.fact_chat(relation, subject, value, rng)
            assert value.lower() in chat.messages[-1]["content"].lower()
            assert "{" not in chat.spoken
            assert "  " not in chat.spoken


def test_no_template_is_left_unfilled() -> None:
    rng = random.Random(8)
    makers = (
        handwritten.make,
        smalltalk.make,
        compositions.make,
        conversations.make,
        dialogues.make,
        everyday.make,
        requests.make,
        writing.make,
        writing.make_stories,
        definitions.make_simple,
    )
    for make in makers:
        for chat in make(rng, 100 if make is not definitions.make_simple else 1):
            assert "{" not in chat.spoken, chat.spoken
            assert "  " not in chat.spoken
            assert all(str(message["content"]).strip() for message in chat.messages)


def test_what_was_told_is_what_is_remembered() -> None:
    rng = random.Random(3)
    for make, _ in memories.MEMORIES:
        for _ in range(50):
            memory = make(rng)
            value = memory.summary.removesuffix(" years old").rsplit(" ", 1)[-1].lower()
            assert value in memory.told.lower()
            assert value in memory.answered.lower()
            assert memory.asked.endswith(("?", "."))


def test_a_name_that_was_corrected_is_remembered_as_corrected() -> None:
    rng = random.Random(3)
    corrected = 0
    for _ in range(3000):
        messages = [message["content"] for message in dialogues.remember(rng).messages]
        told = [turn for turn in messages if turn.startswith("I was joking. My name is ")]
        answers = [answer for ask, answer in zip(messages[::2], messages[1::2], strict=True) if ask == "What is my name?"]
        if told and answers:
            corrected += 1
            assert told[-1].removesuffix(".").rsplit(" ", 1)[-1] in answers[0]
    assert corrected


def test_lists_follow_what_is_added_and_removed() -> None:
    rng = random.Random(5)
    for _ in range(200):
        messages = [message["content"] for message in requests.lists(rng).messages]
        for before, ask, after in zip(messages[1::2], messages[2::2], messages[3::2], strict=False):
            if ask.startswith(("Remove ", "Take ", "Without ", "I do not need ")):
                assert len(after) < len(before)
            elif not ask.startswith("How many"):
                assert after.startswith(before)


def test_a_long_chat_ends_at_any_of_its_answers() -> None:
    rng = random.Random(1)
    chat = talk("x", "1", "one", "2", "two", "3", "three")
    lengths = {len(cut(chat, rng).messages) for _ in range(100)}
    assert lengths == {2, 4, 6}
    single = talk("x", "1", "one", system="S")
    assert cut(single, rng) is single
    calling = Chat("x", ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}) * 2, thinking=True)
    assert cut(calling, rng) is calling


# Filters, distillation, corpus, arrays


@pytest.mark.parametrize(
    ("answer", "is_good"),
    [
        ("The sky is blue because the air scatters blue light.", True),
        ("I am Qwen, a model made by Alibaba.", False),
        ("As an AI language model, I cannot say.", False),
        ("- One\n- Two", False),
        ("Use `print(1)`.", False),
        ("It is good and it is good and it is good.", False),
        ("This sentence never", False),
        ("Why is the sky blue?", False),
        ("", False),
    ],
)
def test_answers_of_the_teacher_are_filtered(answer: str, is_good: bool) -> None:
    assert good_answer("Why is the sky blue?", answer, "question") is is_good


def test_typographic_marks_become_plain() -> None:
    assert plain_answer("It\u2019s  \u201cfine\u201d \u2013 really\u2026") == 'It\'s "fine" - really...'


def test_an_interview_asks_follow_ups_and_keeps_what_was_good() -> None:
    prompts = [Prompt("question", "Be brief.", "What is ice?", ("Why?",)), Prompt("question", "Be brief.", "Who are you?")]
    interview = Interview(prompts, deadline=float("inf"))
    asking = interview.ask()
    first, _, text = next(asking)
    assert "What is ice?" in text
    assert interview.take(first, "Ice is frozen water.") is None  # goes on to its follow-up
    again, _, text = next(asking)
    assert again is first
    assert "Ice is frozen water." in text
    finished = interview.take(again, None)  # truncated, so the chat ends before that question
    assert finished is not None
    assert finished.turns == ["What is ice?", "Ice is frozen water."]
    second, _, _ = next(asking)
    assert interview.take(second, "I am Qwen.") is None
    assert next(asking, None) is None


@pytest.mark.parametrize(
    ("parts", "turn"),
    [
        (["i like cats", "do u like dogs"], "I like cats. Do you like dogs?"),
        (["what the hell"], None),
        (["lol ok"], None),
        (["see www.example.com"], None),
        (["That's   fine !!"], "That's fine!"),
    ],
)
def test_conversations_are_tidied_or_left_out(parts: list[str], turn: str | None) -> None:
    assert tidy_turn(parts) == turn


def test_arrays_hold_the_documents_one_after_the_other(tmp_path: Path) -> None:
    counts = write_part(tmp_path, "chat", [([2, 105, 7], [False, False, True]), ([2, 8], [False, True])])
    assert counts == {"documents": 2, "tokens": 5, "written": 2}
    assert np.load(tmp_path / "chat.npy").tolist() == [2, 105, 7, 2, 8]
    assert np.load(tmp_path / "chat.ends.npy").tolist() == [3, 5]
    assert np.load(tmp_path / "chat.loss.npy").tolist() == [0, 0, 1, 0, 1]
