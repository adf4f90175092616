"""Decodes a sequence's tokens into the text of one choice: incremental detokenisation, stop strings,
log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coserve.api.generation.stop_strings import StopStrings
from coserve.core.link.generation import Tokens
from coserve.core.logprobs import TokenLogprob
from coserve.core.schemas.generation import ChosenLogprob, Logprob, PromptLogprob
from coserve.core.types import FinishReason
from coserve.data.pretrained.tokenizer import Detokenizer, Tokenizer


@dataclass(frozen=True)
class ChoiceDelta:
    """Text and tokens that one engine message adds to a choice. `token_ids` includes the token that ended it."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[ChosenLogprob, ...] | None
    prompt_logprobs: tuple[PromptLogprob, ...] | None
    finished: FinishReason | None = None
    stop_reason: str | int | None = None


class ChoiceDecoder:
    """Decodes one choice. Stop strings are not searched in the text of the first `min_tokens` tokens. `stop_tokens`:
    the stop tokens by id, each with its `stop_reason`.

    `prepended`: number of special tokens that the tokenizer put before a text prompt. Among the prompt's
    log-probabilities they have empty text; other special tokens have theirs. None: the prompt was token ids or a chat;
    `skip_special` applies to it as to the choice.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        *,
        stops: Sequence[str],
        stop_tokens: Mapping[int, str | int | None],
        min_tokens: int,
        logprobs: bool,
        prompt_logprobs: bool = False,
        prepended: int | None = None,
        include_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        self._name = tokenizer.vocabulary.name
        self._text = Detokenizer(tokenizer, prompt, skip_special=skip_special)
        self._stops = StopStrings(stops)
        self._stop_tokens = stop_tokens
        self._min_tokens = min_tokens
        self._logprobs = logprobs
        self._prompt_left = iter(prompt) if prompt_logprobs else None
        self._prompt_text = Detokenizer(tokenizer, skip_special=skip_special and prepended is None)
        self._prompt_unseen, self._prompt_count = prepended or 0, len(prompt)
        """Prompt tokens whose log-probabilities are still to be sent: the prepended ones, and all."""
        self._first_prompt_token_sent = False
        self._include_stop = include_stop
        self.count = 0

    def feed(self, message: Tokens) -> ChoiceDelta:
        """Return the delta of the next message. Feed nothing after a delta with `finished` set."""
        parts: list[str] = []
        added: list[str] = []
        stopped = message.finished is FinishReason.STOP and not message.ends_in_text
        last = len(message.tokens) - 1 if stopped else None
        reason = self._stop_tokens.get(message.tokens[-1]) if last is not None and message.tokens else None
        by_text = reason if isinstance(reason, str) else None
        for index, token in enumerate(message.tokens):
            self.count += 1
            if index == last and (by_text is not None or not self._include_stop):  # the stop token has no text
                added.append("")
                break
            added.append(self._text.push((token,)))
            released, stop = self._search(added[-1])
            parts.append(released)
            if stop is not None:
                return self._delta(message, added, parts, FinishReason.STOP, stop)
        if message.finished is None:
            return self._delta(message, added, parts, None, None)
        held = self._text.flush()
        added[-1:] = [text + held for text in added[-1:]]
        released, stop = self._search(held)
        parts.append(released)
        if stop is not None:
            return self._delta(message, added, parts, FinishReason.STOP, stop)
        parts.append(self._stops.flush())
        if by_text is not None and self._include_stop:
            parts.append(by_text)
            added[-1] += by_text
        return self._delta(message, added, parts, message.finished, reason)

    def _search(self, text: str) -> tuple[str, str | None]:
        if self.count <= self._min_tokens:
            return text, None
        released, stop = self._stops.push(text)
        return (released, stop) if stop is None or not self._include_stop else (released + stop, stop)

    def _delta(
        self,
        message: Tokens,
        added: list[str],
        parts: list[str],
        finished: FinishReason | None,
        reason: str | int | None,
    ) -> ChoiceDelta:
        """Build a delta. `added`: the text of each token up to the choice's end; `parts`: the text to send."""
        ids = message.tokens[: len(added)]
        logprobs = None
        if self._logprobs:
            logprobs = tuple(map(self._chosen, ids, added, message.logprobs))
        return ChoiceDelta("".join(parts), ids, logprobs, self._prompt_logprobs(message), finished, reason)

    def _chosen(self, token: int, text: str, found: TokenLogprob) -> ChosenLogprob:
        name = self._name(token)
        return ChosenLogprob(token_id=token, token=name, text=text, logprob=found.logprob, top=self._top(found))

    def _top(self, found: TokenLogprob) -> list[Logprob]:
        return [Logprob(token_id=id, token=self._name(id), logprob=value) for id, value in found.top]

    def _prompt_logprobs(self, message: Tokens) -> tuple[PromptLogprob, ...] | None:
        """Return log-probabilities of the next prompt tokens. The prompt's first token, which has none, is sent
        first."""
        if self._prompt_left is None:
            return None
        entries: list[PromptLogprob] = []
        if not self._first_prompt_token_sent:
            self._first_prompt_token_sent = True
            entries.append(self._prompt_entry(next(self._prompt_left), None))
        for found, token in zip(message.prompt_logprobs, self._prompt_left, strict=False):
            entries.append(self._prompt_entry(token, found))
        return tuple(entries) or None

    def _prompt_entry(self, token: int, found: TokenLogprob | None) -> PromptLogprob:
        text = "" if self._prompt_unseen > 0 else self._prompt_text.push((token,))
        self._prompt_unseen -= 1
        self._prompt_count -= 1
        if self._prompt_count == 0:
            text += self._prompt_text.flush()
        logprob, top = (None, []) if found is None else (found.logprob, self._top(found))
        return PromptLogprob(token_id=token, token=self._name(token), text=text, logprob=logprob, top=top)
