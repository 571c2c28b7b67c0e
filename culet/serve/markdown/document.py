"""Turn Markdown into a tree of elements as plain data, with highlighted code and mathematics as MathML.

A node is a text, or a list of its name, its attributes and its children. The page creates elements from nodes and text nodes
from texts, so nothing that a model writes is ever parsed as HTML. Raw HTML in an answer is text like any other.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from xml.etree.ElementTree import Element

from latex2mathml.converter import Converter
from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode
from mdit_py_plugins.amsmath import amsmath_plugin
from mdit_py_plugins.dollarmath import dollarmath_plugin
from mdit_py_plugins.tasklists import tasklists_plugin
from mdit_py_plugins.texmath import texmath_plugin
from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.token import STANDARD_TYPES, Token
from pygments.util import ClassNotFound

Node = str | list[Any]
_MAX_HIGHLIGHTED_CHARS = 32 << 10  # longer code has one colour
_LINK = re.compile(r"(https?://|mailto:)", re.IGNORECASE)  # what a link may point to
_ALIGNMENT = re.compile(r"text-align:(left|right|center)")
_LANGUAGE = re.compile(r"[\w+#.-]{1,32}")
_MATH = {"math_inline": "inline", "math_inline_double": "block", "math_single": "inline"}
_PLAIN_TAGS = {
    **{name: name for name in ("table", "thead", "tbody", "tr", "strong", "em", "blockquote", "hr")},
    "paragraph": "p",
    "s": "del",
    "hardbreak": "br",
    "softbreak": "br",
    "bullet_list": "ul",
}


def make_parser() -> MarkdownIt:
    """Return a parser for the Markdown that models write: GitHub's, with mathematics between `$`, `\\(` or `\\begin`."""
    parser = MarkdownIt("commonmark", {"html": False, "linkify": True})
    parser.enable(["table", "strikethrough", "linkify"])
    assert parser.linkify is not None
    parser.linkify.set({"fuzzy_link": False, "fuzzy_email": False})  # `node.js` is not an address
    dollarmath_plugin(parser, allow_space=False, allow_digits=False, allow_labels=False, double_inline=True)
    texmath_plugin(parser, delimiters="brackets")
    amsmath_plugin(parser)
    tasklists_plugin(parser)
    return parser


_parser = make_parser()


def parse(text: str) -> list[list[Any]]:
    """Return the blocks of a document, each as [its first line, its node]."""
    blocks: list[list[Any]] = []
    line = 0
    for child in SyntaxTreeNode(_parser.parse(text)).children:
        line = child.map[0] if child.map else line  # not every plugin says where its blocks begin
        blocks += [[line, node] for node in _convert(child)]
    return blocks


def _convert(node: SyntaxTreeNode) -> Iterator[Node]:
    """Yield the nodes for a part of the document. A part may be several nodes, such as the parts of a line."""
    kind = node.type
    if kind == "text":
        yield from filter(None, [node.content])
    elif kind == "inline" or (kind == "paragraph" and node.hidden):
        yield from _children(node)
    elif kind in _PLAIN_TAGS:
        yield [_PLAIN_TAGS[kind], {}, *_children(node)]
    elif kind == "code_inline":
        yield ["code", {}, node.content]
    elif kind in ("fence", "code_block"):
        yield _code_block(node.content, node.info.strip().split(" ")[0] if kind == "fence" else "")
    elif kind in _MATH or kind.startswith(("math", "amsmath")):
        yield _math(node.content, _MATH.get(kind, "block"))
    elif kind == "heading":
        yield [node.tag, {}, *_children(node)]
    elif kind == "ordered_list":
        start = node.attrs.get("start")
        yield ["ol", {"start": int(start)} if start is not None else {}, *_children(node)]
    elif kind == "list_item":
        is_task = "task-list-item" in str(node.attrs.get("class", ""))
        yield ["li", {"class": "task"} if is_task else {}, *_children(node)]
    elif kind in ("th", "td"):
        alignment = _ALIGNMENT.search(str(node.attrs.get("style", "")))
        yield [kind, {"class": alignment[1]} if alignment else {}, *_children(node)]
    elif kind == "html_inline":  # raw HTML is off, so this can only be the box of a task
        yield ["input", {"checked": 'checked="checked"' in node.content}]
    elif kind in ("link", "image"):
        yield from _link(node)
    else:
        yield node.content or "".join(str(child.content) for child in node.walk())


def _children(node: SyntaxTreeNode) -> Iterator[Node]:
    for child in node.children:
        yield from _convert(child)


def _link(node: SyntaxTreeNode) -> Iterator[Node]:
    """Yield a link. A picture is also a link: the page loads nothing from other hosts."""
    address = str(node.attrs.get("href") or node.attrs.get("src") or "")
    children = list(_children(node))
    if node.type == "image":
        children = [node.content or address]
    if _LINK.match(address):
        yield ["a", {"href": address}, *children]
    else:
        yield from children


def _code_block(source: str, language: str) -> Node:
    """Return code as a list of [class, text] or text. Classes are Pygments' short names."""
    name = language if _LANGUAGE.fullmatch(language) else ""
    lexer = _find_lexer(name) if len(source) <= _MAX_HIGHLIGHTED_CHARS else None
    pieces: Sequence[Node] = [source] if lexer is None else list(_highlight(source, lexer))
    return ["codeblock", {"language": name}, *pieces]


def _find_lexer(name: str) -> Lexer | None:
    if not name:
        return None
    try:
        return get_lexer_by_name(name, stripnl=False, ensurenl=False)
    except ClassNotFound:
        return None


def _highlight(source: str, lexer: Lexer) -> Iterator[Node]:
    """Yield `source` in pieces of one colour."""
    current, texts = "", list[str]()
    for kind, text in lexer.get_tokens(source):
        name = current if text.isspace() and texts else _class_of(kind)
        if name != current and texts:
            yield _piece(current, texts)
            texts = []
        current = name
        texts.append(text)
    if texts:
        yield _piece(current, texts)


def _class_of(kind: Any) -> str:
    """Return the class of a token. Plain names and punctuation have none."""
    while kind not in STANDARD_TYPES:
        kind = kind.parent
    if kind in (Token.Name, Token.Text, Token.Punctuation, Token.Text.Whitespace, Token.Other):
        return ""
    return STANDARD_TYPES[kind]


def _piece(name: str, texts: Iterable[str]) -> Node:
    text = "".join(texts)
    return ["span", {"class": name}, text] if name else text


def _math(latex: str, display: str) -> Node:
    """Return LaTeX as MathML. What cannot be converted is shown as code."""
    try:
        element = Converter(display=display).convert_to_element(latex.strip())
    except Exception:  # the library raises many types, also IndexError and KeyError
        return ["code", {"class": "math"}, latex.strip()]
    return ["math", {"display": display}, *(_element(child) for child in element)]


def _element(element: Element) -> Node:
    attributes = {name: html.unescape(value) for name, value in element.attrib.items()}
    texts = [html.unescape(element.text)] if element.text else []
    return [element.tag, attributes, *texts, *(_element(child) for child in element)]
