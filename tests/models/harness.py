"""Drives a Gemma4 as the scheduler and the runner do. Pages are shuffled, freed behind the window, and NaN while free."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from culet.attention.batch import own_share
from culet.attention.plan import heads_of_rank
from culet.attention.torch_cpu import TorchCPUBackend
from culet.cache.pool import Pool
from culet.cache.spec import RUN_TOKENS, KVGroup, plan_cache, share_among, stored_as
from culet.models.gemma4 import Gemma4, Hidden
from culet.runner.fill import fill
from culet.types import PageTable, Row

NAN_BYTE = 255  # a NaN in every precision that pages may have


@dataclass
class Track:
    """One sequence: its tokens, how many have KV, and its pages by group and logical page."""

    slot: int
    tokens: list[int]
    start: int = 0
    pages: list[dict[int, int]] = field(default_factory=list)


class Harness:
    """Runs steps over hand-made page tables. `page_tokens` is the page size of the widest group."""

    def __init__(
        self,
        model: Gemma4,
        *,
        num_slots: int = 8,
        max_len: int = 256,
        page_tokens: int = 4,
        num_slabs: int = 0,
        seed: int = 0,
        kv_cache_dtype: str = "auto",
        lookback: int = 0,
    ) -> None:
        specs = stored_as(model.spec.kv_specs(model.dtype.itemsize, latent=model.latent), kv_cache_dtype)
        specs = share_among([replace(spec, lookback=lookback) for spec in specs], model.rank.size)
        per_group: dict[object, int] = {}
        for spec in specs:
            least = page_tokens if spec.token_shares == 1 else RUN_TOKENS
            per_group[spec.kind] = per_group.get(spec.kind, 0) + spec.stored_bytes * least
        self.layout = plan_cache(specs, page_multiple=page_tokens, slab_bytes=max(per_group.values()))
        num_slabs = num_slabs or sum(-(-max_len // group.page_tokens) + 1 for group in self.layout.groups) * num_slots
        self.model = model
        self.pool = Pool(self.layout, num_slabs, model.dtype, torch.device("cpu"))
        self.pool._slabs.fill_(NAN_BYTE)
        num_heads = model.spec.layers[0].num_heads
        self.backends = [TorchCPUBackend(group, heads_of_rank(group, num_heads)) for group in self.layout.groups]
        self.tokens_SL = torch.zeros(num_slots, max_len, dtype=torch.int64)
        self.free = list(range(num_slabs))
        random.Random(seed).shuffle(self.free)
        self.tracks: list[Track] = []
        self.hidden: Hidden | None = None

    def add(self, tokens: Sequence[int]) -> Track:
        track = Track(len(self.tracks), list(tokens), pages=[{} for _ in self.layout.groups])
        self.tracks.append(track)
        return track

    def step(self, parts: Sequence[tuple[Track, int, int]], taps: tuple[int, ...] = ()) -> list[Tensor]:
        """Compute each part (track, new tokens, num_logits) in one pass. Return the logits [num_logits, V] of each."""
        rows = [self._row(track, num_new, num_logits) for track, num_new, num_logits in parts]
        placeholder_P = torch.tensor(self.model.spec.placeholder_ids, dtype=torch.int64)
        batch = fill(rows, self.layout, self.tokens_SL, placeholder_P)
        batch = own_share(batch, self.layout.groups, self.model.rank.index)
        with torch.inference_mode():
            self.model.plan(batch, self.pool, self.backends)
            self.hidden = self.model(batch, self.pool, self.backends, taps)
            logits = self.model.logits(self.hidden.last_LD)
        for track, num_new, _ in parts:
            track.start += num_new
            self._free_behind(track)
        return list(logits.clone().split([part[2] for part in parts]))

    def _row(self, track: Track, num_new: int, num_logits: int) -> Row:
        end = track.start + num_new
        assert end <= len(track.tokens)
        self.tokens_SL[track.slot, :end] = torch.tensor(track.tokens[:end])
        tables, store_from = [], []
        for group in self.layout.groups:
            first_stored = track.start
            if group.reach is not None:
                first_stored = max(track.start, end - group.reach - max(num_logits, 1) + 1)
            own = track.pages[group.index]
            for position in range(first_stored, end):
                if position // group.page_tokens not in own:
                    own[position // group.page_tokens] = self.free.pop()
            first = min(own)
            tables.append(PageTable(first, tuple(own.get(page, 0) for page in range(first, max(own) + 1))))
            store_from.append(first_stored)
        slots = (track.slot,) if num_logits else ()
        return Row(track.slot, track.start, num_new, num_logits, tuple(tables), tuple(store_from), draw_slots=slots)

    def _free_behind(self, track: Track) -> None:
        """Free pages that no later query sees, and fill them with NaN."""
        for group in self.layout.groups:
            own = track.pages[group.index]
            first = group.first_visible(track.start) // group.page_tokens
            for page in [page for page in own if page < first]:
                self._spoil(own[page])
                self.free.insert(0, own.pop(page))

    def _spoil(self, page: int) -> None:
        self.pool._slabs[page] = NAN_BYTE

    def drop(self, track: Track, group: KVGroup | None = None) -> None:
        """Forget a sequence's KV, as a preemption does."""
        for own in track.pages:
            for page in own.values():
                self._spoil(page)
                self.free.insert(0, page)
            own.clear()
        track.start = 0

    def all_logits(self, tokens: Sequence[int], chunks: Sequence[int] = ()) -> Tensor:
        """Return logits at every position, computed in the given chunks (default: one)."""
        track = self.add(tokens)
        return torch.cat([self.step([(track, size, size)])[0] for size in chunks or (len(tokens),)])

    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int, chunk: int = 10**9) -> list[list[int]]:
        """Return the `num_tokens` most likely tokens after each prompt. All sequences are in one ragged batch."""
        tracks = [self.add(tokens) for tokens in prompts]
        while any(len(track.tokens) < len(prompt) + num_tokens for track, prompt in zip(tracks, prompts, strict=True)):
            parts = []
            for track in tracks:
                num_new = min(chunk, len(track.tokens) - track.start)
                parts.append((track, num_new, int(track.start + num_new == len(track.tokens))))
            for (track, _, num_logits), logits in zip(parts, self.step(parts), strict=True):
                if num_logits:
                    track.tokens.append(int(logits[-1].argmax()))
        return [track.tokens[len(prompt) :][:num_tokens] for track, prompt in zip(tracks, prompts, strict=True)]
