"""Turn what callers send into media that are ready for a model: the one entry to this package. No torch.

A server awaits `MediaReader.read`, and an offline caller uses `read_now`. Both return one Medium for each source, and
`expand_prompt` writes them into the prompt.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from culet.config import MediaConfig
from culet.errors import BadRequest, ContextTooLong
from culet.line_process import Stopper
from culet.media.fetch import FetchRules, check_url, fetch, read_hosts
from culet.media.held import HeldBytes
from culet.media.items import MediaKind, Medium
from culet.media.limits import MediaLimits
from culet.media.messages import Question
from culet.media.pool import DecoderPool
from culet.media.queue import MediaQueue
from culet.media.sources import MediaSource
from culet.media.spec import MediaSpec, read_kinds, read_media_spec

_NUM_FETCHES = 4  # at the same time
_PATIENCE_S = 2.0  # about what a new process costs, so that clients who leave at once do not make the server start many


class MediaReader:
    """Decodes the media of one model's requests, within limits.

    `hosts` are those that https URLs may name. By default there are none, and nothing is ever fetched. `max_counts` are the
    most media of each kind in one prompt. 0 turns a kind off, and a kind that is absent or None has no limit. `max_held_bytes`
    is the most decoded data of all requests to a server. `off_by` is the setting that turns kinds off, for errors.
    """

    def __init__(
        self,
        spec: MediaSpec,
        limits: MediaLimits | None = None,
        hosts: Iterable[str] = (),
        max_counts: Mapping[str, int | None] | None = None,
        max_held_bytes: int = 1 << 30,
        off_by: str = "--limit-mm-per-prompt",
    ) -> None:
        self._max_counts = dict(max_counts or {})
        self._all_kinds, self._off_by = spec.kinds, off_by
        self.spec = replace(spec, kinds=frozenset(kind for kind in spec.kinds if self._max_counts.get(kind) != 0))
        self.limits = limits or MediaLimits()
        self._rules = FetchRules(frozenset(hosts))
        self.pool = DecoderPool(self.limits)
        self.held = HeldBytes(max_held_bytes)
        bounds: dict[str, int] = {"max_waiting": self.limits.max_waiting, "max_waiting_mb": self.limits.max_waiting_mb}
        self._decodes = MediaQueue(self.limits.num_processes, purpose="decoded", patience_s=_PATIENCE_S, **bounds)
        self._fetches = MediaQueue(_NUM_FETCHES, purpose="fetched", **bounds)

    @classmethod
    def of_checkpoint(cls, config: Mapping[str, Any], folder: Path | None, settings: MediaConfig) -> Self:
        """Make the reader for a checkpoint, from its `config.json` and the processor's files in `folder`."""
        # Without media the processor's files do not matter, so those that cannot be used are no error.
        spec = read_media_spec(config, folder) if settings.kinds else MediaSpec(read_kinds(config))
        off_by = "--language-model-only" if settings.language_model_only else "--limit-mm-per-prompt"
        hosts = read_hosts(settings.allowed_media_domains)
        return cls(spec, hosts=hosts, max_counts=settings.limits, max_held_bytes=settings.max_media_bytes, off_by=off_by)

    @property
    def num_waiting(self) -> int:
        return self._decodes.num_waiting + self._fetches.num_waiting

    async def read(self, sources: Sequence[MediaSource], max_tokens: int | None = None) -> list[Medium]:
        """Return the media of one request, in order. Few of them wait at a time, so that other requests come between.

        Raise BadRequest for a medium that cannot be used, ContextTooLong once there are more than `max_tokens` soft tokens, and
        QueueFull if too many media wait or are held. If this task is cancelled, or if one medium fails, work on the others is
        dropped, and a process that decodes one for long is killed.
        """
        self.check(sources)
        turn = asyncio.Semaphore(self.limits.num_processes)
        num_tokens = 0

        async def read(source: MediaSource) -> Medium:
            nonlocal num_tokens
            async with turn:
                medium = await self._read_one(source)
                num_tokens += medium.num_tokens
                if max_tokens is not None and num_tokens > max_tokens:
                    problem = f"{source.name}: the media so far have {num_tokens} tokens, but the context holds {max_tokens}"
                    fewer = "shorter recordings" if source.kind == MediaKind.AUDIO else "fewer media, or lower max_soft_tokens"
                    raise ContextTooLong(problem, hint=f"send {fewer}")
                self.held.add(medium)
                return medium

        tasks = [asyncio.ensure_future(read(source)) for source in sources]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def read_now(self, sources: Sequence[MediaSource]) -> list[Medium]:
        """Return the media of one prompt, in order. Blocks."""
        self.check(sources)
        with ThreadPoolExecutor(self.limits.num_processes, "media") as threads:
            return list(threads.map(self._read_here, sources))

    def check(self, sources: Sequence[MediaSource]) -> None:
        """Raise if a prompt may not have these media, whatever their bytes are."""
        for source in sources:
            self._check(source)
        for kind, count in Counter(source.kind for source in sources).items():
            most = self._max_counts.get(kind)
            if most is not None and count > most:
                name = [source.name for source in sources if source.kind == kind][most]
                problem = f"{name}: got {count} media of kind {kind}, but a prompt may have at most {most}"
                raise BadRequest(problem, hint="send fewer; --limit-mm-per-prompt sets the maximum")

    def warm_up(self) -> None:
        """Start the decoding processes now, so that the first media do not wait for them."""
        self.pool.warm_up()

    def close(self) -> None:
        """End the idle processes and drop all work that has not begun."""
        self._decodes.close()
        self._fetches.close()
        self.pool.close()

    def _read_here(self, source: MediaSource) -> Medium:
        return self._decode(source, self._fetch(source, Stopper()), Stopper())

    async def _read_one(self, source: MediaSource) -> Medium:
        data = await self._fetches.run(partial(self._fetch, source), len(source.url)) if source.is_remote else None
        num_bytes = source.num_bytes if data is None else len(data)
        is_long = source.kind == MediaKind.VIDEO
        return await self._decodes.run(partial(self._decode, source, data), num_bytes, is_long=is_long)

    def _check(self, source: MediaSource) -> None:
        """Raise for a source that is refused whatever its bytes are."""
        if source.kind in self._all_kinds - self.spec.kinds:
            problem = f"{source.name}: got {source.kind.with_article}, but this kind of media is turned off by {self._off_by}"
            raise BadRequest(problem, hint=f"start without {self._off_by}")
        self.spec.check_kind(source.name, source.kind)
        self.spec.budget(source.kind, source.max_soft_tokens, source.detail)
        if source.takes_all and source.shape[0] > self.spec.num_frames:
            most = self.spec.num_frames
            problem = f"{source.name}: got {source.shape[0]} frames with do_sample_frames: False, expected at most {most}"
            raise BadRequest(problem, hint=f"give at most {most}, or omit do_sample_frames: then {most} of them are taken")
        if source.is_remote:
            check_url(source.url, self._rules, source.name)

    def _fetch(self, source: MediaSource, stopper: Stopper) -> bytes | None:
        """Return the bytes of a remote source. Other sources have theirs already."""
        return fetch(source.url, source.kind, self._rules, self.limits, source.name, stopper) if source.is_remote else None

    def _decode(self, source: MediaSource, data: bytes | None, stopper: Stopper) -> Medium:
        data = source.inline_bytes(self.limits) if data is None else data
        question = Question(
            kind=source.kind,
            num_bytes=len(data),
            form=source.form,
            budget=self.spec.budget(source.kind, source.max_soft_tokens, source.detail),
            num_frames=self.spec.num_frames,
            has_mel=self.spec.has_mel,
            is_split=source.is_split,
            shape=source.shape,
            rate=source.rate,
            indices=source.indices,
        )
        medium = self.pool.decode(source.name, question, data, stopper)
        self.spec.check_sides(source.name, medium)
        return medium
