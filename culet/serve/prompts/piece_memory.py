"""Remember the token ids of long texts, so that a conversation that comes back with one more turn is not encoded anew.

An agent sends its whole history with every turn. Encoding 100,000 tokens takes longer than computing the few new ones, whose
prefix is in the KV cache. A prompt is cut before control tokens, where no token can cross, so the ids of its pieces
together are those of the whole. Pieces begin at the same places as long as the text is the same.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from culet.text.tokenizer import Tokenizer

MEMORY_BYTES = 64 << 20  # about six million tokens
PIECE_CHARS = 256  # pieces have at least as many, because looking up shorter ones saves little
_ENTRY_BYTES = 400  # of a piece's objects, beside its text and ids


class PieceMemory:
    """Encodes texts and remembers their pieces. The least recently used ones are forgotten first. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, max_bytes: int = MEMORY_BYTES) -> None:
        self.num_bytes = 0
        self.num_hits = 0  # pieces that were found
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._pieces: OrderedDict[tuple[str, str], array[int]] = OrderedDict()  # by salt and text, the latest last

    def encode(self, text: str, cuts: Sequence[int], salt: str) -> list[int]:
        """Return the same ids as `Tokenizer.encode_pieces`. Only calls with the same salt share what is remembered.

        So no caller learns from the time it takes what others have sent.
        """
        token_ids: list[int] = []
        for begin, end in pairwise([0, *cuts, len(text)]):
            part = text[begin:end]
            borders = self._tokenizer.borders(part) if len(part) > PIECE_CHARS else ()
            for piece in _split(part, borders):
                token_ids += self._encode_piece(piece, salt)
        return token_ids

    def _encode_piece(self, piece: str, salt: str) -> Sequence[int]:
        if len(piece) < PIECE_CHARS:
            return self._tokenizer.encode(piece)
        key = salt, piece
        with self._lock:
            known = self._pieces.get(key)
            if known is not None:
                self._pieces.move_to_end(key)
                self.num_hits += 1
                return known
        found = array("i", self._tokenizer.encode(piece))
        with self._lock:
            if key not in self._pieces:  # another thread may have been faster
                self._pieces[key] = found
                self.num_bytes += _size(piece, found)
            while self.num_bytes > self._max_bytes:
                (_, oldest), ids = self._pieces.popitem(last=False)
                self.num_bytes -= _size(oldest, ids)
        return found


def _split(text: str, borders: Sequence[int]) -> list[str]:
    """Cut a text at the first border after each PIECE_CHARS characters. What follows a border has no part in that."""
    chosen = [0]
    for border in borders:
        if border - chosen[-1] >= PIECE_CHARS:
            chosen.append(border)
    return [text[begin:end] for begin, end in pairwise([*chosen, len(text)])]


def _size(piece: str, ids: array[int]) -> int:
    return sys.getsizeof(piece) + ids.itemsize * len(ids) + _ENTRY_BYTES
