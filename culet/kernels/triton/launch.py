"""Describe a kernel with everything its launch needs. The description is used to launch, compile at start and cross-compile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from culet.kernels.block_flag import BlockFlag

only_warm = BlockFlag()  # in its blocks, launches compile their kernel, or find it on disk, and do not run
_compiled: dict[tuple[Any, ...], Any] = {}  # by everything that makes Triton compile a different kernel
_warmed: set[tuple[Any, ...]] = set()  # keys of kernels that are compiled or being compiled
_parameters: dict[int, list[tuple[str, bool, bool]]] = {}  # by kernel, (name, is constexpr, is not specialised)
_prepared: dict[tuple[Any, ...], _Prepared | None] = {}  # by the caller's key


def is_only_warming() -> bool:
    """Return whether launches compile and do not run."""
    return only_warm.is_set


@dataclass(slots=True)
class Launch:
    """The launch `kernel[grid](**arguments)`. `options` are num_warps, num_stages and the like."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        if only_warm.is_set:
            self._warm_once()
            return
        # Triton takes 50 to 100 us to find a kernel by its arguments, most of a small step. This takes a tenth of that.
        key, values = self._key()
        compiled = None if key is None else _compiled.get(key)
        if key is None or compiled is None:
            compiled = self.kernel[self.grid](**self.arguments, **self.options)
            if key is not None:
                _compiled[key] = compiled
            return
        x, y, z = (*self.grid, 1, 1)[:3]
        stream = torch._C._cuda_getCurrentRawStream(key[1])
        compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *values)

    def _key(self) -> tuple[tuple[Any, ...] | None, list[Any]]:
        """Return a key for the compiled kernel, at least as specific as Triton's own, and the arguments in order.

        Tensors are passed as addresses because Triton would ask the driver about each one. The key is None if Triton must do
        the launch, which is in its interpreter and with arguments of other types.
        """
        kernel, arguments = self.kernel, self.arguments
        parameters = _parameters.get(id(kernel))
        if parameters is None:
            if not hasattr(kernel, "device_caches"):
                return None, []
            parameters = [(param.name, param.is_constexpr, param.do_not_specialize) for param in kernel.params]
            _parameters[id(kernel)] = parameters
        key: list[Any] = [id(kernel), torch.cuda.current_device(), *self.options.values()]
        values: list[Any] = []
        for name, is_constexpr, is_plain in parameters:
            value = arguments[name]
            if is_constexpr or value is None:
                key.append(value)
            elif isinstance(value, torch.Tensor):
                key.append(value.dtype)
                value = value.data_ptr()
                key.append(value % 16)
            elif type(value) is int:
                # Triton compiles different kernels for 1, for multiples of 16, and for values that need 64 bits.
                kind = 0 if is_plain else 1 if value == 1 else 2 if value % 16 == 0 else 3
                key.append(kind if -(2**31) <= value < 2**31 else kind + 4)
            elif isinstance(value, TensorDescriptor):
                layout = value.layout
                key += ("descriptor", value.base.dtype, *value.block_shape, layout.swizzle_byte_width, layout.element_bitwidth)
                key += (layout.rank, layout.transposed, layout.fp4_padded, value.padding)
            else:
                return None, []
            values.append(value)
        return tuple(key), values

    def prepare(self, tensors: Sequence[Tensor]) -> _Prepared | None:
        """Return a prepared launch for later calls that differ only in these tensors and the grid.

        Return None if that is not possible, for example because two of the tensors are the same.
        """
        key, values = self._key()
        compiled = None if key is None else _compiled.get(key)
        places = {id(tensor): place for place, tensor in enumerate(tensors)}
        if key is None or compiled is None or len(places) < len(tensors):
            return None
        sources = []
        for index, (name, is_constexpr, _) in enumerate(_parameters[id(self.kernel)]):
            value = self.arguments[name]
            if isinstance(value, torch.Tensor) and not is_constexpr:
                if id(value) not in places or values[index] % 16:
                    return None
                sources.append((index, places[id(value)]))
        return _Prepared(compiled, key[1], values, sources)

    def _warm_once(self) -> None:
        """Call `warm` unless the same kernel was already warmed. The layers of a model share most kernels."""
        key, _ = self._key()
        if key is None or key not in _warmed:
            self.warm()
        if key is not None:
            _warmed.add(key)

    def warm(self) -> Any:
        """Compile for the current device, or find the compiled kernel on disk, without launching it."""
        return self.kernel.warmup(**self.arguments, **self.options, grid=self.grid)

    def specialization(self) -> tuple[dict[str, str], dict[tuple[int], Any], dict[tuple[int], list[list[Any]]]]:
        """Return the signature (types), constants and attributes (alignments) that Triton compiles the kernel for."""
        signature, constants, attributes = {}, {}, {}
        for index, parameter in enumerate(self.kernel.params):
            value = self.arguments[parameter.name]
            if parameter.is_constexpr or value is None:
                signature[parameter.name], constants[(index,)] = "constexpr", value
            elif hasattr(value, "block_shape"):  # a tensor descriptor
                signature[parameter.name] = f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)},{value.layout!r}>"
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = "*" + _TYPES[value.dtype]
                attributes[(index,)] = [["tt.divisibility", 16]]
            else:
                signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                if value % 16 == 0 and not parameter.do_not_specialize:
                    attributes[(index,)] = [["tt.divisibility", 16]]
        return signature, constants, attributes


def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up. Triton's `cdiv` also works in kernels, but takes 2 us on the host."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least `n`."""
    return 1 << max(0, n - 1).bit_length()


class _Prepared:
    """A compiled kernel with all of its arguments except tensors."""

    __slots__ = ("_compiled", "_device", "_sources", "_values")

    def __init__(self, compiled: Any, device: int, values: list[Any], sources: list[tuple[int, int]]) -> None:
        self._compiled, self._device, self._values = compiled, device, values
        self._sources = sources  # each tensor's index in the kernel's arguments and in the caller's tensors

    def run(self, grid: tuple[int, int], tensors: Sequence[Tensor]) -> bool:
        """Launch and return True if all tensors have the alignment that the kernel was compiled for. Otherwise return False."""
        addresses = [tensor.data_ptr() for tensor in tensors]
        values = self._values.copy()
        for place, source in self._sources:
            address = addresses[source]
            if address & 15:
                return False
            values[place] = address
        compiled = self._compiled
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        compiled.run(*grid, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *values)
        return True


def run_prepared(
    key: tuple[Any, ...], grid: tuple[int, int], tensors: Sequence[Tensor], describe: Callable[[], Launch]
) -> None:
    """Run `describe()` the first time, and reuse it later. Launches with this key may differ only in `tensors` and `grid`.

    The key must include everything else, such as the tensors' shapes, strides and types, the flags and the device.
    """
    prepared = None if only_warm.is_set else _prepared.get(key)
    if prepared is None or not prepared.run(grid, tensors):
        launch = describe()
        launch.run()
        if not only_warm.is_set and key not in _prepared:
            _prepared[key] = launch.prepare(tensors)


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
