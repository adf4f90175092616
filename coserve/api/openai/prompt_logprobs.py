"""Log-probabilities of prompts in vLLM's format; OpenAI's API has none."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from coserve.api.generation.full_response import floored
from coserve.api.http.json_blocks import JsonListBuilder
from coserve.api.openai.schemas import PromptTokens, PromptTokenScore
from coserve.core.schemas import PromptLogprob


class PromptLogprobsBuilder:
    """Collects a prompt's log-probabilities. `top`: number of likeliest tokens listed at each position; None: the
    response has no `prompt_logprobs`."""

    def __init__(self, top: int | None) -> None:
        self._top, self._tokens = top, JsonListBuilder[PromptTokens]()

    def add(self, entries: Sequence[PromptLogprob]) -> None:
        if self._top is not None:
            self._tokens.add([_tokens(entry, self._top) for entry in entries])

    def build(self) -> list[PromptTokens] | UnsetType:
        return UNSET if self._top is None else self._tokens.as_list()


def _tokens(entry: PromptLogprob, top: int) -> PromptTokens:
    """Return the prompt's token, then the likeliest. Only the likeliest have a rank."""
    if entry.logprob is None:
        return None
    ranks = {other.token_id: place for place, other in enumerate(entry.top, 1)}
    own = PromptTokenScore(floored(entry.logprob), ranks.get(entry.token_id), entry.token)
    return {str(entry.token_id): own} | {
        str(other.token_id): PromptTokenScore(floored(other.logprob), place, other.token)
        for place, other in enumerate(entry.top[:top], 1)
    }
