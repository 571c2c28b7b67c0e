"""`culet plan` counts the bytes that weights really take in memory, from the config alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from culet.models.checkpoint import open_checkpoint
from culet.models.quantised.part_bytes import part_bytes
from tests.models.formats import writing
from tests.models.formats.comparing import load
from tests.models.formats.test_compressed_tensors import NVFP4, floats, integers

TABLES = {
    "int4 in groups": (integers(4, 32), "pack-quantized"),
    "int4 per channel": (integers(4), "pack-quantized"),
    "int8": (integers(8), "pack-quantized"),
    "fp8": (floats("channel"), "float-quantized"),
    "nvfp4": (NVFP4, "nvfp4-pack-quantized"),
}


def planned(folder: Path) -> dict[str, int]:
    checkpoint = open_checkpoint(str(folder))
    return part_bytes(checkpoint.spec, checkpoint.config, 4)


@pytest.mark.parametrize("target", ["Embedding", "re:.*embed_tokens.*"])
@pytest.mark.parametrize("case", TABLES)
def test_tables_of_compressed_tensors(case: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are stored like matrices, and a scheme for linear modules does not count for them."""
    monkeypatch.setattr(writing, "LINEARS", (*writing.LINEARS, "embed_tokens", "embed_tokens_per_layer"))
    weights, form = TABLES[case]
    table, matrix = writing.compressed(weights, form), writing.compressed(integers(8), "pack-quantized")
    pair = writing.write_pair(
        tmp_path,
        "E2B",
        lambda module, weight: (table if "embed_tokens" in module else matrix)(module, weight),
        writing.ct_config((["Linear"], integers(8), "pack-quantized"), ([target], weights, form)),
    )
    model, sizes = load(pair.folder), planned(pair.folder)
    assert sizes["token embedding"] == model.embedding.num_bytes
    assert sizes["per-layer embeddings"] == model.ple.table.num_bytes


def test_plain_tables_of_compressed_tensors(tmp_path: Path) -> None:
    """`Linear` means no tables."""
    weights, form = TABLES["int4 in groups"]
    pair = writing.write_pair(
        tmp_path, "E2B", writing.compressed(weights, form), writing.ct_config((["Linear"], weights, form))
    )
    model, sizes = load(pair.folder), planned(pair.folder)
    assert sizes["token embedding"] == model.embedding.num_bytes
    assert sizes["per-layer embeddings"] == model.ple.table.num_bytes
