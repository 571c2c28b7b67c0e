"""All settings, in parts. Built once, resolved once by the engine, then frozen and passed down in parts.

Each field's doc line becomes its command-line help and its line on the reference page.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from culet.errors import ConfigError


def option(default: Any, doc: str, *, flag: str = "", choices: tuple[str, ...] = ()) -> Any:
    """A config field with its doc line. `flag` names the command-line flag where it is not `--field-name`."""
    return field(default=default, metadata={"doc": doc, "flag": flag, "choices": choices})


MAX_BATCHED_TOKENS = 65535  # CUDA's bound on the second axis of a grid, which kernels of a whole step use for its tokens


def _positive(part: object, *names: str) -> None:
    for name in names:
        value = getattr(part, name)
        if value is not None and value <= 0:
            raise ConfigError(f"{name.replace('_', '-')}: got {value}, expected a number above 0")


BUILT_IN = "built-in"  # the model that comes with Culet


@dataclass(frozen=True)
class ModelConfig:
    """Which model, where, and in what precision."""

    model: str = option(
        BUILT_IN,
        "Folder of a Gemma 4 checkpoint, or its name on the Hugging Face hub; or the one that comes with Culet.",
        flag="MODEL",
    )
    revision: str | None = option(None, "Branch, tag or commit of a hub model.")
    device: str = option("auto", "Where to run: auto, cpu, cuda or cuda:N.")
    dtype: str = option("auto", "Precision of weights and activations.", choices=("auto", "bfloat16", "float32"))
    max_model_len: int | None = option(None, "Longest prompt + output in tokens (default: what the model allows).")
    attention_backend: str = option("auto", "Attention backend for all layers, or per group as sliding=NAME,global=NAME.")
    enforce_eager: bool = option(
        False, "Launch every kernel by itself instead of replaying CUDA graphs.", flag="--enforce-eager/--no-enforce-eager"
    )

    def __post_init__(self) -> None:
        _positive(self, "max_model_len")


@dataclass(frozen=True)
class CacheConfig:
    """How much KV cache, and in what form."""

    gpu_memory_utilization: float = option(0.92, "Share of the GPU's memory that Culet may use.")
    kv_cache_memory_bytes: int | None = option(
        None, "Bytes of KV cache (default: what is left; on a CPU, what the sequences need)."
    )
    kv_cache_dtype: str = option(
        "auto", "Precision of the KV cache: auto (the model's) or fp8 (e4m3), or per group as sliding=fp8,global=auto."
    )
    latent: bool = option(
        True, "Keep K and V of global K=V layers once, five eighths of the bytes.", flag="--latent/--no-latent"
    )
    enable_prefix_caching: bool = option(
        True, "Reuse the cache of prompts that begin alike.", flag="--enable-prefix-caching/--no-enable-prefix-caching"
    )

    def __post_init__(self) -> None:
        _positive(self, "kv_cache_memory_bytes")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu-memory-utilization: got {self.gpu_memory_utilization}, expected a number above 0 and at most 1"
            )


@dataclass(frozen=True)
class ScheduleConfig:
    """How many requests run at once, and how long the queue may grow."""

    max_num_seqs: int = option(128, "Most sequences that run at once.")
    max_num_batched_tokens: int = option(8192, "Most new tokens in one step; longer prompts are computed in chunks.")
    max_queue_len: int = option(4096, "Most requests that wait; the next one is refused.")
    async_scheduling: bool = option(
        True,
        "Launch a step before the last one's tokens are known, so that a GPU never waits (on a CPU only if asked for).",
        flag="--async-scheduling/--no-async-scheduling",
    )

    def __post_init__(self) -> None:
        _positive(self, "max_num_seqs", "max_num_batched_tokens", "max_queue_len")
        if self.max_num_batched_tokens > MAX_BATCHED_TOKENS:
            raise ConfigError(
                f"max-num-batched-tokens: got {self.max_num_batched_tokens}, at most {MAX_BATCHED_TOKENS} fit a launch",
                hint="longer prompts are computed in chunks",
            )


MAX_DRAFTS = 15  # with the bonus token, what attention takes as a row of few queries


@dataclass(frozen=True)
class DraftChoice:
    """`speculative_config` once it is read: which drafter, and how it is used."""

    method: str  # mtp or dflash
    model: str  # its folder, its name on the hub, or `random:` for one with random weights that fits the target
    revision: str | None = None  # branch, tag or commit of a hub model
    num_speculative_tokens: int | None = None  # most drafts of a round; None: what the method is best at
    attention_backend: str = "auto"  # for the drafter's own layers; the target's is planned by itself
    position: str = "engine"  # mtp: where a drafted query stands, `engine` (last token with KV) or `hf` (the one after it)
    head_dtype: str = "auto"  # mtp: precision of the assistant's own head, `auto` (the model's) or `fp8` (half the memory)
    adaptive: bool = True  # fewer drafts, down to none, where they are not accepted
    probe: bool = True  # at start, look whether drafts are accepted at all

    def __post_init__(self) -> None:
        for name in ("method", "model"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ConfigError(f"speculative-config: {name}: got {getattr(self, name)!r}, expected a name")
        count = self.num_speculative_tokens
        if count is not None and not 1 <= count <= MAX_DRAFTS:
            problem = f"got {count}, expected a whole number from 1 to {MAX_DRAFTS}"
            raise ConfigError(f"speculative-config: num_speculative_tokens: {problem}")
        if self.position not in ("engine", "hf"):
            raise ConfigError(f"speculative-config: position: got {self.position!r}, expected engine or hf")
        if self.head_dtype not in ("auto", "fp8"):
            raise ConfigError(f"speculative-config: head_dtype: got {self.head_dtype!r}, expected auto or fp8")
        if self.head_dtype == "fp8" and self.method == "dflash":
            raise ConfigError("speculative-config: head_dtype: got fp8, but a DFlash drafter takes the target's head")


_DRAFT_HINT = """as in {"method": "mtp", "model": "google/gemma-4-E4B-it-assistant", "num_speculative_tokens": 3}"""


def read_draft_choice(text: str) -> DraftChoice:
    """The JSON object of `--speculative-config`; what is wrong with it is a ConfigError that names the key."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        problem = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deep"
        raise ConfigError(f"speculative-config: not valid JSON: {problem}", hint=_DRAFT_HINT) from error
    if not isinstance(values, dict):
        raise ConfigError(f"speculative-config: got {type(values).__name__}, expected a JSON object", hint=_DRAFT_HINT)
    known = {entry.name: entry for entry in fields(DraftChoice)}
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"speculative-config: unknown key {name!r}", hint=f"known: {', '.join(known)}")
        _check_type(f"speculative-config: {name}", value, str(known[name].type))
    for name in ("method", "model"):
        if name not in values:
            raise ConfigError(f"speculative-config: {name} is missing", hint=_DRAFT_HINT)
    return DraftChoice(**values)


