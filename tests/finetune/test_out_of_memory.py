"""Memory that runs out while a job trains: the optimizer step begins again in smaller parts, with the same result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from coserve.admission.recompute_plan import RecomputePlan
from coserve.core.link.jobs import JobFailed, JobNote, JobSucceeded
from coserve.core.link.link import FromEngine
from coserve.core.names import ADAPTER_WEIGHTS
from coserve.core.types import AdapterRef
from coserve.finetune.memory_limits import MemoryLimits
from coserve.finetune.micro_batch import MicroBatchRunner
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.finetune.passes import training_pass
from coserve.model.base import Base
from coserve.model.faults import out_of_memory
from coserve.model.layers import LayerCut
from tests.support.examples import examples
from tests.support.finetuning import Bench, job_spec, metrics_of, random_corpus, tiny_base
from tests.support.memory_faults import Faults, Point, out_of_memory_at

CORPUS = random_corpus()
OTHER = random_corpus(5)
REF = AdapterRef("learned", 1)
SPEC = job_spec(CORPUS, steps=2, validation_split=0.3, eval_steps=2)
POINTS = ((training_pass, "pack_jobs"), (LayerCut, "layer"), (LayerCut, "head"), (torch.autograd, "grad"))
"""Whatever allocates in a micro-batch: its inputs, each layer's forward, the logits, each layer's backward."""


@cache
def base() -> Base:
    return tiny_base("llama")


def never(call: int) -> bool:
    return False


@dataclass(frozen=True)
class Trained:
    """A job's messages, and the weights that it published."""

    messages: list[FromEngine]
    weights: dict[str, torch.Tensor]
    faults: Faults

    @property
    def notes(self) -> list[str]:
        return [message.message for message in self.messages if isinstance(message, JobNote)]


def trained(
    wanted: Callable[[int], bool] = never, points: Sequence[Point] = POINTS, *, recompute: bool = False, **options: Any
) -> Trained:
    with TemporaryDirectory() as root:
        bench = Bench(base(), Path(root), recompute=recompute)
        bench.start(bench.place(CORPUS, SPEC))
        with out_of_memory_at(points, wanted, **options) as faults:
            messages = bench.run(SPEC.id, micro_steps=2)
        done = isinstance(messages[-1], JobSucceeded)
        weights = load_file(bench.folder.adapter(REF) / ADAPTER_WEIGHTS) if done else {}
        return Trained(messages, weights, faults)


clean = cache(partial(trained, never, POINTS))
"""Without faults, by `recompute`."""


def assert_same(found: Trained, expected: Trained) -> None:
    """As many steps of the same tokens, and the same losses and weights up to rounding."""
    assert isinstance(found.messages[-1], JobSucceeded)
    metrics, wanted = metrics_of(found.messages), metrics_of(expected.messages)
    assert [(m.step, m.tokens, m.target_tokens) for m in metrics] == [
        (m.step, m.tokens, m.target_tokens) for m in wanted
    ]
    for one, other in zip(metrics, wanted, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-4)
        assert (one.valid_loss is None) == (other.valid_loss is None)
        assert one.valid_loss is None or one.valid_loss == pytest.approx(other.valid_loss, rel=1e-4)
    for name, tensor in expected.weights.items():
        assert torch.allclose(found.weights[name], tensor, atol=1e-3), name


@pytest.mark.slow
@settings(max_examples=examples(40))
@given(where=st.floats(0, 1, exclude_max=True), after=st.booleans(), recompute=st.booleans())
def test_a_fault_anywhere_in_a_step_changes_nothing_but_rounding(where: float, after: bool, recompute: bool) -> None:
    expected = clean(recompute=recompute)
    at = int(where * expected.faults.calls)
    found = trained(lambda call: call == at, after=after, recompute=recompute)
    assert found.faults.failed == len(found.notes) == 1
    assert_same(found, expected)


