"""Pages in host memory: their account, and their memory."""

from __future__ import annotations

import pytest
import torch

from culet.cache import pool as pool_module
from culet.cache.host_pages import HostPages
from culet.cache.pool import HostPool, Pool
from culet.cache.spec import KVSpec, plan_cache

CPU = torch.device("cpu")
LAYOUT = plan_cache([KVSpec(layer, 1, 4, 4, window, latent=False, itemsize=4) for layer, window in enumerate((8, None))])


def make(num_pages: int = 4) -> HostPages:
    host = HostPages()
    host.grow(num_pages)
    return host


def test_a_page_that_is_loaded_is_free_after_the_plan() -> None:
    host = make()
    saved = host.save([7, 8])
    assert saved == [0, 1]
    assert host.drain() == (((7, 0), (8, 1)), ())
    host.load(saved, [3, 4])
    host.give_back(saved)
    assert host.num_free == 2
    assert host.save([5]) == [2]  # not one that this plan loads
    assert host.drain() == (((5, 2),), ((0, 3), (1, 4)))
    assert host.num_free == 3
    assert host.drain() == ((), ())


def test_what_is_given_back_is_not_saved() -> None:
    host = make()
    first, second = host.save([7]), host.save([8])
    host.give_back(first)
    assert host.save([9]) == first
    host.give_back(second)
    assert host.drain() == (((9, first[0]),), ())


def test_a_page_that_is_saved_and_loaded_in_one_plan() -> None:
    host = make()
    saved = host.save([7])
    host.load(saved, [2])
    host.give_back(saved)
    assert host.drain() == (((7, 0),), ((0, 2),))


def test_pages_are_added_later() -> None:
    host = HostPages()
    assert host.num_free == 0
    host.grow(2)
    taken = host.save([1, 2])
    host.grow(5)
    host.grow(3)  # an older report
    assert host.num_pages == 5
    assert sorted([*taken, *host.save([3, 4, 5])]) == [0, 1, 2, 3, 4]


def test_mistakes_are_noticed() -> None:
    host = make(1)
    taken = host.save([1])
    with pytest.raises(AssertionError, match="asked for 1 host pages, but only 0 are free"):
        host.save([2])
    host.give_back(taken)
    with pytest.raises(AssertionError, match="given back, but no sequence holds it"):
        host.give_back(taken)
    with pytest.raises(AssertionError, match="is loaded, but no sequence holds it"):
        host.load(taken, [3])


def test_pages_return_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are in several parts of memory. Saves come before loads, so a page may be saved and loaded by one plan."""
    monkeypatch.setattr(pool_module, "HOST_PART_BYTES", 3 * LAYOUT.slab_bytes)
    pool = Pool(LAYOUT, 9, torch.float32, CPU)
    host = HostPool(LAYOUT.slab_bytes, 7, CPU)
    assert host.num_pages == 7
    before = pool._slabs.random_().clone()
    saves = tuple((page, 6 - page) for page in range(7))
    pool.save_pages(saves, host)
    pool._slabs.zero_()
    pool.load_pages(tuple((6 - page, page + 2) for page in range(7)), host)
    assert torch.equal(pool._slabs[2:], before[:7])
    assert not pool._slabs[:2].any()


def test_no_pages() -> None:
    host = HostPool(64, 0, CPU)
    assert host.num_pages == 0
    host.close()


def test_memory_that_the_system_refuses(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The pages that were allocated before are used."""
    monkeypatch.setattr(pool_module, "HOST_PART_BYTES", 2 * 64)
    given, empty = [0], torch.empty

    def allocate(*args: object, **kwargs: object) -> torch.Tensor:
        given[0] += 1
        if given[0] > 3:
            raise RuntimeError("out of memory")
        return empty(*args, **kwargs)  # type: ignore[no-any-return,call-overload]

    monkeypatch.setattr(torch, "empty", allocate)
    with caplog.at_level("WARNING", logger="culet"):
        host = HostPool(64, 100, CPU)
    assert host.num_pages == 6
    assert "swap-space: only 0.0 GiB could be allocated: out of memory" in caplog.text
