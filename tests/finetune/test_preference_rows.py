"""Rows of a preferred and a rejected answer, in the formats of TRL: how they are read, cut and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coserve.core.errors import MalformedRow, NoTargets
from coserve.core.training.settings import TrainingSettings
from coserve.data.corpus.batch_plan import BatchPlan
from coserve.data.corpus.rows import ChatRow, PreferenceRow, parse_row
from coserve.data.corpus.tokenize import Tokenization, tokenize_rows
from coserve.data.corpus.tokenized import Corpus
from coserve.data.pretrained.tokenizer import Tokenizer
from tests.support.corpora import check_tables_of, stage

TEXTS = {"prompt": "Greet.", "chosen": " Ahoy there!", "rejected": " No."}
MESSAGES: dict[str, Any] = {
    "prompt": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hm."},
        {"role": "user", "content": "Hello?"},
    ],
    "chosen": [{"role": "assistant", "content": "Ahoy!"}],
    "rejected": [{"role": "assistant", "content": "No."}],
}
LONG = [{"role": "user", "content": "Hi " * 1000}]
IMPLICIT: dict[str, Any] = {name: MESSAGES["prompt"] + MESSAGES[name] for name in ("chosen", "rejected")}
"""As TRL's datasets have it: the prompt is what both begin with."""


def shown(tokenizer: Tokenizer, corpus: Corpus, row: int = 0) -> list[tuple[str, str]]:
    """Of both sequences: the whole text, and what of it is a target."""
    return [
        (
            tokenizer.decode(tokens.tolist(), skip_special=False),
            tokenizer.decode(tokens[target.astype(np.bool_)].tolist(), skip_special=False),
        )
        for tokens, target in corpus.sequences(row)
    ]


def tokenized(tokenizer: Tokenizer, *rows: dict[str, Any], max_length: int = 1000) -> Corpus:
    corpus = tokenize_rows([parse_row(row, 7) for row in rows], tokenizer, Tokenization(max_length, pairs=True))
    assert corpus.is_valid()
    return corpus


def test_texts_and_messages(tokenizer: Tokenizer) -> None:
    corpus = tokenized(tokenizer, TEXTS, MESSAGES)
    end = "<|endoftext|>"
    assert shown(tokenizer, corpus) == [
        (f"Greet. Ahoy there!{end}", f" Ahoy there!{end}"),
        (f"Greet. No.{end}", f" No.{end}"),
    ]
    chat = "<|user|>Hi<|end|><|assistant|>Hm.<|end|><|user|>Hello?<|end|><|assistant|>"
    assert shown(tokenizer, corpus, 1) == [(f"{chat}Ahoy!<|end|>", "Ahoy!<|end|>"), (f"{chat}No.<|end|>", "No.<|end|>")]


def test_the_messages_that_both_begin_with_are_the_prompt(tokenizer: Tokenizer) -> None:
    assert parse_row(IMPLICIT, 7) == parse_row(MESSAGES, 7)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    assert parse_row(IMPLICIT | {"tools": tools}, 7) == parse_row(MESSAGES | {"tools": tools}, 7)
    more = {"role": "user", "content": "Bye"}, {"role": "assistant", "content": "Bye."}
    longer = IMPLICIT | {"chosen": [*IMPLICIT["chosen"], *more], "rejected": [*IMPLICIT["rejected"], *more]}
    assert [learned for _, learned in shown(tokenizer, tokenized(tokenizer, longer))] == [
        "Ahoy!<|end|>Bye.<|end|>",
        "No.<|end|>Bye.<|end|>",
    ]


def test_a_prompt_may_also_be_the_text_of_a_message_of_both() -> None:
    assert parse_row(IMPLICIT | {"prompt": "Hello?"}, 7) == parse_row(MESSAGES, 7)
    for prompt in ("Bye", "Ahoy!"):
        with pytest.raises(MalformedRow, match="three texts, or as three lists of messages"):
            parse_row(IMPLICIT | {"prompt": prompt}, 7)


def test_a_weight_makes_no_message_of_the_prompt_another_one() -> None:
    weighed = [one | {"weight": 1} if one["role"] == "assistant" else one for one in IMPLICIT["chosen"]]
    row = parse_row(IMPLICIT | {"chosen": weighed}, 7)
    assert isinstance(row, PreferenceRow) and isinstance(row.chosen, ChatRow) and isinstance(row.rejected, ChatRow)
    assert row.chosen.messages[:3] == row.rejected.messages[:3]


