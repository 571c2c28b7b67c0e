"""The data that travels between parts. It is frozen and needs no torch.

A request takes this path: `Request` -> scheduler (`StepPlan`) -> runner (`StepResult`) -> scheduler -> `TokenDelta`.

The runner has one **slot** (0 .. max_num_seqs - 1) for each running sequence. It holds the sequence's tokens and sampling
settings. An `Entry` fills a slot when a sequence starts or resumes. After that a `Row` needs no token ids: the tokens at
positions `start .. start + num_new` are read from the slot's buffer, and the sampler appends the drawn tokens there. So a step
can be planned before the previous step's tokens have reached the host.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple

from msgspec import Struct

from culet.errors import BadRequest
from culet.media.items import MediaItem

MAX_SEED = 2**64 - 1


class FinishReason(StrEnum):
    """Why a sequence ended. The values are those of the OpenAI API, plus `abort`, `timeout` and `error`."""

    STOP = "stop"
    LENGTH = "length"
    CANCEL = "abort"  # vLLM's word
    TIMEOUT = "timeout"
    ERROR = "error"


MAX_GRAMMAR_CHARS = 1 << 20
GRAMMAR_FAULT = "structured output: "  # starts every error that the caller's grammar causes
MAX_CHOICES = 10_000
# White space between the parts of a JSON document: a space, or a line break and an indent. It is bounded because a model that
# is unsure writes spaces until it runs out of tokens.
WHITE_SPACE = r"(\n[ \t]{0,64}| )?"


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar as plain text, and the key of its compiled form."""

    kind: str  # json_schema, regex, lark (Lark's notation or GBNF), or choice (a JSON list of texts)
    text: str
    # for json_schema: reject keywords that cannot be enforced, instead of ignoring them
    # for on_call: end the answer with an error if a call cannot be held any longer, instead of letting it go on
    is_strict: bool = True
    after_thought: bool = False  # the model may think first, and the grammar applies after the thought
    on_call: bool = False  # the output is free, and the grammar applies to each tool call from its opening token on
    field: str = "structured_outputs"  # the field of the request that it comes from, for errors
    prefix: str = ""  # text that the output continues, so that both together have the form
    free_tools: tuple[str, ...] = ()  # tools that it cannot hold to their schemas. Their calls may have any arguments.

    @property
    def key(self) -> str:
        """A short key. Two specs share it if they compile to the same grammar and start at the same point in it."""
        whole = f"{self.kind}\0{self.is_strict}\0{len(self.prefix)}\0{self.prefix}{self.text}"
        return hashlib.sha256(whole.encode("utf-8", "surrogatepass")).hexdigest()

    def spec(self) -> GrammarSpec:
        """Return this spec itself. Sampling parameters may hold a form or its spec."""
        return self


