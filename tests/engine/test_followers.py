"""Other ranks follow rank 0: pages, steps and jobs are the same, and what rank 0 knows of their memory."""

from __future__ import annotations

import random
import shutil
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from coserve.core.cancellation import Cancellation, Cancelled
from coserve.core.errors import AdapterNotFound, EngineFault
from coserve.core.link.channel import Channel
from coserve.core.link.generation import Generate, RequestFailed
from coserve.core.link.jobs import JobFailed, JobNote, JobSucceeded
from coserve.core.link.link import FromEngine, PeerLost
from coserve.core.sampling import SamplingParams
from coserve.core.types import AdapterDigests, AdapterRef, Slo
from coserve.data.corpus.batch import Batch, Example
from coserve.engine.ranks.commands import Answer, AnyCommand, MeasurePool, RunVerb, command_decoder, command_encoder
from coserve.engine.ranks.executor import FollowersCopies, FollowersMemory, RankedExecutor, load_on_all
from coserve.engine.ranks.follower import FollowerParts
from coserve.engine.ranks.followers import Followers, RankLost
from coserve.engine.ranks.progress import Progress
from coserve.engine.ranks.trainer import RankedTrainer
from coserve.finetune.losses.loss import Ppo
from coserve.finetune.memory_limits import StepRecompute
from coserve.finetune.sessions.session import ForwardBackward, TrainingSession
from coserve.generate.execution.interface import StepExecutor
from coserve.generate.generator import Generator
from coserve.lora.store.store import AdapterStore
from coserve.memory.kv import KvCache
from coserve.model.base import Base, wrap_base
from coserve.model.fused import FusedBase
from coserve.model.lora import LoraWeights
from tests.support.executors import InTurn, eager, graphs
from tests.support.finetuning import Bench, alive, job_spec, random_corpus, tiny_base
from tests.support.following import Following
from tests.support.generation import adapter
from tests.support.lengths import OneMoreToken
from tests.support.tiny_models import VOCAB, tiny_model

PAGE, PAGES, ADAPTERS = 8, 36, 5
DRAWN = SamplingParams(max_tokens=9, temperature=1.2, top_k=30, repetition_penalty=1.2, ignore_eos=True, seed=7)
SCORED = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, prompt_logprobs=1)


class Rank:
    """What one rank computes with."""

    def __init__(self, executor: Callable[[Base, KvCache], StepExecutor]) -> None:
        self.base = wrap_base(tiny_model("llama"), name="llama", eos_token_ids=())
        self.kv = KvCache.for_base(self.base, PAGES * PAGE, PAGE)
        self.executor, self.reads = executor(self.base, self.kv), list[AdapterRef]()

    def read(self, ref: AdapterRef, digests: AdapterDigests | None) -> LoraWeights:
        self.reads.append(ref)
        if ref.id == "nobody":
            raise AdapterNotFound("no adapter")
        return adapter(self.base, int(ref.id[1:]), 1 + int(ref.id[1:]) % 3)


def followed(rank: Rank, tmp_path: Path) -> FollowerParts:
    return FollowerParts(rank.kv, rank.executor, Bench(rank.base, tmp_path).followed(), rank.read)


def through_graphs(base: Base, kv: KvCache) -> StepExecutor:
    return InTurn(graphs(FusedBase(base, compiled=False), kv, max_running=8))


@pytest.mark.parametrize(
    ("executor", "requests"), [(eager, 40), pytest.param(through_graphs, 4, marks=pytest.mark.slow)]
)
def test_pages_are_the_same_after_bursts_and_cancels(
    executor: Callable[[Base, KvCache], StepExecutor], requests: int, tmp_path: Path
) -> None:
    chance, leads, follows = random.Random(0), Rank(executor), Rank(executor)
    with Following(lambda _: followed(follows, tmp_path)) as following:
        followers = following.followers
        store = AdapterStore(load_on_all(leads.read, followers), 1, mirror=FollowersCopies(followers))
        ranked = RankedExecutor(leads.executor, followers)
        generator = Generator(
            leads.base, store, leads.kv, ranked, max_running=8, step_tokens=48, lengths=OneMoreToken()
        )
        running = list[str]()
        for i in range(requests):
            base_only = i % 6 == 5 or executor is not eager  # interpreted LoRA kernels are slow
            ref = None if base_only else AdapterRef(f"a{chance.randrange(ADAPTERS)}", 1)
            tokens = tuple(chance.randrange(3, VOCAB) for _ in range(chance.choice((1, 7, 20, 70))))
            sampling = chance.choice((DRAWN, DRAWN, SCORED))
            generator.add(Generate(id=str(i), prompt=tokens, sampling=sampling, adapter=ref, slo=Slo(ttft=1, tpot=1)))
            running.append(str(i))
            if chance.random() < 0.2:
                generator.cancel(chance.choice(running))
            for _ in range(chance.choice((0, 0, 1, 4))):
                assert not [message for message in generator.step() if isinstance(message, RequestFailed)]
        while generator.running:
            generator.step()
        with pytest.raises(AdapterNotFound):
            store.acquire(AdapterRef("nobody", 1))
        following.catch_up()
        assert generator.scheduler.preemptions > 0 or executor is not eager
        assert len(leads.reads) > ADAPTERS + 1 or executor is not eager, "host copies are evicted"
        assert follows.reads == leads.reads
        assert torch.equal(follows.kv.buffer.bytes, leads.kv.buffer.bytes)
        store.close()


