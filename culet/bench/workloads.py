"""The rows of `culet bench offline`, which define the requests and the measured quantity. No torch.

    tpot:8x1000+256         8 prompts of 1000 tokens, 256 output tokens each: time per output token
    ttft:1x8000             one prompt of 8000 tokens: time to the first token
    throughput:80x1000+1000 80 requests at once: output tokens per second, prompts included
    image:8x2@280+64        8 requests with 2 images of at most 280 tokens each, 64 output tokens: the tower's time per image,
                            time to the first token with features cold and cached, and requests per second
    start                   seconds from the start of loading to the first accepted request, in a separate process

The names `tpot`, `ttft`, `chat` and `summarise` stand for the rows of Culet's published results.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from culet.errors import ConfigError
from culet.media.spec import BUDGETS, TOKEN_SIDE, target_size

TPOT, TTFT, THROUGHPUT, START, IMAGE = "tpot", "ttft", "throughput", "start", "image"
UNITS = {TPOT: "ms", TTFT: "ms", THROUGHPUT: "tok/s", START: "s", IMAGE: "ms"}
CHECKED_TOKENS = 16
IMAGE_TEXT_TOKENS = 32  # of a prompt with images, after them
_PICTURE = (1200, 1600)  # height and width, before it is resized to a budget
_FIRST_WORD = 1000  # smaller ids are special tokens and bytes in large vocabularies


@dataclass(frozen=True)
class Workload:
    """A row, which is a set of requests that are submitted together."""

    kind: str
    num_seqs: int = 1
    prompt_len: int = 0
    output_len: int = 0
    num_images: int = 0  # of each sequence
    budget: int = 0  # the most soft tokens of an image

    @property
    def image_size(self) -> tuple[int, int]:
        """The height and width of an image after it was resized."""
        return target_size(*_PICTURE, self.budget)

    @property
    def image_tokens(self) -> int:
        """The soft tokens of an image. At most the budget, because sides are whole tokens."""
        height, width = self.image_size
        return height * width // TOKEN_SIDE**2

    @property
    def label(self) -> str:
        """The row's name on the command line."""
        if self.kind == START:
            return START
        if self.kind == IMAGE:
            return f"{IMAGE}:{self.num_seqs}x{self.num_images}@{self.budget}+{self.output_len}"
        output = "" if self.kind == TTFT else f"+{self.output_len}"
        return f"{self.kind}:{self.num_seqs}x{self.prompt_len}{output}"

    @property
    def title(self) -> str:
        """The row's name in tables."""
        if self.kind == START:
            return "start to ready"
        named = {STANDARD["chat"][0]: "chat: ", STANDARD["summarise"][0]: "summarise: "}.get(self, "")
        seqs = "1 sequence" if self.num_seqs == 1 else f"{self.num_seqs} sequences"
        if self.kind == IMAGE:
            images = "1 image" if self.num_images == 1 else f"{self.num_images} images"
            return f"tower per image, {seqs} with {images} of {self.image_tokens} tokens, {self.output_len} out"
        if self.kind == TTFT:
            return f"TTFT, {seqs}, {self.prompt_len} in"
        what = "TPOT" if self.kind == TPOT else f"{named}throughput"
        return f"{what}, {seqs}, {self.prompt_len} in, {self.output_len} out"

    @property
    def unit(self) -> str:
        return UNITS[self.kind]

    @property
    def is_larger_better(self) -> bool:
        return self.kind == THROUGHPUT

    @property
    def total_len(self) -> int:
        """The number of tokens in a finished sequence, including in the check's run."""
        return self.prompt_len + max(self.output_len, CHECKED_TOKENS)

    def repeats(self, best_of: int) -> int:
        """Return the number of runs, of which the best counts. Rows with one sequence are short and easily disturbed."""
        return best_of if self.num_seqs == 1 and self.kind in (TPOT, TTFT) else 1


