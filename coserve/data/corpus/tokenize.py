"""Tokenises rows and marks the tokens that contribute to the loss. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from coserve.core.errors import EmptyCorpus, InvalidRequest, MalformedRow, NoTargets
from coserve.core.training.settings import TrainOn
from coserve.core.validation import above_vocabulary
from coserve.data.corpus.rows import ChatRow, CompletionRow, LabelledRow, PreferenceRow, Row, TextRow
from coserve.data.corpus.token_rows import TokensRow
from coserve.data.corpus.tokenized import UNDESIRABLE, Corpus
from coserve.data.pretrained.tokenizer import Tokenizer

NO_ROWS = "expected at least one row"
_OF_A_LOSS = {
    PreferenceRow: ("dpo, orpo, simpo", '{"prompt", "chosen", "rejected"}'),
    LabelledRow: ("kto", '{"prompt", "completion", "label": true or false}'),
}
"""Rows of certain losses alone: the losses' types, and the rows' fields."""


@dataclass(frozen=True)
class Tokenization:
    """How rows become tokens."""

    max_length: int
    """Most tokens of a row; of a pair, of each of its sequences."""
    train_on: TrainOn | None = None
    """See `TrainingRequest`, like `one_row_per_answer`."""
    pairs: bool = False
    """All rows are `PreferenceRow`s; False: none is."""
    labelled: bool = False
    """All rows are `LabelledRow`s; False: none is."""
    one_row_per_answer: bool = False


@dataclass(frozen=True)
class TokenizedRow:
    """A tokenised row. `targets[i]`: token i contributes to the loss. `cut`: the row was truncated. `split`: tokens of
    a pair's first sequence. `undesirable`: its label is false."""

    tokens: list[int]
    targets: list[bool]
    cut: bool = False
    split: int | None = None
    undesirable: bool = False


@dataclass(frozen=True)
class RowArrays:
    """A tokenised row as arrays. `tokens`: int32 (n); `target`: uint8 (n), as in `Corpus`. `cut` and `split`: as in
    `TokenizedRow`."""

    tokens: npt.NDArray[np.int32]
    target: npt.NDArray[np.uint8]
    cut: bool
    split: int | None = None


def tokenize_rows(rows: Iterable[Row], tokenizer: Tokenizer, options: Tokenization) -> Corpus:
    """Tokenise `rows` in order.

    Targets (tokens that contribute to the loss): all tokens of a text; the completion's tokens of a prompt/completion;
    the assistant's turns of a chat, with their end-of-turn tokens; others if `train_on` says so. Texts and completions
    end with EOS, which is also a target. The first token of a row is never a target, because no token precedes it.

    Truncation: a text or chat loses its end (a text its EOS too). A prompt loses its beginning except a BOS token, so
    that the completion stays whole; a completion loses its end only if that is not enough; the prompt of a pair of
    texts is cut alike in both. With `one_row_per_answer`, an answer that begins beyond `max_length` has no row, and the
    chat's last row counts as cut.

    Raises `NoTargets` and `MalformedRow` (a chat that the template refuses) with the row's line, `EmptyCorpus`.
    """
    rows_of_arrays = list(row_arrays(rows, tokenizer, options))
    if not rows_of_arrays:
        raise EmptyCorpus(NO_ROWS)
    bounds = np.cumsum([0, *(len(row.tokens) for row in rows_of_arrays)], dtype=np.int64)
    return Corpus(
        np.concatenate([row.tokens for row in rows_of_arrays]),
        np.concatenate([row.target for row in rows_of_arrays]),
        bounds,
        bounds[:-1] + np.array([row.split for row in rows_of_arrays], np.int64) if options.pairs else None,
        sum(row.cut for row in rows_of_arrays),
    )


def row_arrays(rows: Iterable[Row], tokenizer: Tokenizer, options: Tokenization) -> Iterator[RowArrays]:
    """Yield the rows of `tokenize_rows` one at a time; there may be none."""
    if options.max_length < 2:
        raise InvalidRequest(f"expected at least 2, got {options.max_length}", field="training.max_length")
    checked = _checked(rows, PreferenceRow if options.pairs else LabelledRow if options.labelled else None)
    for row, tokenized in _tokenized_rows(checked, tokenizer, options):
        if not any(tokenized.targets):
            raise NoTargets(_nothing_to_learn(row, tokenized, options.max_length), line=row.line)
        target = np.array(tokenized.targets, np.uint8) * (UNDESIRABLE if tokenized.undesirable else 1)
        yield RowArrays(np.array(tokenized.tokens, np.int32), target, tokenized.cut, tokenized.split)


