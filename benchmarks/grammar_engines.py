"""Compare grammar engines on a vocabulary of Gemma's size: compile time, time per mask, time per token and memory.

    python benchmarks/grammar_engines.py [--vocab 262144] [--limit 20] [--engine llguidance|xgrammar]

This script produces the table in decision 10 and the figures for llguidance in docs/results.md. Gemma's tokenizer cannot be
shipped, so the vocabulary is made up. It has Gemma's special tokens at their ids, 256 byte tokens, runs of white space,
punctuation as in code and JSON, single digits, and words and word pieces in several scripts, with and without a leading space.

Each (engine, grammar) pair runs in its own process with a time limit. Times are CPU seconds, so a busy machine changes them
little. Masks are computed along a random document. Each step takes any allowed token, and ends the document one time in four if
the end is allowed. Finally two tokens are rolled back and repeated, and the mask must be the same. llguidance runs with Culet's
limits. xgrammar is not a dependency of Culet, so run `pip install xgrammar` to compare.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import resource
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np

SPECIALS = dict(enumerate(("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")))
SPECIALS |= dict(enumerate(("<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"), 46))
SPECIALS |= {52: '<|"|>', 98: "<|think|>", 100: "<|channel>", 101: "<channel|>", 105: "<|turn>", 106: "<turn|>"}
EOS = (106, 1)
MAX_WALK = 300
# (first letter, last letter, weight) for Latin, Cyrillic, Hiragana, Han, Greek, Arabic and Hangul.
_SCRIPTS = (
    (97, 122, 9),
    (1072, 1103, 2),
    (12353, 12435, 2),
    (19968, 40869, 3),
    (945, 969, 1),
    (1575, 1610, 1),
    (44032, 55203, 1),
)


def make_vocabulary(size: int, seed: int = 0) -> list[bytes]:
    """Make `size` distinct tokens as bytes. Equal seeds give equal tokens, and small sizes are a prefix of large ones."""
    random_ = random.Random(seed)
    tokens: dict[bytes, None] = {}
    for token_id in range(120):
        tokens[SPECIALS.get(token_id, f"<unused{token_id}>").encode()] = None
    ordinary: dict[bytes, None] = {bytes([byte]): None for byte in range(256)}
    for sign in (" ", "\n", "\t"):
        ordinary.update(dict.fromkeys((sign * count).encode() for count in range(1, 32)))
    signs = (
        '"',
        '":',
        '":"',
        '", "',
        '","',
        '"}',
        '"]',
        "{",
        '{"',
        "}",
        "}}",
        "[",
        '["',
        "]",
        "],",
        "()",
        "();",
        "://",
        "...",
        "->",
        "**",
        "##",
    )
    ordinary.update(dict.fromkeys(sign.encode() for sign in signs))
    ordinary.update(dict.fromkeys((" " + sign).encode() for sign in signs))
    scripts = [script for script in _SCRIPTS for _ in range(script[2])]
    while len(ordinary) < size - len(tokens):
        low, high, _ = random_.choice(scripts)
        length = min(1 + int(random_.expovariate(0.28)), 16)
        word = "".join(chr(random_.randint(low, high)) for _ in range(length))
        word = random_.choice((word, " " + word, " " + word, word.capitalize(), " " + word.capitalize(), word + "_"))
        ordinary[word.encode()] = None
    return [*tokens, *list(ordinary)[: size - len(tokens)]]


class Engine(Protocol):
    """The interface of an engine. `kind` is json_schema or regex."""

    def compile(self, kind: str, text: str) -> None: ...
    def fill(self) -> np.ndarray: ...
    def accept(self, token_id: int) -> bool: ...
    def rollback(self, count: int) -> None: ...


class LLGuidance:
    """llguidance, which parses while decoding, so a grammar is ready almost immediately."""

    def __init__(self, vocabulary: list[bytes]) -> None:
        import llguidance.numpy as bitmasks

        from culet.structured import compiled_grammar

        self._ours, self._bitmasks = compiled_grammar, bitmasks
        self._tokenizer = compiled_grammar.index_vocabulary(vocabulary, list(SPECIALS), EOS)
        self._mask = bitmasks.allocate_token_bitmask(1, len(vocabulary))

    def compile(self, kind: str, text: str) -> None:
        from culet.types import GrammarSpec

        self._matcher = self._ours.compile_grammar(GrammarSpec(kind, text), self._tokenizer)

    def fill(self) -> np.ndarray:
        self._bitmasks.fill_next_token_bitmask(self._matcher, self._mask, 0)
        if self._matcher.is_error():
            raise ValueError(self._matcher.get_error())
        return self._mask[0]

    def accept(self, token_id: int) -> bool:
        return self._matcher.consume_token(token_id)

    def rollback(self, count: int) -> None:
        assert self._matcher.rollback(count)


class XGrammar:
    """xgrammar, which compiles the whole grammar against the vocabulary and then looks up masks."""

    def __init__(self, vocabulary: list[bytes]) -> None:
        import torch
        import xgrammar

        tokens = list(vocabulary)
        for token_id in SPECIALS:
            tokens[token_id] = b""  # xgrammar's mark for tokens without text
        info = xgrammar.TokenizerInfo(tokens, vocab_size=len(tokens), stop_token_ids=list(EOS))
        self._library = xgrammar
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._mask = torch.zeros(1, -(-len(tokens) // 32), dtype=torch.int32)

    def compile(self, kind: str, text: str) -> None:
        compiled = self._compiler.compile_json_schema(text) if kind == "json_schema" else self._compiler.compile_regex(text)
        self._matcher = self._library.GrammarMatcher(compiled)

    def fill(self) -> np.ndarray:
        self._matcher.fill_next_token_bitmask(self._mask)
        return self._mask[0].numpy()

    def accept(self, token_id: int) -> bool:
        return self._matcher.accept_token(token_id)

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)


ENGINES: dict[str, Callable[[list[bytes]], Engine]] = {"llguidance": LLGuidance, "xgrammar": XGrammar}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _doubling(depth: int, key: str) -> dict[str, Any]:
    """Make definitions that each refer to the next one twice. Expanded, they are 2**depth schemas."""
    defs: dict[str, Any] = {f"d{n}": {key: [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(depth)}
    return {"$defs": {**defs, f"d{depth}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = _object({"a": schema})
    return schema


def cases() -> dict[str, tuple[str, str]]:
    """Return the grammars by name, first ordinary ones, then difficult ones."""
    kinds = [
        {"type": "string"},
        {"type": "integer"},
        {"enum": ["red", "green", "blue"]},
        {"type": "array", "items": {"type": "number"}},
    ]
    node = _object({"value": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}})
    schemas: dict[str, Any] = {
        "small: 3 fields": _object({"name": {"type": "string"}, "age": {"type": "integer"}, "ok": {"type": "boolean"}}),
        "any JSON object": {"type": "object"},
        "large: 200 fields": _object({f"field_{n}": kinds[n % 4] for n in range(200)}),
        "recursive tree": {"$defs": {"node": node}, "$ref": "#/$defs/node"},
        "formats and patterns": _object(
            {
                "id": {"type": "string", "format": "uuid"},
                "when": {"type": "string", "format": "date-time"},
                "code": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
                "n": {"type": "integer", "minimum": 17, "maximum": 123456},
            }
        ),
        "enum of 20,000": {"enum": [f"value number {n * 7919}" for n in range(20_000)]},
        "optional 60 of 60": {"type": "object", "properties": {f"f{n}": {"type": "string"} for n in range(60)}},
        "text of 1 to 50,000": {"type": "string", "minLength": 1, "maxLength": 50_000},
        "array of 20,000": {"type": "array", "items": {"type": "integer"}, "minItems": 20_000, "maxItems": 20_000},
        "2^24 by anyOf": _doubling(24, "anyOf"),
        "2^24 by allOf": _doubling(24, "allOf"),
        "nested 200 deep": _nested(200),
        "multiples of four primes": {"allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967, 9949, 9941)]},
        "10 x 10 x 10 x 10 oneOf": {
            "allOf": [{"anyOf": [_object({f"k{m}{n}": {"type": "string"}}) for n in range(10)]} for m in range(4)]
        },
    }
    regexes = {
        "regex date": r"\d{4}-\d{2}-\d{2}",
        "regex (a?){400}a{400}": "(a?){400}a{400}",
        "regex ((\\w{1,50}){1,50}){1,50}": r"((\w{1,50}){1,50}){1,50}",
        "regex (.*a.{20}){5}": "(.*a.{20}){5}",
        "regex \\p{L}{1,3000}": r"\p{L}{1,3000}",
    }
    grammars = {name: ("json_schema", json.dumps(schema)) for name, schema in schemas.items()}
    return grammars | {name: ("regex", text) for name, text in regexes.items()}


# Documents that violate their schema. An engine must reject either the schema or the document.
INVALID: list[tuple[dict[str, Any], str]] = [
    ({"type": "integer", "multipleOf": 5}, "3"),
    ({"type": "integer", "minimum": 5, "maximum": 9}, "3"),
    ({"allOf": [{"type": "integer"}, {"minimum": 5}]}, "3"),
    ({"allOf": [_object({"a": {"type": "integer"}}), {"required": ["b"]}]}, '{"a":1}'),
    ({"type": "string", "not": {"const": "a"}}, '"a"'),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1,1]"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "3"),
    ({"type": "string", "pattern": "^a+$", "maxLength": 2}, '"aaa"'),
    ({"type": "object", "properties": {"a": {"type": "integer"}}, "minProperties": 1}, "{}"),
]


def judge(engine: Engine, schema: dict[str, Any], document: str) -> str:
    """Return an engine's verdict on a document, which is fed byte by byte."""
    try:
        engine.compile("json_schema", json.dumps(schema))
    except Exception:
        return "refuses the schema"
    for token_id in (*(120 + byte for byte in document.encode()), EOS[0]):
        if not (int(engine.fill()[token_id >> 5]) >> (token_id & 31)) & 1:
            return "refuses the document"
        if token_id != EOS[0] and not engine.accept(token_id):
            return "refuses the document"
    return "ACCEPTS IT"


