"""Pictures with chats about them, as arrays to train on and as questions for the gate.

A batch has pictures of one size only, so that the tower needs no padding. Its chats are packed into rows. A seed determines all
of it, so worker processes may draw batches in any order.

Shapes: P pictures · n soft tokens of a picture · K kinds of names · B rows · T tokens of a row.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tokenizers import Tokenizer

from culet.media.spec import target_size
from training.data.chats import Chat, Encoder, plain_document, talk
from training.data.pictures.drawing import draw_picture
from training.data.pictures.labels import soft_labels
from training.data.pictures.questions import Question, questions, questions_about
from training.data.pictures.scenes import Scene, draw_scene

BUDGET = 70  # soft tokens of a picture, the smallest budget
IMAGE = "<|image|>"
SOFT_SIDE = 48  # pixels on a side of a soft token
# Ranges of the aspect ratio (width by height) in which pictures have the same number of soft tokens on each side, and how often
# they occur.
_RATIOS = ((1.0, 1.08, 4), (1.16, 1.42, 2), (1.43, 1.7, 2), (1.74, 1.9, 1.5), (1.11, 1.15, 0.5), (1.96, 2.3, 0.5))
_DOCUMENTS = 3  # chats about each picture
_SIDES = (130, 620)  # pixels of the longer side, before it is resized for the model


@dataclass(frozen=True)
class PictureBatch:
    """Pictures, and rows of chats about them. `soft` is the index of each soft token among those of all pictures, or -1."""

    pictures: NDArray[np.uint8]  # [P, 3, height, width]
    labels: NDArray[np.int8]  # [P, n, K]
    ids: NDArray[np.int32]  # [B, T]
    first: NDArray[np.int32]
    learnt: NDArray[np.bool_]
    soft: NDArray[np.int32]


class Reader:
    """Turns chats with pictures into tokens."""

    def __init__(self, tokenizer_file: Path) -> None:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self._encoder = Encoder(tokenizer)
        self._begin, self._end, self.image_id = (tokenizer.token_to_id(name) for name in ("<|image>", "<image|>", IMAGE))

    def encode(self, chat: Chat, num_soft: int) -> tuple[list[int], list[bool]]:
        """Return the tokens of a chat with `num_soft` soft tokens for its picture, and which of them the model writes."""
        ids, learnt = self._encoder.encode(plain_document(chat))
        place = ids.index(self.image_id)
        soft = [self._begin, *[self.image_id] * num_soft, self._end]
        return ids[:place] + soft + ids[place + 1 :], learnt[:place] + [False] * len(soft) + learnt[place + 1 :]

    def prompt(self, question: str, num_soft: int) -> list[int]:
        """Return the tokens of a question about a picture, up to where the model answers."""
        ids, learnt = self.encode(picture_chat([(question, "x")]), num_soft)
        return ids[: learnt.index(True)]


@cache
def reader(tokenizer_file: Path) -> Reader:
    return Reader(tokenizer_file)


def picture_chat(turns: list[tuple[str, str]], *, is_last: bool = False) -> Chat:
    """Make a chat of questions and answers. The picture comes before the first question, or after it."""
    first, *rest = turns
    opening = f"{first[0]}{IMAGE}" if is_last else f"{IMAGE}{first[0]}"
    return talk("pictures", opening, first[1], *[text for turn in rest for text in turn])


def canvas_sizes(rng: random.Random) -> Iterator[tuple[int, int]]:
    """Yield endless (width, height) that all become pictures of one size."""
    low, high, _ = rng.choices(_RATIOS, [weight for *_, weight in _RATIOS])[0]
    is_upright = rng.random() < 0.5
    wanted: tuple[int, int] | None = None
    while True:
        longer = rng.randint(*_SIDES)
        shorter = max(1, round(longer / rng.uniform(low, high)))
        width, height = (shorter, longer) if is_upright else (longer, shorter)
        size = target_size(height, width, BUDGET)
        wanted = wanted or size
        if size == wanted:
            yield width, height


def resized(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return a picture [height, width, 3] in the model's size, as [3, height, width], with the pixels that serving has."""
    image_1CHW = torch.tensor(pixels).permute(2, 0, 1)[None]
    size = target_size(*pixels.shape[:2], BUDGET)
    return F.interpolate(image_1CHW, size=size, mode="bicubic", antialias=True)[0].contiguous().numpy()


