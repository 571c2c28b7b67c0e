"""A prompt that is encoded in remembered pieces has the same token ids as the whole text."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from culet.models.embedded import embedded_folder
from culet.serve.prompts.piece_memory import PIECE_CHARS, PieceMemory
from culet.text.tokenizer import Tokenizer

WORDS = ("a", "house", " ", "  ", "\n", "\n\n", "é", "語", "🙂", "<", "|", ">", "<|", "|>", "<|tur", "turn>", "<unused1>", "12")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(embedded_folder("built-in"))


def _random_text(seed: int, tokenizer: Tokenizer, num_words: int = 900) -> str:
    draw = random.Random(seed)
    words = [*WORDS, *tokenizer.control_tokens]
    return "".join(draw.choice(words) for _ in range(num_words))


def _make_tokenizer(
    folder: Path, added: list[AddedToken], normalizer: object = None, pre_tokenizer: object = None
) -> Tokenizer:
    vocab = {chr(code): code - 32 for code in range(32, 127)} | {"▁": 95}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=" "))
    made.normalizer, made.pre_tokenizer = normalizer, pre_tokenizer
    made.decoder = decoders.Replace("▁", " ")
    made.add_tokens(added)
    made.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@pytest.mark.parametrize("seed", range(20))
def test_pieces_have_the_ids_of_the_whole_text(tokenizer: Tokenizer, seed: int) -> None:
    memory, text = PieceMemory(tokenizer), _random_text(seed, tokenizer)
    cuts = sorted(random.Random(seed).sample(range(1, len(text)), 5))
    for _ in range(2):
        assert memory.encode(text, (), "") == tokenizer.encode(text)
        assert memory.encode(text, cuts, "") == tokenizer.encode_pieces(text, cuts)


def test_every_border_can_be_a_cut(tokenizer: Tokenizer) -> None:
    text = _random_text(99, tokenizer)
    borders = tokenizer.borders(text)
    assert len(borders) > 100
    assert tokenizer.encode_pieces(text, [border for border in borders if border]) == tokenizer.encode(text)


def test_a_longer_conversation_finds_what_it_begins_with(tokenizer: Tokenizer) -> None:
    memory = PieceMemory(tokenizer)
    turns = [f"<|turn>user\n{number} {'some words ' * 40}<turn|>\n" for number in range(50)]
    memory.encode("".join(turns[:49]), (), "")
    assert memory.num_hits == 0
    memory.encode("".join(turns), (), "")
    assert memory.num_hits >= 48


def test_salts_share_nothing(tokenizer: Tokenizer) -> None:
    memory, text = PieceMemory(tokenizer), "word " * PIECE_CHARS
    memory.encode(text, (), "a")
    memory.encode(text, (), "b")
    assert memory.num_hits == 0
    memory.encode(text, (), "a")
    assert memory.num_hits == 1


def test_memory_is_bounded_and_forgets_the_oldest_first(tokenizer: Tokenizer) -> None:
    memory = PieceMemory(tokenizer, max_bytes=50_000)
    texts = [f"{number} " + "word " * PIECE_CHARS for number in range(40)]
    for text in texts:
        memory.encode(texts[0], (), "")  # stays in use
        memory.encode(text, (), "")
        assert 0 < memory.num_bytes <= 50_000
    before = memory.num_hits
    memory.encode(texts[0], (), "")
    assert memory.num_hits == before + 1
    memory.encode(texts[1], (), "")
    assert memory.num_hits == before + 1


def test_a_text_larger_than_the_memory_is_encoded_all_the_same(tokenizer: Tokenizer) -> None:
    memory, text = PieceMemory(tokenizer, max_bytes=1000), "word " * 5000
    assert memory.encode(text, (), "") == tokenizer.encode(text)
    assert memory.num_bytes == 0


def test_threads_get_the_right_ids(tokenizer: Tokenizer) -> None:
    memory = PieceMemory(tokenizer, max_bytes=30_000)
    texts = [_random_text(seed, tokenizer, 300) for seed in range(6)]
    expected = [tokenizer.encode(text) for text in texts]
    wrong = []

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(60):
            number = draw.randrange(len(texts))
            if memory.encode(texts[number], (), "") != expected[number]:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert memory.num_bytes <= 30_000


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer"),
    [(normalizers.Prepend("▁"), None), (None, pre_tokenizers.Metaspace(prepend_scheme="first"))],
)
def test_no_cut_where_the_beginning_of_a_text_is_special(tmp_path: Path, normalizer: object, pre_tokenizer: object) -> None:
    tokenizer = _make_tokenizer(tmp_path, [AddedToken("<|turn>", normalized=False)], normalizer, pre_tokenizer)
    text = "abc<|turn>def"
    assert tokenizer.borders(text) == []
    assert PieceMemory(tokenizer).encode(text, (), "") == tokenizer.encode(text)


@pytest.mark.parametrize("other", ["<|turn>user", "a<|turn>", "x<", "<|turn", "is<|"])
def test_no_cut_where_another_token_may_overlap(tmp_path: Path, other: str) -> None:
    added = [
        AddedToken("<|turn>", normalized=False),
        AddedToken(other, normalized=False),
        AddedToken("<|end>", normalized=False),
    ]
    tokenizer = _make_tokenizer(tmp_path, added)
    assert tokenizer.borders(f"z<|turn>{other}") == []


@pytest.mark.parametrize("option", ["lstrip", "normalized", "single_word"])
def test_no_cut_at_tokens_that_depend_on_their_surroundings(tmp_path: Path, option: str) -> None:
    tokenizer = _make_tokenizer(tmp_path, [AddedToken("<|turn>", **{"normalized": False, option: True})])
    assert tokenizer.borders("abc <|turn>def") == []
