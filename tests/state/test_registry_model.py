"""The registry against a model of dictionaries: whatever is called in whatever order, reopened in between."""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coserve.core.errors import AdapterBusy, AdapterNotFound, StorageFull, WrongJobState
from coserve.core.training.jobs import JobState
from coserve.core.types import AdapterRef
from coserve.state.failpoints import armed
from coserve.state.registry.registry import Registry
from tests.support.examples import examples
from tests.support.records import make_adapter, make_job, make_metrics

NAMES = st.sampled_from(["bard", "poet", "sage"])
STATES = st.sampled_from([state for state in JobState if state is not JobState.SUCCEEDED])


@dataclass
class ModelJob:
    id: str
    adapter: str
    version: int
    init_from: AdapterRef | None
    state: JobState = JobState.QUEUED
    steps: list[int] = field(default_factory=list)
    events: int = 1


class RegistryMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "registry.sqlite3"
        self.registry = Registry(self.path, clock=lambda: 5.0)
        self.jobs: dict[str, ModelJob] = {}
        self.keys: dict[str, str] = {}
        self.adapters: set[AdapterRef] = set()
        self.last: dict[str, int] = {}
        self.current: dict[str, int] = {}
        """What each name means."""
        self.ids = (f"job-{n}" for n in itertools.count())

    def teardown(self) -> None:
        self.registry.check()
        self.registry.close()
        self.folder.cleanup()

    def some_job(self, data: st.DataObject) -> ModelJob:
        return data.draw(st.sampled_from(list(self.jobs.values())))

    @rule(name=NAMES, key=st.sampled_from([None, "k1", "k2"]), source=st.none() | NAMES)
    def create_job(self, name: str, key: str | None, source: str | None) -> None:
        version = self.registry.next_version(name)
        assert version == self.last.get(name, 0) + 1
        init_from = None if source is None else AdapterRef(source, 1)
        made = self.registry.create_job(make_job(next(self.ids), name, version, init_from), idempotency_key=key)
        if key in self.keys:
            assert made.spec.id == self.keys[key]
            return
        if key is not None:
            self.keys[key] = made.spec.id
        self.last[name] = version
        self.jobs[made.spec.id] = ModelJob(made.spec.id, name, version, init_from)

    @rule(name=NAMES)
    def import_adapter(self, name: str) -> None:
        ref = self.registry.reserve_version(name)
        assert ref == AdapterRef(name, self.last.get(name, 0) + 1)
        self.last[name] = ref.version
        self.registry.add_adapter(make_adapter(name, ref.version))
        self.published(ref)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), state=STATES)
    def set_state(self, data: st.DataObject, state: JobState) -> None:
        job = self.some_job(data)
        if job.state.can_become(state):
            self.registry.set_state(job.id, state)
            job.state = state
            job.events += 1
        else:
            with pytest.raises(WrongJobState):
                self.registry.set_state(job.id, state)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def start_and_step(self, data: st.DataObject) -> None:
        job = self.some_job(data)
        if job.state.terminal:
            with pytest.raises(WrongJobState):
                self.registry.record_start(job.id, 100, 0)
            return
        resumed = data.draw(st.integers(0, len(job.steps)))
        self.registry.record_start(job.id, 100, resumed)
        self.registry.record_step(job.id, make_metrics(resumed + 1, 100))
        job.state = JobState.RUNNING
        job.steps = [*job.steps[:resumed], resumed + 1]
        job.events += 2

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def succeed(self, data: st.DataObject) -> None:
        job = self.some_job(data)
        record = make_adapter(job.adapter, job.version, source=f"job:{job.id}")
        if job.state is JobState.RUNNING:
            assert self.registry.succeed(job.id, record).result == record.ref
            job.state = JobState.SUCCEEDED
            job.events += 1
            self.published(record.ref)
        else:
            with pytest.raises(WrongJobState):
                self.registry.succeed(job.id, record)

    def published(self, ref: AdapterRef) -> None:
        if ref.version > max((other.version for other in self.adapters if other.id == ref.id), default=0):
            self.current[ref.id] = ref.version
        self.adapters.add(ref)

    @rule(name=NAMES, version=st.integers(1, 4))
    def roll_back(self, name: str, version: int) -> None:
        ref = AdapterRef(name, version)
        if ref not in self.adapters:
            with pytest.raises(AdapterNotFound):
                self.registry.roll_back(ref)
        else:
            assert self.registry.roll_back(ref).ref == ref
            self.current[name] = version

    @rule(name=NAMES, version=st.integers(1, 4))
    def delete_version(self, name: str, version: int) -> None:
        ref = AdapterRef(name, version)
        if ref not in self.adapters:
            with pytest.raises(AdapterNotFound):
                self.registry.delete_version(ref)
        elif any(not job.state.terminal and job.init_from == ref for job in self.jobs.values()):
            with pytest.raises(AdapterBusy):
                self.registry.delete_version(ref)
        else:
            self.registry.delete_version(ref)
            self.adapters.discard(ref)
            left = [other.version for other in self.adapters if other.id == name]
            if self.current[name] == version:
                older = [other for other in left if other < version]
                self.current[name] = max(older or left, default=0)

    @invariant()
    def a_name_means_one_of_its_versions(self) -> None:
        for name in ("bard", "poet", "sage"):
            versions = [ref.version for ref in self.adapters if ref.id == name]
            assert self.registry.current_version(name) == (self.current[name] if versions else None)
            if versions:
                assert self.registry.adapter(name).ref.version == self.current[name]
        shown = [(record.ref.id, record.ref.version) for record in self.registry.adapters()]
        assert shown == sorted((name, self.current[name]) for name in {ref.id for ref in self.adapters})

    @rule(name=NAMES)
    def delete_adapter(self, name: str) -> None:
        refs = sorted(ref for ref in self.adapters if ref.id == name)
        busy = any(
            not job.state.terminal and (job.adapter == name or (job.init_from is not None and job.init_from.id == name))
            for job in self.jobs.values()
        )
        if not refs:
            with pytest.raises(AdapterNotFound):
                self.registry.delete_adapter(name)
        elif busy:
            with pytest.raises(AdapterBusy):
                self.registry.delete_adapter(name)
        else:
            assert self.registry.delete_adapter(name) == refs
            self.adapters -= set(refs)

    @rule(name=NAMES)
    def full_disk(self, name: str) -> None:
        version = self.registry.next_version(name)
        with armed("registry.before_commit=ENOSPC"), pytest.raises(StorageFull):
            self.registry.create_job(make_job("refused", name, version))

    @rule()
    def reopen(self) -> None:
        self.registry.close()
        self.registry = Registry(self.path, clock=lambda: 5.0)

    @invariant()
    def jobs_agree(self) -> None:
        listed = self.registry.jobs()
        assert [job.spec.id for job in listed] == list(self.jobs)[::-1]
        for record in listed:
            job = self.jobs[record.spec.id]
            assert record.state is job.state
            assert record.step == len(job.steps)
            assert record.trained_tokens == 10 * len(job.steps)
            assert (record.finished_at is not None) == job.state.terminal
            assert [event.seq for event in self.registry.events(job.id)] == list(range(1, job.events + 1))
        unfinished = [job.id for job in self.jobs.values() if not job.state.terminal]
        assert [job.spec.id for job in self.registry.unfinished()] == unfinished

    @invariant()
    def adapters_agree(self) -> None:
        assert self.registry.adapter_refs() == sorted(self.adapters)
        names = sorted({ref.id for ref in self.adapters})
        assert [record.ref.id for record in self.registry.adapters()] == names
        for name in names:
            versions = sorted(ref for ref in self.adapters if ref.id == name)
            assert [record.ref for record in self.registry.versions(name)] == versions


TestRegistryMachine = RegistryMachine.TestCase
TestRegistryMachine.settings = settings(max_examples=examples(25), stateful_step_count=25, deadline=None)
