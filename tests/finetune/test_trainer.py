from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from coserve.admission.recompute_plan import RecomputePlan
from coserve.core.errors import AdapterNotFound, CheckpointUnreadable, CorruptAdapter, InvalidRequest, StorageFull
from coserve.core.link.jobs import JobCheckpoint, JobFailed, JobProgress, JobSucceeded, JobWaiting
from coserve.core.names import ADAPTER_WEIGHTS, CHECKPOINT_STATE, CHECKPOINT_TENSORS
from coserve.core.training.micro_step import MicroStep
from coserve.core.training.settings import Schedule
from coserve.core.types import AdapterRef, LoraSettings
from coserve.data.corpus.tokenized import Corpus
from coserve.finetune.init import new_adapter
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.lora.files.peft import inspect_adapter
from coserve.lora.store.files import load_adapter
from coserve.model.base import Base
from coserve.model.lora import LoraWeights
from coserve.state.failpoints import armed
from tests.support.examples import by_day
from tests.support.finetuning import Bench, job_spec, metrics_of, random_corpus, tiny_base
from tests.support.lora_reference import adapted, alone
from tests.support.tiny_models import tiny_model

CORPUS = random_corpus()
REF = AdapterRef("learned", 1)
TOKENS = torch.arange(6)


def saved_tensors(bench: Bench) -> dict[str, torch.Tensor]:
    return load_file(bench.folder.adapter(REF) / "adapter_model.safetensors")


def same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_job_learns_and_publishes(base: Base, tmp_path: Path) -> None:
    bench = Bench(base, tmp_path)
    spec = bench.place(
        CORPUS, job_spec(CORPUS, steps=25, checkpoint_steps=10, schedule=Schedule.COSINE, warmup_steps=3)
    )
    messages = bench.train(spec)
    metrics = metrics_of(messages)
    assert [m.step for m in metrics] == list(range(1, 26))
    assert metrics[-1].loss < metrics[0].loss - 0.5
    assert (
        metrics[0].learning_rate < metrics[3].learning_rate == spec.training.learning_rate > metrics[-1].learning_rate
    )
    assert [m.step for m in messages if isinstance(m, JobCheckpoint)] == [10, 20]
    done = messages[-1]
    assert done == JobSucceeded(id=spec.id, ref=REF)
    assert bench.store.resident() == (REF,)
    served = bench.store.acquire(REF)
    saved = load_adapter(bench.folder.adapter(REF), base.spec, dtype=torch.float32)
    assert torch.equal(adapted(base, served, TOKENS), adapted(base, saved, TOKENS))
    assert all(not pair.a_RD.requires_grad for pair in served.sites.values())


@pytest.mark.parametrize("micro_steps", by_day([1, 3, 7], 3))
def test_slices_change_nothing(base: Base, tmp_path: Path, micro_steps: int) -> None:
    whole, cut = Bench(base, tmp_path / "whole"), Bench(base, tmp_path / "cut")
    expected = whole.train(whole.place(CORPUS, job_spec(CORPUS, validation_split=0.3, eval_steps=2)))
    assert (
        cut.train(cut.place(CORPUS, job_spec(CORPUS, validation_split=0.3, eval_steps=2)), micro_steps=micro_steps)
        == expected
    )


def test_advance_stops_at_the_end_of_a_micro_batch(base: Base, tmp_path: Path) -> None:
    bench = Bench(base, tmp_path)
    spec = bench.place(CORPUS, job_spec(CORPUS, batch_tokens=100, micro_batch_tokens=16, steps=1))
    bench.start(spec)
    assert not bench.trainer.mid_batch(spec.id)
    assert bench.advance(spec.id, 2) == [] and bench.trainer.mid_batch(spec.id)
    assert bench.advance(spec.id, None) == [] and not bench.trainer.mid_batch(spec.id)
    slices = list[tuple[MicroStep, int]]()
    while not slices or bench.trainer.mid_batch(spec.id):
        kind = bench.trainer.next_micro_step(spec.id)
        assert bench.advance(spec.id, 1000) == []
        slices.append((kind, bench.trainer.micro_steps_done))
    layers = len(base.layers)
    assert slices == [
        (MicroStep.BEGIN, 1),
        (MicroStep.FORWARD, layers - 1),
        (MicroStep.HEAD, 1),
        (MicroStep.BACKWARD, layers),
    ], "a slice is of one kind"
    assert isinstance(bench.run(spec.id)[-1], JobSucceeded)


