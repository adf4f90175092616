from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from coserve.lora.store.tensor_writer import write_tensors

TENSORS = {
    "b.weight": torch.arange(6.0).view(2, 3),
    "a.é": torch.randn(5),
    "a": torch.randn(64, 3)[:40],
    "none": torch.empty(0, 4),
    "scalar": torch.tensor(1.5),
    "b.bytes": torch.arange(7, dtype=torch.uint8),
}


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_the_file_is_that_of_the_library(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors(path, TENSORS, metadata)
    assert path.read_bytes() == save(TENSORS, metadata)
    found = load_file(path)
    assert found.keys() == TENSORS.keys() and all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)


def test_equal_tensors_get_equal_bytes(tmp_path: Path) -> None:
    write_tensors(tmp_path / "one", TENSORS, {"format": "pt", "base": "x"})
    write_tensors(tmp_path / "other", dict(reversed(TENSORS.items())), {"base": "x", "format": "pt"})
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
