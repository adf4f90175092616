"""How much `make test` and `make test-all` try of what a test can try; `make test-long` tries all of it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import pytest
from hypothesis import settings

Test = TypeVar("Test", bound=Callable[..., object])
TURN = int(os.environ["TEST_TURN"])
"""Which cases of those that take turns `make test-all` runs: a number that changes each day."""
SLOW = (pytest.mark.slow,)
TODAY = (*SLOW, pytest.mark.today)


def examples(most: int, *, fast: int | None = None) -> int:
    """`most` examples of Hypothesis, or the loaded profile's share of them: a tenth in `make test`, whose profile is
    "fast", a fifth in `make test-all`.

    In `make test` `fast` of them, if that is given.
    """
    if fast is not None and settings.default.max_examples < settings.get_profile("coserve").max_examples:
        return fast
    return max(2, most * settings.default.max_examples // 100)


def sample(cases: Iterable[Any], *fast: Any) -> list[Any]:
    """Values for `parametrize`: those that are not among `fast` are marked slow. With a mapping its keys are the
    ids."""
    assert set(fast) <= set(cases), "a fast case that is none"
    return _values(cases, lambda key: () if key in fast else SLOW)


def leave_for_other_days(tests: Iterable[pytest.Item]) -> None:
    """Mark as long the slow tests of three quarters of the files, by their names: `make test-all` runs them on the next
    days. Those that take turns of their own stay."""
    for test in tests:
        if (
            test.get_closest_marker("slow")
            and not test.get_closest_marker("today")
            and (crc32(test.path.name.encode()) + TURN) % 4
        ):
            test.add_marker("long")


def in_turns(
    cases: Collection[Any], fast: Collection[Any] = (), *, always: Collection[Any] = (), days: int = 0
) -> list[Any]:
    """Values for `parametrize`, slow but for `fast`: `make test-all` runs these, those of `always`, and each other on
    one of so many days, by default of as many as there are others, but 3 at least and 6 at most; `make test-long` runs
    all. Files begin on different days, so that no day has more to run than others."""
    assert {*fast, *always} <= set(cases), "a case that is none"
    turns = count(TURN + _first_day())
    days = days or max(3, min(6, len(cases) - len({*fast, *always})))

    def marks(key: Any) -> Sequence[pytest.MarkDecorator]:
        if key in fast:
            return ()
        return TODAY if key in always or next(turns) % days == 0 else (*SLOW, pytest.mark.long)

    return _values(cases, marks)


def by_day(cases: Collection[Any], *fast: Any) -> list[Any]:
    """As `sample`, but `make test-all` runs each of the slow ones on one of several days, as `in_turns` says."""
    return in_turns(cases, fast)


def on_days(turn: int, days: int = 6) -> Callable[[Test], Test]:
    """Decorator of a slow test that `make test-all` runs on one of so many days."""

    def mark(test: Test) -> Test:
        for each in marks_on_days(turn, days):
            test = each(test)
        return test

    return mark


def marks_on_days(turn: int, days: int = 6) -> list[pytest.MarkDecorator]:
    """`pytestmark` of a module whose tests are slow and run on one of so many days."""
    return [*TODAY] if (TURN + turn) % days == 0 else [*SLOW, pytest.mark.long]


def _first_day() -> int:
    """A number of the test file that is being imported."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    assert frame is not None
    return crc32(Path(frame.f_code.co_filename).name.encode())


def _values(cases: Iterable[Any], marks: Callable[[Any], Sequence[pytest.MarkDecorator]]) -> list[Any]:
    named = isinstance(cases, Mapping)
    return [
        pytest.param(
            cases[key] if named else key,  # type: ignore[index]
            id=key if named else None,
            marks=marks(key),
        )
        for key in cases
    ]
