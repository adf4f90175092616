"""Tokens and finish reasons in TGI's format."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec import UNSET, UnsetType

from coserve.api.generation.full_response import LogprobEntry, floored
from coserve.api.http.json_blocks import JsonListBuilder
from coserve.api.tgi.schemas import TgiAlternative, TgiFinish, TgiParameters, TgiPrefillToken, TgiToken
from coserve.core.schemas import PromptLogprob


def finish_reason(reason: str, stop: str | int | None) -> TgiFinish:
    if reason == "length":
        return "length"
    return "stop_sequence" if isinstance(stop, str) else "eos_token"


def _prefill(entry: LogprobEntry) -> TgiPrefillToken:
    logprob = None if entry.logprob is None else floored(entry.logprob)
    return TgiPrefillToken(id=entry.token_id, text=entry.token, logprob=logprob)


def top_tokens(entry: LogprobEntry, parameters: TgiParameters, special: Collection[int]) -> list[TgiToken] | UnsetType:
    """Return the likeliest tokens at the position of `entry`, for `top_n_tokens`. `special`: ids of special tokens."""
    if not parameters.top_n_tokens:
        return UNSET
    return [
        TgiToken(id=top.token_id, text=top.token, logprob=floored(top.logprob), special=top.token_id in special)
        for top in entry.top[: parameters.top_n_tokens]
    ]


def token_of(entry: LogprobEntry, text: str, parameters: TgiParameters, special: Collection[int]) -> TgiToken:
    """Return the token in TGI's format. Clients drop the text of tokens marked special, so a special token that
    releases text held back before it is not marked."""
    left_out = entry.token_id in special and text in ("", entry.token)
    others: list[TgiAlternative] | UnsetType = UNSET
    if parameters.return_k_alternatives:
        others = [
            TgiAlternative(id=top.token_id, text=top.token, logprob=floored(top.logprob))
            for top in entry.top[: parameters.return_k_alternatives]
        ]
    return TgiToken(
        id=entry.token_id,
        text=entry.token if left_out else text,
        logprob=floored(entry.logprob),
        special=left_out,
        alternative_tokens=others,
    )


class TgiLogprobsBuilder:
    """Collects the log-probabilities of one choice, or of the prompt."""

    def __init__(self, parameters: TgiParameters, special: Collection[int]) -> None:
        self._parameters, self._special = parameters, special
        self.tokens, self.prefill = JsonListBuilder[TgiToken](), JsonListBuilder[TgiPrefillToken]()
        self._tops = JsonListBuilder[list[TgiToken]]()
        self._sum, self._count = 0.0, 0

    def add(self, entries: Sequence[LogprobEntry], /) -> None:
        if isinstance(entries[0], PromptLogprob):
            self.prefill.add([_prefill(entry) for entry in entries])
            return
        self.tokens.add([token_of(entry, entry.text, self._parameters, self._special) for entry in entries])
        tops = (top_tokens(entry, self._parameters, self._special) for entry in entries)
        self._tops.add([top for top in tops if top is not UNSET])
        self._sum, self._count = (
            self._sum + sum(floored(entry.logprob) for entry in entries),
            self._count + len(entries),
        )

    @property
    def mean(self) -> float:
        return self._sum / max(1, self._count)

    def tops(self) -> list[list[TgiToken]] | UnsetType:
        return self._tops.as_list() if self._parameters.top_n_tokens else UNSET
