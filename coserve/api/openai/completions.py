"""Responses of `/v1/completions`, full and streamed."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from coserve.api.generation.full_response import FullResponse, LogprobEntry, floored
from coserve.api.http.json_blocks import JsonListBuilder
from coserve.api.openai import schemas
from coserve.api.openai.usage import ResponseMeta, UsageCounter, total_usage
from coserve.core.schemas.generation import Choice, GenerateChunk, Logprob, PromptLogprob

Name = Callable[[LogprobEntry | Logprob], str]


def by_text(entry: LogprobEntry | Logprob) -> str:
    return entry.token


def by_id(entry: LogprobEntry | Logprob) -> str:
    return f"token_id:{entry.token_id}"


def name_of(body: schemas.CompletionRequest) -> Name:
    """Return the function that names tokens as the request asks for."""
    return by_id if body.return_tokens_as_token_ids else by_text


class PromptLogprobsBuilder:
    """Collects a prompt's log-probabilities in vLLM's format; OpenAI's API has none. `top`: number of likeliest tokens
    listed at each position; None: the response has no `prompt_logprobs`."""

    def __init__(self, top: int | None) -> None:
        self._top, self._tokens = top, JsonListBuilder[schemas.PromptTokens]()

    def add(self, entries: Sequence[PromptLogprob]) -> None:
        if self._top is not None:
            self._tokens.add([_tokens(entry, self._top) for entry in entries])

    def build(self) -> list[schemas.PromptTokens] | UnsetType:
        return UNSET if self._top is None else self._tokens.as_list()


def _tokens(entry: PromptLogprob, top: int) -> schemas.PromptTokens:
    """Return the prompt's token, then the likeliest. Only the likeliest have a rank."""
    if entry.logprob is None:
        return None
    ranks = {other.token_id: place for place, other in enumerate(entry.top, 1)}
    own = schemas.PromptTokenScore(floored(entry.logprob), ranks.get(entry.token_id), entry.token)
    return {str(entry.token_id): own} | {
        str(other.token_id): schemas.PromptTokenScore(floored(other.logprob), place, other.token)
        for place, other in enumerate(entry.top[:top], 1)
    }


class CompletionLogprobsBuilder:
    """Collects the log-probabilities of one choice or prompt."""

    def __init__(self, body: schemas.CompletionRequest) -> None:
        self._name, self._echoed = name_of(body), body.logprobs or 0
        self.prompt = PromptLogprobsBuilder(body.prompt_logprobs)
        """Builder of the prompt's log-probabilities, in vLLM's format."""
        self._tokens, self._values = JsonListBuilder[str](), JsonListBuilder[float | None]()
        self._tops = JsonListBuilder[dict[str, float] | None]()
        self._lengths = array("i")
        """Number of characters that each token adds to the text."""
        self._sum = 0.0

    def add(self, entries: Sequence[LogprobEntry], /) -> None:
        if prompt := [entry for entry in entries if isinstance(entry, PromptLogprob)]:
            self.prompt.add(prompt)
            entries = [msgspec.structs.replace(entry, top=entry.top[: self._echoed]) for entry in prompt]
        found = logprobs_of(entries, self._name)
        self._tokens.add(found.tokens)
        self._values.add(found.token_logprobs)
        self._tops.add(found.top_logprobs)
        self._lengths.extend(len(entry.text) for entry in entries)
        self._sum += sum(value for value in found.token_logprobs if value is not None)

    @property
    def mean(self) -> float:
        """The mean log-probability of a token; 0 without tokens."""
        return self._sum / max(1, len(self._lengths))

    def after(self, prompt: CompletionLogprobsBuilder | None) -> schemas.CompletionLogprobs:
        """Return the log-probabilities of `prompt`, if given, followed by these."""
        both = [self] if prompt is None else [prompt, self]
        lengths = itertools.chain.from_iterable(each._lengths for each in both)
        offsets = list(itertools.accumulate(lengths, initial=0))[:-1]
        return schemas.CompletionLogprobs(
            tokens=JsonListBuilder.joined(each._tokens for each in both),
            token_logprobs=JsonListBuilder.joined(each._values for each in both),
            top_logprobs=JsonListBuilder.joined(each._tops for each in both),
            text_offset=offsets,
        )


