"""CSV files and JSON arrays are read as the same rows as JSON Lines; columns of other names are named, others are not
used."""

from __future__ import annotations

import csv
import gzip
import json
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coserve.core.errors import MalformedRow, UnreadableCorpus
from coserve.data.corpus.columns import MAX_UNUSED, Columns, unused_notes
from coserve.data.corpus.conversion import as_json_lines, is_json_lines
from coserve.data.corpus.json_array import array_elements
from coserve.data.corpus.jsonl import parse_jsonl
from coserve.data.corpus.limits import CorpusLimits
from coserve.data.corpus.rows import ChatRow, CompletionRow, Row, TextRow, parse_row, parse_rows

LIMITS = CorpusLimits(rows=1000, row_bytes=4000)
NAMES = {"prompt": "question", "completion": "answer"}


def read(
    tmp_path: Path, content: str | bytes, columns: Columns | None = None, limits: CorpusLimits = LIMITS
) -> list[Row]:
    columns = Columns() if columns is None else columns
    source = tmp_path / "source"
    source.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert not is_json_lines(source, columns)
    rows = as_json_lines(source, tmp_path / "rows", columns, lambda: None, limits)
    return list(parse_jsonl(rows, columns=columns))


def refusal(tmp_path: Path, content: str | bytes, columns: Columns | None = None) -> MalformedRow:
    with pytest.raises(MalformedRow) as refused:
        read(tmp_path, content, columns)
    return refused.value


@pytest.mark.parametrize(
    "content",
    [
        'prompt,completion\na,"b, ""c"""\n',
        '\ufeffprompt,completion\r\na,"b, ""c"""\r\n',
        'completion;prompt\n"b, ""c""";a\n',
        'prompt\tcompletion\na\t"b, ""c"""',
        '"prompt","completion"\n"a","b, ""c"""',
    ],
)
def test_csv_as_programs_write_it(tmp_path: Path, content: str) -> None:
    assert read(tmp_path, content) == [CompletionRow(2, "a", 'b, "c"')]


def test_a_record_of_several_lines_has_the_number_of_its_first(tmp_path: Path) -> None:
    rows = read(tmp_path, 'text,"other\nname"\n"a\nb",1\n\nc,2\n')
    assert rows == [TextRow(3, "a\nb"), TextRow(6, "c")]


def test_lists_are_json_in_a_cell_and_empty_optional_cells_are_absent(tmp_path: Path) -> None:
    messages = json.dumps([{"role": "user", "content": 'q "x"'}, {"role": "assistant", "content": "a"}], indent=1)
    cells = messages.replace('"', '""')
    (row,) = read(tmp_path, f'messages,tools\n"{cells}",\n')
    assert isinstance(row, ChatRow) and row.tools == () and row.messages[0]["content"] == 'q "x"'
    (alpaca,) = read(tmp_path, "instruction,input,output\nGreet.,,Ahoy!\n")
    assert alpaca == parse_row({"instruction": "Greet.", "output": "Ahoy!"}, 2)


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"), max_size=12)


@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=8))
def test_what_python_writes_as_csv_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]]
) -> None:
    folder = tmp_path_factory.mktemp("csv")
    with (folder / "made").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("prompt", "completion"), *rows])
    found = read(folder, (folder / "made").read_bytes())
    assert [(row.prompt, row.completion) for row in found if isinstance(row, CompletionRow)] == rows


@given(st.lists(st.dictionaries(st.just("text"), texts, min_size=1), max_size=8), st.sampled_from([None, 1]))
def test_what_python_writes_as_an_array_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, str]], indent: int | None
) -> None:
    folder = tmp_path_factory.mktemp("array")
    found = read(folder, f" {json.dumps(rows, indent=indent)}\n")
    assert found == list(parse_rows(rows))


@given(
    st.lists(st.lists(texts | st.integers(), max_size=4), max_size=6), st.integers(1, 40), st.sampled_from([None, 1])
)
def test_elements_in_any_pieces(rows: list[list[str | int]], chunk: int, indent: int | None) -> None:
    file = BufferedReader(BytesIO(json.dumps(rows, indent=indent, ensure_ascii=False).encode()))
    found = list(array_elements(file, 4000, chunk))
    assert [number for number, _ in found] == list(range(1, len(rows) + 1))
    assert [json.loads(element) for _, element in found] == rows


