"""The teacher, Qwen2.5-Coder-1.5B-Instruct (Apache-2.0), from its GGUF. It writes many short answers at once, on CPU or GPU.

slots     a fixed number of rows; a row that ends is filled with the next prompt
prefixes  the keys and values of a system prompt are computed once and copied into a row

On a CPU with bfloat16 tiles, a thread generates about 100 tokens per second with 192 slots. Weights are stored in the matrix
library's own layout, which doubles the speed.
Shapes: B rows, T new tokens, S cache positions, D model, N heads, G kv heads, H head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

END = "<|im_end|>"
# Qwen's tokenizer splits text before merging into contractions, words, single digits, punctuation and white space.
_CUTS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def chat_text(messages: Sequence[dict[str, str]]) -> str:
    """Return messages in the teacher's chat format, without the opening of an answer."""
    return "".join(f"<|im_start|>{message['role']}\n{message['content']}{END}\n" for message in messages)


OPEN_ANSWER = "<|im_start|>assistant\n"


class Linear:
    """x @ weight.T + bias, with the weight in the matrix library's own layout on CPUs."""

    def __init__(self, weight: Tensor, bias: Tensor | None, rows: int) -> None:
        self._is_packed = weight.device.type == "cpu"
        self._bias = bias
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, rows) if self._is_packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        if self._is_packed:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return F.linear(x, self._weight, self._bias)


@dataclass
class Row:
    """A slot, with the prompt it answers and its progress."""

    key: Any
    length: int  # tokens in the cache
    answer: list[int] = field(default_factory=list)


