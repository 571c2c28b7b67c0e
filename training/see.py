"""Teach the built-in model to see: train a vision tower on pictures that are drawn meanwhile, then match the drafters to it.

python -m training.see --start-from culet/embedded --work out/see --seconds 280
python -m training.see --start-from culet/embedded --work out/see --seconds 280 --decoder frozen

First only the tower learns. Then the decoder learns with it, slowly, and stays close to its former self on text. With
`--decoder frozen` it never changes, so text and drafters stay as they are. A stopped run resumes from the work folder. The
checkpoints are in its folder `embedded`.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from culet.text.template import BUILT_IN
from training.data.pack import write_made
from training.data.pictures.chats import BUDGET, Reader, gate_picture, num_soft_tokens, resized
from training.data.pictures.questions import is_right
from training.learning.batches import Mixture, load_parts
from training.learning.loop import Log, Settings, SourceOf, Training, text_source
from training.learning.optimiser import Optimiser, Optimisers
from training.learning.pictures import Drawing, PictureFeed, picture_source
from training.learning.see_losses import see_loss
from training.models.export import copy_tokenizer, read_weights, write_checkpoint
from training.models.generate import Sampling, Seen, generate
from training.models.model import Target
from training.models.shapes import MINI_TARGET, MINI_TOWER, TargetShape, TowerShape, processor_config
from training.models.tower import Seer, Tower, row_scale
from training.run import main as train_drafters

CHECK_SEEDS = 1_000_000  # pictures to check with, which have held-out combinations and are not those of the gate
TEXT_ROWS, TEXT_ROW_LEN = 8, 1024
ROWS_PER_PICTURE = 0.625  # of 512 tokens, which hold about five chats
FROZEN, TUNED = "frozen", "tuned"


@dataclass(frozen=True)
class Plan:
    """What to train, from what, and for how long."""

    start_from: Path
    work: Path
    pack: Path
    seconds: float
    steps: int
    is_tuned: bool
    frozen_share: float  # of the time in which only the tower learns
    decoder_rate: float  # factor on the decoder's rates
    target: TargetShape
    tower: TowerShape
    drawing: Drawing
    text_row_len: int
    num_checked: int
    device: torch.device
    dtype: torch.dtype
    compiles: bool

    def settings(self, name: str, share: float, decay_from: float, log_every: int) -> Settings:
        steps = max(1, round(self.steps * share))
        warmup = max(1, min(100, steps // 10))
        return Settings(
            name,
            seconds=self.seconds * share,
            steps=steps,
            row_len=self.text_row_len,
            rows_per_batch=TEXT_ROWS,
            rows_per_chunk=64 * TEXT_ROWS,
            decay_from=decay_from,
            warmup_steps=warmup,
            log_every=log_every,
        )


def open_seer(plan: Plan) -> Seer:
    """Return the decoder of `start_from`, with its tower or a new one."""
    torch.manual_seed(0)
    target, folder = Target(plan.target), plan.start_from / "target"
    read_weights(target, folder)
    seer = Seer(target, Tower(plan.tower, row_scale(target)))
    if "vision_config" in json.loads((folder / "config.json").read_text()):
        read_weights(seer, folder)
    return seer.to(plan.device)


def train(plan: Plan, log: Log) -> Seer:
    """Train the tower, and then the decoder with it."""
    seer = open_seer(plan)
    teacher = copy.deepcopy(seer.target).requires_grad_(False)
    if plan.compiles:  # rows of text and of chats have one shape each; pictures have several
        for block in [*seer.target.blocks, *teacher.blocks]:
            block.compile()
        for layer in seer.tower.layers:
            layer.compile(dynamic=True)
    seer.target.requires_grad_(False)
    share = plan.frozen_share if plan.is_tuned else 1.0
    if share > 0:
        settings = plan.settings("tower", share, 0.99 if plan.is_tuned else 0.4, log_every=50)
        source_of = picture_source(plan.drawing, plan.device)
        _run(seer, Optimisers(Optimiser(seer.tower)), settings, source_of, None, plan, log)
    if plan.is_tuned:
        seer.target.requires_grad_(True)
        settings = plan.settings("see", 1 - share, 0.4, log_every=50)
        both = Optimisers(Optimiser(seer.tower), Optimiser(seer.target, rate=plan.decoder_rate))
        text_of = text_source(load_parts(plan.pack / "train"), [_text_mixture(plan.pack)], settings, plan.device)
        _run(seer, both, settings, picture_source(plan.drawing, plan.device, text_of), teacher, plan, log)
        seer.target.requires_grad_(False)
    return seer


def _run(
    seer: Seer, optimisers: Optimisers, settings: Settings, source_of: SourceOf, teacher: Target | None, plan: Plan, log: Log
) -> None:
    loss_of = see_loss(seer, plan.dtype, teacher)
    training = Training(seer, optimisers, loss_of, settings, source_of=source_of, folder=plan.work, log=log)
    training.run()
    assert isinstance(training.source, PictureFeed)
    waited = round(training.source.waited, 1)
    pictures = training.step * plan.drawing.num_pictures
    log.write(stage=settings.name, event="done", pictures=pictures, seconds=round(training.elapsed, 1), waited=waited)


def _text_mixture(pack: Path) -> Mixture:
    parts = json.loads((pack / "pack.json").read_text())["parts"]
    return Mixture({name: float(entry["weight_last"]) for name, entry in parts.items()})


@torch.no_grad()
def check(seer: Seer, tokenizer_folder: Path, seeds: Sequence[int], dtype: torch.dtype) -> dict[str, float]:
    """Return the share of right answers, in total and by kind of question, about pictures of the gate's sort."""
    device, read = seer.target.embedding.device, Reader(tokenizer_folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    prompts, features, asked = [], [], []
    for seed in seeds:
        _, pixels, question = gate_picture(seed)
        picture = resized(pixels)
        asked.append(question)
        prompts.append(read.prompt(question.text, num_soft_tokens(picture)))
        features.append(seer.tower(torch.from_numpy(picture)[None].to(device), dtype)[0])
    seen = Seen(features, read.image_id)
    outputs = generate(seer.target, prompts, max_new=32, sampling=Sampling(0.0), dtype=dtype, seen=seen)
    right, count = Counter[str](), Counter[str]()
    for question, output in zip(asked, outputs, strict=True):
        is_good = is_right(question.kind, tokenizer.decode(output), question.wanted)
        for kind in ("all", question.kind):
            right[kind] += is_good
            count[kind] += 1
    return {kind: round(right[kind] / count[kind], 3) for kind in count}


def export(seer: Seer, plan: Plan) -> None:
    """Write the target with its tower, and the files that say how pictures are prepared."""
    folder = plan.work / "embedded" / "target"
    copy_tokenizer(plan.start_from / "target", folder)
    shutil.copyfile(BUILT_IN, folder / "chat_template.jinja")
    (folder / "processor_config.json").write_text(json.dumps(processor_config(BUDGET), indent=2) + "\n")
    write_checkpoint(folder, plan.target.config(plan.tower), seer)


def read_plan(given: argparse.Namespace) -> Plan:
    device = torch.device(given.device)
    mini = given.mini
    tokenizer_file = given.start_from / "target" / "tokenizer.json"
    workers = given.workers if given.workers is not None else max(1, (os.cpu_count() or 2) - 2)
    drawing = Drawing(tokenizer_file, given.pictures, max(1, round(given.pictures * ROWS_PER_PICTURE))).with_workers(workers)
    return Plan(
        start_from=given.start_from,
        work=given.work,
        pack=given.pack or given.work / "pack",
        seconds=given.seconds,
        steps=given.steps,
        is_tuned=given.decoder == TUNED,
        frozen_share=given.frozen_share,
        decoder_rate=given.decoder_rate,
        target=MINI_TARGET if mini else TargetShape(),
        tower=MINI_TOWER if mini else TowerShape(),
        drawing=drawing,
        text_row_len=128 if mini else TEXT_ROW_LEN,
        num_checked=given.checked,
        device=device,
        dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
        compiles=device.type == "cuda" and not given.eager,
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m training.see", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--start-from", type=Path, required=True, help="folder with target, assistant and dflash")
    parser.add_argument("--work", type=Path, required=True, help="folder for states, log and checkpoints")
    parser.add_argument(
        "--pack", type=Path, help="folder of the training text (default: text made by code, in the work folder)"
    )
    parser.add_argument("--text-scale", type=float, default=0.15, help="amount of text made by code (default: 0.15)")
    parser.add_argument("--seconds", type=float, default=280, help="seconds for the tower and the decoder (default: 280)")
    parser.add_argument("--steps", type=int, default=1 << 40, help="steps for the tower and the decoder at most")
    parser.add_argument("--drafter-seconds", default="30,45", help="seconds for the assistant and the drafter (default: 30,45)")
    parser.add_argument("--drafter-steps", default="1e9,1e9,1e9", help="steps per stage of training.run at most")
    parser.add_argument("--own-prompts", type=int, default=4096, help="own outputs for the drafters, per temperature")
    parser.add_argument("--decoder", choices=(TUNED, FROZEN), default=TUNED, help="whether the decoder learns (default: tuned)")
    parser.add_argument("--frozen-share", type=float, default=0.35, help="share of the time in which only the tower learns")
    parser.add_argument("--decoder-rate", type=float, default=0.1, help="factor on the decoder's rates (default: 0.1)")
    parser.add_argument("--pictures", type=int, default=128, help="pictures per batch (default: 128)")
    parser.add_argument("--workers", type=int, help="processes that draw (default: all processors but two)")
    parser.add_argument("--checked", type=int, default=400, help="questions to check the result with (default: 400)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eager", action="store_true", help="do not compile the decoder's layers")
    parser.add_argument("--mini", action="store_true", help="a model of a few thousand weights, for tests")
    given = parser.parse_args(arguments)
    plan = read_plan(given)
    log = Log(plan.work / "log.jsonl")
    log.write(event="begun", decoder=given.decoder, seconds=plan.seconds, workers=plan.drawing.num_workers)
    if plan.is_tuned and not (plan.pack / "pack.json").exists():
        write_made(plan.pack, plan.start_from / "target", scale=given.text_scale, jobs=os.cpu_count() or 2)
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.config.recompile_limit = 64
    if not (plan.work / "embedded" / "target" / "model.safetensors").exists():
        seer = train(plan, log)
        with torch.compiler.set_stance("force_eager"):
            seeds = range(CHECK_SEEDS, CHECK_SEEDS + plan.num_checked)
            log.write(stage="see", event="checked", right=check(seer, plan.start_from / "target", seeds, plan.dtype))
        export(seer, plan)
    if not plan.is_tuned:
        for name in ("assistant", "dflash"):
            shutil.copytree(plan.start_from / name, plan.work / "embedded" / name, dirs_exist_ok=True)
        return 0
    options = ["--pack", plan.pack, "--work", plan.work, "--start-from", plan.start_from, "--last-share", 1]
    options += ["--stages", "assistant,dflash", "--seconds", f"60,{given.drafter_seconds}", "--device", given.device]
    options += ["--own-prompts", given.own_prompts, "--steps", given.drafter_steps, *(["--mini"] if given.mini else [])]
    return train_drafters([str(option) for option in options])


if __name__ == "__main__":
    sys.exit(main())
