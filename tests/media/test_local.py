"""What a caller's own program may give as an image or a video: pictures of Pillow and arrays of every form."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from culet.errors import BadRequest
from culet.media.items import MediaKind
from culet.media.local import open_local, read_media_data
from culet.media.parts import MediaOptions, read_options
from culet.media.reader import MediaReader
from culet.media.sources import MediaSource
from tests.media.noise import noise

RGBA = noise(6, 8, 4)


def opened(value: Any, kind: MediaKind = MediaKind.IMAGE) -> np.ndarray:
    """Return the pixels that a value stands for."""
    source = open_local(MediaSource(kind, "image"), value)
    return np.frombuffer(source.data, np.uint8).reshape(source.shape)


def over_white(layers: np.ndarray) -> np.ndarray:
    white = Image.new("RGBA", (layers.shape[1], layers.shape[0]), "white")
    return np.asarray(Image.alpha_composite(white, Image.fromarray(layers)).convert("RGB"))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "La", "RGBa"])
def test_transparent_pictures_are_white(mode: str):
    assert (opened(Image.new(mode, (3, 2))) == 255).all()


def test_a_palette_may_have_transparency_of_its_own():
    picture = Image.fromarray(np.array([[0, 1]], np.uint8), "P")
    picture.putpalette([0, 0, 0, 0, 9, 9, 9, 255], "RGBA")
    assert opened(picture).tolist() == [[[255] * 3, [9] * 3]]


@pytest.mark.parametrize(
    "mode", ["1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "I;16", "I;16L", "I;16B"]
)
def test_every_mode_is_read(mode: str):
    assert opened(Image.new(mode, (3, 2))).shape == (2, 3, 3)


@pytest.mark.parametrize(
    ("levels", "dtype"), [([0, 65535], "int32"), ([-1, 9], "int32"), ([0, 1], "float32"), ([0, 256], "float32")]
)
def test_levels_that_pillow_would_cut_off_are_refused(levels: list[float], dtype: str):
    with pytest.raises(BadRequest, match=f"image: got a picture of mode .* from {levels[0]} to {levels[1]}, expected 0 to 255"):
        opened(Image.fromarray(np.array([levels], dtype)))


@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_levels_of_8_bits_are_kept(dtype: str):
    assert opened(Image.fromarray(np.array([[0, 7, 255]], dtype)))[0, :, 0].tolist() == [0, 7, 255]


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "La"])
@pytest.mark.parametrize("size", [(0, 0), (0, 5), (5, 0)])
def test_pictures_without_pixels_are_refused(mode: str, size: tuple[int, int]):
    with pytest.raises(BadRequest, match=f"image: the image is {size[0]} x {size[1]} pixels, expected at least 1 x 1"):
        opened(Image.new(mode, size))


def test_pictures_that_cannot_be_read_are_refused():
    closed = Image.new("RGB", (3, 2))
    closed.close()
    buffer = io.BytesIO()
    Image.fromarray(noise(40, 40, 3)).save(buffer, "PNG")
    cut = Image.open(io.BytesIO(buffer.getvalue()[:500]))
    odd = Image.new("L", (3, 2))
    odd.info["transparency"] = "none"
    for picture in (closed, cut, odd):
        with pytest.raises(BadRequest, match="image: cannot read this picture of Pillow"):
            opened(picture)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_damaged_exif_of_a_picture_counts_as_none(mode: str):
    picture = Image.new(mode, (3, 2), "red")
    picture.info["exif"] = b"Exif\0\0MM\0*\xff\xff"
    assert (opened(picture) == [255, 0, 0]).all()


def test_a_picture_is_turned_and_not_changed():
    picture = Image.fromarray(RGBA)
    exif = Image.Exif()
    exif[0x0112] = 6
    picture.info["exif"] = exif.tobytes()
    before = dict(picture.info)
    assert np.array_equal(opened(picture), np.rot90(over_white(RGBA), -1))
    assert picture.info == before


def test_arrays_may_be_grey_or_transparent():
    grey = RGBA[:, :, 0]
    expected = np.stack([grey] * 3, axis=-1)
    assert np.array_equal(opened(grey), expected)
    assert np.array_equal(opened(grey[:, :, None]), expected)
    assert np.array_equal(opened(RGBA), over_white(RGBA))
    assert np.array_equal(opened(RGBA), opened(Image.fromarray(RGBA)))
    frames = np.stack([RGBA, 255 - RGBA])
    assert np.array_equal(opened(frames, MediaKind.VIDEO), np.stack([over_white(RGBA), over_white(255 - RGBA)]))


def read(**data: Any) -> list[MediaSource]:
    return read_media_data(data, MediaOptions(), "data")


def test_several_images_may_be_a_tuple():
    picture, pixels = Image.new("RGB", (3, 2), "red"), noise(2, 3, 3)
    for values in ((picture, picture), (pixels, pixels), [pixels, picture], (pixels, pixels, picture)):
        found = read(image=values)
        assert [source.name for source in found] == [f"data.image[{index}]" for index in range(len(values))]
        assert {source.shape for source in found} == {(2, 3, 3)}


def test_frames_are_one_video(reader: MediaReader):
    pixels = noise(3, 40, 60, 3)
    (whole,) = read(video=pixels)
    pictures = [Image.fromarray(frame) for frame in pixels]
    for frames in (list(pixels), pictures, tuple(pictures), [pixels[0], *pictures[1:]]):
        (source,) = read(video=frames)
        assert (source.data, source.shape, source.rate) == (whole.data, whole.shape, 0.0)
    (medium,) = reader.read_now([source])
    assert medium.timestamps == pytest.approx((0, 1 / 24, 2 / 24))  # as for an array, and as in transformers
    for rate in ({"fps": 2}, 2, np.int64(2)):
        (timed,) = read(video=(pictures, rate))
        assert (timed.shape, timed.rate) == (whole.shape, 2.0)
    assert len(read(video=[pictures, (pixels, {"fps": 2})])) == 2
    assert len(read(video=(pixels, pixels))) == 2
    assert open_local(MediaSource(MediaKind.VIDEO, "part"), pictures).shape == whole.shape


def video(num_given: int, **about: Any) -> MediaSource:
    """Return a video of grey frames, each lighter than the one before, with its metadata in vLLM's form."""
    pixels = np.zeros((num_given, 8, 8, 3), np.uint8) + np.arange(num_given, dtype=np.uint8)[:, None, None, None]
    (source,) = read(video=[(pixels, about)])
    return source