def _nothing_to_learn(row: Row, tokenized: TokenizedRow, max_length: int) -> str:
    pair = isinstance(row, PreferenceRow)
    if not tokenized.cut:
        return "chosen or rejected has nothing to learn" if pair else "the row has nothing to learn"
    limit = "half of micro_batch_tokens" if pair or isinstance(row, LabelledRow) else "micro_batch_tokens"
    least = f"the least of training.max_length, the base's context and {limit}"
    return f"the answer to be learned begins after the first {max_length} tokens, where the row is cut ({least})"


def _checked(rows: Iterable[Row], kind: type[PreferenceRow | LabelledRow] | None) -> Iterator[Row]:
    """Raise `MalformedRow` for a row that does not fit the loss, whose rows are of this `kind`; None: of the others."""
    for row in rows:
        got = type(row) if isinstance(row, PreferenceRow | LabelledRow) else None
        if got is not kind and kind is not None:
            types, fields = _OF_A_LOSS[kind]
            unlabelled = kind is LabelledRow and isinstance(row, CompletionRow | ChatRow)
            found = ", got a label that is neither, or none" if unlabelled else ""
            raise MalformedRow(f"training.loss ({types}) expects rows of {fields}{found}", line=row.line)
        if got is not kind and got is not None:
            types, fields = _OF_A_LOSS[got]
            raise MalformedRow(f"training.loss ({types}) is missing for rows of {fields}", line=row.line)
        yield row


def _tokenized_rows(
    rows: Iterable[Row], tokenizer: Tokenizer, options: Tokenization
) -> Iterator[tuple[Row, TokenizedRow]]:
    """Yield each tokenised row with the row it comes from."""
    max_length, train_on = options.max_length, options.train_on
    for row in rows:
        _check_targets(row, train_on)
        match row:
            case TextRow(text=text):
                found = [_text(text, tokenizer, max_length)]
            case TokensRow():
                found = [_tokens(row, tokenizer, max_length)]
            case CompletionRow(prompt=prompt, completion=completion):
                found = _completions(prompt, [completion], tokenizer, max_length)
            case PreferenceRow():
                found = [_pair(row, tokenizer, max_length)]
            case LabelledRow(answer=CompletionRow(prompt=prompt, completion=completion)):
                found = _completions(prompt, [completion], tokenizer, max_length)
            case LabelledRow(answer=ChatRow() as answer):
                found = [_chat(answer, tokenizer, max_length)]
            case ChatRow():
                found = (
                    _answers(row, tokenizer, max_length, train_on)
                    if options.one_row_per_answer
                    else [_chat(row, tokenizer, max_length, train_on)]
                )
        for tokenized in found:
            if train_on == "all" and tokenized.targets:
                tokenized.targets[:] = [True] * len(tokenized.targets)
            if tokenized.targets:
                tokenized.targets[0] = False
            yield row, replace(tokenized, undesirable=isinstance(row, LabelledRow) and not row.label)


def _check_targets(row: Row, train_on: TrainOn | None) -> None:
    """Raise `MalformedRow` for a row without the targets that `train_on` asks for."""
    if isinstance(row, TokensRow):
        if train_on in ("assistant", "completion") and row.targets is None:
            raise MalformedRow(f"train_on {train_on!r} expects labels or a mask beside input_ids", line=row.line)
        return
    if train_on == "assistant" and not isinstance(row, ChatRow):
        raise MalformedRow("train_on 'assistant' expects chat rows", line=row.line)
    if train_on == "completion" and isinstance(row, TextRow):
        raise MalformedRow("train_on 'completion' expects prompt/completion or chat rows, got a text", line=row.line)
    if (
        train_on == "completion"
        and isinstance(row, ChatRow)
        and row.completion_start is None
        and row.messages[-1:]
        and row.messages[-1]["role"] != "assistant"
    ):
        raise MalformedRow("train_on 'completion' expects chats that end with the assistant", line=row.line)


def _only_completion(row: ChatRow) -> tuple[dict[str, object], ...]:
    """Return the messages, with weight 0 on those before the completion."""
    start = len(row.messages[:-1]) if row.completion_start is None else row.completion_start
    return (*(message | {"weight": 0} for message in row.messages[:start]), *row.messages[start:])


def _eos(tokenizer: Tokenizer) -> list[int]:
    return [] if not tokenizer.eos_token_ids else [tokenizer.eos_token_ids[0]]


def _text(text: str, tokenizer: Tokenizer, max_length: int) -> TokenizedRow:
    if not text.strip():
        return TokenizedRow([], [])
    tokens = tokenizer.encode(text)
    if not tokens or tokens[-1] not in tokenizer.eos_token_ids:
        tokens += _eos(tokenizer)
    kept = tokens[:max_length]
    return TokenizedRow(kept, [True] * len(kept), cut=len(kept) < len(tokens))


