"""The data behind `culet plan`: attention backends, weights, cache and what fits on a GPU. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from culet.attention.plan import AttentionPlan, plan_attention
from culet.cache.spec import DTYPE_NAMES, CacheLayout, plan_cache, share_among, stored_as
from culet.cli.planning.ranks import STEP_TOKENS, Exchange, RankFacts, Share, cache_share, weight_shares
from culet.config import Config, ModelConfig
from culet.drafters.base import DrafterPlan, cache_specs, open_drafter, plan_drafter_attention, target_groups
from culet.errors import CheckpointError, ConfigError
from culet.hardware import Gpu, find_gpu
from culet.layers.weight.byte_sizes import bytes_per_value
from culet.layers.weight.quantised.scheme import GGUF, is_widened, kind_of
from culet.media.items import MediaKind
from culet.models.folder import read_config
from culet.models.quantised.config import read_quantisation
from culet.models.quantised.head import check_head
from culet.models.quantised.part_bytes import check_columns, check_shares, part_bytes
from culet.models.sizes import (
    Room,
    graph_bytes,
    pages_of_sequence,
    slabs_of_sequence,
    text_weights,
    working_bytes,
)
from culet.models.spec import ModelSpec, read_spec
from culet.models.towers.spec import TowerSpecs, read_towers
from culet.models.variants import VARIANTS

DEFAULT_SEQ_LENS = (2000, 8192, 32768)
_ITEMSIZES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Facts:
    """The plan before it is written as JSON, tables or a picture."""

    name: str
    spec: ModelSpec
    values: dict[str, Any]  # config.json
    towers: TowerSpecs  # all that the checkpoint has
    gpu: Gpu
    config: Config
    dtype: str
    kv_dtype: str
    seq_lens: tuple[int, ...]
    layouts: dict[bool, CacheLayout]  # with (True) and without the latent
    attention: AttentionPlan  # for the layout that would be used
    drafter: DrafterPlan | None = None
    draft_attention: AttentionPlan | None = None  # planned separately from the target's

    @property
    def latent(self) -> bool:
        """Whether the layout that would be used stores K and V of K=V layers once."""
        return self.config.cache.latent

    @property
    def layout(self) -> CacheLayout:
        return self.layouts[self.latent]

    @property
    def loaded_towers(self) -> TowerSpecs:
        """The towers that the settings want."""
        return self.towers.only(frozenset(MediaKind(kind) for kind in self.config.media.kinds))

    @property
    def precision(self) -> str:
        """The precision of most matrices: that of the checkpoint, or the one that they are quantised to."""
        quantisation = read_quantisation(self.values)
        if quantisation is None:
            chosen = self.config.model.quantization
            return self.dtype if chosen == "auto" else chosen
        kinds = dict.fromkeys(group.scheme.kind for group in quantisation.groups)
        if quantisation.method == GGUF and not kinds:
            return self.dtype
        return "+".join(kinds) or kind_of("int", quantisation.num_bits)

    @property
    def head_precision(self) -> str:
        """The precision that the head is quantised to, or auto."""
        return self.config.model.head_quantization

    @property
    def num_ranks(self) -> int:
        return self.config.parallel.tensor_parallel_size

    @property
    def rank_memory_bytes(self) -> int:
        """The memory of each rank: that of its GPU. On a CPU, all ranks share the machine's memory equally."""
        return self.gpu.memory_bytes if self.gpu.arch.is_gpu else self.gpu.memory_bytes // self.num_ranks

    @property
    def max_model_len(self) -> int:
        return self.config.model.max_model_len or self.spec.max_position


