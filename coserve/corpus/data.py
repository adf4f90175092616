"""Corpora: rows become token sequences that know which of their tokens are to be learned. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from coserve.cancellation import unchecked
from coserve.corpus.rows import ChatRow, CompletionRow, Row, TextRow
from coserve.errors import CheckpointUnreadable, EmptyCorpus, InvalidRequest, MalformedRow, NoTargets
from coserve.pretrained.tokenizer import Tokenizer
from coserve.state.durable import safetensors_errors, write_file
from coserve.state.failpoints import failpoint

MAX_TOKENS = 1 << 30
PIECE = 1 << 20
"""Elements that are read from a file at once: the library that reads them keeps the interpreter's lock."""


@dataclass(frozen=True)
class Sequence:
    """One row as tokens; `learn[i]`: token i is to be predicted from those before it. `cut`: the row was longer."""

    tokens: list[int]
    learn: list[bool]
    cut: bool = False


@dataclass(frozen=True)
class Corpus:
    """All sequences, one behind the other: `tokens` int32 (N), `target` uint8 (N), `bounds` int64 (S+1, from 0 to N)."""

    tokens: npt.NDArray[np.int32]
    target: npt.NDArray[np.uint8]
    bounds: npt.NDArray[np.int64]
    rows_cut: int = 0
    """Rows that were longer than `max_length`; known only to who made the corpus."""

    @property
    def rows(self) -> int:
        return len(self.bounds) - 1

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each row (S)."""
        return np.diff(self.bounds)

    @property
    def token_count(self) -> int:
        return len(self.tokens)

    def read_lengths(self) -> npt.NDArray[np.int64]:
        return self.lengths

    def discard(self) -> None:
        """Nothing of it is on disk."""

    @property
    def target_tokens(self) -> int:
        return int(self.target.sum())

    def row(self, index: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """Tokens and targets of one row."""
        here = slice(self.bounds[index], self.bounds[index + 1])
        return self.tokens[here], self.target[here]

    def save(self, path: Path) -> None:
        """Durable when it returns. Raises `StorageFull`, `StorageFailed`."""
        arrays = {"tokens": self.tokens, "target": self.target, "bounds": self.bounds}
        write_file(path, safetensors.numpy.save(arrays), point="corpus")

    @classmethod
    def load(cls, path: Path, check: Callable[[], None] = unchecked) -> Corpus:
        """Raises `CheckpointUnreadable` for a file that is not there, or not what `save` wrote; `StorageError` where the
        machine cannot read it now; and what `check` raises, which is called now and then."""
        try:
            with safetensors_errors(path):
                failpoint("job.open")
                with safe_open(path, framework="numpy") as file:
                    tokens, target, bounds = (_read(file, name, check) for name in ("tokens", "target", "bounds"))
            corpus = cls(tokens, target, bounds)
        except (OSError, SafetensorError, ValueError) as error:
            raise CheckpointUnreadable("the job's corpus cannot be read") from error
        if not corpus._is_sound():
            raise CheckpointUnreadable("the job's corpus is damaged")
        return corpus

    def _is_sound(self) -> bool:
        tokens, target, bounds = self.tokens, self.target, self.bounds
        kinds = [array.dtype for array in (tokens, target, bounds)] == [np.int32, np.uint8, np.int64]
        shaped = tokens.ndim == target.ndim == bounds.ndim == 1 and len(tokens) == len(target) and len(bounds) > 1
        if not (
            kinds and shaped and bounds[0] == 0 and bounds[-1] == len(tokens) and bool(np.all(np.diff(bounds) > 0))
        ):
            return False
        return bool(np.all(tokens >= 0)) and bool(np.all(target <= 1)) and not target[bounds[:-1]].any()


def _read(file: safe_open, name: str, check: Callable[[], None]) -> npt.NDArray[Any]:
    """One array (N), of whatever type the file says, in pieces."""
    whole = file.get_slice(name)  # type: ignore[no-untyped-call]
    (size,) = whole.get_shape()
    if size == 0:
        raise CheckpointUnreadable("the job's corpus is damaged")
    pieces = []
    for start in range(0, size, PIECE):
        check()
        pieces.append(whole[start : min(start + PIECE, size)])
    return np.concatenate(pieces)


def tokenize_rows(rows: Iterable[Row], tokenizer: Tokenizer, max_length: int) -> Corpus:
    """The corpus of `rows`, in order; each row is one sequence of at most `max_length` tokens.

    What is learned: of a text every token but the first, of a completion its tokens, of a chat the assistant's turns
    with their end-of-turn token. Texts and completions end with EOS, which is learned too. A row's first token has
    nothing before it and is never learned.

    A row that is too long: a text or chat loses its end (and a text its EOS); a prompt loses its beginning, all but a
    BOS token, so that the completion stays whole; only then the completion loses its end.

    Raises `NoTargets` and `MalformedRow` (a chat that the template refuses) with the row's line, `EmptyCorpus`.
    """
    if max_length < 2:
        raise InvalidRequest(f"expected at least 2, got {max_length}", field="training.max_length")
    tokens: list[npt.NDArray[np.int32]] = []
    targets: list[npt.NDArray[np.uint8]] = []
    bounds, cut = [0], 0
    for row, sequence in _sequences(rows, tokenizer, max_length):
        if not any(sequence.learn):
            raise NoTargets("the row has nothing to learn", line=row.line)
        tokens.append(np.array(sequence.tokens, np.int32))
        targets.append(np.array(sequence.learn, np.uint8))
        bounds.append(bounds[-1] + len(sequence.tokens))
        cut += sequence.cut
        if bounds[-1] > MAX_TOKENS:
            raise MalformedRow(f"expected a corpus of at most {MAX_TOKENS} tokens", line=row.line)
    if not tokens:
        raise EmptyCorpus("expected at least one row")
    return Corpus(np.concatenate(tokens), np.concatenate(targets), np.array(bounds, np.int64), cut)


def _sequences(rows: Iterable[Row], tokenizer: Tokenizer, max_length: int) -> Iterator[tuple[Row, Sequence]]:
    for row in rows:
        match row:
            case TextRow(text=text):
                sequence = _text(text, tokenizer, max_length)
            case CompletionRow(prompt=prompt, completion=completion):
                sequence = _completion(prompt, completion, tokenizer, max_length)
            case ChatRow():
                sequence = _chat(row, tokenizer, max_length)
        if sequence.learn:
            sequence.learn[0] = False
        yield row, sequence


def _end(tokenizer: Tokenizer) -> list[int]:
    return [] if not tokenizer.eos_token_ids else [tokenizer.eos_token_ids[0]]


def _text(text: str, tokenizer: Tokenizer, max_length: int) -> Sequence:
    if not text.strip():
        return Sequence([], [])
    tokens = tokenizer.encode(text)
    if not tokens or tokens[-1] not in tokenizer.eos_token_ids:
        tokens += _end(tokenizer)
    kept = tokens[:max_length]
    return Sequence(kept, [True] * len(kept), cut=len(kept) < len(tokens))


def _completion(prompt: str, completion: str, tokenizer: Tokenizer, max_length: int) -> Sequence:
    if not completion:
        return Sequence([], [])
    before = tokenizer.encode(prompt)
    after = tokenizer.encode_continuation(completion) if prompt else tokenizer.encode(completion, add_special=False)
    after += _end(tokenizer)
    head = before[:1] if before[:1] == [tokenizer.bos_token_id] else []
    room = min(max(max_length - len(after), len(head) + 1 if prompt else len(head)), max_length - 1)
    total = len(before) + len(after)
    if len(before) > room:
        before = head + before[len(before) - room + len(head) :]
    after = after[: max_length - len(before)]
    learn = [False] * len(before) + [True] * len(after)
    return Sequence(before + after, learn, cut=len(learn) < total)


def _chat(row: ChatRow, tokenizer: Tokenizer, max_length: int) -> Sequence:
    if not any(message["role"] == "assistant" and message.get("weight") != 0 for message in row.messages):
        return Sequence([], [])
    try:
        tokens, learn = tokenizer.encode_chat_for_training(row.messages)
    except InvalidRequest as error:
        raise MalformedRow(error.message, line=row.line, field="messages") from error
    return Sequence(tokens[:max_length], learn[:max_length], cut=len(tokens) > max_length)
