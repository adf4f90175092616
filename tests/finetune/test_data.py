from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coserve.core.errors import (
    CheckpointUnreadable,
    EmptyCorpus,
    InvalidRequest,
    MalformedRow,
    NoTargets,
    UnreadableCorpus,
)
from coserve.data.corpus.jsonl import parse_jsonl
from coserve.data.corpus.limits import CorpusLimits
from coserve.data.corpus.rows import ChatRow, CompletionRow, TextRow, parse_row, parse_rows
from coserve.data.corpus.tokenize import Tokenization, tokenize_rows
from coserve.data.corpus.tokenized import Corpus
from coserve.data.pretrained.tokenizer import Tokenizer
from tests.support.finetuning import random_corpus
from tests.support.tokenizers import byte_level, sentencepiece_like

ROLES = {"bos_token": "<bos>", "eos_token": "<eos>"}
CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PLAIN = Tokenizer(byte_level(), special_tokens=ROLES, chat_template=CHAT)
SPACED = Tokenizer(sentencepiece_like(), special_tokens=ROLES)


def learned(corpus: Corpus, tokenizer: Tokenizer, row: int = 0) -> str:
    tokens, target = corpus.row(row)
    return tokenizer.decode(tokens[target.astype(bool)].tolist(), skip_special=False)


def whole(corpus: Corpus, tokenizer: Tokenizer, row: int = 0) -> str:
    return tokenizer.decode(corpus.row(row)[0].tolist(), skip_special=False)


def made(obj: object, tokenizer: Tokenizer = PLAIN, max_length: int = 1000) -> Corpus:
    return tokenize_rows([parse_row(obj, 1)], tokenizer, Tokenization(max_length))


def test_text_learns_all_but_the_first_token() -> None:
    corpus = made({"text": "hello there"})
    assert whole(corpus, PLAIN) == "hello there<eos>"
    assert corpus.target.tolist() == [0] + [1] * (len(corpus.target) - 1)
    assert learned(made({"text": "the lo"}, SPACED), SPACED) == "the lo<eos>"


def test_completion_learns_the_completion_and_eos() -> None:
    corpus = made({"prompt": "hello ", "completion": "there"})
    assert whole(corpus, PLAIN) == "hello there<eos>"
    assert learned(corpus, PLAIN) == "there<eos>"


def test_a_completion_that_ends_with_eos_gets_no_second_one() -> None:
    corpus = made({"prompt": "hello ", "completion": "there<eos>"})
    assert whole(corpus, PLAIN) == "hello there<eos>"
    assert learned(corpus, PLAIN) == "there<eos>"


def test_completion_has_no_space_that_was_not_asked_for() -> None:
    corpus = made({"prompt": "hel", "completion": "lo the"}, SPACED)
    assert whole(corpus, SPACED) == "<bos> hello the<eos>"
    assert SPACED.decode(corpus.tokens.tolist()) == "hello the"


def test_completion_without_a_prompt() -> None:
    assert learned(made({"prompt": "", "completion": "lo"}, SPACED), SPACED).endswith("<eos>")
    corpus = made({"prompt": "", "completion": "hello there"})
    assert not corpus.target[0] and corpus.target[1:].all()


def test_chat_learns_the_assistant_turns_with_weight() -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello", "weight": 0},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "done", "weight": 1},
    ]
    corpus = made({"messages": messages})
    assert learned(corpus, PLAIN) == "done<|end|>"
    assert whole(corpus, PLAIN).startswith("<|system|>be brief<|end|><|user|>hi<|end|><|assistant|>hello")


def test_alpaca_and_sharegpt() -> None:
    corpus = made({"instruction": "Add.", "input": "1 2", "output": "3"})
    assert learned(corpus, PLAIN) == "3<eos>"
    assert "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n3" in whole(corpus, PLAIN)
    assert "### Input" not in whole(made({"instruction": "Add.", "output": "3"}), PLAIN)
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]
    assert learned(made({"id": "x", "conversations": turns}), PLAIN) == "yes<|end|>"


def test_long_rows_are_cut() -> None:
    text = "the quick brown fox jumps over the lazy dog"
    corpus = made({"text": text}, max_length=5)
    assert len(corpus.tokens) == 5 and corpus.rows_cut == 1 and "<eos>" not in whole(corpus, PLAIN)
    corpus = made({"prompt": "the lazy dog " * 9, "completion": "lo the"}, SPACED, max_length=12)
    assert len(corpus.tokens) == 12 and corpus.rows_cut == 1
    assert corpus.tokens[0] == SPACED.bos_token_id
    assert learned(corpus, SPACED) == "lo the<eos>"
    corpus = made({"prompt": text, "completion": text}, max_length=5)
    assert len(corpus.tokens) == 5 and corpus.target.tolist() == [0, 1, 1, 1, 1]
    assert made({"prompt": "a", "completion": "b"}, max_length=3).rows_cut == 0
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": text}]
    assert made({"messages": messages}, max_length=8).rows_cut == 1


