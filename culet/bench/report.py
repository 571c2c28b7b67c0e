"""Show the results of `culet bench` as a JSON document, tables and a picture. No torch.

The picture shows each row as a share of the floor, so that milliseconds and tokens per second have the same scale. The bar is
the measured value, the tick is the peer's value, and the end of the scale is the GPU's limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from culet.attention.picture import svg_text
from culet.bench.floor import Floor
from culet.bench.peer import EQUAL_SETTINGS, GPU, PEER, SERVING, Anchor
from culet.bench.workloads import IMAGE, START, THROUGHPUT, TPOT, Workload
from culet.hardware import Peaks
from culet.models.random_checkpoint import random_name, variant_of
from culet.models.spec import ModelSpec
from culet.models.towers.spec import UnifiedVisionSpec, VisionSpec

if TYPE_CHECKING:
    from rich.table import Table

    from culet.bench.offline import Measured

SCHEMA = 1


@dataclass(frozen=True)
class Setting:
    """The model that was measured, the device and the settings."""

    model: str
    spec: ModelSpec
    device: str  # the driver's name for it
    peaks: Peaks | None  # None if the floor is unknown
    dtype: str
    latent: bool
    settings: dict[str, Any]
    versions: dict[str, str]
    vision: VisionSpec | UnifiedVisionSpec | None = None

    @property
    def variant(self) -> str | None:
        return variant_of(self.spec)

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "float32" else 2

    def floor(self, row: Workload) -> float | None:
        """Return the row's floor in the row's unit, or None if it has none."""
        if self.peaks is None or row.kind == START:
            return None
        if row.kind == IMAGE:
            return None if self.vision is None else 1e3 * self._tower_floor(self.vision, row)
        precisions = (self.settings.get(name, "auto") for name in ("quantization", "head_quantization"))
        floor = Floor(self.spec, self.peaks, self.latent, self.itemsize, *precisions)
        if row.kind == THROUGHPUT:
            return floor.tokens_per_s(row.num_seqs, row.prompt_len, row.output_len)
        if row.kind == TPOT:
            return 1e3 * floor.decode_step(row.num_seqs, row.prompt_len + row.output_len // 2)
        return 1e3 * floor.prefill(row.num_seqs, row.prompt_len)

    def _tower_floor(self, tower: VisionSpec | UnifiedVisionSpec, row: Workload) -> float:
        """Return the seconds for each image, if the tower reads its weights once for the images of a request."""
        assert self.peaks is not None
        num_bytes = self.itemsize * tower.num_weights / row.num_images
        return self.peaks.seconds(num_bytes, tower.flops(row.image_tokens))

    def anchor(self, row: Workload) -> Anchor | None:
        """Return the peer's number if it was measured on this kind of GPU, with these settings and weights."""
        is_equal = (
            GPU in self.device
            and self.dtype == "bfloat16"
            and self.model == random_name(self.variant or "")
            and all(self.settings[name] == value for name, value in EQUAL_SETTINGS.items())
        )
        return SERVING.get(self.variant or "", {}).get(row) if is_equal else None


@dataclass(frozen=True)
class Line:
    """A row with the numbers to compare it to."""

    row: Workload
    value: float
    floor: float | None
    peer: float | None
    goal: float | None
    note: str = ""
    right: bool | None = None  # None if not checked
    more: dict[str, Any] = field(default_factory=dict)

    def share(self, value: float | None) -> float | None:
        """Return `value` as a share of the floor. 1 is the GPU's limit."""
        if self.floor is None or value is None:
            return None
        return value / self.floor if self.row.is_larger_better else self.floor / value

    @property
    def speedup(self) -> float | None:
        """The speed relative to the peer."""
        if self.peer is None:
            return None
        return self.value / self.peer if self.row.is_larger_better else self.peer / self.value

    def document(self) -> dict[str, Any]:
        row = self.row
        return {
            "row": row.label,
            "kind": row.kind,
            "num_seqs": row.num_seqs,
            "prompt_len": row.prompt_len,
            "output_len": row.output_len,
            **({"num_images": row.num_images, "image_tokens": row.image_tokens} if row.kind == IMAGE else {}),
            "unit": row.unit,
            "value": self.value,
            "floor": self.floor,
            "share_of_floor": self.share(self.value),
            "peer": self.peer,
            "speedup": self.speedup,
            "goal": self.goal,
            **({"note": self.note} if self.note else {}),
            **self.more,
        }


