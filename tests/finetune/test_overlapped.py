"""Slices that are only launched: nothing of them leaves the jobs' stream, and the host reads results in micro-steps of
their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from coserve.core.link.jobs import JobNote, JobProgress, JobSucceeded
from coserve.core.link.link import FromEngine
from coserve.core.training.micro_step import MicroStep
from coserve.finetune.layers.eager import EagerLayerPass
from coserve.model.base import Base
from tests.support.finetuning import Bench, job_spec, metrics_of, random_corpus
from tests.support.memory_faults import out_of_memory_at

CORPUS = random_corpus()
CHANGES = {"validation_split": 0.3, "eval_steps": 2, "checkpoint_steps": 2, "early_stopping_patience": 5}


class Stream:
    """Stands for the jobs' stream: `ops` that ran outside of it, and the kinds of micro-steps that read a tensor's
    value."""

    def __init__(self) -> None:
        self.depth, self.outside = 0, list[str]()

    @contextmanager
    def entered(self) -> Iterator[None]:
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


class Watch(TorchDispatchMode):
    """Notes what runs outside of the stream."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._stream.depth:
            self._stream.outside.append(str(func))
        return func(*args, **(kwargs or {}))


def progress(messages: list[FromEngine]) -> object:
    return metrics_of([message for message in messages if isinstance(message, JobProgress)])


def test_everything_of_a_job_happens_on_its_stream(base: Base, tmp_path: Path) -> None:
    stream = Stream()
    bench = Bench(base, tmp_path, own_stream=stream.entered)
    spec = bench.place(CORPUS, job_spec(CORPUS, dropout=0.1, **CHANGES))
    with Watch(stream):
        bench.start(spec)
        bench.advance(spec.id, 3)
        bench.trainer.abandon(spec.id)
        messages = bench.run(spec.id, micro_steps=2)
        bench.trainer.drop(spec.id)
    assert isinstance(messages[-1], JobSucceeded)
    assert not stream.outside


def test_a_job_learns_the_same(base: Base, tmp_path: Path) -> None:
    plain, launched = Bench(base, tmp_path / "plain"), Bench(base, tmp_path / "launched", own_stream=Stream().entered)
    found = []
    for bench in (plain, launched):
        bench.start(bench.place(CORPUS, job_spec(CORPUS, dropout=0.1, **CHANGES)))
        found.append(progress(bench.run("job-1", micro_steps=3)))
    assert found[0] == found[1]


def test_results_are_read_in_micro_steps_of_their_own(
    base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So no launch waits for the device: the engine runs such a micro-step once the ones before are computed."""
    reads, read = list[MicroStep](), torch.Tensor.tolist
    bench = Bench(base, tmp_path, own_stream=Stream().entered)
    bench.start(bench.place(CORPUS, job_spec(CORPUS, **CHANGES)))
    now = MicroStep.BEGIN

    def tolist(tensor: torch.Tensor) -> object:
        if tensor.is_floating_point():
            reads.append(now)
        return read(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    monkeypatch.setattr(torch.Tensor, "item", tolist)
    before = list[MicroStep]()
    while not bench.trainer.finished("job-1"):
        before.append(now := bench.trainer.next_micro_step("job-1"))
        bench.trainer.advance("job-1", 1)
    assert reads and set(reads) == {MicroStep.RESULT}
    results = [kind for kind, then in pairwise(before) if then is MicroStep.RESULT]
    assert set(results) == {MicroStep.OPTIMIZER, MicroStep.EVALUATE_HEAD}


def test_memory_that_runs_out_in_a_launch_makes_the_micro_batches_smaller(base: Base, tmp_path: Path) -> None:
    plain, short = Bench(base, tmp_path / "plain"), Bench(base, tmp_path / "short", own_stream=Stream().entered)
    for bench in (plain, short):
        bench.start(bench.place(CORPUS, job_spec(CORPUS, micro_batch_tokens=64, batch_tokens=64)))
    whole = [message.metrics.loss for message in plain.run("job-1") if isinstance(message, JobProgress)]
    with out_of_memory_at([(EagerLayerPass, "backward")], lambda number: number == 2):
        messages = short.run("job-1", micro_steps=2)
    assert any(isinstance(message, JobNote) for message in messages) and isinstance(messages[-1], JobSucceeded)
    assert [m.metrics.loss for m in messages if isinstance(m, JobProgress)] == pytest.approx(whole)


def test_the_seconds_of_a_step_include_what_the_device_computes_between_two_launches(
    base: Base, tmp_path: Path
) -> None:
    seconds = []
    for own_stream in (None, Stream().entered):
        now = [0.0]
        bench = Bench(base, tmp_path / str(own_stream is None), clock=lambda now=now: now[0], own_stream=own_stream)
        bench.start(bench.place(CORPUS, job_spec(CORPUS)))
        while not (messages := bench.advance("job-1", 1)):
            now[0] += 1.0
        assert isinstance(messages[0], JobProgress)
        seconds.append((messages[0].metrics.seconds, now[0]))
    (taking_turns, _), (overlapped, passed) = seconds
    assert taking_turns == 0.0 and overlapped == passed > 0
