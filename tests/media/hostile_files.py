"""Media that attack a decoder, or look as if they did. Each is built here."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import soundfile
from PIL import Image

from culet.media.items import MediaKind
from tests.media.noise import noise, sound
from tests.media.test_video import clip

IMAGE, AUDIO, VIDEO = MediaKind.IMAGE, MediaKind.AUDIO, MediaKind.VIDEO
OK = ""  # it is decoded, because it is harmless


@dataclass(frozen=True)
class Attack:
    name: str
    kind: MediaKind
    build: Callable[[], bytes | str]  # a file, or a URL
    problem: str  # what the error says


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, rows: bytes = b"\0", extra: bytes = b"", bits: int = 8, colour: int = 2) -> bytes:
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + extra + _chunk(b"IDAT", zlib.compress(rows)) + _chunk(b"IEND", b"")


def encoded(form: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(noise(64, 64, 3)).save(buffer, form, **options)
    return buffer.getvalue()


def tiny_png(extra: bytes = b"") -> bytes:
    return png(2, 2, b"\0" + bytes(6) + b"\0" + bytes(6), extra)


def gif(width: int, height: int, num_frames: int) -> bytes:
    """Return a GIF whose frames are one pixel each."""
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00"
    header = b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff"
    return header + frame * num_frames + b"\x3b"


def gif_beyond_its_screen() -> bytes:
    """Return a GIF of 1 x 1 pixels whose first frame says that it is 60000 x 60000."""
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, 60000, 60000, 0) + b"\x02\x02\x44\x01\x00"
    return b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff" + frame + b"\x3b"


def jpeg_of_size(width: int, height: int) -> bytes:
    data = encoded("JPEG")
    place = data.index(b"\xff\xc0") + 5
    return data[:place] + struct.pack(">HH", height, width) + data[place + 4 :]


def webp_of_size() -> bytes:
    canvas = struct.pack("<I", 0x10)[:4] + struct.pack("<I", 16_000_000)[:3] + struct.pack("<I", 200)[:3]
    body = b"WEBPVP8X" + struct.pack("<I", 10) + canvas
    return b"RIFF" + struct.pack("<I", len(body)) + body


def zipped_text(kind: bytes) -> bytes:
    """Return a PNG whose text or profile has 40 MB once decompressed."""
    return tiny_png(_chunk(kind, b"x\0\0" + zlib.compress(bytes(40 << 20), 1)))


def jpeg_and_zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("index.html", "<script>alert(1)</script>")
    return encoded("JPEG") + buffer.getvalue()


def jpeg_with_orientation(turn: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = turn
    return encoded("JPEG", exif=exif)


def wav(samples: np.ndarray, rate: int = 16_000, form: str = "WAV", subtype: str | None = None) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=form, subtype=subtype)
    return buffer.getvalue()


def long_flac() -> bytes:
    """Return a FLAC that says that it has 3 hours."""
    data = bytearray(wav(sound(16_000), form="FLAC"))
    place = 8 + 13  # the number of samples has 36 bits, the lowest of these 5 bytes
    data[place] &= 0xF0
    data[place + 1 : place + 5] = struct.pack(">I", 3 * 3600 * 16_000)
    return bytes(data)


def mp3_that_goes_on() -> bytes:
    """Return an MP3 of 25 minutes in few bytes. No header says how long it is, because the first frame is left out."""
    data = wav(np.zeros(80_000, dtype=np.float32), 8_000, form="MP3")
    return data[data.index(b"\xff\xe3", data.index(b"\xff\xe3") + 2) :] * 150


def not_a_number() -> bytes:
    samples = sound(1000)
    samples[10] = np.nan
    return wav(samples, subtype="FLOAT")


def patched(data: bytes, place: int, value: bytes) -> bytes:
    return data[:place] + value + data[place + len(value) :]


def movie_of_sound() -> bytes:
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(sound(1024)[None], format="fltp", layout="mono")
        frame.rate = 16_000
        for packet in [*stream.encode(frame), *stream.encode()]:
            container.mux(packet)
    return buffer.getvalue()


def base64_url(text: str, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{text}"


DAMAGED, NO_IMAGE, NO_AUDIO, NO_VIDEO = "damaged", "not an image", "not audio", "not a video"
MANY = "more than 64000000 pixels"
ATTACKS = (
    # Pixel and frame bombs
    Attack("a PNG header of 60000 x 60000", IMAGE, lambda: png(60000, 60000), MANY),
    Attack("20000 x 20000 real pixels", IMAGE, lambda: png(20000, 20000, bytes(2501 * 20000), bits=1, colour=0), MANY),
    Attack("a PNG of 2 billion columns", IMAGE, lambda: png(2**31 - 1, 1), MANY),
    Attack("a GIF of 65535 x 65535", IMAGE, lambda: gif(65535, 65535, 1), MANY),
    Attack("a GIF frame beyond the screen", IMAGE, gif_beyond_its_screen, MANY),
    Attack("a JPEG header of 65500 x 65500", IMAGE, lambda: jpeg_of_size(65500, 65500), MANY),
    Attack("a WebP canvas of 16 million columns", IMAGE, webp_of_size, f"{DAMAGED}|{NO_IMAGE}|pixels"),
    Attack("a GIF of 200000 frames", IMAGE, lambda: gif(1, 1, 200_000), OK),
    Attack("a compressed text of 40 MB", IMAGE, lambda: zipped_text(b"zTXt"), f"{DAMAGED}|memory"),
    Attack("a compressed profile of 40 MB", IMAGE, lambda: zipped_text(b"iCCP"), DAMAGED),
    # Damaged files
    Attack("half a PNG", IMAGE, lambda: encoded("PNG")[:5000], DAMAGED),
    Attack("half a JPEG", IMAGE, lambda: encoded("JPEG")[:1500], DAMAGED),
    Attack("half a WebP", IMAGE, lambda: encoded("WEBP")[:1000], DAMAGED),
    Attack("half a GIF", IMAGE, lambda: encoded("GIF")[:1500], DAMAGED),
    Attack("only a PNG signature", IMAGE, lambda: b"\x89PNG\r\n\x1a\n", f"{DAMAGED}|{NO_IMAGE}"),
    Attack("a wrong checksum", IMAGE, lambda: patched(tiny_png(), 29, b"\0\0\0\0"), f"{DAMAGED}|{NO_IMAGE}"),
    Attack("a PNG of 0 x 0", IMAGE, lambda: png(0, 0), f"0 x 0|{DAMAGED}|{NO_IMAGE}"),
    Attack("a GIF of 0 x 0", IMAGE, lambda: gif(0, 0, 0), NO_IMAGE),
    Attack("nothing", IMAGE, lambda: b"", "got no bytes"),
    Attack("21 MB", IMAGE, lambda: bytes(21 << 20), "expected an image of at most 20 MB"),
    # Other formats, and two at once
    Attack("noise", IMAGE, lambda: noise(5000).tobytes(), NO_IMAGE),
    Attack("a page", IMAGE, lambda: b"<html><script>alert(1)</script></html>", NO_IMAGE),
    Attack("an SVG that reads a file", IMAGE, lambda: b'<svg><image href="file:///etc/passwd"/></svg>', NO_IMAGE),
    Attack("PostScript", IMAGE, lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", NO_IMAGE),
    Attack("a TIFF", IMAGE, lambda: encoded("TIFF"), NO_IMAGE),
    Attack("a BMP", IMAGE, lambda: encoded("BMP"), NO_IMAGE),
    Attack("a JPEG 2000", IMAGE, lambda: b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(100), NO_IMAGE),
    Attack("a PDF that is also a JPEG", IMAGE, lambda: b"%PDF-1.4\n" + encoded("JPEG"), NO_IMAGE),
    Attack("a JPEG that is also an archive", IMAGE, jpeg_and_zip, OK),
    Attack("a PNG with a page in its text", IMAGE, lambda: tiny_png(_chunk(b"tEXt", b"x\0<script>")), OK),
    Attack("10 MB of EXIF", IMAGE, lambda: tiny_png(_chunk(b"eXIf", b"MM\0*\0\0\0\x08\xff\xff" + bytes(10 << 20))), OK),
    Attack("orientation 99", IMAGE, lambda: jpeg_with_orientation(99), OK),
    Attack("a video as an image", IMAGE, lambda: clip(2), NO_IMAGE),
    # Audio
    Attack("3 hours by the header", AUDIO, long_flac, "10800 s long, expected at most 600 s"),
    Attack("25 minutes", AUDIO, mp3_that_goes_on, "expected at most 600 s|longer than 600 s"),
    Attack("samples that are no numbers", AUDIO, not_a_number, "not numbers"),
    Attack("64 channels", AUDIO, lambda: wav(np.zeros((100, 64))), "64 channels"),
    Attack("1 sample per second", AUDIO, lambda: wav(np.zeros(100), 1), "1 samples per second"),
    Attack("no samples", AUDIO, lambda: wav(np.zeros(0)), "no samples"),
    Attack("half a FLAC", AUDIO, lambda: wav(sound(16_000), form="FLAC")[:60], f"{DAMAGED}|no samples"),
    Attack("a WAV header of 4 GB", AUDIO, lambda: patched(wav(sound(1000)), 40, b"\xff\xff\xff\xff"), OK),
    Attack("an AIFF", AUDIO, lambda: wav(sound(1000), form="AIFF"), NO_AUDIO),
    Attack("a video without sound", AUDIO, lambda: clip(2), "no sound"),
    Attack("an image as audio", AUDIO, lambda: encoded("PNG"), NO_AUDIO),
    # Video
    Attack("half a video", VIDEO, lambda: clip(20)[:2000], f"{DAMAGED}|no frames|no video"),
    Attack("noise as a video", VIDEO, lambda: b"\0\0\0\x18ftypisom" + noise(3000).tobytes(), f"{DAMAGED}|no video"),
    Attack("a video of 4112 columns", VIDEO, lambda: clip(2, size=(32, 4112)), "4112 x 32 pixels"),
    Attack("a video without pictures", VIDEO, movie_of_sound, "no video"),
    Attack("a playlist of files", VIDEO, lambda: b"#EXTM3U\n#EXTINF:1\nfile:///etc/passwd\n", NO_VIDEO),
    Attack("a list of files to join", VIDEO, lambda: b"ffconcat version 1.0\nfile /etc/passwd\n", NO_VIDEO),
    Attack("an AVI", VIDEO, lambda: clip(2, form="avi"), NO_VIDEO),
    Attack("a codec that is not on the list", VIDEO, lambda: clip(2, form="matroska", codec="ffv1"), "codec"),
    # URLs
    Attack("a file: URL", IMAGE, lambda: "file:///etc/passwd", "got a file: URL"),
    Attack("a path", IMAGE, lambda: "/etc/passwd", "got a path"),
    Attack("a path above", IMAGE, lambda: "../../etc/passwd", "got a path"),
    Attack("plain http", IMAGE, lambda: "http://example.com/a.png", "got a http: URL"),
    Attack("ftp", IMAGE, lambda: "ftp://example.com/a.png", "got a ftp: URL"),
    Attack("a host that is not listed", IMAGE, lambda: "https://example.com/a.png", "URLs of example.com are not fetched"),
    Attack("the cloud's metadata", IMAGE, lambda: "https://169.254.169.254/latest", "are not fetched"),
    Attack("this machine", IMAGE, lambda: "https://localhost:8000/", "are not fetched"),
    Attack("a data: URL without base64", IMAGE, lambda: "data:image/png,abc", "without base64"),
    Attack("a data: URL without data", IMAGE, lambda: "data:image/png;base64", "without base64"),
    Attack("wrong base64", IMAGE, lambda: base64_url("????"), "not valid base64"),
    Attack("32 MB of base64", IMAGE, lambda: base64_url("A" * (32 << 20)), "expected an image of at most 20 MB"),
)
