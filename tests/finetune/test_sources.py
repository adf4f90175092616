"""Corpora in parquet and in folders of `datasets`, chats with tools, and which tokens are learned."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coserve.core.errors import InvalidRequest, MalformedRow, NoTargets, UnreadableCorpus
from coserve.core.training.settings import TrainOn
from coserve.data.corpus.rows import ChatRow, CompletionRow, TextRow, parse_row
from coserve.data.corpus.sources import Piece, is_jsonl
from coserve.data.corpus.staging import tokenize_piece
from coserve.data.corpus.tokenize import Tokenization, tokenize_rows
from coserve.data.offload.pool import HelperPool
from coserve.data.pretrained.chat import ChatTemplate
from coserve.data.pretrained.tokenizer import Tokenizer
from tests.support.corpora import check_tables_of, read_rows

ROWS: list[dict[str, Any]] = [
    {"prompt": "Hello", "completion": f" Ahoy {number}!"} if number % 2 else {"text": f"The cat {number}."}
    for number in range(200)
]
CHAT = {
    "messages": [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hm."},
        {"role": "user", "content": "Hello?"},
        {"role": "assistant", "content": "Ahoy!"},
    ]
}


def test_parquet_and_a_saved_dataset_hold_the_rows_of_jsonl(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    jsonl, parquet = tmp_path / "rows.jsonl", tmp_path / "rows.parquet"
    jsonl.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS, _schema(pyarrow)), parquet, row_group_size=50)
    assert (is_jsonl(jsonl), is_jsonl(parquet)) == (True, False)
    rows = list(read_rows(jsonl))
    assert list(read_rows(parquet)) == rows
    assert [type(row) for row in rows[:2]] == [TextRow, CompletionRow]


def test_a_prompt_and_completion_of_messages_in_parquet_and_a_saved_dataset(tmp_path: Path) -> None:
    check_tables_of({"prompt": CHAT["messages"][:4], "completion": CHAT["messages"][4:]}, tmp_path)


def _schema(pyarrow: Any) -> Any:
    return pyarrow.schema([(name, pyarrow.string()) for name in ("text", "prompt", "completion")])


def test_a_dataset_that_the_library_saved(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "saved"
    saved = datasets.Dataset.from_list([CHAT, CHAT | {"tools": None}] * 50)
    saved.select(range(10, 90)).save_to_disk(folder, num_shards=3)
    rows = list(read_rows(folder))
    assert len(rows) == 80
    expected = parse_row(CHAT, 1)
    assert isinstance(rows[0], ChatRow) and isinstance(expected, ChatRow)
    assert rows[0].messages == expected.messages
    assert [row.line for row in rows] == list(range(1, 81))


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    file, folder = tmp_path / "bad.parquet", tmp_path / "folder"
    file.write_bytes(b"PAR1 and nothing more")
    folder.mkdir()
    for state in (
        "no JSON",
        '{"_data_files": [{"filename": "../bad.parquet"}]}',
        '{"_data_files": [{"filename": "gone"}]}',
    ):
        (folder / "state.json").write_text(state)
        with pytest.raises(UnreadableCorpus, match="the corpus cannot be read"):
            list(read_rows(folder))
    with pytest.raises(UnreadableCorpus, match="the corpus cannot be read"):
        list(read_rows(file))


def test_what_pyarrow_cannot_read_or_convert_has_a_code_of_its_own(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    whole, broken = tmp_path / "whole.parquet", tmp_path / "broken.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": [f"row {n}" * 50 for n in range(500)]}), whole)
    content = bytearray(whole.read_bytes())
    content[50:2000] = bytes(1950)
    broken.write_bytes(content)
    no_utf8 = pyarrow.Array.from_buffers(
        pyarrow.string(), 1, [None, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0"), pyarrow.py_buffer(b"\xff")]
    )
    pyarrow.parquet.write_table(pyarrow.table({"text": no_utf8}), tmp_path / "latin.parquet")
    late = pyarrow.array([2**62], pyarrow.timestamp("us"))
    pyarrow.parquet.write_table(pyarrow.table({"text": late}), tmp_path / "late.parquet")
    for file in (broken, tmp_path / "latin.parquet", tmp_path / "late.parquet"):
        with pytest.raises(UnreadableCorpus, match="the corpus cannot be read") as caught:
            list(read_rows(file))
        assert (caught.value.code, caught.value.status) == ("unreadable_corpus", 422)


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    file, folder = tmp_path / "twins.parquet", tmp_path / "twins"
    twins = pyarrow.Table.from_arrays([pyarrow.array(["one"]), pyarrow.array(["other"])], names=["text", "text"])
    pyarrow.parquet.write_table(twins, file)
    folder.mkdir()
    with pyarrow.OSFile(str(folder / "rows.arrow"), "wb") as out, pyarrow.ipc.new_stream(out, twins.schema) as stream:
        stream.write_table(twins)
    (folder / "state.json").write_text('{"_data_files": [{"filename": "rows.arrow"}]}')
    for source in (file, folder):
        with pytest.raises(MalformedRow, match="line 1: expected one column 'text', got 2"):
            list(read_rows(source))


def test_a_pipe_in_a_saved_folder_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    os.mkfifo(tmp_path / "rows.arrow")
    for name in ("rows.arrow", "gone.arrow"):
        (tmp_path / "state.json").write_text(f'{{"_data_files": [{{"filename": "{name}"}}]}}')
        with pytest.raises(UnreadableCorpus, match=f"the corpus cannot be read: the folder has no file '{name}'"):
            list(read_rows(tmp_path))


@pytest.mark.slow
def test_a_small_file_whose_rows_are_huge_ends_at_the_bound_of_memory(tmp_path: Path, tokenizer: Tokenizer) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    text = pyarrow.array(["a " * (8 << 20)])
    rows = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 64, pyarrow.int32()), text)
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), tmp_path / "bomb.parquet", compression="zstd")
    assert (tmp_path / "bomb.parquet").stat().st_size < 100_000
    options = Tokenization(100)
    bomb = Piece(str(tmp_path / "bomb.parquet"), "parquet", 0, 64)

    async def run() -> None:
        pool = HelperPool(tokenizer.state, 1)
        try:
            with pytest.raises(UnreadableCorpus, match="expected a corpus that is read within 900 MiB of memory"):
                await pool.run(tokenize_piece, bomb, str(tmp_path / "out" / "corpus"), options, {}, 900 << 20)
            (tmp_path / "rows.jsonl").write_text('{"text": "The cat sat."}')
            target = str(tmp_path / "next" / "corpus")
            piece = Piece(str(tmp_path / "rows.jsonl"), "jsonl", 0, 100)
            assert (await pool.run(tokenize_piece, piece, target, options, {}, 4 << 30)).rows == 1
        finally:
            await pool.close()

    asyncio.run(run())


def test_without_pyarrow_the_command_that_installs_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.parquet"
    file.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InvalidRequest, match=r"a parquet file needs pyarrow.*pip install 'coserve\[datasets\]'"):
        list(read_rows(file))


def learned(tokenizer: Tokenizer, row: dict[str, Any], train_on: TrainOn | None) -> str:
    corpus = tokenize_rows([parse_row(row, 7)], tokenizer, Tokenization(1000, train_on))
    tokens, target = corpus.row(0)
    return tokenizer.decode(tokens[target.astype(np.bool_)].tolist(), skip_special=False)


@pytest.mark.parametrize(
    ("row", "train_on", "expected"),
    [
        (CHAT, None, "Hm.<|end|>Ahoy!<|end|>"),
        (CHAT, "assistant", "Hm.<|end|>Ahoy!<|end|>"),
        (CHAT, "completion", "Ahoy!<|end|>"),
        (
            CHAT,
            "all",
            "Be kind.<|end|><|user|>Hi<|end|><|assistant|>Hm.<|end|><|user|>Hello?<|end|><|assistant|>Ahoy!<|end|>",
        ),
        ({"prompt": "Hello", "completion": " Ahoy!"}, "completion", " Ahoy!<|endoftext|>"),
        ({"text": "The cat sat."}, "all", " cat sat.<|endoftext|>"),
    ],
)
def test_train_on_chooses_what_is_learned(
    tokenizer: Tokenizer, row: dict[str, Any], train_on: TrainOn | None, expected: str
) -> None:
    assert learned(tokenizer, row, train_on) == expected


USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([USER], "Hi<|end|>"),
        ([USER, {"role": "assistant", "content": "Hm.", "weight": 0}], "Hi<|end|><|assistant|>Hm.<|end|>"),
    ],
)
def test_all_of_a_chat_needs_no_turn_of_the_assistant(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], expected: str
) -> None:
    assert learned(tokenizer, {"messages": messages}, "all") == expected
    with pytest.raises(NoTargets):
        learned(tokenizer, {"messages": messages}, None)


def test_all_of_a_completion_is_its_prompt_too(tokenizer: Tokenizer) -> None:
    row = {"prompt": "The cat", "completion": " sat."}
    whole = "The cat sat.<|endoftext|>"
    assert whole.endswith(learned(tokenizer, row, "all")) and " cat sat." in learned(tokenizer, row, "all")
    assert "cat" not in learned(tokenizer, row, None)


@pytest.mark.parametrize(
    ("row", "train_on"),
    [
        ({"text": "a b"}, "completion"),
        ({"text": "a b"}, "assistant"),
        ({"prompt": "a", "completion": "b"}, "assistant"),
        ({"messages": CHAT["messages"][:4]}, "completion"),
    ],
)
def test_rows_without_such_tokens_are_refused_with_their_line(
    tokenizer: Tokenizer, row: dict[str, Any], train_on: TrainOn
) -> None:
    with pytest.raises((MalformedRow, NoTargets)) as refused:
        learned(tokenizer, row, train_on)
    assert refused.value.line == 7


TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls %}[{{ call.function.name }} {{ call.function.arguments | tojson }}]{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


def tool_chat(arguments: object) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {
        "messages": [
            {"role": "user", "content": "Rain?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "dry", "tool_call_id": "c1", "name": "weather"},
            {"role": "assistant", "content": "No."},
        ],
        "tools": TOOLS,
    }


def test_a_chat_with_tools_is_rendered_as_transformers_renders_it() -> None:
    transformers = pytest.importorskip("transformers")
    row = parse_row(tool_chat('{"city": "Köln"}'), 1)
    assert isinstance(row, ChatRow) and row == parse_row(tool_chat({"city": "Köln"}), 1)
    folder = Path(__file__).resolve().parents[2] / "coserve" / "assets" / "tiny"
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    text, spans, _ = ChatTemplate(TEMPLATE, {}, ("<|end|>",)).render_for_training(row.messages, row.tools)
    expected = theirs.apply_chat_template(
        list(row.messages), tools=list(row.tools), chat_template=TEMPLATE, tokenize=False
    )
    assert text == expected
    assert [text[start:end] for start, end in spans] == ['[weather {"city": "Köln"}]<|end|>', "No.<|end|>"]


def test_calls_that_the_template_leaves_out_are_not_learned_as_an_empty_turn(tokenizer: Tokenizer) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "tide", "arguments": {}}}]}
    ask, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ahoy!"}
    with pytest.raises(MalformedRow, match="line 7: the base's chat template leaves tool_calls out"):
        learned(tokenizer, {"messages": [ask, call]}, None)
    assert learned(tokenizer, {"messages": [ask, call | {"weight": 0}, ask, answer]}, None) == "Ahoy!<|end|>"
    assert learned(tokenizer, {"messages": [ask, call | {"content": "Hm."}]}, None) == "Hm.<|end|>"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant"},
        {"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
    ],
)
def test_malformed_tool_calls_are_refused(message: dict[str, Any]) -> None:
    with pytest.raises(MalformedRow) as refused:
        parse_row({"messages": [message]}, 3)
    assert refused.value.line == 3
