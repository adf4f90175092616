"""What is on disk is believed only as far as it is whole and was made under the same conditions."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coserve.config import Config
from coserve.warmup.gpu import Gpu
from coserve.warmup.key import cache_folder, cache_root, compiler_environment, key_fields, shape_key
from coserve.warmup.launch import plan_warm_up
from coserve.warmup.manifest import (
    Manifest,
    clear_cache,
    is_intact,
    list_files,
    load_manifest,
    save_manifest,
    with_parts,
)

FIELDS = {"torch": "1", "gpu": "H200"}
GPU = Gpu("NVIDIA H200", "9.0", 12080, 141 << 30)


def filled(folder: Path) -> Manifest:
    for name in ("triton/ABC/kernel.cubin", "inductor/fxgraph/ab/cd"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())
    manifest = with_parts(Manifest(FIELDS), "shape", {"steps"})
    manifest = Manifest(manifest.fields, manifest.parts, list_files(folder))
    save_manifest(folder, manifest)
    return manifest


def test_what_was_saved_is_found_again(tmp_path: Path) -> None:
    manifest = filled(tmp_path)
    assert load_manifest(tmp_path, FIELDS) == manifest
    assert len(manifest.files) == 2
    assert is_intact(tmp_path, manifest)
    assert not list(tmp_path.glob("*.tmp"))


def test_another_library_or_gpu_finds_nothing(tmp_path: Path) -> None:
    filled(tmp_path)
    assert load_manifest(tmp_path, FIELDS | {"torch": "2"}) == Manifest(FIELDS | {"torch": "2"})


@given(content=st.binary(max_size=200))
def test_a_damaged_manifest_counts_as_none(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("cache")
    (folder / "manifest.json").write_bytes(content)
    assert load_manifest(folder, FIELDS) == Manifest(FIELDS)


def test_a_damaged_or_missing_file_is_seen_and_further_ones_do_no_harm(tmp_path: Path) -> None:
    manifest = filled(tmp_path)
    kernel = tmp_path / "triton" / "ABC" / "kernel.cubin"
    (kernel.parent / "other.cubin").write_bytes(b"new")
    assert is_intact(tmp_path, manifest)
    before = kernel.read_bytes()
    kernel.write_bytes(before[:-1] + b"?")
    assert not is_intact(tmp_path, manifest)
    kernel.unlink()
    assert not is_intact(tmp_path, manifest)


def test_unfinished_entries_of_the_compilers_do_not_count(tmp_path: Path) -> None:
    before = filled(tmp_path).files
    unfinished = tmp_path / "triton" / "ABC" / "tmp.pid_7_x"
    unfinished.mkdir()
    (unfinished / "kernel.cubin").write_bytes(b"half")
    (tmp_path / "triton" / "ABC" / "kernel.json.tmp.7").write_bytes(b"half")
    assert list_files(tmp_path) == before


def test_clearing_removes_what_is_ours_alone(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / "mine").write_bytes(b"keep")
    clear_cache(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["mine"]


def test_the_folder_is_another_one_where_anything_differs_that_matters(tmp_path: Path) -> None:
    config = Config(data_dir=tmp_path)
    root = cache_root(config)
    assert root == tmp_path / "cache"
    assert cache_root(Config(cache_dir=tmp_path / "kernels")) == tmp_path / "kernels"
    fields = key_fields(GPU, root, {})
    assert cache_folder(root, fields).parent == root
    folders = {cache_folder(root, fields | {name: "other"}) for name in fields} | {cache_folder(root, fields)}
    assert len(folders) == len(fields) + 1
    assert key_fields(GPU, root, {"TRITON_CACHE_DIR": "/mine"}) != fields


def test_a_moved_cache_is_not_used(tmp_path: Path) -> None:
    """Triton's files name others by their absolute paths, and those that do not exist are compiled again."""
    (tmp_path / "link").symlink_to(tmp_path / "built")
    built, same, mounted = (
        plan_warm_up(Config(cache_dir=tmp_path / name), GPU).task for name in ("built", "link", "mounted")
    )
    assert (built.folder, built.fields) == (same.folder, same.fields)
    save_manifest(Path(built.folder), with_parts(Manifest(built.fields), built.shape, {"steps"}))
    (tmp_path / "built").rename(tmp_path / "mounted")
    for folder in (tmp_path / "mounted").iterdir():
        assert load_manifest(folder, built.fields).parts
        assert not load_manifest(folder, mounted.fields).parts
        assert Path(mounted.folder) != folder, "the owner of the first path may still use it"


def test_a_users_own_cache_folders_and_assembler_are_left_alone(tmp_path: Path) -> None:
    found = compiler_environment(tmp_path, {"TRITON_CACHE_DIR": "/mine", "TRITON_PTXAS_PATH": "/mine/ptxas"})
    assert found == {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    ours, other = (key_fields(GPU, tmp_path, environ) for environ in ({}, {"TRITON_PTXAS_PATH": "/mine/ptxas"}))
    assert ours != other


def test_the_assembler_is_the_one_that_triton_runs_by_itself(tmp_path: Path) -> None:
    """Else what a process compiles after inductor has chosen torch's own would have other keys than what an engine looks for."""
    knobs = pytest.importorskip("triton.knobs")
    found = compiler_environment(tmp_path, {}).get("TRITON_PTXAS_PATH")
    assert found is not None and Path(found).samefile(knobs.nvidia.ptxas.path)
    assert key_fields(GPU, tmp_path, {}) == key_fields(GPU, tmp_path, {"TRITON_PTXAS_PATH": found}), (
        "a child inherits it"
    )


def test_a_shape_is_the_bases_config_and_the_settings_that_kernels_depend_on(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    config = Config(model=str(tmp_path))
    assert shape_key(config) == shape_key(Config(model=str(tmp_path), port=9, max_queue=3))
    assert shape_key(config) != shape_key(Config(model=str(tmp_path), max_running=3))
    assert shape_key(config) != shape_key(Config(model=str(tmp_path), tp=2))
    before = shape_key(config)
    (tmp_path / "config.json").write_text('{"hidden_size": 128}')
    assert shape_key(config) != before
