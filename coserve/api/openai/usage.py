"""Parts that all OpenAI responses share: id, time, model, and token counts."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType

from coserve.api.openai.schemas import OpenAIUsage, StreamOptions
from coserve.schemas import GenerateChunk, Usage
from coserve.types import BaseSpec


@dataclass(frozen=True)
class ResponseMeta:
    """`created`: seconds since the epoch; `model` as the client called it; `fingerprint`: the base's."""

    id: str
    created: int
    model: str
    fingerprint: str


def new_meta(kind: str, model: str | None, spec: BaseSpec) -> ResponseMeta:
    """`model`: the name in the request; empty for the base."""
    return ResponseMeta(f"{kind}-{secrets.token_hex(12)}", int(time.time()), model or spec.name, spec.fingerprint)


def _usage(prompt: int, completion: int) -> OpenAIUsage:
    return OpenAIUsage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)


def total_usage(usages: Iterable[Usage]) -> OpenAIUsage:
    found = list(usages)
    return _usage(sum(usage.prompt_tokens for usage in found), sum(usage.completion_tokens for usage in found))


@dataclass
class UsageCounter:
    """Counts the tokens of a stream. A prompt is counted from the first chunk that has its ids or its usage."""

    wanted: StreamOptions
    _prompts: dict[int, int] = field(default_factory=dict)
    _completion: int = 0

    def add(self, number: int, chunk: GenerateChunk) -> None:
        """The next chunk of the prompt `number`."""
        self._completion += len(chunk.token_ids)
        if chunk.prompt_token_ids is not None:
            self._prompts[number] = len(chunk.prompt_token_ids)
        if chunk.usage is not None:
            self._prompts[number] = chunk.usage.prompt_tokens

    @property
    def so_far(self) -> OpenAIUsage:
        return _usage(sum(self._prompts.values()), self._completion)

    @property
    def for_chunk(self) -> OpenAIUsage | UnsetType | None:
        """The `usage` of a chunk with choices."""
        if self.wanted.continuous_usage_stats:
            return self.so_far
        return None if self.wanted.include_usage else UNSET
