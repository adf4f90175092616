"""The folder of a warm-up's caches: its name, what is in it, and Python's own bytecode."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import coserve
from coserve.config import Config
from coserve.engine.warmup import key
from coserve.engine.warmup.key import Gpu, cache_folder, cache_root, compiler_environment, key_fields, shape_key
from coserve.engine.warmup.launch import cache_bytecode, plan_warm_up
from coserve.engine.warmup.manifest import Manifest, clear, load, save

FIELDS = {"torch": "1", "gpu": "H200"}
GPU = Gpu("NVIDIA H200", "9.0", 12080, 141 << 30)


def filled(folder: Path) -> Manifest:
    for name in ("triton/ABC/kernel.cubin", "inductor/fxgraph/ab/cd"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())
    save(folder, Manifest(FIELDS), "shape", {"steps"})
    return load(folder, FIELDS)


def test_what_was_saved_is_found_again(tmp_path: Path) -> None:
    found = filled(tmp_path)
    assert found.parts == {"shape": ["steps"]} and len(found.files) == 2
    assert not list(tmp_path.glob("*.tmp"))
    save(tmp_path, found, "other", {"steps"})
    assert load(tmp_path, FIELDS).parts.keys() == {"shape", "other"}


def test_another_library_or_gpu_finds_nothing(tmp_path: Path) -> None:
    filled(tmp_path)
    assert load(tmp_path, FIELDS | {"torch": "2"}) == Manifest(FIELDS | {"torch": "2"})


@given(content=st.binary(max_size=200))
def test_a_damaged_manifest_counts_as_none(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("cache")
    (folder / "manifest.json").write_bytes(content)
    assert load(folder, FIELDS) == Manifest(FIELDS)


def test_a_damaged_or_missing_file_is_seen_and_further_ones_do_no_harm(tmp_path: Path) -> None:
    found, kernel = filled(tmp_path), tmp_path / "triton" / "ABC" / "kernel.cubin"
    (kernel.parent / "other.cubin").write_bytes(b"new")
    assert load(tmp_path, FIELDS) == found
    kernel.write_bytes(kernel.read_bytes()[:-1] + b"?")
    assert load(tmp_path, FIELDS) == Manifest(FIELDS)
    kernel.unlink()
    assert load(tmp_path, FIELDS) == Manifest(FIELDS)


def test_unfinished_entries_of_the_compilers_do_not_count(tmp_path: Path) -> None:
    before = filled(tmp_path)
    unfinished = tmp_path / "triton" / "ABC" / "tmp.pid_7_x"
    unfinished.mkdir()
    (unfinished / "kernel.cubin").write_bytes(b"half")
    (tmp_path / "triton" / "ABC" / "kernel.json.tmp.7").write_bytes(b"half")
    save(tmp_path, before, "shape", {"steps"})
    assert load(tmp_path, FIELDS) == before


def test_clearing_removes_what_is_ours_alone(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / "mine").write_bytes(b"keep")
    clear(tmp_path)
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
        plan_warm_up(Config(cache_dir=tmp_path / name), GPU)[0] for name in ("built", "link", "mounted")
    )
    assert (built.folder, built.fields) == (same.folder, same.fields)
    Path(built.folder).mkdir(parents=True)
    save(Path(built.folder), Manifest(built.fields), built.shape, {"steps"})
    (tmp_path / "built").rename(tmp_path / "mounted")
    for folder in (tmp_path / "mounted").iterdir():
        assert load(folder, built.fields).parts
        assert not load(folder, mounted.fields).parts
        assert Path(mounted.folder) != folder, "the owner of the first path may still use it"


def test_a_users_own_cache_folders_and_assembler_are_left_alone(tmp_path: Path) -> None:
    found = compiler_environment(tmp_path, {"TRITON_CACHE_DIR": "/mine", "TRITON_PTXAS_PATH": "/mine/ptxas"})
    assert found == {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    ours, other = (key_fields(GPU, tmp_path, environ) for environ in ({}, {"TRITON_PTXAS_PATH": "/mine/ptxas"}))
    assert ours != other


def test_the_assembler_is_the_one_that_triton_runs_by_itself(tmp_path: Path) -> None:
    """Else what a process compiles after inductor has chosen torch's own would have other keys than what an engine
    looks for."""
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


CODE = [f"{name}/code.py" for name in key.SOURCES if not name.endswith(".py")] + [
    name for name in key.SOURCES if name.endswith(".py")
]
MEANING = ("core/gpu_memory.py", "core/training/code.py", "core/types.py", "admission/code.py", "lora/files/code.py")
"""Where it is said what measured costs mean, which are kept beside the kernels."""


@pytest.mark.parametrize("changed", [*MEANING, "kernels/code.py"])
def test_other_code_has_another_cache(changed: str, tmp_path: Path) -> None:
    for name in {*CODE, *MEANING, "cli/code.py"}:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("")
    before = key.source_digest(tmp_path)
    (tmp_path / "cli" / "code.py").write_text("x = 1")
    assert key.source_digest(tmp_path) == before
    (tmp_path / changed).write_text("x = 1")
    assert key.source_digest(tmp_path) != before


def test_all_that_is_named_is_there() -> None:
    folder = Path(coserve.__file__).parent
    assert [name for name in key.SOURCES if not (folder / name).exists()] == []


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The sources of an installed package, which no test of this process has imported."""
    path = tmp_path / "site" / "some_library.py"
    path.parent.mkdir()
    path.touch()
    monkeypatch.syspath_prepend(path.parent)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", "")
    return path


def cached(tmp_path: Path) -> bool:
    """Whether bytecode goes to the cache folder afterwards, of children too."""
    cache_bytecode(Config(data_dir=tmp_path), "some_library")
    folder = str(tmp_path / "cache" / "bytecode")
    found = sys.pycache_prefix == folder
    assert found == (os.environ["PYTHONPYCACHEPREFIX"] == folder) == (not sys.dont_write_bytecode)
    return found


@pytest.mark.usefixtures("library")
def test_a_library_that_nobody_compiled_is_cached(tmp_path: Path) -> None:
    assert cached(tmp_path)
    assert "PYTHONDONTWRITEBYTECODE" not in os.environ


def test_a_compiled_library_is_read_as_it_is(tmp_path: Path, library: Path) -> None:
    compiled = library.parent / "__pycache__" / f"some_library.{sys.implementation.cache_tag}.pyc"
    compiled.parent.mkdir()
    compiled.touch()
    assert not cached(tmp_path)


@pytest.mark.usefixtures("library")
def test_a_folder_that_the_user_chose_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", "/chosen")
    assert not cached(tmp_path)
