"""What is learned of chats of several turns with templates as models ship them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coserve.core.errors import MalformedRow, NoTargets
from coserve.core.training.settings import TrainOn
from coserve.data.corpus.rows import parse_row
from coserve.data.corpus.tokenize import Tokenization, tokenize_rows
from coserve.data.pretrained.tokenizer import Tokenizer
from tests.support.chat_templates import GPT_OSS, PHI_3, QWEN3, SHIPPED, SPECIALS
from tests.support.tokenizers import byte_level

LEARNED = {
    "qwen3": ["<think>\n\n</think>\n\nno<|im_end|>"],
    "qwen3.5": ["\n</think>\n\nno<|im_end|>"],
    "phi-3": ["no<|end|>"],
    "gpt-oss": ["<|channel|>final<|message|>no<|return|>"],
}
"""Of the last answer."""
FIRST = {
    "qwen3": "<think>\nso\n</think>\n\nyes<|im_end|>",
    "qwen3.5": "so\n</think>\n\nyes<|im_end|>",
    "phi-3": "<think>\nso\n</think>\n\nyes<|end|>",
    "gpt-oss": "<|channel|>final<|message|><think>\nso\n</think>\n\nyes<|return|>",
}
"""Of the first answer, in a row of its own."""
FIRST_ANSWER = "<think>\nso\n</think>\n\nyes"
QUESTION, ANSWER = {"role": "user", "content": "Rain?"}, {"role": "assistant", "content": FIRST_ANSWER}
AGAIN, LAST = {"role": "user", "content": "Sun?"}, {"role": "assistant", "content": "no"}
CHAT = {"messages": [QUESTION, ANSWER, AGAIN, LAST]}


def tokenizer(template: str) -> Tokenizer:
    backend = byte_level()
    backend.add_special_tokens(list(SPECIALS))
    return Tokenizer(backend, special_tokens={"eos_token": "<|endoftext|>"}, chat_template=template)


def rows(
    template: str, row: dict[str, Any], train_on: TrainOn | None = None, *, split: bool = False, most: int = 1000
) -> list[tuple[str, list[str]]]:
    """Each tokenised row's text, and the runs of it that are learned."""
    theirs = tokenizer(template)
    pairs = "chosen" in row
    corpus = tokenize_rows(
        [parse_row(row, 3)], theirs, Tokenization(most, train_on, pairs=pairs, one_row_per_answer=split)
    )
    found = []
    for number in range(corpus.rows):
        tokens, target = corpus.row(number)
        bounds = np.flatnonzero(np.diff(np.concatenate([[0], target, [0]]).astype(int)))
        runs = [tokens[start:end] for start, end in zip(bounds[::2], bounds[1::2], strict=True)]
        decoded = [theirs.decode(run.tolist(), skip_special=False) for run in runs]
        found.append((theirs.decode(tokens.tolist(), skip_special=False), decoded))
    return found


@pytest.mark.parametrize("name", SHIPPED)
def test_the_last_answer_of_a_chat_is_learned(name: str) -> None:
    weighed = [QUESTION, ANSWER | {"weight": 0}, AGAIN, LAST]
    whole = tokenizer(SHIPPED[name]).encode_whole_chat(CHAT["messages"])
    text = tokenizer(SHIPPED[name]).decode(whole, skip_special=False)
    expected = [(text, LEARNED[name])]
    assert rows(SHIPPED[name], {"messages": weighed}) == expected
    assert rows(SHIPPED[name], CHAT, "completion") == expected
    assert rows(SHIPPED[name], {"prompt": [QUESTION, ANSWER, AGAIN], "completion": [LAST]}) == expected


@pytest.mark.parametrize("name", SHIPPED)
def test_preferences_of_chats(name: str) -> None:
    other = LAST | {"content": "perhaps"}
    ((_, learned),) = rows(SHIPPED[name], {"prompt": [QUESTION, ANSWER, AGAIN], "chosen": [LAST], "rejected": [other]})
    assert learned == [*LEARNED[name], LEARNED[name][0].replace("no<", "perhaps<")]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_row_of_each_answer_is_that_of_the_chat_so_far(name: str) -> None:
    (_, first), last = rows(SHIPPED[name], CHAT, split=True)
    assert first == [FIRST[name]]
    assert [last] == rows(SHIPPED[name], CHAT, "completion")
    assert rows(SHIPPED[name], {"messages": [QUESTION, ANSWER | {"weight": 0}, AGAIN, LAST]}, split=True) == [last]


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "gpt-oss"])
def test_answers_that_change_later_are_refused_with_advice(name: str) -> None:
    """Which helps, as the tests above show."""
    with pytest.raises(MalformedRow, match=r'cannot tell .* "weight": 0, or set training.one_row_per_answer'):
        rows(SHIPPED[name], CHAT)


def test_an_answer_that_no_rendering_shows_is_refused_with_advice_that_helps() -> None:
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content | upper }}<|end|>{% endfor %}"
    row = {"messages": [QUESTION, LAST]}
    for split in (False, True):
        with pytest.raises(
            MalformedRow, match=r"give prompt and answer as texts, or, without a preference loss, set training.train_on"
        ):
            rows(template, row, split=split)
    assert rows(template, row, "all")[0][1] == ["RAIN?<|end|><|assistant|>NO<|end|>"]


def test_all_answers_are_learned_where_only_the_chats_end_differs() -> None:
    ((text, learned),) = rows(PHI_3, CHAT)
    assert learned == [FIRST["phi-3"], "no<|end|>"]
    assert text.endswith("no<|end|>\n<|endoftext|>")


def test_an_end_of_chat_that_is_the_only_end_of_a_turn_is_learned() -> None:
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% else %}{{ eos_token }}{% endif %}"
    )
    assert rows(template, {"messages": [QUESTION, LAST]})[0][1] == ["no\n<|endoftext|>"]
    assert rows(template, CHAT)[0][1] == [f"{FIRST_ANSWER}\n", "no\n<|endoftext|>"]


def test_reasoning_that_the_template_writes_anew_is_learned() -> None:
    row = {"messages": [QUESTION, LAST | {"content": "<think>so</think>no"}]}
    assert rows(QWEN3, row)[0][1] == ["<think>\nso\n</think>\n\nno<|im_end|>"]


def test_answers_beyond_the_longest_row_count_as_cut() -> None:
    most = len(tokenizer(GPT_OSS).encode(rows(GPT_OSS, CHAT, split=True)[0][0], add_special=False)) + 1
    corpus = tokenize_rows([parse_row(CHAT, 1)], tokenizer(GPT_OSS), Tokenization(most, one_row_per_answer=True))
    assert (corpus.rows, corpus.rows_cut) == (1, 1)
    with pytest.raises(NoTargets, match="line 1"):
        tokenize_rows([parse_row(CHAT, 1)], tokenizer(GPT_OSS), Tokenization(4, one_row_per_answer=True))
