"""`hopper_stream` on a GPU compared with its eager twin in float32, on the layers of all models.

It runs alone, through ops, and in a graph. The memory around its operands, which it must not read or write, is NaN.
"""

from __future__ import annotations

import fcntl
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from culet import hardware
from culet.kernels.compiling import cache_folder, compile_ahead, use_disk_cache
from culet.kernels.eager import fused as eager_fused
from culet.kernels.replay import replayed
from culet.kernels.triton.linear import few_tokens
from culet.kernels.triton.linear.hopper_stream import blocks_of
from culet.kernels.triton.linear.tiles import GATED, GELU_TIMES, PLAIN, SOFTCAP, choose_stream
from tests.kernels.linear_cases import CAP, Case, Shape, class_cases

IS_HOPPER = torch.cuda.is_available() and hardware.is_hopper(hardware.capability_of())
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")]

TOLERANCE = 5e-3  # ||a - b|| / ||b|| per token
GUARD = 64  # NaNs before and after
HEAD_ROWS = 4096  # of the head; all 262,144 would only be more of the same
DEVICE = "cuda"


def guarded(*size: int, dtype: torch.dtype = torch.bfloat16, device: str = DEVICE) -> tuple[Tensor, Tensor]:
    """Return a tensor of NaN and the larger tensor of NaN that surrounds it."""
    whole = torch.full((2 * GUARD + math.prod(size),), math.nan, dtype=dtype, device=device)
    return whole[GUARD:-GUARD].view(size), whole


def cut(case: Case) -> Case:
    """Return the case with fewer rows, so that the last program's rows reach past the end. The chosen tile is the same."""
    rows = min(case.shape.num_rows, HEAD_ROWS) if case.shape.epilogue == SOFTCAP else case.shape.num_rows
    return replace(case, shape=replace(case.shape, num_rows=rows - 16))


@dataclass(frozen=True)
class Operands:
    """The matrices of a case. `x` and `factor` are columns in the middle of wider rows, which are NaN elsewhere."""

    x: Tensor
    weight: Tensor
    factor: Tensor | None
    weight_around: Tensor

    @classmethod
    def draw(cls, shape: Shape, num_tokens: int, device: str = DEVICE) -> Operands:
        def columns(size: int) -> Tensor:
            whole = torch.full((num_tokens, size + 3 * GUARD), math.nan, dtype=torch.bfloat16, device=device)
            return whole[:, GUARD : GUARD + size].normal_()

        weight, around = guarded(shape.weight_rows, shape.size_k, device=device)
        weight.normal_(0, shape.size_k**-0.5)
        if shape.epilogue == SOFTCAP:
            weight *= CAP  # so that there is something to cap
        factor = columns(shape.num_rows) if shape.epilogue == GELU_TIMES else None
        if device != "cpu":
            torch.cuda.synchronize()  # with dependent launch, a kernel may request weights while the previous one runs
        return cls(columns(shape.size_k), weight, factor, around)

    def of_tokens(self, num_tokens: int) -> Operands:
        """Return the operands of the first tokens only."""
        return replace(self, x=self.x[:num_tokens], factor=None if self.factor is None else self.factor[:num_tokens])

    def twin(self, epilogue: int) -> Tensor:
        """Return the expected outputs in float32."""
        x, weight = self.x.float(), self.weight.float()
        if epilogue == GATED:
            return eager_fused.gated_linear(x, weight)
        if epilogue == GELU_TIMES:
            assert self.factor is not None
            return eager_fused.linear_gelu_times(x, weight, self.factor.float())
        return eager_fused.capped_head(x, weight, CAP) if epilogue == SOFTCAP else eager_fused.linear(x, weight)


