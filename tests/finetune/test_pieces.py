"""A source that is read in pieces, of whatever size, has the rows, lines and errors of one that is read at once."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coserve.core.errors import MalformedRow
from coserve.data.corpus.jsonl import parse_jsonl
from coserve.data.corpus.limits import CorpusLimits
from coserve.data.corpus.rows import TextRow
from coserve.data.corpus.sources import Piece, PieceReader, PieceSizes, split_source
from coserve.data.corpus.tokenize import Tokenization, tokenize_rows
from coserve.data.corpus.tokenized import Corpus
from coserve.data.pretrained.tokenizer import Tokenizer
from tests.support.corpora import read_rows, stage
from tests.support.examples import examples

LINES = st.sampled_from(
    [
        b"\n",
        b"  \n",
        b'{"text": "a"}\n',
        b'{"text": "\xc3\xa4\xe2\x82\xac"}\r\n',
        b'{"prompt": "", "completion": "b"}\n',
    ]
)


@settings(deadline=None, max_examples=examples(100))
@given(st.lists(LINES, max_size=12), st.integers(1, 40), st.booleans(), st.booleans())
def test_lines_belong_to_the_piece_they_begin_in(lines: list[bytes], size: int, marked: bool, ended: bool) -> None:
    content = (b"\xef\xbb\xbf" if marked else b"") + b"".join(lines) + (b"" if ended else b'{"text": "end"}')
    with TemporaryDirectory() as folder:
        source = Path(folder, "rows.jsonl")
        source.write_bytes(content)
        sizes = PieceSizes(bytes=size, most_bytes=size)
        assert len(split_source(source, sizes)) == -(-len(content) // size)
        assert list(read_rows(source, sizes)) == list(parse_jsonl(source))


def test_an_error_names_its_line_in_the_whole_file(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_bytes(b'{"text": "a"}\n\n' * 20 + b'{"txt": "a"}\n' + b'{"text": 5}\n')
    with pytest.raises(MalformedRow, match=r"^line 41: expected the fields of a row, got 'txt'") as caught:
        list(read_rows(source, PieceSizes(bytes=50)))
    assert caught.value.line == 41


def test_a_line_longer_than_a_piece_is_read_once_and_bounded(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_bytes(b'{"text": "%s"}\n{"text": "b"}\n' % (b"a" * 100))
    pieces = [Piece(str(source), "jsonl", start, start + 10) for start in range(0, 140, 10)]
    rows = [[row.text for row in PieceReader(piece) if isinstance(row, TextRow)] for piece in pieces]
    assert [row for row in rows if row] == [["a" * 100], ["b"]]
    with pytest.raises(MalformedRow, match="at most 50 bytes a line"):
        list(PieceReader(pieces[0], CorpusLimits(row_bytes=50)))


def test_files_grow_pieces_and_not_their_number(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    for size, pieces in ((3 << 20, 6), (1 << 30, 1024), (64 << 30, 8192)):
        with source.open("wb") as file:
            file.truncate(size)  # sparse
        found = split_source(source)
        assert len(found) == pieces
        assert (found[0].start, found[-1].stop) == (0, size)
        assert all(before.stop == after.start for before, after in pairwise(found))


def test_tables_in_pieces(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": [f"row {number}" for number in range(700)]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=150)
    folder = tmp_path / "saved"
    folder.mkdir()
    for name, part in (("a.arrow", table.slice(0, 300)), ("b.arrow", table.slice(300))):
        with pyarrow.OSFile(str(folder / name), "wb") as out, pyarrow.ipc.new_stream(out, table.schema) as stream:
            stream.write_table(part, max_chunksize=110)
    (folder / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}, {"filename": "b.arrow"}]}')
    expected = [TextRow(number + 1, f"row {number}") for number in range(700)]
    for size in (7, 64, 150, 151, 1000):
        for source in (tmp_path / "rows.parquet", folder):
            assert list(read_rows(source, PieceSizes(rows=size))) == expected


@pytest.mark.parametrize("size", [200, 1 << 20])
def test_parts_make_the_corpus_of_one_process(tmp_path: Path, size: int) -> None:
    tokenizer, source, target = Tokenizer.load("bundled"), tmp_path / "rows.jsonl", tmp_path / "staged" / "corpus"
    rows = [
        {"prompt": "cat " * n, "completion": " sat"} if n % 2 else {"text": "one two " * n or "a"} for n in range(50)
    ]
    source.write_text("\n\n".join(map(json.dumps, rows)))
    staged = stage(source, target, tokenizer, 40, sizes=PieceSizes(bytes=size))
    expected = tokenize_rows(parse_jsonl(source), tokenizer, Tokenization(40))
    found = Corpus.load(target)
    for name in ("tokens", "target", "bounds"):
        assert np.array_equal(getattr(found, name), getattr(expected, name))
    assert found.is_valid() and np.array_equal(staged.arrays().lengths, expected.lengths)
    for name in ("rows", "token_count", "target_tokens", "rows_cut"):
        assert getattr(staged, name) == getattr(expected, name), name
    assert sorted(path.name for path in target.parent.iterdir()) == [
        "corpus",
        *(f"corpus.{part}" for part in ("lengths", "splits", "target")),
    ]
    staged.save(tmp_path / "job" / "corpus")
    assert not target.parent.exists()
