"""Compiles a GrammarSpec with llguidance, within limits. No torch.

The same code runs where a grammar is checked (`check_worker`, in its own process) and where it is used (`compiler`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import llguidance
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from culet.types import WHITE_SPACE, GrammarSpec

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_ERROR_CHARS = 300


class GrammarFault(ValueError):
    """A grammar that cannot be compiled. The text says why."""


def index_vocabulary(pieces: Sequence[bytes], special_ids: Sequence[int], end_ids: Sequence[int]) -> LLTokenizer:
    """llguidance's index of a vocabulary. `pieces[i]` holds the bytes of token i, or the name of a special token."""
    id_of_byte = {piece: token_id for token_id, piece in enumerate(pieces) if len(piece) == 1}

    class Vocabulary:
        eos_token_id, bos_token_id, tokens, special_token_ids = end_ids[0], None, pieces, list(special_ids)

        def __call__(self, text: bytes) -> list[int]:
            # llguidance asks for text that a grammar forces. Any spelling will do: Culet draws forced tokens like all others.
            return [id_of_byte.get(text[index : index + 1], 0) for index in range(len(text))]

    wrapped = llguidance.TokenizerWrapper(Vocabulary())
    return LLTokenizer(wrapped, n_vocab=len(pieces), eos_token=list(end_ids))


def compile_grammar(spec: GrammarSpec, vocabulary: LLTokenizer) -> LLMatcher:
    """The compiled grammar: a matcher at its start, to be copied. A bad grammar may take minutes, with the GIL released."""
    # Large expressions are expanded when a token reaches them, within that token's limit, and not all at once here.
    limits = LLParserLimits(precompute_large_lexemes=False, verbose_errors=False)
    matcher = LLMatcher(vocabulary, _source(spec), log_level=0, limits=limits)
    if matcher.is_error():
        raise GrammarFault(shorten(matcher.get_error()))
    return matcher


def _source(spec: GrammarSpec) -> str:
    """The spec in llguidance's own format."""
    try:
        if spec.kind == "regex":
            return LLMatcher.grammar_from_regex(spec.text)
        if spec.kind == "lark":
            return LLMatcher.grammar_from_lark(any_to_lark(spec.text))
        if spec.kind == "json_schema":
            # These override what the schema itself says under "x-guidance".
            options: JsonCompileOptions = {
                "whitespace_flexible": True,
                "whitespace_pattern": WHITE_SPACE,
                "item_separator": ",",
                "key_separator": ":",
                "lenient": not spec.is_strict,
                "coerce_one_of": not spec.is_strict,
            }
            return LLMatcher.grammar_from_json_schema(spec.text, overrides=options)
    except Exception as error:  # the library raises many kinds of errors for a bad text
        raise GrammarFault(shorten(str(error))) from error
    raise GrammarFault(f"unknown kind {spec.kind!r}")


def shorten(text: str) -> str:
    """An error of llguidance as one line of limited length."""
    line = " ".join(text.replace("<non-verbose/>", "").split())
    return line if len(line) <= MAX_ERROR_CHARS else line[:MAX_ERROR_CHARS] + "..."