def gather(model: str, gpu_name: str, config: Config, seq_lens: Sequence[int] = ()) -> Facts:
    """Read the model's config and plan for it."""
    name, values = _find_model(model)
    spec = read_spec(values)
    if config.model.quantization != "auto" and read_quantisation(values) is not None:
        problem = f"quantization: got {config.model.quantization}, but {name} is already quantised"
        raise ConfigError(problem, hint="omit --quantization")
    check_head(spec, values, config.model.head_quantization, name)
    gpu = find_gpu(gpu_name)
    auto = "bfloat16" if gpu.arch.has_bfloat16 else "float32"
    dtype = auto if config.model.dtype == "auto" else config.model.dtype
    kv_dtype = dtype if config.cache.kv_cache_dtype == "auto" else config.cache.kv_cache_dtype
    drafts = config.draft.choice
    drafter = None if drafts is None else open_drafter(drafts, spec)
    kept = {latent: cache_specs(spec, drafter, _ITEMSIZES[dtype], latent=latent) for latent in (True, False)}
    num_ranks = config.parallel.tensor_parallel_size
    check_columns(spec, values)
    check_shares(spec, values, config.model.quantization, num_ranks)
    stored = {latent: stored_as(specs, config.cache.kv_cache_dtype) for latent, specs in kept.items()}
    layouts = {latent: plan_cache(share_among(specs, num_ranks)) for latent, specs in stored.items()}
    layout = layouts[config.cache.latent]
    groups = target_groups(layout)
    readers = {group.name: spec.readers(group.layers) for group in groups}
    choice = config.model.attention_backend
    return Facts(
        name=name,
        spec=spec,
        values=values,
        towers=read_towers(values),
        gpu=gpu,
        config=config,
        dtype=dtype,
        kv_dtype=kv_dtype,
        seq_lens=_check_lengths(config.model, spec, seq_lens),
        layouts=layouts,
        attention=plan_attention(groups, spec.layers[0].num_heads, gpu, choice, readers=readers),
        drafter=drafter,
        draft_attention=None
        if drafter is None or drafts is None
        else plan_drafter_attention(drafter, layout, gpu, drafts.attention_backend),
    )


def _find_model(model: str) -> tuple[str, dict[str, Any]]:
    """Return (name, config.json) for a folder, a file, a variant or a model on the Hub."""
    by_name = {name.lower(): name for name in VARIANTS} | {"26b": "26B-A4B"}
    if not Path(model).exists() and model.lower() in by_name:
        name = by_name[model.lower()]
        return f"Gemma 4 {name}", VARIANTS[name]
    try:
        return model, read_config(model)
    except CheckpointError as error:
        if "/" not in model and not Path(model).exists():
            error.hint = f"pass one of {', '.join(VARIANTS)}, a checkpoint folder, a config.json, or a model on the Hub"
        raise


def _check_lengths(config: ModelConfig, spec: ModelSpec, seq_lens: Sequence[int]) -> tuple[int, ...]:
    """Return the given sequence lengths, or the defaults that are within the limit. Raise if a length is over the limit."""
    limit = spec.max_position
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(f"max-model-len: got {config.max_model_len}, but the model supports at most {limit} tokens")
    limit = config.max_model_len or limit
    for length in seq_lens:
        if not 1 <= length <= limit:
            raise ConfigError(f"seq-len: got {length}, expected a whole number from 1 to {limit}")
    return tuple(dict.fromkeys(seq_lens)) or tuple(length for length in DEFAULT_SEQ_LENS if length <= limit) or (limit,)


# The plan as data


def report(facts: Facts) -> dict[str, Any]:
    """Return the plan as one JSON object. Its keys are stable."""
    spec = facts.spec
    return {
        "model": {
            "name": facts.name,
            "architecture": spec.architecture,
            "num_layers": len(spec.layers),
            "max_position": spec.max_position,
            "image_attention": spec.image_attention,
        },
        "gpu": {"name": facts.gpu.name, "arch": facts.gpu.arch.name, "memory_bytes": facts.gpu.memory_bytes},
        "settings": {
            "dtype": facts.dtype,
            "quantization": facts.precision,
            "head_quantization": facts.head_precision,
            "kv_cache_dtype": facts.kv_dtype,
            "latent": facts.latent,
            "gpu_memory_utilization": facts.config.cache.gpu_memory_utilization,
            "max_model_len": facts.max_model_len,
            "media": sorted(facts.loaded_towers.kinds),
            "attention_backend": facts.config.model.attention_backend,
            "tensor_parallel_size": facts.num_ranks,
        },
        "attention": _attention(facts.attention),
        "drafter": _drafter(facts),
        "weights": weights_of(facts),
        "cache": [_cache(facts, latent) for latent in (True, False)],
        "ranks": _ranks(facts),
        "fits": [fit_of(facts, text_only, latent) for text_only in (True, False) for latent in (True, False)],
    }


