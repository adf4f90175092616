"""Jobs on ranks, each of which runs the same calls; rank 0 alone writes files."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from coserve.core.cancellation import Cancellation
from coserve.core.link.jobs import JobSucceeded
from coserve.core.training.settings import KtoLoss
from coserve.finetune.memory_profiling import Conditions, MemoryProfiler, NoMeter
from coserve.memory.plan import Work
from coserve.model.parallel.mesh import Mesh
from tests.support.finetuning import Bench, job_spec, metrics_of, random_corpus, random_labels, random_pairs
from tests.support.lora_backends import GROUPED
from tests.support.sharded import load

JOB: dict[str, object] = {
    "steps": 4,
    "checkpoint_steps": 2,
    "validation_split": 0.3,
    "eval_steps": 1,
    "early_stopping_patience": 3,
    "max_grad_norm": 0.05,
    "dropout": 0.1,
}


class Trained(NamedTuple):
    resumed: int
    losses: list[float]
    valid: list[float | None]
    valid_before: float | None


def train(
    mesh: Mesh | None, base: str, root: str, until: int, changes: dict[str, object], quantization: str = "none"
) -> Trained:
    """Advance a job to step `until`, from its last checkpoint on; publish it if that is its last step."""
    loaded, leads = load(base, mesh, quantization=quantization), mesh is None or mesh.rank == 0
    bench = Bench(loaded, Path(root))
    corpus = random_corpus(lengths=(9, 5, 12, 3, 7, 8, 6, 11))
    if loss := changes.get("loss"):
        corpus = random_labels(rows=8) if isinstance(loss, KtoLoss) else random_pairs(rows=8)
    spec = job_spec(corpus, **(JOB | changes))
    if mesh is None:
        bench.place(corpus, spec)
    trainer, metrics = bench.trainer, []
    started = trainer.load(spec, Cancellation())()
    while started.resumed_from + len(metrics) < until:
        metrics += metrics_of(trainer.advance(spec.id, None))
        if trainer.checkpoint_due(spec.id):
            write = trainer.checkpoint(spec.id)
            if write is not None and leads:
                write()
    if trainer.finished(spec.id):
        publish = trainer.publication(spec.id)
        if leads:
            assert isinstance(publish()(), JobSucceeded)
    trainer.drop(spec.id)
    losses, valid = [one.loss for one in metrics], [one.valid_loss for one in metrics]
    return Trained(started.resumed_from, losses, valid, metrics[-1].valid_loss_before if metrics else None)


def profile(mesh: Mesh | None, base: str) -> None:
    """What the memory plan measures: a generation step, and a micro-batch with its update."""
    work = Work(step_tokens=32, micro_batch_tokens=48, jobs=1)
    conditions = Conditions(GROUPED, recompute=False, max_running=2, page_tokens=16, work=work)
    profiler = MemoryProfiler(load(base, mesh), NoMeter(), conditions, rank=4)
    profiler.step(32)
    profiler.micro_batch(48)