@dataclass(frozen=True)
class StructuredOutputs:
    """A form that the output must have. Exactly one of the first five fields is set."""

    json: str | Mapping[str, Any] | bool | None = None  # a JSON schema
    json_object: bool = False  # any JSON object
    regex: str | None = None
    grammar: str | None = None  # in Lark's notation, or GBNF
    choice: Sequence[str] | None = None  # one of these texts
    strict: bool = True  # for `json`: reject keywords that cannot be enforced, instead of ignoring them
    after_thought: bool = False  # the model may think first, and only its answer has the form

    def __post_init__(self) -> None:
        given = [name for name in ("json", "regex", "grammar", "choice") if getattr(self, name) is not None]
        given += ["json_object"] if self.json_object else []
        if len(given) != 1:
            got = " and ".join(given) or "nothing"
            raise BadRequest(
                f"structured_outputs: got {got}, expected exactly one of: json, json_object, regex, grammar, choice"
            )
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise BadRequest(f"structured_outputs.{name}: got {type(getattr(self, name)).__name__}, expected a string")
        if self.choice is not None:
            texts = () if isinstance(self.choice, str) or not isinstance(self.choice, Sequence) else tuple(self.choice)
            if not 1 <= len(texts) <= MAX_CHOICES or not all(isinstance(text, str) and text for text in texts):
                raise BadRequest(f"structured_outputs.choice: expected a list of 1 to {MAX_CHOICES} non-empty strings")
            object.__setattr__(self, "choice", texts)
        if len(self.spec().text) > MAX_GRAMMAR_CHARS:
            raise BadRequest(f"structured_outputs.{given[0]}: expected at most {MAX_GRAMMAR_CHARS} characters")

    def spec(self) -> GrammarSpec:
        """Return the form as plain text for the compiler."""
        if self.regex is not None:
            name, kind, text = "regex", "regex", self.regex
        elif self.grammar is not None:
            name, kind, text = "grammar", "lark", self.grammar
        elif self.choice is not None:
            name, kind, text = "choice", "choice", json.dumps(self.choice)
        elif self.json is not None:
            name, kind, text = "json", "json_schema", _schema_text(self.json)
        else:
            name, kind, text = "json_object", "json_schema", _schema_text({"type": "object"})
        return GrammarSpec(kind, text, self.strict, self.after_thought, field=f"structured_outputs.{name}")


def _schema_text(schema: object) -> str:
    """Return a JSON schema as text. The order of keys is kept because the answer follows it."""
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(parsed, Mapping | bool):
            raise BadRequest(f"structured_outputs.json: got {type(parsed).__name__}, expected an object")
        return json.dumps(parsed if isinstance(parsed, bool) else dict(parsed), separators=(",", ":"), allow_nan=False)
    except RecursionError as error:
        raise BadRequest("structured_outputs.json: nested too deeply") from error
    except (TypeError, ValueError) as error:
        raise BadRequest(f"structured_outputs.json: not valid JSON: {error}") from error