def _attention(plan: AttentionPlan) -> list[dict[str, Any]]:
    return [
        {
            "group": group.need.group,
            "layers": list(group.need.layers),
            "head_dim": group.need.head_dim,
            "num_heads": group.need.num_heads,
            "num_kv_heads": group.need.num_kv_heads,
            "window": group.need.window,
            "latent": group.need.latent,
            "backend": group.backend,
            "why": group.why,
            "others": dict(group.others),
        }
        for group in plan.groups
    ]


def _drafter(facts: Facts) -> dict[str, Any] | None:
    drafter = facts.drafter
    if drafter is None or facts.draft_attention is None:
        return None
    return {
        "method": drafter.method,
        "model": drafter.model,
        "max_drafts": drafter.max_drafts,
        "reads_target_pages": drafter.reads_target_pages,
        "taps": list(drafter.taps),
        "attention": _attention(facts.draft_attention),
        "weight_bytes": draft_bytes(facts),
    }


def draft_bytes(facts: Facts) -> int:
    return 0 if facts.drafter is None else facts.drafter.weight_bytes(_ITEMSIZES[facts.dtype])


def _part_bytes(facts: Facts, num_ranks: int) -> dict[str, int]:
    itemsize, precision = _ITEMSIZES[facts.dtype], facts.config.model.quantization
    return part_bytes(facts.spec, facts.values, itemsize, precision, num_ranks, head_precision=facts.head_precision)


def weights_of(facts: Facts) -> dict[str, Any]:
    """Return the parameters and bytes of each part of the text decoder and the towers."""
    each = bytes_per_value(_ITEMSIZES[facts.dtype])
    text, towers, loaded = text_weights(facts.spec), facts.towers.num_weights, facts.loaded_towers.num_weights
    sizes = _part_bytes(facts, 1)
    return {
        "text": {part: {"parameters": count, "bytes": sizes[part]} for part, count in text.items()},
        "towers": {
            part: {"parameters": count, "bytes": round(count * each), "is_loaded": part in loaded}
            for part, count in towers.items()
        },
        "text_bytes": sum(sizes.values()),
        "tower_bytes": round(sum(loaded.values()) * each),
    }


def shares_of(facts: Facts, *, text_only: bool = False) -> list[Share]:
    """Return how ranks share the weights of the text decoder, the drafter and, unless `text_only`, the loaded towers."""
    sizes = _part_bytes(facts, facts.num_ranks)
    shares = weight_shares(facts.spec, facts.layout, sizes, facts.num_ranks)
    drafter = facts.drafter
    size = 0 if drafter is None else drafter.weight_bytes(_ITEMSIZES[facts.dtype], facts.layout)
    if drafter is not None and size and drafter.reads_target_pages:
        shares.append(Share(drafter.method, "like the target", "it reads the target's pages", size))
    elif drafter is not None and size:
        shares.append(Share(drafter.method, "whole on each rank", "it is small and has its own KV", size))
    if not text_only:
        towers = weights_of(facts)["towers"].items()
        loaded = {f"{part} tower": tower["bytes"] for part, tower in towers if tower["is_loaded"]}
        shares += [Share(part, "whole on each rank", "every rank encodes every item", size) for part, size in loaded.items()]
    return shares


def exchanges_of(facts: Facts) -> list[Exchange]:
    num_drafts = 0 if facts.drafter is None else facts.drafter.max_drafts
    max_logits = facts.config.schedule.max_num_seqs * (1 + num_drafts)
    gpu = facts.gpu
    ranks = RankFacts(facts.num_ranks, _ITEMSIZES[facts.dtype], max_logits, gpu.arch.is_gpu, gpu.link)
    return [Exchange.of(facts.spec, facts.layout, ranks, count) for count in STEP_TOKENS]


