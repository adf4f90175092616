"""What a cache folder's name depends on."""

from __future__ import annotations

from pathlib import Path

import pytest

import coserve
from coserve.engine.warmup import key

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


def test_the_code_itself_has_a_digest() -> None:
    assert len(key.source_digest()) == 64
