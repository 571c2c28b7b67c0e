"""Decode audio to 16 kHz mono samples, and compute what the models read: mel features, or frames of samples."""

from __future__ import annotations

import io
import math
from functools import cache
from typing import Any

import numpy as np

from culet.media.decoding.refusal import Refusal
from culet.media.spec import MAX_MEL_SAMPLES, MIN_MEL_SAMPLES, SAMPLE_RATE, SAMPLES_PER_TOKEN, num_mel_frames

Array = np.ndarray[Any, Any]
FORMATS = ("WAV", "FLAC", "OGG", "MP3")
INSTALL_AUDIO = "the operator of the server installs it with: pip install 'culet[audio]'"
MAX_PEAK = 100.0  # samples lie in [-1, 1], and files of floats may exceed it a little
_MAX_CHANNELS = 8
_MIN_RATE, _MAX_RATE = 4_000, 384_000
_BLOCK_S = 10
_FRAME_LEN, _HOP, _FFT_LEN = 320, 160, 512
_NUM_MELS, _MAX_HZ, _FLOOR = 128, 8000.0, 1e-3


def decode_audio(data: bytes, max_seconds: float) -> Array:
    """Return encoded audio as float32 samples, 16 kHz and mono."""
    if _sniff(data) is None:
        raise Refusal(f"this is not audio that can be read, expected {', '.join(FORMATS)}")
    try:
        import soundfile
    except (ImportError, OSError):
        raise Refusal("audio cannot be decoded here, because soundfile is not installed", INSTALL_AUDIO) from None
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            if file.format not in ("WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3", "MPEG"):
                raise Refusal(f"this is not audio that can be read, expected {', '.join(FORMATS)}")
            _check_header(file.frames, file.samplerate, file.channels, max_seconds)
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
        raise Refusal(problem, INSTALL_AUDIO) from None
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
        raise Refusal(f"the audio is {seconds:.1f} s long, but this model hears at most 30 s at once", "cut it into parts")
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
    if not 1 <= num_channels <= _MAX_CHANNELS:
        raise Refusal(f"the audio has {num_channels} channels, expected 1 to {_MAX_CHANNELS}")
    if num_frames / rate > max_seconds:
        raise Refusal(f"the audio is {num_frames / rate:.0f} s long, expected at most {max_seconds:g} s")


def _read_mono(file: Any, max_seconds: float) -> Array:
    """Read all samples and average the channels. A file may be longer than its header says, so the blocks are counted."""
    most, num_read, blocks = math.ceil(max_seconds * file.samplerate), 0, []
    while True:
        block = file.read(_BLOCK_S * file.samplerate, dtype="float32", always_2d=True)
        if len(block) == 0:
            break
        num_read += len(block)
        if num_read > most:
            raise Refusal(f"the audio is longer than {max_seconds:g} s")
        blocks.append(block[:, 0] if block.shape[1] == 1 else block.mean(axis=1))
    return np.concatenate(blocks) if blocks else np.zeros(0, dtype=np.float32)
