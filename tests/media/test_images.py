"""Images: sizes, colours and pixels as transformers' processor gives them, whatever the file's format."""

from __future__ import annotations

import hashlib
import io
import json
import math
import platform
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, PngImagePlugin

from culet.errors import BadRequest, CheckpointError
from culet.media.decoding.images import decode_image, resize
from culet.media.items import MediaItem, MediaKind
from culet.media.local import open_local
from culet.media.reader import MediaReader
from culet.media.sources import MediaSource, pixel_source
from culet.media.spec import BUDGETS, MediaSpec, num_image_tokens, read_media_spec, target_size
from culet.models.variants import VARIANTS
from tests.media.noise import noise

GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text(encoding="utf-8"))
IS_X86 = platform.machine() == "x86_64"  # where the digests were made; elsewhere the resizing may round differently


def encoded(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def picture(height: int = 60, width: int = 80, seed: int = 0) -> Image.Image:
    return Image.fromarray(noise(height, width, 3, seed=seed))


def pixels_of(item: MediaItem) -> np.ndarray:
    return np.frombuffer(item.data, dtype=np.uint8).reshape(item.shape)


def patches(pixels: np.ndarray, side: int) -> np.ndarray:
    """Return float32 [patches, side * side * 3] in [0, 1], row by row, as the towers read it."""
    height, width = pixels.shape[0] // side, pixels.shape[1] // side
    scaled = torch.from_numpy(pixels.copy()) * (1 / 255)
    return scaled.reshape(height, side, width, side, 3).permute(0, 2, 1, 3, 4).reshape(height * width, -1).numpy()


def test_sizes_follow_the_formula_for_many_shapes():
    """The result fits the budget, has whole tokens, and no larger size of the same shape does."""
    chosen = np.random.default_rng(0)
    for height, width in (2 ** chosen.uniform(0, 13, (20_000, 2))).astype(int).tolist():
        budget = BUDGETS[(height + width) % 5]
        new_height, new_width = target_size(height, width, budget)
        assert new_height % 48 == new_width % 48 == 0
        assert 1 <= num_image_tokens(new_height, new_width) <= budget
        scale = math.sqrt(budget * 48 * 48 / (height * width))
        if min(scale * height, scale * width) >= 48:
            assert (new_height, new_width) == (int(scale * height / 48) * 48, int(scale * width / 48) * 48)
        else:  # the aspect ratio is above the budget
            assert max(height, width) / min(height, width) > budget
            assert num_image_tokens(new_height, new_width) == budget


@pytest.mark.slow
def test_sizes_are_those_of_transformers():
    from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

    chosen = np.random.default_rng(1)
    for height, width in (2 ** chosen.uniform(0, 15, (100_000, 2))).astype(int).tolist():
        budget = BUDGETS[(height + width) % 5]
        expected = get_aspect_ratio_preserving_size(height, width, 16, 9 * budget, 3)
        assert target_size(height, width, budget) == expected, (height, width, budget)


@pytest.mark.parametrize(
    ("height", "width", "sizes"),
    [
        (1, 1, [64, 121, 256, 529, 1089]),
        (300, 400, [63, 130, 266, 540, 1064]),
        (1080, 1920, [66, 120, 264, 527, 1100]),
        (1123, 794, [63, 126, 266, 532, 1092]),
        (1, 5000, [70, 140, 280, 560, 1120]),
        (5000, 1, [70, 140, 280, 560, 1120]),
    ],
)
def test_numbers_of_tokens(height, width, sizes):
    assert [num_image_tokens(*target_size(height, width, budget)) for budget in BUDGETS] == sizes


def is_slow(case: str) -> bool:
    return case.endswith("@1120") and not case.startswith("300x400")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if is_slow(case) else case for case in GOLDEN["gemma4"]]
)
def test_pixels_are_those_of_transformers(case):
    size, _, budget = case.partition("@")
    height, width = map(int, size.split("x"))
    resized = resize(noise(height, width, 3), int(budget))
    for kind, side in (("gemma4", 16), ("unified", 48)):
        golden = GOLDEN[kind][case]
        assert num_image_tokens(*resized.shape[:2]) == golden["num_tokens"]
        assert golden["last"] == [resized.shape[1] // side - 1, resized.shape[0] // side - 1]
        if IS_X86:
            assert hashlib.sha256(patches(resized, side).tobytes()).hexdigest()[:32] == golden["pixels"], kind


def test_resizing_in_floats_gives_other_pixels():
    """Trap 6: the rounding between the two passes is part of the result."""
    pixels = noise(300, 400, 3)
    image = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None]
    right = F.interpolate(image, size=(672, 912), mode="bicubic", antialias=True)[0].permute(1, 2, 0).numpy()
    assert np.array_equal(resize(pixels, 280), right)
    floats = F.interpolate(image.float(), size=(672, 912), mode="bicubic", antialias=True).round().clamp(0, 255)
    assert np.abs(floats[0].permute(1, 2, 0).numpy() - right).max() > 10


