"""Builds a full response from a stream's chunks. Log-probabilities are encoded as JSON when they arrive.

There may be millions of them: building, encoding and freeing them as objects at the end would block the event loop.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import msgspec

from coserve.api.http.json_blocks import JsonListBuilder
from coserve.core.schemas.generation import (
    Choice,
    ChosenLogprob,
    GenerateChunk,
    GenerateRequest,
    GenerateResponse,
    PromptLogprob,
)

LogprobEntry = ChosenLogprob | PromptLogprob
FLOOR = -9999.0
"""The smallest log-probability that dialects send: JSON has no infinity."""


def floored(logprob: float | None) -> float:
    """Return the log-probability, at least `FLOOR`; None, as the prompt's first token has, gives `FLOOR`."""
    return FLOOR if logprob is None else max(logprob, FLOOR)


class LogprobsBuilder(Protocol):
    """Collects the log-probabilities of one choice, or of the prompt, in an API's format."""

    def add(self, entries: Sequence[LogprobEntry], /) -> None: ...


S = TypeVar("S", bound=LogprobsBuilder)


@dataclass(frozen=True)
class FullResponse(Generic[S]):
    """A full response. `response` has no log-probabilities; the prompt's are in `prompt`, those of each choice in
    `logprobs`."""

    response: GenerateResponse
    prompt: S | None
    logprobs: list[S | None]


@dataclass
class _ChoiceBuilder(Generic[S]):
    """Joins the chunks of one choice."""

    scores: S | None
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    last: GenerateChunk | None = None

    def add(self, chunk: GenerateChunk) -> None:
        self.texts.append(chunk.text)
        self.token_ids += chunk.token_ids
        if self.scores is not None and chunk.logprobs:
            self.scores.add(chunk.logprobs)
        self.last = chunk

    def choice(self, index: int) -> Choice:
        assert self.last is not None, "every choice has a chunk"
        assert self.last.finish_reason is not None, "every choice ends"
        return Choice(
            index=index,
            text="".join(self.texts),
            token_ids=self.token_ids,
            finish_reason=self.last.finish_reason,
            stop_reason=self.last.stop_reason,
        )


async def collect(
    request: GenerateRequest, stream: AsyncGenerator[GenerateChunk, None], new_builder: Callable[[], S]
) -> FullResponse[S]:
    """Return the full response to `request` from its `stream`. `new_builder` makes an empty builder for the prompt and
    for each choice. Raises what the stream raises."""
    prompt = None if request.prompt_logprobs is None else new_builder()
    choices = [_ChoiceBuilder(None if request.logprobs is None else new_builder()) for _ in range(request.n)]
    prompt_ids: list[int] | None = None
    last: GenerateChunk | None = None
    async with aclosing(stream) as chunks:
        async for last in chunks:
            if prompt is not None and last.prompt_logprobs:
                prompt.add(last.prompt_logprobs)
            if last.prompt_token_ids is not None:
                prompt_ids = last.prompt_token_ids
            choices[last.index].add(last)
    assert last is not None, "a stream has at least one chunk"
    assert last.usage is not None, "its last chunk counts"
    assert last.timing is not None, "its last chunk counts"
    response = GenerateResponse(
        id=last.id,
        adapter=last.adapter,
        version=last.version,
        seed=last.seed,
        choices=[choice.choice(index) for index, choice in enumerate(choices)],
        usage=last.usage,
        timing=last.timing,
        prompt_token_ids=prompt_ids,
    )
    return FullResponse(response, prompt, [choice.scores for choice in choices])


async def collect_native(request: GenerateRequest, stream: AsyncGenerator[GenerateChunk, None]) -> GenerateResponse:
    """Return the response of `POST /generate`."""
    full = await collect(request, stream, JsonListBuilder[LogprobEntry])
    choices = [
        choice if scores is None else msgspec.structs.replace(choice, logprobs=scores.as_list())
        for choice, scores in zip(full.response.choices, full.logprobs, strict=True)
    ]
    prompt = None if full.prompt is None else full.prompt.as_list()
    return msgspec.structs.replace(full.response, choices=choices, prompt_logprobs=prompt)
