"""Decode audio to 16 kHz mono samples, and compute what the models read: mel features, or frames of samples."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import numpy as np

from culet.media.decoding.containers import FORMATS as CONTAINERS
from culet.media.decoding.containers import is_container, open_container
from culet.media.decoding.mp3 import with_unknown_length
from culet.media.decoding.refusal import Refusal
from culet.media.spec import MAX_CHANNELS, MAX_MEL_SAMPLES, MIN_MEL_SAMPLES, SAMPLE_RATE, SAMPLES_PER_TOKEN, num_mel_frames

Array = np.ndarray[Any, Any]
FORMATS = ("WAV", "FLAC", "OGG", "MP3")
# In the files that hold video too, as phones and browsers record them.
TRACK_CODECS = frozenset({"aac", "alac", "flac", "libopus", "libvorbis", "mp3", "mp3float", "opus", "vorbis"})
INSTALL = "install Culet with the extra `audio`, or run: pip install soundfile soxr"
MAX_PEAK = 100.0  # samples lie in [-1, 1], and files of floats may exceed it a little
_MIN_RATE, _MAX_RATE = 4_000, 384_000
_BLOCK_S = 10
_UNKNOWN_LEN = 1 << 33  # of more samples, libsndfile means that a file does not say how many it has
_FRAME_LEN, _HOP, _FFT_LEN = 320, 160, 512
_NUM_MELS, _MAX_HZ, _FLOOR = 128, 8000.0, 1e-3


def decode_audio(data: bytes, max_seconds: float) -> Array:
    """Return encoded audio as float32 samples, 16 kHz and mono."""
    if is_container(data):
        samples, rate = _read_track(data, max_seconds)
        return to_rate(check_samples(samples), rate)
    form = _sniff(data)
    if form is None:
        raise Refusal(f"this is not audio that can be read, expected {', '.join((*FORMATS, *CONTAINERS))}")
    try:
        import soundfile
    except (ImportError, OSError):
        raise Refusal("audio cannot be decoded here, because soundfile is not installed", INSTALL) from None

    class UnseekableFile(soundfile.SoundFile):  # type: ignore[misc, unused-ignore]
        """A file that is read from its beginning to its end."""

        def seekable(self) -> bool:
            """Return False, because soundfile would seek after every read, and a FLAC of unknown length allows none."""
            return False

    try:
        with UnseekableFile(io.BytesIO(with_unknown_length(data) if form == "MP3" else data)) as file:
            if file.format not in ("WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3", "MPEG"):
                raise Refusal(f"this is not audio that can be read, expected {', '.join(FORMATS)}")
            num_frames = file.frames if file.frames < _UNKNOWN_LEN else 0
            _check_header(num_frames, file.samplerate, file.channels, max_seconds)
            samples, rate = _read_mono(file, max_seconds), file.samplerate
    except (Refusal, MemoryError):
        raise
    except Exception:  # decoders raise almost anything for a broken file
        raise Refusal("the audio is damaged or incomplete", "check that the whole file was sent") from None
    return to_rate(check_samples(samples), rate)


def check_samples(samples: Array) -> Array:
    """Return the samples. Raise if there are none, or if they are not sound."""
    if samples.size == 0:
        raise Refusal("the audio has no samples")
    peak = float(np.abs(samples).max())
    if not peak <= MAX_PEAK:  # also false for NaN
        raise Refusal(f"the audio has samples that are not numbers from -{MAX_PEAK:g} to {MAX_PEAK:g}, expected -1 to 1")
    return samples


def to_rate(samples: Array, rate: int) -> Array:
    """Return mono samples at 16 kHz, resampled as librosa does it, with soxr's high quality."""
    if rate == SAMPLE_RATE:
        return samples
    try:
        import soxr
    except ImportError:
        problem = f"audio of {rate} Hz cannot be resampled to {SAMPLE_RATE} Hz here, because soxr is not installed"
        raise Refusal(problem, INSTALL) from None
    wanted_len = math.ceil(samples.size * (float(SAMPLE_RATE) / rate))
    resampled = np.asarray(soxr.resample(samples, rate, SAMPLE_RATE, quality="HQ"), dtype=np.float32)[:wanted_len]
    return np.pad(resampled, (0, wanted_len - resampled.size))


def split_samples(samples: Array, *, has_mel: bool, is_split: bool) -> list[Array]:
    """Return the parts that become one item each.

    E2B and E4B read at most 30 s at once. Longer audio is refused, or cut into parts of 30 s if the request wants that.
    """
    least = MIN_MEL_SAMPLES if has_mel else 1
    if samples.size < least:
        raise Refusal(f"the audio has {samples.size} samples at 16 kHz, expected at least {least}")
    if not has_mel or samples.size <= MAX_MEL_SAMPLES:
        return [samples]
    if not is_split:
        seconds = samples.size / SAMPLE_RATE
        problem = f"the audio is {seconds:.1f} s long, but this model hears at most 30 s at once"
        raise Refusal(problem, "cut it into parts of 30 s, or have a server write it down (/v1/audio/transcriptions)")
    parts = [samples[begin : begin + MAX_MEL_SAMPLES] for begin in range(0, samples.size, MAX_MEL_SAMPLES)]
    return [part for part in parts if part.size >= least]  # a rest of 10 ms gives no token


