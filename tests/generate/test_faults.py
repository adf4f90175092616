"""What a forward raises ends the requests in it, and nothing else: pages, adapters and later requests are as before."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest
import torch

from coserve.core.cancellation import Cancelled
from coserve.core.errors import EngineFault
from coserve.core.link.generation import Generate, RequestFailed
from coserve.core.sampling import SamplingParams
from coserve.generate.execution import eager as eager_module
from coserve.generate.generator import Generator
from coserve.memory.kv import KvCache
from coserve.model.base import Base, wrap_base
from coserve.model.faults import contained
from tests.support.generation import collect, make_generator, request
from tests.support.memory_faults import Faults, Point, out_of_memory_at
from tests.support.tiny_models import tiny_model

PROMPT = tuple(range(3, 43))


def generator_of(base: Base) -> Generator:
    return make_generator(base, tokens=256, max_running=4, step_tokens=64)


def ask(id: str) -> Generate:
    return request(id, PROMPT, SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))


def faulty(at: int, *points: Point) -> AbstractContextManager[Faults]:
    """The call number `at` (from 0) of these does its work, and then raises."""
    error = lambda: ZeroDivisionError("in /some/private/path")
    return out_of_memory_at(points, lambda call: call == at, after=True, error=error)


@pytest.mark.parametrize("place", ["forward", "choose"])
def test_a_step_that_raises_ends_its_requests_alone(place: str) -> None:
    base = wrap_base(tiny_model("llama"), name="llama", eos_token_ids=())
    expected = collect(generator_of(base), [ask("again")])
    generator = generator_of(base)
    for id in ("one", "two"):
        generator.add(ask(id))
    with faulty(2, (base if place == "forward" else eager_module, place)):
        messages = [message for _ in range(6) for message in generator.step()]
    failed = [message for message in messages if isinstance(message, RequestFailed)]
    assert sorted(message.id for message in failed) == ["one", "two"]
    for message in failed:
        assert message.code == "internal_error" and "/some" not in message.message
    assert generator.running == 0 and generator.pages_used == 0
    assert collect(generator, [ask("again")]) == expected
    hits = generator.scheduler.active.prefix_hits
    assert collect(generator, [ask("again")]) == expected and generator.scheduler.active.prefix_hits > hits


def test_pages_that_cannot_be_given_back_end_the_engine() -> None:
    base = wrap_base(tiny_model("llama"), name="llama", eos_token_ids=())
    generator = generator_of(base)
    generator.add(ask("one"))
    with faulty(0, (base, "forward")), faulty(0, (KvCache, "free")), pytest.raises(EngineFault):
        generator.step()


class BrokenStream:
    def synchronize(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_device_that_works_no_more_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: BrokenStream())
    with pytest.raises(EngineFault), contained(torch.device("cuda")):
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), contained(torch.device("cpu")):
        raise ZeroDivisionError


def test_an_error_or_a_cancellation_never_waits_for_the_whole_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """That would break a graph capture on another thread."""

    class Stream:
        def synchronize(self) -> None:
            waits.append("stream")

    waits = list[str]()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: waits.append("device"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    with pytest.raises(Cancelled), contained(torch.device("cuda")):
        raise Cancelled
    assert waits == []
    with pytest.raises(ZeroDivisionError), contained(torch.device("cuda")):
        raise ZeroDivisionError
    assert waits == ["stream"]