def _tokens(row: TokensRow, tokenizer: Tokenizer, max_length: int) -> TokenizedRow:
    wrong = above_vocabulary(row.tokens, tokenizer.vocab_size)
    if wrong and not tokenizer.vocabulary.has(max(row.tokens)):
        raise MalformedRow(wrong, line=row.line, field="input_ids")
    targets = [True] * len(row.tokens) if row.targets is None else row.targets
    return TokenizedRow(row.tokens[:max_length], targets[:max_length], cut=len(row.tokens) > max_length)


def _completions(prompt: str, completions: Sequence[str], tokenizer: Tokenizer, max_length: int) -> list[TokenizedRow]:
    """Return the prompt with each of the completions. The prompt is cut alike for all."""
    if not all(completions):
        return [TokenizedRow([], []) for _ in completions]
    before, ends = tokenizer.encode(prompt), [[token] for token in tokenizer.eos_token_ids]
    afters = [
        tokenizer.encode_continuation(text) if prompt else tokenizer.encode(text, add_special=False)
        for text in completions
    ]
    afters = [after if after[-1:] in ends else after + _eos(tokenizer) for after in afters]
    head = before[:1] if before[:1] == [tokenizer.bos_token_id] else []
    longest = max(map(len, afters))
    prompt_limit = min(max(max_length - longest, len(head) + 1 if prompt else len(head)), max_length - 1)
    cut = len(before) > prompt_limit
    if cut:
        before = head + before[len(before) - prompt_limit + len(head) :]
    found = []
    for after in afters:
        kept = after[: max_length - len(before)]
        targets = [False] * len(before) + [True] * len(kept)
        found.append(TokenizedRow(before + kept, targets, cut=cut or len(kept) < len(after)))
    return found


def _pair(row: PreferenceRow, tokenizer: Tokenizer, max_length: int) -> TokenizedRow:
    """Return both sequences of a pair, concatenated; no tokens if one of them has no targets."""
    chosen, rejected = row.chosen, row.rejected
    if isinstance(chosen, CompletionRow) and isinstance(rejected, CompletionRow):
        answers = [chosen.completion, rejected.completion]
        first, second = _completions(chosen.prompt, answers, tokenizer, max_length)
    else:
        assert isinstance(chosen, ChatRow) and isinstance(rejected, ChatRow), "a pair is of one format"
        first, second = (_chat(answer, tokenizer, max_length) for answer in (chosen, rejected))
    for answer in (first, second):
        if not any(answer.targets[1:]):
            return TokenizedRow([], [], answer.cut)
    tokens, targets = first.tokens + second.tokens, [*first.targets, False, *second.targets[1:]]
    return TokenizedRow(tokens, targets, first.cut or second.cut, split=len(first.tokens))


def _answers(row: ChatRow, tokenizer: Tokenizer, max_length: int, train_on: TrainOn | None) -> list[TokenizedRow]:
    """Return a row for each answer to learn: the chat up to it. If no answer begins within `max_length`, return one row
    without targets."""
    messages = _only_completion(row) if train_on == "completion" else row.messages
    found: list[TokenizedRow] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or message.get("weight") == 0:
            continue
        before = (one | {"weight": 0} if one["role"] == "assistant" else one for one in messages[:index])
        answer = _chat(replace(row, messages=(*before, message)), tokenizer, max_length)
        if not any(answer.targets[1:]):
            return [*found[:-1], replace(found[-1], cut=True)] if found else [answer]
        found.append(answer)
    return found or [TokenizedRow([], [])]


def _chat(row: ChatRow, tokenizer: Tokenizer, max_length: int, train_on: TrainOn | None = None) -> TokenizedRow:
    messages = _only_completion(row) if train_on == "completion" else row.messages
    if train_on != "all" and not any(one["role"] == "assistant" and one.get("weight") != 0 for one in messages):
        return TokenizedRow([], [])
    try:
        if train_on == "all":
            tokens = tokenizer.encode_whole_chat(messages, row.tools, row.options)
            targets = [True] * len(tokens)
        else:
            tokens, targets = tokenizer.encode_chat_for_training(messages, row.tools, row.options, most=max_length)
    except InvalidRequest as error:
        raise MalformedRow(error.message, line=row.line, field="messages") from error
    if not any(targets[1:]):
        return TokenizedRow([], [])
    return TokenizedRow(tokens[:max_length], targets[:max_length], cut=len(tokens) > max_length)