def num_soft_tokens(picture: NDArray[np.uint8]) -> int:
    return picture.shape[1] * picture.shape[2] // SOFT_SIDE**2


def draw_batch(tokenizer_file: Path, seed: str, num_pictures: int, num_rows: int, row_len: int) -> PictureBatch:
    """Draw a batch. Chats that do not fit into its rows are left out."""
    rng, read = random.Random(f"pictures {seed}"), reader(tokenizer_file)
    sizes = canvas_sizes(rng)
    pictures, labels, documents = [], [], []
    for number in range(num_pictures):
        scene, (width, height) = draw_scene(rng), next(sizes)
        pictures.append(resized(draw_picture(scene, width, height, rng)))
        num_soft = num_soft_tokens(pictures[0])
        _, rows, columns = (side // SOFT_SIDE for side in pictures[0].shape)
        labels.append(soft_labels(scene, width, height, rows, columns))
        documents += [(number, *read.encode(chat, num_soft)) for chat in _chats(scene, rng)]
    rng.shuffle(documents)
    return _pack(np.stack(pictures), np.stack(labels), documents, read.image_id, num_rows, row_len)


def _chats(scene: Scene, rng: random.Random) -> Iterator[Chat]:
    """Yield chats about a scene. Questions of rare kinds come as often as others."""
    asked = questions(scene, rng)
    rng.shuffle(asked)
    by_kind: dict[str, list[Question]] = {}
    for question in asked:
        by_kind.setdefault(question.kind, []).append(question)
    for number in range(_DOCUMENTS):
        count = 1 if number else rng.choices((1, 2, 3, 4), (2, 2, 1, 1))[0]
        kinds = rng.sample(sorted(by_kind), min(count, len(by_kind)))
        chosen = [rng.choice(by_kind[kind]) for kind in kinds]
        yield picture_chat([(each.text, each.answer) for each in chosen], is_last=rng.random() < 0.1)


def _pack(
    pictures: NDArray[np.uint8],
    labels: NDArray[np.int8],
    documents: list[tuple[int, list[int], list[bool]]],
    image_id: int,
    num_rows: int,
    row_len: int,
) -> PictureBatch:
    ids = np.zeros((num_rows, row_len), np.int32)  # 0 is padding
    first = np.tile(np.arange(row_len, dtype=np.int32), (num_rows, 1))
    learnt = np.zeros((num_rows, row_len), bool)
    soft = np.full((num_rows, row_len), -1, np.int32)
    num_soft = num_soft_tokens(pictures[0])
    used = [0] * num_rows
    row = 0
    for number, tokens, mask in documents:
        for offset in range(num_rows):  # the next row that has room
            candidate = (row + offset) % num_rows
            if used[candidate] + len(tokens) <= row_len:
                row = candidate
                break
        else:
            continue
        begin, end = used[row], used[row] + len(tokens)
        ids[row, begin:end], learnt[row, begin:end], first[row, begin:end] = tokens, mask, begin
        place = begin + tokens.index(image_id)
        soft[row, place : place + num_soft] = np.arange(num_soft) + number * num_soft
        used[row] = end
    return PictureBatch(pictures, labels, ids, first, learnt, soft)


def gate_picture(seed: int) -> tuple[Scene, NDArray[np.uint8], Question]:
    """Return a scene of the gate, its pixels before they are resized, and a question about its held-out combination."""
    rng = random.Random(f"gate pictures {seed}")
    scene = draw_scene(rng, is_for_gate=True)
    asked = questions_about(scene, rng)
    kinds = sorted({question.kind for question in asked})
    kind = rng.choice(kinds)
    question = rng.choice([each for each in asked if each.kind == kind])
    return scene, draw_picture(scene, *next(canvas_sizes(rng)), rng), question