def test_jobs_that_alternate_learn_what_they_learn_alone(base: Base, tmp_path: Path) -> None:
    other_corpus = random_corpus(5)
    specs = [
        (CORPUS, job_spec(CORPUS, "one", dropout=0.2)),
        (other_corpus, job_spec(other_corpus, "two", adapter="other", r=2, seed=1, targets=("q_proj", "down_proj"))),
    ]
    alone, together = Bench(base, tmp_path / "alone"), Bench(base, tmp_path / "together")
    expected = [metrics_of(alone.train(alone.place(corpus, spec))) for corpus, spec in specs]
    for corpus, spec in specs:
        together.start(together.place(corpus, spec))
    found = {spec.id: [] for _, spec in specs}
    for turn in range(200):
        for id, messages in found.items():
            if not messages or not isinstance(messages[-1], JobSucceeded):
                messages += together.advance(id, 1 + turn % 4)
    assert [metrics_of(messages) for messages in found.values()] == expected


RESUMED = {
    "plain": {},
    "dropout": {"dropout": 0.3, "weight_decay": 0.1, "lora_plus_ratio": 4.0},
    "neftune": {"neftune_alpha": 5.0, "validation_split": 0.3, "eval_steps": 2},
    "validation": {"validation_split": 0.3, "eval_steps": 2, "early_stopping_patience": 1},
    "dora": {"use_dora": True, "validation_split": 0.3, "eval_steps": 2, "early_stopping_patience": 1},
    "bd-lora": {"bd_blocks": 2, "validation_split": 0.3, "eval_steps": 2, "early_stopping_patience": 1},
}


CUTS = [("plain", 17), ("dropout", 17), ("bd-lora", 17)]
MORE_CUTS = [("plain", 1), ("dropout", 9), ("neftune", 5), ("neftune", 32), ("validation", 17), ("validation", 32)]


@pytest.mark.parametrize("case", by_day([*CUTS, *MORE_CUTS], *CUTS), ids=str)
def test_a_resumed_job_ends_as_the_uninterrupted_one(base: Base, tmp_path: Path, case: tuple[str, int]) -> None:
    """Cut after any number of micro-steps, in the middle of an epoch, of a micro-batch or of an evaluation."""
    changes, cut_at = RESUMED[case[0]], case[1]
    whole, cut = Bench(base, tmp_path / "whole"), Bench(base, tmp_path / "cut")
    spec = job_spec(CORPUS, steps=6, checkpoint_steps=2, **changes)
    expected = whole.train(whole.place(CORPUS, spec))
    cut.start(cut.place(CORPUS, spec))
    before = [m for _ in range(cut_at) for m in cut.advance(spec.id, 1)]
    assert not isinstance(before[-1] if before else None, JobSucceeded)
    cut.save(spec.id)
    again = Bench(base, tmp_path / "cut")
    started = again.start(spec)
    after = again.run(spec.id)
    steps = {m.step: m for m in [*metrics_of(before), *metrics_of(after)]}
    assert list(steps.values()) == metrics_of(expected)
    assert started.resumed_from in (len(metrics_of(before)), len(metrics_of(before)) + 1)
    assert after[-1] == expected[-1]
    assert same_tensors(saved_tensors(whole), saved_tensors(again))


def test_checkpoints_are_few_and_not_repeated(base: Base, tmp_path: Path) -> None:
    bench = Bench(base, tmp_path, keep_checkpoints=2)
    spec = bench.place(CORPUS, job_spec(CORPUS, steps=8, checkpoint_steps=1))
    bench.start(spec)
    assert bench.save(spec.id) is None
    bench.run(spec.id, until=lambda m: isinstance(m, JobCheckpoint) and m.step == 5)
    assert [step for step, _ in bench.folder.checkpoints(spec.id)] == [4, 5]
    assert bench.save(spec.id) is None
    bench.advance(spec.id, 1)
    assert bench.trainer.mid_batch(spec.id)
    assert bench.save(spec.id) is None and not bench.trainer.mid_batch(spec.id)


