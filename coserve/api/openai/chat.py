"""Responses of `/v1/chat/completions`, full and streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence

from msgspec import UNSET

from coserve.api.answers.deltas import AnswerDelta, CallDelta
from coserve.api.answers.parser import AnswerParser, AnswerParsers
from coserve.api.generation.full_response import FullResponse, LogprobEntry, floored
from coserve.api.http.json_blocks import JsonListBuilder
from coserve.api.openai import schemas
from coserve.api.openai.completions import PromptLogprobsBuilder, by_id, by_text
from coserve.api.openai.usage import ResponseMeta, UsageCounter, total_usage
from coserve.core.schemas.generation import Finish, GenerateChunk, PromptLogprob
from coserve.data.pretrained.vocabulary import Vocabulary


class ChatLogprobsBuilder:
    """Collects the log-probabilities of one choice, or of the prompt."""

    def __init__(self, body: schemas.ChatRequest, vocabulary: Vocabulary) -> None:
        self._body, self._vocabulary, self._content = body, vocabulary, JsonListBuilder[schemas.ChatLogprob]()
        self.prompt = PromptLogprobsBuilder(body.prompt_logprobs)

    def add(self, entries: Sequence[LogprobEntry], /) -> None:
        if prompt := [entry for entry in entries if isinstance(entry, PromptLogprob)]:
            self.prompt.add(prompt)
        else:
            self._content.add(_entries(self._body, self._vocabulary, entries))

    def build(self) -> schemas.ChatLogprobs:
        return schemas.ChatLogprobs(content=self._content.as_list())


async def chat_completion(
    body: schemas.ChatRequest, meta: ResponseMeta, parsers: AnswerParsers, full: FullResponse[ChatLogprobsBuilder]
) -> schemas.ChatCompletion:
    response = full.response
    answers = [await parsers.parse(choice.text) for choice in response.choices]
    return schemas.ChatCompletion(
        **meta,
        choices=[
            schemas.ChatChoice(
                index=choice.index,
                message=_message(answer, parsers.new_id),
                logprobs=None if scores is None else scores.build(),
                finish_reason=_finish(choice.finish_reason, calls=len(answer.calls)),
                stop_reason=choice.stop_reason,
                token_ids=choice.token_ids if body.return_token_ids else UNSET,
            )
            for choice, answer, scores in zip(response.choices, answers, full.logprobs, strict=True)
        ],
        usage=total_usage([response.usage]),
        prompt_token_ids=response.prompt_token_ids if body.return_token_ids else UNSET,
        prompt_logprobs=UNSET if full.prompt is None else full.prompt.prompt.build(),
    )


def _message(answer: AnswerDelta, new_id: Callable[[], str]) -> schemas.ChatAnswer:
    calls = [
        schemas.AnswerToolCall(new_id(), schemas.CalledFunction(call.name or "", call.arguments))
        for call in answer.calls
    ]
    return schemas.ChatAnswer(
        content=None if calls and not answer.content else answer.content,
        reasoning_content=answer.reasoning or UNSET,
        reasoning=answer.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


def _finish(reason: Finish, *, calls: int) -> schemas.ChatFinish:
    return "tool_calls" if reason == "stop" and calls else reason


def _entries(
    body: schemas.ChatRequest, vocabulary: Vocabulary, entries: Sequence[LogprobEntry]
) -> list[schemas.ChatLogprob]:
    name = by_id if body.return_tokens_as_token_ids else by_text
    return [
        schemas.ChatLogprob(
            token=name(entry),
            logprob=floored(entry.logprob),
            bytes=list(vocabulary.utf8(entry.token_id)),
            top_logprobs=[
                schemas.ChatTopLogprob(
                    token=name(top), logprob=floored(top.logprob), bytes=list(vocabulary.utf8(top.token_id))
                )
                for top in entry.top
            ],
        )
        for entry in entries
    ]


async def chat_events(
    body: schemas.ChatRequest,
    meta: ResponseMeta,
    vocabulary: Vocabulary,
    parsers: AnswerParsers,
    chunks: AsyncGenerator[GenerateChunk, None],
) -> AsyncGenerator[schemas.ChatChunk, None]:
    """The events of a stream: each choice begins with its role."""
    counter = UsageCounter(body.stream_options or schemas.StreamOptions())
    begun: dict[int, AnswerParser] = {}
    async for chunk in chunks:
        counter.add(0, chunk)
        choices, scores, finish = [], chunk.logprobs, chunk.finish_reason
        if chunk.index not in begun:
            begun[chunk.index] = parsers.new()
            choices.append(
                schemas.ChatChunkChoice(index=chunk.index, delta=schemas.ChatDelta(role="assistant", content=""))
            )
        parser = begun[chunk.index]
        answer = parser.push(chunk.text)
        if finish is not None:
            answer = AnswerDelta.joined([answer, parser.flush()])
        choices.append(
            schemas.ChatChunkChoice(
                index=chunk.index,
                delta=_delta(answer, parsers.new_id),
                logprobs=None if scores is None else schemas.ChatLogprobs(content=_entries(body, vocabulary, scores)),
                finish_reason=None if finish is None else _finish(finish, calls=parser.calls),
                stop_reason=UNSET if finish is None else chunk.stop_reason,
                token_ids=chunk.token_ids if body.return_token_ids else UNSET,
            )
        )
        shown = chunk.prompt_token_ids if body.return_token_ids else None
        for choice in choices:
            yield schemas.ChatChunk(
                **meta, choices=[choice], usage=counter.for_chunk, prompt_token_ids=UNSET if shown is None else shown
            )
            shown = None
    if counter.wanted.include_usage:
        yield schemas.ChatChunk(**meta, choices=[], usage=counter.so_far)


def _delta(answer: AnswerDelta, new_id: Callable[[], str]) -> schemas.ChatDelta:
    return schemas.ChatDelta(
        content=answer.content or UNSET,
        reasoning_content=answer.reasoning or UNSET,
        reasoning=answer.reasoning or UNSET,
        tool_calls=[_call_delta(call, new_id) for call in answer.calls] or UNSET,
    )


def _call_delta(call: CallDelta, new_id: Callable[[], str]) -> schemas.ToolCallDelta:
    if call.name is None:
        return schemas.ToolCallDelta(call.index, schemas.FunctionDelta(call.arguments))
    return schemas.ToolCallDelta(call.index, schemas.FunctionDelta(call.arguments, call.name), new_id(), "function")
