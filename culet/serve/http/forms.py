"""Read forms with files (multipart/form-data), within bounds. The body is in memory already, and its size was checked."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from culet.errors import BadRequest

FORM = "multipart/form-data"
_MAX_PARTS = 64
_MAX_HEAD_BYTES = 4096  # of one part
_MAX_VALUE_BYTES = 1 << 20  # of a part that is no file
_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))')
_NAME = re.compile(rb'(?:^|[;\s])name="([^"\r\n]{1,256})"')
_FILENAME = re.compile(rb"(?:^|[;\s])filename\*?=")


@dataclass
class Form:
    """The parts of a form. Those of an array have a name that ends with `[]`, and are joined by commas."""

    values: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)


def read_form(content_type: str, body: bytes) -> Form:
    """Return the parts of a form. Raise a BadRequest if it is broken. Takes time that grows with the body."""
    match = _BOUNDARY.search(content_type)
    if match is None:
        raise BadRequest(f"content-type: expected {FORM} with a boundary")
    delimiter = b"--" + (match[1] or match[2]).encode("latin-1", "replace")
    begin = 0 if body.startswith(delimiter) else body.find(b"\r\n" + delimiter) + 2
    if begin == 1:
        raise _broken("it has no part")
    form = Form()
    for _ in range(_MAX_PARTS):
        begin += len(delimiter)
        if body[begin : begin + 2] == b"--":
            return form
        head_end = body.find(b"\r\n\r\n", begin, begin + _MAX_HEAD_BYTES)
        end = body.find(b"\r\n" + delimiter, head_end + 2)
        if body[begin : begin + 2] != b"\r\n" or head_end < 0 or end < 0:
            raise _broken("a part has no end, or too long a head")
        _add(form, body[begin:head_end], body[head_end + 4 : end])
        begin = end + 2
    raise _broken(f"it has more than {_MAX_PARTS} parts")


def _add(form: Form, head: bytes, content: bytes) -> None:
    lines = head.split(b"\r\n")
    disposition = next((line for line in lines if line.lower().startswith(b"content-disposition:")), b"")
    match = _NAME.search(disposition)
    if match is None:
        raise _broken("a part has no name")
    name = match[1].decode("utf-8", "replace")
    if _FILENAME.search(disposition):
        if name in form.files:
            raise BadRequest(f"{name}: got two files, expected one")
        form.files[name] = content
        return
    if len(content) > _MAX_VALUE_BYTES:
        raise BadRequest(f"{name}: got {len(content)} bytes, expected at most {_MAX_VALUE_BYTES}")
    try:
        value = content.decode()
    except UnicodeDecodeError:
        raise BadRequest(f"{name}: got bytes that are not UTF-8") from None
    if name in form.values and not name.endswith("[]"):
        raise BadRequest(f"{name}: got two values, expected one")
    form.values[name] = f"{form.values[name]},{value}" if name in form.values else value


def _broken(problem: str) -> BadRequest:
    return BadRequest(f"body: the form is broken: {problem}")