@pytest.mark.parametrize(
    "damage", by_day(["truncate", "garbage", "missing", "state", "other_job", "other_rank"], "truncate", "other_rank")
)
def test_a_damaged_checkpoint_is_left_aside(base: Base, tmp_path: Path, damage: str) -> None:
    whole, cut = Bench(base, tmp_path / "whole"), Bench(base, tmp_path / "cut")
    spec = job_spec(CORPUS, steps=6, checkpoint_steps=2)
    expected = whole.train(whole.place(CORPUS, spec))
    cut.start(cut.place(CORPUS, spec))
    cut.run(spec.id, until=lambda m: isinstance(m, JobCheckpoint) and m.step == 4)
    last = cut.folder.checkpoint(spec.id, 4)
    match damage:
        case "truncate":
            (last / CHECKPOINT_TENSORS).write_bytes((last / CHECKPOINT_TENSORS).read_bytes()[:-8])
        case "garbage":
            (last / CHECKPOINT_TENSORS).write_bytes(b"\x80\x04garbage")
        case "missing":
            (last / CHECKPOINT_TENSORS).unlink()
        case "state":
            (last / CHECKPOINT_STATE).write_text("{")
        case "other_job":
            state = json.loads((last / CHECKPOINT_STATE).read_text())
            (last / CHECKPOINT_STATE).write_text(json.dumps(state | {"job": "job-2"}))
        case "other_rank":
            (last / CHECKPOINT_TENSORS).write_bytes(_tensors_of_rank(base, tmp_path, 2))
    again = Bench(base, tmp_path / "cut", keep_checkpoints=1)
    assert again.start(spec).resumed_from == 2
    after = again.run(spec.id, until=lambda m: isinstance(m, JobCheckpoint))
    assert [step for step, _ in again.folder.checkpoints(spec.id)] == [4], "the new one stays, not the damaged one"
    after += again.run(spec.id)
    assert metrics_of(after) == metrics_of(expected)[2:] and after[-1] == expected[-1]


def _tensors_of_rank(base: Base, tmp_path: Path, rank: int) -> bytes:
    other = Bench(base, tmp_path / "other")
    other.start(other.place(CORPUS, job_spec(CORPUS, r=rank, checkpoint_steps=1)))
    other.run("job-1", until=lambda m: isinstance(m, JobCheckpoint))
    return (other.folder.checkpoint("job-1", 1) / CHECKPOINT_TENSORS).read_bytes()


def test_recomputing_gives_the_same_job(base: Base, tmp_path: Path) -> None:
    kept, recomputed = Bench(base, tmp_path / "kept"), Bench(base, tmp_path / "recomputed", recompute=True)
    spec = job_spec(CORPUS, dropout=0.2, neftune_alpha=5.0)
    expected = kept.train(kept.place(CORPUS, spec))
    assert expected == recomputed.train(recomputed.place(CORPUS, spec))
    some = Bench(base, tmp_path / "some")
    some.start(some.place(CORPUS, spec))
    some.trainer.limit(spec.id, RecomputePlan(1 << 20, recomputed=1))
    assert expected == some.run(spec.id)


def test_continuing_an_adapter_starts_from_its_files(base: Base, tmp_path: Path) -> None:
    bench = Bench(base, tmp_path)
    bench.train(bench.place(CORPUS, job_spec(CORPUS, steps=12)))
    onward = bench.place(CORPUS, job_spec(CORPUS, "job-2", version=2, init_from=REF, learning_rate=1e-9, steps=1))
    bench.train(onward)
    one, two = (bench.store.acquire(AdapterRef("learned", version)) for version in (1, 2))
    torch.testing.assert_close(adapted(base, one, TOKENS), adapted(base, two, TOKENS))
    fresh = new_adapter(LoraSettings(r=4), base.spec, seed=7, dtype=torch.float32, device="cpu")
    assert (adapted(base, fresh, TOKENS) - adapted(base, two, TOKENS)).abs().max() > 0.1


