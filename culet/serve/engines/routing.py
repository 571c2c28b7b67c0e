"""Choose the engine for a request, by what each engine has of its prompt and by its load.

The engine that resumes the prompt furthest wins, unless it is too busy. It is too busy if it has many more samples than the
idlest engine, or if the request would wait there but not elsewhere. So a prefix that everybody shares (a system prompt) does
not fill one engine while the others are idle. The next engine that computes it has it too, and from then on load decides.

An engine that has work but has said nothing for some seconds gets a request only if all others are like that. It may hang, and
the watchdog waits much longer before it ends it.

A prefix that is only a small part of the prompt does not count, and neither do a few known tokens that cannot be resumed yet.
Otherwise one engine would get every new conversation, because all of them begin with the same few tokens, and the caches of the
others would stay empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from culet.cache.mirror import Overlap

# How many more samples than the idlest engine a busy one may have and still win by a prefix: a quarter of its slots, or this.
_SLACK_PART, _MIN_SLACK = 4, 4
_MIN_PART, _MIN_TOKENS = 4, 1024  # a prefix counts if it is a quarter of the prompt, or this long
_MIN_KNOWN = 256  # known tokens count if there are also this many
_SILENT_S = 5.0  # much longer than most steps


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that can take a request."""

    num_samples: int  # that it runs or has waiting
    max_num_seqs: int  # that it can run at the same time
    overlap: Overlap
    num_points: int = 0  # resume points that it has
    silent_s: float = 0.0  # how long it has said nothing although it has work

    @property
    def is_silent(self) -> bool:
        return self.silent_s > _SILENT_S


def ranked(candidates: Sequence[Candidate], prompt_len: int, num_new: int = 1) -> list[int]:
    """Return the indices of the candidates, the best first, for a request of `num_new` samples."""
    if not candidates:
        return []
    heard = [candidate for candidate in candidates if not candidate.is_silent] or candidates
    least = min(candidate.num_samples for candidate in heard)
    has_room = any(candidate.num_samples + num_new <= candidate.max_num_seqs for candidate in heard)
    min_tokens = min(prompt_len // _MIN_PART, _MIN_TOKENS)

    def badness(index: int) -> tuple[int, ...]:
        candidate = candidates[index]
        slack = max(_MIN_SLACK, candidate.max_num_seqs // _SLACK_PART)
        would_wait = has_room and candidate.num_samples + num_new > candidate.max_num_seqs
        is_busy = would_wait or candidate.num_samples - least > slack
        resume, known = candidate.overlap.resume, candidate.overlap.known
        if is_busy or resume < min_tokens:
            resume = 0
        if is_busy or known < max(min_tokens, _MIN_KNOWN):
            known = 0
        return candidate.is_silent, is_busy, -resume, -known, candidate.num_samples, candidate.num_points, index

    return sorted(range(len(candidates)), key=badness)