def mel_features(samples: Array) -> Array:
    """Return the valid mel frames of at most 30 s as float32 [frames, 128], as transformers' extractor computes them.

    The spectrum is float32 and the rest float64. Frames that reach beyond the samples are computed too, though not returned,
    because the last bits of a matrix product depend on its shape.
    """
    padded = np.zeros(_HOP + -(-samples.size // 128) * 128, dtype=np.float32)
    padded[_HOP : _HOP + samples.size] = samples
    windows = np.lib.stride_tricks.sliding_window_view(padded, _FRAME_LEN + 1)[::_HOP]
    frames = windows[None, :, :-1] * _hann_window()
    magnitudes = np.abs(np.fft.rfft(frames, n=_FFT_LEN, axis=-1))
    features: Array = np.log(np.matmul(magnitudes, _mel_filters()) + _FLOOR)[0].astype(np.float32)
    return features[: num_mel_frames(samples.size)]


def sample_frames(samples: Array) -> Array:
    """Return samples as float32 [tokens, 640], with zeros after the last one."""
    padded = np.pad(samples.astype(np.float32), (0, -samples.size % SAMPLES_PER_TOKEN))
    return padded.reshape(-1, SAMPLES_PER_TOKEN)


@cache
def _hann_window() -> Array:
    return np.hanning(_FRAME_LEN + 1)[:-1].astype(np.float32)


@cache
def _mel_filters() -> Array:
    """Return triangles that are evenly spaced on HTK's mel scale, as float64 [257, 128]."""
    top_mel = 2595.0 * np.log10(1.0 + _MAX_HZ / 700.0)
    corners = 700.0 * (np.power(10, np.linspace(0.0, top_mel, _NUM_MELS + 2) / 2595.0) - 1.0)
    bins = np.linspace(0, SAMPLE_RATE // 2, _FFT_LEN // 2 + 1)
    slopes = corners[None, :] - bins[:, None]
    widths = np.diff(corners)
    falling, rising = -slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]
    filters: Array = np.maximum(np.zeros(1), np.minimum(falling, rising))
    return filters


def _sniff(data: bytes) -> str | None:
    """Return the format that the first bytes announce, so that no other parser ever sees the data."""
    if data[:4] in (b"RIFF", b"RF64") and data[8:12] == b"WAVE":
        return "WAV"
    if data[:4] == b"fLaC":
        return "FLAC"
    if data[:4] == b"OggS":
        return "OGG"
    is_mp3_frame = len(data) > 1 and data[0] == 0xFF and data[1] & 0xE6 in (0xE2, 0xE4, 0xE6)
    return "MP3" if data[:3] == b"ID3" or is_mp3_frame else None


def _check_header(num_frames: int, rate: int, num_channels: int, max_seconds: float) -> None:
    if not _MIN_RATE <= rate <= _MAX_RATE:
        raise Refusal(f"the audio has {rate} samples per second, expected {_MIN_RATE} to {_MAX_RATE}")
    if not 1 <= num_channels <= MAX_CHANNELS:
        raise Refusal(f"the audio has {num_channels} channels, expected 1 to {MAX_CHANNELS}")
    if num_frames / rate > max_seconds:
        raise Refusal(f"the audio is {num_frames / rate:.0f} s long, expected at most {max_seconds:g} s")


def _read_mono(file: Any, max_seconds: float) -> Array:
    """Read all samples and average the channels. A header may say any length, so only the samples that are read count.

    `SoundFile.blocks` believes the header. Beyond a file's end it repeats the memory of earlier blocks.
    """

    def blocks() -> Iterator[Array]:
        while (block := file.read(_BLOCK_S * file.samplerate, dtype="float32", always_2d=True)).size:
            yield block.mean(axis=1)

    return _join(blocks(), file.samplerate, max_seconds)


def _read_track(data: bytes, max_seconds: float) -> tuple[Array, int]:
    """Return the samples of a container's first sound track, with the channels averaged, and their rate."""
    with open_container(data, "audio") as container:
        if not container.streams.audio:
            raise Refusal("the file has no sound")
        stream = container.streams.audio[0]
        if stream.codec_context.name not in TRACK_CODECS:
            raise Refusal("the audio's codec is not supported, expected AAC, ALAC, FLAC, MP3, Opus or Vorbis")
        seconds = float(stream.duration * stream.time_base) if stream.duration else 0.0
        _check_header(math.ceil(seconds * stream.rate), stream.rate, stream.channels, max_seconds)
        return _join(_track_blocks(container, stream), stream.rate, max_seconds), stream.rate


def _track_blocks(container: Any, stream: Any) -> Iterator[Array]:
    import av

    to_floats = av.AudioResampler(format="fltp")
    for frame in container.decode(stream):
        if frame.sample_rate != stream.rate:
            raise Refusal("the audio changes its sampling rate")
        for planes in to_floats.resample(frame):
            yield planes.to_ndarray().mean(axis=0)


def _join(blocks: Iterable[Array], rate: int, max_seconds: float) -> Array:
    """Return the blocks in one piece. Raise as soon as they are too long."""
    most, num_read, joined = math.ceil(max_seconds * rate), 0, []
    for block in blocks:
        num_read += block.size
        if num_read > most:
            raise Refusal(f"the audio is longer than {max_seconds:g} s")
        joined.append(block)
    return np.concatenate(joined).astype(np.float32) if joined else np.zeros(0, dtype=np.float32)
