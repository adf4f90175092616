"""Bytecode is cached in our folder only where Python keeps none."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from coserve.config import Config
from coserve.engine.warmup.bytecode import cache_bytecode


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