def test_a_step_that_fails_on_one_rank_ends_the_engine(tmp_path: Path) -> None:
    leads, follows = Rank(eager), Rank(eager)
    following = Following(lambda _: followed(follows, tmp_path))
    with pytest.raises(RuntimeError, match="broken"), following:
        ranked = RankedExecutor(leads.executor, following.followers)
        generator = Generator(
            leads.base,
            AdapterStore(leads.read, 1 << 40),
            leads.kv,
            ranked,
            max_running=8,
            step_tokens=48,
            lengths=OneMoreToken(),
        )
        request = Generate(id="r", prompt=(5, 6), sampling=DRAWN, adapter=None, slo=Slo(ttft=1, tpot=1))
        generator.add(request)
        generator.step()
        forward = leads.base.model.forward
        leads.base.model.forward = _broken
        with pytest.raises(EngineFault, match="rank 0"):
            generator.step()
        generator.cancel("r")  # its last token was never sampled
        leads.base.model.forward, follows.base.model.forward = forward, _broken
        generator.add(msgspec.structs.replace(request, id="s"))
        generator.step()
        with pytest.raises(RankLost, match="rank 1 of 2 is gone"):
            following.catch_up()
        with pytest.raises(RankLost):
            generator.step()


def _broken(*_: object, **__: object) -> None:
    raise RuntimeError("broken")


def test_a_job_is_at_the_same_step_with_the_same_weights(tmp_path: Path) -> None:
    theirs, corpus = Bench(tiny_base("llama"), tmp_path / "1"), random_corpus()
    spec = theirs.place(corpus, job_spec(corpus, steps=4, checkpoint_steps=2))
    read = list[AdapterRef]()

    def reads(ref: AdapterRef, digests: AdapterDigests | None) -> LoraWeights:
        read.append(ref)
        return adapter(theirs.base, 0, 1)

    rank, begun = Rank(eager), set[str]()
    start_thread = lambda: begun.add(threading.current_thread().name.split("_")[0])
    following = Following(lambda _: FollowerParts(rank.kv, rank.executor, theirs.followed(), reads), start_thread)
    with following:
        bench = Bench(tiny_base("llama"), tmp_path / "0", kind=partial(RankedTrainer, followers=following.followers))
        bench.place(corpus, spec)
        ranked, cancellation = bench.trainer, Cancellation()
        cancellation.cancel()
        with pytest.raises(Cancelled):
            ranked.load(spec, cancellation)
        ranked.load(spec, Cancellation())()
        while not ranked.checkpoint_due(spec.id):
            ranked.advance(spec.id, 2)
        ranked.advance(spec.id, 3)  # dropped: the checkpoint is that of the step before
        write = ranked.checkpoint(spec.id)
        assert write is not None
        write()
        following.catch_up()
        states = [session.optimizer.snapshot()() for session in alive(TrainingSession)]
        assert len(states) == 2 and states[0].keys() == states[1].keys()
        assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
        shutil.copytree(bench.folder.job(spec.id), theirs.folder.job(spec.id), dirs_exist_ok=True)  # one, outside tests
        ranked.drop(spec.id)

        ranked.load(spec, Cancellation())()
        while not ranked.finished(spec.id):
            ranked.advance(spec.id, None)
        assert isinstance(ranked.publication(spec.id)()(), JobSucceeded)
        assert read == [AdapterRef(spec.adapter, spec.version)]
        ranked.drop(spec.id)

        shutil.rmtree(theirs.folder.job(spec.id) / "checkpoint-00000002")
        shutil.rmtree(bench.folder.adapter(read[0]))
        with pytest.raises(EngineFault, match="resumes from step 2 on rank 0, from step 0 on rank 1"):
            ranked.load(spec, Cancellation())
    assert begun == {"adapters", "jobs"}, "each thread has a current device of its own"


