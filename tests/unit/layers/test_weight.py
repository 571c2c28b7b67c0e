"""Weights: which parts a rank holds, where partial sums are reduced, and what a format must provide."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import culet
from culet.errors import ConfigError, InternalError
from culet.kernels import dispatch
from culet.kernels.types import Candidates, HeadShape
from culet.layers.attention import HeadShare
from culet.layers.experts import Experts
from culet.layers.mlp import MLP
from culet.layers.weight.base import Matrix, MatrixLayout, Projection, Split, Table
from culet.layers.weight.e4m3 import E4M3Table
from culet.layers.weight.placement import Piece, Placement, whole
from culet.layers.weight.quantised.rounding import RoundedHead
from culet.layers.weight.weights import Weights, narrowed
from culet.models.checkpoint import open_checkpoint
from culet.models.gemma4 import Gemma4
from culet.models.weights import _match_names, load_weights
from culet.parallel.rank import Rank
from culet.parallel.reduce.parts import join_parts
from tests.models import tiny_checkpoints as tiny

CPU = torch.device("cpu")
SIZES = (2, 4)


class Meeting:
    """Reductions between ranks that are threads of this process."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=120.0)
        self._parts: list[Tensor | None] = [None] * size

    def weights(self, index: int) -> Weights:
        """Return the weights of a rank."""
        return Weights(torch.float32, CPU, rank=Rank(index, len(self._parts)), all_reduce=Reduction(self, index))

    def gather(self, index: int, part: Tensor) -> Tensor:
        """Return the parts of all ranks, stacked."""
        self._parts[index] = part
        self._barrier.wait()
        parts = torch.stack([part for part in self._parts if part is not None])
        self._barrier.wait()
        return parts

    def run(self, compute: Callable[[int], Any]) -> list[Any]:
        """Run `compute(index)` on every rank and return the results."""
        with ThreadPoolExecutor(len(self._parts)) as threads:
            return list(threads.map(compute, range(len(self._parts))))


class Reduction:
    """The all-reduce of one rank."""

    def __init__(self, meeting: Meeting, index: int) -> None:
        self._meeting, self._index = meeting, index

    def __call__(self, part: Tensor) -> Tensor:
        return self.gather(part).sum(0)

    def gather(self, part: Tensor) -> Tensor:
        return self._meeting.gather(self._index, part)

    def peers_for(self, num_tokens: int, num_columns: int) -> None:
        return None


def on_rank(index: int, size: int) -> Weights:
    """Return the weights of a rank whose partial sums are not reduced."""
    return Weights(torch.float32, CPU, rank=Rank(index, size), all_reduce=lambda parts: parts)


def random_tensors(placements: dict[str, Placement]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(placement.shape, generator=generator) for name, placement in placements.items()}


def fill(layer: Any, tensors: dict[str, Tensor]) -> Any:
    for name, placement in layer.placements().items():
        placement.fill(tensors[name])
    return layer


@dataclass
class Spy:
    """A stored tensor that counts the elements read from it."""

    tensor: Tensor
    num_read: int = 0
    regions: list[tuple[slice, ...]] = field(default_factory=list)

    def __getitem__(self, region: tuple[slice, ...]) -> Tensor:
        self.regions.append(region)
        self.num_read += self.tensor[region].numel()
        return self.tensor[region]


# Ranks


def test_the_default_rank_holds_everything() -> None:
    assert Rank().share(12, 3) == slice(0, 12)


def test_shares_cover_everything_in_whole_units() -> None:
    for size in SIZES:
        shares = [Rank(index, size).share(24, 3) for index in range(size)]
        assert [place for share in shares for place in range(share.start, share.stop)] == list(range(24))
        assert all(share.start % 3 == share.stop % 3 == 0 for share in shares)


def test_ranks_that_outnumber_the_units_hold_the_same_ones() -> None:
    shares = [Rank(index, 4).share(16, 8, may_repeat=True) for index in range(4)]
    assert shares == [slice(0, 8)] * 2 + [slice(8, 16)] * 2
    with pytest.raises(ConfigError, match="among 4 ranks"):
        Rank(0, 4).share(16, 8)  # ranks that add up their parts would count some twice