@dataclass(frozen=True)
class DraftConfig:
    """Speculative decoding: a small model drafts tokens, and the model itself verifies several in one step."""

    speculative_config: str | None = option(
        None, "JSON object that names a drafter: method (mtp or dflash), model, num_speculative_tokens, attention_backend."
    )

    def __post_init__(self) -> None:
        _ = self.choice  # refused now, not when the model is loaded

    @property
    def choice(self) -> DraftChoice | None:
        """What it says; None: no drafting."""
        return None if self.speculative_config is None else read_draft_choice(self.speculative_config)


@dataclass(frozen=True)
class ParallelConfig:
    """How many GPUs share one model."""

    tensor_parallel_size: int = option(1, "GPUs that share each layer.")

    def __post_init__(self) -> None:
        if self.tensor_parallel_size != 1:
            raise ConfigError(
                f"tensor-parallel-size: got {self.tensor_parallel_size}, this version serves one GPU",
                hint="leave the flag away; one replica per GPU serves more requests meanwhile",
            )


@dataclass(frozen=True)
class Config:
    """Everything an engine is built from."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    given: frozenset[str] = frozenset()  # fields the user set; the others may still be derived from model and machine


@dataclass(frozen=True)
class Limits:
    """What one client may ask of the server, and how long it may take: `--limits n=4,body_mb=64` changes some of them."""

    body_mb: int = 16  # size of a request
    messages: int = 4096  # in one chat
    tools: int = 128  # in one chat
    prompts: int = 128  # in one completions request
    n: int = 16  # samples of one prompt
    stops: int = 16  # stop strings
    logprobs: int = 20  # most likely tokens that are reported for each position
    logit_bias: int = 1024  # tokens with a bias
    connections: int = 4096  # open at once
    header_s: int = 10  # for a client to send the head of its request
    body_s: int = 30  # for a client to send the rest of it
    write_s: int = 60  # for a client to take what was sent to it
    grammar_s: int = 5  # for one schema, regex or grammar to be compiled
    step_s: int = 300  # for one step of the engine, before it is taken for dead


def read_limits(text: str) -> Limits:
    """`name=number,...` as Limits, with defaults for the rest; what is wrong is a ConfigError that names it."""
    known = {entry.name for entry in fields(Limits)}
    values: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        if name not in known:
            raise ConfigError(f"limits: unknown name {name!r}", hint=f"known: {', '.join(sorted(known))}")
        if not value.isdecimal() or not 0 < int(value) < 2**31:
            raise ConfigError(f"limits: {name}: got {value!r}, expected a whole number above 0", hint="as in n=4,body_mb=64")
        values[name] = int(value)
    return Limits(**values)


MAX_SECONDS = 10**6  # some eleven days


@dataclass(frozen=True)
class ServeConfig:
    """The web server: where it listens, who may use it, and for how much. Only `culet serve` has these."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 is every one of this machine.")
    port: int = option(8000, "Port to listen on; 0 takes a free one.")
    api_key: str | None = option(
        None, "Key that clients must send, or several separated by commas (default: CULET_API_KEY; without one, anybody may)."
    )
    served_model_name: str | None = option(None, "Name that clients call the model by, or several separated by commas.")
    allowed_origins: str = option("", "Origins whose web pages may call the server (CORS), separated by commas; * is all.")
    enable_thinking: bool = option(
        False, "Let the model think where a request does not say.", flag="--enable-thinking/--no-enable-thinking"
    )
    request_timeout: float = option(3600.0, "Seconds that one request may take in all.")
    queue_timeout: float = option(600.0, "Seconds that a request may wait for its first token.")
    drain_timeout: float = option(30.0, "Seconds that running requests are given to end after Ctrl-C or SIGTERM.")
    max_engine_restarts: int = option(0, "Times that a dead engine is started again; after that the server exits.")
    limits: str = option("", "Bounds on single requests and clients, as n=4,body_mb=64; the guide to serving lists them.")
    log_format: str = option("text", "Form of the log.", choices=("text", "json"))
    log_requests: bool = option(True, "Log a line for each request.", flag="--log-requests/--no-log-requests")

    def __post_init__(self) -> None:
        for name in ("request_timeout", "queue_timeout", "drain_timeout"):
            value = getattr(self, name)
            if not 0 <= value <= MAX_SECONDS or (value == 0 and name != "drain_timeout"):
                raise ConfigError(f"{name.replace('_', '-')}: got {value}, expected seconds, at most {MAX_SECONDS}")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port: got {self.port}, expected a number from 0 to 65535")
        if self.max_engine_restarts < 0:
            raise ConfigError(f"max-engine-restarts: got {self.max_engine_restarts}, expected 0 or more")
        read_limits(self.limits)


