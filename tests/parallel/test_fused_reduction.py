"""The norm that adds up the terms of several ranks: the kernel against its eager twin, and both against plain sums.

The buffers of all ranks are in one process. While one rank runs, the others have already written their terms.
"""

from __future__ import annotations

import pytest

from tests.interpreting import INTERPRETED, run_interpreted

pytest.importorskip("triton")

if not INTERPRETED:

    @pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
    def test_in_the_interpreter(marked: str) -> None:
        run_interpreted(__file__, marked)

else:
    from typing import Any

    import torch
    from torch import Tensor

    from culet.kernels.eager import fused, ops
    from culet.kernels.eager.ranks import residual_norm_of_ranks as eager_norm
    from culet.kernels.triton.norms.residual import residual_norm_of_ranks
    from culet.kernels.types import PeerBuffers
    from tests.parallel.peers import copy_of, make_peers, new_peers, write_terms

    EPS, SIZE = 1e-6, 24

    @pytest.fixture(autouse=True)
    def seed() -> None:
        torch.manual_seed(7)

    def assert_same_state(got: list[PeerBuffers], want: list[PeerBuffers]) -> None:
        for mine, theirs in zip(got, want, strict=True):
            for tensors in zip(
                (*mine.data, *mine.arrived, mine.turn), (*theirs.data, *theirs.arrived, theirs.turn), strict=True
            ):
                torch.testing.assert_close(*tensors, rtol=0, atol=0, equal_nan=True)

    def run_rank(peers: list[PeerBuffers], rank: int, x_TD: Tensor, deltas: list[tuple[Tensor, ...]], norms: tuple) -> Tensor:
        """Check one rank. `deltas` has those of all ranks. Return its x'."""
        results = []
        for norm in (residual_norm_of_ranks, eager_norm):
            state = copy_of(peers)
            for other, terms in zip(state, deltas, strict=True):
                if other.rank != rank:
                    write_terms(other, torch.cat([term if term.dim() == 2 else term.sum(0) for term in terms], dim=1))
            results.append((norm(x_TD, deltas[rank], *norms, EPS, state[rank]), state))
        (got, got_state), (want, want_state) = results
        for mine, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        assert_same_state(got_state, want_state)
        return got[0]

    def check(peers: list[PeerBuffers], num_tokens: int, *, num_deltas: int, num_parts: int, num_next: int) -> None:
        x_TD = torch.randn(num_tokens, SIZE)
        weights = tuple(torch.rand(SIZE) for _ in range(2 * num_deltas - 1))
        scalar = torch.rand(1) if num_next < 2 else None
        next_weights = tuple(torch.rand(SIZE) for _ in range(num_next))
        first = (num_parts, num_tokens, SIZE) if num_parts > 1 else (num_tokens, SIZE)
        sizes = [first, (num_tokens, SIZE)][:num_deltas]
        deltas = [tuple(torch.randn(size) for size in sizes) for _ in peers]
        streams = [run_rank(peers, rank, x_TD, deltas, (weights, scalar, next_weights)) for rank in range(len(peers))]
        totals = [sum(term if term.dim() == 2 else term.sum(0) for term in terms) for terms in zip(*deltas, strict=True)]
        if num_deltas == 1:
            want, _ = ops.residual_norm(x_TD, totals[0], weights[0], scalar, None, EPS)
        else:
            want, _ = fused.residual_norm_joint(x_TD, *totals, weights, scalar, None, EPS)
        for stream in streams:
            assert torch.equal(stream, streams[0]), "all ranks have the same bits"
            torch.testing.assert_close(stream, want, rtol=1e-5, atol=1e-5)
        for rank, terms in enumerate(deltas):
            write_terms(peers[rank], torch.cat([term if term.dim() == 2 else term.sum(0) for term in terms], dim=1))

    KINDS = {
        "one": {"num_deltas": 1, "num_parts": 1, "num_next": 1},
        "parts": {"num_deltas": 1, "num_parts": 3, "num_next": 2},
        "joint": {"num_deltas": 2, "num_parts": 1, "num_next": 1},
        "last": {"num_deltas": 1, "num_parts": 1, "num_next": 0},
    }

    @pytest.mark.parametrize("is_pushed", [False, True], ids=["pull", "push"])
    @pytest.mark.parametrize("num_tokens", [1, 8, 32, pytest.param(256, marks=pytest.mark.slow)])
    def test_numbers_of_tokens(num_tokens: int, is_pushed: bool) -> None:
        check(new_peers(2, num_tokens, SIZE, is_pushed=is_pushed), num_tokens, **KINDS["one"])

    @pytest.mark.parametrize("is_pushed", [False, True], ids=["pull", "push"])
    @pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
    def test_rounds_of_different_kinds(num_ranks: int, is_pushed: bool) -> None:
        """Rows are used unequally often, so their places differ. A later round never reads an earlier one's terms."""
        peers = new_peers(num_ranks, 5, 2 * SIZE + 8, is_pushed=is_pushed)
        for kind, num_tokens in (("one", 5), ("parts", 2), ("joint", 3), ("last", 5), ("joint", 4), ("one", 1)):
            check(peers, num_tokens, **KINDS[kind])
        assert peers[0].turn.tolist() == [6, 5, 4, 3, 2]

    def test_the_number_of_turns_may_overflow() -> None:
        peers = new_peers(2, 1, SIZE, is_pushed=False)
        for peer in peers:
            peer.turn.fill_(2**31 - 2)
        for _ in range(3):
            check(peers, 1, **KINDS["one"])
        assert peers[0].turn.item() == -(2**31) + 1

    def run_rounds(rank: int, tensors: tuple[list[Tensor], list[Tensor], list[Tensor]], is_pushed: bool) -> list[float]:
        """Return the errors of the rounds of one rank, which is a process of its own."""
        peers = make_peers(*tensors, is_pushed=is_pushed)[rank]
        errors = []
        for number in range(NUM_ROUNDS):
            generator = torch.Generator().manual_seed(number)
            num_tokens = 1 + number % 3
            deltas_RTD = torch.randn(2, num_tokens, SIZE, generator=generator)
            x_TD, weight = torch.randn(num_tokens, SIZE, generator=generator), torch.ones(SIZE)
            (got,) = residual_norm_of_ranks(x_TD, (deltas_RTD[rank],), (weight,), None, (), EPS, peers)
            want, _ = ops.residual_norm(x_TD, deltas_RTD.sum(0), weight, None, None, EPS)
            errors.append(float((got - want).abs().max()))
        return errors

    def run_process(results: Any, rank: int, *arguments: Any) -> None:
        results.put(run_rounds(rank, *arguments))

    NUM_ROUNDS = 150

    @pytest.mark.slow
    @pytest.mark.parametrize("is_pushed", [False, True], ids=["pull", "push"])
    def test_processes_that_wait_for_each_other(is_pushed: bool) -> None:
        """The ranks are processes that share memory. Each waits in its kernel for the other."""
        peers = new_peers(2, 3, SIZE, is_pushed=is_pushed)
        tensors = list(peers[0].data), list(peers[0].arrived), [peer.turn for peer in peers]
        for tensor in (tensor for kind in tensors for tensor in kind):
            tensor.share_memory_()
        context = torch.multiprocessing.get_context("spawn")
        results = context.Queue()
        processes = [context.Process(target=run_process, args=(results, rank, tensors, is_pushed)) for rank in range(2)]
        for process in processes:
            process.start()
        errors = [results.get(timeout=600) for _ in processes]
        for process in processes:
            process.join()
        assert [len(each) for each in errors] == [NUM_ROUNDS] * 2
        assert max(max(each) for each in errors) < 1e-5