@pytest.mark.parametrize(
    ("error", "codes"),
    [(torch.OutOfMemoryError("CUDA out of memory"), []), (RuntimeError("broken"), ["internal_error"])],
)
def test_an_error_of_a_follower_in_a_slice_is_the_jobs_alone(
    error: Exception, codes: list[str], tmp_path: Path
) -> None:
    """Both ranks begin the step again with less memory, or the job ends; the next one trains."""
    theirs = Bench(tiny_base("llama"), tmp_path / "1")
    followed = theirs.followed()
    corpus, rank, left = random_corpus(), Rank(eager), [error]

    def fails(*_: object) -> None:
        if left:
            raise left.pop()

    theirs.base.layers[1].register_forward_pre_hook(fails)
    with Following(lambda _: FollowerParts(rank.kv, rank.executor, followed, rank.read)) as following:
        bench = Bench(tiny_base("llama"), tmp_path / "0", kind=partial(RankedTrainer, followers=following.followers))
        ranked = bench.trainer
        ended = list[FromEngine]()
        for job in ("first", "second"):
            spec = bench.place(corpus, theirs.place(corpus, job_spec(corpus, job, steps=2)))
            ranked.load(spec, Cancellation())()
            while not ranked.finished(job) and not any(isinstance(one, JobFailed) for one in ended):
                ended += ranked.advance(job, 2)
            following.catch_up()
            assert len(bench.trainer.notes) == (job == "first" and not codes)
            ranked.drop(job)
            failed = [one.code for one in ended if isinstance(one, JobFailed)]
            assert failed == (codes if job == "first" else [])
            noted = [one for one in ended if isinstance(one, JobNote)]
            assert len(noted) == (job == "first" and not codes)
            ended.clear()


def test_a_verb_arrives_as_it_was_sent() -> None:
    """Rows from outside, with the numbers that their loss reads."""
    row = Example(
        np.array([5, 6, 7], np.int32),
        np.array([0, 2]),
        np.array([[8, 9], [10, 11]]),
        weights_K=np.array([[0.5, -1.0], [2.0, 0.0]], np.float32),
    )
    sent = RunVerb(3, ForwardBackward(Batch((row,)), Ppo(low=0.7), StepRecompute(1, 2, True), 1 << 40, learns=True))
    came = command_decoder().decode(command_encoder().encode(sent))
    assert isinstance(came, RunVerb) and isinstance(came.verb, ForwardBackward)
    (found,), changes = came.verb.batch.examples, {"batch": Batch(())}
    assert msgspec.structs.replace(came.verb, **changes) == msgspec.structs.replace(sent.verb, **changes)
    for name in ("tokens_N", "after_K", "labels_K", "weights_K"):
        assert np.array_equal(getattr(found, name), getattr(row, name))
        assert getattr(found, name).dtype == getattr(row, name).dtype
    assert found.sampled_K is found.advantages_K is None


def test_an_answer_after_another_rank_is_gone_is_no_error_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    (ours, theirs), (gone_ours, gone) = socket.socketpair(), socket.socketpair()
    followers = Followers([ours, gone_ours], Progress())
    rank = Channel[Answer, AnyCommand](theirs, command_decoder())
    answers, asked = followers.ask(MeasurePool()), rank.receive()
    gone.close()
    with pytest.raises(RankLost, match="rank 2 of 3 is gone"):
        answers.wait()
    assert isinstance(asked, MeasurePool)
    rank.send(Answer(asked.number))
    with pytest.raises(PeerLost):
        rank.receive()
    rank.close()
    assert [each.getMessage() for each in caplog.records if each.levelname == "ERROR"] == ["rank 2 of 3 is gone"]


def never(tokens: int) -> object:
    raise AssertionError(tokens)


def test_the_last_answer_counts_and_nobody_waits_for_the_next() -> None:
    outside = [700, 500, 900, 800, 800]
    following = Following(never, outside=lambda: outside.pop(0))  # type: ignore[arg-type]
    memory = FollowersMemory(following.followers)
    try:
        found = []
        for _ in range(5):
            found.append(memory.taken())
            following.catch_up()
        assert found == [0, 0, 0, 400, 300], "beyond the least so far"
    finally:
        following.followers.close()
