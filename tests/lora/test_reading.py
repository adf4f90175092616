"""An adapter's file goes straight to where the adapter stays, on several threads, and is hashed beside that: what is
told of a bad one is what reading it piece by piece would tell."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from coserve.core.errors import CorruptAdapter
from coserve.core.names import ADAPTER_WEIGHTS
from coserve.core.types import AdapterDigests, LoraSettings
from coserve.finetune.init import new_adapter
from coserve.kernels.lora.types import VECTOR
from coserve.lora.files.finite import all_finite
from coserve.lora.store.files import load_adapter, load_packed, save_adapter
from coserve.lora.store.packing import PackedSites, packed
from tests.support.finetuning import tiny_base
from tests.support.sized_adapters import same_adapter

SPEC = tiny_base("llama").spec
KINDS = {
    "F32": (torch.float32, torch.int32),
    "F16": (torch.float16, torch.int16),
    "BF16": (torch.bfloat16, torch.int16),
}
DTYPES = [dtype for dtype, _ in KINDS.values()]
PREFIX = "base_model.model."


def save(folder: Path, dtype: torch.dtype = torch.float32, **changes: int) -> dict[str, torch.Tensor]:
    """An adapter's files, its tensors of this type; returns them."""
    weights = new_adapter(LoraSettings(**changes), SPEC, seed=0, dtype=torch.float32, device="cpu")  # type: ignore[arg-type]
    save_adapter(folder, weights, SPEC)
    return rewrite(folder, {name: torch.randn(tensor.shape).to(dtype) for name, tensor in tensors_of(folder).items()})


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(folder / ADAPTER_WEIGHTS)
    return found


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    return tensors


def digests(folder: Path) -> AdapterDigests:
    return AdapterDigests(weights=hashlib.sha256((folder / ADAPTER_WEIGHTS).read_bytes()).hexdigest())


@pytest.mark.parametrize("in_file", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("changes", [{"r": VECTOR}, {"r": 3}, {"r": 4, "bd_blocks": 2}])
def test_an_adapter_is_what_its_file_has(
    tmp_path: Path, in_file: torch.dtype, dtype: torch.dtype, changes: dict[str, int]
) -> None:
    """Also where it lies for the kernels: there block-diagonal pairs have their zeros, and rows are padded with
    some."""
    tensors = save(tmp_path, in_file, **changes)
    found = load_adapter(tmp_path, SPEC, dtype=dtype, digests=digests(tmp_path))
    for name, pair in found.sites.items():
        assert torch.equal(pair.a_RD, tensors[f"{PREFIX}{name}.lora_A.weight"].to(dtype))
        assert torch.equal(pair.b_OR, tensors[f"{PREFIX}{name}.lora_B.weight"].to(dtype))
    lain = load_packed(tmp_path, SPEC, dtype=dtype, digests=digests(tmp_path))
    expected = packed(found, for_kernels=True)
    assert same_adapter(lain, expected)
    assert isinstance(lain.sites, PackedSites) and isinstance(expected.sites, PackedSites)
    assert lain.sites.layout.places == expected.sites.layout.places and lain.sites.layout.for_kernels
    if changes["r"] == 3:
        for pair in lain.sites.values():
            out, rank = pair.b_OR.shape
            assert not pair.b_OR.as_strided((out, VECTOR), (VECTOR, 1))[:, rank:].any()
    assert packed(lain, for_kernels=True) is lain, "not copied again"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3.4e38])
@pytest.mark.parametrize("in_file", [torch.float32, torch.bfloat16])
def test_the_first_site_that_is_not_finite_is_named(tmp_path: Path, value: float, in_file: torch.dtype) -> None:
    tensors = save(tmp_path, in_file, r=VECTOR)
    *_, second, _, third = SPEC.sites
    for name in (third, second):
        tensors[f"{PREFIX}{name}.lora_B.weight"][-1, -1] = value
    rewrite(tmp_path, tensors)
    for load in (
        lambda: load_adapter(tmp_path, SPEC, dtype=torch.bfloat16, digests=digests(tmp_path)),
        lambda: load_packed(tmp_path, SPEC, dtype=torch.bfloat16),
    ):
        with pytest.raises(CorruptAdapter, match=f"^{second}: its weights are not finite in bfloat16"):
            load()


@pytest.mark.parametrize("harm", ["none", "nan", "shape"])
def test_a_file_that_is_not_the_registered_one_is_told_as_such(tmp_path: Path, harm: str) -> None:
    """Whatever else is wrong with it."""
    tensors = save(tmp_path, r=VECTOR)
    registered = digests(tmp_path)
    name = next(iter(tensors))
    tensors[name] = {"none": tensors[name] + 1, "nan": tensors[name] * float("nan"), "shape": tensors[name][:1]}[
        harm
    ].clone()
    rewrite(tmp_path, tensors)
    with pytest.raises(CorruptAdapter, match="the file is not the one that was registered: its SHA-256 differs"):
        load_packed(tmp_path, SPEC, dtype=torch.float32, digests=registered)


def test_a_file_that_becomes_shorter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, r=VECTOR)
    size, read = (tmp_path / ADAPTER_WEIGHTS).stat().st_size, os.preadv

    def shorter(fd: int, buffers: list[memoryview], offset: int) -> int:
        return read(fd, buffers, offset) if offset < size // 2 else 0

    monkeypatch.setattr(os, "preadv", shorter)
    with pytest.raises(CorruptAdapter, match="became shorter"):
        load_packed(tmp_path, SPEC, dtype=torch.float32)
    with pytest.raises(CorruptAdapter, match="SHA-256 differs"):
        load_packed(tmp_path, SPEC, dtype=torch.float32, digests=AdapterDigests(weights="0" * 64))


@given(st.sampled_from(sorted(KINDS)), st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20), st.data())
def test_bits_tell_what_is_finite(kind: str, numbers: list[int], data: st.DataObject) -> None:
    dtype, integer = KINDS[kind]
    width = 8 * dtype.itemsize
    edges = st.sampled_from([float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1.0, -1.0])
    bits = torch.tensor([n % 2**width - 2 ** (width - 1) for n in numbers]).to(integer)
    values = torch.cat((bits.view(dtype), torch.tensor(data.draw(st.lists(edges, max_size=2))).to(dtype)))
    assert all_finite(values.view(torch.uint8).numpy(), kind) == bool(values.isfinite().all())
    assert all_finite(np.empty(0, np.uint8), kind)
