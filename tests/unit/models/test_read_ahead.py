"""Weights are read ahead by several threads, in a ring of memory, and arrive as they are in the files."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from culet.errors import CheckpointError
from culet.layers.weight.placement import ConvertedPiece, Piece, Placement, whole
from culet.models import read_ahead
from culet.models.read_ahead import _Ring, plan_reads, run_reads
from culet.models.weight_files import StoredTensor, read_headers

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of these tests are split into many reads, and the ring is full most of the time."""
    monkeypatch.setattr(read_ahead, "_READ_BYTES", 3000)
    monkeypatch.setattr(read_ahead, "_CPU_RING_BYTES", 16 << 10)


def stored(tmp_path: Path, **tensors: torch.Tensor) -> dict[str, StoredTensor]:
    save_file(tensors, tmp_path / "model.safetensors")
    return read_headers(tmp_path)


def test_every_kind_of_piece_arrives(tmp_path: Path) -> None:
    torch.manual_seed(0)
    wide, stack = torch.randn(60, 200), torch.randn(9, 20, 30).bfloat16()
    halves, number = torch.randn(50, 100).half(), torch.tensor(3.5)
    headers = stored(tmp_path, wide=wide, stack=stack, halves=halves, number=number)
    order, columns = torch.randperm(60), torch.randperm(200)
    plain, rows, cols, part = torch.empty(60, 200), torch.empty(60, 200), torch.empty(60, 200), torch.empty(20, 200)
    experts, narrow = torch.empty(9, 20, 30).bfloat16(), torch.empty(9, 20, 10).bfloat16()
    scalar = torch.empty(())
    widened, doubled, scale, one = torch.empty(50, 100), torch.empty(60, 200), torch.empty(60), torch.empty(())

    def convert(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return 2 * value, value.sum(1)

    every = whole((60, 200))
    pieces = (
        Piece(plain, every),
        Piece(rows, every, order),
        Piece(cols, every, columns, dim=1),
        Piece(part, (slice(20, 40), slice(0, 200))),
        ConvertedPiece(doubled, every, convert=convert, more_targets=(scale,)),
    )
    placed = [
        ("wide", Placement((60, 200), pieces)),
        ("stack", Placement((9, 20, 30), (Piece(experts, whole((9, 20, 30))), Piece(narrow, (*whole((9, 20)), slice(5, 15)))))),
        ("halves", Placement((50, 100), (Piece(widened, whole((50, 100))),))),
        ("number", Placement((), (ConvertedPiece(one, (...,), convert=lambda value: (value,)),))),  # type: ignore[arg-type]
        ("number", Placement((), (Piece(scalar, whole(())),))),
    ]
    reads = [read for name, placement in placed for read in plan_reads(headers[name], placement)]
    assert len(reads) > 60
    assert list(run_reads(reads, CPU)) == reads, "in order"
    assert torch.equal(plain, wide)
    assert torch.equal(rows, wide[order])
    assert torch.equal(cols, wide[:, columns])
    assert torch.equal(part, wide[20:40])
    assert torch.equal(doubled, 2 * wide)
    assert torch.equal(scale, wide.sum(1))
    assert torch.equal(experts, stack)
    assert torch.equal(narrow, stack[..., 5:15])
    assert torch.equal(widened, halves.float())
    assert one == scalar == 3.5
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read-weights")]


def test_only_the_bytes_of_a_region_are_read(tmp_path: Path) -> None:
    headers = stored(tmp_path, wide=torch.arange(6000.0).view(60, 100))
    target = torch.empty(7, 100)
    (read,) = plan_reads(headers["wide"], Placement((60, 100), (Piece(target, (slice(53, 60), slice(0, 100))),)))
    assert read.num_bytes == 7 * 100 * 4
    assert read.run is not None
    assert read.run.offset == (tmp_path / "model.safetensors").stat().st_size - read.num_bytes


def test_a_file_that_shrinks_is_an_error(tmp_path: Path) -> None:
    headers = stored(tmp_path, wide=torch.randn(60, 200))
    reads = list(plan_reads(headers["wide"], Placement((60, 200), (Piece(torch.empty(60, 200), whole((60, 200))),))))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read: the file ends too early"):
        list(run_reads(reads, CPU))


def test_the_ring_never_gives_memory_twice() -> None:
    """Parts are taken and given back at random, and no two that are in use overlap."""
    memory = torch.zeros(20 * 512, dtype=torch.uint8)
    ring, used, generator = _Ring(memory), [], torch.Generator().manual_seed(1)
    num_refused = 0
    for number in range(3000):
        size = int(torch.randint(1, 512 * 8, (), generator=generator))
        part = ring.take(size)
        if part is None:
            num_refused += 1
            assert used, "an empty ring has room"
            ring.give_back_oldest()
            part, value = used.pop(0)
            assert bool((part == value).all()), "somebody else wrote here"
            continue
        assert len(part) >= size
        part.fill_(number % 251)
        used.append((part, number % 251))
    assert num_refused > 500
