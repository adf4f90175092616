"""A corpus that is written row by row is the one that is tokenised at once, in memory that does not grow with it."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np

from coserve.data.corpus.jsonl import parse_jsonl
from coserve.data.corpus.tokenize import tokenize_rows
from coserve.data.corpus.tokenized import Corpus
from coserve.data.corpus.writer import CorpusWriter
from coserve.data.pretrained.tokenizer import Tokenizer
from tests.support.corpora import stage


def test_a_staged_file_is_the_corpus_of_its_rows(tmp_path: Path) -> None:
    tokenizer, source, target = Tokenizer.load("bundled"), tmp_path / "rows.jsonl", tmp_path / "staged" / "corpus"
    lines = [
        {"prompt": "cat " * n, "completion": " sat"} if n % 2 else {"text": "one two " * (n + 1)} for n in range(50)
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    staged = stage(source, target, tokenizer, 40)
    expected = tokenize_rows(parse_jsonl(source), tokenizer, 40)
    found = Corpus.load(target)
    assert all(np.array_equal(getattr(found, name), getattr(expected, name)) for name in ("tokens", "target", "bounds"))
    assert found.is_valid()
    assert (staged.rows, staged.token_count, staged.target_tokens, staged.rows_cut) == (
        50,
        expected.token_count,
        expected.target_tokens,
        expected.rows_cut,
    )
    assert np.array_equal(staged.arrays().lengths, expected.lengths)
    staged.save(tmp_path / "job" / "corpus")
    assert not target.parent.exists()


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    tokens, target = np.arange(1000, dtype=np.int32), np.ones(1000, np.uint8)
    target[0] = 0
    peaks = []
    for rows in (100, 8000):
        tracemalloc.start()
        with CorpusWriter(tmp_path / f"{rows}") as corpus:
            for _ in range(rows):
                corpus.add(tokens, target)
            corpus.finish()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + (1 << 20)  # the file has 40 MB
    assert Corpus.load(tmp_path / "8000").rows == 8000
