"""Places in line before the engine: bounded, and no adapter keeps others out."""

from __future__ import annotations

import pytest

from coserve.api.generation.waiting_limit import WaitingLimit
from coserve.core.errors import InvalidRequest, QueueFull
from tests.support.api_server import Api


def test_the_limit_is_for_all_together() -> None:
    places = WaitingLimit(3, fair=False)
    places.acquire(None, 1)
    places.acquire("a", 2)
    with pytest.raises(QueueFull, match="3 requests wait already"):
        places.acquire("b", 1)
    places.release("a", 1)
    places.acquire("b", 1)
    with pytest.raises(QueueFull):
        places.acquire(None, 1)


def test_who_asks_for_little_finds_a_place_beside_one_who_took_all() -> None:
    places = WaitingLimit(4, fair=True)
    places.acquire("hot", 4)
    with pytest.raises(QueueFull):
        places.acquire("hot", 1)
    with pytest.raises(QueueFull):
        places.acquire("light", 3)
    places.acquire("light", 2)
    with pytest.raises(QueueFull):
        places.acquire("light", 1)
    places.acquire(None, 1)
    with pytest.raises(QueueFull):
        places.acquire(None, 1)
    places.release("hot", 4)
    places.acquire(None, 1)


def test_requests_of_the_class_batch_give_way_to_others() -> None:
    """As the engine's queue displaces them."""
    places = WaitingLimit(3, fair=True)
    places.acquire("a", 2, batch=True)
    places.acquire("a", 1)
    with pytest.raises(QueueFull):
        places.acquire("a", 1, batch=True)
    places.acquire("a", 2)
    with pytest.raises(QueueFull):
        places.acquire("a", 1)
    places.release("a", 2, batch=True)
    with pytest.raises(QueueFull):
        places.acquire("a", 1)
    for fair in (True, False):
        places = WaitingLimit(2, fair=fair)
        places.acquire("a", 2, batch=True)
        if not fair:
            with pytest.raises(QueueFull):
                places.acquire("a", 1)


def test_more_than_all_places_are_refused_for_good() -> None:
    for fair in (True, False):
        with pytest.raises(InvalidRequest, match="expected at most 3, the daemon's max_queue, got 4"):
            WaitingLimit(3, fair=fair).acquire(None, 4)


async def test_choices_that_can_never_wait_together_are_no_reason_to_try_again(api: Api) -> None:
    most = api.config.max_queue
    for path, body, field in (
        ("/generate", {"prompt": "a", "n": most + 1}, "field"),
        ("/v1/completions", {"prompt": ["a"] * (most + 1)}, "param"),
        ("/v1/completions", {"prompt": ["a"] * most, "n": 2}, "param"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": most + 1}, "param"),
    ):
        status, answer = await api.call("POST", path, json=body)
        assert (status, answer["error"][field]) == (400, "n"), path
        assert "max_queue" in answer["error"]["message"]
    status, answer = await api.call("POST", "/v1/completions", json={"prompt": ["a"] * most})
    assert (status, len(answer["choices"])) == (200, most)


def test_any_number_of_adapters_together_stay_within_a_small_multiple() -> None:
    places, taken = WaitingLimit(100, fair=True), 0
    for adapter in range(1000):
        for _ in range(100):
            try:
                places.acquire(str(adapter), 1)
            except QueueFull:
                break
            taken += 1
    assert taken <= 600  # 100 (1 + 1/2 + 1/3 + ...)


def test_those_who_left_are_forgotten() -> None:
    places = WaitingLimit(2, fair=True)
    for adapter in range(1000):
        places.acquire(str(adapter), 1)
        places.release(str(adapter), 1)
    places.acquire("hot", 2)
    places.acquire("light", 1)  # its share among two, not among a thousand