@given(
    prompt=st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    completion=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30),
    max_length=st.integers(2, 40),
    tokenizer=st.sampled_from([PLAIN, SPACED]),
)
def test_a_corpus_is_sound_however_it_is_cut(
    prompt: str, completion: str, max_length: int, tokenizer: Tokenizer
) -> None:
    corpus = tokenize_rows(
        [CompletionRow(1, prompt, completion), TextRow(2, "x" + prompt)], tokenizer, Tokenization(max_length)
    )
    assert corpus.is_valid() and corpus.lengths.max() <= max_length
    whole_row = tokenize_rows([CompletionRow(1, prompt, completion)], tokenizer, Tokenization(1000))
    if whole_row.lengths[0] <= max_length:
        assert corpus.row(0)[0].tolist() == whole_row.tokens.tolist()
        if prompt:
            assert tokenizer.decode(whole_row.tokens[whole_row.target.astype(bool)].tolist()[:-1]) is not None


NOTHING = {
    "empty text": {"text": " \n"},
    "empty completion": {"prompt": "x", "completion": ""},
    "no assistant": {"messages": [{"role": "user", "content": "hi"}]},
    "no messages": {"messages": []},
    "all weights 0": {
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x", "weight": 0}]
    },
}


@pytest.mark.parametrize("obj", NOTHING.values(), ids=NOTHING.keys())
def test_rows_without_targets_are_refused_with_their_line(obj: object) -> None:
    rows = parse_rows([{"text": "fine"}, obj])
    with pytest.raises(NoTargets, match="line 2: ") as refused:
        tokenize_rows(rows, PLAIN, Tokenization(100))
    assert refused.value.line == 2


ASKED, ANSWERED = {"role": "user", "content": "hi " * 50}, {"role": "assistant", "content": "x"}
CUT = (
    r"^line 2: the answer to be learned begins after the first 10 tokens, where the row is cut \(.*training\.max_length"
)


@pytest.mark.parametrize("one_row_per_answer", [False, True])
def test_a_chat_that_is_cut_before_its_answer_is_refused_for_that(one_row_per_answer: bool) -> None:
    rows = parse_rows([{"text": "fine"}, {"messages": [ASKED, ANSWERED]}])
    with pytest.raises(NoTargets, match=CUT):
        tokenize_rows(rows, PLAIN, Tokenization(10, one_row_per_answer=one_row_per_answer))


def test_a_pair_that_is_cut_before_its_answers_is_refused_for_that() -> None:
    pair = {"prompt": [ASKED], "chosen": [ANSWERED], "rejected": [ANSWERED | {"content": "y"}]}
    with pytest.raises(NoTargets, match=CUT):
        tokenize_rows([parse_row(pair, 2)], PLAIN, Tokenization(10, pairs=True))


def test_a_long_chat_without_an_answer_to_learn_is_not_said_to_be_cut() -> None:
    with pytest.raises(NoTargets, match=r"^line 1: the row has nothing to learn$"):
        made({"messages": [ASKED, ANSWERED | {"weight": 0}]}, max_length=10)


def test_empty_corpora() -> None:
    with pytest.raises(EmptyCorpus):
        tokenize_rows(parse_jsonl(b"\n \n"), PLAIN, Tokenization(100))
    with pytest.raises(InvalidRequest, match="at least 2"):
        tokenize_rows([], PLAIN, Tokenization(1))


def test_chat_without_a_template_names_the_line() -> None:
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x"}]}
    with pytest.raises(MalformedRow, match="line 1: the base has no chat template"):
        made(row, SPACED)


