"""Sessions whose calls come from a client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace as replace_fields

from coserve.api.sessions.sessions import session_spec
from coserve.core.cancellation import Cancellation
from coserve.core.errors import CoserveError, NonFiniteLoss, NotFound
from coserve.core.training.schemas import Compute, OptimStepRequest, SaveState, SessionSpec
from coserve.core.training.settings import Schedule
from coserve.core.types import AdapterRef, LoraSettings
from coserve.data.corpus.batch import Example, corpus_batch, examples_out
from coserve.data.corpus.tokenized import Corpus
from coserve.finetune.publication import publish_adapter
from coserve.finetune.sessions.client import Result
from tests.support.finetuning import Bench, gradient_sums, job_spec, metrics_of, random_corpus, tiny_base

LORA = LoraSettings(r=4)
ADAM = OptimStepRequest(learning_rate=0.01, beta2=0.999, eps=1e-8)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tiny_base("llama"), tmp_path)


def opened(bench: Bench, id: str = "one", state: tuple[str, str] | None = None, **changes: object) -> SessionSpec:
    spec = session_spec(id, LORA, 7, 16, state, with_optimizer=bool(changes.get("with_optimizer")))
    bench.trainer.load(spec, Cancellation())()
    return spec


def call(bench: Bench, work: Compute | OptimStepRequest, id: str = "one", *, abandoned: bool = False) -> Result:
    """Compute a call in slices of one micro-step. `abandoned`: it is cut off once, in its middle. Raises its error."""
    session = bench.trainer.client(id)
    session.begin_call(bench.trainer.work_of(work) if isinstance(work, Compute) else work)
    slices = 0
    while session.outcome is None:
        assert not bench.trainer.advance(id, 1)
        slices += 1
        if abandoned and slices == 9:
            bench.trainer.abandon(id)
    if isinstance(session.outcome, CoserveError):
        raise session.outcome
    return session.outcome


def compute(examples: Sequence[Example], *, learns: bool = True) -> Compute:
    return Compute(examples_out(examples), "cross_entropy", {}, learns)


def weighted(corpus: Corpus, rows: Sequence[int], weight: float = 1.0) -> list[Example]:
    batch = corpus_batch(corpus, rows).examples
    return [
        Example(one.tokens_N, one.after_K, one.labels_K, np.full(len(one.after_K), weight, np.float32)) for one in batch
    ]


def test_a_session_learns_as_a_job_does(bench: Bench) -> None:
    corpus = random_corpus()
    settings = {"batch_tokens": 1000, "max_grad_norm": 0.0, "schedule": Schedule.CONSTANT}
    job = metrics_of(bench.train(bench.place(corpus, job_spec(corpus, **settings))))
    opened(bench)
    batch = weighted(corpus, range(corpus.rows), 1 / corpus.target_tokens)
    losses, norms = list[float](), list[float]()
    for _ in job:
        losses.append(call(bench, compute(batch)).metrics["loss:sum"])
        norms.append(call(bench, ADAM).metrics["grad_norm"])
    np.testing.assert_allclose(losses, [step.loss for step in job], rtol=1e-4)
    np.testing.assert_allclose(norms, [step.grad_norm for step in job], rtol=1e-3)


def test_a_call_that_is_cut_off_adds_its_gradients_once(bench: Bench) -> None:
    """As for lack of memory: those of earlier calls are computed again, too."""
    corpus = random_corpus()
    first, second = weighted(corpus, (0, 1, 2)), weighted(corpus, (3, 4, 5))
    found = []
    for id, abandoned in (("whole", False), ("cut", True)):
        opened(bench, id)
        call(bench, compute(first), id)
        call(bench, compute(second), id, abandoned=abandoned)
        found.append(gradient_sums(bench.trainer.client(id).session.optimizer))
    for name, sums in found[0].items():
        np.testing.assert_allclose(found[1][name], sums, rtol=1e-4, atol=1e-6)


def test_gradients_that_are_not_finite_are_dropped(bench: Bench) -> None:
    corpus = random_corpus()
    opened(bench)
    batch, huge = weighted(corpus, (0, 1)), weighted(corpus, (0, 1), 3e38)
    before = call(bench, compute(batch, learns=False)).values
    call(bench, compute(huge))
    with pytest.raises(NonFiniteLoss, match="not finite"):
        call(bench, ADAM)
    assert call(bench, compute(batch, learns=False)).values == before
    call(bench, compute(batch))
    assert call(bench, ADAM).metrics["step"] == 1


@pytest.mark.parametrize("files", [True, False])
def test_weights_that_would_be_served_as_infinity_are_not_published(bench: Bench, files: bool) -> None:
    """In fp32 they are finite, and in a file the import refuses them."""
    opened(bench)
    call(bench, compute(weighted(random_corpus(), (0, 1))))
    call(bench, replace_fields(ADAM, learning_rate=1e5))
    ref, weights = AdapterRef("large", 1), bench.trainer.client("one").session.current_weights()
    half = replace(bench.base, dtype=torch.float16)
    with pytest.raises(NonFiniteLoss, match="not finite in float16"):
        publish_adapter(ref, weights, half, bench.folder, bench.store, files=files)()
    assert not bench.folder.adapter(ref).exists() and not bench.in_memory(ref)


def test_saved_states_continue(bench: Bench) -> None:
    corpus = random_corpus()
    opened(bench)
    batch = compute(weighted(corpus, range(corpus.rows)))

    def steps(id: str) -> list[float]:
        found = []
        for _ in range(2):
            found.append(call(bench, batch, id).metrics["loss:sum"])
            call(bench, ADAM, id)
        return found

    steps("one")
    bench.trainer.save_state("one", SaveState("one", "two-steps", "default"))()()
    expected = steps("one")
    opened(bench, "two", ("one", "two-steps"), with_optimizer=True)
    assert steps("two") == expected
    assert bench.trainer.client("two").step == 4
    opened(bench, "three", ("one", "two-steps"))
    assert steps("three")[0] == expected[0]
    assert bench.trainer.client("three").step == 2
    with pytest.raises(NotFound, match="no saved state 'other'"):
        opened(bench, "four", ("one", "other"))
