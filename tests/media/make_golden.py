"""Write golden.json and golden.npz: what transformers' own processors make of this folder's noise.

The processors need torchvision, whose wheels do not load beside torch's CPU builds, because two operators are missing. This
script defines them (nothing here calls them). The test environment has no torchvision, so that every other test still loads
transformers as it is. To repeat, install torchvision 0.28.0 into a folder of its own:

    pip install --no-deps --target FOLDER torchvision==0.28.0
    PYTHONPATH=.:FOLDER python tests/media/make_golden.py
"""

from __future__ import annotations

import hashlib
import json
import warnings
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.media.noise import noise, sound

FOLDER = Path(__file__).parent
SIZES = [(300, 400), (1, 1), (768, 768), (96, 4000), (3, 999), (999, 3), (720, 1280), (337, 101), (48, 96)]
BUDGETS = (70, 280, 1120)
CLIPS = (161, 641, 12345)
VIDEO = (41, 90, 160)  # frames, height, width
VIDEO_RATE = 0.5
PROMPT = "a<|image|>b<|audio|>c<|image|>d<|video|>e"
TOKENS = ["<|image>", "<image|>", "<|image|>", "<|video|>", "<|audio>", "<audio|>", "<|audio|>"]
FIELDS = ("image_begin", "image_end", "image", "video", "audio_begin", "audio_end", "audio")


def define_missing_operators() -> torch.library.Library:
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def digest(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()[:32]


def runs(token_ids: list[int]) -> list[list[int]]:
    """Return token ids as [id, count] pairs."""
    return [[token_id, len(list(group))] for token_id, group in groupby(token_ids)]


def image_facts(processor: Any, height: int, width: int, budget: int) -> dict[str, Any]:
    made = processor(
        torch.from_numpy(noise(height, width, 3).copy()).permute(2, 0, 1), max_soft_tokens=budget, return_tensors="pt"
    )
    positions = made["image_position_ids"][0]
    is_real = positions[:, 0] >= 0
    return {
        "pixels": digest(made["pixel_values"][0][is_real].numpy()),
        "num_tokens": int(made["num_soft_tokens_per_image"][0]),
        "last": positions[is_real][-1].tolist(),
    }


def make_tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789: ", "?"]
    vocabulary = {token: index for index, token in enumerate([*letters, *TOKENS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    names = ("boi_token", "eoi_token", "image_token", None, "boa_token", "eoa_token", "audio_token")
    extra = {name: token for name, token in zip(names, TOKENS, strict=True) if name}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="?", unk_token="?", extra_special_tokens=extra)


def main() -> None:
    library = define_missing_operators()
    warnings.simplefilter("ignore")
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
    from transformers.models.gemma4.image_processing_gemma4 import Gemma4ImageProcessor
    from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
    from transformers.models.gemma4.video_processing_gemma4 import Gemma4VideoProcessor
    from transformers.models.gemma4_unified.image_processing_gemma4_unified import Gemma4UnifiedImageProcessor

    kinds = {"gemma4": Gemma4ImageProcessor(), "unified": Gemma4UnifiedImageProcessor()}
    golden: dict[str, Any] = {
        kind: {
            f"{height}x{width}@{budget}": image_facts(processor, height, width, budget)
            for height, width in SIZES
            for budget in BUDGETS
        }
        for kind, processor in kinds.items()
    }
    extractor = Gemma4AudioFeatureExtractor()
    clips = {}
    for num_samples in CLIPS:
        made = extractor([sound(num_samples)], return_tensors="np")
        clips[str(num_samples)] = made["input_features"][0][made["input_features_mask"][0]]
    np.savez(FOLDER / "golden.npz", **clips)

    frames = torch.from_numpy(noise(*VIDEO, 3).copy()).permute(0, 3, 1, 2)
    facts = {"total_num_frames": VIDEO[0], "fps": VIDEO_RATE, "height": VIDEO[1], "width": VIDEO[2]}
    video = Gemma4VideoProcessor()
    made = video([frames], video_metadata=[facts], return_metadata=True, return_tensors="pt")
    shown = made["pixel_values_videos"].reshape(-1, 630, 768)
    is_real = made["video_position_ids"].reshape(-1, 630, 2)[0, :, 0] >= 0
    golden["video"] = {
        "frames": [digest(frame[is_real].numpy()) for frame in shown],
        "indices": [int(index) for index in made["video_metadata"][0].frames_indices],
    }
    tokenizer = make_tokenizer()
    processor = Gemma4Processor(extractor, kinds["gemma4"], tokenizer, video)
    images = [torch.from_numpy(noise(height, width, 3).copy()).permute(2, 0, 1) for height, width in SIZES[:2]]
    written = processor(
        text=[PROMPT],
        images=[images],
        audio=[sound(CLIPS[2])],
        videos=[[frames]],
        images_kwargs={"max_soft_tokens": 70},
        videos_kwargs={"video_metadata": [facts]},
        return_tensors="pt",
    )
    golden["prompt"] = {
        "before": tokenizer(PROMPT)["input_ids"],
        "after": runs(written["input_ids"][0].tolist()),
        "types": runs(written["mm_token_type_ids"][0].tolist()),
        "tokens": {field: tokenizer.convert_tokens_to_ids(token) for field, token in zip(FIELDS, TOKENS, strict=True)},
        "characters": {letter: tokenizer.convert_tokens_to_ids(letter) for letter in "0123456789: "},
    }
    (FOLDER / "golden.json").write_text(json.dumps(golden) + "\n", encoding="utf-8")
    del library


if __name__ == "__main__":
    main()