def test_long_elements_are_read_a_piece_at_a_time(tmp_path: Path) -> None:
    rows = [{"text": "é" * 300_000}, {"text": "b"}, {"text": '"[{' * 100_000}]
    large = CorpusLimits(row_bytes=2_000_000)
    assert read(tmp_path, json.dumps(rows), limits=large) == list(parse_rows(rows))
    with pytest.raises(MalformedRow, match="line 1: expected at most 100000 bytes a row"):
        read(tmp_path, json.dumps(rows), limits=CorpusLimits(row_bytes=100_000))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('prompt,completion\na,b\nc,"d\n', "line 3: expected CSV: a quote that begins here has no end"),
        ('prompt,completion\n"a"x,b\n', "line 2: expected CSV: ',' expected after '\"'"),
        ("prompt,completion\na,b\nc,d,e\n", "line 3: expected 2 cells, as the header has, got 3; a text with ','"),
        ("text,text\na,b\n", "line 1: expected one column 'text', got 2"),
        ("question,answer\na,b\n", "line 1: expected the fields of a row, got 'answer', 'question'; a row is"),
        (b"text,other\na,b\n" + b"\xff,c\n", "line 3: expected UTF-8"),
        (f'text,other\na,b\n"{"x" * 5000}",\n', "line 3: expected at most 4000 bytes a row"),
        ("messages,other\n[oops,1\n", "line 2: expected JSON"),
        ("text,other\n" + "a,b\n" * 1001, "line 1001: expected a corpus of at most 1000 rows"),
        ("instruction,inputs,output\na,b,c\n", "line 1: unknown field 'inputs'; did you mean 'input'?"),
        ('[{"text": "a"}, {"text": b}]', "line 2: expected JSON: Expecting value"),
        ('[{"text": "a"} {"text": "b"}]', "line 1: expected ',' or ']', got '{'"),
        ('[{"text": "a"}, ', "line 2: the array has no end"),
        ('[{"text": "a"}', "line 1: the array has no end"),
        ('[{"text": "a"}] 1', "line 1: expected nothing after the array, got '1'"),
        ('[{"text": "a"}, 3]', "line 2: expected an object, got a number"),
        ('[{"text": "a"}, {"text": NaN}]', "line 2: expected a finite number"),
        ("[" * 100_000, "line 1: expected JSON of moderate depth"),
        (b'["\xff"]', "line 1: expected UTF-8"),
        (f"[{'9' * 3000}]", "line 1: expected a number of at most 1000 digits"),
        ("[" + ",".join(["{}"] * 1001) + "]", "line 1001: expected a corpus of at most 1000 rows"),
    ],
)
def test_what_is_malformed_has_its_line_and_the_reason(tmp_path: Path, content: str | bytes, says: str) -> None:
    assert refusal(tmp_path, content).message.startswith(says)


@pytest.mark.parametrize("content", ['{"text": "a,b"}\n', "garbage\n", "", "\n", "PK\x03\x04,", '{"text"\n'])
def test_other_texts_are_left_to_the_reader_of_json_lines(tmp_path: Path, content: str) -> None:
    (tmp_path / "source").write_bytes(content.encode("latin-1"))
    assert is_json_lines(tmp_path / "source", Columns())
    with pytest.raises(UnreadableCorpus):
        is_json_lines(tmp_path / "none", Columns())


@pytest.mark.parametrize(
    "content", ['{"text": "a"}\n\n{"text": "b"}', '[{"text": "a"}, {"text": "b"}]', "text\na\nb\n"]
)
def test_a_gzip_file_holds_the_rows_of_any_text(tmp_path: Path, content: str) -> None:
    packed = gzip.compress(content.encode(), mtime=0)
    assert [row.text for row in read(tmp_path, packed) if isinstance(row, TextRow)] == ["a", "b"]
    for damaged in (packed[:-9], packed[:20], packed[:15] + b"x" + packed[16:], packed[:4]):
        with pytest.raises(UnreadableCorpus, match="damaged"):
            read(tmp_path, damaged)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"text": "a"}\n{"text": 1}', "line 2: text: expected a string"),
        ('{"text": "a"}\n{"text": "' + "a" * 4000, "line 2: expected at most 4000 bytes a line"),
        ('{"text": "a"}\n' * 1001, "line 1001: expected a corpus of at most 1000 rows"),
    ],
)
def test_an_error_in_a_gzip_file_has_the_line_of_its_text(tmp_path: Path, content: str, says: str) -> None:
    assert refusal(tmp_path, gzip.compress(content.encode())).message.startswith(says)


