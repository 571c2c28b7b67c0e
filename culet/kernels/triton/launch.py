"""A kernel with everything its launch needs, so that one description serves launching, warming and compiling ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

_is_warming = False  # launches compile and do not run


@contextmanager
def only_warm() -> Iterator[None]:
    """Within, every launch compiles its kernel, or finds it on disk, and does not run."""
    global _is_warming
    before, _is_warming = _is_warming, True
    try:
        yield
    finally:
        _is_warming = before


@dataclass(frozen=True)
class Launch:
    """`kernel[grid](**arguments)`; `options` are num_warps, num_stages and the like."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        if _is_warming:
            self.warm()
            return
        self.kernel[self.grid](**self.arguments, **self.options)

    def warm(self) -> Any:
        """Compile for the current device, or find the compiled kernel on disk; launches nothing."""
        return self.kernel.warmup(**self.arguments, **self.options, grid=self.grid)

    def compile_for(self, capability: int) -> Any:
        """Compile for `capability` (90 is sm_90) without a GPU; the arguments may be tensors on the meta device."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.experimental.gluon._runtime import GluonASTSource

        signature, constants, attributes = {}, {}, {}
        for index, parameter in enumerate(self.kernel.params):
            value = self.arguments[parameter.name]
            if parameter.is_constexpr or value is None:
                signature[parameter.name], constants[parameter.name] = "constexpr", value
            elif hasattr(value, "block_shape"):  # a tensor descriptor
                signature[parameter.name] = f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)},{value.layout!r}>"
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = "*" + _TYPES[value.dtype]
                attributes[(index,)] = [["tt.divisibility", 16]]
            else:
                signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                if value % 16 == 0 and not parameter.do_not_specialize:
                    attributes[(index,)] = [["tt.divisibility", 16]]
        source = (GluonASTSource if self.kernel.is_gluon() else ASTSource)(self.kernel, signature, constants, attributes)
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=self.options)


_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
}