MALFORMED = {
    "not json": '{"text": ',
    "nan": '{"text": "x", "weight": NaN}',
    "nan weight": '{"messages": [{"role": "assistant", "content": "x", "weight": NaN}]}',
    "infinity": '{"text": -Infinity}',
    "overflow": '{"text": 1e999}',
    "long number": '{"text": ' + "9" * 5000 + "}",
    "duplicate": '{"text": "a", "text": "b"}',
    "deep duplicate": '{"messages": [{"role": "user", "role": "assistant", "content": ""}]}',
    "unknown field": '{"instruction": "a", "output": "b", "inputs": "c"}',
    "unknown message field": '{"messages": [{"role": "user", "content": "a", "audio": ["b"]}]}',
    "two thoughts": '{"messages": [{"role": "assistant", "content": "a", "reasoning": "b", "reasoning_content": "c"}]}',
    "call that is no JSON": '{"conversations": [{"from": "function_call", "value": "add"}]}',
    "tools that are no JSON": '{"conversations": [], "tools": "add"}',
    "messages without the prompt": '{"prompt": "a", "messages": [{"role": "assistant", "content": "b"}]}',
    "no shape": '{"question": "a"}',
    "half a shape": '{"prompt": "a"}',
    "wrong type": '{"text": 5}',
    "list": "[1]",
    "text": '"hello"',
    "null": "null",
    "role": '{"messages": [{"role": "robot", "content": "a"}]}',
    "weight": '{"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}',
    "weight of a user": '{"messages": [{"role": "user", "content": "a", "weight": 1}]}',
    "content parts": '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "a"}]}]}',
    "half a surrogate": '{"text": "\\ud800"}',
    "half a surrogate in chat": '{"messages": [{"role": "user", "content": "\\udfff"}]}',
    "depth": "[" * 100_000,
    "two values": '{"text": "a"} {"text": "b"}',
}
FORMATS = (
    "; a corpus is JSON Lines (one object a line), a JSON array, CSV or parquet; a text without rows is learned as a "
    "document (coserve learn)"
)


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_rows_are_refused_with_their_line(content: str) -> None:
    with pytest.raises(MalformedRow, match="line 3: ") as refused:
        list(parse_jsonl(b'{"text": "fine"}\n\n' + content.encode() + b'\n{"text": "fine"}\n'))
    assert refused.value.line == 3 and len(str(refused.value)) < 600


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"text": "a', "line 1: expected JSON: Unterminated string starting at column 10"),
        ('{"text": "a\tb"}', "line 1: expected JSON: Invalid control character at column 12"),
        ('{"text": }', "line 1: expected JSON: Expecting value at column 10"),
        ("# Notes\n\nA list.", f"line 1: expected JSON: Expecting value at column 1{FORMATS}"),
        (
            '{\n"text": "a"}',
            f"line 1: expected JSON: Expecting property name enclosed in double quotes at column 2{FORMATS}",
        ),
        ('{"text": "a"}\nnotes', "line 2: expected JSON: Expecting value at column 1"),
        ('{"text": "a"\n{"text": "b"}\n', "line 1: expected JSON: Expecting ',' delimiter at column 13"),
        ('{"text": ' + "9" * 5000 + "}", "line 1: expected a number of at most 1000 digits, got 5000"),
    ],
)
def test_the_error_of_a_broken_row_is_a_whole_sentence(content: str, says: str) -> None:
    with pytest.raises(MalformedRow) as refused:
        list(parse_jsonl(content.encode()))
    assert refused.value.message == says


@pytest.mark.parametrize(
    ("row", "says", "field"),
    [
        ({"text": 5}, "line 1: text: expected a string, got an integer; ", "text"),
        ({"prompt": "a"}, "line 1: expected a field 'completion', got none; ", "completion"),
        ({"messages": [], "tool": []}, "line 1: unknown field 'tool'; did you mean 'tools'?", "tool"),
        (
            {"instruction": "a", "input": "", "output": "b", "text": "both"},
            "line 1: expected the fields of one format, got those of two: 'text' and 'instruction'; leave one out, ",
            "instruction",
        ),
        (
            {"messages": [{"role": "me", "content": "a"}]},
            "line 1: messages[0].role: expected one of assistant, developer, system, tool, user, got 'me'; ",
            "messages[0].role",
        ),
        (
            {"messages": [{"role": "assistent", "content": "a"}]},
            "line 1: messages[0].role: expected one of assistant, developer, system, tool, user, got 'assistent'; did",
            "messages[0].role",
        ),
        (
            {"messages": [{"role": "user", "content": 7}]},
            "line 1: messages[0].content: expected a string or an array or null, got an integer; ",
            "messages[0].content",
        ),
    ],
)
def test_the_error_of_a_row_names_its_field(row: dict[str, object], says: str, field: str) -> None:
    with pytest.raises(MalformedRow) as refused:
        list(parse_rows([row]))
    assert refused.value.message.startswith(says)
    assert refused.value.field == field