@pytest.mark.parametrize("error", [MemoryError, lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_the_hosts_memory_counts_too(error: Callable[[], BaseException]) -> None:
    assert_same(trained(lambda call: call == 7, error=error), clean(recompute=False))


def test_repeated_faults_lead_to_rows_of_their_own_and_then_to_recomputation() -> None:
    """Each retry is told once, and what was learned holds for all later steps."""
    found = trained(lambda call: call < 2, [(training_pass, "pack_jobs")])
    assert len(found.notes) == 2
    assert "at most" in found.notes[0] and "computed again" in found.notes[1]
    assert_same(found, clean(recompute=False))


def test_a_job_that_never_fits_fails_alone_with_the_numbers(tmp_path: Path) -> None:
    bench, alone = Bench(base(), tmp_path / "both"), Bench(base(), tmp_path / "alone")
    other = job_spec(OTHER, "other", adapter="other")
    expected = metrics_of(alone.train(alone.place(OTHER, other)))
    bench.start(bench.place(CORPUS, SPEC))
    bench.start(bench.place(OTHER, other))
    failed, messages = list[FromEngine](), list[FromEngine]()
    for _ in range(200):
        if not failed or not isinstance(failed[-1], JobFailed):
            with out_of_memory_at([(LayerCut, "head")], lambda call: True):
                failed += bench.trainer.advance(SPEC.id, 2)
            assert len(bench.trainer.notes) <= 1
        if not messages or not isinstance(messages[-1], JobSucceeded):
            messages += bench.advance(other.id, 3)
    end = failed[-1]
    assert isinstance(end, JobFailed)
    assert end.code == "job_out_of_memory"
    assert "one row of" in end.message and "needed 2.00 GiB, free " in end.message
    assert metrics_of(messages) == expected
    bench.trainer.drop(SPEC.id)
    assert bench.trainer.notes == ()


def test_an_update_that_fails_is_not_repeated() -> None:
    """Some weights may have changed."""
    end = trained(lambda call: call == 1, [(AdapterOptimizer, "slices")]).messages[-1]
    assert isinstance(end, JobFailed)
    assert "the update of the weights" in end.message


def test_micro_batches_are_cut_within_themselves() -> None:
    limits = MemoryLimits(random_corpus(lengths=(9, 5, 12, 3, 7, 8)).lengths, 4)
    planned = ((0, 1), (2, 3), (4, 5))
    assert limits.cut(planned) is planned
    assert limits.lower((4, 5), 0) is not None
    assert limits.tokens == 7
    assert limits.cut(planned) == [(0,), (1,), (2,), (3,), (4,), (5,)]
    assert limits.lower((2,), 0) is not None and limits.recompute
    assert limits.lower((2,), 4) is None


def test_a_row_whose_layers_were_all_recomputed_is_not_tried_again() -> None:
    limits = MemoryLimits(random_corpus(lengths=(9, 5)).lengths, 4)
    assert limits.lower((0,), 4) is None
    assert not limits.recompute
    assert limits.lower((0,), 3) is not None, "a layer that kept its outputs is left"


def test_planned_limits_hold_until_they_are_lifted() -> None:
    limits = MemoryLimits(random_corpus(lengths=(9, 5, 12, 3, 7, 8)).lengths, 4)
    planned = ((0, 1), (2, 3), (4, 5))
    limits.plan(RecomputePlan(14, recomputed=3, compiled=True))
    assert limits.cut(planned) == [(0, 1), (2,), (3,), (4,), (5,)]
    assert limits.recompute_plan.recomputed == 3 and limits.recompute_plan.compiled
    limits.plan(RecomputePlan(14, partly=2, compiled=True))
    recompute_plan = limits.recompute_plan
    assert (recompute_plan.recomputed, recompute_plan.partly, recompute_plan.recomputes) == (0, 2, True)
    limits.recompute = True
    assert (limits.recompute_plan.recomputed, limits.recompute_plan.partly) == (4, 0), (
        "memory ran out: all layers are computed again as a whole"
    )
    limits.recompute = False
    limits.plan(RecomputePlan(15))
    assert not limits.recompute_plan.recomputes
    assert limits.cut(planned) == list(planned)
    assert limits.lower((4, 5), 0) is not None
    limits.plan(None)
    assert limits.cut(planned) == [(0,), (1,), (2,), (3,), (4,), (5,)], "what ran out of memory is not forgotten"


def test_a_job_that_is_limited_learns_the_same(tmp_path: Path) -> None:
    bench = Bench(base(), tmp_path)
    bench.start(bench.place(CORPUS, SPEC))
    bench.trainer.limit(SPEC.id, RecomputePlan(12, recomputed=2))
    messages = bench.run(SPEC.id)
    weights = load_file(bench.folder.adapter(REF) / ADAPTER_WEIGHTS)
    assert_same(Trained(messages, weights, Faults()), clean(recompute=False))


def test_a_step_is_computed_as_it_was_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that comes within a step holds from the next one on: its size and its layers belong together."""
    seen = list[tuple[int, int]]()
    run = MicroBatchRunner.forward_backward

    def recorded(self: MicroBatchRunner, rows: Any, lora: Any, trainable: Any, grads: Any, *args: Any) -> Any:
        _, how, _ = args
        seen.append((len(rows.tokens_T), how.recomputed))
        return run(self, rows, lora, trainable, grads, *args)

    monkeypatch.setattr(MicroBatchRunner, "forward_backward", recorded)
    corpus = random_corpus(lengths=(9, 5, 12, 3, 7, 8, 9, 9))
    bench, spec = Bench(base(), tmp_path), job_spec(corpus, steps=2, batch_tokens=60, micro_batch_tokens=24)
    bench.start(bench.place(corpus, spec))
    large, small = RecomputePlan(24, recomputed=2), RecomputePlan(12)
    bench.trainer.limit(spec.id, large)
    bench.advance(spec.id, None)
    bench.trainer.limit(spec.id, small)
    bench.run(spec.id)
    assert {recomputed for _, recomputed in seen} == {0, 2}
    for tokens, recomputed in seen:
        assert recomputed == 2 or tokens <= small.tokens
    assert sum(recomputed == 2 for _, recomputed in seen) > 1, "the rest of the step in progress"


def test_other_errors_are_no_lack_of_memory() -> None:
    assert not out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not out_of_memory(OSError(12, "Cannot allocate memory"))
