"""Drawn pictures and the questions about them: the same from a seed, true of what is drawn, and apart from the gate's."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import culet
from culet.media.decoding.images import resize
from training.check_overlap import picture_faults
from training.data.pictures.chats import BUDGET, Reader, draw_batch, gate_picture, num_soft_tokens, picture_chat, resized
from training.data.pictures.questions import description, is_right, questions
from training.data.pictures.scenes import COLOURS, SHAPES, WORDS, Background, Scene, Thing, draw_scene, held_out_in, is_held_out
from training.picture_gate import NUM_QUESTIONS, read_questions

TOKENIZER = Path(culet.__file__).parent / "embedded/target/tokenizer.json"
WHITE = Background("white", COLOURS["white"], COLOURS["white"])


def test_a_batch_is_determined_by_its_seed() -> None:
    first, again, other = (draw_batch(TOKENIZER, seed, 4, 3, 512) for seed in ("0 7", "0 7", "0 8"))
    for name in ("pictures", "ids", "first", "learnt", "soft"):
        assert np.array_equal(getattr(first, name), getattr(again, name))
    assert not np.array_equal(first.ids, other.ids)


def test_the_soft_tokens_of_a_batch_are_those_of_its_pictures() -> None:
    batch = draw_batch(TOKENIZER, "1", 4, 3, 512)
    num_soft = num_soft_tokens(batch.pictures[0])
    assert num_soft <= BUDGET
    assert np.array_equal(batch.soft >= 0, batch.ids == 112)
    runs = np.split(batch.soft[batch.soft >= 0], int((batch.ids == 110).sum()))
    for run in runs:
        assert run[0] % num_soft == 0
        assert np.array_equal(run, np.arange(run[0], run[0] + num_soft))
    assert {int(run[0]) // num_soft for run in runs} == set(range(4))
    assert not batch.learnt[batch.soft >= 0].any()
    assert batch.learnt.sum() > 20


def test_pictures_have_the_pixels_of_serving() -> None:
    _, pixels, _ = gate_picture(3)
    assert np.array_equal(resized(pixels).transpose(1, 2, 0), resize(pixels, BUDGET))


def test_a_prompt_ends_where_the_model_answers() -> None:
    read = Reader(TOKENIZER)
    prompt = read.prompt("What colour is the star?", 3)
    ids, learnt = read.encode(picture_chat([("What colour is the star?", "The star is red.")]), 3)
    assert ids[: len(prompt)] == prompt
    assert learnt == [False] * len(prompt) + [True] * (len(ids) - len(prompt))
    assert prompt[prompt.index(110) :][:5] == [110, 112, 112, 112, 111]


def test_training_shows_nothing_that_is_held_out() -> None:
    assert not picture_faults(2000)
    rng = random.Random(0)
    assert sum(any(held_out_in(draw_scene(rng, is_for_gate=True))) for _ in range(200)) == 200
    pairs = [is_held_out(shape, colour) for shape in SHAPES for colour in COLOURS]
    assert 4 <= sum(pairs) <= len(pairs) // 4
    assert all(not all(is_held_out(word, colour) for colour in COLOURS) for word in WORDS), "every word is shown in some colour"


def test_overlap_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.check_overlap.draw_scene", lambda rng: gate_picture(0)[0])
    assert picture_faults(2) == {"held-out combination": 2, "scene of the gate": 2}


def test_the_gates_questions_are_those_of_the_file() -> None:
    lines = read_questions()
    assert len(lines) == NUM_QUESTIONS
    assert len({line["seed"] for line in lines}) == NUM_QUESTIONS
    assert min(Counter(line["kind"] for line in lines).values()) >= 10
    for line in lines[::20]:
        _, _, question = gate_picture(line["seed"])
        assert (question.kind, question.text, list(question.wanted)) == (line["kind"], line["asked"], line["wanted"])


def test_answers_are_right_by_their_own_rule() -> None:
    rng = random.Random(1)
    kinds: Counter[str] = Counter()
    for _ in range(300):
        for question in questions(draw_scene(rng), rng):
            kinds[question.kind] += 1
            assert is_right(question.kind, question.answer, question.wanted), question
    assert len(kinds) == 14
    assert min(kinds.values()) > 10


@pytest.mark.parametrize(
    ("kind", "said", "wanted", "expected"),
    [
        ("colour", "The circle is red.", "red", True),
        ("colour", "The circle is red or blue.", "red", False),
        ("where", "The star is at the top left.", "at the top", False),
        ("where", "It is on the left.", "on the left", True),
        ("count shape", "There are two circles.", "two", True),
        ("count shape", "There are no circles.", "one", False),
        ("yes or no", "No, there is no star.", "yes", False),
        ("number", "The number is 15.", "15", True),
        ("number", "The number is 150.", "15", False),
        ("shape", "", "star", False),
    ],
)
def test_scoring(kind: str, said: str, wanted: str, expected: bool) -> None:
    assert is_right(kind, said, [wanted]) == expected


def test_a_description_names_everything_once() -> None:
    things = [Thing("star", "red", 0, 0, 0.2, 0.2, 0.5, 0), Thing("ring", "orange", 1, 1, 0.5, 0.5, 0.5, 0)]
    again = Thing("star", "red", 2, 2, 0.8, 0.8, 0.5, 0)
    assert description(Scene((*things, again), None, WHITE, "scattered")) == (
        "Two red stars and an orange ring on a white background."
    )