@pytest.mark.parametrize("row", ["x", {"txt": "a"}, {"text": 5}, {"prompt": "a"}, {"messages": [{"role": "me"}]}])
def test_the_error_of_a_row_lists_the_formats(row: object) -> None:
    with pytest.raises(MalformedRow) as refused:
        list(parse_rows([row]))
    for field in ("text", "prompt", "completion", "messages", "instruction", "output", "conversations"):
        assert f'"{field}"' in refused.value.message


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ("null", "null"),
        ("true", "a bool"),
        ('"a"', "a text"),
        ("[]", "an array"),
        ("3", "a number"),
        ("0.5", "a number"),
    ],
)
def test_a_row_that_is_no_object_has_its_name_in_json(row: str, kind: str) -> None:
    with pytest.raises(MalformedRow, match=f"line 2: expected an object, got {kind}; a row is"):
        list(parse_jsonl(b"\n" + row.encode()))


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (gzip.compress(b'{"text": "a"}', mtime=0), "a gzip file"),
        (b"PK\x03\x04 rows.jsonl", "a zip file"),
        (b"\x28\xb5\x2f\xfd rows", "a zstd file"),
        ('{"text": "a"}'.encode("utf-16"), "UTF-16"),
        (b"\xfe\xff" + '{"text": "a"}'.encode("utf-16-be"), "UTF-16"),
    ],
)
def test_a_file_of_another_format_is_refused_by_its_name(content: bytes, name: str) -> None:
    with pytest.raises(MalformedRow, match=f"line 1: expected JSON Lines in UTF-8, got {name}"):
        list(parse_jsonl(content))


def test_bytes_that_are_no_text() -> None:
    with pytest.raises(MalformedRow, match="line 1: expected UTF-8"):
        list(parse_jsonl(b'{"text": "\xff"}'))
    assert list(parse_jsonl(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}')) == [TextRow(1, "a"), TextRow(2, "b")]


def test_files_and_bytes_are_read_alike(tmp_path: Path) -> None:
    content = b'{"prompt": "a", "completion": "b"}\n{"messages": [{"role": "user", "content": "c"}]}\n'
    (tmp_path / "corpus.jsonl").write_bytes(content)
    found = list(parse_jsonl(tmp_path / "corpus.jsonl"))
    assert found == list(parse_jsonl(content))
    assert found == [CompletionRow(1, "a", "b"), ChatRow(2, ({"role": "user", "content": "c"},))]
    with pytest.raises(UnreadableCorpus, match="cannot be read: No such file"):
        list(parse_jsonl(tmp_path / "none.jsonl"))


@pytest.mark.parametrize(("name", "limit"), [("rows", 2), ("row_bytes", 20)])
def test_intake_is_bounded(name: str, limit: int) -> None:
    rows = [{"text": "a"}, {"text": "b"}, {"text": "x" * 60}]
    content = "\n".join(map(json.dumps, rows)).encode()
    assert len(list(parse_jsonl(content))) == 3
    with pytest.raises(MalformedRow, match=f"line 3: expected .*at most {limit}"):
        list(parse_jsonl(content, CorpusLimits(**{name: limit})))


@given(st.binary(max_size=80))
def test_random_bytes_are_rows_or_refused(content: bytes) -> None:
    try:
        list(parse_jsonl(content))
    except MalformedRow as error:
        assert error.line is not None


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["text", "messages", "role", "content", "prompt", "from"]), inner, max_size=3
            )
        ),
        max_leaves=6,
    )
)
def test_random_objects_are_rows_or_refused(obj: object) -> None:
    try:
        tokenize_rows([parse_row(obj, 4)], PLAIN, Tokenization(50))
    except (MalformedRow, NoTargets) as error:
        assert error.line == 4


def test_corrupt_corpora_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "corpus.safetensors"
    with pytest.raises(CheckpointUnreadable):
        Corpus.load(path)
    random_corpus().save(path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointUnreadable):
        Corpus.load(path)
    path.write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(CheckpointUnreadable):
        Corpus.load(path)
    good = random_corpus()
    broken = [
        Corpus(good.tokens, good.target, good.bounds[:-1]),
        Corpus(good.tokens, good.target[:-1], good.bounds),
        Corpus(good.tokens, good.target * 3, good.bounds),
        Corpus(-good.tokens, good.target, good.bounds),
        Corpus(good.tokens, np.ones_like(good.target), good.bounds),
        Corpus(good.tokens, good.target, good.bounds[::-1].copy()),
        Corpus(good.tokens, good.target, np.sort(np.append(good.bounds, good.bounds[1]))),
        Corpus(good.tokens.astype(np.int64), good.target, good.bounds),
        Corpus(good.tokens, good.target, np.zeros(0, np.int64)),
    ]
    for corpus in broken:
        corpus.save(path)
        with pytest.raises(CheckpointUnreadable, match=r"damaged|cannot be read"):
            Corpus.load(path)
