"""What speeds imports up leaves no trace but the packages that are not used."""

from __future__ import annotations

import gc
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from coserve.engine.warming.fast_imports import UNUSED, fast_imports


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All of them, and none is imported yet."""
    for name in UNUSED:
        (tmp_path / f"{name}.py").touch()
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("installed")
def test_packages_are_hidden_inside_only() -> None:
    assert all(map(find_spec, UNUSED))
    with fast_imports():
        assert not any(map(find_spec, UNUSED))
        assert not gc.isenabled()
    assert all(map(find_spec, UNUSED))
    assert gc.isenabled()


@pytest.mark.usefixtures("installed")
def test_they_are_found_again_after_an_import_that_fails() -> None:
    everything = metadata.packages_distributions
    with pytest.raises(ImportError), fast_imports():
        raise ImportError
    assert metadata.packages_distributions is everything
    assert gc.isenabled() and not any(name in sys.modules for name in UNUSED)


def test_distributions_are_found_by_the_packages_that_they_hold() -> None:
    real = metadata.packages_distributions()
    with fast_imports():
        found = metadata.packages_distributions()
        for package, names in real.items():
            assert {name.lower().replace("_", "-") for name in found.get(package, [])} & {
                name.lower().replace("_", "-") for name in names
            }, package
        assert found.get("no_such_package", ["default"]) == ["default"]
