"""A job that fails in its own part of a pass that others share, with the real trainer."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from coserve.core.link.jobs import JobFailed, JobSucceeded, StartJob
from coserve.core.names import ADAPTER_WEIGHTS
from coserve.core.types import AdapterRef
from coserve.engine.job_runner import JobPlaces
from coserve.finetune.memory_limits import BatchLimits
from coserve.queues.policy import Decision, Train, View, Wait
from tests.support.fake_ports import FREE, FakeGenerator, Inline, Meter
from tests.support.finetuning import Bench, job_spec, random_corpus, tiny_base
from tests.support.local_engine import running_engine

CORPUS = random_corpus(9, (4, 4, 6, 4))


class MicroStepByMicroStep:
    """Once both jobs are there: as slices are while deadlines leave little time."""

    def __init__(self) -> None:
        self._begun = False

    def decide(self, view: View, now: float) -> Decision:
        self._begun = self._begun or len(view.jobs) == 2
        return Train(view.jobs[0], 1) if self._begun and view.jobs else Wait(None)


async def test_the_leader_of_a_pass_that_fails_ends_itself_alone(tmp_path: Path) -> None:
    """Its gradients are not finite; the other job's update is still to come then, in a later slice."""
    bench = Bench(tiny_base("llama"), tmp_path, limits=BatchLimits(64))
    bench.train(bench.place(CORPUS, job_spec(CORPUS, "start", adapter="start", seed=9, steps=1, batch_tokens=8)))
    start = AdapterRef("start", 1)
    weights = bench.folder.adapter(start) / ADAPTER_WEIGHTS
    save_file({name: torch.full_like(tensor, 3e38) for name, tensor in load_file(weights).items()}, weights)
    leader = job_spec(CORPUS, "leader", adapter="leader", steps=6, batch_tokens=8, init_from=start)
    other = job_spec(CORPUS, "other", adapter="other", seed=1, steps=6, batch_tokens=8)
    generator, ended = FakeGenerator(Meter(), FREE, 16, random.Random(0), 0.0), dict[str, object]()
    jobs = JobPlaces(2, Inline())
    async with running_engine(generator, bench.trainer, MicroStepByMicroStep(), jobs=jobs) as api:
        for spec in (leader, other):
            bench.place(CORPUS, spec)
            api.send(StartJob(spec=spec))
        while len(ended) < 2:
            match await api.receive():
                case JobFailed(id=id, code=code):
                    ended[id] = code
                case JobSucceeded(id=id):
                    ended[id] = "succeeded"
    assert ended == {"leader": "non_finite_loss", "other": "succeeded"}
