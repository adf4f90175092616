"""What is kept of a batch's adapters: tables of their addresses, never of their weights."""

from __future__ import annotations

import pytest
import torch

from coserve.core.types import LoraSettings
from coserve.finetune.micro_batch import MicroBatchRunner, run_to_end
from coserve.kernels.lora.segments import Segments
from coserve.model.lora import KeptLora, LoraBatch
from tests.support.examples import by_day
from tests.support.finetuning import CPU, pack_rows, random_corpus, started, tiny_base
from tests.support.lora_backends import SEGMENTED

CORPUS = random_corpus()


def sums_after_a_change(kept: KeptLora | None, rank: int) -> list[torch.Tensor]:
    """Of two batches of one adapter, whose weights change in between, as an update changes them; then of another
    adapter's."""
    base = tiny_base("llama")
    runner, found = MicroBatchRunner(base, recompute=False), []
    one, other = (started(base, LoraSettings(r=rank, targets=("q_proj", "down_proj"))) for _ in range(2))
    for optimizer, row, factor in ((one, 1, 1.0), (one, 3, 30.0), (other, 3, 1.0)):
        for pair in optimizer.weights().sites.values():
            pair.b_OR.data.mul_(factor)
        rows = pack_rows(CORPUS, [row], CPU)
        batch = LoraBatch(Segments((0, rows.tokens), (0,)), (optimizer.weights(),), SEGMENTED, kept=kept)
        found.append(run_to_end(runner.forward_backward(rows, batch, optimizer.trainable, optimizer.grads)))
        found += [one for layer in optimizer.grads for one in layer]
    return [each.clone() for each in found]


@pytest.mark.parametrize("rank", by_day([8, 5], 5))  # of rank 5, kernels read copies
def test_a_batch_with_kept_tables_has_the_weights_of_its_own_time(rank: int) -> None:
    expected = sums_after_a_change(None, rank)
    for own, right in zip(sums_after_a_change(KeptLora(), rank), expected, strict=True):
        torch.testing.assert_close(own, right)


def test_it_is_bounded_and_forgets() -> None:
    class Prepared:
        holds_weights = False

        def for_batch(self, segments: Segments) -> Prepared:
            return self

    def batch(*adapters: object) -> LoraBatch:
        return LoraBatch(Segments((0, 1), (0,)), adapters, SEGMENTED)  # type: ignore[arg-type]

    kept, adapters = KeptLora(most=2), [object() for _ in range(3)]
    for adapter in adapters:
        kept.put(batch(adapter), True, Prepared())  # type: ignore[arg-type]
    assert kept.find(batch(adapters[2]), True) is not None
    assert kept.find(batch(adapters[2]), False) is None
    assert kept.find(batch(adapters[0]), True) is None
    assert kept.find(batch(adapters[2], adapters[1]), True) is None
    kept.forget()
    assert kept.find(batch(adapters[2]), True) is None