class Teacher:
    """The model behind `answers`."""

    def __init__(self, path: Path, *, device: str = "cpu", num_slots: int = 192, max_len: int = 320) -> None:
        import gguf

        reader = gguf.GGUFReader(path)
        field_of: Callable[[str], Any] = lambda name: reader.fields[name].contents()  # noqa: E731
        self.num_layers, self.num_heads = field_of("qwen2.block_count"), field_of("qwen2.attention.head_count")
        self.num_kv = field_of("qwen2.attention.head_count_kv")
        self.head_dim = field_of("qwen2.embedding_length") // self.num_heads
        self.eps, self.theta = field_of("qwen2.attention.layer_norm_rms_epsilon"), field_of("qwen2.rope.freq_base")
        self.num_slots, self.max_len, self.device = num_slots, max_len, torch.device(device)
        self.tokenizer = _read_tokenizer(field_of)
        self.end_ids = {self.tokenizer.token_to_id(END), self.tokenizer.token_to_id("<|endoftext|>")}
        self._load({tensor.name: tensor for tensor in reader.tensors}, gguf.quants.dequantize)
        shape = (self.num_layers, num_slots, self.num_kv, max_len, self.head_dim)
        self._keys = torch.zeros(shape, dtype=torch.bfloat16, device=self.device)
        self._values = torch.zeros(shape, dtype=torch.bfloat16, device=self.device)
        self._prefixes: dict[str, tuple[Tensor, Tensor, int]] = {}

    def _load(self, tensors: dict[str, Any], dequantize: Callable[..., Any]) -> None:
        def read(*names: str) -> Tensor:
            parts = [torch.from_numpy(dequantize(tensors[n].data, tensors[n].tensor_type)).to(torch.bfloat16) for n in names]
            return torch.cat(parts).to(self.device)

        def linear(block: str, *names: str) -> Linear:
            has_bias = f"{block}.{names[0]}.bias" in tensors
            bias = read(*(f"{block}.{name}.bias" for name in names)) if has_bias else None
            return Linear(read(*(f"{block}.{name}.weight" for name in names)), bias, self.num_slots)

        self._embedding = read("token_embd.weight")
        self._head = Linear(read("output.weight" if "output.weight" in tensors else "token_embd.weight"), None, self.num_slots)
        self._last_norm = read("output_norm.weight")
        self._layers = [
            (
                read(f"blk.{i}.attn_norm.weight"),
                linear(f"blk.{i}", "attn_q", "attn_k", "attn_v"),
                linear(f"blk.{i}", "attn_output"),
                read(f"blk.{i}.ffn_norm.weight"),
                linear(f"blk.{i}", "ffn_gate", "ffn_up"),
                linear(f"blk.{i}", "ffn_down"),
            )
            for i in range(self.num_layers)
        ]

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    @torch.inference_mode()
    def answers(
        self,
        prompts: Iterator[tuple[Any, str, str]],
        *,
        max_tokens: int = 80,
        temperature: float = 0.7,
        top_p: float = 0.9,
        seed: int = 0,
    ) -> Iterator[tuple[Any, str | None]]:
        """Yield (key, answer) as answers end, for prompts (key, system prompt, rest of the chat).

        A truncated answer is None.
        """
        generator = torch.Generator(self.device).manual_seed(seed)
        rows: list[Row | None] = [None] * self.num_slots
        last = torch.zeros(self.num_slots, dtype=torch.long, device=self.device)
        is_dry = False
        while True:
            free = [slot for slot, row in enumerate(rows) if row is None]
            if not is_dry and len(free) >= max(1, self.num_slots // 8):
                started = []
                for slot in free:
                    item = next(prompts, None)
                    if item is None:
                        is_dry = True
                        break
                    started.append((slot, *item))
                for part in (started[i : i + 32] for i in range(0, len(started), 32)):
                    logits = self._start(part, rows)
                    slots = [slot for slot, *_ in part]
                    last[slots] = _draw(logits, temperature, top_p, generator)
                    yield from self._collect(rows, slots, last, max_tokens)
            active = [slot for slot, row in enumerate(rows) if row is not None]
            if not active:
                if is_dry:
                    return
                continue
            starts = torch.tensor([row.length if row else 0 for row in rows], device=self.device)
            logits = self._forward(last[:, None], starts, None, torch.zeros_like(starts))
            last = _draw(logits, temperature, top_p, generator)
            for slot in active:
                row = rows[slot]
                assert row is not None
                row.length += 1
            yield from self._collect(rows, active, last, max_tokens)

    def _collect(
        self, rows: list[Row | None], slots: list[int], last: Tensor, max_tokens: int
    ) -> Iterator[tuple[Any, str | None]]:
        for slot, token in zip(slots, last[slots].tolist(), strict=True):
            row = rows[slot]
            assert row is not None
            if token in self.end_ids:
                rows[slot] = None
                yield row.key, self.tokenizer.decode(row.answer)
            elif len(row.answer) + 1 >= max_tokens or row.length + 1 >= self.max_len:
                rows[slot] = None
                yield row.key, None
            else:
                row.answer.append(token)

    def _start(self, part: list[tuple[int, Any, str, str]], rows: list[Row | None]) -> Tensor:
        """Prefill these (slot, key, system prompt, rest). Return the logits of their first tokens."""
        tails = [self.encode(rest + OPEN_ANSWER) for _, _, _, rest in part]
        starts = []
        for slot, _, system, _ in part:
            keys, values, length = self._prefix(system)
            self._keys[:, slot, :, :length], self._values[:, slot, :, :length] = keys, values
            starts.append(length)
        width = max(map(len, tails))
        tokens = torch.tensor([tail + [0] * (width - len(tail)) for tail in tails], device=self.device)
        last = torch.tensor([len(tail) - 1 for tail in tails], device=self.device)
        logits = self._forward(tokens, torch.tensor(starts, device=self.device), [slot for slot, *_ in part], last)
        for (slot, key, _, _), start, tail in zip(part, starts, tails, strict=True):
            rows[slot] = Row(key, start + len(tail))
        return logits

    def _prefix(self, system: str) -> tuple[Tensor, Tensor, int]:
        if system not in self._prefixes:
            tokens = self.encode(chat_text([{"role": "system", "content": system}]))
            zero = torch.zeros(1, dtype=torch.long, device=self.device)
            self._forward(torch.tensor([tokens], device=self.device), zero, [0], zero)
            n = len(tokens)
            self._prefixes[system] = (self._keys[:, 0, :, :n].clone(), self._values[:, 0, :, :n].clone(), n)
        return self._prefixes[system]

    def _forward(self, tokens_BT: Tensor, start_B: Tensor, slots: list[int] | None, last_B: Tensor) -> Tensor:
        """Return logits at `last_B` of new tokens at positions from `start_B` on. `slots` None means all of them in order."""
        B, T = tokens_BT.shape
        positions_BT = start_B[:, None] + torch.arange(T, device=self.device)
        reach = min(int(positions_BT.max()) + 1, self.max_len)
        positions_BT = positions_BT.clamp(max=self.max_len - 1)
        rows = torch.arange(B, device=self.device) if slots is None else torch.tensor(slots, device=self.device)
        half = torch.arange(0, self.head_dim, 2, device=self.device) / self.head_dim
        angles = positions_BT[..., None] * self.theta**-half
        cos, sin = (torch.cat([f(angles)] * 2, -1)[:, :, None].to(torch.bfloat16) for f in (torch.cos, torch.sin))
        mask = torch.arange(reach, device=self.device)[None, None, None] <= positions_BT[:, None, :, None]
        x = self._embedding[tokens_BT]
        for keys, values, layer in zip(self._keys, self._values, self._layers, strict=True):
            norm, qkv, out, ffn_norm, gate_up, down = layer
            q, k, v = qkv(self._norm(x, norm)).split(
                [n * self.head_dim for n in (self.num_heads, self.num_kv, self.num_kv)], -1
            )
            q, k = (_rotate(y.view(B, T, -1, self.head_dim), cos, sin) for y in (q, k))
            keys[rows[:, None], :, positions_BT] = k
            values[rows[:, None], :, positions_BT] = v.view(B, T, -1, self.head_dim)
            seen_k, seen_v = (c[:, :, :reach] if slots is None else c[rows, :, :reach] for c in (keys, values))
            # Heads that share a key are batched as queries, so keys are not copied.
            grouped = q.view(B, T, self.num_kv, -1, self.head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
            repeated = mask.repeat(1, 1, self.num_heads // self.num_kv, 1)
            scores = grouped @ seen_k.transpose(-1, -2) / math.sqrt(self.head_dim)
            weights = scores.float().masked_fill(~repeated, -torch.inf).softmax(-1).to(torch.bfloat16)
            mixed = (weights @ seen_v).unflatten(2, (-1, T)).permute(0, 3, 1, 2, 4).reshape(B, T, -1)
            x = x + out(mixed)
            gate, up = gate_up(self._norm(x, ffn_norm)).chunk(2, -1)
            x = x + down(F.silu(gate) * up)
        x = x[torch.arange(B, device=self.device), last_B]
        return self._head(self._norm(x, self._last_norm)).float()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, self.eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def _draw(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> Tensor:
    best, ids = logits.topk(64)
    chances = (best / temperature).softmax(-1)
    chances[chances.cumsum(-1) - chances > top_p] = 0
    return ids.gather(-1, torch.multinomial(chances, 1, generator=generator))[:, 0]


def _read_tokenizer(field_of: Callable[[str], Any]) -> Tokenizer:
    words, kinds = field_of("tokenizer.ggml.tokens"), field_of("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field_of("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    cut = pre_tokenizers.Split(Regex(_CUTS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # GGUF's type of tokens such as <|im_end|>
    tokenizer.add_special_tokens(
        [AddedToken(word, special=True, normalized=False) for word, kind in zip(words, kinds, strict=True) if kind == control]
    )
    return tokenizer
