"""Corpora in files: read through a map, and written row by row, in memory that does not grow with them."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from coserve.core.cancellation import Cancellation, Cancelled
from coserve.core.errors import CheckpointUnreadable
from coserve.core.training.settings import TrainingSettings
from coserve.data.corpus.batch_plan import BatchPlan
from coserve.data.corpus.staging import CorpusWriter
from coserve.data.corpus.tokenized import Corpus, file_digest
from tests.support.finetuning import random_corpus, random_pairs

READ = """
import resource, sys
from pathlib import Path
from coserve.data.corpus.batch_plan import BatchPlan
from coserve.data.corpus.tokenized import Corpus
from coserve.core.training.settings import TrainingSettings

used = int(Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + (48 << 20),) * 2)
corpus = Corpus.load(Path(sys.argv[1]), digest=sys.argv[2])
plan = BatchPlan(corpus.lengths, TrainingSettings(epochs=1.0), 1 << 20)
total = 0
for step in range(plan.total_steps):
    for rows in plan.step(step).micro_batches:
        total += sum(len(corpus.row(row)[0]) for row in rows)
print(total, corpus.target_tokens, int(corpus.tokens.max()))
"""


@pytest.mark.slow
def test_a_large_corpus_is_read_with_little_memory(tmp_path: Path) -> None:
    """200 MB, in a process that can allocate 48 MiB."""
    tokens, target = np.arange(1 << 20, dtype=np.int32), np.ones(1 << 20, np.uint8)
    target[0] = 0
    with CorpusWriter(tmp_path / "corpus") as corpus:
        for _ in range(40):
            corpus.add(tokens, target)
        corpus.finish()
    size = 40 << 20
    assert (tmp_path / "corpus").stat().st_size > 200 << 20
    digest = file_digest(tmp_path / "corpus")
    done = subprocess.run(
        [sys.executable, "-P", "-c", READ, str(tmp_path / "corpus"), digest],
        env={
            "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        },
        capture_output=True,
        check=False,
    )
    assert done.stdout.split() == [b"%d" % number for number in (size, size - 40, (1 << 20) - 1)], done.stderr.decode()


def test_a_plan_has_some_bytes_a_row() -> None:
    rows = 400_000
    lengths = np.full(rows, 7, np.int32)
    BatchPlan(lengths[:64], TrainingSettings(epochs=2.0), 64).prepare(0)  # numpy imports modules of its own
    tracemalloc.start()
    plan = BatchPlan(lengths, TrainingSettings(epochs=2.0), 64)
    plan.prepare(plan.total_steps - 1)
    now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert now < 12 * rows and peak < 40 * rows


@pytest.mark.parametrize("corpus", [random_corpus(), random_pairs()], ids=["rows", "pairs"])
def test_a_changed_file_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    path = tmp_path / "corpus"
    corpus.save(path)
    assert file_digest(path) == corpus.digest
    loaded = Corpus.load(path, digest=corpus.digest)
    assert not loaded.tokens.flags.writeable
    for row in range(corpus.rows):
        for mine, theirs in zip(corpus.sequences(row), loaded.sequences(row), strict=True):
            assert all(np.array_equal(one, other) for one, other in zip(mine, theirs, strict=True))
    content = bytearray(path.read_bytes())
    content[content.index(corpus.tokens.tobytes())] ^= 1  # another token of the vocabulary
    path.write_bytes(content)
    Corpus.load(path)
    with pytest.raises(CheckpointUnreadable, match="SHA-256"):
        Corpus.load(path, digest=corpus.digest)


def test_a_load_can_be_cancelled(tmp_path: Path) -> None:
    corpus, cancellation = random_corpus(), Cancellation()
    corpus.save(tmp_path / "corpus")
    cancellation.cancel()
    with pytest.raises(Cancelled):
        Corpus.load(tmp_path / "corpus", cancellation.check)


@pytest.mark.parametrize(
    "header",
    [
        b"{}",
        b'{"tokens":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        b'{"tokens":{"dtype":"I32","shape":[1,1],"data_offsets":[0,4]}}',
        b'{"tokens":{"dtype":"I32","shape":[2],"data_offsets":[0,4]}}',
        b'{"tokens":{"dtype":"I32","shape":[2],"data_offsets":[-4,4]}}',
        b'{"tokens":{"dtype":"I32","shape":[1],"data_offsets":[0,4]}}',
    ],
)
def test_foreign_headers_are_refused(header: bytes, tmp_path: Path) -> None:
    (tmp_path / "corpus").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4 if b"4]" in header else 0))
    with pytest.raises(CheckpointUnreadable):
        Corpus.load(tmp_path / "corpus")


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
