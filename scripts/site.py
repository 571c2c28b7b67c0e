"""Hooks of mkdocs: the navigation comes from docs/README.md, and pages outside docs/ that it links to are part of the site."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
# Pages of the repository that pages in docs/ link to. On the site they are below repository/.
OTHERS = ("CHANGELOG.md", "CONTRIBUTING.md", "culet/embedded/README.md", "training/README.md", "benchmarks/results/README.md")
_SECTION = re.compile(r"^\| \*\*(.+?)\*\* \|")
_ENTRY = re.compile(r"^\| \[(.+?)\]\(([^)]+\.md)\) \|")
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Take the navigation from the sections and links of the index."""
    nav: list[Any] = [{"Overview": "README.md"}]
    for line in (ROOT / "docs/README.md").read_text().splitlines():
        if section := _SECTION.match(line):
            nav.append({section[1]: []})
        elif entry := _ENTRY.match(line):
            [pages] = nav[-1].values()
            pages.append({entry[1][0].upper() + entry[1][1:]: entry[2]})
    nav.append({"Changelog": "repository/CHANGELOG.md"})
    config.nav = nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path in OTHERS:
        files.append(File.generated(config, f"repository/{path}", content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    name = page.file.src_uri
    place = Path(name).relative_to("repository") if name.startswith("repository/") else Path("docs") / name

    def replace(link: re.Match[str]) -> str:
        mark, text, target = link.groups()
        path, hash_sign, anchor = target.partition("#")
        if "://" in target or not path:
            return link[0]
        found = posixpath.normpath(posixpath.join(place.parent.as_posix(), path))
        if found.startswith("docs/"):
            uri = found.removeprefix("docs/")
        elif found in OTHERS:
            uri = f"repository/{found}"
        else:
            return f"{text} (`{found}`)"  # a file that is not a page
        return f"{mark}[{text}]({posixpath.relpath(uri, posixpath.dirname(name) or '.')}{hash_sign}{anchor})"

    parts = re.split(r"(```.*?```)", markdown, flags=re.DOTALL)
    return "".join(part if part.startswith("```") else _LINK.sub(replace, part) for part in parts)