def test_columns_of_other_names_are_read_from_any_format(tmp_path: Path) -> None:
    obj = {"question": "a", "answer": "b", "id": 1, "text": "both"}
    expected = CompletionRow(1, "a", "b")
    columns = Columns(NAMES)
    assert parse_row(obj, 1, columns) == expected and list(columns.unused) == ["id", "text"]
    assert read(tmp_path, json.dumps([obj]), Columns(NAMES)) == [expected]
    columns = Columns(NAMES)
    assert read(tmp_path, "id,question,answer\n1,a,b\n", columns) == [CompletionRow(2, "a", "b")]
    assert list(columns.unused) == ["id"]
    assert read(tmp_path, "body\na\n", Columns({"text": "body"})) == [TextRow(2, "a")]
    swapped = Columns({"prompt": "completion", "completion": "prompt"})
    assert parse_row({"prompt": "a", "completion": "b"}, 1, swapped) == CompletionRow(1, "b", "a")


@pytest.mark.parametrize(
    ("names", "row", "says"),
    [
        (NAMES, {"question": "a"}, "line 7: expected a column 'answer' (for completion), got 'question'"),
        (NAMES, {"prompt": "a", "completion": "b"}, "line 7: expected a column 'question' (for prompt), got "),
        (NAMES, {"q": "a"}, "line 7: expected the columns 'question', 'answer', got 'q'; a row is"),
        (NAMES | {"text": "body"}, {"question": "a", "answer": "b", "body": "c"}, "line 7: expected the fields of one"),
        ({}, {"text": "a", "prompt": "b"}, "line 7: expected the fields of one format, got those of two"),
        ({}, {"messages": [], "tool": []}, "line 7: unknown field 'tool'; did you mean 'tools'?"),
        ({}, {"instruction": "a", "output": "b", "Input": "c"}, "line 7: unknown field 'Input'; did you mean 'input'?"),
        ({}, {"instruction": "a", "output": "b", "history": [["c", "d"]]}, "line 7: history is not used: write it"),
        ({}, {"messages": [], "label": False}, "line 7: label is not used: training.loss kto reads it beside prompt"),
        ({}, {"messages": [], "weight": 0.0}, "line 7: weight is not used: coserve weighs rows alike"),
        ({}, {"conversations": [], "images": ["a"]}, "line 7: images is not used: coserve learns text alone"),
    ],
)
def test_columns_that_do_not_fit(names: dict[str, str], row: dict[str, Any], says: str) -> None:
    with pytest.raises(MalformedRow) as refused:
        parse_row(row, 7, Columns(names))
    assert refused.value.message.startswith(says), refused.value.message


def test_values_that_would_change_nothing_are_noted() -> None:
    columns = Columns()
    row = {"prompt": "a", "completion": "b", "label": 1, "weight": 1, "images": [], "system": ""}
    assert parse_row(row, 1, columns) == CompletionRow(1, "a", "b")
    assert parse_row({"text": "a", "label": True}, 1, Columns()) == TextRow(1, "a")
    assert list(columns.unused) == ["label", "weight", "images", "system"]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    ],
)
def test_a_system_text_is_the_first_message(row: dict[str, Any]) -> None:
    plain, found = parse_row(row, 1), parse_row(row | {"system": "Be kind."}, 1)
    assert isinstance(plain, ChatRow) and isinstance(found, ChatRow)
    assert found.messages == ({"role": "system", "content": "Be kind."}, *plain.messages)


def test_unused_columns_are_noted_up_to_a_number() -> None:
    assert unused_notes(Columns().unused) == ()
    columns = Columns()
    parse_row({"text": "a", "id": 1}, 1, columns)
    assert unused_notes(columns.unused) == ("columns that are not used: 'id'",)
    parse_row({"text": "a"} | {f"column {'x' * 500}{number}": 1 for number in range(99)}, 2, columns)
    for number in range(99):
        parse_row({"text": "a", f"c{number}": 1}, 3, columns)
    assert len(columns.unused) == MAX_UNUSED
    (note,) = unused_notes(columns.unused)
    assert note.endswith(" and others") and len(note) < 2000
