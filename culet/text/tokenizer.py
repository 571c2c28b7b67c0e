"""Convert text to token ids and back with the checkpoint's `tokenizer.json`.

Decoding goes through bytes. Every token stands for some bytes, and a stream of tokens is a stream of UTF-8. Text can therefore
be streamed at a constant cost per token. A character that spans several tokens appears once its last byte arrives, and never
as a replacement character before that.
"""

from __future__ import annotations

import codecs
import json
import operator
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers

from culet.errors import BadRequest, CheckpointError

BOS_TOKEN = "<bos>"
_LOCAL = {None, "Replace", "Split"}  # steps whose result for a text does not depend on what is around it
_HINT = "copy tokenizer.json from the model's page on the Hugging Face Hub into the folder, or use --skip-tokenizer-init"


class Tokenizer:
    """The tokenizer of a checkpoint folder."""

    has_text = True  # whether it can turn text into token ids and back

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path}: file not found", hint=_HINT)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for any bad file
            raise CheckpointError(f"{path}: cannot read the tokenizer: {error}", hint=_HINT) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._replacements, self._has_byte_tokens = _read_decoder(self._tokenizer, path)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._control_tokens = tuple(
            token.content for token_id, token in added.items() if token_id in self._special_ids or _looks_special(token.content)
        )
        self._border = _find_borders(self._tokenizer, self._control_tokens)
        self._pieces: dict[int, bytes] = {}

    @property
    def vocab_size(self) -> int:
        """The number of token ids, including special tokens. A model's embedding may have more rows."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of control tokens, which are not text."""
        return self._special_ids

    @property
    def control_tokens(self) -> Sequence[str]:
        """The texts of control tokens. `encode` turns each of them into its own token, wherever it appears."""
        return self._control_tokens

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its name, such as `<turn|>`. Return None if it is not in the vocabulary."""
        return self._tokenizer.token_to_id(token)

    def encode(self, text: str, *, add_bos: bool = False) -> list[int]:
        """Return the token ids of `text`, which may spell out special tokens. `add_bos` prepends <bos> if it is missing."""
        if not isinstance(text, str):
            raise BadRequest(f"prompt: got {type(text).__name__}, expected a string")
        token_ids = self._encode(text)
        bos_id = self.token_id(BOS_TOKEN)
        if add_bos and bos_id is not None and token_ids[:1] != [bos_id]:
            token_ids.insert(0, bos_id)
        return token_ids

    def encode_pieces(self, text: str, cuts: Sequence[int]) -> list[int]:
        """Return the token ids of `text`, cut at these positions. A special token that is cut becomes plain text."""
        if not cuts:
            return self.encode(text)
        borders = [0, *cuts, len(text)]
        return [token_id for begin, end in pairwise(borders) for token_id in self.encode(text[begin:end])]

    def borders(self, text: str) -> list[int]:
        """Return positions at which `text` can be cut without a change of its token ids. They are those of control tokens."""
        return [] if self._border is None else [found.start() for found in self._border.finditer(text)]

    def _encode(self, text: str) -> list[int]:
        try:  # this call releases the GIL, and it is faster than `encode`, which also computes offsets
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        except (UnicodeError, TypeError) as error:
            raise BadRequest("prompt: got half of a surrogate pair, expected valid Unicode") from error
        token_ids: list[int] = encoding.ids
        return token_ids

    def decode(self, token_ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of `token_ids`. It equals the combined output of an IncrementalDecoder."""
        decoder = IncrementalDecoder(self, skip_special=skip_special)
        return decoder.push(token_ids) + decoder.flush()

    def piece(self, token_id: int) -> bytes:
        """Return the bytes of a token. An id outside the vocabulary has none."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._make_piece(token_id)
        return piece

    def _make_piece(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        for pattern, content in self._replacements:
            token = token.replace(pattern, content)
        if self._has_byte_tokens and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.encode("utf-8", errors="replace")


class BorrowedTokenizer(Tokenizer):
    """The tokenizer of another model, for a model with random weights, which has none.

    Gemma 4's control tokens have the same ids in both, so chats, tools and grammars work. An id that the other model does not
    have is written as a number, such as ` 9000`. If this model has fewer ids, higher ones begin again at 0.
    """

    def __init__(self, folder: str | Path, vocab_size: int) -> None:
        super().__init__(folder)
        self._vocab_size = vocab_size

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def _encode(self, text: str) -> list[int]:
        return [token_id % self._vocab_size for token_id in super()._encode(text)]

    def _make_piece(self, token_id: int) -> bytes:
        if token_id >= self._vocab_size:
            return b""
        return super()._make_piece(token_id) or f" {token_id}".encode()


class NoTokenizer(Tokenizer):
    """Stands in for a tokenizer that was not loaded. Prompts are token ids, and the text of every token is empty."""

    has_text = False

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._special_ids = frozenset()
        self._control_tokens = ()
        self._border = None
        self._pieces = {}

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def token_id(self, token: str) -> int | None:
        return None

    def encode(self, text: str, *, add_bos: bool = False) -> list[int]:
        raise no_tokenizer("prompt: got text")

    def _make_piece(self, token_id: int) -> bytes:
        return b""


def no_tokenizer(problem: str) -> BadRequest:
    """Return the error for a request that needs text when no tokenizer was loaded."""
    return BadRequest(f"{problem}, but the tokenizer was not loaded", hint="use token ids, or omit --skip-tokenizer-init")


def make_tokenizer(folder: Path, vocab_size: int, *, is_random: bool, is_skipped: bool) -> Tokenizer:
    """Return the tokenizer in a folder. A model with random weights borrows it."""
    if is_skipped:
        return NoTokenizer(vocab_size)
    return BorrowedTokenizer(folder, vocab_size) if is_random else Tokenizer(folder)


def _looks_special(text: str) -> bool:
    """Return whether a token is written like Gemma 4's control tokens, such as `<|turn>`, even if it is not marked as one."""
    return (text.startswith("<|") and text.endswith(">")) or (text.startswith("<") and text.endswith("|>"))


