"""The files of the web page: small, readable, and without anything from other hosts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from culet.serve.web_page import PUBLIC_PATHS

FOLDER = Path(__file__).parents[3] / "culet/serve/page"
FILES = sorted(path for path in FOLDER.rglob("*") if path.is_file())
NAMESPACES = ("http://www.w3.org/2000/svg", "http://www.w3.org/1998/Math/MathML")
ADDRESS = re.compile(r"""https?://[^\s"'`)]+""")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(FOLDER).as_posix())
def test_files_are_short_and_load_nothing_from_other_hosts(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 300
    addresses = [address for address in ADDRESS.findall(text) if not address.startswith((*NAMESPACES, r"https?:\/"))]
    assert addresses == []
    if path.suffix == ".js":
        assert re.search(r"innerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text) is None


def test_the_page_is_small_and_public() -> None:
    assert sum(path.stat().st_size for path in FILES) < 170_000
    served = {f"/page/{path.relative_to(FOLDER).as_posix()}" for path in FILES if path.suffix != ".json"}
    assert set(PUBLIC_PATHS) == {"/", "/docs", *served}


def test_every_import_exists() -> None:
    for path in FILES:
        if path.suffix == ".js":
            for name in re.findall(r'from "(\..*?)"', path.read_text(encoding="utf-8")):
                assert (path.parent / name).is_file(), (path, name)


def test_examples_are_complete() -> None:
    for examples in json.loads((FOLDER / "examples.json").read_text()).values():
        assert len(examples) == 4
        assert all(example["title"] and example["prompt"] for example in examples)
