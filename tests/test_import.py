"""`import coserve` finds the package where the working folder has a folder of that name, as beside a clone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def importable(search_path: Path, beside: Path) -> subprocess.CompletedProcess[str]:
    (beside / "coserve" / "docs").mkdir(parents=True)
    code = f"import sys; sys.path.append({str(search_path)!r}); import coserve; print(coserve.Client.__name__)"
    return subprocess.run([sys.executable, "-c", code], cwd=beside, capture_output=True, text=True, check=False)


def test_beside_a_clone_a_path_to_it_is_enough(tmp_path: Path) -> None:
    """That is what `make` installs; a folder without `__init__.py` yields to a package further down the path."""
    done = importable(ROOT, tmp_path)
    assert (done.returncode, done.stdout) == (0, "Client\n"), done.stderr


def test_make_installs_a_path() -> None:
    assert "--config-settings editable_mode=compat -e" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("name", ["Clinet", "client_", "nothing"])
def test_a_name_that_is_not_there_says_what_is(name: str) -> None:
    import coserve

    with pytest.raises(AttributeError, match="Client"):
        getattr(coserve, name)


def test_dir_has_the_public_names_and_loads_none_of_them() -> None:
    code = "import sys, coserve; print(*dir(coserve), 'coserve.client' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["AsyncClient", "Client", "__version__", "False"]
