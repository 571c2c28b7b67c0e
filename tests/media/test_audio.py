"""Audio: samples, mel features and numbers of tokens."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
import torch

from culet.errors import BadRequest
from culet.media.decoding.audio import decode_audio, mel_features, sample_frames, split_samples, to_rate
from culet.media.decoding.mp3 import with_unknown_length
from culet.media.decoding.refusal import Refusal
from culet.media.items import MediaKind
from culet.media.parts import read_options
from culet.media.reader import MediaReader
from culet.media.sources import MediaSource, sample_source
from culet.media.spec import num_mel_frames, num_mel_tokens
from tests.media.noise import sound

GOLDEN = np.load(Path(__file__).with_name("golden.npz"))


def recording(samples: np.ndarray, rate: int = 16_000, form: str = "WAV", subtype: str | None = None) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=form, subtype=subtype)
    return buffer.getvalue()


@pytest.mark.parametrize("clip", GOLDEN.files)
def test_features_are_those_of_transformers(clip):
    """The last bits depend on the processor. The slow test compares all of them on one."""
    features = mel_features(sound(int(clip)))
    assert features.dtype == np.float32
    assert features.shape == GOLDEN[clip].shape
    np.testing.assert_allclose(features, GOLDEN[clip], rtol=0, atol=5e-7)


@pytest.mark.slow
def test_features_have_the_same_bits_as_transformers():
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
    from transformers.models.gemma4_unified.feature_extraction_gemma4_unified import Gemma4UnifiedAudioFeatureExtractor

    extractor = Gemma4AudioFeatureExtractor()
    for num_samples in (161, 320, 640, 641, 800, 12_345, 16_000, 32_001, 479_999, 480_000):
        made = extractor([sound(num_samples)], return_tensors="np")
        valid = made["input_features_mask"][0]
        features = mel_features(sound(num_samples))
        assert np.array_equal(features, made["input_features"][0][valid]), num_samples
        assert num_mel_tokens(len(features)) == valid[::2][::2].sum()
    unified = Gemma4UnifiedAudioFeatureExtractor()
    for num_samples in (1, 640, 641, 481_000):
        made = unified([sound(num_samples)], return_tensors="np")
        assert np.array_equal(sample_frames(sound(num_samples)), made["input_features"][0])


@pytest.mark.parametrize(
    ("num_samples", "num_tokens"), [(160, 0), (161, 1), (640, 1), (12_345, 20), (16_000, 25), (32_000, 50), (480_000, 750)]
)
def test_numbers_of_tokens(num_samples, num_tokens):
    assert num_mel_tokens(num_mel_frames(num_samples)) == num_tokens
    if num_samples < 50_000 and num_tokens:
        assert len(mel_features(sound(num_samples))) == num_mel_frames(num_samples)


def test_samples_of_12b():
    samples = sound(1300)
    frames = sample_frames(samples)
    assert frames.shape == (3, 640)
    assert np.array_equal(frames.ravel()[:1300], samples)
    assert not frames.ravel()[1300:].any()


def read(reader: MediaReader, data: bytes, **settings: object) -> tuple:
    return reader.read_now([MediaSource(MediaKind.AUDIO, "clip", data=data, **settings)])[0].items


def test_long_audio_is_refused_or_split(reader: MediaReader):
    """Trap 17: nothing is dropped in silence."""
    samples = sound(481_000)
    data = recording(samples, form="FLAC")
    with pytest.raises(BadRequest, match=r"clip: the audio is 30.1 s long, but this model hears at most 30 s") as raised:
        read(reader, data)
    assert "/v1/audio/transcriptions" in raised.value.hint  # only those split it
    with pytest.raises(BadRequest, match="mm_processor_kwargs: got 'is_split', expected max_soft_tokens"):
        read_options({"is_split": True})
    parts = read(reader, data, is_split=True)
    assert [item.num_tokens for item in parts] == [750, num_mel_tokens(num_mel_frames(1000))]
    assert [item.num_tokens for item in read(reader, recording(samples[:480_000]))] == [750]
    assert len(read(reader, recording(sound(480_100)), is_split=True)) == 1  # 6 ms give no token
    with pytest.raises(BadRequest, match=r"has 160 samples at 16 kHz, expected at least 161"):
        read(reader, recording(samples[:160]))


def test_12b_hears_more_than_30_s(reader: MediaReader):
    assert [part.size for part in split_samples(sound(481_000), has_mel=False, is_split=True)] == [481_000]
    unified = MediaReader(replace(reader.spec, has_mel=False))
    unified.pool = reader.pool
    samples = sound(481_000)
    (item,) = unified.read_now([sample_source(samples, 16_000, name="clip")])[0].items
    assert (item.num_tokens, item.shape) == (752, (752, 640))
    assert item.data == sample_frames(samples).tobytes()
    unified.close()


@pytest.mark.parametrize("form", ["WAV", "FLAC", "OGG", "MP3"])
def test_files_in_every_format(form):
    samples = sound(16_000)
    decoded = decode_audio(recording(samples, form=form), 10.0)
    assert decoded.dtype == np.float32
    assert abs(decoded.size - samples.size) < 3000  # lossy formats pad
    if form in ("WAV", "FLAC"):
        assert np.abs(decoded - samples).max() < 1e-4


def test_an_mp3_that_ends_before_its_header_says():
    """What is not there is neither memory of the process nor a part of the file once more."""
    data = recording(sound(35 * 16_000), form="MP3")
    cut = data[: len(data) * 2 // 3]
    with soundfile.SoundFile(io.BytesIO(cut)) as file:
        assert file.frames == 35 * 16_000
        there = file.read(dtype="float32")
    assert 20 * 16_000 < there.size < 25 * 16_000
    assert np.array_equal(decode_audio(cut, 60.0), there)


def mp3(samples: np.ndarray, bitrate: int, rate: int = 16_000, layout: str = "mono") -> bytes:
    """Return an MP3 without a header that says how long it is."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp3", options={"write_xing": "0", "id3v2_version": "0"}) as container:
        stream = container.add_stream("libmp3lame", rate=rate, layout=layout)
        stream.bit_rate = bitrate
        planes = np.repeat(samples[None], len(stream.layout.channels), axis=0)
        frame = av.AudioFrame.from_ndarray(planes, format="fltp", layout=layout)
        frame.rate = rate
        for packet in [*stream.encode(frame), *stream.encode()]:
            container.mux(packet)
    return buffer.getvalue()


