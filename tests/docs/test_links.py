"""Links between the documents work, and the files they name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        *(ROOT / name for name in ("culet/embedded/README.md", "benchmarks/results/README.md", "training/README.md")),
    ]
)
# Pages that guide the reader through the code by file name.
MAPS = [ROOT / name for name in ("docs/concepts/architecture.md", "docs/guides/how-to-add.md", "CONTRIBUTING.md")]
FOLDERS = ("culet", "training", "tests", "benchmarks", "docs", "scripts", "examples")
PLACEHOLDER = "NAME"  # in the path of a file that the reader will write


def page_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub generates for a page's headings."""
    headings = re.findall(r"^#+ (.+)$", without_code(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """Return the relative links of a page that lead nowhere."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and anchor not in anchors(path.read_text())):
            broken.append(link)
    return broken


def missing_files(text: str) -> list[str]:
    """Return the paths in backquotes or in a diagram that do not exist."""
    named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+)`", text)
    for diagram in re.findall(r"```mermaid\n(.*?)```", text, re.DOTALL):
        named += [f"culet/{path}" for path in re.findall(r"[a-z_]+/[\w/]*\.py", diagram)]
    return [path for path in named if PLACEHOLDER not in path and not (ROOT / path).exists()]


def replaced_by(decision: str) -> list[int]:
    """Return the numbers of the decisions that a decision replaces or changes."""
    lines = re.findall(r"^(?:Replaces|Changes|Restores): .*(?:\n.+)*", decision, re.MULTILINE)
    links = re.findall(r"\[(\d+)\]", " ".join(line.partition("Builds on")[0] for line in lines))
    return [int(number) for number in links]


def unclear_decisions(decisions: dict[int, str]) -> list[str]:
    """Return the decisions without a status, those that do not say what they replace, and those that name no successor."""
    problems = []
    for number, text in decisions.items():
        if not text.split("\n\n")[1].startswith("Status: "):
            problems.append(f"{number} has no status")
        if not re.search(r"^(Replaces|Changes): ", text, re.MULTILINE):
            problems.append(f"{number} does not say what it replaces")
        for other in replaced_by(text):
            status = decisions[other].split("\n\n")[1]
            if f"[{number}]" not in status:
                problems.append(f"the status of {other} does not name {number}")
    return problems


def tree_entries(text: str) -> list[str]:
    """Return the paths in the tree of the repository."""
    (tree,) = re.findall(r"```\n(.*?)```", text, re.DOTALL)
    entries, parent = [], ""
    for line in tree.splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            parent = name
        entries.append(parent + name if line.startswith(" ") else name)
    return entries


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_work(page: Path) -> None:
    assert broken_links(page) == []


@pytest.mark.parametrize("page", MAPS, ids=page_name)
def test_named_files_exist(page: Path) -> None:
    assert missing_files(page.read_text()) == []


def test_tree_of_the_repository() -> None:
    entries = tree_entries((ROOT / "docs/concepts/repository.md").read_text())
    packages = {f"culet/{path.parent.name}/" for path in (ROOT / "culet").glob("*/__init__.py")}
    modules = {f"culet/{path.name}" for path in (ROOT / "culet").glob("*.py")} - {"culet/__init__.py"}
    assert [entry for entry in entries if not (ROOT / entry).exists()] == []
    assert (packages | modules) - set(entries) == set(), "the tree leaves these out"


def test_every_guide_is_in_the_index() -> None:
    index = (ROOT / "docs/README.md").read_text()
    pages = [path for folder in ("concepts", "guides") for path in (ROOT / "docs" / folder).glob("*.md")]
    assert [page_name(path) for path in pages if f"({path.parent.name}/{path.name})" not in index] == []


def test_every_log_and_decision_is_in_its_index() -> None:
    for folder in ("log", "decisions"):
        index = (ROOT / "docs" / folder / "README.md").read_text()
        pages = sorted((ROOT / "docs" / folder).glob("*.md"))
        assert [path.name for path in pages if path.name != "README.md" and f"({path.name})" not in index] == []


def test_decisions_say_what_they_replace() -> None:
    """Each has a status and says what it replaces or changes. What it replaces says so, and so does the index."""
    pages = sorted((ROOT / "docs/decisions").glob("0*.md"))
    assert pages
    assert unclear_decisions({int(path.name[:4]): path.read_text() for path in pages}) == []
    index = (ROOT / "docs/decisions/README.md").read_text()
    rows = {int(number): row for number, row in re.findall(r"^\| \[(\d+)\].*\|(.*)\|$", index, re.MULTILINE)}
    for path in pages:
        for number in replaced_by(path.read_text()):
            assert re.search(rf"\b{int(path.name[:4])}\b", rows[number]), (
                f"the index does not say that {path.name} changes {number}"
            )


# Tests of the checks themselves


def test_the_checks_find_mistakes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A title: here\n\n[a](missing.md) [b](page.md#a-title-here) [c](#no) [d](https://example.org/x)\n")
    assert broken_links(page) == ["missing.md", "#no"]
    text = (
        "`culet/types.py` `culet/no_such.py` `culet/attention/NAME.py`\n```mermaid\na[serve/app.py] --> b[serve/none.py]\n```"
    )
    assert missing_files(text) == ["culet/no_such.py", "culet/serve/none.py"]


def test_unclear_decisions_are_found() -> None:
    first = "# 1. A\n\nStatus: accepted. [2](b.md) changes it.\n\nReplaces: nothing.\n"
    second = "# 2. B\n\nStatus: accepted.\nReplaces: the rule\nof [1](a.md). Builds on [3](c.md).\n"
    assert unclear_decisions({1: first, 2: second}) == []
    assert unclear_decisions({1: first.replace("[2]", "2"), 2: second}) == ["the status of 1 does not name 2"]
    assert unclear_decisions({1: first.replace("Replaces", "Refers to")}) == ["1 does not say what it replaces"]
    assert unclear_decisions({1: first.replace("Status: ", "")}) == ["1 has no status"]
