"""Markdown as trees: what becomes an element, what stays text, and what a hostile text can cost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from culet.errors import BadRequest
from culet.serve.markdown.document import parse
from culet.serve.markdown.renderer import MarkdownRenderer


def nodes(text: str) -> list[Any]:
    return [node for _, node in parse(text)]


def walk(node: Any) -> Iterator[list[Any]]:
    if isinstance(node, list):
        yield node
        for child in node[2:]:
            yield from walk(child)


def text_of(node: Any) -> str:
    return node if isinstance(node, str) else "".join(map(text_of, node[2:]))


def test_blocks_say_where_they_begin() -> None:
    blocks = parse("# Title\n\ntext\nmore\n\n- a\n- b\n\n```\ncode\n```\n")
    assert [(line, node[0]) for line, node in blocks] == [(0, "h1"), (2, "p"), (5, "ul"), (8, "codeblock")]
    assert blocks[1][1] == ["p", {}, "text", ["br", {}], "more"]


def test_tables_have_alignment_and_tasks_have_boxes() -> None:
    table, tasks = nodes("| a | b | c |\n|:-|-:|:-:|\n| 1 | 2 | 3 |\n\n- [x] done\n- [ ] open\n- none\n")
    assert [node[1] for node in walk(table) if node[0] == "td"] == [{"class": "left"}, {"class": "right"}, {"class": "center"}]
    assert [node[1]["checked"] for node in walk(tasks) if node[0] == "input"] == [True, False]


def test_code_is_highlighted_and_keeps_its_text() -> None:
    source = 'def f(x: int) -> str:\n    return f"{x}"  # why\n'
    (block,) = nodes(f"```python\n{source}```")
    assert block[1] == {"language": "python"}
    assert text_of(block) == source
    assert ["span", {"class": "nf"}, "f"] in block
    (plain,) = nodes("```no-such-language\nx\n```")
    assert plain[2:] == ["x\n"]
    (unfinished,) = nodes("```python\nx = '''")
    assert text_of(unfinished) == "x = '''"


@pytest.mark.parametrize(
    ("text", "display"),
    [("$x^2$", "inline"), (r"\(x^2\)", "inline"), ("$$\nx^2\n$$", "block"), (r"\[ x^2 \]", "block")],
)
def test_mathematics_becomes_mathml(text: str, display: str) -> None:
    found = [node for top in nodes(text) for node in walk(top)]
    assert [node[1]["display"] for node in found if node[0] == "math"] == [display]
    assert ["msup", {}, ["mi", {}, "x"], ["mn", {}, "2"]] in found


def test_prices_and_bad_latex_stay_text() -> None:
    assert nodes("It costs $5 or $10.") == [["p", {}, "It costs $5 or $10."]]
    assert text_of(nodes(r"$\frac{1}{$")[0])


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "a <b onclick=alert(1)>b</b>",
        r"$\text{<img src=x onerror=alert(1)>}$",
        "| <svg onload=alert(1)> |\n|-|\n| <iframe> |",
        "- [ ] <input onfocus=alert(1)>",
    ],
)
def test_html_is_text(text: str) -> None:
    known = {"p", "math", "mrow", "mtext", "div", "table", "thead", "tbody", "tr", "th", "td", "ul", "li", "input"}
    names = {node[0] for top in nodes(text) for node in walk(top)}
    assert names <= known
    assert "<" in "".join(map(text_of, nodes(text)))


@pytest.mark.parametrize(
    "text",
    ["[a](javascript:alert(1))", "[a](data:text/html,x)", "[a](/stats)", "[a](//other.example)", "![a](file:///etc/passwd)"],
)
def test_links_point_only_to_the_web(text: str) -> None:
    assert [node for top in nodes(text) for node in walk(top) if node[0] == "a"] == []


def test_pictures_are_links() -> None:
    assert nodes("![a cat](http://other.example/cat.png)") == [
        ["p", {}, ["a", {"href": "http://other.example/cat.png"}, "a cat"]]
    ]


@pytest.mark.parametrize(
    "text", [">" * 3000, "- " * 3000, "[" * 3000, "*a " * 3000, "`" * 3000, "$" * 3000, "|" * 3000, "\\(" * 1000, "1. " * 2000]
)
def test_strange_texts_end(text: str) -> None:
    parse(text)


def test_a_slow_text_is_stopped_and_the_next_one_is_rendered() -> None:
    async def run() -> None:
        renderer = MarkdownRenderer(max_kb=64, time_limit_s=0.01)
        try:
            with pytest.raises(BadRequest, match="stopped after"):
                await renderer.render(["[" * 60_000], 60_000)
            renderer._time_limit_s = 60
            answer = msgspec.json.decode(await renderer.render(["**a**"], 5))
            assert answer == {"documents": [[[0, ["p", {}, ["strong", {}, "a"]]]]]}
            with pytest.raises(BadRequest, match="markdown_kb"):
                renderer.check_size(70_000)
        finally:
            renderer.close()

    asyncio.run(run())
