"""Compile a GrammarSpec with llguidance, within limits. No torch.

`check_worker` runs this code in its own process to check a grammar. `compiler` runs it to use the grammar.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import llguidance
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from culet.types import WHITE_SPACE, GrammarSpec

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_ERROR_CHARS = 300
# Where a grammar leaves only one text, llguidance would allow only its own tokens for it, which here are single bytes. But the
# model must be free to write the text in the tokens that it was trained on.
_ANY_TOKENS = '\n%llguidance {"no_forcing": true}\n'

# llguidance shows the line of the grammar that is at fault, with a mark below it. It is not always the client's own line.
_EXCERPT = re.compile(r"^ *\d+ \| .*$|^[ ^]+$", re.MULTILINE)
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")  # in Lark's notation
_TOKEN_AT = re.compile(r" \(at \".*$")
# Its errors, in the words of somebody who has not written the grammar.
_PLAINER = (
    (re.compile(r'(?:invalid regex ".*" \(in regex\): )?regex parse error: .*error: '), "invalid regex: "),
    (re.compile(r"Unimplemented keys: \[(.*)\]"), r"these keywords cannot be enforced: \1"),
    (re.compile(r"oneOf constraints are not supported\..*"), "oneOf cannot be enforced, so use anyOf instead"),
    (re.compile(r"Resource ('.*?') is not present .*"), r"the reference \1 points to another document"),
    (re.compile(r"Pointer '(.*?)' does not exist"), r"the reference '#\1' points to nothing"),
    (re.compile(r"Rule 'start' already exists"), "a GBNF grammar cannot have a rule named start, so give it another name"),
    (re.compile(r"Expecting object schema to apply options"), "expected a JSON schema, which is an object"),
)

_LARK_RULE = re.compile(r"^\s*(?:%llguidance\b|start\s*:(?!:=))", re.MULTILINE)
_ESCAPED = re.compile(r"\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})|\\.", re.DOTALL)


class GrammarFault(ValueError):
    """A grammar that cannot be compiled. The text says why."""


def index_vocabulary(pieces: Sequence[bytes], special_ids: Sequence[int], end_ids: Sequence[int]) -> LLTokenizer:
    """Return llguidance's index of a vocabulary. `pieces[i]` is the bytes of token i, or its name if it is special."""
    id_of_byte = {piece: token_id for token_id, piece in enumerate(pieces) if len(piece) == 1}

    class PieceTokenizer:
        eos_token_id, bos_token_id, tokens, special_token_ids = end_ids[0], None, pieces, list(special_ids)

        def __call__(self, text: bytes) -> list[int]:
            # llguidance tokenizes text that a grammar forces. Any tokens will do, because grammars force none (`_ANY_TOKENS`).
            return [id_of_byte.get(text[index : index + 1], 0) for index in range(len(text))]

    wrapped = llguidance.TokenizerWrapper(PieceTokenizer())
    return LLTokenizer(wrapped, n_vocab=len(pieces), eos_token=list(end_ids))


def compile_grammar(spec: GrammarSpec, vocabulary: LLTokenizer) -> LLMatcher:
    """Compile a grammar to a matcher at its start, or after the spec's prefix. Callers copy it.

    A bad grammar may take minutes. The GIL is released meanwhile.
    """
    # Large expressions are not expanded here, but when a token reaches them, within the limit for that token.
    limits = LLParserLimits(precompute_large_lexemes=False, verbose_errors=False)
    source = _source(spec)
    is_json = spec.kind in ("regex", "json_schema")
    matcher = LLMatcher(vocabulary, (_lark_of(source) if is_json else source) + _ANY_TOKENS, log_level=0, limits=limits)
    if matcher.is_error():
        if is_json:  # the original has the plainer message
            matcher = LLMatcher(vocabulary, source, log_level=0, limits=limits)
        raise GrammarFault(_explain(matcher.get_error(), spec))
    if spec.prefix:
        _advance(matcher, vocabulary.tokenize_bytes(spec.prefix.encode("utf-8", "replace")))
    return matcher


