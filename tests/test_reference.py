"""docs/reference is what the code says: `python -m tools.reference` would write the same."""

from __future__ import annotations

import pytest

from coserve.core import errors
from tools import reference


def test_the_pages_are_those_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COSERVE_URL", "COSERVE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    made = reference.pages()
    assert made.keys() == {page.name for page in reference.FOLDER.glob("*.md")}
    stale = [name for name, text in made.items() if (reference.FOLDER / name).read_text() != text]
    assert not stale, "run make reference"
    assert "NODEFAULT" not in "".join(made.values())


def test_every_error_says_what_to_do() -> None:
    for kind in {*errors.BY_CODE.values()} - {kind.__base__ for kind in errors.BY_CODE.values()}:
        assert (kind.__doc__ or "").count(". ") >= 1, kind