@pytest.mark.parametrize("layout", ["mono", "stereo"])
@pytest.mark.parametrize(("rate", "bitrates"), [(48_000, (64_000, 320_000)), (16_000, (24_000, 160_000))])
def test_an_mp3_whose_bitrate_changes_is_read_to_its_end(rate, bitrates, layout):
    """libsndfile guesses its length from the first bitrate, and would read a fraction or make up the rest."""
    samples = sound(2 * rate)
    low, high = (mp3(samples, bitrate, rate, layout) for bitrate in bitrates)
    tag = b"ID3\x04\0\0\0\0\x01\x00" + bytes(128)
    for data in (high + low, low + high, tag + high + low):
        decoded = decode_audio(data, 60.0)
        assert abs(decoded.size - 64_000) < 5000
        assert np.abs(decoded[-16_000:-2000]).mean() > 0.2
        with pytest.raises(Refusal, match="longer than 3 s"):
            decode_audio(data, 3.0)
    with soundfile.SoundFile(io.BytesIO(low)) as file:  # nothing else changes
        assert np.array_equal(decode_audio(low, 60.0), to_rate(file.read(dtype="float32", always_2d=True).mean(axis=1), rate))


@pytest.mark.parametrize(
    "data", [b"", b"ID3", b"ID3\x04\0\0\x7f\x7f\x7f\x7f", b"\xff\xfb", b"\xff\xfb\xf0\xff", b"\xff\xfb\x90\x64"]
)
def test_what_is_no_mp3_stays_as_it_is(data):
    assert with_unknown_length(data) == data


def test_a_flac_of_unknown_length():
    """Programs that write to a pipe cannot know it."""
    samples = sound(12 * 16_000)
    data = bytearray(recording(samples, form="FLAC"))
    place = 8 + 13  # the number of samples has 36 bits, the lowest of these 5 bytes
    data[place] &= 0xF0
    data[place + 1 : place + 5] = bytes(4)
    assert np.abs(decode_audio(bytes(data), 20.0) - samples).max() < 1e-4
    with pytest.raises(Refusal, match="longer than 11 s"):
        decode_audio(bytes(data), 11.0)


@pytest.mark.parametrize("subtype", ["GSM610", "G721_32", "IMA_ADPCM", "ULAW"])
def test_codings_of_telephones(subtype):
    decoded = decode_audio(recording(sound(8000), 8000, subtype=subtype), 10.0)
    assert abs(decoded.size - 16_000) < 2000


