"""Rows of token ids, with the labels and masks that TRL and transformers put beside them."""

from __future__ import annotations

from typing import Any

import pytest

from coserve.core.errors import MalformedRow
from coserve.core.training.settings import TrainOn
from coserve.data.corpus.rows import parse_row
from coserve.data.corpus.tokenize import Tokenization, tokenize_rows
from coserve.data.corpus.tokenized import Corpus
from coserve.data.pretrained.tokenizer import Tokenizer
from tests.support.tokenizers import byte_level

PLAIN = Tokenizer(byte_level(), special_tokens={})


def made(row: dict[str, Any], max_length: int = 1000, train_on: TrainOn | None = None) -> Corpus:
    return tokenize_rows([parse_row(row, 1)], PLAIN, Tokenization(max_length, train_on))


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        ({}, [0, 1, 1, 1]),
        ({"attention_mask": [1] * 4, "labels": None}, [0, 1, 1, 1]),
        ({"labels": [-100, -100, 7, 8]}, [0, 0, 1, 1]),
        ({"completion_mask": [0, 0, 1, 1], "assistant_masks": [1, 1, 1, 0]}, [0, 0, 1, 0]),
    ],
)
def test_tokens_are_learned_as_labels_and_masks_say(beside: dict[str, Any], expected: list[int]) -> None:
    corpus = made({"input_ids": [5, 6, 7, 8], **beside})
    assert (corpus.tokens.tolist(), corpus.target.tolist()) == ([5, 6, 7, 8], expected)
    everything = made({"input_ids": [5, 6, 7, 8], **beside}, train_on="all")
    assert everything.target.tolist() == [0, 1, 1, 1]
    cut = made({"input_ids": [5, 6, 7, 8], **beside}, max_length=3)
    assert (cut.tokens.tolist(), cut.target.tolist(), cut.rows_cut) == ([5, 6, 7], expected[:3], 1)


@pytest.mark.parametrize(
    ("beside", "field", "says"),
    [
        (
            {"input_ids": [5, 1 << 20]},
            "input_ids",
            "line 1: expected token ids below 320 (0 to 319), got 1048576 at position 1",
        ),
        ({"input_ids": [5, -1]}, "input_ids[1]", "line 1: input_ids[1]: expected "),
        ({"labels": [5]}, "labels", "line 1: expected labels with an entry for each of 2 input_ids, got 1"),
        ({"labels": [6, 5]}, "labels", "line 1: expected the label 5, as in input_ids, or -100 "),
        ({"assistant_masks": [0, 2]}, "assistant_masks[1]", "line 1: assistant_masks[1]: expected "),
        ({"attention_mask": [1, 0]}, "attention_mask", "line 1: expected an attention_mask of ones: leave padding out"),
        ({"seq_lengths": [1, 1]}, "seq_lengths", "line 1: seq_lengths is not used: a row is one sequence"),
    ],
)
def test_tokens_that_are_none_of_the_base_or_that_do_not_fit_are_refused(
    beside: dict[str, Any], field: str, says: str
) -> None:
    with pytest.raises(MalformedRow) as refused:
        made({"input_ids": [5, 6], **beside})
    assert refused.value.message.startswith(says) and refused.value.field == field


def test_what_is_learned_of_tokens_alone_is_not_asked_for() -> None:
    with pytest.raises(MalformedRow, match="train_on 'completion' expects labels or a mask beside input_ids"):
        made({"input_ids": [5, 6]}, train_on="completion")
    assert made({"input_ids": [5, 6], "completion_mask": [0, 1]}, train_on="completion").target.tolist() == [0, 1]