def test_images_are_multiplied_and_videos_divided():
    """Trap 7: the two forms differ in 126 of 256 values. The towers do this, so an item says which kind it is."""
    values = torch.arange(256, dtype=torch.uint8)
    assert int((values * (1 / 255) != values / 255.0).sum()) == 126
    assert MediaKind.IMAGE != MediaKind.VIDEO


def test_one_image_in_two_budgets_is_two_items(reader: MediaReader):
    """Trap 14: the key depends on the budget where the size does."""
    data = encoded(picture(300, 400))
    sources = [MediaSource(MediaKind.IMAGE, "image", data=data, max_soft_tokens=budget) for budget in (280, 560, 280)]
    first, second, again = (medium.items[0] for medium in reader.read_now(sources))
    assert (first.num_tokens, second.num_tokens) == (266, 540)
    assert first.key != second.key
    assert first == again


def test_keys_name_the_content(reader: MediaReader):
    """Equal pixels have equal keys in any file. Other pixels, or the same ones as a video, have others."""
    image = picture()
    as_file = reader.read_now([MediaSource(MediaKind.IMAGE, "i", data=encoded(image), max_soft_tokens=70)])[0].items[0]
    as_pixels = reader.read_now([pixel_source(np.asarray(image), name="i", max_soft_tokens=70)])[0].items[0]
    as_video = reader.read_now([pixel_source(np.asarray(image)[None], name="v")])[0].items[0]
    other = reader.read_now([pixel_source(np.asarray(picture(seed=1)), name="i", max_soft_tokens=70)])[0].items[0]
    assert as_file == as_pixels
    assert as_video.data == as_file.data
    assert len({as_file.key, as_video.key, other.key}) == 3
    assert len(as_file.key) == 32


