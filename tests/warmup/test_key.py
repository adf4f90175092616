"""What a cache folder's name depends on."""

from __future__ import annotations

from pathlib import Path

import pytest

from coserve.engine.warmup import key

CODE = [f"{name}/code.py" for name in key.SOURCES if not name.endswith(".py")] + [
    name for name in key.SOURCES if name.endswith(".py")
]
MEANING = ("gpu_memory.py", "types.py", "admission/code.py", "adapters/code.py")
"""Where it is said what measured costs mean, which are kept beside the kernels."""


@pytest.mark.parametrize("changed", [*MEANING, "kernels/code.py"])
def test_other_code_has_another_cache(changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {*CODE, *MEANING, "cli/code.py"}:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.setattr(key, "__file__", str(tmp_path / "warmup" / "key.py"))
    before = key.source_digest()
    (tmp_path / "cli" / "code.py").write_text("x = 1")
    assert key.source_digest() == before
    (tmp_path / changed).write_text("x = 1")
    assert key.source_digest() != before


def test_all_that_is_named_is_there() -> None:
    folder = Path(key.__file__).parent.parent
    assert [name for name in key.SOURCES if not (folder / name).exists()] == []
