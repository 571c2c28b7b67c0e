"""All settings, grouped in parts. A Config is built once, completed once by the engine, and then frozen.

Each field's doc line becomes its `--help` text and its line on the reference page.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from culet.errors import ConfigError
from culet.hardware import SMALL_GPU_BYTES, SMALL_GPU_MEDIA_BYTES, SMALL_GPU_TOKENS
from culet.limits import MEDIA_KINDS, read_limits, read_media_limits, read_object
from culet.thinking import read_thinking_budgets


def option(default: Any, doc: str, *, elsewhere: str = "", flag: str = "", choices: tuple[str, ...] = ()) -> Any:
    """Return a field with its doc line. `elsewhere` lists other machines' defaults. Set `flag` if it is not `--field-name`."""
    return field(default=default, metadata={"doc": doc, "elsewhere": elsewhere, "flag": flag, "choices": choices})


MAX_BATCHED_TOKENS = 65535  # CUDA's limit for the second axis of a grid, which some kernels use for the tokens of a step


def _positive(part: object, *names: str) -> None:
    for name in names:
        value = getattr(part, name)
        if value is not None and value <= 0:
            raise ConfigError(f"{name.replace('_', '-')}: got {value}, expected a number above 0")


BUILT_IN = "built-in"  # the model that comes with Culet


@dataclass(frozen=True)
class ModelConfig:
    """The model, its device and its precision."""

    model: str = option(
        BUILT_IN,
        "Gemma 4 checkpoint: a folder, a name on the Hugging Face Hub, or the small model that comes with Culet.",
        flag="MODEL",
    )
    revision: str | None = option(None, "Branch, tag or commit of a model on the Hub.")
    device: str = option("auto", "Device to run on: auto, cpu, cuda or cuda:N.")
    dtype: str = option("auto", "Precision of weights and activations.", choices=("auto", "bfloat16", "float32"))
    quantization: str = option(
        "auto",
        "Precision to which unquantised weights are quantised while loading; auto keeps that of the checkpoint.",
        choices=("auto", "fp8", "int4"),
    )
    head_quantization: str = option(
        "auto",
        "Precision to which the embedding table (also the head) is quantised while loading; this changes answers a little.",
        choices=("auto", "fp8", "int4"),
    )
    max_model_len: int | None = option(None, "Maximum length of prompt plus output, in tokens (default: the model's limit).")
    attention_backend: str = option(
        "auto", "Attention backend: one name for all layers, or one per group, as in sliding=NAME,global=NAME."
    )
    chat_template: str | None = option(
        None, "Chat template: a Jinja file, or built-in for Culet's own (default: the checkpoint's)."
    )
    skip_tokenizer_init: bool = option(
        False,
        "Do not load the tokenizer: prompts and outputs are token ids only (in the API: /v1/completions).",
        flag="--skip-tokenizer-init/--no-skip-tokenizer-init",
    )
    allow_control_tokens: bool = option(
        False,
        "Treat control tokens such as <|turn> in messages and tools as control tokens, not as plain text, so that messages can "
        "forge turns.",
        flag="--allow-control-tokens/--no-allow-control-tokens",
    )
    enforce_eager: bool = option(
        False, "Launch kernels one by one instead of replaying CUDA graphs.", flag="--enforce-eager/--no-enforce-eager"
    )

    def __post_init__(self) -> None:
        _positive(self, "max_model_len")


@dataclass(frozen=True)
class CacheConfig:
    """The size and format of the KV cache."""

    gpu_memory_utilization: float = option(0.92, "Fraction of the GPU's memory that Culet may use.")
    kv_cache_memory_bytes: int | None = option(
        None, "Size of the KV cache in bytes (default: all memory that is left; on a CPU, enough for max-num-seqs sequences)."
    )
    kv_cache_dtype: str = option(
        "auto", "Precision of the KV cache: auto (the model's), fp8 (e4m3), or one per group, as in sliding=fp8,global=auto."
    )
    latent: bool = option(
        True, "Store K and V of global K=V layers once, in five eighths of the memory.", flag="--latent/--no-latent"
    )
    enable_prefix_caching: bool = option(
        True, "Reuse the KV cache of prompts that share a prefix.", flag="--enable-prefix-caching/--no-enable-prefix-caching"
    )
    swap_space: float = option(
        8.0,
        "Host memory per engine for the KV cache of preempted sequences, in GiB. If it is full, their KV is computed again. At "
        "most a quarter of the free memory is used; 0 turns this off.",
    )

    def __post_init__(self) -> None:
        _positive(self, "kv_cache_memory_bytes")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu-memory-utilization: got {self.gpu_memory_utilization}, expected a number above 0 and at most 1"
            )
        if not 0 <= self.swap_space < math.inf:
            raise ConfigError(f"swap-space: got {self.swap_space}, expected a number of GiB, or 0 to turn it off")