STANDARD: dict[str, tuple[Workload, ...]] = {
    TPOT: (
        Workload(TPOT, 1, 1000, 256),
        Workload(TPOT, 8, 1000, 256),
        Workload(TPOT, 32, 1000, 256),
        Workload(TPOT, 1, 32000, 256),
    ),
    TTFT: (Workload(TTFT, 1, 1000, 1), Workload(TTFT, 1, 8000, 1), Workload(TTFT, 1, 32000, 1)),
    "chat": (Workload(THROUGHPUT, 80, 1000, 1000),),
    "summarise": (Workload(THROUGHPUT, 80, 8000, 1000),),
    START: (Workload(START),),
}
DEFAULT_ROWS = ",".join(STANDARD)
_CUSTOM = re.compile(r"(tpot|throughput):(\d+)x(\d+)\+(\d+)|(ttft):(\d+)x(\d+)")
_WITH_IMAGES = re.compile(r"image:(\d+)x(\d+)@(\d+)\+(\d+)")
_EXPECTED = f"expected one of: {', '.join(STANDARD)}, or a custom row"
_HINT = "custom rows look like tpot:8x1000+256, ttft:1x8000, throughput:80x1000+1000 or image:8x2@280+64"


def parse_rows(text: str) -> list[Workload]:
    """Parse the rows in a comma-separated list. They keep their order, and duplicates are dropped."""
    rows: dict[Workload, None] = {}
    for name in filter(None, (part.strip() for part in text.split(","))):
        rows.update(dict.fromkeys(STANDARD.get(name) or [_custom(name)]))
    if not rows:
        raise ConfigError(f"rows: got none, {_EXPECTED}", hint=_HINT)
    return list(rows)


def _custom(name: str) -> Workload:
    if (match := _WITH_IMAGES.fullmatch(name)) is not None:
        return _with_images(name, *map(int, match.groups()))
    match = _CUSTOM.fullmatch(name)
    if match is None:
        raise ConfigError(f"rows: got {name!r}, {_EXPECTED}", hint=_HINT)
    if match[5]:
        row = Workload(match[5], int(match[6]), int(match[7]), 1)
    else:
        row = Workload(match[1], int(match[2]), int(match[3]), int(match[4]))
    if min(row.num_seqs, row.prompt_len) < 1 or row.output_len < (2 if row.kind == TPOT else 1):
        raise ConfigError(f"rows: got {name!r}, but a number in it is too small", hint=_HINT)
    return row


def _with_images(name: str, num_seqs: int, num_images: int, budget: int, output_len: int) -> Workload:
    if budget not in BUDGETS:
        raise ConfigError(f"rows: got {name!r}, expected a budget of {', '.join(map(str, BUDGETS))} tokens", hint=_HINT)
    if min(num_seqs, num_images, output_len) < 1:
        raise ConfigError(f"rows: got {name!r}, but a number in it is too small", hint=_HINT)
    row = Workload(IMAGE, num_seqs, 0, output_len, num_images, budget)
    return replace(row, prompt_len=num_images * (row.image_tokens + 2) + IMAGE_TEXT_TOKENS)


def longest(rows: Sequence[Workload]) -> int:
    """Return the number of tokens in the longest sequence of the rows, or 0 if there is none."""
    return max((row.total_len for row in rows if row.kind != START), default=0)


def make_prompts(row: Workload, vocab_size: int, *, seed: int) -> list[list[int]]:
    """Make a prompt of random tokens for each sequence of a row. Equal seeds give equal prompts."""
    draw = random.Random(f"{seed} {row.num_seqs} {row.prompt_len}")
    return [make_tokens(row.prompt_len, vocab_size, draw) for _ in range(row.num_seqs)]


def make_tokens(count: int, vocab_size: int, draw: random.Random, without: frozenset[int] = frozenset()) -> list[int]:
    """Draw random tokens, none of which is in `without`."""
    first = _FIRST_WORD if vocab_size > 2 * _FIRST_WORD else 0
    known: Sequence[int] = range(first, vocab_size)
    if without:
        known = [token_id for token_id in known if token_id not in without]
    return draw.choices(known, k=count)
