"""Fixtures of the tests of structured output."""

from __future__ import annotations

import pytest

from culet.structured.compiler import GrammarCompiler
from tests.unit.structured.call_walks import make_compiler


@pytest.fixture(scope="session")
def compiler() -> GrammarCompiler:
    """A compiler for bytes, a few words and the special tokens of calls."""
    return make_compiler()