@dataclass(frozen=True)
class ScheduleConfig:
    """How many requests run and wait at the same time."""

    max_num_seqs: int = option(128, "Maximum number of sequences that run at the same time.", elsewhere="32 on a CPU")
    max_num_batched_tokens: int = option(
        8192,
        "Maximum number of new tokens in one step; longer prompts are computed in chunks.",
        elsewhere="2048 on GPUs with less than 40 GiB, 1024 on a CPU",
    )
    max_queue_len: int = option(4096, "Maximum number of waiting requests; further ones are refused.")
    async_scheduling: bool = option(
        True,
        "Launch each step before the previous one's tokens are known, so that the GPU never waits.",
        elsewhere="off on a CPU",
        flag="--async-scheduling/--no-async-scheduling",
    )
    max_step_ms: int = option(
        100,
        "Target maximum time for a step that contains part of a prompt while answers are running; 0 for no limit, as in LLM. "
        "Chunks are sized by measured times. While no answer is running, they have up to --max-num-batched-tokens tokens.",
    )

    def __post_init__(self) -> None:
        _positive(self, "max_num_seqs", "max_num_batched_tokens", "max_queue_len")
        if self.max_step_ms < 0:
            raise ConfigError(f"max-step-ms: got {self.max_step_ms}, expected a number of milliseconds, or 0 for no limit")
        if self.max_num_batched_tokens > MAX_BATCHED_TOKENS:
            raise ConfigError(
                f"max-num-batched-tokens: got {self.max_num_batched_tokens}, expected at most {MAX_BATCHED_TOKENS}",
                hint="longer prompts are computed in chunks",
            )


MAX_DRAFTS = 15  # with the bonus token, the longest row that decode attention serves


@dataclass(frozen=True)
class DraftChoice:
    """The parsed `speculative_config`: the drafter and how to use it."""

    method: str  # mtp, dflash or suffix (which vLLM calls ngram)
    model: str = ""  # a folder, a name on the Hub, or `random:` for random weights that fit the target. suffix has none.
    revision: str | None = None  # branch, tag or commit of a model on the Hub
    num_speculative_tokens: int | None = None  # maximum drafts per round, or None for the method's default
    attention_backend: str = "auto"  # for the drafter's layers (the target has its own setting)
    position: str = "engine"  # for mtp: position of a drafted query, `engine` (last token with KV) or `hf` (the one after it)
    head_dtype: str = "auto"  # for mtp: precision of the drafter's head, `auto` (the model's) or `fp8` (half the memory)
    quantization: str = "auto"  # precision of the drafter's matrices, `auto` (the checkpoint's) or `fp8` (quantised at load)
    adaptive: bool = True  # propose fewer drafts, down to none, when they are not accepted
    probe: bool = True  # at start, check that drafts are accepted
    suffix: bool = False  # for mtp and dflash: copy from the request's own text instead where it repeats itself
    prompt_lookup_min: int = 3  # for suffix drafting: fewest tokens that must repeat
    prompt_lookup_max: int = 8  # for suffix drafting: most tokens that are compared, to find the longest repetition

    def __post_init__(self) -> None:
        for name in ("method",) if self.method == "suffix" else ("method", "model"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ConfigError(f"speculative-config: {name}: got {getattr(self, name)!r}, expected a name")
        count = self.num_speculative_tokens
        if count is not None and not 1 <= count <= MAX_DRAFTS:
            problem = f"got {count}, expected a whole number from 1 to {MAX_DRAFTS}"
            raise ConfigError(f"speculative-config: num_speculative_tokens: {problem}")
        for name, known in (("position", "engine or hf"), ("head_dtype", "auto or fp8"), ("quantization", "auto or fp8")):
            if (value := getattr(self, name)) not in known.split(" or "):
                raise ConfigError(f"speculative-config: {name}: got {value!r}, expected {known}")
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max <= MAX_DRAFTS:
            problem = f"got {self.prompt_lookup_min} and {self.prompt_lookup_max}, expected min <= max, from 1 to {MAX_DRAFTS}"
            raise ConfigError(f"speculative-config: prompt_lookup_min and prompt_lookup_max: {problem}")
        if self.head_dtype == "fp8" and self.method == "dflash":
            raise ConfigError("speculative-config: head_dtype: got fp8, but a DFlash drafter uses the target's head")

    @property
    def match_lens(self) -> tuple[int, int]:
        """The fewest and the most tokens that suffix drafting compares."""
        return self.prompt_lookup_min, self.prompt_lookup_max


_DRAFT_HINT = """example: {"method": "mtp", "model": "google/gemma-4-E4B-it-assistant", "num_speculative_tokens": 3}"""


def read_draft_choice(text: str) -> DraftChoice:
    """Parse the JSON object of `--speculative-config`. Errors name the bad key."""
    values = read_object("speculative-config", text, _DRAFT_HINT)
    known = {entry.name: entry for entry in fields(DraftChoice)}
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"speculative-config: unknown key {name!r}", hint=f"known keys: {', '.join(known)}")
        _check_type(f"speculative-config: {name}", value, str(known[name].type))
    if values.get("method") == "ngram":
        values["method"] = "suffix"
    for name in ("method",) if values.get("method") == "suffix" else ("method", "model"):
        if name not in values:
            raise ConfigError(f"speculative-config: {name} is missing", hint=_DRAFT_HINT)
    return DraftChoice(**values)


