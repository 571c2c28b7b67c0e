"""Time how long a checkpoint takes from its files to the device.

    python benchmarks/load_files.py E4B --folder /scratch/e4b            writes 15 GB of random weights there, and loads them
    python benchmarks/load_files.py 26B-A4B --folder /scratch/26b --json result.json
    python benchmarks/load_files.py E2B --layers 4 --folder /tmp/e2b     a smaller one, for a CPU

`cached` reads files that are in the page cache. `cold` asks the system to drop them from it first, so it runs at the disk's
speed. The host memory is what the process needs at most while it loads, which on a CPU includes the weights. Each load is a new
process. Starting torch and the GPU is not counted.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from culet.layers.weight.weights import Weights
from culet.models.gemma4 import Gemma4
from culet.models.spec import read_spec
from culet.models.variants import VARIANTS
from culet.models.weight_files import INDEX_FILE, weight_files

SHARD_BYTES = 4 << 30
PREFIX = "model.language_model."
LOAD = """
import json, sys, time, torch
from pathlib import Path
from culet.models.checkpoint import open_checkpoint
from culet.models.weights import load_model
device = torch.device(sys.argv[2])
checkpoint = open_checkpoint(sys.argv[1])
torch.zeros(1, device=device)
def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))
before, began = memory("VmRSS"), time.perf_counter()
model = load_model(checkpoint, dtype=torch.bfloat16, device=device, progress=False)
if device.type == "cuda":
    torch.cuda.synchronize()
seconds = time.perf_counter() - began
print(json.dumps({"seconds": seconds, "host_bytes": memory("VmHWM") - before}))
"""


def shorten(config: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """Return the config with fewer layers, none of which shares its keys."""
    config = copy.deepcopy(config)
    text = config["text_config"]
    text["layer_types"] = text["layer_types"][-num_layers:]
    text["num_hidden_layers"] = num_layers
    text["num_kv_shared_layers"] = 0
    return config


def write_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    """Write random weights in files of 4 GiB."""
    folder.mkdir(parents=True, exist_ok=True)
    model = Gemma4(read_spec(config), Weights(torch.bfloat16, torch.device("meta")), latent=True)
    block = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    weight_map: dict[str, str] = {}
    pending: dict[str, torch.Tensor] = {}

    def write() -> None:
        name = f"part-{len(set(weight_map.values()))}.safetensors"
        save_file(pending, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(pending, name))
        pending.clear()

    for name, placement in model.placements().items():
        count = torch.Size(placement.shape).numel()
        pending[PREFIX + name] = block.repeat(-(-count // len(block)))[:count].view(placement.shape).clone()
        if sum(value.nbytes for value in pending.values()) >= SHARD_BYTES:
            write()
    write()
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))


def drop_from_cache(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("variant", choices=list(VARIANTS))
    parser.add_argument("--folder", type=Path, required=True, help="where the files are, or will be written")
    parser.add_argument("--layers", type=int, help="number of layers (default: all)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runs", type=int, default=3, help="loads from the page cache (default: 3)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    given = parser.parse_args()
    config = VARIANTS[given.variant]
    if not (given.folder / "config.json").exists():
        write_checkpoint(given.folder, config if given.layers is None else shorten(config, given.layers))
    files = weight_files(given.folder)
    total = sum(file.stat().st_size for file in files)
    results: list[dict[str, Any]] = []
    print(f"{given.variant}: {total / 1e9:.2f} GB in {len(files)} files to {given.device}")
    for kind in ["cold", *["cached"] * given.runs]:
        if kind == "cold":
            for file in files:
                drop_from_cache(file)
        command = [sys.executable, "-c", LOAD, str(given.folder), given.device]
        result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        results.append({"kind": kind, "gb_per_s": total / 1e9 / result["seconds"], **result})
        peak = result["host_bytes"] / 2**30
        print(f"{kind:>7}: {result['seconds']:6.2f} s, {results[-1]['gb_per_s']:5.2f} GB/s, host memory {peak:.2f} GiB")
        if given.json:
            given.json.write_text(json.dumps({"variant": given.variant, "num_bytes": total, "runs": results}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
