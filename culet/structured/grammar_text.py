"""A GrammarSpec as the grammar engine (llguidance) takes it, and the limits that one is compiled under. No torch.

The same code runs where a grammar is checked (`grammar_worker`, in a process of its own) and where it is used (`grammar`).
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


class GrammarFault(ValueError):
    """A grammar that cannot be compiled; the text says why."""


def make_limits() -> LLParserLimits:
    """Bounds on the work of compiling and of each token, in the engine's own units; about 20 ms each."""
    # Large expressions are worked out as they are met, within each token's bound, not all at once at the beginning.
    return LLParserLimits(precompute_large_lexemes=False, verbose_errors=False)


def make_tokenizer(pieces: Sequence[bytes], special_ids: Sequence[int], end_ids: Sequence[int]) -> LLTokenizer:
    """The engine's index of a vocabulary: `pieces[i]` are the bytes of token i, the name of a special one."""

    bytes_of = {piece: token_id for token_id, piece in enumerate(pieces) if len(piece) == 1}

    class Vocabulary:
        eos_token_id, bos_token_id, tokens, special_token_ids = end_ids[0], None, pieces, list(special_ids)

        def __call__(self, text: bytes) -> list[int]:
            # Asked for what a grammar forces. Any tokens that spell it will do: Culet draws forced tokens like all others.
            return [bytes_of.get(text[index : index + 1], 0) for index in range(len(text))]

    wrapped = llguidance.TokenizerWrapper(Vocabulary())
    return LLTokenizer(wrapped, n_vocab=len(pieces), eos_token=list(end_ids))


def compile_grammar(spec: GrammarSpec, tokenizer: LLTokenizer) -> LLMatcher:
    """A matcher at the beginning of the grammar. May take minutes for a bad one, with the GIL released."""
    matcher = LLMatcher(tokenizer, _source(spec), log_level=0, limits=make_limits())
    if matcher.is_error():
        raise GrammarFault(short(matcher.get_error()))
    return matcher


def _source(spec: GrammarSpec) -> str:
    try:
        if spec.kind == "regex":
            return LLMatcher.grammar_from_regex(spec.text)
        if spec.kind == "lark":
            return LLMatcher.grammar_from_lark(any_to_lark(spec.text))
        if spec.kind == "json_schema":
            # What the schema itself says under "x-guidance" comes before these, so it changes nothing.
            options: JsonCompileOptions = {
                "whitespace_flexible": True,
                "whitespace_pattern": WHITE_SPACE,
                "item_separator": ",",
                "key_separator": ":",
                "lenient": not spec.is_strict,
                "coerce_one_of": not spec.is_strict,
            }
            return LLMatcher.grammar_from_json_schema(spec.text, overrides=options)
    except Exception as error:  # the library's own kinds, for whatever is wrong with the text
        raise GrammarFault(short(str(error))) from error
    raise GrammarFault(f"unknown kind {spec.kind!r}")


def short(text: str) -> str:
    """An error of the engine as one line of bounded length."""
    line = " ".join(text.replace("<non-verbose/>", "").split())
    return line if len(line) <= 300 else line[:300] + "..."