def line_of(measured: Measured, setting: Setting) -> Line:
    """Make a line from a measured row, its floor and the peer's number."""
    anchor = setting.anchor(measured.row)
    verdict = measured.verdict
    return Line(
        row=measured.row,
        value=measured.value,
        floor=setting.floor(measured.row),
        peer=anchor.peer if anchor else None,
        goal=anchor.goal if anchor else None,
        note=anchor.note if anchor else "",
        right=verdict.is_right if verdict else None,
        more={
            "runs": list(measured.runs),
            "details": measured.details,
            "check": verdict.document() if verdict else None,
        },
    )


def document(lines: Sequence[Line], setting: Setting) -> dict[str, Any]:
    """Return all results as a JSON object. Its keys are stable."""
    peaks = setting.peaks
    return {
        "schema": SCHEMA,
        "benchmark": "offline",
        "model": setting.model,
        "variant": setting.variant,
        "num_layers": len(setting.spec.layers),
        "device": setting.device,
        "peaks": None if peaks is None else {"bytes_per_s": peaks.bytes_per_s, "flops_per_s": peaks.flops_per_s},
        "dtype": setting.dtype,
        "latent": setting.latent,
        "settings": setting.settings,
        "versions": setting.versions,
        "peer": PEER if any(line.peer is not None for line in lines) else None,
        "rows": [line.document() for line in lines],
    }


# Tables


def table(lines: Sequence[Line], setting: Setting) -> Table:
    """Make a table with one line per row: measured value, floor, share of the floor, peer, and the result of the check."""
    with_peer, with_floor = (any(getattr(line, name) is not None for line in lines) for name in ("peer", "floor"))
    columns: list[tuple[str, Callable[[Line], str]]] = [("measured", lambda line: number(line.value))]
    if with_floor:
        columns += [("floor", lambda line: number(line.floor)), ("of floor", lambda line: percent(line.share(line.value)))]
    if with_peer:
        columns += [
            (PEER, lambda line: number(line.peer)),
            ("speed-up", lambda line: f"{line.speedup:.2f}x" if line.speedup else "-"),
        ]
    if any(line.goal is not None for line in lines):
        columns.append(("goal", lambda line: number(line.goal)))
    title = f"{setting.model} on {setting.device}, {setting.dtype}"
    shown = plain_table(title, ("row", "unit"), [name for name, _ in columns] + ["check"])
    for line in lines:
        check = {None: "-", True: "right", False: "WRONG"}[line.right]
        shown.add_row(line.row.title, line.row.unit, *(cell(line) for _, cell in columns), check)
    return shown


def plain_table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    """Make a table with left-aligned text columns and right-aligned number columns."""
    from rich import box
    from rich.table import Table

    empty = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name in left:
        empty.add_column(name, no_wrap=True)
    for name in right:
        empty.add_column(name, justify="right", no_wrap=True)
    return empty


def number(value: float | None) -> str:
    """Format a number with at least three significant digits."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}%"


def remarks(lines: Sequence[Line]) -> list[str]:
    """Return the remarks below the table."""
    said = [f"{line.row.title}: {line.note}" for line in lines if line.note]
    for line in lines:
        details = line.more.get("details", {})
        if line.row.kind == START:
            said.append(f"start to ready: {details['cold_s']:.1f} s cold, {details['cached_s']:.1f} s with kernels cached")
        if line.row.kind == IMAGE:
            said.append(
                f"{line.row.title}: first token after {number(details['ttft_cold_ms'])} ms, "
                f"{number(details['ttft_cached_ms'])} ms with features cached; {number(details['requests_per_s'])} requests/s"
            )
        if details.get("preemptions"):
            parked = f", {details['parked']} of them to host memory" if "parked" in details else ""  # not in older results
            said.append(f"{line.row.title}: {details['preemptions']} preemptions because the cache was full{parked}")
        elif details.get("all_at_once") is False:
            said.append(f"{line.row.title}: some sequences waited for others to end")
        if line.right is False:
            check = line.more["check"]
            said.append(
                f"{line.row.title}: WRONG: only {check['num_equal']} of {check['num_tokens']} tokens are the eager model's "
                f"favourites, and the worst is {number(check['worst'])} standard deviations below"
            )
    return said


# The picture

_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #767676; }
.title { font-size: 15px; font-weight: 600; }
.faint { fill: #808080; }
.ours { fill: #2f7fc1; }
.room { fill: #808080; fill-opacity: 0.15; }
.peer { stroke: #c9772b; stroke-width: 3; }
.goal { stroke: #3d9a5f; stroke-width: 2; stroke-dasharray: 3 2; }
.grid { stroke: #808080; stroke-opacity: 0.35; stroke-width: 1; }
@media (prefers-color-scheme: light) { text { fill: #444; } }
@media (prefers-color-scheme: dark) { text { fill: #bbb; } }
""".strip()
_LEFT, _SCALE, _VALUES, _ROW, _TOP = 330, 420, 250, 26, 66


