"""Start a model on a GPU that pretends to be a smaller card, and let it answer one long chat.

    python benchmarks/memory/small_card.py 31B --quantization int4 --gib 24 --prompt-len 8000

The process may use `--gib` GiB of the GPU in all, with everything that CUDA itself takes: the allocator raises an error beyond
that, and Culet is told that the card has no more. The GPU must be idle otherwise. The script prints the most memory that was in
use at any moment, at the start and while answering. Weights are drawn and rounded one matrix at a time.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from typing import Any

import torch

from culet import LLM, SamplingParams
from culet.bench.workloads import make_tokens
from culet.log import setup_logging

GIB = 1 << 30
CONTEXT_BYTES = GIB  # what CUDA takes beside the allocator, at most


class Card:
    """A GPU that seems to have `num_bytes` bytes of memory."""

    def __init__(self, num_bytes: int) -> None:
        self._real = torch.cuda.mem_get_info
        self.num_bytes, self.most = num_bytes, 0
        _, total = self._real()
        torch.cuda.set_per_process_memory_fraction((num_bytes - CONTEXT_BYTES) / total)
        torch.cuda.mem_get_info = self._mem_get_info
        self._is_over = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()

    def close(self) -> None:
        """Stop watching. A thread that uses CUDA must not outlive the main one."""
        self._is_over.set()
        self._watcher.join()

    def _mem_get_info(self, device: Any = None) -> tuple[int, int]:
        free, total = self._real(device)
        return max(0, self.num_bytes - (total - free)), self.num_bytes

    def _watch(self) -> None:
        while not self._is_over.wait(1e-3):
            free, total = self._real()
            self.most = max(self.most, total - free)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variant")
    parser.add_argument("--quantization", choices=("fp8", "int4"))
    parser.add_argument("--gib", type=float, default=24, help="memory of the card")
    parser.add_argument("--prompt-len", type=int, default=8000)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--settings", default="{}", help="more settings of `LLM`, as JSON")
    given = parser.parse_args()
    setup_logging()
    card = Card(int(given.gib * GIB))
    try:
        print(json.dumps(run(card, given)))
    finally:
        card.close()


def run(card: Card, given: argparse.Namespace) -> dict[str, Any]:
    """Start the model and let it answer. Return what was measured."""
    began = time.perf_counter()
    settings = {"quantization": given.quantization, "language_model_only": True, **json.loads(given.settings)}
    llm = LLM(f"random:{given.variant}", **settings)
    result: dict[str, Any] = {"start_s": round(time.perf_counter() - began, 1), "most_at_start_gib": round(card.most / GIB, 2)}
    prompt = make_tokens(given.prompt_len, llm.engine.spec.vocab_size, random.Random(0))
    began = time.perf_counter()
    params = SamplingParams(max_tokens=given.output_len, ignore_eos=True, temperature=0)
    (answer,) = llm.generate({"prompt_token_ids": prompt}, params)
    result |= {"answer_s": round(time.perf_counter() - began, 2), "tokens": len(answer.outputs[0].token_ids)}
    result |= {"most_gib": round(card.most / GIB, 2), "card_gib": given.gib, "fits": card.most <= card.num_bytes}
    return result


if __name__ == "__main__":
    main()
