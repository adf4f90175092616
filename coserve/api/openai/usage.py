"""Parts that all OpenAI responses share: id, time, model, and token counts."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from msgspec import UNSET, UnsetType

from coserve.api.openai.schemas import StreamOptions
from coserve.core.schemas.generation import GenerateChunk, Usage, token_usage
from coserve.core.types import BaseSpec


class ResponseMeta(TypedDict):
    """Fields of a response and of each chunk of its stream. `created`: seconds since the epoch."""

    id: str
    created: int
    model: str
    system_fingerprint: str


def new_meta(kind: str, model: str | None, spec: BaseSpec) -> ResponseMeta:
    """Return the fields. `model`: the name in the request; empty for the base."""
    return ResponseMeta(
        id=f"{kind}-{secrets.token_hex(12)}",
        created=int(time.time()),
        model=model or spec.name,
        system_fingerprint=spec.fingerprint,
    )


def total_usage(usages: Sequence[Usage]) -> Usage:
    return token_usage(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
        sum(usage.prompt_tokens_details.cached_tokens for usage in usages),
    )


@dataclass
class UsageCounter:
    """Counts the tokens of a stream. A prompt is counted from the first chunk that has its ids or its usage."""

    wanted: StreamOptions
    _prompts: dict[int, int] = field(default_factory=dict)
    _cached: dict[int, int] = field(default_factory=dict)
    _completion: int = 0

    def add(self, number: int, chunk: GenerateChunk) -> None:
        """Count the next chunk of prompt `number`."""
        self._completion += len(chunk.token_ids)
        if chunk.prompt_token_ids is not None:
            self._prompts[number] = len(chunk.prompt_token_ids)
            self._cached[number] = chunk.cached_tokens or 0
        if chunk.usage is not None:
            self._prompts[number] = chunk.usage.prompt_tokens
            self._cached[number] = chunk.usage.prompt_tokens_details.cached_tokens

    @property
    def so_far(self) -> Usage:
        return token_usage(sum(self._prompts.values()), self._completion, sum(self._cached.values()))

    @property
    def for_chunk(self) -> Usage | UnsetType | None:
        """Return the `usage` of a chunk with choices."""
        if self.wanted.continuous_usage_stats:
            return self.so_far
        return None if self.wanted.include_usage else UNSET
