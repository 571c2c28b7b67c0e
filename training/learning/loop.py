"""The training loop, with saved states to resume from and a time limit.

Progress (0 to 1) is the larger of steps done and seconds spent, each as a share of its limit. Rates and the mixture of texts
follow progress, so that a run ends with its schedule complete when its time is up.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from training.learning.batches import Feed, Mixture, Packer, Part
from training.learning.optimiser import Optimiser, Optimisers, rate_factor

LossOf = Callable[[Any], tuple[Tensor, Tensor]]  # from a batch: the sum of losses, and the sum of their weights


class Source(Protocol):
    """Where batches come from. A batch says how many tokens it has in `num_tokens`."""

    phase: int
    num_phases: int

    def batches(self) -> Iterator[Any]: ...

    def state(self) -> dict[str, Any]: ...


SourceOf = Callable[[Mapping[str, Any] | None], Source]  # from the state to continue with, or None


@dataclass(frozen=True)
class Settings:
    """How a module is trained, and for how long."""

    name: str
    seconds: float = 1e9  # including compilation
    steps: int = 1 << 40
    row_len: int = 2048
    rows_per_batch: int = 32
    rows_per_chunk: int = 4096
    joined: float = 0.0  # share of rows whose documents see the ones before them
    seed: int = 0
    decay_from: float = 0.5
    last_phase_from: float = 0.7  # progress at which the second mixture begins
    warmup_steps: int = 50
    log_every: int = 50
    save_every_s: float = 60.0


class Log:
    """JSON lines, written to disk immediately and printed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, **entry: Any) -> None:
        line = json.dumps(entry, ensure_ascii=False)
        with self._path.open("a") as file:
            file.write(line + "\n")
        print(line[:400], flush=True)


class Training:
    """A module being trained. `run` trains until a limit is reached."""

    def __init__(
        self,
        module: nn.Module,
        optimiser: Optimiser | Optimisers,
        loss_of: LossOf,
        settings: Settings,
        *,
        source_of: SourceOf,
        folder: Path,
        log: Log,
    ) -> None:
        self.module, self.optimiser, self.loss_of, self.settings = module, optimiser, loss_of, settings
        self.step, self.elapsed = 0, 0.0
        self.stop_at: int | None = None  # stop early at this step; the run can be resumed
        self._log = log
        self._path = folder / f"{settings.name}.state.pt"
        self._device = next(module.parameters()).device
        self.source = source_of(self._resume() if self._path.exists() else None)
        self._batches = self.source.batches()

    @property
    def progress(self) -> float:
        return max(self.step / self.settings.steps, self.elapsed / self.settings.seconds)

    def run(self) -> None:
        settings, began, before = self.settings, time.perf_counter(), self.elapsed
        saved, logged, tokens = began, began, 0
        sums: list[tuple[Tensor, Tensor]] = []
        while self.progress < 1 and self.step != self.stop_at:
            batch = next(self._batches)
            total, weight = self.loss_of(batch)
            (total / weight.clamp(min=1)).backward()
            factor = rate_factor(self.progress, self.step, warmup_steps=settings.warmup_steps, decay_from=settings.decay_from)
            self.optimiser.step(factor)
            sums.append((total.detach(), weight))
            self.step += 1
            tokens += batch.num_tokens
            if self.step % settings.log_every == 0:
                loss = float(sum(total for total, _ in sums) / sum(weight for _, weight in sums))
                now = time.perf_counter()
                speed = round(tokens / (now - logged))
                entry = {"stage": settings.name, "step": self.step, "seconds": round(self.elapsed, 1), "loss": round(loss, 4)}
                entry["tokens"] = self.step * batch.num_tokens
                self._log.write(**entry, rate=round(factor, 4), phase=self.source.phase, tokens_per_s=speed)
                sums, logged, tokens = [], now, 0
            now = time.perf_counter()
            self.elapsed = before + now - began
            if self.progress >= settings.last_phase_from and self.source.phase + 1 < self.source.num_phases:
                self.source.phase += 1
            if now - saved > settings.save_every_s:
                self.save()
                saved = now
        self.save()

    def save(self) -> None:
        """Save everything needed to resume. The old file stays until the new one is complete."""
        state = {
            "module": self.module.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "step": self.step,
            "elapsed": self.elapsed,
            "source": self.source.state(),
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        torch.save(state, new)
        new.replace(self._path)

    def _resume(self) -> dict[str, Any]:
        """Load the saved state. Return that of the source."""
        state = torch.load(self._path, map_location=self._device, weights_only=True)
        self.module.load_state_dict(state["module"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step, self.elapsed = state["step"], state["elapsed"]
        self._log.write(stage=self.settings.name, step=self.step, event="resumed")
        found: dict[str, Any] = state["source"]
        return found


def text_source(parts: dict[str, Part], phases: Sequence[Mixture], settings: Settings, device: torch.device) -> SourceOf:
    """Return the source of packed rows of text."""

    def open_feed(state: Mapping[str, Any] | None) -> Feed:
        packer = Packer(parts, settings.row_len, settings.rows_per_chunk, settings.seed, joined=settings.joined)
        return Feed(packer, phases, rows_per_batch=settings.rows_per_batch, device=device, state=state)

    return open_feed