def test_metadata_of_frames_that_were_taken_from_a_video(reader: MediaReader):
    about = {"total_num_frames": 4000, "duration": 160.0, "video_backend": "opencv", "width": None, "height": 8}
    for indices in ([0, 50, 1600], np.array([0, 50, 1600]), (np.int64(0), 50, 1600)):
        source = video(3, fps=25, frames_indices=indices, do_sample_frames=False, **about)
        (medium,) = reader.read_now([source])
        assert medium.timestamps == (0.0, 2.0, 64.0)
    (medium,) = reader.read_now([video(3, fps=2, frames_indices=None, do_sample_frames=np.bool_(False), **about)])
    assert medium.timestamps == (0.0, 0.5, 1.0)  # without indices the frames follow each other


def test_indices_go_with_the_frames_that_are_taken(reader: MediaReader):
    (medium,) = reader.read_now([video(64, fps=10, frames_indices=range(0, 1280, 20))])
    assert medium.timestamps == tuple(4.0 * at for at in range(32))
    assert [item.data[0] for item in medium.items] == list(range(0, 64, 2))


def test_frames_that_may_not_be_left_out(reader: MediaReader):
    assert len(reader.read_now([video(32, fps=2, do_sample_frames=False)])[0].items) == 32
    many = video(33, fps=2, do_sample_frames=False)
    problem = r"data.video\[0\]: got 33 frames with do_sample_frames: False, expected at most 32"
    with pytest.raises(BadRequest, match=problem) as raised:
        reader.read_now([many])
    assert raised.value.hint == "give at most 32, or omit do_sample_frames: then 32 of them are taken"


