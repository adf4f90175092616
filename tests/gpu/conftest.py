from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ranks import Ranks


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2, cuda=True) as ranks:
        yield ranks
