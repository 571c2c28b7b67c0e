"""Take the media out of chat messages: what the template renders, and the media that belong to it. No torch.

Every interface with messages uses this module. A part that is a medium has one of these forms:

    {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}    also audio_url and video_url, and the URL alone
    {"type": "input_audio", "input_audio": {"data": BASE64, "format": "wav"}}
    {"type": "input_image", "image_url": URL, "detail": "low"}
    {"type": "file", "file": {"file_data": DATA_URL, "filename": NAME}}  also input_file, with the fields at the top
    {"type": "image", "url": URL}                                        also "base64"; also audio and video

In the caller's own program a part may also have `path`, or `{"type": "image", "image": VALUE}` with bytes, a path, a picture or
an array. `culet.media.local` reads those, and the server never does. `where` is the name of a part in errors, for interfaces
whose clients send it in another form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from culet.errors import BadRequest, UnsupportedError
from culet.media.items import MediaKind
from culet.media.sources import MediaSource
from culet.media.spec import MediaSpec

_KINDS = {
    **dict.fromkeys(("image", "image_url", "input_image", "image_pil"), MediaKind.IMAGE),
    **dict.fromkeys(("video", "video_url", "input_video"), MediaKind.VIDEO),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), MediaKind.AUDIO),
}
_FILES = ("file", "input_file")
PART_TYPES = frozenset({*_KINDS, *_FILES})
_TEXTS = ("input_text", "output_text")  # what OpenAI's Responses API calls text
_URL_KEYS, _BASE64_KEYS = ("url", "file_url"), ("base64", "data", "file_data")
# Reads a value of the caller's own program into the source that is given without its content.
OpenLocal = Callable[[MediaSource, Any], MediaSource]


@dataclass(frozen=True)
class MediaOptions:
    """Options for all media of a request. A part has its own `detail`."""

    max_soft_tokens: int | None = None  # of each image, and of each frame of a video


def read_options(given: Mapping[str, Any] | None) -> MediaOptions:
    """Read `mm_processor_kwargs`. Raise if it has a key that would change nothing."""
    if given is None:
        return MediaOptions()
    if not isinstance(given, Mapping):
        problem = f"mm_processor_kwargs: got {type(given).__name__}, expected a mapping with max_soft_tokens"
        raise BadRequest(problem, hint="such as {'max_soft_tokens': 280}")
    for name in given:
        if name != "max_soft_tokens":
            raise BadRequest(f"mm_processor_kwargs: got {str(name)[:100]!r}, expected max_soft_tokens")
    return MediaOptions(**given)


@dataclass(frozen=True)
class TakenMedia:
    """Messages in which each medium is a part without content, and the media, in order."""

    messages: Any
    sources: tuple[MediaSource, ...] = ()
    roles: tuple[str, ...] = ()  # of the messages that the sources are in

    def check_shown(self, token_ids: Sequence[int], spec: MediaSpec) -> None:
        """Raise if the template has left a medium out. Templates show none in system messages and results of tools."""
        given = Counter(source.kind for source in self.sources)
        for kind, count in given.items():
            if token_ids.count(spec.tokens.placeholder(kind)) < count:
                at, role = min(
                    ((source.name, role) for source, role in zip(self.sources, self.roles, strict=True) if source.kind == kind),
                    key=lambda place: place[1] == "user",
                )
                problem = f"{at}: the chat template shows no {kind} in a message with the role {role}"
                raise BadRequest(problem, hint="put it into a user message")


def take_media(messages: Any, options: MediaOptions | None = None, open_local: OpenLocal | None = None) -> TakenMedia:
    """Return the messages with placeholders for their media, and the media themselves. Other faults are left to the template.

    `open_local` reads values of the caller's own program. Without it they are refused.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        return TakenMedia(messages)
    options = options or MediaOptions()
    shown: list[Any] = []
    sources: list[MediaSource] = []
    roles: list[str] = []
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple):
            shown.append(message)
            continue
        parts: list[Any] = []
        for number, part in enumerate(content):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind in _TEXTS:
                parts.append({"type": "text", "text": part.get("text")})
            elif not isinstance(kind, str) or kind not in PART_TYPES:
                parts.append(part)
            else:
                name = part.get("where") or f"messages[{index}].content[{number}]"
                source = read_part(part, name, options, open_local)
                parts.append({"type": str(source.kind)})
                sources.append(source)
                roles.append(str(message.get("role")))
        shown.append({**message, "content": parts})
    return TakenMedia(shown, tuple(sources), tuple(roles))


def read_part(
    part: Mapping[str, Any], name: str, options: MediaOptions | None = None, open_local: OpenLocal | None = None
) -> MediaSource:
    """Return the medium of a part whose type is one of PART_TYPES. `name` says in errors which part it is."""
    options = options or MediaOptions()
    type_name = part["type"]
    value = part.get("image_url" if type_name == "input_image" else type_name)
    if isinstance(value, MediaSource):  # our own program's, since no JSON has one
        return value
    fields = {**part, **value} if isinstance(value, Mapping) else dict(part)
    if isinstance(value, str) and (type_name.endswith("_url") or type_name == "input_image"):
        fields["url"] = value
    if fields.get("file_id") is not None:
        raise UnsupportedError(f"{name}: got a file_id, but files cannot be uploaded", hint="send the file itself")
    urls = [fields[key] for key in _URL_KEYS if fields.get(key) is not None]
    texts = [fields[key] for key in _BASE64_KEYS if fields.get(key) is not None]
    if len(urls) + len(texts) > 1 or not all(isinstance(text, str) for text in (*urls, *texts)):
        raise BadRequest(f"{name}: expected exactly one text that is a URL or base64 data")
    if texts and texts[0][:5].lower() == "data:":
        urls, texts = texts, []
    source = MediaSource(
        _kind_of(type_name, urls, name),
        name,
        url=urls[0] if urls else "",
        base64=texts[0] if texts else "",
        max_soft_tokens=options.max_soft_tokens,
        detail=_detail_of(fields, name),
    )
    if source.url or source.base64:
        return source
    given = fields.get("path") if fields.get("path") is not None else value
    if open_local is None or given is None or isinstance(given, Mapping):
        expected = "a URL or base64 data" if open_local is None else "a URL, base64 data, a path or a value"
        raise BadRequest(f"{name}: got no {source.kind}, expected {expected}")
    return open_local(source, given)


def _kind_of(type_name: str, urls: Sequence[str], name: str) -> MediaKind:
    """Return the kind of a part. That of a file is in its `data:` URL, as in data:image/png;base64,DATA."""
    if type_name in _KINDS:
        return _KINDS[type_name]
    header = urls[0][:64].lower() if urls else ""
    for kind in MediaKind:
        if header.startswith(f"data:{kind}/"):
            return kind
    problem = f"{name}: got a file that is no image, video or audio"
    raise UnsupportedError(problem, hint="send it as a data: URL with its type, such as data:image/png;base64,DATA")


def _detail_of(fields: Mapping[str, Any], name: str) -> str | None:
    detail = fields.get("detail")
    if not isinstance(detail, str | None):
        raise BadRequest(f"{name}.detail: got {type(detail).__name__}, expected a string")
    return detail


def count_bytes(sources: Sequence[MediaSource]) -> int:
    """Return the size of what the caller sent as media."""
    return sum(source.num_bytes for source in sources)
