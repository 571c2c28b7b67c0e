"""Token streams in Gemma 4's output format, and a reader that checks what must hold for every stream."""

from __future__ import annotations

import itertools
import json

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from culet.text.output_pieces import CallPart, ReasoningPiece, TextPiece, ToolCall, merge
from culet.text.output_reader import ChatReader

MARKS = ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>']
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>", "<|think|>", "<|image|>", *MARKS]
Q = '<|"|>'
CITY = f"<|tool_call>call:weather{{city:{Q}Paris{Q}}}<tool_call|>"
SCHEMA = {
    "type": "object",
    "properties": {
        "s": {"type": "STRING"},
        "sn": {"type": ["string", "null"]},
        "nullable": {"type": "string", "nullable": True},
        "i": {"type": "integer"},
        "x": {"type": "number"},
        "b": {"type": "boolean"},
        "any": {},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "choice": {"enum": ["1", "2"]},
        "list": {"type": "array", "items": {"type": "string"}},
        "pair": {"type": "array", "prefixItems": [{"type": "string"}], "items": {"type": "number"}},
        "inner": {"$ref": "#/$defs/Inner"},
        "loop": {"$ref": "#/properties/loop"},
        "map": {"type": "object", "additionalProperties": {"type": "string"}},
        "odd": {"type": 7, "anyOf": "x", "$ref": "http://elsewhere", "enum": {}},
    },
    "$defs": {"Inner": {"type": "object", "properties": {"zip": {"type": "string"}, "in": {"$ref": "#/$defs/Inner"}}}},
}


def write_tokenizer(folder, special=SPECIAL):
    """Write a small tokenizer in Gemma's form: letters, punctuation and a few merges. Other characters are byte tokens."""
    letters = [chr(code) for code in range(32, 127)]
    letters[0] = "\u2581"
    merges = [("t", "h"), ("c", "a"), ("l", "l"), ('"', "}"), ("ca", "ll"), ("call", ":"), ("{", "c"), ("}", ","), ("1", "2")]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "\n", *map("".join, merges)]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special])
    tokenizer.save(str(folder / "tokenizer.json"))


def plain_ids(tokenizer, text):
    """Return the tokens of `text`, never special ones, whatever the text looks like."""
    ids = [token for character in text for token in tokenizer.encode(character)]
    assert tokenizer.special_ids.isdisjoint(ids)
    return ids


def joined(pieces):
    """Merge adjacent pieces of the same kind."""
    result = []
    for piece in pieces:
        both = merge(result[-1], piece) if result else None
        result[-1:] = [both] if both is not None else [*result[-1:], piece]
    return result


def read(tokenizer, token_ids, cuts=(), **options):
    """Read tokens that arrive in groups split at `cuts`. Return (merged pieces, output)."""
    numbers = itertools.count()
    reader = ChatReader(tokenizer, make_id=lambda: f"id{next(numbers)}", **options)
    pieces = []
    for begin, end in itertools.pairwise([0, *sorted(cuts), len(token_ids)]):
        pieces += reader.push(token_ids[begin:end])
    pieces += reader.finish()
    assert reader.finish() == []
    assert reader.push(token_ids) == []
    output = reader.output()
    check(pieces, output)
    return joined(pieces), output


def check(pieces, output):
    """Check that the pieces agree with the output."""
    assert "".join(piece.text for piece in pieces if isinstance(piece, TextPiece)) == output.text
    assert "".join(piece.text for piece in pieces if isinstance(piece, ReasoningPiece)) == output.reasoning
    assert not any(piece.text == "" for piece in pieces if isinstance(piece, TextPiece | ReasoningPiece))
    assert tuple(piece for piece in pieces if isinstance(piece, ToolCall)) == output.tool_calls
    assert [call.index for call in output.tool_calls] == list(range(len(output.tool_calls)))
    for call in output.tool_calls:
        parts = [piece.arguments_json for piece in pieces if isinstance(piece, CallPart) and piece.index == call.index]
        assert "".join(parts) == (call.arguments_json if call.has_parts else "")
        assert json.loads(call.arguments_json) == call.arguments
    is_flagged = any(piece.malformed for piece in pieces if isinstance(piece, TextPiece))
    assert is_flagged == (output.num_malformed > 0)


def answer(tokenizer, text, **options):
    return read(tokenizer, tokenizer.encode(text), **options)[1]
