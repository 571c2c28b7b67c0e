"""The model card of the built-in model. Every number comes from the files that training and the gate wrote.

python -m training.card --pack out/pack --work out/training --gate out/gate.json > card.md
python -m training.card --before culet/embedded/README.md --work out/see1 out/see --gate out/gate.json > card.md

With `--before`, the runs continued the model of that card. Its text and its training are kept, and the runs are added.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from training.gate import DRAFTING, GOALS, UNLIKE
from training.models.shapes import AssistantShape, DFlashShape, TargetShape, TowerShape

_NAMES = {"target": "the model", "assistant": "MTP assistant", "dflash": "DFlash drafter"}
_SEEING = {"tower": "tower", "see": "tower and decoder"} | {name: _NAMES[name] for name in ("assistant", "dflash")}
_LIMITS = """\
- It is a demonstration that runs anywhere, not a source of knowledge. Its answers may be wrong, and it does not know when.
- English only. It was trained on conversations of a few turns; beyond 2,048 tokens it was not trained.
- It knows the capitals, elements and words of its training text, sums of small numbers, and little else.
- It calls tools and writes JSON for plain requests. With many tools, nested schemas or long texts it fails.
- It sees drawn shapes, single words and numbers, in pictures of 70 soft tokens. It does not know photographs.
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


def seeing_facts(logs: list[list[dict[str, Any]]]) -> list[str]:
    """Return table lines with the time and final loss of each stage of the runs that taught seeing."""
    lines = [_row("run", "stage", "steps", "seconds", "pictures", "last loss", "right in its check")]
    lines.append(_row("---", "---", *["---:"] * 5))
    for number, log in enumerate(logs, start=1):
        for stage, name in _SEEING.items():
            entries = [entry for entry in log if entry.get("stage") == stage]
            steps = [entry for entry in entries if "loss" in entry]
            if steps:
                shown = [f"{entry['pictures']:,}" for entry in entries if "pictures" in entry] or [""]
                right = [f"{entry['right']['all']:.1%}" for entry in entries if "right" in entry] or [""]
                last = steps[-1]
                lines.append(_row(number, name, f"{last['step']:,}", last["seconds"], *shown, last["loss"], *right))
    return lines


def kept_facts(card: str) -> dict[str, str]:
    """Return the text, the training table and the sharpness of a card."""
    [text] = re.findall(r"^## Text\n\n(.*?)\n\nThe part `distilled`", card, re.MULTILINE | re.DOTALL)
    [training] = re.findall(r"^## Training\n\n(\|.*?\|)\n\n", card, re.MULTILINE | re.DOTALL)
    [sharpness] = re.findall(r"logits were scaled by ([\d.]+),", card)
    return {"text": text, "training": training, "sharpness": sharpness}


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
trained logits were scaled by {sharpness}, which makes draws at temperature 1 more coherent.
{seeing}
## Evaluation

`python -m training.gate`, greedy, float32, on questions that are not in the training text:

{evaluation}

## Limits

{limits}
"""


_SEEING_TEXT = """
## Seeing

{table}

`training/see.py` taught the model to see, with pictures drawn meanwhile. Each run continued from the weights of the one before.
The decoder learnt with the tower and was kept close to its former self on text. The check asks 400 questions like the gate's.
"""


def shape_line() -> str:
    target, assistant, dflash, tower = TargetShape(), AssistantShape(), DFlashShape(), TowerShape()
    return (
        f"{target.num_layers} layers ({target.pattern}: s sliding with a window of {target.window}, g global with K=V), "
        f"width {target.hidden_size}, MLP {target.mlp_width}, {target.num_heads} query heads of {target.head_dim} and "
        f"{target.global_head_dim}, one KV head, {target.vocab_size:,} tokens. "
        f"The assistant has {len(assistant.pattern)} layers, the DFlash drafter {len(dflash.pattern)} "
        f"and blocks of {dflash.block_size}. "
        f"The vision tower has {tower.num_layers} layers of width {tower.hidden_size} with {tower.num_heads} heads."
    )


def card(facts: Mapping[str, str], works: Sequence[Path], gate: Path) -> str:
    """Return the whole card. The last work folder has the checkpoints."""
    logs, scores = [read_log(work) for work in works], json.loads(gate.read_text())
    seers = [log for log in logs if any(entry.get("stage") == "see" for entry in log)]
    return _ABOUT.format(
        shape=shape_line(),
        sizes="\n".join(sizes(works[-1])),
        seeing=_SEEING_TEXT.format(table="\n".join(seeing_facts(seers))) if seers else "",
        evaluation="\n".join(evaluation(scores, logs[-1])),
        limits=_LIMITS,
        **facts,
    )


def trained_facts(pack: Path, work: Path) -> dict[str, str]:
    """Return the text, the training table and the sharpness of a model that was trained from the pack."""
    log = read_log(work)
    sharpness = [1.0, *(entry["sharpness"] for entry in log if "sharpness" in entry)][-1]
    text = data_facts(json.loads((pack / "pack.json").read_text()))
    return {"text": "\n".join(text), "training": "\n".join(training_facts(log)), "sharpness": f"{sharpness:g}"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m training.card", description=(__doc__ or "").split("\n")[0])
    origin = parser.add_mutually_exclusive_group(required=True)
    origin.add_argument("--pack", type=Path, help="folder of the training text")
    origin.add_argument("--before", type=Path, help="card of the model that the runs continued")
    parser.add_argument("--work", type=Path, nargs="+", required=True, help="work folders of the runs, in order")
    parser.add_argument("--gate", type=Path, required=True, help="results of the gate")
    given = parser.parse_args()
    facts = kept_facts(given.before.read_text()) if given.before else trained_facts(given.pack, given.work[0])
    print(card(facts, given.work, given.gate), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
