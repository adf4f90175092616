"""The corpus of lessons: each row predicts the teacher's distribution at the tokens of its answer."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coserve.api.documents.evaluation import Scored, better
from coserve.core.errors import CheckpointUnreadable, EmptyCorpus
from coserve.core.schemas.documents import DocumentSettings, Recipe
from coserve.data.corpus.batch import corpus_batch
from coserve.data.corpus.tokenized import REST, Corpus
from coserve.data.documents.lessons import TOP_K, Lesson, held_out, lesson_corpus


def lesson(seed: int, prompt: int = 3, answer: int = 4) -> Lesson:
    random = np.random.default_rng(seed)
    top = random.integers(0, 50, (answer, TOP_K)).astype(np.int32)
    logprobs = np.log(random.dirichlet(np.ones(TOP_K), answer)).astype(np.float32)
    tokens = [random.integers(1, 50, n).tolist() for n in (prompt, answer)]
    return Lesson(f"0/{seed}", *tokens, top.tobytes(), logprobs.tobytes(), chunk=0)


def test_rows_are_stored_and_read_with_their_candidates(tmp_path: Path) -> None:
    lessons = [lesson(0), lesson(1, prompt=1, answer=7), lesson(2)]
    made, _ = lesson_corpus(lessons, [], DocumentSettings(), 64)
    made.save(tmp_path / "corpus")
    corpus = Corpus.load(tmp_path / "corpus", digest=made.digest)
    for order in ([2, 0], [1], [0, 1, 2]):
        for index, example in zip(order, corpus_batch(corpus, order).examples, strict=True):
            one = lessons[index]
            ids, weights = one.candidates()
            assert example.tokens_N.tolist() == [*one.prompt, *one.answer]
            assert example.after_K.tolist() == [*range(len(one.prompt) - 1, len(one.prompt) + len(one.answer) - 1)]
            assert np.array_equal(example.labels_K, ids)
            assert example.weights_K is not None
            assert np.allclose(example.weights_K, weights)


def test_other_tokens_than_the_candidates_are_replayed_as_one() -> None:
    """Of answers about the document they are left out."""
    one = lesson(0)
    logprobs = np.frombuffer(one.logprobs, np.float32) + np.float32(np.log(0.8))
    one = msgspec.structs.replace(one, logprobs=logprobs.tobytes())
    rows = [one, msgspec.structs.replace(one, chunk=None)]
    made, _ = lesson_corpus(rows, [[1, 2]], DocumentSettings(), 64)
    for index, rest in enumerate((0.0, 0.2)):
        labels, weights = made.soft_targets(index) or (None, None)
        assert labels is not None and weights is not None
        assert set(labels[:, -1]) == {REST}
        assert np.allclose(weights[:, -1], rest)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    made, _ = lesson_corpus([lesson(0)], [], DocumentSettings(), 64)
    assert made.candidates is not None
    assert made.weights is not None
    for wrong in (
        Corpus(made.tokens, made.target, made.bounds, candidates=made.candidates),
        Corpus(made.tokens, made.target, made.bounds, candidates=-made.candidates - 1, weights=made.weights),
        Corpus(made.tokens, made.target, made.bounds, candidates=0 * made.candidates + REST, weights=made.weights),
        Corpus(made.tokens, made.target, made.bounds, candidates=made.candidates, weights=-made.weights),
        Corpus(made.tokens, made.target, made.bounds, candidates=made.candidates[1:], weights=made.weights[1:]),
    ):
        wrong.save(tmp_path / "corpus")
        with pytest.raises(CheckpointUnreadable):
            Corpus.load(tmp_path / "corpus")


@pytest.mark.parametrize("recipe", ["lm", "cartridge"])
def test_no_token_of_a_chunk_longer_than_a_row_is_left_out(recipe: Recipe) -> None:
    """A long cartridge leaves less of the context than a chunk takes."""
    made, _ = lesson_corpus([], [range(10), range(10, 14), [14]], DocumentSettings(recipe=recipe), 4)
    assert np.diff(made.bounds).tolist() == [4, 4, 4, 4]
    assert made.tokens[made.target == 1].tolist() == [*range(1, 10), *range(11, 14)]


def test_recipes() -> None:
    lessons, texts = [lesson(0), lesson(1)], [[1, 2, 3], [4, 5]]
    plain, own_text = lesson_corpus(lessons, texts, DocumentSettings(recipe="ce"), 64)
    assert (plain.rows, plain.candidates, own_text) == (2, None, 0)
    lm, _ = lesson_corpus([], texts, DocumentSettings(recipe="lm"), 64)
    assert (lm.tokens.tolist(), lm.target.tolist()) == ([1, 2, 3, 4, 5], [0, 1, 1, 0, 1])
    every = {recipe: lesson_corpus(lessons, texts, DocumentSettings(recipe=recipe), 64) for recipe in get_args(Recipe)}
    counts = {recipe: corpus.rows for recipe, (corpus, _) in every.items()}
    assert counts == {"topk_kd": 4, "ce": 2, "lm": 4, "cartridge": 4, "encoder": 4}, "with the document's own text"
    assert lesson_corpus(lessons, texts, DocumentSettings(lm_weight=0.0), 64)[0].rows == 2
    both, own_text = lesson_corpus(lessons, texts, DocumentSettings(lm_weight=0.25), 64)
    assert own_text == 2
    labels, weights = both.soft_targets(2) or (None, None)
    assert labels is not None
    assert labels[:, 0].tolist() == [2, 3]
    assert weights is not None
    assert weights.sum(1).tolist() == [0.25, 0.25]
    own, _ = lesson_corpus([lesson(0), Lesson("0/-1", [1], [7, 8])], [], DocumentSettings(), 64)
    labels, weights = own.soft_targets(1) or (None, None)
    assert labels is not None and weights is not None
    assert labels[:, 0].tolist() == [7, 8], "the user's own answer is learned as it is"
    assert weights.tolist() == [[1.0] + [0.0] * TOP_K] * 2
    weighted, _ = lesson_corpus(lessons, texts, DocumentSettings(recipe="ce", lm_weight=0.25), 64)
    assert weighted.candidates is not None
    assert len(weighted.candidates) == weighted.target_tokens


@pytest.mark.parametrize(
    ("gains", "proved"),
    [
        *(([3.0], False), ([1.0, 1.2], True), ([1.0, 2.0], False), ([1.0, 1.0, 2.0, 3.0], True)),
        *(([0.0, 0.0, 2.0, 2.0], False), ([0.3, 0.4] * 8, True), ([-0.2, 0.4] * 8, False), ([0.0] * 4, False)),
    ],
)
def test_few_answers_prove_an_adapter_only_if_they_agree(gains: list[float], proved: bool) -> None:
    rival = [Scored(str(index), 5.0, 2, False) for index in range(len(gains))]
    own = [msgspec.structs.replace(each, nll=5 - 2 * gain) for each, gain in zip(rival, gains, strict=True)]
    assert better(own, rival) is proved


@given(st.integers(2, 300), st.floats(0.01, 0.9), st.integers(0, 5))
def test_held_out_questions_are_not_learned(count: int, fraction: float, seed: int) -> None:
    lessons = [Lesson(str(index), [1], [2]) for index in range(count)]
    learned, held = held_out(lessons, fraction, seed)
    assert sorted([*learned, *held], key=lambda each: int(each.key)) == lessons
    assert 1 <= len(held) <= 64
    assert learned


def test_long_rows_lose_their_end() -> None:
    corpus, _ = lesson_corpus([lesson(0, 3, 9), lesson(1, 12, 2)], [], DocumentSettings(), 8)
    assert corpus.rows == 1
    assert corpus.lengths.tolist() == [8]
    assert corpus.is_valid()


@pytest.mark.parametrize(("recipe", "lessons"), [("lm", []), ("topk_kd", [lesson(0, prompt=64)])])
def test_a_document_that_leaves_nothing_to_learn_is_refused(recipe: Recipe, lessons: list[Lesson]) -> None:
    """One token has none behind it, and a prompt may be as long as a row."""
    with pytest.raises(EmptyCorpus, match="expected a document of at least 2 tokens"):
        lesson_corpus(lessons, [[5]], DocumentSettings(recipe=recipe), 64)