def test_a_dora_job_publishes_what_peft_computes(base: Base, tmp_path: Path) -> None:
    """And a job that continues it begins there."""
    bench = Bench(base, tmp_path)
    bench.train(bench.place(CORPUS, job_spec(CORPUS, steps=6, use_dora=True, learning_rate=0.05)))
    onward = job_spec(CORPUS, "job-2", version=2, init_from=REF, learning_rate=1e-9, steps=1)
    bench.train(bench.place(CORPUS, onward))
    model = PeftModel.from_pretrained(tiny_model("llama"), str(bench.folder.adapter(REF))).eval()
    tokens_T = torch.arange(3, 15)
    for version in (1, 2):
        served = bench.store.acquire(AdapterRef("learned", version))
        torch.testing.assert_close(adapted(base, served, tokens_T), alone(model, tokens_T), rtol=1e-4, atol=1e-4)
    learned = load_adapter(bench.folder.adapter(REF), base.spec, dtype=torch.float32)
    first = base.begun(new_adapter(learned.settings, base.spec, seed=0, dtype=torch.float32, device="cpu"))
    for site, pair in learned.sites.items():
        assert not torch.equal(pair.magnitude_O, first.sites[site].magnitude_O)


def test_continuing_keeps_the_blocks(base: Base, tmp_path: Path) -> None:
    bench = Bench(base, tmp_path)
    bench.train(bench.place(CORPUS, job_spec(CORPUS, steps=12, bd_blocks=2)))
    settings = inspect_adapter(bench.folder.adapter(REF), base.spec).settings
    spec = job_spec(CORPUS, "job-2", version=2, init_from=REF, learning_rate=1e-9, steps=1)
    for lora in (settings, LoraSettings(r=4)):  # the files count, whatever the job's record says
        onward = bench.place(CORPUS, msgspec.structs.replace(spec, lora=lora))
        bench.train(onward)
        one, two = (bench.store.acquire(AdapterRef("learned", version)) for version in (1, 2))
        torch.testing.assert_close(adapted(base, one, TOKENS), adapted(base, two, TOKENS))
        for site, pair in two.sites.items():
            assert max(pair.a_blocks, pair.b_blocks) == 2 and pair.a_RD.shape == one.sites[site].a_RD.shape
        saved = json.loads((bench.folder.adapter(AdapterRef("learned", 2)) / "adapter_config.json").read_text())
        assert saved["use_bdlora"]["nblocks"] == 2
        bench.store.release(AdapterRef("learned", 2))
        bench.store.drop(AdapterRef("learned", 2))


@pytest.mark.parametrize("value", [3e38, 1e30])
def test_a_continued_adapter_that_overflows_is_named(base: Base, tmp_path: Path, value: float) -> None:
    bench = Bench(base, tmp_path)
    bench.train(bench.place(CORPUS, job_spec(CORPUS, steps=1)))
    weights = bench.folder.adapter(REF) / ADAPTER_WEIGHTS
    save_file({name: torch.full_like(tensor, value) for name, tensor in load_file(weights).items()}, weights)
    messages = bench.train(bench.place(CORPUS, job_spec(CORPUS, "job-2", version=2, init_from=REF, steps=1)))
    failed = messages[-1]
    assert isinstance(failed, JobFailed) and failed.code == "non_finite_loss"
    assert f"before the first update; continue_from names {REF}" in failed.message


def test_what_cannot_start_says_why(base: Base, tmp_path: Path) -> None:
    bench = Bench(base, tmp_path)
    spec = job_spec(CORPUS)
    with pytest.raises(CheckpointUnreadable, match="corpus"):
        bench.start(spec)
    bench.place(CORPUS, spec)
    with pytest.raises(AdapterNotFound):
        bench.start(job_spec(CORPUS, init_from=AdapterRef("nobody", 3)))
    with pytest.raises(InvalidRequest, match="targets"):
        bench.start(job_spec(CORPUS, targets=("nowhere",)))
    with pytest.raises(InvalidRequest):
        bench.start(job_spec(CORPUS, learning_rate=float("nan")))
    folder = bench.folder.adapter(AdapterRef("broken", 1))
    folder.mkdir(parents=True)
    with pytest.raises(CorruptAdapter):
        bench.start(job_spec(CORPUS, init_from=AdapterRef("broken", 1)))
    large = random_corpus()
    large.tokens[3] = 5000
    bench.place(large, spec)
    with pytest.raises(CheckpointUnreadable, match="tokens that the base does not know"):
        bench.start(spec)
    bench.place(CORPUS, spec)
    assert bench.start(spec).resumed_from == 0


