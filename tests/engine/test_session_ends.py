"""Ends of clients' training sessions in the engine."""

from __future__ import annotations

from pathlib import Path

from coserve.api.sessions.sessions import session_spec
from coserve.core.link.jobs import JobCancelled, JobStarted
from coserve.core.link.link import FromEngine
from coserve.core.types import LoraSettings
from coserve.engine.job_runner import JobPlaces, JobRunner
from coserve.finetune.trainer import Trainer
from tests.support.fake_ports import Inline
from tests.support.finetuning import Bench, tiny_base


class Stubborn(Trainer):
    def abandon(self, job: str, *, finish_update: bool = False) -> None:
        raise ZeroDivisionError


def test_a_session_whose_call_cannot_be_abandoned_ends_alone(tmp_path: Path) -> None:
    said = list[FromEngine]()
    trainer = Bench(tiny_base("llama"), tmp_path, kind=Stubborn).trainer
    jobs = JobRunner(trainer, said.append, JobPlaces(1, Inline()), changed=lambda: None)
    jobs.open(session_spec("one", LoraSettings(r=4), 7, 16, None, with_optimizer=False))
    jobs.activate()
    jobs.cancel("one")
    assert [type(message) for message in said] == [JobStarted, JobCancelled]
