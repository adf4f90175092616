"""Checkpoints that cannot be read, now or ever, and old ones that cannot be deleted."""

from __future__ import annotations

import json
import pickle  # noqa: TID251 - what must never be opened
from pathlib import Path

import pytest

from coserve.core.errors import StorageError
from coserve.core.link.jobs import JobCheckpoint, JobProgress
from coserve.core.names import CHECKPOINT_STATE
from coserve.core.training.jobs import JobSpec
from coserve.model.base import Base
from coserve.state.failpoints import armed
from tests.support.finetuning import Bench, job_spec, random_corpus

CORPUS = random_corpus()


def damage(bench: Bench, spec: JobSpec, *steps: int) -> None:
    for step in steps:
        (bench.folder.checkpoint(spec.id, step) / CHECKPOINT_STATE).write_bytes(b'{"job": "\xff"}')


def steps_on_disk(bench: Bench, spec: JobSpec) -> list[int]:
    return [step for step, _ in bench.folder.checkpoints(spec.id)]


@pytest.mark.parametrize("error", ["EACCES", "EPERM", "ETIMEDOUT", "ENOTCONN", "EHOSTDOWN"])
@pytest.mark.parametrize("hit", [1, 2])
def test_a_file_that_cannot_be_read_now_is_no_damaged_file(base: Base, tmp_path: Path, error: str, hit: int) -> None:
    """Neither the corpus, which is opened first, nor a checkpoint."""
    bench = Bench(base, tmp_path)
    spec = bench.place(CORPUS, job_spec(CORPUS, steps=6, checkpoint_steps=2))
    bench.start(spec)
    bench.run(spec.id, until=lambda m: isinstance(m, JobCheckpoint) and m.step == 4)
    again = Bench(base, tmp_path)
    with armed(f"job.open={error}@{hit}"), pytest.raises(StorageError):
        again.start(spec)
    started = again.start(spec)
    assert (started.resumed_from, started.note) == (4, None)


def test_a_checkpoint_that_is_left_aside_is_told_of(base: Base, tmp_path: Path) -> None:
    bench = Bench(base, tmp_path)
    spec = bench.place(CORPUS, job_spec(CORPUS, steps=6, checkpoint_steps=2))
    bench.start(spec)
    bench.run(spec.id, until=lambda m: isinstance(m, JobCheckpoint) and m.step == 4)
    damage(bench, spec, 4)
    some = Bench(base, tmp_path).start(spec).note
    assert some is not None and "step 4" in some and "goes on from step 2" in some
    damage(bench, spec, 2)
    started = Bench(base, tmp_path).start(spec)
    assert started.resumed_from == 0
    assert (
        started.note is not None and "steps 2, 4" in started.note and "begins again at its first step" in started.note
    )


def test_a_checkpoint_of_an_earlier_version_is_read(base: Base, tmp_path: Path) -> None:
    """Its progress has a field that is used no more."""
    bench = Bench(base, tmp_path)
    spec = bench.place(CORPUS, job_spec(CORPUS, checkpoint_steps=2))
    bench.start(spec)
    bench.run(spec.id, until=lambda m: isinstance(m, JobCheckpoint))
    file = bench.folder.checkpoint(spec.id, 2) / CHECKPOINT_STATE
    state = json.loads(file.read_text())
    assert "last_loss" not in state["progress"], "nothing reads it"
    state["progress"]["last_loss"] = 1.5
    file.write_text(json.dumps(state))
    started = Bench(base, tmp_path).start(spec)
    assert (started.resumed_from, started.note) == (2, None)


class Canary:
    """An object whose unpickling makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def test_what_other_trainers_keep_in_pickles_is_not_opened(base: Base, tmp_path: Path) -> None:
    """A checkpoint with files of transformers' Trainer beside ours goes on; nothing of theirs was run."""
    bench = Bench(base, tmp_path)
    spec = bench.place(CORPUS, job_spec(CORPUS, steps=6, checkpoint_steps=2))
    bench.start(spec)
    bench.run(spec.id, until=lambda m: isinstance(m, JobCheckpoint) and m.step == 4)
    for name in ("rng_state.pth", "optimizer.pt", "scheduler.pt", "training_args.bin", "state.pkl"):
        (bench.folder.checkpoint(spec.id, 4) / name).write_bytes(pickle.dumps(Canary(tmp_path / "ran")))
    assert Bench(base, tmp_path).start(spec).resumed_from == 4
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("keep", [1, 2])
def test_checkpoints_that_are_left_aside_stay_and_take_no_others_place(base: Base, tmp_path: Path, keep: int) -> None:
    first = Bench(base, tmp_path, keep_checkpoints=9)
    spec = first.place(CORPUS, job_spec(CORPUS, steps=8, checkpoint_steps=2))
    first.start(spec)
    first.run(spec.id, until=lambda m: isinstance(m, JobProgress) and m.metrics.step == 5)
    first.save(spec.id)
    damage(first, spec, 4, 5)
    again = Bench(base, tmp_path, keep_checkpoints=keep)
    assert again.start(spec).resumed_from == 2
    again.run(spec.id, until=lambda m: isinstance(m, JobProgress) and m.metrics.step == 3)
    again.save(spec.id)
    assert steps_on_disk(again, spec) == [[3, 4, 5], [2, 3, 4, 5]][keep - 1]
    again.run(spec.id, until=lambda m: isinstance(m, JobCheckpoint) and m.step == 6)
    assert steps_on_disk(again, spec) == [[5, 6], [4, 5, 6]][keep - 1], "4 was written again"
    again.run(spec.id, until=lambda m: isinstance(m, JobProgress) and m.metrics.step == 7)
    again.save(spec.id)
    assert steps_on_disk(again, spec) == [[5, 7], [5, 6, 7]][keep - 1]


@pytest.mark.parametrize("refusal", ["before_rename=EACCES", "after_rename=ENOTEMPTY"])
def test_an_old_checkpoint_that_cannot_be_deleted_is_deleted_later(base: Base, tmp_path: Path, refusal: str) -> None:
    bench = Bench(base, tmp_path, keep_checkpoints=1)
    spec = bench.place(CORPUS, job_spec(CORPUS, steps=6, checkpoint_steps=1))
    bench.start(spec)
    with armed(f"remove.{refusal}"):
        messages = bench.run(spec.id, until=lambda m: isinstance(m, JobCheckpoint) and m.step == 3)
    assert [m.step for m in messages if isinstance(m, JobCheckpoint)] == [1, 2, 3]
    left = {entry.name for entry in bench.folder.job(spec.id).iterdir()}
    assert len(left) > 2, "more than the last one, and the corpus"
    bench.run(spec.id, until=lambda m: isinstance(m, JobCheckpoint) and m.step == 4)
    assert {entry.name for entry in bench.folder.job(spec.id).iterdir()} == {
        "corpus.safetensors",
        "checkpoint-00000004",
    }