@dataclass(frozen=True)
class DraftConfig:
    """Speculative decoding: a small model drafts tokens, and the model verifies several of them in one step."""

    speculative_config: str | None = option(
        None, "Drafter, as a JSON object with method (mtp, dflash or suffix), model, num_speculative_tokens and more."
    )

    def __post_init__(self) -> None:
        _ = self.choice  # raises on a bad setting before the model is loaded

    @property
    def choice(self) -> DraftChoice | None:
        """The parsed setting, or None for no drafting."""
        return None if self.speculative_config is None else read_draft_choice(self.speculative_config)


NCCL = "nccl"


@dataclass(frozen=True)
class ParallelConfig:
    """How many GPUs share one model."""

    tensor_parallel_size: int = option(1, "Number of GPUs, or processes on a CPU, that share each layer; not for E2B and E4B.")
    all_reduce: str = option(
        "auto",
        "How GPUs combine their partial sums: auto (symmetric memory if it passes a startup test, otherwise NCCL) or nccl.",
        choices=("auto", NCCL),
    )

    def __post_init__(self) -> None:
        _positive(self, "tensor_parallel_size")


@dataclass(frozen=True)
class MediaConfig:
    """Images, video and audio in prompts."""

    language_model_only: bool = option(
        False,
        "Load only the text decoder: prompts with images, video or audio are refused.",
        flag="--language-model-only/--no-language-model-only",
    )
    limit_mm_per_prompt: str | None = option(
        None,
        "Maximum number of items per kind in a prompt, as a JSON object with image, video and audio; 0 loads no tower.",
    )
    media_cache_memory_bytes: int = option(
        512 << 20,
        "Size of the cache of image, video and audio features, which all requests share, in bytes.",
        elsewhere=f"{SMALL_GPU_MEDIA_BYTES} on GPUs with less than 40 GiB",
    )
    max_encoder_tokens: int = option(
        560,
        "Maximum number of image, video and audio tokens to encode beside a decoding step; a single item may exceed it.",
    )
    max_media_bytes: int = option(
        1 << 30, "Maximum total size of decoded images, video and audio, in bytes; requests that would exceed it are refused."
    )
    allowed_media_domains: str = option(
        "",
        "Hosts from which URLs of images, video and audio may be fetched (https only), separated by commas; none by default.",
    )
    image_mask: str = option(
        "trained",
        "Which tokens an image's tokens see on 12B: those of training (most likely), or those of transformers.",
        choices=("trained", "transformers"),
    )

    def __post_init__(self) -> None:
        _positive(self, "media_cache_memory_bytes", "max_encoder_tokens", "max_media_bytes")
        _ = self.limits  # raises on a bad setting before the model is loaded

    @property
    def limits(self) -> dict[str, int | None]:
        """The most items in one prompt, by kind. None is no limit, and 0 means that the kind is off."""
        given = read_media_limits(self.limit_mm_per_prompt or "{}")
        return {kind: 0 if self.language_model_only else given.get(kind) for kind in MEDIA_KINDS}

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of media that prompts may have, if the checkpoint has a tower for them."""
        return frozenset(kind for kind, most in self.limits.items() if most != 0)


@dataclass(frozen=True)
class Config:
    """Everything an engine is built from."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    media: MediaConfig = field(default_factory=MediaConfig)
    given: frozenset[str] = frozenset()  # fields that the user set. Others may be derived from the model and the machine.

    def tokens_per_step(self, gpu_bytes: int) -> int:
        """Return the most tokens in a step. By default, a small GPU leaves the memory that long steps need to the cache."""
        most = self.schedule.max_num_batched_tokens
        is_large = gpu_bytes >= SMALL_GPU_BYTES or "max_num_batched_tokens" in self.given
        return most if is_large else min(most, SMALL_GPU_TOKENS)

    def media_cache_bytes(self, gpu_bytes: int) -> int:
        """Return the size of the cache of features. By default, a small GPU leaves more memory to the KV cache."""
        most = self.media.media_cache_memory_bytes
        is_large = gpu_bytes >= SMALL_GPU_BYTES or "media_cache_memory_bytes" in self.given
        return most if is_large else min(most, SMALL_GPU_MEDIA_BYTES)