def _find_borders(tokenizer: tokenizers.Tokenizer, control_tokens: Sequence[str]) -> re.Pattern[str] | None:
    """Return a pattern for control tokens before which a text can be cut, or None if there are none.

    Such tokens are taken out of a text before anything else happens to it, whatever is around them, and none of them overlaps
    with another one. The text between them must be encoded the same way wherever it is.
    """
    if not {_kind(tokenizer.normalizer), _kind(tokenizer.pre_tokenizer)} <= _LOCAL:
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    taken_out = {token.content for token in added if not token.normalized}
    plain = {token.content for token in added if not (token.normalized or token.lstrip or token.rstrip or token.single_word)}
    chosen = [text for text in control_tokens if text in plain and not any(_overlap(other, text) for other in taken_out)]
    return re.compile("|".join(map(re.escape, chosen))) if chosen else None


def _kind(part: Any) -> str | None:
    """Return the type of a part of a tokenizer, as in tokenizer.json."""
    return None if part is None else json.loads(part.__getstate__())["type"]


def _overlap(other: str, token: str) -> bool:
    """Return whether an occurrence of `other` can contain the beginning of `token` without being the same."""
    begin = other.find(token[0])
    while begin >= 0:
        rest = other[begin:]
        if other != token and (rest.startswith(token) or token.startswith(rest)):
            return True
        begin = other.find(token[0], begin + 1)
    return False


def _read_decoder(tokenizer: tokenizers.Tokenizer, path: Path) -> tuple[list[tuple[str, str]], bool]:
    """Return the decoder's (text replacements, whether tokens like <0x0A> stand for bytes)."""
    state: dict[str, Any] | None = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else None
    steps = state["decoders"] if state and state["type"] == "Sequence" else [state] if state else []
    replacements = []
    for step in steps:
        if step["type"] == "Replace" and "String" in step["pattern"]:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif step["type"] not in ("ByteFallback", "Fuse"):
            raise CheckpointError(
                f"{path}: got a decoder with {step['type']}, expected Gemma's decoder (Replace, ByteFallback and Fuse)",
                hint=_HINT,
            )
    if not steps:
        raise CheckpointError(f"{path}: got no decoder, expected Gemma's decoder (Replace, ByteFallback and Fuse)", hint=_HINT)
    return replacements, any(step["type"] == "ByteFallback" for step in steps)


class IncrementalDecoder:
    """Turns a stream of token ids into text. Bytes that are not UTF-8 become replacement characters."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that these tokens complete."""
        piece, skipped = self._tokenizer.piece, self._skipped
        return self._utf8.decode(b"".join([piece(token_id) for token_id in token_ids if token_id not in skipped]))

    def flush(self) -> str:
        """Return a replacement character if the last character is incomplete, otherwise "". Call at the end."""
        return self._utf8.decode(b"", final=True)


def check_token_ids(token_ids: Sequence[int], vocab_size: int, where: str = "prompt", begin: int = 0) -> tuple[int, ...]:
    """Return a prompt of token ids as a tuple of ints. Raise if an id has no embedding.

    `where` is their field, for errors, and `begin` the place of the first of them there.
    """
    if token_ids and set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < vocab_size:
        return tuple(token_ids)  # fast path for the usual case
    checked = []
    for index, token_id in enumerate(token_ids):
        try:
            value = -1 if isinstance(token_id, bool) else operator.index(token_id)
        except TypeError:
            value = -1
        if not 0 <= value < vocab_size:
            raise BadRequest(f"{where}[{begin + index}]: got {token_id!r}, expected a token id from 0 to {vocab_size - 1}")
        checked.append(value)
    if not checked:
        raise BadRequest(f"{where}: got no tokens, expected at least one")
    return tuple(checked)
