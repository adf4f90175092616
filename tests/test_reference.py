"""docs/reference is what the code says: `python -m tools.reference` would write the same."""

from __future__ import annotations

import pytest

from tools import reference


def test_the_pages_are_those_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COSERVE_URL", "COSERVE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    made = reference.pages()
    assert made.keys() == {page.name for page in reference.FOLDER.glob("*.md")}
    stale = [name for name, text in made.items() if (reference.FOLDER / name).read_text() != text]
    assert not stale, "run make reference"
