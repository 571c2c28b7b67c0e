"""What the attention kernels read besides queries: the paged cache of one layer, and where each row's tokens lie.

Shapes: T query tokens of all rows, row after row · B rows · P table columns · N query heads · G KV heads · H head size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedKV:
    """The pages of one layer and the rows' page tables.

    `planes` is [plane, page, kv_head, token, width]: a K plane and a V plane of width H, or the one latent plane whose first H
    columns are V and whose last H columns are K.
    """

    planes: Tensor
    pages_BP: Tensor  # int32; column j of row b holds the positions from first_B[b] + j * page_tokens on
    first_B: Tensor  # int32
    head_dim: int
    window: int | None = None  # keys a query sees, itself included; None: all

    @property
    def is_latent(self) -> bool:
        return self.planes.shape[0] == 1

    @property
    def num_kv_heads(self) -> int:
        return self.planes.shape[2]

    @property
    def page_tokens(self) -> int:
        return self.planes.shape[3]

    @property
    def width(self) -> int:
        return self.planes.shape[4]

    @property
    def k_pages(self) -> Tensor:
        """[page, kv_head, token, H]."""
        return self.planes[0][..., self.width - self.head_dim :]

    @property
    def v_pages(self) -> Tensor:
        """[page, kv_head, token, H]."""
        return self.planes[-1][..., : self.head_dim]


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """Which query tokens belong to which row, and what each of them sees."""

    row_begin_B1: Tensor  # int32; tokens row_begin[b] .. row_begin[b + 1] - 1 belong to row b; an empty row does nothing
    context_B: Tensor  # int32; position of the row's first query token
    visible_2T: Tensor | None = None  # int32 (kv_lo, kv_hi) of each query token, both ends included; None: the text rule

    @property
    def num_rows(self) -> int:
        return self.context_B.shape[0]
