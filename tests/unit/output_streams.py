"""Streams of tokens in Gemma 4's output format, and their reading with what must hold of every one."""

from __future__ import annotations

import itertools
import json

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from culet.text.output_events import ContentPiece, ReasoningPiece, ToolCallArguments, ToolCallEnd, ToolCallStart, merge
from culet.text.output_reader import OutputReader

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
    """A small vocabulary in Gemma's form: two-letter pieces and signs as tokens, other characters as byte tokens."""
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
    """Tokens of `text` of which none is special, whatever it looks like."""
    ids = [token for character in text for token in tokenizer.encode(character)]
    assert tokenizer.special_ids.isdisjoint(ids)
    return ids


def joined(events):
    """The events with neighbouring pieces of the same text as one."""
    result = []
    for event in events:
        both = merge(result[-1], event) if result else None
        result[-1:] = [both] if both is not None else [*result[-1:], event]
    return result


def read(tokenizer, token_ids, cuts=(), **options):
    """(events, neighbours joined; output) of tokens that come in groups, cut at `cuts`."""
    numbers = itertools.count()
    reader = OutputReader(tokenizer, make_id=lambda: f"id{next(numbers)}", **options)
    events = []
    for begin, end in itertools.pairwise([0, *sorted(cuts), len(token_ids)]):
        events += reader.push(token_ids[begin:end])
    events += reader.finish()
    assert reader.finish() == []
    assert reader.push(token_ids) == []
    output = reader.output()
    check(events, output)
    return joined(events), output


def check(events, output):
    """The events say what the output says."""
    assert "".join(e.text for e in events if isinstance(e, ContentPiece)) == output.content
    assert "".join(e.text for e in events if isinstance(e, ReasoningPiece)) == output.reasoning
    assert not any(e.text == "" for e in events if not isinstance(e, ToolCallStart | ToolCallEnd))
    starts = {e.index: e for e in events if isinstance(e, ToolCallStart)}
    ends = {e.index: e.complete for e in events if isinstance(e, ToolCallEnd)}
    assert list(starts) == list(ends) == list(range(len(starts)))
    whole = [index for index, complete in ends.items() if complete]
    assert [call.index for call in output.tool_calls] == whole
    for call in output.tool_calls:
        assert (call.id, call.name) == (starts[call.index].id, starts[call.index].name)
        pieces = [e.text for e in events if isinstance(e, ToolCallArguments) and e.index == call.index]
        assert "".join(pieces) == call.arguments_json
        assert json.loads(call.arguments_json) == call.arguments
    has_marked = any(e.malformed for e in events if isinstance(e, ContentPiece))
    assert has_marked == (output.num_malformed > 0)


def answer(tokenizer, text, **options):
    return read(tokenizer, tokenizer.encode(text), **options)[1]