def _ranks(facts: Facts) -> dict[str, Any] | None:
    if facts.num_ranks == 1:
        return None
    link = facts.gpu.link
    return {
        "count": facts.num_ranks,
        "weights": [asdict(share) for share in shares_of(facts)],
        "weight_bytes": sum(share.rank_bytes for share in shares_of(facts)),
        "cache": [
            {"group": group.name, "how": how, "why": why}
            for group in facts.layout.groups
            for how, why in [cache_share(group, facts.num_ranks)]
        ],
        "link": None if link is None else {"name": link.name, "bytes_per_s": link.bytes_per_s},
        "exchanges": [asdict(exchange) for exchange in exchanges_of(facts)],
    }


def _cache(facts: Facts, latent: bool) -> dict[str, Any]:
    """Return the slab size, pages and bytes of a layout."""
    layout = facts.layouts[latent]
    return {
        "latent": latent,
        "slab_bytes": layout.slab_bytes,
        "groups": [
            {
                "group": group.name,
                "dtype": DTYPE_NAMES[group.spec.itemsize],
                "num_kv_layers": len(group.layers),
                "window": group.window,
                "bytes_per_token": group.bytes_per_token,
                "page_tokens": group.page_tokens,
                "waste_bytes_per_slab": layout.waste(group),
                "bytes_per_window": None if group.window is None else group.window * group.bytes_per_token,
                "pages_per_sequence": {str(length): pages_of_sequence(group, length) for length in facts.seq_lens},
            }
            for group in layout.groups
        ],
        "bytes_per_sequence": {str(n): slabs_of_sequence(layout, n) * layout.slab_bytes for n in facts.seq_lens},
    }


def fit_of(facts: Facts, text_only: bool, latent: bool) -> dict[str, Any]:
    """Return what fits into memory, with or without the towers that the settings want, and with or without the latent."""
    schedule, itemsize = facts.config.schedule, _ITEMSIZES[facts.dtype]
    weight_bytes = sum(share.rank_bytes for share in shares_of(facts, text_only=text_only))
    num_tokens = min(facts.config.tokens_per_step(facts.gpu.memory_bytes), facts.max_model_len * schedule.max_num_seqs)
    working = working_bytes(
        facts.spec,
        itemsize,
        num_tokens=num_tokens,
        num_seqs=schedule.max_num_seqs,
        is_widened=facts.precision != facts.dtype and is_widened(facts.precision, facts.gpu.arch),
    )
    features = graphs = 0
    if not text_only and facts.loaded_towers.kinds:
        working += facts.loaded_towers.working_bytes(itemsize)
        features = facts.config.media_cache_bytes(facts.gpu.memory_bytes) if facts.gpu.arch.is_gpu else 0
    if facts.gpu.arch.is_gpu and not facts.config.model.enforce_eager:
        graphs = graph_bytes(facts.spec, itemsize, num_tokens=num_tokens)
    allowed = int(facts.rank_memory_bytes * facts.config.cache.gpu_memory_utilization)
    room = Room(facts.layouts[latent], allowed - weight_bytes - working - graphs - features)
    counts = {length: room.sequences(length) for length in facts.seq_lens}
    return {
        "text_only": text_only,
        "latent": latent,
        "allowed_bytes": allowed,
        "weight_bytes": weight_bytes,
        "working_bytes": working,
        "graph_bytes": graphs,
        "media_cache_bytes": features,
        "cache_bytes": max(0, room.cache_bytes),
        "missing_bytes": max(0, -room.cache_bytes),
        "num_slabs": room.num_slabs,
        "longest_sequence": room.longest(facts.max_model_len),
        "sequences": {str(length): count for length, count in counts.items()},
        "tokens": {str(length): count * length for length, count in counts.items()},
    }
