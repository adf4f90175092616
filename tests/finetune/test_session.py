"""A session's verbs, driven by a training that is no job's."""

from __future__ import annotations

from collections.abc import Coroutine, Iterator

import pytest
import torch
from torch import Tensor

from coserve.core.training.micro_step import MicroStep
from coserve.core.training.step_metrics import StepMetrics
from coserve.data.corpus.batch import corpus_batch
from coserve.finetune.losses.loss import Loss
from coserve.finetune.micro_batch import MicroBatch, MicroBatchRunner, run_to_end
from coserve.finetune.packed_rows import pack_jobs
from coserve.finetune.sessions.session import Boundary, Event, FinishUpdate, SliceTimer, Training, TrainingSession
from coserve.model.base import Base
from tests.support.finetuning import CPU, random_corpus, started
from tests.support.lora_backends import lora_of

CORPUS = random_corpus()


def session_on(base: Base, *, overlapped: bool = False) -> TrainingSession:
    return TrainingSession(
        started(base),
        seed=1,
        dropout=0.0,
        neftune_alpha=None,
        device=CPU,
        timer=SliceTimer(lambda: 0.0),
        overlapped=overlapped,
    )


def drive(base: Base, training: Training) -> list[str]:
    """To its end, micro-batch by micro-batch. Returns what it was suspended for."""
    runner, events, answer = MicroBatchRunner(base, recompute=False), list[str](), None
    while True:
        try:
            event: Event = training.send(answer)
        except StopIteration:
            return events
        assert not isinstance(event, StepMetrics), "a job's alone"
        events.append(type(event).__name__ if isinstance(event, MicroBatch) else event.name)
        answer = None
        if isinstance(event, MicroBatch):
            rows = pack_jobs([event.batch], CPU)
            lora = lora_of(event.weights, rows.tokens)
            steps = (
                runner.forward_backward(rows, lora, event.trainable, event.grads)
                if event.learns
                else runner.evaluate(rows, lora)
            )
            (answer,) = run_to_end(steps)


def weights_of(session: TrainingSession) -> dict[str, torch.Tensor]:
    sites = session.current_weights()().sites
    return {f"{site}.{name}": getattr(pair, name).clone() for site, pair in sites.items() for name in ("a_RD", "b_OR")}


@pytest.mark.parametrize("overlapped", [False, True])
def test_gradients_of_micro_batches_add_up_until_a_step(base: Base, overlapped: bool) -> None:
    """In two micro-batches or in one: the same loss, norm and weights. A forward changes nothing."""
    numbers, weights = list[tuple[float, float, float]](), list[dict[str, torch.Tensor]]()
    for parts in (((0, 1), (2,)), ((0, 1, 2),)):
        session = session_on(base, overlapped=overlapped)

        async def train(session: TrainingSession = session, parts: tuple[tuple[int, ...], ...] = parts) -> None:
            sums = torch.zeros(2, dtype=torch.float64)
            for number, rows in enumerate(parts):
                sums += (await session.forward_backward(corpus_batch(CORPUS, rows), Loss(), draw=number)).sums
                await session.next_micro_batch()
            (held, _) = await session.read((await session.forward(corpus_batch(CORPUS, (3,)), Loss())).sums)
            await session.optim_step(0.01, 10, sums, lambda norm, found: numbers.append((held, norm, found[0])))

        events = drive(base, train())
        read = [MicroStep.RESULT.name] * overlapped
        batches = [MicroBatch.__name__, Boundary.MICRO_BATCH.name] * len(parts)
        assert events[: len(batches) + 1] == [*batches, MicroBatch.__name__]
        assert events[len(batches) + 1 :][: 1 + 2 * len(read)] == [*read, MicroStep.OPTIMIZER.name, *read]
        weights.append(weights_of(session))
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-4)
    before = weights_of(session_on(base))
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=1e-3, atol=1e-4)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in weights[0].items())


def test_an_update_that_is_left_half_way_is_finished_or_leaves_no_weights(
    base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half_way(session: TrainingSession) -> Coroutine[Event, Tensor | None, None]:
        whole = session.optimizer.slices

        def slices(norm: float, learning_rate: float) -> Iterator[None]:
            yield
            yield from whole(norm, learning_rate)

        monkeypatch.setattr(session.optimizer, "slices", slices)
        update = session.optim_step(0.01)
        for _ in range(2):  # the gradients' norm, then a slice of the update
            assert update.send(None) is MicroStep.OPTIMIZER
        return update

    finished, left = session_on(base), session_on(base)
    with pytest.raises(FinishUpdate):
        half_way(finished).throw(FinishUpdate())
    finished.check_weights()
    half_way(left).close()
    with pytest.raises(RuntimeError, match="its weights are lost"):
        left.current_weights()