MAX_SECONDS = 10**6  # about eleven days


@dataclass(frozen=True)
class ServeConfig:
    """The web server: its address, its clients and their limits. Only `culet serve` has these settings."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 means all interfaces.")
    port: int = option(8000, "Port to listen on; 0 picks a free one.")
    uds: str | None = option(None, "Unix socket to listen on instead of a port.")
    reuse_port: bool = option(
        False,
        "Share the port with a running server, and listen only once the model is ready, so that a new version can take over.",
        flag="--reuse-port/--no-reuse-port",
    )
    ssl_certfile: str | None = option(None, "Certificate for HTTPS, a PEM file with the whole chain.")
    ssl_keyfile: str | None = option(None, "Private key of the certificate (default: it is in the same file).")
    ssl_keyfile_password: str | None = option(None, "Password of the private key.")
    api_key: str | None = option(
        None,
        "API keys that clients must send, separated by commas (default: CULET_API_KEY; if neither is set, no key is needed).",
    )
    api_key_file: str | None = option(
        None, "TOML file with API keys, their names, permissions and limits; read again on SIGHUP (see the operations guide)."
    )
    served_model_name: str | None = option(
        None, "Names of the model in the API, separated by commas (default: derived from the model)."
    )
    allowed_origins: str = option("", "Origins whose web pages may call the server (CORS), separated by commas; * allows all.")
    enable_thinking: bool = option(
        False, "Let the model think unless a request says otherwise.", flag="--enable-thinking/--no-enable-thinking"
    )
    thinking_budgets: str = option(
        "minimal=256,low=1024,medium=4096,high=16384",
        "Maximum number of thinking tokens for each reasoning effort; an effort that is omitted has no budget.",
    )
    constrain_tool_calls: bool = option(
        True,
        "Restrict tool calls to the declared tools and their schemas, starting at the token that opens a call.",
        flag="--constrain-tool-calls/--no-constrain-tool-calls",
    )
    unmarked_tool_calls: bool = option(
        False,
        "Accept call:NAME{...} of a declared tool even without the tokens around it; off by default, because a quoted call "
        "would count as a call, too.",
        flag="--unmarked-tool-calls/--no-unmarked-tool-calls",
    )
    repeat_tool_call_ids: bool = option(
        False,
        "Repeat a tool call's id and name in each streamed part of it; off by default, because some clients join the parts.",
        flag="--repeat-tool-call-ids/--no-repeat-tool-call-ids",
    )
    clamp_max_tokens: bool = option(
        False,
        "Lower a max_tokens that exceeds the context instead of refusing the request; always on for /v1/messages.",
        flag="--clamp-max-tokens/--no-clamp-max-tokens",
    )
    store_responses: bool = option(
        False,
        "Keep the answers of /v1/responses in memory, so that previous_response_id can continue them; --limits bounds them.",
        flag="--store-responses/--no-store-responses",
    )
    text_workers: int = option(
        2, "Number of prompts that are rendered and tokenized at the same time; long prompts leave one worker free."
    )
    request_timeout: float = option(3600.0, "Maximum duration of a request, in seconds.")
    queue_timeout: float = option(600.0, "Maximum wait for a request's first token, in seconds.")
    drain_timeout: float = option(30.0, "Seconds that running requests have to finish after Ctrl-C or SIGTERM.")
    max_engine_restarts: int = option(
        3, "Restarts of an engine within --engine-restart-window before it is given up; the server exits when none is left."
    )
    engine_restart_window: float = option(600.0, "Period to which --max-engine-restarts applies, in seconds.")
    data_parallel_size: int = option(
        1, "Number of engines, each with its own copy of the model, on its own GPU or with a share of the CPU's threads."
    )
    kv_events_config: str | None = option(
        None, "Tell routers over ZMQ which prompts the engine can resume; the value is a JSON object with vLLM's keys."
    )
    limits: str = option("", "Limits per request and client, as in n=4,body_mb=64; the serving guide lists them.")
    log_format: str = option("text", "Format of the log.", choices=("text", "json"))
    log_requests: bool = option(True, "Log one line per request.", flag="--log-requests/--no-log-requests")

    def __post_init__(self) -> None:
        for name in ("request_timeout", "queue_timeout", "drain_timeout", "engine_restart_window"):
            value = getattr(self, name)
            if not 0 <= value <= MAX_SECONDS or (value == 0 and name != "drain_timeout"):
                raise ConfigError(f"{name.replace('_', '-')}: got {value}, expected a number of seconds up to {MAX_SECONDS}")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port: got {self.port}, expected a number from 0 to 65535")
        _positive(self, "text_workers", "data_parallel_size")
        if self.max_engine_restarts < 0:
            raise ConfigError(f"max-engine-restarts: got {self.max_engine_restarts}, expected 0 or more")
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_keyfile_password):
            raise ConfigError("ssl-keyfile: got a key without a certificate", hint="also set --ssl-certfile")
        if self.uds is not None and self.reuse_port:
            raise ConfigError("reuse-port: got a Unix socket, which cannot be shared", hint="omit --uds or --reuse-port")
        read_limits(self.limits)
        read_thinking_budgets(self.thinking_budgets)


PARTS: dict[str, type] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "schedule": ScheduleConfig,
    "draft": DraftConfig,
    "parallel": ParallelConfig,
    "media": MediaConfig,
}


SERVE_PARTS: dict[str, type] = {"serve": ServeConfig}  # separate because no engine is built from these
SERVE_ONLY_HINT = "only `culet serve` has this setting; in Python, an LLM is a single engine without a server"


def config_fields(parts: Mapping[str, type] = PARTS) -> dict[str, tuple[str, Field[Any]]]:
    """Return every setting by name, with the part it belongs to."""
    return {entry.name: (part, entry) for part, kind in parts.items() for entry in fields(kind)}


_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "None": (type(None),),
}


def _check_type(name: str, value: object, annotation: str) -> None:
    """Raise if a value does not have the annotated type (such as `int | None`). A bool is not a number."""
    allowed = tuple(kind for part in annotation.split("|") for kind in _TYPES[part.strip()])
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        raise ConfigError(f"{name.replace('_', '-')}: got {value!r}, expected {annotation.replace(' | ', ' or ')}")


JSON_SETTINGS = ("speculative_config", "limit_mm_per_prompt")  # in Python they may be dicts


def build_config(given: Mapping[str, Any]) -> Config:
    """Return a Config with the `given` settings, and defaults for the rest."""
    return Config(**_build_parts(given, PARTS), given=frozenset(given))


def build_serve_config(given: Mapping[str, Any]) -> ServeConfig:
    """Return a ServeConfig with the `given` settings, and defaults for the rest."""
    serve: ServeConfig = _build_parts(given, SERVE_PARTS)["serve"]
    return serve


def _build_parts(given: Mapping[str, Any], parts: Mapping[str, type]) -> dict[str, Any]:
    known = config_fields(parts)
    chosen: dict[str, dict[str, Any]] = {part: {} for part in parts}
    for name, value in given.items():
        if name not in known:
            hint = SERVE_ONLY_HINT if name in config_fields(SERVE_PARTS) else f"known settings: {', '.join(known)}"
            raise ConfigError(f"unknown setting: {name!r}", hint=hint)
        part, entry = known[name]
        if name in JSON_SETTINGS and isinstance(value, Mapping):
            value = json.dumps(dict(value))
        _check_type(name, value, str(entry.type))
        choices = entry.metadata["choices"]
        if choices and value not in choices:
            raise ConfigError(f"{name.replace('_', '-')}: got {value!r}, expected one of: {', '.join(choices)}")
        chosen[part][name] = value
    return {part: kind(**chosen[part]) for part, kind in parts.items()}