@pytest.mark.parametrize(
    ("about", "problem"),
    [
        ({"frames_indices": [0, 5]}, "got 2 frames_indices for 3 frames"),
        ({"frames_indices": [0, 5, 5]}, "frames_indices: got 5 at 2 after 5, expected ascending whole numbers"),
        ({"frames_indices": [-1, 5, 6]}, "frames_indices: got -1 at 0, expected"),
        ({"frames_indices": [0, 5, 1 << 40]}, "frames_indices: got 1099511627776 at 2 after 5"),
        ({"frames_indices": [0, 1.0, 2]}, "frames_indices: got float at 1"),
        ({"frames_indices": [False, True, 2]}, "frames_indices: got bool at 0"),
        ({"frames_indices": []}, "frames_indices: got none"),
        ({"frames_indices": "012"}, "frames_indices: got str"),
        ({"do_sample_frames": "no"}, "do_sample_frames: got str, expected True or False"),
        ({"num_frames": 8}, "got the key 'num_frames' in a video's metadata, expected fps, frames_indices, do_sample_frames"),
        ({"fps": None}, "got a video's metadata without fps"),
        ({"fps": 0}, "got a rate of 0, expected a number above 0"),
    ],
)
def test_metadata_that_cannot_be_used(about: dict[str, Any], problem: str):
    with pytest.raises(BadRequest, match=rf"data.video\[0\]: {problem}"):
        video(3, **{"fps": 2, **about})


def test_audio_in_tuples():
    samples = np.zeros(2000, np.float32)
    assert [source.rate for source in read(audio=(samples, 16000))] == [16000]
    assert [source.rate for source in read(audio=((samples, 16000), (samples, 8000)))] == [16000, 8000]


def test_a_file_in_memory():
    file = io.BytesIO()
    Image.fromarray(noise(4, 4, 3)).save(file, "PNG")  # and now it stands at its end
    (source,) = read(image=file)
    assert (source.data, source.form) == (file.getvalue(), "file")


@pytest.mark.parametrize(
    ("kind", "value", "problem", "hint"),
    [
        ("image", noise(1, 4, 4, 3), r"got a video \[1, 4, 4, 3\], expected an image", "pixels[0]"),
        ("image", noise(2, 4, 4, 3), r"got a video \[2, 4, 4, 3\], expected an image", "give each image on its own"),
        ("video", noise(4, 4, 3), r"got an image \[4, 4, 3\], expected a video", "[pixels]"),
        ("video", Image.new("RGB", (4, 4)), "got Image", "[picture]"),
    ],
)
def test_arrays_of_another_kind(kind: str, value: Any, problem: str, hint: str):
    with pytest.raises(BadRequest, match=rf"data.{kind}\[0\]: {problem}") as raised:
        read(**{kind: value})
    assert hint in raised.value.hint


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([noise(4, 4, 3), noise(4, 5, 3)], r"video\[1\]: got a frame of 5 x 4 pixels, expected 4 x 4"),
        ([noise(4, 4, 3), np.zeros((4, 4, 3))], r"video\[1\]: got float64"),
        ([noise(4, 4, 3), b"x"], r"video\[1\]: got bytes"),
        ([], "video: got no frames"),
        ((noise(2, 4, 4, 3), float("nan")), "video: got a rate of nan"),
        ((noise(2, 4, 4, 3), -1), "video: got a rate of -1"),
    ],
)
def test_bad_videos_are_refused(value: Any, problem: str):
    with pytest.raises(BadRequest, match=problem):
        open_local(MediaSource(MediaKind.VIDEO, "video"), value)


@pytest.mark.parametrize("rate", ["16000", None, {"fps": 16000}])
def test_rates_of_another_type(rate: Any):
    with pytest.raises(BadRequest, match="got a rate of type") as raised:
        read(audio=(np.zeros(2000, np.float32), rate))
    assert "(samples, 16000)" in raised.value.hint


@pytest.mark.parametrize("given", [3, 0, "", [], ["max_soft_tokens"], "max_soft_tokens", True])
def test_options_of_another_type(given: Any):
    problem = f"mm_processor_kwargs: got {type(given).__name__}, expected a mapping with max_soft_tokens"
    with pytest.raises(BadRequest, match=problem):
        read_options(given)
    assert read_options(None) == read_options({}) == MediaOptions()
