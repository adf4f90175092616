"""Places in line before the engine: bounded, and no adapter keeps others out."""

from __future__ import annotations

import pytest

from coserve.api.generation.waiting import Places
from coserve.errors import QueueFull


def test_the_limit_is_for_all_together() -> None:
    places = Places(3, fair=False)
    places.take(None, 1)
    places.take("a", 2)
    with pytest.raises(QueueFull, match="3 requests wait already"):
        places.take("b", 1)
    places.give("a", 1)
    places.take("b", 1)
    with pytest.raises(QueueFull):
        places.take(None, 1)


def test_who_asks_for_little_finds_a_place_beside_one_who_took_all() -> None:
    places = Places(4, fair=True)
    places.take("hot", 4)
    with pytest.raises(QueueFull):
        places.take("hot", 1)
    with pytest.raises(QueueFull):
        places.take("light", 3)
    places.take("light", 2)
    with pytest.raises(QueueFull):
        places.take("light", 1)
    places.take(None, 1)
    with pytest.raises(QueueFull):
        places.take(None, 1)
    places.give("hot", 4)
    places.take(None, 1)


def test_any_number_of_adapters_together_stay_within_a_small_multiple() -> None:
    places, taken = Places(100, fair=True), 0
    for adapter in range(1000):
        for _ in range(100):
            try:
                places.take(str(adapter), 1)
            except QueueFull:
                break
            taken += 1
    assert taken <= 600  # 100 (1 + 1/2 + 1/3 + ...)


def test_those_who_left_are_forgotten() -> None:
    places = Places(1, fair=True)
    for adapter in range(1000):
        places.take(str(adapter), 1)
        places.give(str(adapter), 1)
    places.take("x", 1)
    assert len(places._taken) == 1
