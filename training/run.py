"""Train the built-in model, its assistant and its DFlash drafter, one after the other, and write them as checkpoints.

python -m training.run --pack out/pack --work out/training --seconds 240,70,80
python -m training.run --pack out/pack --work out/training --mini --steps 40,20,20 --device cpu

A stopped run resumes from the work folder and skips the stages that are done. The folder has the log in `log.jsonl` and the
checkpoints in `embedded/`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from training.learning.batches import Mixture, Part, load_parts
from training.learning.draft_losses import dflash_loss, dflash_row_loss, mtp_loss, mtp_row_loss
from training.learning.loop import Log, LossOf, Settings, Training, text_source
from training.learning.optimiser import Optimiser
from training.learning.prompts import cut_prompts
from training.learning.target_losses import held_out_losses, perplexity, target_loss
from training.models.acceptance import Output, measure
from training.models.drafters import Assistant, DFlash
from training.models.export import copy_tokenizer, read_weights, round_to_bfloat16, write_checkpoint
from training.models.generate import Sampling, generate
from training.models.model import Target, next_token_loss
from training.models.shapes import MINI_ASSISTANT, MINI_DFLASH, MINI_TARGET, AssistantShape, DFlashShape, TargetShape

STAGES = ("target", "assistant", "dflash")
TEMPERATURES = (0.0, 1.0)
OWN_PARTS = ("own-0", "own-1")  # the target's own outputs at temperatures 0 and 1
EXPECTED_SPEED = 1.4e6  # tokens per second of the target's training on an H200
MAX_EPOCHS = 30  # of a part, while other parts have more to give
OWN_LEAST = 0.04  # least share of a part in the prompts of own outputs, so that drafters see all kinds of text
OWN_SHARE = 0.7  # share of the drafters' training tokens; the rest is the text itself


@dataclass(frozen=True)
class Plan:
    """What to train, on what, and for how long."""

    pack: Path
    work: Path
    target: TargetShape
    assistant: AssistantShape
    dflash: DFlashShape
    seconds: tuple[float, ...]  # by stage
    steps: tuple[int, ...]
    row_len: int
    rows: int
    anchors: int
    own_prompts: int
    max_new: int
    outputs: int  # held-out chats to count acceptance over
    device: torch.device
    dtype: torch.dtype
    compiles: bool
    start_from: Path | None  # checkpoints of an earlier run to continue from
    last_share: float  # share of the target's training spent on the last mixture
    rate: float  # factor on the target's peak rates
    sharpness: float  # factor on the trained logits; otherwise a small model rambles at temperature 1

    def settings(self, stage: str) -> Settings:
        index = STAGES.index(stage)
        rows = self.rows if stage == "target" else max(1, self.rows // 2)
        common = Settings(
            stage,
            seconds=self.seconds[index],
            steps=self.steps[index],
            row_len=self.row_len,
            last_phase_from=1 - self.last_share,
            joined=0.1 if stage == "target" else 0.0,
        )
        chunk = max(rows, 64 if self.device.type == "cpu" else 2048)
        common = replace(common, warmup_steps=max(1, min(50, common.steps // 10)))
        if stage != "target":
            common = replace(common, decay_from=0.3)
        elif self.start_from is not None:
            common = replace(common, decay_from=0.1)
        return replace(common, rows_per_batch=rows, rows_per_chunk=chunk // rows * rows)


class Run:
    """The three stages over one work folder."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.log = Log(plan.work / "log.jsonl")
        self.parts, self.held_out = load_parts(plan.pack / "train"), load_parts(plan.pack / "held_out")
        num_tokens = min(EXPECTED_SPEED * plan.seconds[0], plan.steps[0] * plan.rows * plan.row_len)
        self.phases = read_phases(plan.pack, self.parts, num_tokens, plan.last_share)
        seen = {name: sum(phase.weights[name] for phase in self.phases) / len(part.tokens) for name, part in self.parts.items()}
        self.log.write(event="epochs", tokens=num_tokens, epochs={name: round(times, 1) for name, times in seen.items()})
        torch.manual_seed(0)
        self.target = Target(plan.target).to(plan.device)

    def folder(self, stage: str) -> Path:
        names = {"target": "target", "assistant": "assistant", "dflash": "dflash"}
        return self.plan.work / "embedded" / names[stage]

    def train_target(self) -> None:
        plan, target = self.plan, self.target
        if (self.folder("target") / "model.safetensors").exists():
            read_weights(target, self.folder("target"))
            return
        if plan.start_from is not None:
            read_weights(target, plan.start_from / "target")
            with torch.no_grad():
                target.final_gain.div_(plan.sharpness)  # undo the sharpening of the written weights
        head = None
        if plan.compiles:
            head = torch.compile(next_token_loss)
            for block in target.blocks:
                block.compile()
        loss_of = target_loss(target, plan.dtype, head)
        training = Training(
            target,
            Optimiser(target, rate=plan.rate),
            loss_of,
            plan.settings("target"),
            source_of=text_source(self.parts, self.phases, plan.settings("target"), plan.device),
            folder=plan.work,
            log=self.log,
        )
        training.run()
        self._log_held_out(loss_of, 1.0)
        with torch.no_grad():
            target.final_gain.mul_(plan.sharpness)
        self._log_held_out(loss_of, plan.sharpness)
        self._log_samples()
        write_checkpoint(self.folder("target"), plan.target.config(), target)
        copy_tokenizer(plan.pack / "tokenizer", self.folder("target"))
        read_weights(target, self.folder("target"))  # drafters learn from the rounded weights

    def _log_held_out(self, loss_of: LossOf, sharpness: float) -> None:
        plan = self.plan
        losses = held_out_losses(loss_of, self.held_out, row_len=plan.row_len, rows=plan.rows, device=plan.device)
        event = {"stage": "target", "event": "held out", "sharpness": sharpness}
        self.log.write(**event, losses=losses, perplexity=_perplexities(losses))

    def _log_samples(self) -> None:
        """Log a few held-out prompts and the target's answers as token ids."""
        for temperature in TEMPERATURES:
            for output in self.own_outputs(self.held_out, 16, temperature, seed=11):
                self.log.write(event="sample", temperature=temperature, prompt=output.prompt, tokens=output.tokens)

    def own_outputs(self, parts: dict[str, Part], count: int, temperature: float, seed: int) -> list[Output]:
        """Return the target's outputs for prompts from `parts`: training text in the last mixture, or held-out chats."""
        plan = self.plan
        longest = min(plan.row_len - plan.max_new, plan.target.window * 3)
        is_held_out = parts is self.held_out
        shown = self.phases[-1].weights
        least = OWN_LEAST * sum(shown.values())
        weights = {name: max(weight, least) for name, weight in shown.items()}
        prompts = cut_prompts(parts, weights, count, longest=longest, seed=seed, chats_only=is_held_out)
        generator = torch.Generator(plan.device).manual_seed(seed)
        outputs: list[Output] = []
        prompts.sort(key=len)  # a pass pads to its longest prompt
        size = 4096 if plan.device.type == "cuda" else 32
        for begin in range(0, len(prompts), size):
            some = prompts[begin : begin + size]
            sampling = Sampling(temperature)
            texts = generate(self.target, some, max_new=plan.max_new, sampling=sampling, dtype=plan.dtype, generator=generator)
            outputs += [Output(prompt, text) for prompt, text in zip(some, texts, strict=True)]
        return outputs

    def own_parts(self) -> dict[str, Part]:
        """Return the target's outputs as parts to train on. They are generated once and stored."""
        parts = {}
        for number, (name, temperature) in enumerate(zip(OWN_PARTS, TEMPERATURES, strict=True)):
            path = self.plan.work / f"{name}.npz"
            if not path.exists():
                began = time.perf_counter()
                outputs = self.own_outputs(self.parts, self.plan.own_prompts, temperature, seed=number + 1)
                _save_outputs(path, [output for output in outputs if not output.is_repetitive])
                self.log.write(event="own outputs", part=name, outputs=len(outputs), seconds=time.perf_counter() - began)
            stored = np.load(path)
            parts[name] = Part(name, stored["tokens"], stored["ends"], stored["learnt"])
        return parts

    def train_drafter(self, stage: str) -> None:
        plan = self.plan
        drafter: Assistant | DFlash
        if stage == "assistant":
            drafter = Assistant(plan.assistant, plan.target).to(plan.device)
        else:
            drafter = DFlash(plan.dflash, plan.target).to(plan.device)
        if not (self.folder(stage) / "model.safetensors").exists():
            self._train_drafter(stage, drafter)
            round_to_bfloat16(drafter)
            config = plan.assistant.config(plan.target) if stage == "assistant" else plan.dflash.config(plan.target)
            write_checkpoint(self.folder(stage), config, drafter)
        read_weights(drafter, self.folder(stage))
        self.evaluate_drafter(stage, drafter)

    def _train_drafter(self, stage: str, drafter: Assistant | DFlash) -> None:
        plan, own = self.plan, self.own_parts()
        if plan.start_from is not None:
            read_weights(drafter, plan.start_from / stage)
        text = self.phases[-1].weights
        total = sum(text.values())
        weights = {name: (1 - OWN_SHARE) * value / total for name, value in text.items()}
        weights |= dict.fromkeys(OWN_PARTS, OWN_SHARE / len(OWN_PARTS))
        for parameter in self.target.parameters():
            parameter.requires_grad_(False)
        compiled = torch.compile if plan.compiles else _identity
        if isinstance(drafter, Assistant):
            loss_of = mtp_loss(self.target, drafter, plan.dtype, compiled(mtp_row_loss))
        else:
            loss_of = dflash_loss(self.target, drafter, plan.dtype, anchors=plan.anchors, per_row=compiled(dflash_row_loss))
        if plan.compiles:
            for block in [*self.target.blocks, *(drafter.blocks if isinstance(drafter, Assistant) else drafter.layers)]:
                block.compile()
        Training(
            drafter,
            Optimiser(drafter),
            loss_of,
            plan.settings(stage),
            source_of=text_source(self.parts | own, [Mixture(weights, learn_all=False)], plan.settings(stage), plan.device),
            folder=plan.work,
            log=self.log,
        ).run()

    def evaluate_drafter(self, stage: str, drafter: Assistant | DFlash) -> None:
        """Measure and log acceptance on held-out prompts."""
        plan = self.plan
        num_drafts = 3 if stage == "assistant" else plan.dflash.block_size - 1
        for temperature in TEMPERATURES:
            outputs = self.own_outputs(self.held_out, plan.outputs, temperature, seed=7)
            row_len = -(-(max(len(output.prompt) + len(output.tokens) for output in outputs)) // 256) * 256
            with _uncompiled():
                result = measure(self.target, drafter, outputs, num_drafts=num_drafts, row_len=row_len, dtype=plan.dtype)
            self.log.write(stage=stage, event="acceptance", temperature=temperature, **asdict(result))


def _uncompiled() -> AbstractContextManager[object]:
    """Disable compilation for passes of many shapes. Compiling each shape would take longer than running it."""
    return torch.compiler.set_stance("force_eager")


def _identity(function: object) -> object:
    return function


def _perplexities(losses: dict[str, float]) -> dict[str, float]:
    return {name: round(perplexity(loss), 3) for name, loss in losses.items()}


def _save_outputs(path: Path, outputs: list[Output]) -> None:
    tokens = [token for output in outputs for token in (*output.prompt, *output.tokens)]
    lengths = [len(output.prompt) + len(output.tokens) for output in outputs]
    learnt = [flag for output in outputs for flag in (*[False] * len(output.prompt), *[True] * len(output.tokens))]
    arrays = {"tokens": np.array(tokens, np.uint16), "ends": np.cumsum(lengths), "learnt": np.array(learnt, bool)}
    np.savez(path, allow_pickle=False, **arrays)


def read_phases(pack: Path, parts: Mapping[str, Part], num_tokens: float, last_share: float) -> list[Mixture]:
    """Return the mixtures of `pack.json` for about `num_tokens`: the main one, then the last, in which prompts are not goals.

    With a last share of 1 there is only the last one.
    """
    stated = json.loads((pack / "pack.json").read_text())["parts"]
    for name in parts:
        if name not in stated:
            raise ValueError(f"{pack}/pack.json: has no entry for the part {name!r}, only {', '.join(stated)}")
    sizes = {name: float(len(part.tokens)) for name, part in parts.items()}
    phases = []
    for key, share, is_last in (("weight_main", 1 - last_share, False), ("weight_last", last_share, True)):
        if not share:
            continue
        weights = {name: float(stated[name][key]) for name in parts}
        most = {name: MAX_EPOCHS * share * size for name, size in sizes.items()}
        phases.append(Mixture(capped(weights, most, num_tokens * share), learn_all=not is_last))
    return phases


def capped(weights: Mapping[str, float], most: Mapping[str, float], num_tokens: float) -> dict[str, float]:
    """Split `num_tokens` over the parts by their weights, with at most `most` of a part while others have more to give.

    Text that is seen too often is memorised.
    """
    given = dict.fromkeys(weights, 0.0)
    open_parts = {name for name, weight in weights.items() if weight > 0}
    left = num_tokens
    while open_parts and left > 0:
        total = sum(weights[name] for name in open_parts)
        full = {name for name in open_parts if given[name] + left * weights[name] / total >= most[name]}
        if not full:
            for name in open_parts:
                given[name] += left * weights[name] / total
            return given
        for name in full:
            left -= most[name] - given[name]
            given[name] = most[name]
        open_parts -= full
    return given


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(number) for number in text.split(","))


