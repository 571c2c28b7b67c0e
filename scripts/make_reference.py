"""Write docs/reference from the code: settings, environment variables and errors. `--check` only compares."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from culet import config, env, errors

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference"
NOTE = "<!-- Written by scripts/make_reference.py: change the code and run `make reference`. -->\n"


def settings() -> str:
    """One table per part of Config."""
    intro = "Each is a flag of the command line and a keyword of `LLM(...)`; those of `serve` are flags of `culet serve` alone."
    lines = ["# Settings", "", NOTE, intro, ""]
    for name, part in {**config.PARTS, **config.SERVE_PARTS}.items():
        lines += [f"## {name}", "", part.__doc__ or "", "", "| keyword | flag | default | meaning |", "|---|---|---|---|"]
        for setting in fields(part):
            flag = setting.metadata["flag"] or "--" + setting.name.replace("_", "-")
            choices = setting.metadata["choices"]
            doc = setting.metadata["doc"] + (f" One of: {', '.join(choices)}." if choices else "")
            default = "" if setting.default in (None, "") else f"`{setting.default}`"
            lines.append(f"| `{setting.name}` | `{flag}` | {default} | {doc} |")
        lines.append("")
    return "\n".join(lines)


def environment() -> str:
    """A table of all environment variables."""
    rows = [f"| `{variable.name}` | `{variable.default}` | {variable.doc} |" for variable in env.VARIABLES]
    return "\n".join(["# Environment variables", "", NOTE, "| variable | default | meaning |", "|---|---|---|", *rows, ""])


def error_tree() -> str:
    """The exception tree with status and exit code."""
    rows = []

    def walk(error: type[errors.CuletError], depth: int) -> None:
        example = error("")
        name = "&nbsp;" * 4 * depth + f"`{error.__name__}`"
        status, code = (errors.http_status(example), errors.exit_code(example)) if depth else ("", "")
        rows.append(f"| {name} | {status} | {code} | {error.__doc__} |")
        for child in error.__subclasses__():
            walk(child, depth + 1)

    walk(errors.CuletError, 0)
    return "\n".join(["# Errors", "", NOTE, "| error | HTTP | exit | meaning |", "|---|---|---|---|", *rows, ""])


PAGES = {"settings.md": settings, "environment.md": environment, "errors.md": error_tree}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 if a page is out of date, write nothing")
    check = parser.parse_args().check
    stale = []
    for name, make in PAGES.items():
        path, text = FOLDER / name, make()
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if not check:
                path.write_text(text)
    print(("out of date: " if check else "written: ") + (", ".join(stale) or "none"))
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
