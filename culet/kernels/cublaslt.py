"""Multiply matrices of many tokens with a cuBLAS kernel that we choose.

cuBLAS ranks its kernels as if the GPU ran at its highest clock. A long prompt keeps an H200 at its power limit, where the
kernel that needs the least energy is the fastest. Of the kernels that cuBLAS offers, that is the one with tiles of 128 x 160.
torch takes cuBLAS's first choice, so this module asks cuBLAS directly through its C interface. The list of kernels that cuBLAS
returns changes with the number of tokens, but this kernel supports every number. The module finds it in the list for a number
of tokens that includes it, then checks it for the actual number. If anything is missing, the caller uses torch.

Shapes: M tokens · N outputs · K inputs.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from culet import hardware
from culet.kernels.beside_steps import is_beside_steps
from culet.log import logger

# In measurements, the merged projections of the 31B are 2 to 7 % faster at 8000 tokens. Narrower ones (o, down) gain nothing.
# The q, k and v projection is 3 to 10 % faster at 4096, 6400, 8000 and 8192 tokens, but 2 % slower at 5001.
MIN_TOKENS = 4096
TOKEN_STEP = 32
MIN_OUTPUTS = 16384
MIN_INPUTS = 4096
TILE_128X160 = 29
LISTED_AT = (8000, 6400, 16000)  # tokens. cuBLAS 13.1 lists the kernel at the first for all these products.
WORKSPACE_BYTES = 32 << 20  # NVIDIA recommends this size for Hopper

# Constants of cuBLASLt's C interface.
_COMPUTE_32F, _R_32F, _R_16BF, _OP_T = 68, 0, 14, 1
_DESC_TRANSA, _PREF_WORKSPACE, _ALGO_TILE = 3, 1, 1
_ALGO_BYTES, _RESULT_BYTES, _MAX_RESULTS = 64, 96, 16


class CublasError(Exception):
    """A call to cuBLASLt failed."""


def product(x_MK: Tensor, weight_NK: Tensor) -> Tensor | None:
    """Return x @ weight^T, or None if torch's kernel is as good or this one cannot be used. It has one workspace."""
    (num_tokens, size_k), num_outputs = x_MK.shape, weight_NK.shape[0]
    is_large = num_tokens >= MIN_TOKENS and num_outputs >= MIN_OUTPUTS and size_k >= MIN_INPUTS
    if not is_large or is_beside_steps() or num_tokens % TOKEN_STEP or not _is_supported(x_MK, weight_NK):
        return None
    cublas = _on_device(x_MK.get_device())
    if cublas is None or cublas.is_broken:
        return None
    try:
        return cublas.product(x_MK, weight_NK)
    except CublasError as error:
        cublas.is_broken = True
        logger.warning("from now on, torch chooses the matrix kernels, because %s", error)
        return None


def _is_supported(x_MK: Tensor, weight_NK: Tensor) -> bool:
    is_plain = x_MK.is_contiguous() and weight_NK.is_contiguous() and x_MK.dtype == weight_NK.dtype == torch.bfloat16
    return is_plain and x_MK.is_cuda and x_MK.data_ptr() % 16 == 0 and weight_NK.data_ptr() % 16 == 0


@cache
def _on_device(device: int) -> _CublasLt | None:
    """Return cuBLASLt on a GPU, or None if the kernel was not measured on this GPU or the library is missing."""
    if not hardware.is_hopper(hardware.capability_of(device)):
        return None
    path = _library_path()
    try:
        return None if path is None else _CublasLt(ctypes.CDLL(path), device)
    except (OSError, AttributeError, CublasError) as error:
        logger.warning("torch chooses the matrix kernels, because cuBLASLt is not usable: %s", error)
        return None


