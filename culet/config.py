"""All settings, in parts. Built once, resolved once by the engine, then frozen and passed down in parts.

Each field's doc line becomes its command-line help and its line on the reference page.
"""

from __future__ import annotations

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


@dataclass(frozen=True)
class ModelConfig:
    """Which model, where, and in what precision."""

    model: str = option("", "Folder of a Gemma 4 checkpoint, or its name on the Hugging Face hub.", flag="MODEL")
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
    kv_cache_dtype: str = option("auto", "Precision of the KV cache.", choices=("auto", "bfloat16", "float32"))
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
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    given: frozenset[str] = frozenset()  # fields the user set; the others may still be derived from model and machine


PARTS: dict[str, type] = {"model": ModelConfig, "cache": CacheConfig, "schedule": ScheduleConfig, "parallel": ParallelConfig}


def config_fields() -> dict[str, tuple[str, Field[Any]]]:
    """Every setting by its name, with the part it belongs to."""
    return {entry.name: (part, entry) for part, kind in PARTS.items() for entry in fields(kind)}


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
    known = config_fields()
    chosen: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"unknown setting: {name!r}", hint=f"known: {', '.join(known)}")
        part, entry = known[name]
        _check_type(name, value, str(entry.type))
        choices = entry.metadata["choices"]
        if choices and value not in choices:
            raise ConfigError(f"{name.replace('_', '-')}: got {value!r}", hint=f"expected one of: {', '.join(choices)}")
        chosen[part][name] = value
    parts = {part: kind(**chosen[part]) for part, kind in PARTS.items()}
    return Config(**parts, given=frozenset(given))
