"""Rows for validation behind those to learn, in one file."""

from __future__ import annotations

import codecs
from pathlib import Path

from coserve.core.training.held_rows import append_lines, count_rows


def test_files_follow_each_other_with_whole_lines_and_no_marks_between(tmp_path: Path) -> None:
    learned, held, joined = (tmp_path / name for name in ("learned", "held", "joined"))
    learned.write_bytes(codecs.BOM_UTF8 + b'{"text": "a"}\n\n{"text": "b"}')
    held.write_bytes(codecs.BOM_UTF8 + b'{"text": "c"}')
    assert (append_lines(learned, joined), append_lines(held, joined)) == (3, 1)
    assert joined.read_bytes() == b'{"text": "a"}\n\n{"text": "b"}\n{"text": "c"}\n'
    assert count_rows(held) == 1