def show_conformity(names: list[str]) -> None:
    """Print each engine's verdict on documents that violate their schemas."""
    engines = {name: ENGINES[name](make_vocabulary(1000)) for name in names}
    print(f"\n{'a document that violates its schema':100} " + " ".join(f"{name:20}" for name in names))
    for schema, document in INVALID:
        verdicts = " ".join(f"{judge(engine, schema, document):20}" for engine in engines.values())
        print(f"{document:8} {json.dumps(schema)[:90]:91} {verdicts}", flush=True)


def _rss_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


def _run(engine_name: str, size: int, kind: str, text: str, sink: Connection) -> None:
    """Measure an engine on a grammar and send results as they arrive. Runs in a child process."""
    vocabulary = make_vocabulary(size)
    before = _rss_mib()
    began = time.process_time()
    engine = ENGINES[engine_name](vocabulary)
    sink.send({"setup_s": time.process_time() - began, "setup_mib": _rss_mib() - before})
    before, began = _rss_mib(), time.process_time()
    try:
        engine.compile(kind, text)
    except Exception as error:
        sink.send({"error": str(error).splitlines()[0][:70], "compile_s": time.process_time() - began})
        return
    compile_s = time.process_time() - began
    sink.send({"compile_s": compile_s, "mib": _rss_mib() - before})
    random_, fills, accepts, tokens = random.Random(1), [], [], []
    try:
        while len(tokens) < MAX_WALK:
            began = time.process_time()
            mask = engine.fill()
            fills.append(time.process_time() - began)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:size])
            ends = [token_id for token_id in EOS if token_id in allowed]
            others = allowed[~np.isin(allowed, EOS)]
            if ends and (not len(others) or random_.random() < 0.25):
                break
            token_id = int(others[random_.randrange(len(others))])
            began = time.process_time()
            assert engine.accept(token_id), f"the engine refuses token {token_id}, which its mask allows"
            accepts.append(time.process_time() - began)
            tokens.append(token_id)
        if len(tokens) > 3:
            mask = engine.fill().copy()
            engine.rollback(2)
            assert all(engine.accept(token_id) for token_id in tokens[-2:])
            assert (engine.fill() == mask).all(), "the mask differs after a rollback"
    except Exception as error:
        sink.send({"error": str(error).splitlines()[0][:70]})
    sink.send({"fills": fills, "accepts": accepts, "mib": _rss_mib() - before})