def read_plan(arguments: argparse.Namespace) -> Plan:
    device = torch.device(arguments.device)
    is_mini = arguments.mini
    return Plan(
        pack=arguments.pack,
        work=arguments.work,
        target=MINI_TARGET if is_mini else TargetShape(),
        assistant=MINI_ASSISTANT if is_mini else AssistantShape(),
        dflash=MINI_DFLASH if is_mini else DFlashShape(),
        seconds=_numbers(arguments.seconds),
        steps=tuple(int(number) for number in _numbers(arguments.steps)),
        row_len=128 if is_mini else 2048,
        rows=arguments.rows,
        anchors=8 if is_mini else 96,
        own_prompts=arguments.own_prompts,
        max_new=32 if is_mini else 192,
        outputs=arguments.outputs or (512 if device.type == "cuda" else 8),
        device=device,
        dtype=torch.bfloat16 if device.type == "cuda" or arguments.bfloat16 else torch.float32,
        compiles=device.type == "cuda",
        start_from=arguments.start_from,
        last_share=arguments.last_share,
        rate=arguments.rate,
        sharpness=arguments.sharpness,
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m training.run", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pack", type=Path, required=True, help="folder of the training text")
    parser.add_argument("--work", type=Path, required=True, help="folder for states, log and checkpoints")
    parser.add_argument("--stages", default=",".join(STAGES), help=f"which of {', '.join(STAGES)} (default: all)")
    parser.add_argument("--seconds", default="240,70,80", help="seconds per stage")
    parser.add_argument("--steps", default="1e9,1e9,1e9", help="steps per stage at most")
    parser.add_argument("--rows", type=int, default=32, help="rows per batch of the target (default: 32)")
    parser.add_argument("--own-prompts", type=int, default=16_384, help="own outputs for the drafters, per temperature")
    parser.add_argument("--outputs", type=int, help="held-out chats to count acceptance over (default: 512; on a CPU 8)")
    parser.add_argument("--start-from", type=Path, help="continue from the checkpoints of an earlier run")
    parser.add_argument("--last-share", type=float, default=0.3, help="share of the target's training in the last mixture")
    parser.add_argument(
        "--rate", type=float, default=1.0, help="factor on the target's rates (default: 1; less to continue a run)"
    )
    parser.add_argument("--sharpness", type=float, default=1.3, help="factor on the target's logits (default: 1.3)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--bfloat16", action="store_true", help="compute in bfloat16 on a CPU too")
    parser.add_argument("--mini", action="store_true", help="a model of a few thousand weights, for tests")
    given = parser.parse_args(arguments)
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.config.recompile_limit = 64
    run = Run(read_plan(given))
    stages = given.stages.split(",")
    run.train_target()
    failed = False
    for stage in STAGES[1:]:
        if stage in stages:
            try:
                run.train_drafter(stage)
            except Exception:  # continue with the other drafter
                failed = True
                run.log.write(stage=stage, event="failed", trace=traceback.format_exc())
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