def assert_close(got: Tensor, wanted: Tensor) -> None:
    """Compare every token's outputs, with parts summed."""
    got = got.sum(0) if got.dim() == 3 else got.float()
    assert got.shape == wanted.shape
    error = (got - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert not error.isnan().any(), "something was not written, or comes from beyond the operands"
    assert error.max() <= TOLERANCE, f"token {int(error.argmax())}: {float(error.max()):.2e}"


def counts_of(case: Case) -> list[int]:
    """Return the fewest and the most tokens of the same kernel, and some between. It reads the token count at run time."""
    shape, blocks = case.shape, blocks_of(case.num_tokens)
    found = [
        tokens
        for tokens in range(1, 129)
        if blocks_of(tokens) == blocks and choose_stream(tokens, shape.num_rows, shape.size_k, shape.epilogue) == case.tile
    ]
    return sorted({found[0], found[len(found) // 2], found[-1]})


def run(case: Case, operands: Operands) -> Tensor:
    """Run one launch, check that nothing around the outputs changed, and return them."""
    case = replace(case, num_tokens=operands.x.shape[0])
    out, around = guarded(*case.out_shape, dtype=case.out_dtype)
    case.launch(operands.x, operands.weight, out, operands.factor).run()
    assert around[:GUARD].isnan().all()
    assert around[-GUARD:].isnan().all()
    return out


@pytest.fixture(autouse=True)
def nothing_in_the_workspace() -> Iterator[None]:
    """Parts are NaN before a test, and counters are zero after it."""
    torch.manual_seed(5)
    parts, arrivals = few_tokens.workspace(torch.device(DEVICE, torch.cuda.current_device()))
    with torch.inference_mode():  # an engine in the same process may have allocated them in inference mode
        parts.fill_(math.nan)
    yield
    assert not arrivals.any()


@pytest.mark.parametrize("case", [cut(case) for case in class_cases()], ids=str)
def test_kernels(case: Case) -> None:
    counts = counts_of(case)
    operands = Operands.draw(case.shape, counts[-1])
    before, wanted = operands.weight_around.clone(), operands.twin(case.shape.epilogue)
    for tokens in counts:
        first = run(case, operands.of_tokens(tokens))
        assert_close(first, wanted[:tokens])
        # Run again, with the counters of the previous launch.
        assert torch.equal(run(case, operands.of_tokens(tokens)), first)
    assert torch.equal(operands.weight_around.view(torch.int16), before.view(torch.int16))


def test_any_number_of_outputs() -> None:
    """The number of rows may be indivisible by a vector of stores, and outputs may be strided."""
    shape = Shape("odd", 1003, 2560)
    tile = choose_stream(24, shape.num_rows, shape.size_k)
    assert tile is not None
    operands = Operands.draw(shape, 24)
    whole = torch.full((24, 1100), math.nan, dtype=torch.bfloat16, device=DEVICE)
    Case(shape, 24, tile).launch(operands.x, operands.weight, whole[:, 5:1008], None).run()
    assert_close(whole[:, 5:1008], operands.twin(PLAIN))
    assert whole[:, :5].isnan().all()
    assert whole[:, 1008:].isnan().all()


def test_any_number_of_tokens() -> None:
    """1 to 128 tokens of the head, and 1 to 96 of a gate, with whichever kernel is chosen."""
    for shape, most in ((Shape("head", HEAD_ROWS - 16, 1536, SOFTCAP), 128), (Shape("gate", 12272, 1536, GATED), 96)):
        operands = Operands.draw(shape, most)
        wanted = operands.twin(shape.epilogue)
        for tokens in range(1, most + 1):
            tile = choose_stream(tokens, shape.num_rows, shape.size_k, shape.epilogue)
            if tile is not None:
                assert_close(run(Case(shape, tokens, tile), operands.of_tokens(tokens)), wanted[:tokens])


# --- through the ops that layers call ---

OP_TOKENS = (8, 48)
Op = Callable[[Operands], Tensor]
OPS: dict[str, tuple[Shape, Op]] = {
    "linear": (Shape("qkv", 3072, 2560), lambda given: few_tokens.linear(given.x, given.weight)),
    "linear_parts": (Shape("down", 2560, 10240), lambda given: few_tokens.linear_parts(given.x, given.weight)),
    "gated_linear": (Shape("gate_up", 10240, 2560, GATED), lambda given: few_tokens.gated_linear(given.x, given.weight)),
    "linear_gelu_times": (
        Shape("ple_gate", 256, 2560, GELU_TIMES),
        lambda given: few_tokens.linear_gelu_times(given.x, given.weight, factor_of(given)),
    ),
    "capped_head": (
        Shape("head", HEAD_ROWS, 2560, SOFTCAP),
        lambda given: few_tokens.capped_head(given.x, given.weight, CAP),
    ),
}


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of every `hopper_stream` launch, in order."""
    found: list[int] = []
    describe = few_tokens.describe_stream

    def note(x: Tensor, *others: Any, **extra: Any) -> Any:
        found.append(x.shape[0])
        return describe(x, *others, **extra)

    monkeypatch.setattr(few_tokens, "describe_stream", note)
    return found


def factor_of(operands: Operands) -> Tensor:
    assert operands.factor is not None
    return operands.factor


CHAIN = (Shape("o", 2560, 2560), Shape("gate_up", 10240, 2560, GATED), Shape("down", 2560, 10240))
SEQUENCE_TOKENS = (8, 64)  # token counts for which every kernel of the sequence is ours


@contextmanager
def alone() -> Iterator[None]:
    """Allow one test process at a time."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    with (cache_folder() / "test_linear.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
        yield


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile nearly all kernels of this file in many processes at once. One after the other they take half a minute.

    The kernels are kept on disk. The first of several test processes compiles them, and the others find them there.
    """
    use_disk_cache()
    with alone(), compile_ahead():
        for case in map(cut, class_cases()):
            operands = Operands.draw(case.shape, case.num_tokens)
            out = torch.empty(case.out_shape, dtype=case.out_dtype, device=DEVICE)
            case.launch(operands.x, operands.weight, out, operands.factor).run()
        for shape, op in OPS.values():
            for tokens in OP_TOKENS:
                operands = Operands.draw(shape, tokens)
                op(operands)
                with replayed():
                    op(operands)
        with replayed():
            for shape in CHAIN:
                for tokens in SEQUENCE_TOKENS:
                    operands = Operands.draw(shape, tokens)
                    (few_tokens.gated_linear if shape.epilogue == GATED else few_tokens.linear)(operands.x, operands.weight)


@pytest.mark.parametrize("name", OPS)
def test_ops_inside_and_outside_replayed_steps(name: str, streamed: list[int]) -> None:
    shape, op = OPS[name]
    for tokens in OP_TOKENS:
        operands = Operands.draw(shape, tokens)
        wanted = operands.twin(shape.epilogue)
        streamed.clear()
        assert_close(op(operands), wanted)
        assert not streamed
        with replayed():
            assert_close(op(operands), wanted)
        is_served = choose_stream(tokens, shape.num_rows, shape.size_k, shape.epilogue) is not None
        assert streamed == [tokens] * is_served
        assert is_served or (name, tokens) == ("capped_head", 8)


@pytest.mark.parametrize("name", OPS)
def test_a_graph_gives_the_same_bits(name: str, streamed: list[int]) -> None:
    shape, op = OPS[name]
    operands = Operands.draw(shape, 48)
    with replayed():
        launched = op(operands)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = op(operands)
    assert streamed == [48, 48]
    assert_close(launched, operands.twin(shape.epilogue))
    for _ in range(3):
        captured.fill_(math.nan)
        graph.replay()
        assert torch.equal(captured, launched)


@pytest.mark.parametrize("num_tokens", SEQUENCE_TOKENS)
def test_a_sequence_of_dependent_launches(num_tokens: int) -> None:
    """Kernels that overlap the previous one give the same results as one at a time. Buffers are reused immediately."""
    first = Operands.draw(CHAIN[0], num_tokens).x
    layers = [[Operands.draw(shape, 1).weight for shape in CHAIN] for _ in range(6)]

    def chain(is_alone: bool) -> Tensor:
        x = first
        for weights in layers:
            for shape, weight in zip(CHAIN, weights, strict=True):
                x = (few_tokens.gated_linear if shape.epilogue == GATED else few_tokens.linear)(x, weight)
                if is_alone:
                    torch.cuda.synchronize()
            x = x * x.numel() ** 0.5 / x.norm()  # other kernels in between
        return x

    with replayed():
        wanted = chain(is_alone=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = chain(is_alone=False)
    assert wanted.isfinite().all()
    for _ in range(20):
        captured.fill_(math.nan)
        graph.replay()
        assert torch.equal(captured, wanted)