@pytest.mark.parametrize(("count", "unit"), [(10, 4), (9, 3), (24, 8)])
def test_shares_that_do_not_exist(count: int, unit: int) -> None:
    with pytest.raises(ConfigError, match="among 4 ranks" if count != 24 else "among 2 ranks"):
        Rank(0, 2 if count == 24 else 4).share(count, unit)


# Shards


def matrix_layout(split: Split) -> MatrixLayout:
    """Return two merged projections with heads of 4 rows. Rows are reordered within heads, or columns within units of 4."""
    order = torch.tensor([2, 0, 3, 1])
    heads = torch.cat([4 * head + order.roll(head) for head in range(8)])
    if split is Split.ROWS:
        return MatrixLayout((Projection("a", 32, heads, unit=4), Projection("b", 16, unit=4)), 8, split)
    return MatrixLayout((Projection("a", 6),), 32, split, column_order=heads, column_unit=4)


@pytest.mark.parametrize("size", SIZES)
def test_rows_of_all_ranks_make_the_whole(size: int) -> None:
    """Each rank has its rows of every projection of a merged matrix, in the order of the whole."""
    layout = matrix_layout(Split.ROWS)
    alone = Weights(torch.float32, CPU).matrix_of(layout)
    tensors = random_tensors(alone.placements())
    fill(alone, tensors)
    shards = [fill(on_rank(index, size).matrix_of(layout), tensors) for index in range(size)]
    cuts = [shard.tensor.split([32 // size, 16 // size]) for shard in shards]
    joined = torch.cat([torch.cat([cut[part] for cut in cuts]) for part in range(2)])
    assert torch.equal(joined, alone.tensor)
    assert sum(shard.num_bytes for shard in shards) == alone.num_bytes


@pytest.mark.parametrize("size", SIZES)
def test_partial_products_of_all_ranks_add_up(size: int) -> None:
    layout = matrix_layout(Split.COLUMNS)
    alone = Weights(torch.float32, CPU).matrix_of(layout)
    tensors = random_tensors(alone.placements())
    fill(alone, tensors)
    shards = [fill(on_rank(index, size).matrix_of(layout), tensors) for index in range(size)]
    assert torch.equal(torch.cat([shard.tensor for shard in shards], 1), alone.tensor)
    x = torch.randn(3, 32)
    parts = [shard.linear_parts(part) for shard, part in zip(shards, x.chunk(size, 1), strict=True)]
    torch.testing.assert_close(sum(parts), alone.linear(x))
    assert not torch.allclose(parts[0], alone.linear(x))


def split_table(weights: Weights) -> Any:
    table = weights.table("t", 24, 8, scale=3.0, split=Split.ROWS)
    return fill(table, {"t.weight": torch.randn(24, 8, generator=torch.Generator().manual_seed(0))})


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_embeds_every_token(size: int) -> None:
    """A rank holds some rows of the table. Its embeddings and logits are still those of the whole table."""
    alone, meeting = split_table(Weights(torch.float32, CPU)), Meeting(size)
    shards = [split_table(meeting.weights(index)) for index in range(size)]
    assert torch.equal(torch.cat([shard.tensor for shard in shards]), alone.tensor)
    token_ids, x, columns = torch.tensor([3, 20, 0, 23, 12, 11, 3]), torch.randn(3, 8), slice(2, 5)
    hidden, matrix = torch.randn(7, 4), Weights(torch.float32, CPU).matrix(Projection("p", 6), num_columns=12)
    fill(matrix, {"p.weight": torch.randn(6, 12)})
    for op in (
        lambda table: table.embed(token_ids),
        lambda table: table.embed_columns(token_ids, columns),
        lambda table: table.head(x),
        lambda table: table.capped_head(x, 5.0),
        lambda table: matrix.embed_linear(None, token_ids, hidden, table),
    ):
        for result in meeting.run(lambda index, op=op: op(shards[index])):
            torch.testing.assert_close(result, op(alone))
    assert torch.equal(alone.embed(token_ids), 3 * alone.tensor[token_ids])


def test_a_shard_embeds_only_its_own_tokens() -> None:
    """What a rank adds to the sum is zero for tokens of other ranks, even if its own rows are not finite."""
    shard = split_table(on_rank(1, 2))
    token_ids = torch.tensor([3, 12, 23])
    assert torch.equal(shard.embed(token_ids)[1:], 3 * shard.tensor[[0, 11]])
    shard.tensor[0] = float("nan")
    assert torch.equal(shard.embed(token_ids)[0], torch.zeros(8))


def test_one_rank_adds_no_work() -> None:
    """A table of one rank passes its arguments to one kernel and returns that kernel's result, even with an all-reduce."""

    def all_reduce(part: Tensor) -> Tensor:
        raise AssertionError("there is nothing to reduce")

    table = split_table(Weights(torch.float32, CPU, all_reduce=all_reduce))
    token_ids, x, calls = torch.tensor([3, 20]), torch.randn(2, 8), []
    made = torch.randn(2, 8)

    def kernel(*arguments: Any) -> Tensor:
        calls.append(arguments)
        return made

    table.ops = SimpleNamespace(embed=kernel, head=kernel, capped_head=kernel)
    for result in (table.embed(token_ids), table.head(x), table.capped_head(x, 5.0)):
        assert result is made
    assert len(calls) == 3
    for arguments, given in zip(calls, (token_ids, x, x), strict=True):
        assert arguments[0] is given
        assert arguments[1] is table.tensor


def test_what_a_shard_cannot_do() -> None:
    """These ops belong to the heads of E2B's and E4B's assistants. Those models use replicas."""
    shard, x, index = split_table(on_rank(1, 2)), torch.randn(2, 8), torch.zeros(1, 1, dtype=torch.int64)
    for op, call in {
        "cluster_candidates": lambda: shard.cluster_candidates(x, index, index),
        "reorder_rows": lambda: shard.reorder_rows(torch.arange(24)),
    }.items():
        with pytest.raises(InternalError, match=f"{op} of t needs every row, and this rank holds rows 12 to 23 of 24"):
            call()


@pytest.mark.parametrize("precision", ["plain", "fp8"])
def test_candidates_of_shards(precision: str) -> None:
    """The best token of each row is found among the best tokens of all ranks, also if its score has an equal."""
    meeting, x = Meeting(4), torch.randn(2, 3, 8)
    whole = split_table(Weights(torch.float32, CPU))
    whole.tensor.copy_(torch.randn(24, 8))
    whole.tensor[20] = whole.tensor[3]

    def pick(table: Table) -> Tensor:
        table = table if precision == "plain" else narrowed(table, precision)
        best = torch.empty(6, dtype=torch.int64)
        found = table.head_candidates(x, 5.0 if precision == "plain" else None)
        whole.ops.pick_best(Candidates(found.scores_RC.flatten(0, -2), None if found.ids_RC is None else found.ids_RC), best)
        return best

    def pick_on(index: int) -> Tensor:
        shard = split_table(meeting.weights(index))
        shard.tensor.copy_(whole.tensor[shard.rows])
        return pick(shard)

    for best in meeting.run(pick_on):
        assert torch.equal(best, pick(whole))


@pytest.mark.parametrize("precision", ["fp8", "int4"])
def test_shards_of_a_rounded_table(precision: str) -> None:
    """Each rank rounds its own rows. Embeddings, logits and candidates are those of the whole table."""
    meeting, x, ids = Meeting(4), torch.randn(2, 3, 64), torch.tensor([0, 5, 6, 23, 12])
    stored = torch.randn(24, 64)
    stored[20] = stored[3]

    def table(weights: Weights) -> Any:
        weights = replace(weights, choose_format=lambda _: RoundedHead(precision))
        return fill(weights.table("t", 24, 64, scale=3.0, split=Split.ROWS), {"t.weight": stored})

    def use(table: Any) -> list[Tensor]:
        best = torch.empty(6, dtype=torch.int64)
        table.ops.pick_best(table.head_candidates(x, 5.0), best)
        columns = table.embed_columns(ids, slice(8, 40))
        return [table.embed(ids), columns, table.head(x[0]), table.capped_head(x[0], 5.0), best]

    whole = use(table(Weights(torch.float32, CPU)))
    assert torch.equal(whole[1], whole[0][:, 8:40])
    for found in meeting.run(lambda index: use(table(meeting.weights(index)))):
        for own, wanted in zip(found, whole, strict=True):
            torch.testing.assert_close(own, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", ["12B", "26B-A4B", "31B"])
def test_a_model_over_two_ranks(shape: str) -> None:
    """Two ranks, each with its own heads, pages and rows of the vocabulary, give the logits of one. They run in threads."""
    from tests.models.harness import Harness

    folder = tiny.checkpoint_folder(shape)
    spec = open_checkpoint(str(folder)).spec

    def load(weights: Weights) -> Gemma4:
        build, match = lambda weights: Gemma4(spec, weights), lambda names: _match_names(names, spec)
        return load_weights(folder, build, match, weights, progress=False)

    token_ids, meeting = tiny.prompt(40), Meeting(2)
    alone = Harness(load(Weights(torch.float32, CPU)), num_slots=1).all_logits(token_ids, (25, 14, 1))
    ranks = []
    for index in range(2):
        model = load(meeting.weights(index))
        layer = model._layers[0].attention
        assert layer.heads.num_heads == spec.layers[0].num_heads // 2
        assert layer.norm_weight.shape[0] == layer.heads.num_heads + layer.heads.num_kv_heads
        ranks.append(Harness(model, num_slots=1))
    for logits in meeting.run(lambda index: ranks[index].all_logits(token_ids, (25, 14, 1))):
        torch.testing.assert_close(logits, alone, rtol=3e-4, atol=3e-4)


def test_ranks_that_share_the_tokens_of_a_head() -> None:
    """If there are more ranks than KV heads, neighbours have the same heads. Otherwise each rank has its own."""
    heads = HeadShape(8, 2, 16, 16, k_eq_v=False, latent=False, eps=1e-6)
    shares = [HeadShare(Rank(index, 8), 2) for index in range(8)]
    parts = [(share.of(heads).num_heads, share.of(heads).num_kv_heads, share.token_shares) for share in shares]
    assert parts == [(4, 1, 4)] * 8
    assert [share.partners for share in shares] == [slice(0, 4)] * 4 + [slice(4, 8)] * 4
    own = HeadShare(Rank(1, 2), 2)
    assert (own.of(heads).num_heads, own.token_shares, own.partners) == (4, 1, slice(1, 2))


@pytest.mark.parametrize("size", SIZES)
def test_an_mlp_and_experts_over_ranks(size: int) -> None:
    def mlp(weights: Weights) -> MLP:
        return MLP(8, 16, weights)

    def experts(weights: Weights) -> Experts:
        return Experts(8, 4, 2, 16, eps=1e-6, weights=weights)

    x, residual = torch.randn(5, 8), torch.randn(5, 8)
    for build, inputs in ((mlp, (x,)), (experts, (residual, x))):
        alone: Any = build(Weights(torch.float32, CPU))
        tensors = random_tensors(alone.placements())
        fill(alone, tensors)
        shards = [fill(build(on_rank(index, size)), tensors) for index in range(size)]
        torch.testing.assert_close(sum(shard(*inputs) for shard in shards), alone(*inputs), rtol=1e-4, atol=1e-4)
        assert max(shard(*inputs).sub(alone(*inputs)).abs().max() for shard in shards) > 0.1


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_reads_only_its_part(size: int) -> None:
    for build in (
        lambda weights: weights.matrix_of(matrix_layout(Split.ROWS)),
        lambda weights: weights.matrix_of(matrix_layout(Split.COLUMNS)),
        lambda weights: weights.table("t", 24, 8, split=Split.ROWS),
        lambda weights: weights.experts("e", 4, 8, 16),
    ):
        for placement in build(on_rank(1, size)).placements().values():
            spy = Spy(torch.randn(placement.shape))
            placement.fill(spy)
            assert spy.num_read == spy.tensor.numel() // size


@pytest.mark.parametrize("shape", ["26B-A4B", "31B"])
def test_shards_of_a_checkpoint(shape: str) -> None:
    """Both ranks' weights, loaded from a checkpoint's files, are the regions that their placements name."""
    folder = tiny.checkpoint_folder(shape)
    spec = open_checkpoint(str(folder)).spec
    stored = load_file(folder / "model.safetensors")
    names = _match_names(stored, spec)
    num_read = dict.fromkeys(names, 0)
    for index in range(2):
        model = load_weights(folder, lambda weights: Gemma4(spec, weights), lambda _: names, on_rank(index, 2), progress=False)
        for name, placement in model.placements().items():
            for piece in placement.pieces:
                region = stored[names[name]][piece.region].float()
                wanted = region if piece.order is None else region.index_select(piece.dim, piece.order)
                num_read[name] += wanted.numel()
                if "router.proj" not in name:  # its scale is folded in
                    assert torch.equal(piece.target.float(), wanted), name
    whole_size = {name: stored[names[name]].numel() for name in names}
    assert all(num_read[name] in (whole_size[name], 2 * whole_size[name]) for name in names)
    split = {name.rpartition("layers.0.")[2] for name in names if num_read[name] == whole_size[name] and "layers.0." in name}
    assert {"self_attn.q_proj.weight", "self_attn.o_proj.weight", "mlp.gate_proj.weight", "mlp.down_proj.weight"} <= split
    assert not any("norm" in name for name in split)
    assert num_read["embed_tokens.weight"] == whole_size["embed_tokens.weight"]


# Partial sums


def test_one_rank_keeps_its_parts() -> None:
    parts = torch.randn(3, 2, 4)
    assert join_parts(parts, None) is parts


def test_parts_of_several_ranks_meet_before_the_norm() -> None:
    """The all-reduce gets the sum of a rank's own parts, and the norm reads its result."""
    seen: list[Tensor] = []

    def all_reduce(x: Tensor) -> Tensor:
        seen.append(x)
        return x + 10

    parts = torch.randn(3, 2, 4)
    joined = join_parts(parts, all_reduce)
    torch.testing.assert_close(seen[0], parts.sum(0))
    torch.testing.assert_close(joined, parts.sum(0) + 10)


class CountedReduction:
    """An all-reduce of one rank that notes the shapes and adds nothing."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, part: Tensor) -> Tensor:
        self.shapes.append(tuple(part.shape))
        return part

    def peers_for(self, num_tokens: int, num_columns: int) -> None:
        return None


@pytest.mark.parametrize("shape", ["12B", "26B-A4B"])
def test_what_is_reduced_in_a_layer(shape: str) -> None:
    """Attention's output, the MLP and the experts are each reduced once, by the norm that reads them. Nothing else is."""
    reduction = CountedReduction()
    spec = open_checkpoint(str(tiny.checkpoint_folder(shape))).spec
    layer = Gemma4(spec, Weights(torch.float32, CPU, rank=Rank(0, 2), all_reduce=reduction))._layers[0]
    for parameter in layer.parameters():
        parameter.fill_(0.01)
    x, w, width = torch.randn(3, spec.hidden_size), layer.input_norm, layer.attention.out.tensor.shape[1]
    attended, dense = layer.attention.out.linear_parts(torch.randn(3, width)), layer.mlp(x)
    layer.attention.qkv.linear_parts(x)
    routed = None if layer.experts is None else layer.experts(x, x)
    assert not reduction.shapes, "the sums are left to the norms"
    norms = layer.rank_norms
    assert norms is not None
    if routed is None:
        norms.residual_norm(x, attended, w, None, w, 1e-6)
        norms.residual_norm(x, dense, w, layer.scalar, None, 1e-6)
    else:
        norms.residual_norm_two(x, attended, w, w, w, 1e-6)
        norms.residual_norm_joint(x, dense, routed, (w, w, w), layer.scalar, w, 1e-6)
    assert reduction.shapes == [(3, spec.hidden_size)] * (2 if routed is None else 3)


def test_several_ranks_need_an_all_reduce() -> None:
    with pytest.raises(AssertionError, match="need an all-reduce"):
        Weights(torch.float32, CPU, rank=Rank(0, 2))


# Formats


class DoubledMatrix(Matrix):
    """A format that stores twice the weight. It provides only what a format must: bytes, placements and product."""

    def __init__(self, layout: MatrixLayout, site: Any) -> None:
        super().__init__(layout, site)
        rows = sum(projection.num_rows for projection in layout.projections)
        self.doubled = nn.Parameter(torch.empty(rows, layout.num_columns, dtype=torch.float64), requires_grad=False)

    def own_placements(self) -> Iterator[tuple[str, Placement]]:
        begin = 0
        for projection in self.layout.projections:
            shape = projection.num_rows, self.layout.num_columns
            target = self.doubled[begin : begin + projection.num_rows]
            order, dim = (projection.order, 0) if self.layout.column_order is None else (self.layout.column_order, 1)
            yield f"{projection.name}.doubled", Placement(shape, (Piece(target, whole(shape), order, dim),), {"F64"})
            begin += projection.num_rows

    def linear(self, x_TD: Tensor) -> Tensor:
        return F.linear(x_TD.double(), self.doubled / 2).to(x_TD.dtype)

    def linear_rows(self, x_TD: Tensor, rows: slice) -> Tensor:
        return F.linear(x_TD.double(), self.doubled[rows] / 2).to(x_TD.dtype)


class DoubledFormat:
    def matrix(self, layout: MatrixLayout, site: Any) -> Matrix:
        return DoubledMatrix(layout, site)


def choose(name: str) -> Any:
    """Choose formats as in quantised checkpoints, with plain tables and experts."""
    is_matrix = name.endswith(("_proj", "gate", "projection", "_projection"))
    return DoubledFormat() if is_matrix else Weights(torch.float32, CPU).choose_format(name)


@pytest.mark.parametrize("shape", ["E2B", "26B-A4B", "31B"])
def test_a_format_is_one_class(shape: str) -> None:
    """A model whose matrices are in another format gives the same logits, and only the format's own code is needed."""
    from tests.models.harness import Harness

    folder = tiny.checkpoint_folder(shape)
    spec = open_checkpoint(str(folder)).spec
    stored = load_file(folder / "model.safetensors")
    names = _match_names(stored, spec)
    models = []
    for weights in (Weights(torch.float32, CPU), Weights(torch.float32, CPU, choose_format=choose)):
        model, num_doubled = Gemma4(spec, weights), 0
        for name, placement in model.placements().items():
            tensor = stored[names[name.replace(".doubled", ".weight")]].double()
            placement.fill(2 * tensor if name.endswith(".doubled") else tensor)
            num_doubled += name.endswith(".doubled")
        model.finish()
        models.append(model)
    assert num_doubled >= 7 * len([layer for layer in spec.layers if layer.owns_kv and not layer.k_eq_v])
    token_ids = tiny.prompt(40)
    plain, doubled = (Harness(model, num_slots=1).all_logits(token_ids) for model in models)
    torch.testing.assert_close(doubled, plain, rtol=1e-4, atol=1e-4)


def test_a_head_in_e4m3() -> None:
    table = Weights(torch.float32, CPU).table("head", 64, 32)
    fill(table, {"head.weight": torch.randn(64, 32)})
    narrow = narrowed(table, "fp8")
    assert isinstance(narrow, E4M3Table)
    assert narrow.num_bytes == 64 * 32 + 64 * 4 < table.num_bytes
    x = torch.randn(5, 32)
    difference = (narrow.head(x) - table.head(x)).abs().max() / table.head(x).abs().max()
    assert 0 < difference < 0.05
    assert torch.equal(narrow.head_candidates(x, None).scores_RC, narrow.head(x))
    with pytest.raises(NotImplementedError, match="E4M3Table has no kernel for embed"):
        narrow.embed(torch.tensor([1]))
    with pytest.raises(ConfigError, match="unknown weight precision: 'int3'"):
        narrowed(table, "int3")


def test_kernels_by_format() -> None:
    pytest.importorskip("triton")
    for device, package in (("cpu", "culet.kernels.eager."), ("cuda", "culet.kernels.triton.")):
        ops = dispatch.for_device(device, dispatch.E4M3)
        assert ops.head_candidates.__module__.startswith(package)
        assert not hasattr(ops, "linear"), "no kernel multiplies e4m3 weights yet"


def test_only_formats_know_the_bytes() -> None:
    """Only layers/weight and kernels/ read a weight's tensors, and no layer or model names their dtype."""
    root = Path(culet.__file__).parent
    bytes_of = re.compile(r"(?<!torch)\.tensor\b|\bPlain(Matrix|Table|Experts)\b|\bE4M3Table\b")
    dtype_of = re.compile(r"torch\.(bfloat16|float16|half|float8\w*|int8|uint8)\b")
    files = [path for path in root.rglob("*.py") if not path.is_relative_to(root / "layers/weight")]
    files = [path for path in files if not path.is_relative_to(root / "kernels")]
    assert [path for path in files if bytes_of.search(path.read_text())] == []
    assert [path for path in files if ".parameters()" in path.read_text()] == [root / "layers/layer.py"]
    models = [path for path in files if path.relative_to(root).parts[0] in ("layers", "models", "drafters", "parallel")]
    raw = {root / "models/towers/packing.py", root / "models/read_ahead.py"}  # their uint8 are pixels, and bytes of files
    assert [path for path in models if path not in raw and dtype_of.search(path.read_text())] == []