@dataclass(frozen=True)
class SamplingParams:
    """How to draw tokens. None means the model's default (`generation_config.json`)."""

    temperature: float | None = None  # 0 is greedy
    top_p: float | None = None  # draw from the most likely tokens up to this total probability; 0 is greedy
    top_k: int | None = None  # draw from this many of the most likely tokens; 0 or -1 means all tokens
    min_p: float | None = None  # drop tokens below this fraction of the most likely token's probability
    max_tokens: int | None = None  # None means up to the end of the context
    stop: str | Sequence[str] | None = ()  # end before any of these texts; None means none
    stop_token_ids: Sequence[int] | None = ()  # end after any of these tokens; None means none
    ignore_eos: bool = False  # go on after an end-of-text token
    seed: int | None = None  # equal seeds draw equal tokens; None means a random one
    n: int = 1  # number of samples
    logprobs: int | None = None  # report log-probabilities of the chosen token and of this many most likely ones
    prompt_logprobs: int | None = None  # the same for each prompt token except the first
    logit_bias: Mapping[int, float] | None = None  # added to the logits of these tokens
    repetition_penalty: float | None = None  # above 1, tokens that have occurred are less likely
    presence_penalty: float = 0.0  # subtracted from the logit of every generated token
    frequency_penalty: float = 0.0  # the same, once for each time it was generated
    structured_outputs: StructuredOutputs | GrammarSpec | None = None  # the form of the output, or its fields in a mapping
    min_tokens: int = 0  # no end token and no stop token is drawn before this many tokens
    thinking_token_budget: int | None = None  # the most tokens in all thoughts of an answer. Then the thought is closed.

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        stop_token_ids = tuple(self.stop_token_ids or ())
        object.__setattr__(self, "stop_token_ids", stop_token_ids)
        if isinstance(self.structured_outputs, Mapping):
            object.__setattr__(self, "structured_outputs", _read_structured(self.structured_outputs))
        elif not isinstance(self.structured_outputs, StructuredOutputs | GrammarSpec | None):
            got = type(self.structured_outputs).__name__
            raise BadRequest(f"structured_outputs: got {got}, expected StructuredOutputs or a mapping with its fields")
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", MappingProxyType(dict(self.logit_bias)))
        _check_number("temperature", self.temperature, 0.0, 100.0)
        _check_number("top_p", self.top_p, 0.0, 1.0)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_int("top_k", self.top_k, -1, 2**31 - 1)
        _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        _check_int("thinking_token_budget", self.thinking_token_budget, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise BadRequest(f"min_tokens: got {self.min_tokens}, expected at most max_tokens, which is {self.max_tokens}")
        _check_int("seed", self.seed, 0, MAX_SEED)
        _check_int("n", self.n, 1, 1024)
        _check_int("logprobs", self.logprobs, 0, 1024)
        _check_int("prompt_logprobs", self.prompt_logprobs, 0, 1024)
        for token_id in stop_token_ids:
            _check_int("stop_token_ids", token_id, 0, 2**31 - 1)
        for text in stop:
            if not isinstance(text, str) or not text:
                raise BadRequest(f"stop: got {text!r}, expected non-empty strings")
        for token_id, bias in (self.logit_bias or {}).items():
            _check_int("logit_bias key", token_id, 0, 2**31 - 1)
            _check_number(f"logit_bias[{token_id}]", bias, -100.0, 100.0)


def _read_structured(given: Mapping[str, Any]) -> StructuredOutputs:
    """Read a mapping such as {"regex": "[0-9]+"}. Ignore other fields that are off, because vLLM has more of them."""
    known = [field.name for field in fields(StructuredOutputs)]
    for name, value in given.items():
        if name not in known and value not in (None, False):
            raise BadRequest(f"structured_outputs: got {name!r}, expected one of: {', '.join(known)}")
    return StructuredOutputs(**{name: value for name, value in given.items() if name in known})


def _check_number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    """Raise unless `value` is None or a finite number within bounds."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadRequest(f"{name}: got {value!r}, expected a finite number")
    if value > high or value < low or (open_low and value == low):
        bounds = f"{'above' if open_low else 'at least'} {low:g} and at most {high:g}"
        raise BadRequest(f"{name}: got {value!r}, expected a number {bounds}")


def _check_int(name: str, value: object, low: int, high: int) -> None:
    """Raise unless `value` is None or a whole number within bounds."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadRequest(f"{name}: got {value!r}, expected a whole number from {low} to {high}")


@dataclass(frozen=True)
class ModelDefaults:
    """The values of a checkpoint's `generation_config.json`. Missing ones default to Gemma 4's."""

    temperature: float = 1.0
    top_k: int = 64
    top_p: float = 0.95
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    eos_token_ids: tuple[int, ...] = (1, 106, 50)
    suppress_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling settings of one sequence, with every default filled in."""

    temperature: float
    top_k: int  # 0 means all tokens
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]  # includes suppressed tokens, with -inf
    seed: int
    sample: int  # 0 .. n - 1. Random draws are keyed by (seed, sample, position).
    logprobs: int | None
    prompt_logprobs: int | None

    @property
    def needs_history(self) -> bool:
        """Whether earlier tokens change the distribution."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Prompt positions that stand for media such as an image or a sound: `length` placeholder ids from `start` on."""

    start: int
    length: int
    key: bytes  # derived from the content, so equal content has equal keys
    is_whole: bool = True  # its tokens attend to each other, so no chunk ends inside it

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class OutputRules:
    """What holds for a sequence's output besides its grammar."""

    min_tokens: int = 0
    end_ids: tuple[int, ...] = ()  # tokens that are not drawn before `min_tokens`
    thinking_budget: int | None = None  # the most tokens in all its thoughts, not counting the marks around them


@dataclass(frozen=True)
class Request:
    """One prompt to continue, with every default filled in."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling  # of sample 0. `sampling_of(i)` gives the others.
    n: int
    max_tokens: int
    stop_token_ids: frozenset[int]  # includes eos tokens, unless the caller ignores them
    priority: int = 0  # lower values go first. Equal ones go in order of arrival, fairly among tenants.
    deadline: float | None = None  # on the scheduler's clock, or None for no limit
    grammar: GrammarSpec | None = None  # the form that the output must have
    rules: OutputRules | None = None
    resume_lengths: tuple[int, ...] = ()  # prompt lengths that later prompts may share, each worth a ResumePoint
    media: tuple[MediaSpan, ...] = ()  # in ascending order, without overlap
    cache_salt: str = ""  # requests share cached prefixes only if their salts are equal
    tenant: str = ""  # whose request it is. Tenants get equal shares of the engine.
    items: tuple[MediaItem, ...] = ()  # the content of `media`, found by key

    @property
    def num_item_bytes(self) -> int:
        """The bytes that its media take until it ends."""
        return sum([len(item.data) for item in self.items])

    def sampling_of(self, sample: int) -> Sampling:
        return replace(self.sampling, sample=sample)


@dataclass(frozen=True, slots=True)
class Entry:
    """A sequence that takes a slot, with everything that its rows do not repeat and the runner needs to know."""

    slot: int
    token_ids: tuple[int, ...]  # the prompt, and any tokens generated before a preemption
    prompt_len: int
    sampling: Sampling
    grammar: GrammarSpec | None = None
    media: tuple[MediaSpan, ...] = ()
    rules: OutputRules | None = None


@dataclass(frozen=True, slots=True)
class PageTable:
    """The live pages of one sequence in one KV group. `pages[i]` holds the tokens of logical page `first + i`.

    Logical page p covers positions p * page_tokens .. (p + 1) * page_tokens - 1. `first` is above 0 only in groups with
    a window, where pages behind the window were given back to the arena or never needed.

    A chunk longer than the window skips positions `start .. store_from - 1`. A logical page that lies entirely among them
    has no page. Its entry is the placeholder 0, like the unused columns of a filled table. Page 0 is also an ordinary page,
    so the entry alone does not tell the two apart. No reader or writer of the row ever reaches a skipped position.
    """

    first: int
    pages: tuple[int, ...]


class Leg(NamedTuple):
    """The layers that run for a row, in fractions of all layers: from `begin / of` to `end / of`.

    A chunk may go through the layers in several legs, one per step. All but the first start from the hidden states that
    the one before left, and only the last has logits.
    """

    begin: int = 0
    end: int = 1
    of: int = 1

    @property
    def is_first(self) -> bool:
        return not self.begin

    @property
    def is_last(self) -> bool:
        return self.end == self.of

    @property
    def is_whole(self) -> bool:
        return self.of == 1

    def layers(self, num_layers: int) -> tuple[int, int]:
        """Return the first layer that runs, and the one after the last, of `num_layers` layers."""
        return num_layers * self.begin // self.of, num_layers * self.end // self.of


WHOLE = Leg()


class Row(NamedTuple):
    """The new tokens of one sequence in a step. Prefill, decode and verify differ only in the counts.

    A row is **open** when its sequence's previous row has drafts whose acceptance is not known yet. Then `start` is the lowest
    position at which it can begin, and each accepted draft moves it on by one.
    """

    slot: int
    start: int  # position of the first new token, which is the number of tokens that have KV
    num_new: int
    num_logits: int  # the last `num_logits` new tokens need logits (0 in the middle of a prompt)
    tables: tuple[PageTable, ...]  # one per KV group, in the layout's order, covering the new tokens that are stored
    store_from: tuple[int, ...]  # by KV group. New tokens before this position store no KV, because no later step sees them.
    num_drafts: int = 0  # the last `num_drafts` new tokens are proposals to verify (num_logits = num_drafts + 1)
    num_wanted: int = 0  # most proposals to make for the next step of its draw slots
    draw_slots: tuple[int, ...] = ()  # slots that draw from the last logits: usually (slot,), or n slots if samples fork
    is_prompt_logprobs: bool = False  # the logits belong to prompt tokens, so report log-probabilities of the next tokens
    num_open: int = 0  # drafts of the previous row whose acceptance is not known yet
    is_bound: bool = False  # its draws may need masks, and the results before it are known
    min_accepted: int = 0  # make no proposals if fewer of its drafts are accepted
    leg: Leg = WHOLE  # which layers run for it. A step has at most one row that skips any.

    def close(self, num_accepted: int) -> Row:
        """Return the row after `num_accepted` of its open drafts were accepted."""
        assert 0 <= num_accepted <= self.num_open, (
            f"slot {self.slot}: {num_accepted} drafts were accepted, but {self.num_open} were open"
        )
        store_from = tuple([first + num_accepted for first in self.store_from])
        return self._replace(start=self.start + num_accepted, store_from=store_from, num_open=0)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One complete step, from the scheduler to a worker. Entries come first, then transfers of pages, then the forward pass.

    Pages are saved in host memory, then loaded from it, then copied, each in the order given.

    Towers encode `encodes` beside the forward pass. Rows use only features that an earlier result reported. A plan without
    rows waits for the features that are being encoded.
    """

    step_id: int
    entries: tuple[Entry, ...]
    copies: tuple[tuple[int, int], ...]  # (from page, to page) for each shared page that is about to be written
    rows: tuple[Row, ...]
    drops: tuple[bytes, ...] = ()  # keys of features to forget before anything is encoded
    encodes: tuple[MediaItem, ...] = ()  # media whose features are computed from now on
    saves: tuple[tuple[int, int], ...] = ()  # (page, host page) of sequences that were preempted
    loads: tuple[tuple[int, int], ...] = ()  # (host page, page) of those that go on

    def with_rows(self, rows: Iterable[Row]) -> StepPlan:
        """Return the same plan with other rows."""
        return replace(self, rows=tuple(rows))

    @property
    def num_tokens(self) -> int:
        return sum(row.num_new for row in self.rows)


Logprobs = Mapping[int, float]  # token id -> log-probability, with the chosen token first


class Drawn(NamedTuple):
    """The tokens that one slot drew in a step. A verify yields the accepted drafts and one more token, other rows one token.

    A row that drew without masks yields fewer tokens if a mask turns out to be needed from some token on (see `Matcher`).
    """

    slot: int
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()
    num_proposed: int = 0  # number of proposals for the next step in the slot's buffer
    fault: str = ""  # why its grammar cannot continue, in which case the tokens do not count
    is_bound: bool = False  # its next draw needs a mask, so its next row is planned when this result is known


@dataclass(frozen=True, slots=True)
class StepResult:
    """A worker's answer to a StepPlan, in the order of its rows and their `draw_slots`."""

    step_id: int
    drawn: tuple[Drawn, ...]
    prompt_logprobs: Mapping[int, tuple[Logprobs, ...]] = field(default_factory=dict)  # by slot, for this chunk's tokens
    encoded: tuple[bytes, ...] = ()  # keys of features that have become ready

    @property
    def num_proposed(self) -> int:
        return sum([draw.num_proposed for draw in self.drawn])


class TokenDelta(Struct, array_like=True, frozen=True, gc=False):
    """The new tokens of one sample of a request. The engine makes it, and it crosses the process boundary unchanged.

    One is made for every token, so it is a msgspec Struct, which is cheap to make and encode. The garbage collector skips it.
    """

    request_id: str
    sample: int
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache (only in the first delta)
    stop_token_id: int | None = None  # the stop token that ended the sequence, which is the last of token_ids
    error: str = ""  # what went wrong, for FinishReason.ERROR
    queue_s: float = 0.0  # time in the queue (only in the first delta)
    num_accepted_drafts: int = 0  # number of token_ids that were drafted
    num_rejected_drafts: int = 0  # number of drafts that were verified with them and rejected
