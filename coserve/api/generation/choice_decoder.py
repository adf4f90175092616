"""From the tokens of one sequence to the text of one choice: detokenised as it grows, ended by stop texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coserve.link import Tokens
from coserve.pretrained.tokenizer import Detokenizer, Tokenizer
from coserve.schemas import ChosenLogprob, Logprob, PromptLogprob
from coserve.types import FinishReason, TokenLogprob


class StopStrings:
    """Finds the stop text that ends first in a growing text, and never lets a part of one out.

    The result does not depend on how the text is cut into pushes: what could still become a stop text is held back.
    The cost of a character does not depend on the text or on the length of the stop texts (Knuth, Morris and Pratt 1977).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [_Search(stop) for stop in stops]
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that is free to go, and the stop text if one is complete: then nothing follows."""
        if not self._stops:
            return text, None
        begun = len(self._held)
        whole = self._held + text
        for end, character in enumerate(text, start=begun + 1):
            found = [search.stop for search in self._stops if search.step(character)]
            if found:
                stop = max(found, key=len)
                self._held = ""
                return whole[: end - len(stop)], stop
        free = len(whole) - max(search.matched for search in self._stops)
        self._held = whole[free:]
        return whole[:free], None

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


class _Search:
    """One stop text. `matched`: how many of its first characters the text so far ends with."""

    def __init__(self, stop: str) -> None:
        self.stop, self.matched = stop, 0
        self._shorter = [0] * len(stop)
        """For each beginning of the stop text: the longest shorter beginning that it ends with."""
        for place in range(1, len(stop)):
            self._shorter[place] = self._next(self._shorter[place - 1], stop[place])

    def _next(self, matched: int, character: str) -> int:
        while matched and self.stop[matched] != character:
            matched = self._shorter[matched - 1]
        return matched + (self.stop[matched] == character)

    def step(self, character: str) -> bool:
        """The next character of the text; true if the stop text is complete. Nothing may follow then."""
        self.matched = self._next(self.matched, character)
        return self.matched == len(self.stop)


@dataclass(frozen=True)
class ChoiceDelta:
    """What one message of the engine adds to a choice. `token_ids` includes the token that ended it."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[ChosenLogprob, ...] | None
    prompt_logprobs: tuple[PromptLogprob, ...] | None
    finished: FinishReason | None = None
    stop_reason: str | int | None = None


class ChoiceDecoder:
    """One choice. Stop texts are not looked for in the text of the first `min_tokens` tokens."""

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
        self._unscored = iter(prompt) if prompt_logprobs else None
        self._begun = False
        self._include_stop = include_stop
        self.count = 0

    def feed(self, message: Tokens) -> ChoiceDelta:
        """The piece that `message` makes. After one with `finished` set, no more may be fed."""
        parts: list[str] = []
        last = len(message.tokens) - 1 if message.finished is FinishReason.STOP else None
        for index, token in enumerate(message.tokens):
            self.count += 1
            if index == last and not self._include_stop:  # the token that says stop is not text
                break
            free, stop = self._search(self._text.push((token,)))
            parts.append(free)
            if stop is not None:
                return self._piece(message, index + 1, parts, FinishReason.STOP, stop)
        if message.finished is None:
            return self._piece(message, len(message.tokens), parts, None, None)
        free, stop = self._search(self._text.flush())
        parts.append(free)
        if stop is not None:
            return self._piece(message, len(message.tokens), parts, FinishReason.STOP, stop)
        parts.append(self._stops.flush())
        ended_by = message.tokens[-1] if last is not None and message.tokens else None
        reason = ended_by if ended_by in self._stop_token_ids else None
        return self._piece(message, len(message.tokens), parts, message.finished, reason)

    def _search(self, text: str) -> tuple[str, str | None]:
        if self.count <= self._min_tokens:
            return text, None
        free, stop = self._stops.push(text)
        return (free, stop) if stop is None or not self._include_stop else (free + stop, stop)

    def _piece(
        self, message: Tokens, count: int, parts: list[str], finished: FinishReason | None, reason: str | int | None
    ) -> ChoiceDelta:
        ids = message.tokens[:count]
        logprobs = None
        if self._logprobs:
            logprobs = tuple(map(self._chosen, ids, message.logprobs))
        return ChoiceDelta("".join(parts), ids, logprobs, self._prompt(message), finished, reason)

    def _chosen(self, token: int, found: TokenLogprob) -> ChosenLogprob:
        text = self._tokenizer.token(token)
        return ChosenLogprob(token_id=token, token=text, logprob=found.logprob, top=self._top(found))

    def _top(self, found: TokenLogprob) -> list[Logprob]:
        return [Logprob(token_id=id, token=self._tokenizer.token(id), logprob=value) for id, value in found.top]

    def _prompt(self, message: Tokens) -> tuple[PromptLogprob, ...] | None:
        """The next tokens of the prompt with their log-probabilities, the first one before all."""
        if self._unscored is None:
            return None
        entries: list[PromptLogprob] = []
        if not self._begun:
            self._begun = True
            first = next(self._unscored)
            entries.append(PromptLogprob(token_id=first, token=self._tokenizer.token(first), logprob=None))
        for found, token in zip(message.prompt_logprobs, self._unscored, strict=False):
            text = self._tokenizer.token(token)
            entries.append(PromptLogprob(token_id=token, token=text, logprob=found.logprob, top=self._top(found)))
        return tuple(entries) or None