def track(samples: np.ndarray, form: str, codec: str, rate: int = 16_000) -> bytes:
    """Return sound in a container, as a browser records it."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=form) as container:
        stream = container.add_stream(codec, rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples[None], format="flt", layout="mono")
        frame.rate = rate
        resampler = av.AudioResampler(stream.codec_context.format, "mono", rate, frame_size=stream.codec_context.frame_size)
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            for packet in stream.encode(part):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return buffer.getvalue()


@pytest.mark.parametrize(("form", "codec", "rate"), [("mp4", "aac", 16_000), ("webm", "libopus", 48_000)])
def test_recordings_of_phones_and_browsers(form, codec, rate):
    samples = sound(2 * rate)
    decoded = decode_audio(track(samples, form, codec, rate), 10.0)
    assert decoded.dtype == np.float32
    assert abs(decoded.size - 32_000) < 3000
    assert 0.2 < np.abs(decoded).mean() < 0.5  # as loud as it was
    with pytest.raises(Refusal, match=r"expected at most 1 s|longer than 1 s"):
        decode_audio(track(samples, form, codec, rate), 1.0)


def test_channels_are_averaged_and_rates_converted():
    left, right = sound(44_100), sound(44_100, seed=1)
    data = recording(np.stack([left, right], axis=1), 44_100, subtype="FLOAT")
    mono = ((left + right) / 2).astype(np.float32)
    decoded = decode_audio(data, 10.0)
    assert decoded.size == 16_000
    assert np.allclose(decoded, to_rate(mono, 44_100), atol=1e-6)
    assert to_rate(sound(1001), 8000).size == 2002


def test_samples_of_the_callers_own_program(reader: MediaReader):
    samples = sound(16_000)
    (item,) = reader.read_now([sample_source(samples.astype(np.float64), 16_000, name="clip")])[0].items
    assert item == read(reader, recording(samples, subtype="FLOAT"))[0]
    assert np.array_equal(np.frombuffer(item.data, dtype=np.float32).reshape(item.shape), mel_features(samples))


@pytest.mark.parametrize("subtype", ["PCM_16", "PCM_32", "FLOAT", "DOUBLE"])
@pytest.mark.parametrize("num_channels", [1, 2, 3])
def test_arrays_are_read_as_files_are(reader: MediaReader, subtype: str, num_channels: int):
    """What soundfile reads from a recording gives the same as the recording itself."""
    data = recording(np.stack([sound(4000, seed=seed) for seed in range(num_channels)], axis=1), subtype=subtype)
    dtype = {"PCM_16": "int16", "PCM_32": "int32", "FLOAT": "float32", "DOUBLE": "float64"}[subtype]
    samples, rate = soundfile.read(io.BytesIO(data), dtype=dtype, always_2d=True)
    for form in (samples, samples.astype(samples.dtype.newbyteorder(">")), np.asfortranarray(samples)):
        assert reader.read_now([sample_source(form, rate, name="clip")])[0].items == read(reader, data)
    if num_channels == 1:
        assert sample_source(samples[:, 0], rate, name="clip") == sample_source(samples, rate, name="clip")


def test_samples_of_16_bit_floats():
    samples = sound(2000).astype(np.float16)
    assert sample_source(samples, 16_000, name="clip").data == samples.astype(np.float32).tobytes()


@pytest.mark.parametrize(
    ("samples", "rate", "problem", "hint"),
    [
        (np.zeros(9), 0, "got samples without a rate", "such as (samples, 16000)"),
        (np.zeros(9), 500, "got a rate of 500 Hz, expected a whole number from 1000 to 1000000", "samples per second"),
        (np.zeros(9), 44_100.5, "got a rate of 44100.5 Hz, expected a whole number", "resample"),
        (np.zeros(9), 2e6, "got a rate of 2000000 Hz", ""),
        (np.zeros((2, 16_000)), 16_000, r"got float64 \[2, 16000\], expected float, int16 or int32", "samples.T"),
        (np.zeros((1, 9, 2)), 16_000, r"got float64 \[1, 9, 2\]", "samples[0]"),
        (np.zeros((9, 0)), 16_000, r"got float64 \[9, 0\], expected .* at most 8 channels", ""),
        (np.arange(3), 16_000, r"got int64 \[3\]", "samples.astype('int16')"),
        (np.zeros(9, np.uint8), 16_000, r"got uint8 \[9\]", "- 128) / 128"),
        (np.zeros(9, np.complex64), 16_000, r"got complex64 \[9\]", "float32"),
        (torch.zeros(9), 16_000, r"got torch.float32 \[9\]", ".numpy()"),
        ([0.0, 0.1], 16_000, r"got list \[\]", "numpy.asarray"),
        (16_000, 16_000, r"got int \[\]", "(samples, rate)"),
    ],
)
def test_samples_that_cannot_be_read(samples: object, rate: float, problem: str, hint: str):
    with pytest.raises(BadRequest, match=f"clip: {problem}") as raised:
        sample_source(samples, rate, name="clip")
    assert hint in raised.value.hint


@pytest.mark.parametrize(("package", "rate"), [("soundfile", 16_000), ("soxr", 44_100)])
def test_what_to_install(reader: MediaReader, monkeypatch: pytest.MonkeyPatch, package, rate):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(BadRequest, match=f"because {package} is not installed") as raised:
        read(reader, recording(sound(2000), rate))
    assert "pip install soundfile soxr" in raised.value.hint


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_samples_that_are_no_sound(value):
    samples = sound(2000)
    samples[77] = value
    with pytest.raises(Refusal, match="not numbers"):
        decode_audio(recording(samples, subtype="FLOAT"), 10.0)