def test_keys_depend_on_the_last_pixel_and_on_the_form(reader: MediaReader):
    def item(pixels: np.ndarray) -> MediaItem:
        return reader.read_now([pixel_source(pixels, name="i", max_soft_tokens=70)])[0].items[0]

    wide = np.full((480, 960, 3), 7, dtype=np.uint8)
    dotted = wide.copy()
    dotted[-8:, -8:] = 99
    first, second, tall = item(wide), item(dotted), item(wide.transpose(1, 0, 2))
    size = len(first.data)
    assert first.data[: size // 2] == second.data[: size // 2]
    assert first.data == tall.data
    assert len({first.key, second.key, tall.key}) == 3


def test_transparency_is_white():
    """Trap 19."""
    layers = np.zeros((2, 3, 4), dtype=np.uint8)
    layers[0, 0] = (10, 20, 30, 255)
    layers[0, 1] = (200, 0, 0, 128)
    pixels = decode_image(encoded(Image.fromarray(layers)), 100)
    assert pixels[0, 0].tolist() == [10, 20, 30]
    assert abs(pixels[0, 1].astype(int) - [227, 127, 127]).max() <= 1
    assert (pixels[1] == 255).all()
    palette = Image.fromarray(np.array([[0, 1]], dtype=np.uint8), "P")
    palette.putpalette([0, 0, 0, 9, 9, 9])
    assert decode_image(encoded(palette, transparency=0), 100).tolist() == [[[255] * 3, [9] * 3]]


def grey_png(depth: int, colour: int, row: bytes, clear: bytes) -> bytes:
    """Return a PNG of 2 x 1 pixels in which one colour is transparent."""
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", 2, 1, depth, colour, 0, 0, 0)),
        (b"tRNS", clear),
        (b"IDAT", zlib.compress(b"\0" + row)),
        (b"IEND", b""),
    )
    parts = [struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize(
    ("depth", "colour", "row", "clear", "second"),
    [
        (1, 0, b"\x00", b"\0\0", 255),
        (2, 0, b"\x60", b"\0\1", 170),
        (4, 0, b"\x5a", b"\0\5", 170),
        (8, 0, b"\x12\x34", b"\0\x12", 0x34),
        (16, 0, b"\x12\x34\x12\x35", b"\x12\x34", 0x12),
        (8, 2, b"\x12\x12\x12\x34\x34\x34", b"\0\x12" * 3, 0x34),
        (16, 2, b"\x12\x34" * 3 + b"\x34\x34" * 3, b"\x12\x34" * 3, 0x34),
    ],
)
def test_a_transparent_colour_is_white_at_every_depth(depth, colour, row, clear, second):
    data = grey_png(depth, colour, row, clear)
    assert decode_image(data, 100).tolist() == [[[255] * 3, [second] * 3]]
    source = open_local(MediaSource(MediaKind.IMAGE, "image"), Image.open(io.BytesIO(data)))
    assert source.data == bytes([255] * 3 + [second] * 3)


@pytest.mark.parametrize("turn", range(1, 9))
def test_photos_are_upright(turn):
    """Trap 19: a photo with EXIF orientation gives the pixels of its upright copy."""
    upright = picture(6, 10)
    back = [None, 0, 3, 1, 5, 2, 6, 4][turn - 1]  # the transposition that this orientation undoes
    stored = upright if back is None else upright.transpose(Image.Transpose(back))
    exif = Image.Exif()
    exif[0x0112] = turn
    assert np.array_equal(decode_image(encoded(stored, exif=exif), 100), np.asarray(upright))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_a_damaged_orientation_counts_as_none():
    data = encoded(picture(), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert np.array_equal(decode_image(data, 10_000), np.asarray(Image.open(io.BytesIO(data))))


def test_modes_of_colour():
    grey = np.array([[0, 128, 32768, 65535]], dtype=np.uint16)
    assert decode_image(encoded(Image.fromarray(grey)), 100)[0, :, 0].tolist() == [0, 0, 128, 255]  # 16 bits keep the upper 8
    for mode in ("L", "1", "P", "LA"):
        image = picture().convert("L").convert(mode)
        assert np.array_equal(decode_image(encoded(image), 10_000), np.asarray(image.convert("RGB"))), mode
    four = picture().convert("CMYK")
    data = encoded(four, "JPEG")
    assert np.array_equal(decode_image(data, 10_000), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


def test_long_profiles_and_texts_are_ignored():
    """Photo editors write profiles and descriptions of some megabytes."""
    image = picture()
    texts = PngImagePlugin.PngInfo()
    texts.add_text("Description", "a" * 3_000_000, zip=True)
    texts.add_itxt("XML:com.adobe.xmp", "b" * 3_000_000, zip=True)
    for options in ({"icc_profile": noise(2_000_000).tobytes()}, {"pnginfo": texts}):
        assert np.array_equal(decode_image(encoded(image, **options), 10_000), np.asarray(image))


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_its_first_frame(form):
    frames = [Image.new("RGB", (20, 10), colour) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    options = {"lossless": True} if form == "WEBP" else {}
    data = encoded(frames[0], form, save_all=True, append_images=frames[1:], **options)
    assert Image.open(io.BytesIO(data)).n_frames == 3
    assert decode_image(data, 1000)[5, 5].tolist() == [255, 0, 0]


def test_budgets():
    spec = MediaSpec(frozenset(MediaKind))
    details = (None, "auto", "low", "high", "original")
    assert [spec.budget(MediaKind.IMAGE, detail=detail) for detail in details] == [280, 280, 70, 1120, 1120]
    assert [spec.budget(MediaKind.VIDEO, detail=detail) for detail in (None, "low", "high")] == [70, 70, 280]
    with pytest.raises(BadRequest, match="got 560, expected one of 70, 140, 280 for each frame"):
        spec.budget(MediaKind.VIDEO, 560)
    assert spec.budget(MediaKind.IMAGE, 560, "low") == 560
    for wrong in (71, 0, -70, True, 280.5, "280"):
        with pytest.raises(BadRequest, match="max_soft_tokens"):
            spec.budget(MediaKind.IMAGE, wrong)
    with pytest.raises(BadRequest, match="detail"):
        spec.budget(MediaKind.IMAGE, detail="best")
    small = MediaSpec(frozenset(MediaKind), max_budget=140)
    assert small.budgets(MediaKind.IMAGE) == small.budgets(MediaKind.VIDEO) == [70, 140]
    assert small.budget(MediaKind.IMAGE, detail="original") == 140


def test_what_each_variant_reads():
    see, hear = {MediaKind.IMAGE, MediaKind.VIDEO}, {MediaKind.AUDIO}
    specs = {name: read_media_spec(config) for name, config in VARIANTS.items()}
    assert {name: set(spec.kinds) for name, spec in specs.items()} == {
        "E2B": see | hear,
        "E4B": see | hear,
        "12B": see | hear,
        "26B-A4B": see,
        "31B": see,
    }
    assert {name for name, spec in specs.items() if spec.is_whole} == {"12B", "26B-A4B", "31B"}
    assert {name for name, spec in specs.items() if not spec.has_mel} == {"12B"}
    with pytest.raises(BadRequest, match=r"messages\[0\]: got audio, but this model reads image, video"):
        specs["31B"].check_kind("messages[0]", MediaKind.AUDIO)
    assert read_media_spec({"model_type": "gemma4_text"}).kinds == frozenset()


def test_settings_come_from_the_processors_files(tmp_path: Path):
    config = {**VARIANTS["E4B"], "image_token_id": 7, "eoa_token_index": 9}
    content = {
        "image_processor": {"max_soft_tokens": 560, "patch_size": 16, "rescale_factor": 0.00392156862745098, "resample": 3},
        "video_processor": {"num_frames": 8, "max_soft_tokens": 140, "do_normalize": True},
        "feature_extractor": {"feature_size": 128, "mel_floor": 0.001, "per_bin_mean": None},
    }
    (tmp_path / "processor_config.json").write_text(json.dumps(content))
    spec = read_media_spec(config, tmp_path)
    assert (spec.image_budget, spec.video_budget, spec.num_frames) == (560, 140, 8)
    assert (spec.tokens.image, spec.tokens.audio_end, spec.tokens.audio) == (7, 9, 258881)
    for section, key, value in (
        ("image_processor", "patch_size", 14),
        ("image_processor", "do_normalize", True),
        ("video_processor", "max_soft_tokens", 100),
        ("video_processor", "num_frames", 0),
        ("feature_extractor", "per_bin_mean", [1.0]),
    ):
        changed = {**content, section: {**content[section], key: value}}
        (tmp_path / "processor_config.json").write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match=f"{section}.{key}"):
            read_media_spec(config, tmp_path)
    (tmp_path / "processor_config.json").unlink()
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"max_soft_tokens": 1120}))
    assert read_media_spec(config, tmp_path).image_budget == 1120
