"""Check the engine's answers. A twin with fewer layers answers each workload, and an eager float32 model judges it.

The twin has the measured model's dimensions, page sizes and settings, so it uses the same kernels, batches and graphs. Its
weights are random and calm (`models/random_weights.py`). The judge has the same weights in float32, the eager twins of all
kernels, attention in plain torch, and separate K and V. It reads a prompt followed by the twin's answer, and computes how far
each token is below its own favourite. A token is right if it is the favourite, or if bf16 cannot tell it from the favourite.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from culet.attention.torch_cpu import TorchCPUBackend
from culet.bench.workloads import CHECKED_TOKENS, START, Workload, make_prompts
from culet.cache.pool import Pool
from culet.cache.spec import plan_cache
from culet.config import Config, build_config
from culet.engine.llm import LLM
from culet.engine.resolve import given_settings
from culet.kernels.dispatch import eager_kernels
from culet.log import logger
from culet.models.checkpoint import open_checkpoint
from culet.models.random_checkpoint import PREFIX, random_name, twin_depth
from culet.models.weights import load_model
from culet.runner.fill import fill
from culet.types import PageTable, Row, SamplingParams

# In standard deviations of the logits. A wrong kernel's answers are about four below the favourite. bf16 costs up to 0.1,
# mostly when two experts are nearly tied.
TOLERANCE = 0.3
JUDGED_SEQUENCES = 4  # the maximum per workload
JUDGED_TOKENS = 8192  # maximum prompt tokens of these in total, because the judge is slow; one sequence is always judged
CHUNK = 4096  # tokens per forward pass of the judge


@dataclass(frozen=True)
class TwinVerdict:
    """The eager float32 model's verdict on the twin's greedy tokens."""

    num_layers: int
    num_tokens: int
    num_equal: int  # tokens that are the judge's favourites
    worst: float  # largest distance of a token below the favourite, in standard deviations of the logits
    tolerance: float = TOLERANCE

    @property
    def is_right(self) -> bool:
        # NaN must count as wrong. Ties are rare, so at least half of the tokens must be favourites.
        return self.worst <= self.tolerance and 2 * self.num_equal >= self.num_tokens

    def document(self) -> dict[str, Any]:
        worst = None if math.isnan(self.worst) else self.worst  # JSON has no NaN
        return asdict(self) | {"worst": worst, "is_right": self.is_right}


@dataclass(frozen=True)
class _Answer:
    prompt: list[int]
    token_ids: list[int]


def check_rows(config: Config, rows: Sequence[Workload], *, num_layers: int | None = None) -> dict[Workload, TwinVerdict]:
    """Return a verdict for each row except `start`. The measured engine must not be running, as the check needs its memory."""
    rows = [row for row in rows if row.kind != START]
    if not rows:
        return {}
    checkpoint = open_checkpoint(config.model.model, config.model.revision)
    base = config.model.model.removeprefix(PREFIX).partition(",")[0]
    itemsize = 4 if config.model.dtype == "float32" else 2
    if num_layers is None:
        num_layers = twin_depth(checkpoint.spec, itemsize, latent=config.cache.latent)
    name = random_name(base, num_layers=num_layers, draw="calm")
    logger.info("check: %d layers of %s answer each workload, and an eager float32 model judges the answers", num_layers, base)
    answers, device = _ask_twin(name, config, rows)
    judge = _Judge(name, device)
    verdicts = {shape: _judge(judge, given, num_layers) for shape, given in answers.items()}
    del judge
    free_memory()
    return {row: verdicts[_shape(row)] for row in rows}


def free_memory() -> None:
    """Release the memory of closed engines and deleted models."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _shape(row: Workload) -> tuple[int, int]:
    """Return the row's shape. Rows with equal shapes share the twin's answers."""
    return row.num_seqs, row.prompt_len


def _ask_twin(name: str, config: Config, rows: Sequence[Workload]) -> tuple[dict[tuple[int, int], list[_Answer]], torch.device]:
    """Return the twin's first greedy tokens for a few sequences of each workload, and its device."""
    params = SamplingParams(temperature=0, max_tokens=CHECKED_TOKENS, ignore_eos=True)
    answers: dict[tuple[int, int], list[_Answer]] = {}
    given = {field: value for field, value in given_settings(config).items() if field not in ("model", "revision")}
    with LLM.from_config(build_config({**given, "model": name})) as llm:
        for row in rows:
            if _shape(row) in answers:
                continue
            prompts = make_prompts(row, llm.engine.spec.vocab_size, seed=1)
            results = llm.generate(prompts, params)
            count = min(len(prompts), JUDGED_SEQUENCES, max(1, JUDGED_TOKENS // row.prompt_len))
            chosen = torch.linspace(0, len(prompts) - 1, count).long().tolist()
            answers[_shape(row)] = [_Answer(prompts[index], list(results[index].token_ids)) for index in chosen]
        device = llm.engine.device
    free_memory()
    return answers, device


def _judge(judge: _Judge, answers: Sequence[_Answer], num_layers: int) -> TwinVerdict:
    gaps = torch.cat([judge.gaps(answer.prompt, answer.token_ids) for answer in answers])
    worst = float(gaps.max()) if not bool(gaps.isnan().any()) else float("nan")
    return TwinVerdict(num_layers, gaps.numel(), int((gaps == 0).sum()), worst)


class _Judge:
    """The eager model: float32, eager kernels, attention in plain torch, and separate K and V."""

    def __init__(self, name: str, device: torch.device) -> None:
        checkpoint = open_checkpoint(name)
        self._model = load_model(checkpoint, dtype=torch.float32, device=device, latent=False, progress=False)
        for module in self._model.modules():
            if hasattr(module, "ops"):
                setattr(module, "ops", eager_kernels())  # noqa: B010 (nn.Module's types do not allow a module of functions)
        spec = self._model.spec
        self._layout = plan_cache(spec.kv_specs(4, latent=False))
        num_heads = spec.layers[0].num_heads
        self._backends = [TorchCPUBackend(group, num_heads) for group in self._layout.groups]

    @torch.inference_mode()
    def gaps(self, prompt: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        """Return how far each of `token_ids`, which follow `prompt`, is below the favourite, in deviations of the logits."""
        model, layout = self._model, self._layout
        tokens_SL = torch.tensor([[*prompt, *token_ids[:-1]]], device=model.device)
        placeholder_P = torch.tensor(model.spec.placeholder_ids, dtype=torch.int64, device=model.device)
        length = tokens_SL.shape[1]
        # The judge keeps every token in pages, even in sliding layers.
        tables, num_slabs = [], 0
        for group in layout.groups:
            pages = group.pages_for(length)
            tables.append(PageTable(0, tuple(range(num_slabs, num_slabs + pages))))
            num_slabs += pages
        pool = Pool(layout, num_slabs, torch.float32, model.device)
        parts = []
        for start in range(0, length, CHUNK):
            num_new = min(CHUNK, length - start)
            num_logits = max(0, min(num_new, start + num_new - (len(prompt) - 1)))
            store_from = (start,) * len(layout.groups)
            row = Row(0, start, num_new, num_logits, tuple(tables), store_from)
            batch = fill([row], layout, tokens_SL, placeholder_P)
            model.plan(batch, pool, self._backends)
            hidden = model.forward(batch, pool, self._backends)
            if num_logits:
                parts.append(model.logits(hidden.last_LD))
        logits_LV = torch.cat(parts)
        chosen_L = logits_LV.gather(1, torch.tensor(token_ids, device=model.device)[:, None]).squeeze(1)
        return ((logits_LV.amax(1) - chosen_L) / logits_LV.std(1)).cpu()