def test_a_loss_that_is_not_finite_fails_the_job(tmp_path: Path) -> None:
    own = tiny_base("llama")
    bench = Bench(own, tmp_path)
    spec = bench.place(CORPUS, job_spec(CORPUS, steps=8))
    bench.start(spec)
    bench.run(spec.id, until=lambda m: isinstance(m, JobProgress))
    with torch.no_grad():
        own.model.lm_head.weight[5] = float("inf")
    (failed,) = bench.run(spec.id)
    assert isinstance(failed, JobFailed) and failed.code == "non_finite_loss"
    assert bench.store.resident() == () and not bench.folder.adapter(REF).exists()


def test_a_diverging_job_fails(base: Base, tmp_path: Path) -> None:
    bench = Bench(base, tmp_path)
    changes = {"learning_rate": 100, "max_grad_norm": 0, "weight_decay": 1e15, "steps": 9}
    messages = bench.train(bench.place(CORPUS, job_spec(CORPUS, **changes)))
    assert isinstance(messages[-1], JobFailed) and messages[-1].code == "non_finite_loss"


def test_weights_that_the_last_step_broke_are_not_published(
    base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slices = AdapterOptimizer.slices

    def breaking(self: AdapterOptimizer, norm: float, learning_rate: float) -> Iterator[None]:
        yield from slices(self, norm, learning_rate)
        self.state[0][0] = float("nan")

    monkeypatch.setattr(AdapterOptimizer, "slices", breaking)
    bench = Bench(base, tmp_path)
    messages = bench.train(bench.place(CORPUS, job_spec(CORPUS, steps=1)))
    assert isinstance(messages[-1], JobFailed) and messages[-1].code == "non_finite_loss"
    assert bench.store.resident() == () and not bench.folder.adapter(REF).exists()


def test_validation_measures_held_back_rows(base: Base, tmp_path: Path) -> None:
    bench = Bench(base, tmp_path)
    metrics = metrics_of(
        bench.train(bench.place(CORPUS, job_spec(CORPUS, validation_split=0.3, eval_steps=3, steps=7)))
    )
    assert [m.step for m in metrics if m.valid_loss is not None] == [3, 6, 7]
    for metric in metrics:
        assert metric.perplexity == pytest.approx(math.exp(metric.loss))
        assert metric.token_accuracy is not None
        right = metric.token_accuracy * metric.target_tokens
        assert 0 <= right <= metric.target_tokens and right == pytest.approx(round(right))
        if metric.valid_loss is None:
            assert (metric.valid_perplexity, metric.valid_token_accuracy) == (None, None)
        else:
            assert metric.valid_perplexity == pytest.approx(math.exp(metric.valid_loss))
            assert metric.valid_token_accuracy is not None and 0 <= metric.valid_token_accuracy <= 1


@pytest.mark.slow
def test_the_accuracy_of_a_corpus_that_is_learned_by_heart(base: Base, tmp_path: Path) -> None:
    tokens = np.tile(np.arange(2, 10, dtype=np.int32), 4)
    corpus = Corpus(tokens, (tokens > 2).astype(np.uint8), np.arange(0, 33, 8))
    spec = job_spec(corpus, steps=40, learning_rate=0.05)
    bench = Bench(base, tmp_path)
    metrics = metrics_of(bench.train(bench.place(corpus, spec)))
    assert metrics[0].token_accuracy is not None and metrics[0].token_accuracy < 0.5
    assert metrics[-1].token_accuracy == 1.0


def test_early_stopping_publishes_the_best_weights(base: Base, tmp_path: Path) -> None:
    bench = Bench(base, tmp_path)
    changes = {"validation_split": 0.3, "eval_steps": 1, "steps": 40, "learning_rate": 0.05}
    spec = bench.place(CORPUS, job_spec(CORPUS, early_stopping_patience=2, **changes))
    metrics = metrics_of(bench.train(spec))
    losses = [m.valid_loss for m in metrics if m.valid_loss is not None]
    assert len(metrics) < 40 and min(losses) == losses[-3]
    best = losses.index(min(losses)) + 1
    assert (metrics[-1].best_step, metrics[-1].best_valid_loss) == (best, min(losses))
    assert [m.best_step for m in metrics[:2]] == [1, 1 if losses[0] <= losses[1] else 2]
    short = Bench(base, tmp_path / "short")
    constant = {"schedule": Schedule.CONSTANT, "warmup_steps": 0}
    long = bench.place(CORPUS, job_spec(CORPUS, "job-2", version=2, early_stopping_patience=2, **changes, **constant))
    best = _best_step(metrics_of(bench.train(long)))
    short.train(short.place(CORPUS, job_spec(CORPUS, **(changes | {"steps": best}), **constant)))
    stopped = bench.store.acquire(AdapterRef("learned", 2))
    assert torch.equal(adapted(base, stopped, TOKENS), adapted(base, short.store.acquire(REF), TOKENS))


def _best_step(metrics) -> int:
    return min((m.valid_loss, m.step) for m in metrics if m.valid_loss is not None)[1]


def test_a_checkpoint_holds_its_step_however_far_the_job_is_when_it_is_written(base: Base, tmp_path: Path) -> None:
    at_once, late = Bench(base, tmp_path / "at_once"), Bench(base, tmp_path / "late")
    spec = job_spec(CORPUS, steps=6, checkpoint_steps=2, validation_split=0.3, eval_steps=1, early_stopping_patience=6)
    at_once.start(at_once.place(CORPUS, spec))
    at_once.run(spec.id, until=lambda m: isinstance(m, JobCheckpoint) and m.step == 2)
    late.start(late.place(CORPUS, spec))
    while not late.trainer.checkpoint_due(spec.id):
        late.trainer.advance(spec.id, None)
    write = late.trainer.checkpoint(spec.id)
    assert write is not None and not late.trainer.checkpoint_due(spec.id)
    while not metrics_of(late.trainer.advance(spec.id, None)):
        pass
    assert write() == JobCheckpoint(id=spec.id, step=2)
    files = [bench.folder.checkpoint(spec.id, 2) for bench in (at_once, late)]
    assert (files[0] / CHECKPOINT_TENSORS).read_bytes() == (files[1] / CHECKPOINT_TENSORS).read_bytes()
    assert (files[0] / CHECKPOINT_STATE).read_bytes() == (files[1] / CHECKPOINT_STATE).read_bytes()


def test_no_memory_for_a_copy_of_the_adapter_does_not_fail_its_job(
    base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(weights: LoraWeights) -> LoraWeights:
        raise torch.OutOfMemoryError("no pinned memory")

    bench = Bench(base, tmp_path)
    monkeypatch.setattr(bench.store, "host_copy", full)
    spec = bench.place(CORPUS, job_spec(CORPUS))
    assert bench.train(spec)[-1] == JobSucceeded(id=spec.id, ref=REF)
    assert bench.store.resident() == ()
    assert bench.folder.adapter(REF).is_dir()


def test_a_version_is_in_memory_once_its_publication_is_committed(base: Base, tmp_path: Path) -> None:
    bench = Bench(base, tmp_path)
    spec = bench.place(CORPUS, job_spec(CORPUS))
    bench.start(spec)
    while not bench.trainer.finished(spec.id):
        bench.trainer.advance(spec.id, None)
    commit = bench.trainer.publication(spec.id)()
    assert bench.folder.adapter(REF).is_dir() and bench.store.resident() == ()
    assert commit() == JobSucceeded(id=spec.id, ref=REF)
    assert bench.store.resident() == (REF,)


def test_a_full_disk_costs_a_checkpoint_not_the_job(base: Base, tmp_path: Path) -> None:
    bench = Bench(base, tmp_path)
    spec = bench.place(CORPUS, job_spec(CORPUS, checkpoint_steps=1))
    bench.start(spec)
    with armed("checkpoint.before_file_fsync=ENOSPC"):
        messages = bench.run(spec.id, until=lambda m: isinstance(m, JobProgress) and m.metrics.step == 2)
        assert not any(isinstance(m, JobCheckpoint) for m in messages)
        with pytest.raises(StorageFull):
            bench.save(spec.id)
    messages = bench.run(spec.id)
    assert [m.step for m in messages if isinstance(m, JobCheckpoint)] == [3]
    assert isinstance(messages[-1], JobSucceeded)


@pytest.mark.parametrize(
    "point", by_day(["adapter.temp_write", "adapter.before_rename", "adapter.publish"], "adapter.before_rename")
)
@pytest.mark.parametrize(("error", "said"), [("ENOSPC", "waiting for space"), ("EIO", "waiting for the disk")])
def test_a_disk_that_refuses_the_adapter_is_asked_again(
    base: Base, tmp_path: Path, point: str, error: str, said: str
) -> None:
    bench = Bench(base, tmp_path)
    spec = bench.place(CORPUS, job_spec(CORPUS))
    bench.start(spec)
    with armed(f"{point}={error}"):
        messages = bench.run(spec.id, until=lambda m: isinstance(m, JobWaiting))
        assert isinstance(messages[-1], JobWaiting) and messages[-1].message.startswith(said)
        assert bench.advance(spec.id, 1) == messages[-1:]
        assert bench.store.resident() == ()
    (succeeded,) = bench.run(spec.id)
    assert isinstance(succeeded, JobSucceeded) and bench.store.resident() == (REF,)


def test_a_job_that_waits_for_space_goes_on_waiting_after_a_restart(base: Base, tmp_path: Path) -> None:
    bench = Bench(base, tmp_path)
    spec = bench.place(CORPUS, job_spec(CORPUS))
    with armed("adapter.temp_write=ENOSPC"):
        bench.start(spec)
        bench.run(spec.id, until=lambda m: isinstance(m, JobWaiting))
        bench.save(spec.id)
        again = Bench(base, tmp_path)
        assert again.start(spec).resumed_from == 4
        (waits,) = again.advance(spec.id, 1)
        assert isinstance(waits, JobWaiting)
    (succeeded,) = again.run(spec.id)
    assert isinstance(succeeded, JobSucceeded)


def test_a_disk_that_fails_in_a_step_fails_the_job(base: Base, tmp_path: Path) -> None:
    bench = Bench(base, tmp_path)
    with armed("finetune.mid_step=ENOSPC"):
        messages = bench.train(bench.place(CORPUS, job_spec(CORPUS)))
    assert isinstance(messages[-1], JobFailed) and messages[-1].code == "storage_full"
    assert bench.store.resident() == ()


def test_publishing_again_after_a_crash_replaces_the_files(base: Base, tmp_path: Path) -> None:
    bench = Bench(base, tmp_path)
    spec = bench.place(CORPUS, job_spec(CORPUS, checkpoint_steps=2))
    first = bench.train(spec)
    content = saved_tensors(bench)
    again = Bench(base, tmp_path)
    assert again.train(spec)[-1] == first[-1]
    assert same_tensors(saved_tensors(again), content)


def test_seconds_are_those_of_the_slices(base: Base, tmp_path: Path) -> None:
    now = [0.0]
    bench = Bench(base, tmp_path, clock=lambda: now.__setitem__(0, now[0] + 1.0) or now[0])
    spec = bench.place(CORPUS, job_spec(CORPUS, steps=1, batch_tokens=5, targets=("q_proj",)))
    bench.start(spec)
    messages = []
    while not messages:
        now[0] += 1000
        messages = bench.advance(spec.id, 1)
    assert 0 < metrics_of(messages)[0].seconds < 100


def test_the_size_of_a_jobs_next_batch_is_known_before_it_begins(tmp_path: Path) -> None:
    """Its first micro-step is predicted from it: rows differ, and a new job had none."""
    bench = Bench(tiny_base("llama"), tmp_path)
    corpus = random_corpus(0, (4, 30, 6, 28))
    spec = bench.place(corpus, job_spec(corpus, steps=6, batch_tokens=30, micro_batch_tokens=30))
    sizes = list[tuple[int, int]]()
    bench.start(spec)
    while not bench.trainer.finished(spec.id):
        before = bench.trainer.micro_batch_tokens(spec.id)
        bench.advance(spec.id, 1)
        if bench.trainer.mid_batch(spec.id):
            sizes.append((before, bench.trainer.micro_batch_tokens(spec.id)))
            bench.advance(spec.id, None)
    assert sizes and all(before >= size for before, size in sizes)
