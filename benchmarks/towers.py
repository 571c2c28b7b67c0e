"""Measure vision towers at their real size: time per image against the floor, and precision against transformers.

    python benchmarks/towers.py                                              # on a GPU: E4B and 31B, 1 and 16 images
    python benchmarks/towers.py --models E4B --layers 2 --tokens 6 --images 1 2 --repeats 2 --dtype float32    # on a CPU

The weights are random and the same for both. The floor is the time of the tower's matrix products at the best rate that was
measured on the GPU. Times include the copy of the pixels to the GPU. `mine` and `theirs` are the distances of the rows from
those of transformers in float32, relative to their norm, and `ratio` is mine over theirs. This needs transformers.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from culet.hardware import find_peaks
from culet.layers.weight.placement import Piece, Placement, whole
from culet.media.items import MediaItem, MediaKind
from culet.models.checkpoint import Checkpoint, open_checkpoint
from culet.models.random_weights import fill_randomly
from culet.models.towers import Towers, load_towers
from culet.models.towers.spec import VisionSpec

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SEEN = frozenset({MediaKind.IMAGE})


def random_checkpoint(model: str, num_layers: int | None) -> Checkpoint:
    """Return a random checkpoint with the dimensions of `model`, and a tower of `num_layers` layers."""
    # All norms of 1 would make attention a maximum, which turns rounding errors into other answers.
    checkpoint = open_checkpoint(f"random:{model},draw=calm")
    config = copy.deepcopy(checkpoint.config)
    if num_layers is not None:
        config["vision_config"]["num_hidden_layers"] = num_layers
    return replace(checkpoint, config=config)


def make_image(num_tokens: int, token_pixels: int, seed: int) -> MediaItem:
    """Make a smooth random image whose sides are as equal as `num_tokens` allows."""
    rows = next(rows for rows in range(int(num_tokens**0.5), 0, -1) if num_tokens % rows == 0)
    height, width = rows * token_pixels, num_tokens // rows * token_pixels
    small = torch.rand(1, 3, 12, 12, generator=torch.Generator().manual_seed(seed))
    pixels = torch.nn.functional.interpolate(small, size=(height, width), mode="bicubic").clamp(0, 1).mul(255)
    data = pixels[0].permute(1, 2, 0).to(torch.uint8).contiguous().numpy().tobytes()
    return MediaItem(MediaKind.IMAGE, seed.to_bytes(8, "big"), num_tokens, (height, width, 3), data)


def seconds_of(run: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Return the seconds of each of `repeats` calls, after one that warms up."""
    times = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return times[1:]


def measure_time(towers: Towers, spec: VisionSpec, options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    peaks = find_peaks(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    results = []
    for num_images in options.images:
        images = [make_image(options.tokens, spec.token_pixels, seed) for seed in range(num_images)]
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times = seconds_of(lambda: towers.encode(images), device, options.repeats)  # noqa: B023 (called at once)
        result: dict[str, Any] = {"images": num_images, "tokens": options.tokens, "ms": round(1e3 * median(times), 3)}
        result["ms_per_image"] = round(result["ms"] / num_images, 3)
        if peaks is not None:
            floor = 1e3 * num_images * spec.flops(options.tokens) / peaks.flops_per_s
            result |= {"floor_ms": round(floor, 3), "times_floor": round(result["ms"] / floor, 2)}
            result["peak_mb"] = round((torch.cuda.max_memory_allocated() - towers.num_bytes) / 1e6)
        results.append(result)
    return results


# Precision


class Reference:
    """transformers' tower and projector with the weights of a random checkpoint."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import Gemma4Config
        from transformers.models.gemma4.modeling_gemma4 import Gemma4MultimodalEmbedder, Gemma4VisionModel

        values = {key: value for key, value in checkpoint.config.items() if key not in ("architectures", "model_type")}
        config = Gemma4Config(**(copy.deepcopy(values) | {"audio_config": None}))
        with torch.device(device):
            self.tower = Gemma4VisionModel(config.vision_config).eval()
            self.projector = Gemma4MultimodalEmbedder(config.vision_config, config.text_config).eval()
        frequencies = {name: buffer.clone() for name, buffer in self.tower.named_buffers() if name.endswith("inv_freq")}
        self.tower.to(dtype)
        self.projector.to(dtype)
        self.dtype, self.device = dtype, device
        places: dict[str, Placement] = {}
        for part, module in (("vision_tower", self.tower), ("embed_vision", self.projector)):
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                if name in frequencies:
                    tensor.data = frequencies[name]  # casting the module has rounded it
                else:
                    piece = Piece(tensor.data, whole(tensor.shape))
                    places[f"model.{part}.{name}"] = Placement(tuple(tensor.shape), (piece,))
        assert checkpoint.random is not None
        fill_randomly(places, checkpoint.random, device)

    @torch.no_grad()
    def encode(self, image: MediaItem, patch: int) -> Tensor:
        height, width, _ = image.shape
        pixels = torch.from_numpy(np.frombuffer(image.data, dtype=np.uint8).reshape(image.shape).copy()) * (1 / 255)
        rows, columns = height // patch, width // patch
        patches = pixels.view(rows, patch, columns, patch, 3).transpose(1, 2).reshape(1, rows * columns, -1)
        y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        positions = torch.stack((x, y), -1).view(1, -1, 2)
        hidden = self.tower(patches.to(self.device), positions.to(self.device)).last_hidden_state
        projected: Tensor = self.projector(inputs_embeds=hidden)
        return projected


def measure_precision(
    checkpoint: Checkpoint, towers: Towers, spec: VisionSpec, options: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    torch.backends.cuda.matmul.allow_tf32 = False
    image = make_image(options.tokens, spec.token_pixels, 7)
    (rows,) = towers.encode([image])
    exact = Reference(checkpoint, torch.float32, device).encode(image, spec.patch_size)
    theirs = Reference(checkpoint, DTYPES[options.dtype], device).encode(image, spec.patch_size)
    errors = [float((each.float() - exact).norm() / exact.norm()) for each in (rows, theirs)]
    ratio = round(errors[0] / errors[1], 3) if errors[1] else None
    return {"mine": errors[0], "theirs": errors[1], "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["E4B", "31B"], help="variants with a vision tower")
    parser.add_argument("--tokens", type=int, default=280, help="soft tokens of an image")
    parser.add_argument("--images", type=int, nargs="+", default=[1, 16], help="images in one call")
    parser.add_argument("--layers", type=int, help="layers of the tower (default: all)")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    parser.add_argument("--out", type=Path, help="write the results to this file as JSON")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results: dict[str, Any] = {}
    for model in options.models:
        checkpoint = random_checkpoint(model, options.layers)
        towers = load_towers(checkpoint, dtype=DTYPES[options.dtype], device=device, kinds=SEEN, progress=False)
        assert towers is not None
        spec = towers.specs.vision
        assert isinstance(spec, VisionSpec), f"{model} has no vision encoder"
        results[model] = {"time": measure_time(towers, spec, options, device)}
        for line in results[model]["time"]:
            print(model, line, flush=True)
        try:
            results[model]["precision"] = measure_precision(checkpoint, towers, spec, options, device)
        except ImportError as error:
            results[model]["precision"] = f"not measured: {error}"
        print(model, results[model]["precision"], flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