def _trial(engine: str, size: int, kind: str, text: str, limit_s: float) -> dict[str, Any]:
    """Run one trial in a child process and return everything it sent within the limit."""
    context = multiprocessing.get_context("spawn")
    source, sink = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(engine, size, kind, text, sink))
    child.start()
    sink.close()
    results: dict[str, Any] = {}
    try:
        results |= source.recv()  # the limit does not include imports and the vocabulary
        deadline = time.monotonic() + limit_s
        while source.poll(max(0.0, deadline - time.monotonic())):
            results |= source.recv()
        results["timed_out"] = True
    except EOFError:
        pass
    child.kill()
    child.join()
    if child.exitcode not in (0, -9):
        results["error"] = f"the process exited unexpectedly ({child.exitcode})"
    return results


def _percentiles(values: list[float]) -> str:
    if not values:
        return f"{'-':>8} {'-':>8} {'-':>8}"
    ordered = sorted(values)
    worst = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return f"{statistics.median(values) * 1e6:8.0f} {worst * 1e6:8.0f} {ordered[-1] * 1e6:8.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vocab", type=int, default=262_144, help="size of the vocabulary")
    parser.add_argument("--limit", type=float, default=20.0, help="time limit per grammar, in seconds")
    parser.add_argument("--engine", choices=sorted(ENGINES), action="append", help="test only this engine; may be repeated")
    parser.add_argument("--case", default="", help="test only grammars whose name contains this")
    parser.add_argument("--only-conformity", action="store_true", help="check conformity only, without timing")
    options = parser.parse_args()
    print(f"vocabulary of {options.vocab} tokens; times of masks and tokens in microseconds")
    print(
        f"{'grammar':34} {'engine':11} {'compile ms':>10} {'mask p50':>8} {'p99':>8} {'max':>8} {'token':>9} {'MiB':>6}  note"
    )
    for name, (kind, text) in cases().items():
        if options.only_conformity or options.case not in name:
            continue
        for engine in options.engine or sorted(ENGINES):
            results = _trial(engine, options.vocab, kind, text, options.limit)
            note = results.get("error", "") or ("over the limit" if results.get("timed_out") else "")
            compiled = f"{results['compile_s'] * 1e3:10.1f}" if "compile_s" in results else f"{'-':>10}"
            token = f"{statistics.median(results['accepts']) * 1e6:9.1f}" if results.get("accepts") else f"{'-':>9}"
            mib = f"{results['mib']:6.1f}" if "mib" in results else f"{'-':>6}"
            print(
                f"{name:34} {engine:11} {compiled} {_percentiles(results.get('fills', []))} {token} {mib}  {note}", flush=True
            )
            if name.startswith("small") and "setup_s" in results:
                print(f"{'':34} {engine:11} vocabulary prepared in {results['setup_s']:.2f} s, {results['setup_mib']:.0f} MiB")
    if not options.case:
        show_conformity(options.engine or sorted(ENGINES))


if __name__ == "__main__":
    main()
