"""Prompts of one call reach the engine together, or not at all."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from coserve.api.generation.prompt_group import PromptGroup
from coserve.api.generation.request_state import RequestState
from coserve.core.errors import EngineUnavailable
from coserve.core.link.generation import Generate
from coserve.core.sampling import SamplingParams
from coserve.core.schemas import GenerateRequest
from coserve.core.types import Slo
from tests.support.api_server import Api


def state(id: str) -> RequestState:
    return RequestState(id, None, (1,), 0, 0.0, {}, False)


def sequence(id: str) -> Generate:
    slo = Slo(ttft=1.0, tpot=0.1, shed=True, shed_e2e=True)
    return Generate(id=id, prompt=(1,), sampling=SamplingParams(max_tokens=1), adapter=None, slo=slo)


def test_the_last_one_answers_for_all() -> None:
    group, first, second = PromptGroup(2), state("a"), state("b")
    assert not group.join(first, [sequence("a0"), sequence("a1")])
    assert group.join(second, [sequence("b0")])
    sent = list(group.messages())
    assert [(one.id, message.id) for one, message in sent] == [("a", "a0"), ("a", "a1"), ("b", "b0")]
    assert [(message.slo.shed, message.slo.shed_e2e) for _, message in sent] == [(False, False)] * 2 + [(True, True)]
    assert [message.choices for _, message in sent] == [(), (), ("a0", "a1")]
    assert list(first.together) == list(second.together) == [first, second]


async def test_of_a_call_that_somebody_left_nothing_is_sent() -> None:
    group = PromptGroup(2)
    assert not group.join(state("a"), [sequence("a0")])
    waiting = asyncio.create_task(group.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not group.join(state("b"), [sequence("b0")])


async def test_a_daemon_that_stops_sends_no_call_whose_prompts_still_waited(api: Api) -> None:
    group = PromptGroup(2)
    stream = partial(api.service.generation.stream, GenerateRequest(prompt=[5]), group=group)

    async def read() -> None:
        async for _ in stream():
            pass

    first = asyncio.create_task(read())
    await asyncio.sleep(0.05)
    api.service.generation.stop(EngineUnavailable("it stops"))
    with pytest.raises(EngineUnavailable, match="it stops"):
        await read()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert not [each for each in api.engine.told if isinstance(each, Generate)]
