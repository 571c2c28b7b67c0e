"""The process that decodes media. `pool.py` starts it. It reads questions from stdin and answers on stdout.

Messages have the form of `culet/media/messages.py`. The first question is the limits. Every later one is a medium.
"""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from culet.media.decoding import audio, images, video
from culet.media.decoding.refusal import Refusal
from culet.media.items import MediaKind
from culet.media.limits import MediaLimits
from culet.media.messages import Answer, ItemFacts, MediaForm, Question, pack, read_limits, read_question
from culet.media.spec import num_image_tokens, num_mel_tokens, sampled_indices

Array = np.ndarray[Any, Any]


def decode(question: Question, data: bytes, limits: MediaLimits) -> tuple[Answer, list[bytes]]:
    """Return the answer to a question, and the data of its items."""
    arrays: Sequence[Array]
    times: Sequence[float] = ()
    if question.kind == MediaKind.AUDIO:
        arrays = _decode_audio(question, data, limits)
    elif question.kind == MediaKind.VIDEO:
        arrays, times = _decode_video(question, data, limits)
    else:
        pixels = _raw_pixels(question, data) if question.form == MediaForm.RAW else images.decode_image(data, limits.max_pixels)
        arrays = [images.resize(pixels, question.budget)]
    parts = [array.tobytes() for array in arrays]
    facts = [_facts(question, array, part) for array, part in zip(arrays, parts, strict=True)]
    return Answer(items=tuple(facts), timestamps=tuple(times)), parts


def _decode_audio(question: Question, data: bytes, limits: MediaLimits) -> Sequence[Array]:
    if question.form == MediaForm.RAW:
        samples = audio.check_samples(np.frombuffer(data, dtype=np.float32))
        samples = audio.to_rate(samples, int(question.rate))
    else:
        samples = audio.decode_audio(data, limits.max_audio_s)
    parts = audio.split_samples(samples, has_mel=question.has_mel, is_split=question.is_split)
    return [audio.mel_features(part) if question.has_mel else audio.sample_frames(part) for part in parts]


def _decode_video(question: Question, data: bytes, limits: MediaLimits) -> tuple[Sequence[Array], Sequence[float]]:
    def prepare(pixels: Array) -> Array:
        return images.resize(pixels, question.budget)

    if question.form == MediaForm.RAW:
        frames = _raw_pixels(question, data)
        rate = question.rate or video.DEFAULT_RATE
        taken = sampled_indices(len(frames), question.num_frames)
        indices = question.indices or range(len(frames))
        return [prepare(frames[at]) for at in taken], [indices[at] / rate for at in taken]
    return video.decode_video(data, question.num_frames, limits, prepare)


def _raw_pixels(question: Question, data: bytes) -> Array:
    return np.frombuffer(data, dtype=np.uint8).reshape(question.shape)


def _facts(question: Question, array: Array, data: bytes) -> ItemFacts:
    if question.kind != MediaKind.AUDIO:
        num_tokens = num_image_tokens(*array.shape[:2])
    else:
        num_tokens = num_mel_tokens(len(array)) if question.has_mel else len(array)
    digest = hashlib.sha256(f"{question.kind}{array.shape}{array.dtype.str}".encode())
    digest.update(data)
    return ItemFacts(key=digest.digest(), num_tokens=num_tokens, shape=array.shape)


def answer_safely(question: Question, data: bytes, limits: MediaLimits) -> tuple[Answer, list[bytes]]:
    """Answer a question. Errors are in Culet's words, because a decoder's may reveal memory or paths."""
    kind = question.kind.value
    try:
        return decode(question, data, limits)
    except Refusal as refusal:
        return Answer(problem=refusal.problem, hint=refusal.hint), []
    except MemoryError:
        return Answer(problem=f"decoding the {kind} takes too much memory", hint="send a smaller file"), []
    except Exception as error:
        if "memory" in str(error):  # torch raises RuntimeError
            return Answer(problem=f"decoding the {kind} takes too much memory", hint="send a smaller file"), []
        return Answer(problem=f"the {kind} cannot be decoded"), []


def _lock_down(limits: MediaLimits) -> None:
    """Limit this process, now that its libraries are loaded: memory, and no files larger than nothing."""
    with suppress(ValueError, OSError):  # not every system supports these limits
        with open("/proc/self/statm", encoding="ascii") as file:
            mapped_bytes = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        most = mapped_bytes + limits.max_memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        with suppress(ValueError, OSError):
            resource.setrlimit(limit, (0, 0))


def main() -> None:
    """Answer questions until stdin closes, which happens when the parent ends."""
    torch.set_num_threads(1)
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get between the answers
    limits = read_limits(source)
    _lock_down(limits)
    for part in pack(Answer(), []):
        sink.write(part)
    sink.flush()
    while (asked := read_question(source)) is not None:
        # The parent kills this process at the time limit. The alarm does, if the parent is gone.
        signal.setitimer(signal.ITIMER_PROF, 2 * limits.time_limit_s + 1)
        answer, parts = answer_safely(*asked, limits)
        signal.setitimer(signal.ITIMER_PROF, 0)
        del asked
        for part in pack(answer, parts):
            sink.write(part)
        sink.flush()


if __name__ == "__main__":
    main()
