"""Readers of media: one decodes in this process, which is quick to start, and one in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from PIL import Image

from culet.line_process import Stopper
from culet.media.decoding.worker import answer_safely
from culet.media.items import MediaKind
from culet.media.limits import MediaLimits
from culet.media.messages import Answer, Question
from culet.media.pool import DecoderPool
from culet.media.reader import MediaReader
from culet.media.spec import MediaSpec
from tests import forking

EVERY_KIND = frozenset(MediaKind)  # as E4B
LIMITS = MediaLimits(num_processes=1, time_limit_s=60.0)  # the time allows for a busy machine


class PoolInThisProcess(DecoderPool):
    """Decodes as a decoding process does, in this one."""

    def _ask(self, name: str, question: Question, data: bytes, stopper: Stopper) -> tuple[Answer, list[bytes]]:
        return answer_safely(question, data, self._limits)


@pytest.fixture(scope="session")
def reader() -> Iterator[MediaReader]:
    """A reader for a model that sees and hears. It decodes in this process."""
    reader = MediaReader(MediaSpec(EVERY_KIND), LIMITS)
    reader.pool = PoolInThisProcess(LIMITS)
    yield reader
    reader.close()


@pytest.fixture(scope="session")
def served() -> Iterator[MediaReader]:
    """The same with a decoding process, as in a server."""
    reader = MediaReader(MediaSpec(EVERY_KIND), LIMITS)
    yield reader
    reader.close()


@pytest.fixture(autouse=True)
def no_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode in ordinary processes, because some of these tests are about their memory."""
    monkeypatch.setattr(forking, "forker", None)


@pytest.fixture(autouse=True)
def limit_of_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the limit that `decode_image` sets for its process, which is the test's here."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
