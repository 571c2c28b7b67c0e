"""The first and last kernels of a fixed-shape step compared with their eager twins, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.interpreting import INTERPRETED, run_interpreted

pytest.importorskip("triton")

if not INTERPRETED:

    def test_steps_in_the_interpreter() -> None:
        run_interpreted(__file__)

else:
    from culet.kernels.eager import fixed_step as eager_step
    from culet.kernels.triton.drafting import accept_drafts, token_layout
    from culet.kernels.types import PageTables, PlannedRows, TokenLayout

    @pytest.fixture(autouse=True)
    def seed() -> None:
        torch.manual_seed(12)

    def whole(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    @pytest.mark.parametrize("room", [0, 6])
    @pytest.mark.parametrize("counts", [[4, 1, 3, 4, 4, 0, 0, 0], [1], [1, 1, 1], [9, 8, 9, 0]], ids=str)
    def test_token_layout(counts: list[int], room: int) -> None:
        """Open and closed rows, and padding rows with many tokens, one and none."""
        num_rows, num_tokens, width, spare = len(counts), sum(counts), 70, 11
        sizes, columns = (4, 16, 6), (20, 5, 12)
        is_padding = [index >= max(1, num_rows // 2) for index in range(num_rows)]
        slots = [spare if pads else index * 2 for index, pads in enumerate(is_padding)]
        starts = [0 if pads else 20 + 5 * index for index, pads in enumerate(is_padding)]
        tokens = torch.randint(0, 9000, (spare + 1, width), dtype=torch.int32)
        placeholders = torch.tensor([7, 8, 7000])[: room // 2]
        tokens[torch.rand(tokens.shape) < 0.3] = 7
        pages = torch.randint(0, 500, (sum(num_rows * count for count in columns),), dtype=torch.int32)
        begins = [sum(num_rows * count for count in columns[:index]) for index in range(3)]
        tables = PageTables(pages, whole(list(zip(begins, columns, sizes, strict=True))))
        firsts = torch.zeros(3, num_rows + 3, dtype=torch.int32)
        firsts[0, :num_rows] = whole([0 if pads else 8 for pads in is_padding])
        found = []
        for ops in (eager_step, token_layout):
            rows = PlannedRows(
                begin_B1=whole([0, *counts]).cumsum(0).int(),
                start_B=whole(starts),
                slot_B=whole(slots),
                is_open_B=whole([int(not pads and index % 2 == 0) for index, pads in enumerate(is_padding)]),
                first_GB=firsts,
                most_tokens=max(counts),
            )
            accepted = whole([index % 4 for index in range(spare + 1)])
            long = [torch.full((num_tokens,), -7) for _ in range(5)]
            into = TokenLayout(
                *long[:4], long[4].int(), torch.full((3, num_tokens + 1), -7), whole([-7] * num_rows),
                torch.full((num_tokens,), -7) if room else None,
            )  # fmt: skip
            ops.lay_out_tokens(rows, tables, tokens, placeholders, accepted, room, into)
            assert rows.start_B.tolist() == starts
            found.append((*into[:7], *([into.ring_T] if room else [])))
        wanted, got = found
        for mine, eager in zip(got, wanted, strict=True):
            assert torch.equal(mine, eager)
        ids, embedded, positions, slots_of = wanted[0], wanted[1], wanted[2], wanted[5]
        begin = 0
        for index, count in enumerate(counts):
            at = starts[index] + (slots[index] % 4 if not is_padding[index] and index % 2 == 0 else 0)
            assert positions[begin : begin + count].tolist() == list(range(at, at + count))
            assert ids[begin : begin + count].tolist() == tokens[slots[index], at : at + count].tolist()
            expected = [
                0 if token_id in placeholders.tolist() else token_id for token_id in ids[begin : begin + count].tolist()
            ]
            assert embedded[begin : begin + count].tolist() == expected
            assert bool((slots_of[:, begin : begin + count] == -1).all()) == is_padding[index] or not count
            begin += count

    @pytest.mark.parametrize("forced", [-1, 0, 2])
    def test_accepted_drafts(forced: int) -> None:
        """Rows of all sizes, including one token and none, and the inputs of the next draft round."""
        counts, width = [4, 1, 3, 0, 2, 4, 2, 0, 0, 0], 50
        num_rows, num_tokens = 5, sum(counts)
        begin = torch.tensor([0, *counts]).cumsum(0).int()
        ids = torch.randint(0, 3, (num_tokens,))
        # A row's tokens are consecutive in its slot. Those of padding rows are in the last slot.
        slots = [4, 0, 2, 6, 5, 6, 6, 6, 6, 6]
        firsts = torch.randint(0, width - 4, (10,)).tolist()
        rows = zip(slots, firsts, counts, strict=True)
        places = torch.cat([slot * width + first + torch.arange(count) for slot, first, count in rows])
        places[-6:] = 6 * width + torch.arange(6)
        positions = torch.randint(1, 99, (num_tokens,), dtype=torch.int32)
        last = torch.randn(num_tokens, 1100)
        for _ in range(8):
            drawn = torch.randint(0, 3, (num_tokens,))
            found = []
            for ops in (eager_step, accept_drafts):
                tokens, out = torch.zeros(7, width, dtype=torch.int32), torch.zeros(num_tokens + num_rows, dtype=torch.int64)
                accepted = torch.full((7,), -9, dtype=torch.int32)
                ops.accept_drafts(drawn, ids, begin, places, tokens, whole([forced]), out, accepted)
                facts, hidden = torch.zeros(4, num_rows, dtype=torch.int64), torch.zeros(num_rows, 1100)
                ops.begin_round(out, begin, places, positions, width, last, (facts, hidden))
                found.append((tokens, out, facts, hidden, accepted))
            for wanted, got in zip(*found, strict=True):
                assert torch.equal(got, wanted)
            tokens, out, facts, hidden, accepted = found[0]
            assert tokens.view(-1)[places].tolist() == out[:num_tokens].tolist() == drawn.tolist()
            for row, (first, count) in enumerate(zip(begin.tolist(), counts[:num_rows], strict=False)):
                pairs = zip(drawn[first : first + count - 1].tolist(), ids[first + 1 : first + count].tolist(), strict=True)
                agreed = next((index for index, (a, b) in enumerate(pairs) if a != b), max(0, count - 1))
                kept = int(out[num_tokens + row])
                assert kept == (agreed if forced < 0 else min(forced, max(0, count - 1)))
                assert int(accepted[slots[row]]) == (kept if count else -9)
                source = first + kept
                assert facts[:, row].tolist() == [places[source] // width, row, source, positions[source]]
                assert torch.equal(hidden[row], last[source])
