"""Find how much memory is free and how many slabs of KV cache fit into it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from culet.cache.spec import CacheLayout
from culet.errors import ConfigError
from culet.log import chose
from culet.scheduler.admission import least_pages
from culet.scheduler.group_pages import max_held_pages

CPU_SEQUENCE_LEN = 2048  # tokens per running sequence that the CPU cache is sized for
CPU_MEMORY_SHARE = 4  # the cache of a CPU takes at most one part in 4 of the free memory, and host pages do too
_ALLOCATOR_SLACK = 1.05  # measured peaks are multiplied by this, because the caching allocator rounds up
MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class Needs:
    """Bytes that a GPU needs besides weights and pages."""

    activations: int  # for the heaviest step
    buffers: int  # for slots and fixed-shape steps
    graphs: int
    media: int = 0  # for cached features, and for towers that work beside a step

    @property
    def total(self) -> int:
        return self.activations + self.buffers + self.graphs + self.media


def cpu_has_bfloat16() -> bool:
    """Return whether the CPU multiplies bfloat16 in hardware. Otherwise bfloat16 is many times slower than float32."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False


def total_cpu_memory() -> int:
    """Return the bytes of memory that this process may use, within container limits."""
    return min(_meminfo("MemTotal"), *_cgroup_limits())


def free_cpu_memory() -> int:
    """Return the bytes of memory that are still free, within container limits."""
    return min(_meminfo("MemAvailable"), *(limit - used for limit, used in _cgroup_usage()), _meminfo("MemTotal"))


def _meminfo(field: str) -> int:
    path = Path("/proc/meminfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    pages = "SC_AVPHYS_PAGES" if field == "MemAvailable" else "SC_PHYS_PAGES"
    if pages in os.sysconf_names:
        return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    return 8 * GIB  # assume a small machine


def _cgroup_usage() -> list[tuple[int, int]]:
    """Return (limit, used) for the container, or [] if there is none."""
    for limit_name, used_name in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit, used = Path(limit_name).read_text().strip(), Path(used_name).read_text().strip()
        except OSError:
            continue
        if limit.isdigit() and used.isdigit():
            return [(int(limit), int(used))]
    return []


def _cgroup_limits() -> list[int]:
    return [limit for limit, _ in _cgroup_usage()] or [1 << 62]


def least_slabs(layout: CacheLayout, num_tokens: int) -> int:
    """Return the fewest slabs with which one sequence of `num_tokens` tokens can finish. The last token needs no KV."""
    return sum(least_pages(group, max(1, num_tokens - 1)) for group in layout.groups)


def longest_sequence(layout: CacheLayout, num_slabs: int, limit: int) -> int:
    """Return the length of the longest sequence, up to `limit`, that fits into `num_slabs`, or 0 if none does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if least_slabs(layout, middle) <= num_slabs else (low, middle - 1)
    return low


def most_tokens(layout: CacheLayout, num_slabs: int, max_len: int) -> int:
    """Return how many tokens fit at the same time if sequences are as long as they may get, except for the last one.

    All groups share the slabs, and every sequence needs some for its window. So short sequences hold fewer tokens in total.
    """
    num_sequences, rest = divmod(num_slabs, least_slabs(layout, max_len))
    return num_sequences * max_len + longest_sequence(layout, rest, max_len)


def slabs_for_cpu(
    layout: CacheLayout, *, max_num_seqs: int, chunk: int, max_position: int, wanted_len: int | None, num_caches: int = 1
) -> int:
    """Return the slabs for `max_num_seqs` moderate sequences, or for one of `wanted_len`, up to a share of the free memory.

    This machine has `num_caches` of this size: one for each rank of each engine.
    """
    typical = min(wanted_len or max_position, CPU_SEQUENCE_LEN)
    wanted = max(max_num_seqs * _roomy_slabs(layout, typical, chunk), least_slabs(layout, wanted_len or 2))
    bound = free_cpu_memory() // CPU_MEMORY_SHARE // num_caches // layout.slab_bytes
    num_slabs = max(min(wanted, bound), least_slabs(layout, 2))
    share = "a quarter of the free memory" + (f", divided by {num_caches}" if num_caches > 1 else "")
    reason = f"{max_num_seqs} sequences of {typical} tokens" if num_slabs >= wanted else share
    chose("kv-cache-memory-bytes", f"{num_slabs * layout.slab_bytes / MIB:.0f} MiB", reason)
    return num_slabs


def num_host_pages(layout: CacheLayout, num_slabs: int, swap_space: float, num_ranks: int, num_engines: int) -> int:
    """Return how many host pages a rank gets, of `swap_space` GiB for all ranks of its engine.

    Together, the ranks of all engines take at most a share of the free memory. More pages than the KV cache has are not needed.
    """
    free = free_cpu_memory() // CPU_MEMORY_SHARE // (num_ranks * num_engines)
    num_bytes = min(int(swap_space * GIB) // num_ranks, free)
    num_pages = min(num_bytes // layout.slab_bytes, num_slabs)
    if swap_space:
        size = f"{num_pages * layout.slab_bytes / GIB:.2f} GiB"
        reason = "as large as the KV cache" if num_pages == num_slabs else "a share of the free memory"
        chose("swap-space", size, "as given" if num_pages < num_slabs and num_bytes < free else reason)
    return num_pages


def _roomy_slabs(layout: CacheLayout, num_tokens: int, chunk: int) -> int:
    """Return the most slabs that a sequence of `num_tokens` tokens holds when it is computed in chunks."""
    total = 0
    for group in layout.groups:
        bound = max_held_pages(group, min(chunk, num_tokens), 1)
        most = group.pages_for(num_tokens + group.ahead)
        total += most if bound is None else min(most, bound)
    return total


def slabs_for_gpu(layout: CacheLayout, device: torch.device, *, utilization: float, free_before: int, needs: Needs) -> int:
    """Return the slabs that fill the GPU up to `utilization`, after the loaded weights and the memory that steps need."""
    _, total = torch.cuda.mem_get_info(device)
    weights = torch.cuda.memory_allocated(device)
    budget = int(min(total * utilization, free_before))
    left = budget - weights - needs.total - layout.slab_bytes  # one slab is the spare page
    parts = f"{budget / GIB:.2f} GiB allowed - {weights / GIB:.2f} weights - {needs.activations / GIB:.2f} activations"
    parts += f" - {needs.buffers / GIB:.2f} buffers - {needs.graphs / GIB:.2f} graphs"
    parts += f" - {needs.media / GIB:.2f} media" if needs.media else ""
    if left < layout.slab_bytes:
        raise ConfigError(
            f"no memory is left for the KV cache: {parts}",
            hint="raise --gpu-memory-utilization, lower --max-num-batched-tokens or --max-num-seqs, or use a larger GPU",
        )
    chose("kv-cache-memory-bytes", f"{left} ({left / GIB:.2f} GiB)", parts)
    return left // layout.slab_bytes


def measure_peak(device: torch.device, run: Callable[[], object]) -> int:
    """Return the peak GPU bytes that `run` needs beyond what is allocated now. torch's allocator keeps them."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    return int(peak * _ALLOCATOR_SLACK)
