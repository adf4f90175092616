"""A packed file holds what PEFT's files hold, as memory holds it; it is used for them alone, and missed by nobody."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from coserve.core.errors import StorageBusy
from coserve.core.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from coserve.core.types import AdapterDigests, AdapterRef, LoraSettings
from coserve.finetune.init import new_adapter
from coserve.lora.files.packed_header import PACKED_FILE, is_sound
from coserve.lora.files.tensorfile import digest_file
from coserve.lora.store.files import load_packed, save_adapter
from coserve.lora.store.host_memory import HostMemory
from coserve.lora.store.packed_files import PackedFiles, PackedForm
from coserve.lora.store.packing import PartedSites, packed_bytes
from coserve.lora.store.reads import LoadTimes
from coserve.model.lora import LoraWeights
from coserve.state.folder import DataFolder
from tests.support.finetuning import tiny_base

SPEC = tiny_base("llama").spec
FORM = PackedForm(SPEC.fingerprint, torch.bfloat16, for_kernels=True)


def save(folder: Path, seed: int = 0, **settings: int) -> AdapterDigests:
    weights = new_adapter(LoraSettings(**settings), SPEC, seed=seed, dtype=torch.float32, device="cpu")  # type: ignore[arg-type]
    torch.manual_seed(seed)
    for pair in weights.sites.values():
        pair.b_OR.normal_()
    (folder / ADAPTER_WEIGHTS).unlink(missing_ok=True)
    save_adapter(folder, weights, SPEC)
    return AdapterDigests(*(digest_file(folder, name) for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG)))


def same(one: LoraWeights, other: LoraWeights) -> bool:
    assert isinstance(one.sites, PartedSites) and isinstance(other.sites, PartedSites)
    parts = zip(one.sites.parts, other.sites.parts, strict=True)
    return one.sites.layout.places == other.sites.layout.places and all(torch.equal(*both) for both in parts)


class Reads:
    """Reads of one folder by an engine that starts anew each time; `peft` counts those of PEFT's files."""

    def __init__(self, folder: Path, digests: AdapterDigests) -> None:
        self.folder, self.digests, self.peft = folder, digests, 0
        self.notes: tuple[str, ...] = ()

    def __call__(self, form: PackedForm = FORM, harm: Callable[[Path], object] = lambda _: None) -> LoraWeights:
        """`harm`: happens to the folder between opening a file and reading its bytes."""
        files, memory = PackedFiles(form, LoadTimes()), HostMemory(1 << 20, for_kernels=form.for_kernels)

        def read() -> LoraWeights:
            self.peft += 1
            options = {"for_kernels": form.for_kernels}
            return load_packed(self.folder, SPEC, dtype=form.dtype, digests=self.digests, **options)  # type: ignore[arg-type]

        found = files.load(self.folder, self.digests, read)
        harm(self.folder)
        size = packed_bytes(found) if isinstance(found, LoraWeights) else found.layout.bytes
        copy = memory.copy(found, memory.allocate(size))
        files.close()
        self.notes = files.notes
        return copy


@pytest.mark.parametrize("settings", [{"r": 8}, {"r": 3}, {"r": 4, "bd_blocks": 2}])
@pytest.mark.parametrize("form", [FORM, replace(FORM, dtype=torch.float32, for_kernels=False)])
def test_the_second_read_needs_no_other_file_and_is_the_same(
    tmp_path: Path, settings: dict[str, int], form: PackedForm
) -> None:
    read = Reads(tmp_path, save(tmp_path, **settings))
    first, second = read(form), read(form)
    assert same(first, second) and first.settings == second.settings
    assert read.peft == 1
    assert is_sound(tmp_path)


def cut(folder: Path) -> None:
    path = folder / PACKED_FILE
    path.write_bytes(path.read_bytes()[:-1000])


def rot(folder: Path) -> None:
    path = folder / PACKED_FILE
    content = bytearray(path.read_bytes())
    content[-1000] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("harm", [cut, lambda folder: (folder / PACKED_FILE).write_bytes(b"other")])
def test_a_broken_packed_file_is_written_again(tmp_path: Path, harm: Callable[[Path], object]) -> None:
    read = Reads(tmp_path, save(tmp_path, r=8))
    first = read()
    harm(tmp_path)
    assert not is_sound(tmp_path)
    assert same(read(), first) and same(read(), first)
    assert read.peft == 2 and is_sound(tmp_path)


def test_a_file_that_is_cut_off_while_it_is_read_is_left_for_peft_s(tmp_path: Path) -> None:
    read = Reads(tmp_path, save(tmp_path, r=8))
    first = read()
    with pytest.raises(StorageBusy, match="cut off"):
        read(harm=cut)
    assert read.peft == 1
    assert same(read(), first) and read.peft == 2


def test_rot_is_found_by_its_digest(tmp_path: Path) -> None:
    Reads(tmp_path, save(tmp_path, r=8))()
    rot(tmp_path)
    assert not is_sound(tmp_path)


def test_a_packed_file_of_other_files_another_base_or_form_is_not_used(tmp_path: Path) -> None:
    read = Reads(tmp_path, save(tmp_path, r=8))
    first = read()
    read(replace(FORM, fingerprint="another"))
    read(replace(FORM, dtype=torch.float16))
    assert read.peft == 3
    again = Reads(tmp_path, save(tmp_path, seed=1, r=8))
    assert not same(again(), first) and again.peft == 1


def test_a_file_that_cannot_be_written_is_told_and_missed_by_nobody(tmp_path: Path) -> None:
    folder = tmp_path / "1"
    folder.mkdir()
    read = Reads(folder, save(folder, r=8))
    (tmp_path / f".tmp-1-{PACKED_FILE}").mkdir()
    assert same(read(), read())
    assert read.peft == 2 and len(read.notes) == 1


@pytest.mark.parametrize("most", [0, 2])
def test_adapters_that_wait_to_be_written_are_bounded_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """One may always wait, of any size."""
    folders, written = [tmp_path / str(number) for number in range(5)], threading.Event()
    for folder in folders:
        folder.mkdir()
    digests = [save(folder) for folder in folders]
    size = packed_bytes(load_packed(folders[0], SPEC, dtype=FORM.dtype))
    monkeypatch.setattr(os, "fsync", lambda _: written.wait())
    files, held = PackedFiles(FORM, LoadTimes(), most * size), list[weakref.ref[LoraWeights]]()
    try:
        for folder, own in zip(folders, digests, strict=True):
            found = files.load(folder, own, lambda: load_packed(folder, SPEC, dtype=FORM.dtype))  # noqa: B023
            assert isinstance(found, LoraWeights)
            held.append(weakref.ref(found))
            del found
        gc.collect()
        assert sum(each() is not None for each in held) == max(1, most)
    finally:
        written.set()
        files.close()
    assert sum((folder / PACKED_FILE).exists() for folder in folders) == max(1, most)


def test_what_a_killed_engine_has_begun_to_write_is_swept_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = DataFolder(tmp_path)
    folder = data.adapter(AdapterRef("poet", 1))
    folder.mkdir(parents=True)
    read = Reads(folder, save(folder, r=8))

    def killed(_: int) -> None:
        raise RuntimeError

    with monkeypatch.context() as patched:
        patched.setattr("coserve.lora.store.packed_files.os.fsync", killed)
        read()
    assert len([*tmp_path.rglob("*packed*")]) == 1
    data.sweep()
    assert not [*tmp_path.rglob("*packed*")]
