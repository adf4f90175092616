"""How much `make test` tries of what a test can try; `make test-all` tries all of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from hypothesis import settings


def examples(most: int, *, fast: int | None = None) -> int:
    """`most` examples of Hypothesis, or the loaded profile's share of them: a fifth in `make test`, whose profile is
    "fast".

    There `fast` of them, if that is given.
    """
    if fast is not None and settings.default.max_examples < 100:
        return fast
    return max(2, most * settings.default.max_examples // 100)


def sample(cases: Iterable[Any], *fast: Any) -> list[Any]:
    """Values for `parametrize`: those that are not among `fast` are marked slow. With a mapping its keys are the
    ids."""
    named = isinstance(cases, Mapping)
    keys = list(cases)
    assert set(fast) <= set(keys), "a fast case that is none"
    return [
        pytest.param(
            cases[key] if named else key,  # type: ignore[index]
            id=key if named else None,
            marks=() if key in fast else pytest.mark.slow,
        )
        for key in keys
    ]