def test_a_text_prompt_is_cut_alike_for_both_answers(tokenizer: Tokenizer) -> None:
    row = {"prompt": "one two three four five", "chosen": " the cat sat on the mat", "rejected": " no"}
    whole, cut = tokenized(tokenizer, row), tokenized(tokenizer, row, max_length=12)
    assert (whole.rows_cut, cut.rows_cut) == (0, 1)
    chosen, rejected = cut.sequences(0)
    assert max(len(chosen[0]), len(rejected[0])) <= 12
    prompts = [tokens[target == 0].tolist() for tokens, target in (chosen, rejected)]
    assert prompts[0] == prompts[1] == whole.sequences(0)[0][0][: 0 - int(chosen[1].sum())].tolist()[-len(prompts[0]) :]
    assert shown(tokenizer, cut)[1][1] == shown(tokenizer, whole)[1][1], "the answer is whole"


@pytest.mark.parametrize(
    ("row", "error", "text"),
    [
        (TEXTS | {"rejected": ""}, NoTargets, "chosen or rejected has nothing to learn"),
        (MESSAGES | {"rejected": []}, NoTargets, "chosen or rejected has nothing to learn"),
        (MESSAGES | {"prompt": LONG}, NoTargets, "after the first 1000 tokens, .* and half of micro_batch_tokens"),
        (MESSAGES | {"prompt": "Hi"}, MalformedRow, "three texts, or as three lists"),
        (MESSAGES | {"prompt": MESSAGES["prompt"][:2]}, MalformedRow, "ends before the answer"),
        ({"prompt": "a", "chosen": "b"}, MalformedRow, "rejected"),
        ({"chosen": "a b", "rejected": "a c"}, MalformedRow, "a prompt, got none: .* give the prompt as a text of"),
        (IMPLICIT | {"rejected": "No."}, MalformedRow, "two lists of messages that begin with the prompt"),
        (IMPLICIT | {"rejected": IMPLICIT["chosen"]}, MalformedRow, "got the same messages"),
        (
            IMPLICIT | {"rejected": [{"role": "user", "content": "Bye"}, *IMPLICIT["rejected"][1:]]},
            MalformedRow,
            "begin with the same messages, the prompt, got different first ones",
        ),
        (IMPLICIT | {"rejected": []}, MalformedRow, "begin with the same messages, the prompt, got none"),
        (
            IMPLICIT | {"rejected": [*IMPLICIT["chosen"], {"role": "user", "content": "Bye"}]},
            MalformedRow,
            r"differ first in messages of the assistant, got none and user \(message 4, from 0\)",
        ),
        (
            IMPLICIT
            | {"rejected": [*MESSAGES["prompt"][:2], {"role": "user", "content": "Bye"}, *MESSAGES["rejected"]]},
            MalformedRow,
            r"differ first in messages of the assistant, got user and user \(message 2, from 0\)",
        ),
        (TEXTS | {"tool": []}, MalformedRow, "did you mean 'tools'"),
        ({"prompt": "a", "completion": "b"}, MalformedRow, r"training\.loss \(dpo, orpo, simpo\) expects"),
    ],
)
def test_rows_that_are_none_are_refused_with_their_line(
    tokenizer: Tokenizer, row: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text) as refused:
        tokenized(tokenizer, row)
    assert refused.value.line == 7  # type: ignore[attr-defined]


def test_pairs_are_refused_where_there_is_no_dpo_loss(tokenizer: Tokenizer) -> None:
    with pytest.raises(MalformedRow, match=r"training\.loss .* is missing"):
        tokenize_rows([parse_row(TEXTS, 1)], tokenizer, Tokenization(100))


def test_a_staged_file_keeps_the_pairs(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source, target = tmp_path / "rows.jsonl", tmp_path / "staged" / "corpus"
    source.write_text("".join(json.dumps(row) + "\n" for row in (TEXTS, MESSAGES, TEXTS)))
    staged = stage(source, target, tokenizer, 40, pairs=True)
    expected, found = tokenized(tokenizer, TEXTS, MESSAGES, TEXTS), Corpus.load(target)
    assert staged.rows == 3
    for name in ("tokens", "target", "bounds", "splits"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.parametrize("row", [TEXTS, MESSAGES, IMPLICIT], ids=["texts", "messages", "implicit prompt"])
def test_parquet_and_a_saved_dataset_hold_the_same_pairs(tmp_path: Path, row: dict[str, Any]) -> None:
    check_tables_of(row, tmp_path)


def test_a_pair_is_never_torn_apart(tokenizer: Tokenizer) -> None:
    corpus = tokenized(tokenizer, *[TEXTS] * 20)
    plan = BatchPlan(corpus.lengths, TrainingSettings(epochs=1, batch_tokens=1000), 64)
    batches = plan.step(0).micro_batches
    assert sorted(row for rows in batches for row in rows) == list(range(20))
    assert all(sum(len(tokens) for row in rows for tokens, _ in corpus.sequences(row)) <= 64 for rows in batches)
