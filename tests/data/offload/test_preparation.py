"""Corpora that several helper processes tokenise: the same corpus as in one process, errors of one job alone, turns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coserve.api.jobs import preparation
from coserve.api.jobs.preparation import CorpusPreparation
from coserve.core.errors import EmptyCorpus, HelperLost, MalformedRow, NoTargets, UnreadableCorpus
from coserve.data.corpus.jsonl import parse_jsonl
from coserve.data.corpus.limits import CorpusLimits
from coserve.data.corpus.sources import PIECES
from coserve.data.corpus.tokenize import Tokenization, tokenize_rows
from coserve.data.corpus.tokenized import Corpus
from coserve.data.offload.pool import HelperPool
from tests.support import tasks
from tests.support.api_server import tokenizer

COUNT = 5
OPTIONS = Tokenization(max_length=12)
WIDE = PIECES.bytes // 20
"""Bytes of a line: most are blanks, which cost nothing to tokenise."""


async def unlimited() -> int:
    return 1 << 40


@pytest.fixture
async def pool() -> AsyncIterator[HelperPool]:
    pool = HelperPool(tokenizer().state, 3)
    yield pool
    await pool.close()


def line(row: dict[str, Any]) -> bytes:
    return json.dumps(row).encode().ljust(WIDE - 1) + b"\n"


def rows(path: Path, *, bad: dict[int, dict[str, Any]] | None = None) -> Path:
    """A file of `COUNT` pieces; `bad` replaces rows by their line."""
    found = [
        {"text": f"row {n} of the corpus " * (n % 3 + 1)} if n % 4 else {"prompt": "Hi " * n, "completion": " Ahoy!"}
        for n in range(1, 20 * COUNT + 1)
    ]
    for number, row in (bad or {}).items():
        found[number - 1] = row
    path.write_bytes(b"".join(map(line, found)))
    return path


async def test_several_processes_make_the_corpus_of_one(tmp_path: Path, pool: HelperPool) -> None:
    source, reports = rows(tmp_path / "rows.jsonl"), list[tuple[int, float]]()
    staged = await CorpusPreparation(pool, tmp_path / "staging", 3, unlimited).tokenize(
        source, OPTIONS, lambda done, share: reports.append((done, share))
    )
    expected, found = tokenize_rows(parse_jsonl(source), tokenizer(), Tokenization(12)), Corpus.load(Path(staged.path))
    for name in ("tokens", "target", "bounds"):
        assert np.array_equal(getattr(found, name), getattr(expected, name))
    assert (staged.rows, staged.token_count) == (expected.rows, expected.token_count)
    assert (staged.target_tokens, staged.rows_cut) == (expected.target_tokens, expected.rows_cut)
    assert len(reports) == COUNT and reports[-1] == (100, 1.0)
    assert reports == sorted(reports)
    staged.discard()
    assert list((tmp_path / "staging").iterdir()) == []


@pytest.mark.slow
async def test_the_first_error_of_the_file_is_the_one_that_is_raised(tmp_path: Path, pool: HelperPool) -> None:
    """Whichever process finds one first."""
    one = CorpusPreparation(pool, tmp_path / "staging", 3, unlimited)
    source = rows(tmp_path / "rows.jsonl", bad={35: {"prompt": "x", "completion": ""}, 41: {"txt": "x"}})
    with pytest.raises(NoTargets, match=r"^line 35: the row has nothing to learn$") as caught:
        await one.tokenize(source, OPTIONS)
    assert caught.value.line == 35
    with pytest.raises(MalformedRow, match="line 31: expected a corpus of at most 30 rows"):
        await CorpusPreparation(pool, tmp_path / "staging", 3, unlimited, CorpusLimits(rows=30)).tokenize(
            rows(tmp_path / "good.jsonl"), OPTIONS
        )
    source.write_bytes(b"\n" * (PIECES.bytes + 5))
    with pytest.raises(EmptyCorpus):
        await one.tokenize(source, OPTIONS)
    with pytest.raises(UnreadableCorpus):
        await one.tokenize(tmp_path / "gone.jsonl", OPTIONS)
    assert list((tmp_path / "staging").iterdir()) == []


@pytest.mark.slow
async def test_a_worker_that_is_killed_ends_its_own_job_alone(
    tmp_path: Path, pool: HelperPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, source = CorpusPreparation(pool, tmp_path / "staging", 3, unlimited), rows(tmp_path / "rows.jsonl")
    (tmp_path / "staging").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "tokenize_piece", tasks.die_of_a_piece)
        with pytest.raises(HelperLost):
            await one.tokenize(source, OPTIONS)
    assert list((tmp_path / "staging").iterdir()) == []
    assert (await one.tokenize(source, OPTIONS)).rows == 100


async def test_a_small_corpus_does_not_wait_for_the_end_of_a_large_one(tmp_path: Path) -> None:
    pool, order = HelperPool(tokenizer().state, 1), list[str]()
    large, small = rows(tmp_path / "large.jsonl"), tmp_path / "small.jsonl"
    small.write_bytes(line({"text": "a b"}))
    begun, one = asyncio.Event(), CorpusPreparation(pool, tmp_path / "staging", 1, unlimited)

    async def tokenized(name: str, source: Path) -> None:
        await one.tokenize(source, OPTIONS, lambda *_: begun.set())
        order.append(name)

    first = asyncio.create_task(tokenized("large", large))
    await begun.wait()
    await tokenized("small", small)
    await first
    await pool.close()
    assert order == ["small", "large"]


async def test_a_corpus_that_nobody_waits_for_leaves_nothing(tmp_path: Path, pool: HelperPool) -> None:
    begun = asyncio.Event()
    one = CorpusPreparation(pool, tmp_path / "staging", 3, unlimited)
    task = asyncio.create_task(one.tokenize(rows(tmp_path / "rows.jsonl"), OPTIONS, lambda *_: begun.set()))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert list((tmp_path / "staging").iterdir()) == []
