"""Responses of `/v1/chat/completions`, full and streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from msgspec import UNSET

from coserve.api.generation.full_response import FullResponse, LogprobEntry, floored
from coserve.api.http.json_blocks import JsonListBuilder
from coserve.api.openai.completions import by_id, by_text
from coserve.api.openai.schemas import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    ChatRequest,
    ChatTopLogprob,
    StreamOptions,
)
from coserve.api.openai.usage import ResponseMeta, UsageCounter, total_usage
from coserve.core.schemas import GenerateChunk
from coserve.data.pretrained.vocabulary import Vocabulary


class ChatLogprobsBuilder:
    """Collects the log-probabilities of one choice."""

    def __init__(self, body: ChatRequest, vocabulary: Vocabulary) -> None:
        self._body, self._vocabulary, self._content = body, vocabulary, JsonListBuilder[ChatLogprob]()

    def add(self, entries: Sequence[LogprobEntry], /) -> None:
        self._content.add(_entries(self._body, self._vocabulary, entries))

    def build(self) -> ChatLogprobs:
        return ChatLogprobs(content=self._content.as_list())


def chat_completion(body: ChatRequest, meta: ResponseMeta, full: FullResponse[ChatLogprobsBuilder]) -> ChatCompletion:
    """The full response."""
    response = full.response
    return ChatCompletion(
        **meta,
        choices=[
            ChatChoice(
                index=choice.index,
                message=ChatAnswer(content=choice.text),
                logprobs=None if scores is None else scores.build(),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
                token_ids=choice.token_ids if body.return_token_ids else UNSET,
            )
            for choice, scores in zip(response.choices, full.logprobs, strict=True)
        ],
        usage=total_usage([response.usage]),
        prompt_token_ids=response.prompt_token_ids if body.return_token_ids else UNSET,
    )


def _entries(body: ChatRequest, vocabulary: Vocabulary, entries: Sequence[LogprobEntry]) -> list[ChatLogprob]:
    name = by_id if body.return_tokens_as_token_ids else by_text
    return [
        ChatLogprob(
            token=name(entry),
            logprob=floored(entry.logprob),
            bytes=list(vocabulary.utf8(entry.token_id)),
            top_logprobs=[
                ChatTopLogprob(token=name(top), logprob=floored(top.logprob), bytes=list(vocabulary.utf8(top.token_id)))
                for top in entry.top
            ],
        )
        for entry in entries
    ]


async def chat_events(
    body: ChatRequest, meta: ResponseMeta, vocabulary: Vocabulary, chunks: AsyncGenerator[GenerateChunk, None]
) -> AsyncGenerator[ChatChunk, None]:
    """The events of a stream: each choice begins with its role."""
    counter = UsageCounter(body.stream_options or StreamOptions())
    begun: set[int] = set()
    async for chunk in chunks:
        counter.add(0, chunk)
        choices, scores = [], chunk.logprobs
        if chunk.index not in begun:
            begun.add(chunk.index)
            choices.append(ChatChunkChoice(index=chunk.index, delta=ChatDelta(role="assistant", content="")))
        choices.append(
            ChatChunkChoice(
                index=chunk.index,
                delta=ChatDelta(content=chunk.text) if chunk.text else ChatDelta(),
                logprobs=None if scores is None else ChatLogprobs(content=_entries(body, vocabulary, scores)),
                finish_reason=chunk.finish_reason,
                stop_reason=UNSET if chunk.finish_reason is None else chunk.stop_reason,
                token_ids=chunk.token_ids if body.return_token_ids else UNSET,
            )
        )
        shown = chunk.prompt_token_ids if body.return_token_ids else None
        for choice in choices:
            yield ChatChunk(
                **meta,
                choices=[choice],
                usage=counter.for_chunk,
                prompt_token_ids=UNSET if shown is None else shown,
            )
            shown = None
    if counter.wanted.include_usage:
        yield ChatChunk(
            **meta,
            choices=[],
            usage=counter.so_far,
        )
