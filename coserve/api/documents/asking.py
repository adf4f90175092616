"""Generation requests that jobs send to the daemon's own engine, to teach a document or to evaluate an adapter:
ordinary requests of the class batch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeVar

from coserve.api.engine_client import EngineClient
from coserve.api.generation.async_tokenizer import AsyncTokenizer
from coserve.api.generation.in_flight import InFlightRequests
from coserve.api.generation.prompts import encode_prompt
from coserve.core.errors import CapacityError, EngineUnavailable
from coserve.core.schemas.generation import ChosenLogprob, GenerateRequest, PromptLogprob
from coserve.core.types import AdapterRef
from coserve.state.retries import FOR_EVER

AT_ONCE = 64
"""Requests in flight of all jobs together."""

T = TypeVar("T")


@dataclass
class Asked:
    """A response. `prompt`: the prompt's token ids."""

    prompt: list[int] = field(default_factory=list)
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[ChosenLogprob] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)


class Asker:
    """Makes requests, a bounded number at once. A request that the daemon cannot take now is made again later."""

    def __init__(self, generation: InFlightRequests, texts: AsyncTokenizer, engine: EngineClient) -> None:
        self._generation, self._texts, self._engine = generation, texts, engine
        self._places = asyncio.Semaphore(AT_ONCE)

    async def prompt_ids(self, request: GenerateRequest) -> list[int]:
        """Return the request's prompt as token ids. Raises as `encode_prompt`."""
        return list(await _patiently(lambda: encode_prompt(request, self._engine.spec, self._texts)))

    async def ask(self, request: GenerateRequest, snapshot: AdapterRef | None = None) -> Asked:
        """Return the response to the request, whose adapter may be a snapshot. Raises as `InFlightRequests.stream`, but
        of `CapacityError` only `EngineUnavailable`."""
        async with self._places:
            return await _patiently(lambda: self._ask(request, snapshot))

    async def _ask(self, request: GenerateRequest, snapshot: AdapterRef | None) -> Asked:
        found = Asked()
        stream = self._generation.stream(request, snapshot=snapshot, read_prompt=found.prompt.extend, sheds=False)
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                found.text += chunk.text
                found.tokens += chunk.token_ids
                found.logprobs += chunk.logprobs or ()
                found.prompt_logprobs += chunk.prompt_logprobs or ()
        return found

    async def score(
        self,
        prompt: list[int],
        answer: list[int],
        *,
        top: int,
        adapter: str | None = None,
        snapshot: AdapterRef | None = None,
    ) -> list[PromptLogprob]:
        """Return the log-probability of each token of `answer` after `prompt`, with the `top` most likely tokens."""
        request = GenerateRequest(
            prompt=[*prompt, *answer],
            adapter=adapter,
            max_tokens=0,
            prompt_logprobs=top,
            add_special_tokens=False,
            slo_class="batch",
        )
        return (await self.ask(request, snapshot)).prompt_logprobs[-len(answer) :]


async def _patiently(work: Callable[[], Awaitable[T]]) -> T:
    """Return the result of `work`, tried again while the daemon has no place for it."""
    for delay in FOR_EVER.delays():
        try:
            return await work()
        except EngineUnavailable:
            raise
        except CapacityError:
            await asyncio.sleep(delay)
    raise AssertionError("the delays have no end")