def _library_path() -> str | None:
    """Return the path of the library that torch has loaded."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    return next((line.split()[-1] for line in maps.read_text().splitlines() if "libcublasLt.so" in line), None)


class _CublasLt:
    """The cuBLASLt library on one GPU."""

    def __init__(self, library: Any, device: int) -> None:
        self._library = library
        self.is_broken = False
        self._handle, self._description, self._preference = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=torch.device("cuda", device))
        self._device = device
        self._call("Create", ctypes.byref(self._handle))
        self._call("MatmulDescCreate", ctypes.byref(self._description), _COMPUTE_32F, _R_32F)
        self._set("MatmulDesc", self._description, _DESC_TRANSA, ctypes.c_int32(_OP_T))
        self._call("MatmulPreferenceCreate", ctypes.byref(self._preference))
        self._set("MatmulPreference", self._preference, _PREF_WORKSPACE, ctypes.c_uint64(WORKSPACE_BYTES))
        self._algorithm = cache(self._find_algorithm)
        # There is one plan per shape. The cache is bounded because prompts come in all lengths.
        self._plan = lru_cache(maxsize=1024)(self._make_plan)

    def product(self, x_MK: Tensor, weight_NK: Tensor) -> Tensor | None:
        """Return x @ weight^T, or None if the kernel does not support this shape."""
        (num_tokens, size_k), num_outputs = x_MK.shape, weight_NK.shape[0]
        plan = self._plan(num_tokens, num_outputs, size_k)
        if plan is None:
            return None
        matrices, algorithm = plan
        y_MN = x_MK.new_empty(num_tokens, num_outputs)
        out = ctypes.c_void_p(y_MN.data_ptr())
        # In cuBLAS's column-major order, this is y^T [N, M] = (weight^T [K, N])^T x^T [K, M].
        self._call(
            "Matmul",
            *(self._handle, self._description, ctypes.byref(self._one)),
            *(ctypes.c_void_p(weight_NK.data_ptr()), matrices.weight, ctypes.c_void_p(x_MK.data_ptr()), matrices.x),
            *(ctypes.byref(self._zero), out, matrices.y, out, matrices.y, algorithm),
            *(ctypes.c_void_p(self._workspace.data_ptr()), ctypes.c_size_t(WORKSPACE_BYTES)),
            ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(self._device)),
        )
        return y_MN

    def _make_plan(self, num_tokens: int, num_outputs: int, size_k: int) -> _Plan | None:
        """Return the layouts and algorithm for a shape, or None if the kernel does not support it."""
        algorithm = self._algorithm(num_outputs, size_k)
        if algorithm is None:
            return None
        matrices = _Matrices(self._library, num_tokens, num_outputs, size_k)
        result = (ctypes.c_ubyte * _RESULT_BYTES)()
        try:
            self._call("MatmulAlgoCheck", self._handle, self._description, *matrices.all, algorithm, result)
        except CublasError:
            return None
        needed = int.from_bytes(bytes(result[_ALGO_BYTES : _ALGO_BYTES + 8]), sys.byteorder)
        return _Plan(matrices, algorithm) if needed <= WORKSPACE_BYTES else None

    def _find_algorithm(self, num_outputs: int, size_k: int) -> Any:
        """Return the kernel for a weight of this shape, or None if cuBLAS does not list it."""
        for num_tokens in LISTED_AT:
            matrices = _Matrices(self._library, num_tokens, num_outputs, size_k)
            results, count = (ctypes.c_ubyte * (_RESULT_BYTES * _MAX_RESULTS))(), ctypes.c_int()
            asked = (self._preference, _MAX_RESULTS, results, ctypes.byref(count))
            self._call("MatmulAlgoGetHeuristic", self._handle, self._description, *matrices.all, *asked)
            for begin in range(0, count.value * _RESULT_BYTES, _RESULT_BYTES):
                algorithm = ctypes.create_string_buffer(bytes(results[begin : begin + _ALGO_BYTES]), _ALGO_BYTES)
                if self._tile(algorithm) == TILE_128X160:
                    return algorithm
        return None

    def _tile(self, algorithm: Any) -> int:
        value, written = ctypes.c_uint32(), ctypes.c_size_t()
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self._call("MatmulAlgoConfigGetAttribute", algorithm, _ALGO_TILE, ctypes.byref(value), size, ctypes.byref(written))
        return value.value

    def _set(self, kind: str, target: ctypes.c_void_p, attribute: int, value: Any) -> None:
        self._call(f"{kind}SetAttribute", target, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))

    def _call(self, name: str, *arguments: Any) -> None:
        _call(self._library, name, *arguments)


class _Layout:
    """A column-major bfloat16 matrix."""

    def __init__(self, library: Any, rows: int, columns: int) -> None:
        self._library, self.pointer = library, ctypes.c_void_p()
        size = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
        _call(library, "MatrixLayoutCreate", ctypes.byref(self.pointer), _R_16BF, *size)

    def __del__(self) -> None:
        if self.pointer:
            self._library.cublasLtMatrixLayoutDestroy(self.pointer)


class _Matrices:
    """The layouts of the matrices in a product."""

    def __init__(self, library: Any, num_tokens: int, num_outputs: int, size_k: int) -> None:
        shapes = (size_k, num_outputs), (size_k, num_tokens), (num_outputs, num_tokens)
        self._layouts = [_Layout(library, *shape) for shape in shapes]  # kept alive
        self.weight, self.x, self.y = (layout.pointer for layout in self._layouts)
        self.all = (self.weight, self.x, self.y, self.y)  # the matrix that the product is added to has the output's layout


class _Plan(NamedTuple):
    """The layouts and the algorithm for products of one shape."""

    matrices: _Matrices
    algorithm: Any


def _call(library: Any, name: str, *arguments: Any) -> None:
    status = getattr(library, f"cublasLt{name}")(*arguments)
    if status:
        raise CublasError(f"cublasLt{name} returned {status}")
