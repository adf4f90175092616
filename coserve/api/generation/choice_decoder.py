"""Tokens of one sequence become the text of one choice: incremental detokenisation, stop strings, log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coserve.api.generation.stop_strings import StopStrings
from coserve.link import Tokens
from coserve.pretrained.tokenizer import Detokenizer, Tokenizer
from coserve.schemas import ChosenLogprob, Logprob, PromptLogprob
from coserve.types import FinishReason, TokenLogprob


@dataclass(frozen=True)
class ChoiceDelta:
    """The text and tokens that one engine message adds to a choice. `token_ids` includes the token that ended it."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[ChosenLogprob, ...] | None
    prompt_logprobs: tuple[PromptLogprob, ...] | None
    finished: FinishReason | None = None
    stop_reason: str | int | None = None


class ChoiceDecoder:
    """Decodes one choice. Stop strings are not searched in the text of the first `min_tokens` tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        *,
        stops: Sequence[str],
        stop_token_ids: Sequence[int],
        min_tokens: int,
        logprobs: bool,
        prompt_logprobs: bool = False,
        include_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._text = Detokenizer(tokenizer, prompt, skip_special=skip_special)
        self._stops = StopStrings(stops)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._min_tokens = min_tokens
        self._logprobs = logprobs
        self._prompt_left = iter(prompt) if prompt_logprobs else None
        self._first_prompt_token_sent = False
        self._include_stop = include_stop
        self.count = 0

    def feed(self, message: Tokens) -> ChoiceDelta:
        """The delta of the next message. Feed nothing after a delta with `finished` set."""
        parts: list[str] = []
        last = len(message.tokens) - 1 if message.finished is FinishReason.STOP else None
        for index, token in enumerate(message.tokens):
            self.count += 1
            if index == last and not self._include_stop:  # the stop token has no text
                break
            released, stop = self._search(self._text.push((token,)))
            parts.append(released)
            if stop is not None:
                return self._delta(message, index + 1, parts, FinishReason.STOP, stop)
        if message.finished is None:
            return self._delta(message, len(message.tokens), parts, None, None)
        released, stop = self._search(self._text.flush())
        parts.append(released)
        if stop is not None:
            return self._delta(message, len(message.tokens), parts, FinishReason.STOP, stop)
        parts.append(self._stops.flush())
        ended_by = message.tokens[-1] if last is not None and message.tokens else None
        reason = ended_by if ended_by in self._stop_token_ids else None
        return self._delta(message, len(message.tokens), parts, message.finished, reason)

    def _search(self, text: str) -> tuple[str, str | None]:
        if self.count <= self._min_tokens:
            return text, None
        released, stop = self._stops.push(text)
        return (released, stop) if stop is None or not self._include_stop else (released + stop, stop)

    def _delta(
        self, message: Tokens, count: int, parts: list[str], finished: FinishReason | None, reason: str | int | None
    ) -> ChoiceDelta:
        ids = message.tokens[:count]
        logprobs = None
        if self._logprobs:
            logprobs = tuple(map(self._chosen, ids, message.logprobs))
        return ChoiceDelta("".join(parts), ids, logprobs, self._prompt_logprobs(message), finished, reason)

    def _chosen(self, token: int, found: TokenLogprob) -> ChosenLogprob:
        text = self._tokenizer.token(token)
        return ChosenLogprob(token_id=token, token=text, logprob=found.logprob, top=self._top(found))

    def _top(self, found: TokenLogprob) -> list[Logprob]:
        return [Logprob(token_id=id, token=self._tokenizer.token(id), logprob=value) for id, value in found.top]

    def _prompt_logprobs(self, message: Tokens) -> tuple[PromptLogprob, ...] | None:
        """Log-probabilities of the next prompt tokens. The first token, which has none, comes before all."""
        if self._prompt_left is None:
            return None
        entries: list[PromptLogprob] = []
        if not self._first_prompt_token_sent:
            self._first_prompt_token_sent = True
            first = next(self._prompt_left)
            entries.append(PromptLogprob(token_id=first, token=self._tokenizer.token(first), logprob=None))
        for found, token in zip(message.prompt_logprobs, self._prompt_left, strict=False):
            text = self._tokenizer.token(token)
            entries.append(PromptLogprob(token_id=token, token=text, logprob=found.logprob, top=self._top(found)))
        return tuple(entries) or None