PARTS: dict[str, type] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "schedule": ScheduleConfig,
    "draft": DraftConfig,
    "parallel": ParallelConfig,
}


SERVE_PARTS: dict[str, type] = {"serve": ServeConfig}  # apart from the others: no engine is built from it


def config_fields(parts: Mapping[str, type] = PARTS) -> dict[str, tuple[str, Field[Any]]]:
    """Every setting by its name, with the part it belongs to."""
    return {entry.name: (part, entry) for part, kind in parts.items() for entry in fields(kind)}


_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "None": (type(None),),
}


def _check_type(name: str, value: object, annotation: str) -> None:
    """Refuse a value that is not of the annotated type (`int | None`); a bool is no number."""
    kinds = [part.strip() for part in annotation.split("|")]
    allowed = tuple(kind for part in kinds for kind in _TYPES[part])
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        raise ConfigError(f"{name.replace('_', '-')}: got {value!r}, expected {annotation.replace(' | ', ' or ')}")


def build_config(given: Mapping[str, Any]) -> Config:
    """A Config with the `given` settings and defaults for the rest; an unknown name or a bad choice is an error."""
    return Config(**_build_parts(given, PARTS), given=frozenset(given))


def build_serve_config(given: Mapping[str, Any]) -> ServeConfig:
    """The same for the settings of the web server."""
    serve: ServeConfig = _build_parts(given, SERVE_PARTS)["serve"]
    return serve


def _build_parts(given: Mapping[str, Any], parts: Mapping[str, type]) -> dict[str, Any]:
    known = config_fields(parts)
    chosen: dict[str, dict[str, Any]] = {part: {} for part in parts}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"unknown setting: {name!r}", hint=f"known: {', '.join(known)}")
        part, entry = known[name]
        if name == "speculative_config" and isinstance(value, Mapping):  # from Python it may come as it is
            value = json.dumps(dict(value))
        _check_type(name, value, str(entry.type))
        choices = entry.metadata["choices"]
        if choices and value not in choices:
            raise ConfigError(f"{name.replace('_', '-')}: got {value!r}", hint=f"expected one of: {', '.join(choices)}")
        chosen[part][name] = value
    return {part: kind(**chosen[part]) for part, kind in parts.items()}
