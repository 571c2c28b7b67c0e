"""Compute the bytes of a model's weights by part, plain or quantised, and check that ranks can share them. No torch.

All of it comes from configs alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

from culet.cache.spec import REPLICAS_HINT, share_among
from culet.errors import CheckpointError, ConfigError
from culet.layers.weight.byte_sizes import bytes_per_value
from culet.layers.weight.quantised.scheme import Scheme, rounding_of
from culet.models.quantised.config import Quantisation, read_quantisation
from culet.models.quantised.head import AUTO, HEAD, TABLE, head_rounding, stored_name
from culet.models.sizes import check_ranks, text_weights
from culet.models.spec import LayerSpec, ModelSpec

_EXPERTS = "routed experts"
_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Linear:
    """A linear module of the decoder, or a table."""

    part: str  # as in `text_weights`
    name: str
    num_rows: int
    num_columns: int
    count: int = 1  # how many modules are like this one
    most_parts: int = 1  # how many parts ranks can divide it into
    has_column_parts: bool = False  # ranks share its columns instead of its rows
    run: int = 0  # columns that stay together when loading reorders them; 0 if it does not
    is_table: bool = False

    def shape_of_rank(self, num_ranks: int) -> tuple[int, int]:
        """Return the rows and columns that each rank holds. If ranks outnumber parts, some ranks hold the same part."""
        parts = min(num_ranks, self.most_parts)
        if self.has_column_parts:
            return self.num_rows, self.num_columns // parts
        return self.num_rows // parts, self.num_columns


def linears(spec: ModelSpec) -> Iterator[Linear]:
    """Yield every linear module and table that can be quantised. The router is not among them."""
    hidden, vocab_size = spec.hidden_size, spec.vocab_size
    yield Linear("token embedding", TABLE, vocab_size, hidden, most_parts=vocab_size, is_table=True)
    if spec.has_head:
        yield Linear("head", HEAD, vocab_size, hidden, most_parts=vocab_size)
    if spec.ple_dim:
        width = len(spec.layers) * spec.ple_dim
        yield Linear("per-layer embeddings", "embed_tokens_per_layer", spec.ple_vocab_size, width, is_table=True)
        yield Linear("per-layer projections", "per_layer_model_projection", width, hidden)
    for layer in spec.layers:
        yield from _attention_linears(spec, layer, f"layers.{layer.index}.self_attn.")
        yield from _other_linears(spec, layer, f"layers.{layer.index}.")


def _attention_linears(spec: ModelSpec, layer: LayerSpec, prefix: str) -> Iterator[Linear]:
    hidden, queries, keys = spec.hidden_size, layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    heads = layer.num_kv_heads
    yield Linear("attention", f"{prefix}q_proj", queries, hidden, most_parts=heads)
    # As `layers/attention.py` orders them: the rotated halves of a head first, then the rest.
    run = gcd(layer.rope.rotated_dims, layer.head_dim) // 2 if layer.k_eq_v else 0
    yield Linear("attention", f"{prefix}o_proj", hidden, queries, most_parts=heads, has_column_parts=True, run=run)
    if layer.owns_kv:
        yield Linear("attention", f"{prefix}k_proj", keys, hidden, most_parts=heads)
        if not layer.k_eq_v:
            yield Linear("attention", f"{prefix}v_proj", keys, hidden, most_parts=heads)


def _other_linears(spec: ModelSpec, layer: LayerSpec, prefix: str) -> Iterator[Linear]:
    hidden, width = spec.hidden_size, layer.mlp_width
    for name in ("gate_proj", "up_proj"):
        yield Linear("dense MLP", f"{prefix}mlp.{name}", width, hidden, most_parts=width)
    yield Linear("dense MLP", f"{prefix}mlp.down_proj", hidden, width, most_parts=width, has_column_parts=True)
    if spec.ple_dim:
        yield Linear("per-layer projections", f"{prefix}per_layer_input_gate", spec.ple_dim, hidden)
        yield Linear("per-layer projections", f"{prefix}per_layer_projection", hidden, spec.ple_dim)
    if spec.moe is not None:
        count, width, part = spec.moe.num_experts, spec.moe.width, _EXPERTS
        yield Linear(part, f"{prefix}experts.0.gate_proj", width, hidden, 2 * count, most_parts=width)
        yield Linear(part, f"{prefix}experts.0.down_proj", hidden, width, count, most_parts=width, has_column_parts=True)


def part_bytes(
    spec: ModelSpec,
    config: Mapping[str, Any],
    itemsize: int,
    precision: str = AUTO,
    num_ranks: int = 1,
    *,
    head_precision: str = AUTO,
) -> dict[str, int]:
    """Return the bytes of each part of the text decoder on each of `num_ranks` ranks.

    `config` is the checkpoint's config.json. `precision` and `head_precision` are those that plain weights and the head are
    quantised to. `itemsize` is that of activations, which plain weights share.
    """
    quantisation, head = read_quantisation(config), head_rounding(spec, head_precision)
    stored_scale = (None if quantisation is None else quantisation.scale_bytes) or itemsize
    sizes, others = dict.fromkeys(text_weights(spec), 0.0), text_weights(spec)
    for linear in linears(spec):
        rows, columns = linear.shape_of_rank(num_ranks)
        is_head = head is not None and linear.name == head.name
        scheme = head.scheme if head is not None and is_head else _scheme(config, linear, quantisation, precision)
        scheme = scheme.in_runs(linear.run) if scheme is not None and linear.run else scheme
        scale_bytes = itemsize if is_head else stored_scale
        plain = rows * columns * bytes_per_value(itemsize)
        sizes[linear.part] += linear.count * (plain if scheme is None else scheme.num_bytes(rows, columns, scale_bytes))
        others[linear.part] -= linear.count * linear.num_rows * linear.num_columns
    # What is left are norms, other small scales and the router. They are float32, and whole on each rank.
    return {part: round(size + _FLOAT32_BYTES * others[part]) for part, size in sizes.items()}


def _scheme(config: Mapping[str, Any], linear: Linear, quantisation: Quantisation | None, precision: str) -> Scheme | None:
    """Return the scheme of a module in memory, or None if it is plain."""
    if quantisation is not None:
        return quantisation.scheme_of(stored_name(config, linear.name))
    if precision == AUTO or linear.is_table:
        return None
    rounding = rounding_of(precision)
    fits = rounding.fits(linear.num_columns) and (linear.part != _EXPERTS or rounding.fits(linear.num_rows))
    return rounding.scheme if fits else None  # a layer's experts are quantised together


def check_columns(spec: ModelSpec, config: Mapping[str, Any]) -> None:
    """Raise what the loader raises for a quantised checkpoint whose groups or blocks do not divide the model's matrices.

    The loader checks the stored tensors instead, because a module may be plain although the config says otherwise.
    """
    quantisation = read_quantisation(config)
    for linear in linears(spec):
        scheme = _scheme(config, linear, quantisation, AUTO)
        if scheme is None:
            continue
        if scheme.group and linear.num_columns % scheme.group:
            name = stored_name(config, linear.name)
            problem = f"{name} has {linear.num_columns} columns, which groups of {scheme.group} do not divide"
            raise CheckpointError(problem, hint="group_size in config.json is wrong, or the tensor is cut off")
        if linear.part == _EXPERTS and scheme.scales == "block":
            _check_blocks(linear, scheme.column_unit)


def _check_blocks(linear: Linear, size: int) -> None:
    """Raise if fp8 blocks do not divide the width of experts, which is the dimension that ranks share."""
    width = linear.most_parts
    if width % size:
        stack = linear.name.partition(".experts.")[0]
        raise CheckpointError(
            f"{stack}.experts: fp8 blocks of {size} x {size} do not divide experts of width {width}",
            hint="use a checkpoint with one scale per channel, such as RedHatAI/gemma-4-26B-A4B-it-FP8-Dynamic",
        )


def check_shares(spec: ModelSpec, config: Mapping[str, Any], precision: str, num_ranks: int) -> None:
    """Raise if the model cannot be divided among this many ranks. For `config`, see `part_bytes`."""
    check_ranks(spec, num_ranks)
    check_groups(spec, config, precision, num_ranks)
    share_among(spec.kv_specs(1), num_ranks)


def check_groups(spec: ModelSpec, config: Mapping[str, Any], precision: str, num_ranks: int) -> None:
    """Raise if ranks would cut a group of columns that share a scale or a packed word. For `config`, see `part_bytes`."""
    if (found := _cut_group(spec, config, precision, num_ranks)) is None:
        return
    linear, held, unit = found
    fewer = [count for count in range(2, num_ranks) if num_ranks % count == 0]
    most = max((count for count in fewer if _cut_group(spec, config, precision, count) is None), default=1)
    hint = f"use {most} GPUs" if most > 1 else REPLICAS_HINT
    raise ConfigError(
        f"tensor-parallel-size: got {num_ranks}, but a rank's {held} of the {linear.num_columns} columns of {linear.name} "
        f"are not whole groups of {unit}",
        hint=f"{hint}, or {'another checkpoint' if precision == AUTO else '--quantization fp8'}",
    )


def _cut_group(spec: ModelSpec, config: Mapping[str, Any], precision: str, num_ranks: int) -> tuple[Linear, int, int] | None:
    """Return the first module whose groups of columns ranks would cut, how many columns each holds, and the group's size."""
    quantisation = read_quantisation(config)
    for linear in linears(spec):
        scheme = _scheme(config, linear, quantisation, precision)
        unit, (_, held) = 1 if scheme is None else scheme.column_unit, linear.shape_of_rank(num_ranks)
        if held < linear.num_columns and held % unit:
            return linear, held, unit
    return None
