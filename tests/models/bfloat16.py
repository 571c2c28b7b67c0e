"""Quick bfloat16 products on a CPU without instructions for them, where torch takes 200 times as long as in float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

_PRODUCTS = {getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul")}


class QuickBFloat16(TorchDispatchMode):
    """Multiply bfloat16 matrices as a GPU does: sum in float32 and round the result once."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if func in _PRODUCTS and all(tensor.dtype == torch.bfloat16 for tensor in tensors):
            return func(*tree_map_only(torch.Tensor, torch.Tensor.float, args), **(kwargs or {})).bfloat16()
        return func(*args, **(kwargs or {}))