def _advance(matcher: LLMatcher, token_ids: Sequence[int]) -> None:
    """Advance a matcher by the beginning of an answer. Which tokens it was written in does not matter."""
    if matcher.try_consume_tokens(list(token_ids)) != len(token_ids):
        raise GrammarFault("the last message, which the answer continues, is not the beginning of such a document")


def _lark_of(source: str) -> str:
    """Return llguidance's JSON format in Lark's notation, which has more options."""
    (grammar,) = json.loads(source)["grammars"]
    schema = grammar.get("json_schema")
    lark: str = grammar["lark_grammar"] if schema is None else "start: %json " + json.dumps(schema)
    return lark


def _character(escape: re.Match[str], *, is_lark: bool) -> str:
    """Replace a `\\u` or `\\U` escape by its character, and leave other escapes alone.

    The GBNF translator supports neither. Lark supports `\\u`, but some characters take two of them.
    """
    digits = escape[2] if is_lark else escape[1] or escape[2]
    if digits is None or int(digits, 16) > sys.maxunicode:
        return escape[0]
    code = int(digits, 16)
    return chr(code) if code > 0x7F or chr(code).isalnum() else f"\\x{code:02x}"


def _source(spec: GrammarSpec) -> str:
    """Return the spec in llguidance's own format: JSON for a regex or a JSON schema, otherwise Lark's notation."""
    try:
        if spec.kind == "regex":
            return LLMatcher.grammar_from_regex(spec.text)
        if spec.kind == "lark":
            is_lark = _is_lark(spec.text)
            text = _ESCAPED.sub(partial(_character, is_lark=is_lark), spec.text)
            return LLMatcher.grammar_from_lark(text if is_lark else gbnf_to_lark(text))
        if spec.kind == "choice":
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {alternatives(json.loads(spec.text))}")
        if spec.kind == "json_schema":
            # These override the schema's own "x-guidance" options.
            options: JsonCompileOptions = {
                "whitespace_flexible": True,
                "whitespace_pattern": WHITE_SPACE,
                "item_separator": ",",
                "key_separator": ":",
                "lenient": not spec.is_strict,
                "coerce_one_of": not spec.is_strict,
            }
            return LLMatcher.grammar_from_json_schema(spec.text, overrides=options)
    except Exception as error:  # the library raises many kinds of errors for bad text
        raise GrammarFault(_explain(str(error), spec)) from error
    raise GrammarFault(f"unknown kind {spec.kind!r}")


def alternatives(texts: Sequence[str]) -> str:
    """Return the body of a Lark terminal that matches any of the texts.

    It must be a terminal. The lexer merges the beginnings of a terminal's alternatives, so there may be any number. Each
    alternative of a rule is an item of the parser's row, and a row holds at most 2,000.
    """
    return " | ".join(json.dumps(text) for text in texts)


def _is_lark(text: str) -> bool:
    """Return whether a grammar is in Lark's notation. A GBNF rule may also be named start, but is defined with `::=`."""
    return _LARK_RULE.search(text) is not None


def _explain(text: str, spec: GrammarSpec) -> str:
    """Return an llguidance error for the client who sent the grammar. Places only help where the text is the client's own."""
    line = _TOKEN_AT.sub("", " ".join(_EXCERPT.sub("", text).split()))
    is_own = spec.kind == "lark" and _is_lark(spec.text)  # GBNF is translated, and its lines move
    line = _PLACE.sub(r"line \1, column \2: " if is_own else "", line, count=1)
    for pattern, words in _PLAINER:
        line = pattern.sub(words, line)
    return shorten(line[:1].lower() + line[1:])


def shorten(text: str) -> str:
    """Return an llguidance error as one line of limited length, without the stack of a panic."""
    line = " ".join(text.partition("<backtrace>")[0].replace("<non-verbose/>", "").split())
    return line if len(line) <= MAX_ERROR_CHARS else line[:MAX_ERROR_CHARS] + "..."
