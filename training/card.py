"""The model card of the built-in model. Every number comes from the files that training and the gate wrote.

python -m training.card --pack out/pack --work out/training --gate out/gate.json > culet/embedded/README.md
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from training.gate import DRAFTING, GOALS, UNLIKE
from training.models.shapes import AssistantShape, DFlashShape, TargetShape

_NAMES = {"target": "the model", "assistant": "MTP assistant", "dflash": "DFlash drafter"}
_LIMITS = """\
- It is a demonstration that runs anywhere, not a source of knowledge. Its answers may be wrong, and it does not know when.
- English only. It was trained on conversations of a few turns; beyond 2,048 tokens it was not trained.
- It knows the capitals, elements and words of its training text, sums of small numbers, and little else.
- It calls tools and writes JSON for plain requests. With many tools, nested schemas or long texts it fails.
- Nothing beyond the choice of its texts makes it safe. Do not expose it to the public."""


def read_log(work: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (work / "log.jsonl").read_text().splitlines()]


def _row(*cells: object) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def sizes(work: Path) -> list[str]:
    """Return table lines with the parameters and bytes of each checkpoint."""
    lines = [_row("part", "parameters", "bytes"), _row("---", "---:", "---:")]
    total = 0
    for folder, name in _NAMES.items():
        path = work / "embedded" / folder / "model.safetensors"
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        count = 0
        for tensor, facts in header.items():
            if tensor != "__metadata__":
                begin, end = facts["data_offsets"]
                count += (end - begin) // 2
        total += path.stat().st_size
        lines.append(_row(name, f"{count:,}", f"{path.stat().st_size:,}"))
    return [*lines, _row("together", "", f"{total:,}")]


def training_facts(log: list[dict[str, Any]]) -> list[str]:
    """Return table lines with the time and final loss of each stage and run. A run begins with its `epochs` entry."""
    lines = [_row("run", "stage", "steps", "seconds", "tokens seen", "last loss"), _row("---", "---", *["---:"] * 4)]
    starts = [index for index, entry in enumerate(log) if entry.get("event") == "epochs"]
    number = 0
    for begin, end in zip(starts, [*starts[1:], len(log)], strict=True):
        rows = []
        for stage, name in _NAMES.items():
            steps = [entry for entry in log[begin:end] if entry.get("stage") == stage and "loss" in entry]
            if steps:
                last = steps[-1]
                rows.append((name, f"{last['step']:,}", last["seconds"], f"{last['tokens']:,}", last["loss"]))
        number += bool(rows)
        lines += [_row(number, *row) for row in rows]
    return lines


def data_facts(pack: dict[str, Any]) -> list[str]:
    lines = [_row("part", "documents", "tokens", "share, main phase", "share, last phase"), _row("---", *["---:"] * 4)]
    for name, part in pack["parts"].items():
        shares = [f"{part[key]:.0%}" for key in ("weight_main", "weight_last")]
        lines.append(_row(name, f"{part['documents']:,}", f"{part['tokens']:,}", *shares))
    lines += ["", _row("source", "package", "licence", "use"), _row("---", "---", "---", "---")]
    for name, source in pack["sources"].items():
        lines.append(_row(name, f"{source['package']} ({source['registry']})", source["licence"], source["use"]))
    return lines


def evaluation(gate: dict[str, Any], log: list[dict[str, Any]]) -> list[str]:
    lines = [_row("", "share", "goal"), _row("---", "---:", "---:")]
    lines += [
        _row(name, f"{share:.1%}", f"{GOALS[name]:.0%}" if name in GOALS else "") for name, share in gate["shares"].items()
    ]
    details = gate["details"]
    perplexity = ", ".join(f"{name} {value:.2f}" for name, value in details["held-out perplexity"].items())
    lines += ["", f"Held-out perplexity (of chats: what the model writes): {perplexity}."]
    lines.append(
        "Held-out documents of the parts made by code come from the same templates as the training text: they show that"
    )
    lines.append("it learnt the templates. Conversations between people (chitchat) are foreign to it.")
    lines.append("")
    difference, compared = details["largest difference from transformers"], details["answers compared with transformers'"]
    lines.append(f"Culet and transformers, float32: log-probabilities differ by at most {difference:.1e}, ")
    lines[-1] += f"{details[UNLIKE]} of {compared} answers differ."
    lines += ["", _row("tokens emitted per verify", "training scripts", "engine"), _row("---", "---:", "---:")]
    for stage, method in (("assistant", "mtp"), ("dflash", "dflash")):
        counted = [entry for entry in log if entry.get("stage") == stage and entry.get("event") == "acceptance"]
        for entry in {entry["temperature"]: entry for entry in counted}.values():  # the last entry for each temperature
            name = f"{method} at temperature {entry['temperature']:g}"
            lines.append(_row(name, entry["tokens_per_verify"], details.get(DRAFTING, {}).get(name, "")))
    return lines


_ABOUT = """\
# Culet's built-in model

A small Gemma 4, trained from scratch, so that Culet runs without a GPU, an account or a download, and its tests have real text.
Architecture, tensor names, chat template and file formats are those of Google's Gemma 4. Weights, training text and tokenizer
are not: it contains nothing of Google's models. Licence: Apache-2.0, like Culet.

{shape}

{sizes}

## Text

{text}

The part `distilled` was written by Qwen2.5-Coder-1.5B-Instruct (Apache-2.0).

## Training

{training}

One NVIDIA H200, bfloat16 with float32 weights, Muon and AdamW; `training/run.py` does all of it. A second run continued from
the first one's checkpoints on the last mixture only. The drafters learnt from the model's own outputs and from the text. The
trained logits were scaled by {sharpness:g}, which makes draws at temperature 1 more coherent.

## Evaluation

`python -m training.gate`, greedy, float32, on questions that are not in the training text:

{evaluation}

## Limits

{limits}
"""


def shape_line() -> str:
    target, assistant, dflash = TargetShape(), AssistantShape(), DFlashShape()
    return (
        f"{target.num_layers} layers ({target.pattern}: s sliding with a window of {target.window}, g global with K=V), "
        f"width {target.hidden_size}, MLP {target.mlp_width}, {target.num_heads} query heads of {target.head_dim} and "
        f"{target.global_head_dim}, one KV head, {target.vocab_size:,} tokens. "
        f"The assistant has {len(assistant.pattern)} layers, the DFlash drafter {len(dflash.pattern)} "
        f"and blocks of {dflash.block_size}."
    )


def card(pack: Path, work: Path, gate: Path) -> str:
    """Return the whole card."""
    facts, log, scores = json.loads((pack / "pack.json").read_text()), read_log(work), json.loads(gate.read_text())
    return _ABOUT.format(
        shape=shape_line(),
        sizes="\n".join(sizes(work)),
        text="\n".join(data_facts(facts)),
        training="\n".join(training_facts(log)),
        sharpness=[1.0, *(entry["sharpness"] for entry in log if "sharpness" in entry)][-1],
        evaluation="\n".join(evaluation(scores, log)),
        limits=_LIMITS,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m training.card", description=(__doc__ or "").split("\n")[0])
    for name in ("pack", "work", "gate"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    given = parser.parse_args()
    print(card(given.pack, given.work, given.gate), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
