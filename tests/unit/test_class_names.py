"""One word, one meaning: no two public classes of the package share a name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import culet

ROOT = Path(culet.__file__).parent
SHARED: dict[str, str] = {}  # class name -> why several classes must have it


def public_classes(source: str) -> list[str]:
    """Return the names of all public classes in a file, also of nested ones."""
    classes = (node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))
    return [name for name in classes if not name.startswith("_")]


def shared_names(root: Path) -> dict[str, list[str]]:
    """Return each public class name that occurs more than once under `root`, with its files."""
    files: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(root.rglob("*.py")):
        for name in public_classes(path.read_text(encoding="utf-8")):
            files[name].append(path.relative_to(root).as_posix())
    return {name: places for name, places in files.items() if len(places) > 1}


def test_public_classes_have_names_of_their_own() -> None:
    shared = shared_names(ROOT)
    assert {name: places for name, places in shared.items() if name not in SHARED} == {}
    assert SHARED.keys() <= shared.keys(), "an exception that is not needed"


def test_shared_names_are_found(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.py").write_text("class Form: pass\nclass _Own: pass\nclass Other: pass\n")
    (tmp_path / "inner/b.py").write_text("def f():\n    class Form: pass\nclass _Own: pass\nOther = int\n")
    assert shared_names(tmp_path) == {"Form": ["a.py", "inner/b.py"]}
