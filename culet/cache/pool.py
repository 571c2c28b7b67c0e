"""The memory of pages as tensors. That of the arena is one allocation with a view per layer."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import torch
from torch import Tensor

from culet.cache.spec import CacheLayout, KVGroup
from culet.log import logger

HOST_PART_BYTES = 256 << 20  # a power of two, to which torch rounds the size of pinned memory


class Pool:
    """All KV pages, in `dtype`, or in e4m3 for groups whose layout says so.

    `k_pages(layer)` and `v_pages(layer)` are views [page, kv_head, token, head_dim] into one buffer.
    """

    def __init__(
        self, layout: CacheLayout, num_slabs: int, dtype: torch.dtype, device: torch.device, *, has_spare: bool = False
    ) -> None:
        """Allocate the pages. `has_spare` adds a page that nothing owns or writes to, which rows that pad a batch read."""
        self.layout = layout
        self.num_slabs = num_slabs  # without the spare page
        self.spare_page = num_slabs if has_spare else None
        # Zeroed, so that padding keys are finite. A masked NaN would still be NaN.
        self._slabs = torch.zeros(num_slabs + has_spare, layout.slab_bytes, dtype=torch.uint8, device=device)
        self._planes = {
            layer: self._view(group, position, dtype) for group in layout.groups for position, layer in enumerate(group.layers)
        }

    def _view(self, group: KVGroup, position: int, dtype: torch.dtype) -> Tensor:
        """Return the planes of the group's `position`-th layer, [plane, page, kv_head, token, width], in e4m3 or in `dtype`."""
        spec = group.spec
        dtype = torch.float8_e4m3fn if spec.is_fp8 else dtype
        assert spec.itemsize == dtype.itemsize, f"group {group.name} was planned for {spec.itemsize}-byte elements, got {dtype}"
        slabs = self._slabs.view(dtype)
        token, head = spec.width, spec.width * group.stored_tokens
        plane = head * spec.num_kv_heads
        size = (spec.num_planes, slabs.shape[0], spec.num_kv_heads, group.stored_tokens, spec.width)
        stride = (plane, slabs.stride(0), head, token, 1)
        return slabs.as_strided(size, stride, position * spec.num_planes * plane)

    def planes(self, layer: int) -> Tensor:
        """Return the K and V planes or the single latent plane, [plane, page, kv_head, token, width]."""
        return self._planes[layer]

    def k_pages(self, layer: int) -> Tensor:
        """Return the keys, [page, kv_head, token, head_dim]. They are the last columns of a latent row."""
        group = self.layout.group_of(layer)
        return self._planes[layer][0][..., group.spec.width - group.spec.head_dim :]

    def v_pages(self, layer: int) -> Tensor:
        """Return the values, [page, kv_head, token, head_dim]. They are the first columns of a latent row."""
        group = self.layout.group_of(layer)
        return self._planes[layer][-1][..., : group.spec.head_dim]

    def copy_pages(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Copy whole slabs, for sequences that diverge inside a page."""
        # Copy one at a time. A gather of all slabs would need as much memory again, and the arena leaves none.
        for source, target in copies:
            self._slabs[target].copy_(self._slabs[source])

    def save_pages(self, saves: tuple[tuple[int, int], ...], host: HostPool) -> None:
        """Copy whole slabs to host pages, on the stream of the step. This does not wait for a GPU."""
        for page, host_page in saves:
            host.slab(host_page).copy_(self._slabs[page], non_blocking=True)

    def load_pages(self, loads: tuple[tuple[int, int], ...], host: HostPool) -> None:
        """Copy host pages to whole slabs, on the stream of the step. This does not wait for a GPU."""
        for host_page, page in loads:
            self._slabs[page].copy_(host.slab(host_page), non_blocking=True)


class HostPool:
    """Host pages, which hold the slabs of sequences that are parked.

    A GPU copies from and to pinned memory, which takes seconds to allocate. So a thread allocates it in parts, in the
    background. On a CPU, the system provides memory when it is first written to.
    """

    def __init__(self, slab_bytes: int, num_pages: int, device: torch.device) -> None:
        """Begin to allocate `num_pages` pages."""
        self._slab_bytes, self._wanted, self._device = slab_bytes, num_pages, device
        self._pages_per_part = max(1, HOST_PART_BYTES // slab_bytes)
        self._parts: list[Tensor] = []  # [page, byte]
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if device.type == "cuda":
            self._thread = threading.Thread(target=self._allocate, name="host pages", daemon=True)
            self._thread.start()
        else:
            self._allocate()

    @property
    def num_pages(self) -> int:
        """The number of pages that are allocated so far."""
        return min(len(self._parts) * self._pages_per_part, self._wanted)

    def slab(self, host_page: int) -> Tensor:
        """Return the bytes of a page."""
        part, index = divmod(host_page, self._pages_per_part)
        return self._parts[part][index]

    def close(self) -> None:
        """Allocate no more."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _allocate(self) -> None:
        is_pinned = self._device.type == "cuda"
        try:
            with torch.cuda.device(self._device) if is_pinned else nullcontext():
                while self.num_pages < self._wanted and not self._closed.is_set():
                    count = min(self._pages_per_part, self._wanted - self.num_pages)
                    self._parts.append(torch.empty(count, self._slab_bytes, dtype=torch.uint8, pin_memory=is_pinned))
        except RuntimeError as error:  # the system refuses more. Sequences that find no room are computed again.
            gib = self.num_pages * self._slab_bytes / (1 << 30)
            logger.warning("swap-space: only %.1f GiB could be allocated: %s", gib, error)
