"""Open MP4, MOV, WebM and Matroska files with PyAV, without letting them open anything else."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from culet.media.decoding.refusal import Refusal

FORMATS = ("MP4", "MOV", "WebM", "Matroska")
INSTALL = "install Culet with the extra `video`, or run: pip install av"


def is_container(data: bytes) -> bool:
    """Return whether the first bytes announce one of the formats."""
    return _demuxer(data) is not None


@contextmanager
def open_container(data: bytes, kind: str) -> Iterator[Any]:
    """Open a file. `kind` says in errors what is read from it. Any error of a decoder becomes a Refusal."""
    try:
        import av
    except (ImportError, OSError):
        raise Refusal(f"this {kind} cannot be decoded here, because PyAV is not installed", INSTALL) from None
    try:
        # Only this demuxer runs, and it can open nothing besides the data.
        with av.open(io.BytesIO(data), format=_demuxer(data), metadata_errors="replace", io_open=_refuse_opening) as container:
            yield container
    except (Refusal, MemoryError):
        raise
    except Exception:  # decoders raise almost anything for a broken file
        raise Refusal(f"the {kind} is damaged or incomplete", "check that the whole file was sent") from None


def _demuxer(data: bytes) -> str | None:
    if data[4:8] == b"ftyp":
        return "mov"
    return "matroska" if data[:4] == b"\x1a\x45\xdf\xa3" else None


def _refuse_opening(url: str, flags: int, options: dict[str, Any]) -> NoReturn:
    raise Refusal("the file refers to other files")
