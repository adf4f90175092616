"""Lessons: prompts with the answers that an adapter learns, and the corpus of them. No torch.

Letters: n tokens of an answer, C candidates of a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from coserve.core.errors import EmptyCorpus
from coserve.core.schemas.documents import DocumentSettings
from coserve.core.schemas.generation import ChosenLogprob, PromptLogprob
from coserve.data.corpus.tokenized import REST, Corpus

TOP_K = 20
"""Candidates of a token: the generator's most likely tokens, with their raw probabilities, as in Cartridges (arXiv
2506.06266, appendix A)."""
LEAST_HELD_OUT, MOST_HELD_OUT = 4, 64


class Lesson(msgspec.Struct, frozen=True):
    """A prompt and its answer, with the teacher's most likely tokens at each token of the answer."""

    key: str
    prompt: list[int]
    """The adapter's prompt, without the document."""
    answer: list[int]
    """Token ids of the answer. They end with EOS, or the template's end of turn, unless the answer was cut."""
    top: bytes = b""
    """int32 (n, C): token ids; empty: the answer is the user's own, and its tokens are learned."""
    logprobs: bytes = b""
    """fp32 (n, C): their log-probabilities, nats."""
    context: list[int] = []
    """The teacher's prompt, with the chunk; empty for a replayed one."""
    question: str = ""
    text: str = ""
    chunk: int | None = None
    """Index of the chunk that the teacher had in its prompt; None: a replayed general prompt."""

    @property
    def generated(self) -> int:
        """Number of generated tokens: those of the answer."""
        return len(self.answer)

    def candidates(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Return ids and probabilities (n, C + 1). The last candidate is all other tokens (`REST`). A replayed prompt
        teaches their total probability, so that the adapter forgets less; in answers about the document it is 0."""
        shape = (len(self.answer), -1)
        ids = np.frombuffer(self.top, np.int32).reshape(shape)
        likely = np.exp(np.frombuffer(self.logprobs, np.float32)).reshape(shape)
        others = np.maximum(0, 1 - likely.sum(1, keepdims=True)) * np.float32(self.chunk is None)
        return np.pad(ids, ((0, 0), (0, 1)), constant_values=REST), np.concatenate([likely, others], 1)


def packed_top(entries: Sequence[ChosenLogprob | PromptLogprob]) -> tuple[bytes, bytes]:
    """Return `Lesson.top` and `Lesson.logprobs` of a response's log-probabilities; missing candidates get weight 0."""
    ids = np.zeros((len(entries), TOP_K), np.int32)
    values = np.full((len(entries), TOP_K), -np.inf, np.float32)
    for row, entry in enumerate(entries):
        for column, one in enumerate(entry.top[:TOP_K]):
            ids[row, column], values[row, column] = one.token_id, one.logprob
    return ids.tobytes(), values.tobytes()


def held_out(lessons: Sequence[Lesson], fraction: float, seed: int) -> tuple[list[Lesson], list[Lesson]]:
    """Split lessons into those to learn and those to evaluate. At least one is learned, if there are two."""
    count = min(MOST_HELD_OUT, max(LEAST_HELD_OUT, round(fraction * len(lessons))), len(lessons) // 2)
    chosen = set(Random(seed).sample(range(len(lessons)), count))
    kept = [lesson for index, lesson in enumerate(lessons) if index not in chosen]
    return kept, [lessons[index] for index in sorted(chosen)]


def least_questions(settings: DocumentSettings) -> int:
    """Return the fewest questions of a job: two held-out ones, if the adapter has to be proved, and as many to
    learn."""
    return 2 if settings.recipe == "lm" or settings.publish == "always" else 4


def lesson_corpus(
    lessons: Iterable[Lesson], texts: Iterable[Sequence[int]], settings: DocumentSettings, longest: int
) -> tuple[Corpus, int]:
    """Return the corpus of the lessons to learn, cut to `longest` tokens, and of the document's own text (token ids by
    chunk), in rows of at most as many: the last token of one is the first one of the next. Also return the number of
    these rows, which are the last ones. Lessons whose prompts alone are that long are left out; `Corpus.rows_cut`
    counts them, too.

    The targets are soft (candidates with weights) for `topk_kd`, `cartridge` and `encoder`, and for `ce` with an
    `lm_weight` above 0; otherwise they are tokens. Raises `EmptyCorpus` if there is no row.
    """
    lm, kd = settings.recipe == "lm", settings.recipe in ("topk_kd", "cartridge", "encoder")
    weight = settings.lm_weight
    if weight is None:
        weight = float(settings.recipe != "ce")
    soft, columns = kd or (weight > 0 and not lm), TOP_K + 1 if kd else 1
    rows: list[_Row] = []
    for lesson in lessons:
        certain = not (kd and lesson.top)
        ids, weights = _certain(lesson.answer, 1.0, columns) if certain else lesson.candidates()
        rows.append(_Row(lesson.prompt, lesson.answer, ids, weights))
    learned = [row.cut(longest) for row in rows if len(row.prompt) < longest]
    cut = sum(len(row.prompt) + len(row.answer) > longest for row in rows)
    own = list[_Row]()
    for tokens in texts if weight > 0 else ():
        for start in range(0, len(tokens) - 1, max(1, longest - 1)):
            first, *rest = tokens[start : start + longest]
            own.append(_Row([first], rest, *_certain(rest, weight, columns)))
    if not (learned or own):
        raise EmptyCorpus(
            f"nothing is left to learn: expected a document of at least 2 tokens, or questions of less than {longest}"
        )
    return _corpus([*learned, *own], cut, soft=soft), len(own)


class _Row(NamedTuple):
    prompt: list[int]
    answer: list[int]
    ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]

    def cut(self, longest: int) -> _Row:
        n = longest - len(self.prompt)
        return _Row(self.prompt, self.answer[:n], self.ids[:n], self.weights[:n])


def _certain(
    tokens: Sequence[int], weight: float, columns: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Return candidates that give each token itself all the weight."""
    ids = np.repeat(np.array(tokens, np.int32)[:, None], columns, 1)
    weights = np.zeros((len(tokens), columns), np.float32)
    weights[:, 0] = weight
    return ids, weights


def _corpus(rows: Sequence[_Row], cut: int, *, soft: bool) -> Corpus:
    lengths = [len(row.prompt) + len(row.answer) for row in rows]
    return Corpus(
        np.concatenate([np.array([*row.prompt, *row.answer], np.int32) for row in rows]),
        np.concatenate([np.repeat(np.array([0, 1], np.uint8), [len(row.prompt), len(row.answer)]) for row in rows]),
        np.cumsum([0, *lengths], dtype=np.int64),
        rows_cut=cut,
        candidates=np.concatenate([row.ids for row in rows]).reshape(-1) if soft else None,
        weights=np.concatenate([row.weights for row in rows]).reshape(-1) if soft else None,
    )
