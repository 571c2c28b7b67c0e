"""Draw an AttentionPlan as plain SVG, with layers from left to right and backends from top to bottom. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from culet.attention.plan import BACKENDS, AttentionPlan, GroupPlan

_CELL, _GAP = 15, 2
_LEFT, _RIGHT, _TOP = 96, 16, 64
_LEGEND_WIDTH = 820
_ROW = 24
_LINE = 17
_LETTER = 6.3  # mean width of a letter at 12 px, to estimate how wide the picture must be
# These colours are readable on white and on black, because the picture has no background.
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #767676; }
.title { font-size: 15px; font-weight: 600; }
.head { font-weight: 600; }
.faint { fill: #808080; }
.chosen0 { fill: #2f7fc1; } .chosen1 { fill: #c9772b; } .chosen2 { fill: #3d9a5f; } .chosen3 { fill: #9061b8; }
.able { fill: none; stroke: #808080; stroke-width: 1.2; }
.cannot { fill: #808080; fill-opacity: 0.18; }
.shared { fill: #fff; fill-opacity: 0.85; }
@media (prefers-color-scheme: light) { text { fill: #444; } }
@media (prefers-color-scheme: dark) { text { fill: #bbb; } }
""".strip()


def draw(plan: AttentionPlan, owners: Sequence[int], title: str) -> str:
    """Return an SVG of `plan`. `owners` are the layers that own KV. The other layers are marked with a dot."""
    by_layer = {layer: (index, group) for index, group in enumerate(plan.groups) for layer in group.need.layers}
    layers = sorted(by_layer)
    notes = [line for group in plan.groups for line in _notes(group)]
    widest = max([len(title), *(len(text) for _, text in notes)])
    width = max(_LEGEND_WIDTH, _LEFT + len(layers) * (_CELL + _GAP), round(widest * _LETTER) + 48) + _RIGHT
    legend_y = _TOP + len(BACKENDS) * _ROW + 26
    notes_y = legend_y + 12
    height = notes_y + len(notes) * _LINE + 8
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img"'
        f' aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        svg_text(12, 24, title, "title"),
    ]
    for column, layer in enumerate(layers):
        x = _LEFT + column * (_CELL + _GAP)
        if layer == layers[-1] or (layer % 5 == 0 and layer + 1 < layers[-1]):
            body.append(svg_text(x + _CELL / 2, _TOP - 8, str(layer), "faint", "middle"))
        index, group = by_layer[layer]
        for row, name in enumerate(BACKENDS):
            body.append(_cell(x, _TOP + row * _ROW, index, group, name, layer, layer in owners))
    body += [svg_text(12, _TOP + row * _ROW + 12, name) for row, name in enumerate(BACKENDS)]
    body += _legend(plan, legend_y)
    body += [
        svg_text(12 if style else 28, notes_y + line * _LINE, text, style) for line, (style, text) in enumerate(notes) if text
    ]
    return "\n".join([*body, "</svg>", ""])


def svg_text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    """Return a line of text. `style` is its class, and `anchor` the part of it that is at `x`."""
    attribute = f' class="{style}"' if style else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{attribute}>{escape(text)}</text>'


def _cell(x: float, y: float, index: int, group: GroupPlan, name: str, layer: int, owns_kv: bool) -> str:
    """Draw the square of one layer and one backend. It is filled if the backend is chosen, outlined if supported, grey if not.

    The tooltip gives the reason.
    """
    if name == group.backend:
        style, reason = f"chosen{index % 4}", group.why
    else:
        reason = group.others[name]
        style = "able" if name in group.able else "cannot"
    need = group.need
    tip = f"layer {layer}, {need.group}, head dim {need.head_dim}: {name}: {reason}"
    square = (
        f'<rect class="{style}" x="{x}" y="{y}" width="{_CELL}" height="{_CELL}" rx="2"><title>{escape(tip)}</title></rect>'
    )
    if name == group.backend and not owns_kv:
        square += f'<circle class="shared" cx="{x + _CELL / 2:g}" cy="{y + _CELL / 2:g}" r="2.5"/>'
    return square


def _legend(plan: AttentionPlan, y: float) -> list[str]:
    """Draw one line of squares with their meanings."""
    entries = [(f"chosen{index % 4}", f"{group.need.group}: chosen") for index, group in enumerate(plan.groups)]
    entries += [("able", "supported"), ("cannot", "not supported")]
    parts, x = [], 12.0
    for style, text in entries:
        parts.append(f'<rect class="{style}" x="{x:g}" y="{y - 10:g}" width="11" height="11" rx="2"/>')
        parts.append(svg_text(x + 17, y, text))
        x += 17 + len(text) * _LETTER + 22
    parts.append(svg_text(x, y, "dot: reads another layer's KV", "faint"))
    return parts


def _notes(group: GroupPlan) -> list[tuple[str, str]]:
    """Return the (style, text) lines under the grid.

    They describe the group and its backend, and say why each other backend was not chosen.
    """
    need = group.need
    heads = f"{need.num_heads} query and {need.num_kv_heads} KV heads"
    window = "all keys" if need.window is None else f"window {need.window}"
    latent = ", K and V stored once" if need.latent else ""
    title = f"{need.group}: {len(need.layers)} layers, head dim {need.head_dim}, {heads}, {window}{latent}"
    lines = [("", ""), ("head", title), ("", f"{group.backend}: {group.why}")]
    return lines + [("", f"not {name}: {reason}") for name, reason in group.others.items()]