def draw(lines: Sequence[Line], title: str) -> str:
    """Draw each line's share of its floor as SVG, with the peer and the goal. Lines without a floor are left out."""
    shown = [line for line in lines if line.floor is not None]
    width, height = _LEFT + _SCALE + _VALUES, _TOP + len(shown) * _ROW + 48
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img"'
        f' aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        svg_text(12, 24, title, "title"),
    ]
    bottom = _TOP + len(shown) * _ROW
    for step in range(0, 101, 20):
        x = _LEFT + _SCALE * step / 100
        body.append(f'<line class="grid" x1="{x:g}" y1="{_TOP - 6}" x2="{x:g}" y2="{bottom}"/>')
        body.append(svg_text(x, _TOP - 12, f"{step}%" if step < 100 else "floor", "faint", "middle"))
    for index, line in enumerate(shown):
        body += _bar(line, _TOP + index * _ROW)
    body += _legend(shown, bottom + 28)
    return "\n".join([*body, "</svg>", ""])


def _bar(line: Line, y: float) -> list[str]:
    share = min(1.0, line.share(line.value) or 0.0)
    unit = line.row.unit
    tip = f"{line.row.title}: {number(line.value)} {unit}, floor {number(line.floor)}"
    words = f"{number(line.value)} {unit} of {number(line.floor)}"
    if line.peer is not None:
        tip += f", {PEER} {number(line.peer)}"
        words += f" · {PEER} {number(line.peer)}"
    parts = [
        f'<g><title>{escape(tip)}</title><rect class="room" x="{_LEFT}" y="{y}" width="{_SCALE}" height="{_ROW - 8}" rx="2"/>',
        f'<rect class="ours" x="{_LEFT}" y="{y}" width="{_SCALE * share:.1f}" height="{_ROW - 8}" rx="2"/>',
    ]
    for style, value in (("goal", line.goal), ("peer", line.peer)):
        mark = line.share(value)
        if mark is not None:
            x = _LEFT + _SCALE * min(1.0, mark)
            parts.append(f'<line class="{style}" x1="{x:.1f}" y1="{y - 2}" x2="{x:.1f}" y2="{y + _ROW - 6}"/>')
    parts += [svg_text(_LEFT - 8, y + 13, line.row.title, "", "end"), svg_text(_LEFT + _SCALE + 8, y + 13, words), "</g>"]
    return parts


def _legend(lines: Sequence[Line], y: float) -> list[str]:
    parts = [
        f'<rect class="ours" x="{_LEFT}" y="{y - 10}" width="11" height="11" rx="2"/>',
        svg_text(_LEFT + 17, y, "measured"),
    ]
    x = _LEFT + 100.0
    for style, word, is_shown in (
        ("peer", PEER, any(line.peer is not None for line in lines)),
        ("goal", "goal", any(line.goal is not None for line in lines)),
    ):
        if is_shown:
            parts.append(f'<line class="{style}" x1="{x:g}" y1="{y - 12:g}" x2="{x:g}" y2="{y + 2:g}"/>')
            parts.append(svg_text(x + 8, y, word))
            x += 100
    parts.append(svg_text(x, y, "longer is faster", "faint"))
    return parts