async def completion(
    body: schemas.CompletionRequest,
    meta: ResponseMeta,
    echoes: Sequence[str],
    responses: Sequence[FullResponse[CompletionLogprobsBuilder]],
) -> schemas.Completion:
    """Return the response to all prompts. `echoes`: the text that each prompt's choices begin with, or empty."""
    choices = []
    for number, (echo, full) in enumerate(zip(echoes, responses, strict=True)):
        response = full.response
        scored = UNSET if full.prompt is None else full.prompt.prompt.build()
        for place, (choice, scores) in enumerate(_best(full, body.n)):
            choices.append(
                schemas.CompletionChoice(
                    index=number * body.n + place,
                    text=echo + choice.text,
                    logprobs=None
                    if scores is None or body.logprobs is None
                    else scores.after(full.prompt if body.echo else None),
                    finish_reason=choice.finish_reason,
                    stop_reason=choice.stop_reason,
                    token_ids=choice.token_ids if body.return_token_ids else UNSET,
                    prompt_token_ids=response.prompt_token_ids if body.return_token_ids else UNSET,
                    prompt_logprobs=scored,
                )
            )
            await asyncio.sleep(0)  # yield: offsets of many tokens take long
    usage = total_usage([full.response.usage for full in responses])
    return schemas.Completion(**meta, choices=choices, usage=usage)


def _best(
    full: FullResponse[CompletionLogprobsBuilder], count: int
) -> list[tuple[Choice, CompletionLogprobsBuilder | None]]:
    """Return `count` choices with their log-probabilities: all in order, or if there are more, the likeliest, best
    first."""
    pairs = list(zip(full.response.choices, full.logprobs, strict=True))
    if len(pairs) > count:
        pairs.sort(key=lambda pair: -pair[1].mean if pair[1] is not None else 0.0)
    return pairs[:count]


def logprobs_of(entries: Iterable[LogprobEntry], name: Name, offset: int = 0) -> schemas.CompletionLogprobs:
    """Return log-probabilities in OpenAI's format. `offset`: characters of the text before the first of `entries`."""
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for entry in entries:
        tokens.append(name(entry))
        offsets.append(offset)
        offset += len(entry.text)
        if entry.logprob is None:
            values.append(None)
            tops.append(None)
        else:
            values.append(floored(entry.logprob))
            tops.append(_top(entry, entry.logprob, name))
    return schemas.CompletionLogprobs(tokens=tokens, token_logprobs=values, top_logprobs=tops, text_offset=offsets)


def _top(entry: LogprobEntry, logprob: float, name: Name) -> dict[str, float]:
    """Return the chosen token and the likeliest ones by name. If several tokens have the same text, it names the chosen
    one, otherwise the likeliest; the others are named by their ids."""
    top = {name(entry): floored(logprob)}
    for other in entry.top:
        if other.token_id != entry.token_id:
            key = name(other)
            top[by_id(other) if key in top else key] = floored(other.logprob)
    return top


async def completion_events(
    body: schemas.CompletionRequest,
    meta: ResponseMeta,
    echoes: Sequence[str],
    chunks: AsyncGenerator[tuple[int, GenerateChunk], None],
) -> AsyncGenerator[schemas.Completion, None]:
    """Yield the events of a stream. `chunks`: chunks of all prompts, each with its prompt's number."""
    counter = UsageCounter(body.stream_options or schemas.StreamOptions())
    offsets: dict[int, int] = {}
    async for number, chunk in chunks:
        counter.add(number, chunk)
        index = number * body.n + chunk.index
        before = "" if index in offsets else echoes[number]
        entries: list[LogprobEntry] = [*(chunk.prompt_logprobs or []), *(chunk.logprobs or [])]
        logprobs: schemas.CompletionLogprobs | None = None
        at = offsets.setdefault(index, 0)
        if body.logprobs is not None and entries:
            logprobs = logprobs_of(entries, name_of(body), at)
            offsets[index] += sum(len(entry.text) for entry in entries)
        shown: list[int] | UnsetType | None = UNSET
        if body.return_token_ids and chunk.prompt_token_ids is not None:
            shown = chunk.prompt_token_ids
        choice = schemas.CompletionChoice(
            index=index,
            text=before + chunk.text,
            logprobs=logprobs,
            finish_reason=chunk.finish_reason,
            stop_reason=chunk.stop_reason,
            token_ids=chunk.token_ids if body.return_token_ids else UNSET,
            prompt_token_ids=shown,
        )
        yield schemas.Completion(**meta, choices=[choice], usage=counter.for_chunk)
    if counter.wanted.include_usage:
        yield schemas.Completion(**meta, choices=[], usage=counter.so_far)
