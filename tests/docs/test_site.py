"""The documentation's site builds without a warning, every link inside it resolves, and its search finds the pages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]


class PageReader(HTMLParser):
    """Collects the links and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.hosts: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        for name in ("href", "src"):
            if value := values.get(name):
                self.links.append(value)
                if tag in ("script", "link", "img") and urlsplit(value).netloc:
                    self.hosts.add(urlsplit(value).netloc)
        self.anchors |= {value for name in ("id", "name") if (value := values.get(name))}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, PageReader]:
    return {path: PageReader(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}


def test_every_page_of_the_docs_is_there(pages: dict[Path, PageReader]) -> None:
    sources = list((ROOT / "docs").rglob("*.md"))
    assert len(pages) >= len(sources)


def test_every_link_resolves(pages: dict[Path, PageReader]) -> None:
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (parts.fragment and target in pages and parts.fragment not in pages[target].anchors):
                broken.append((path.name, link))
    assert broken == []


def test_nothing_is_loaded_from_other_hosts(pages: dict[Path, PageReader]) -> None:
    assert {host for page in pages.values() for host in page.hosts} == set()


def test_search_finds_pages(site: Path) -> None:
    index = json.loads((site / "search/search_index.json").read_text())
    found = {entry["location"].split("#")[0] for entry in index["docs"] if "systemd" in entry["text"]}
    assert "guides/deployment.html" in found


def test_navigation_is_the_index(site: Path) -> None:
    text = (site / "index.html").read_text()
    assert all(f">\n    {title}\n" in text or title in text for title in ("Troubleshooting", "Coming from vLLM", "Python API"))
