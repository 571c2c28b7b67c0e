"""The arena's memory as tensors. It is one allocation with a view per layer."""

from __future__ import annotations

import torch
from torch import Tensor

from culet.cache.spec import CacheLayout, KVGroup


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
