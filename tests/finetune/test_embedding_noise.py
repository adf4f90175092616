"""NEFTune: the noise of each sequence, where it is added, and where it is not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from coserve.core.training.settings import DpoLoss, TrainingSettings
from coserve.core.types import LoraSettings
from coserve.data.corpus.batch import corpus_batch
from coserve.finetune.init import new_adapter
from coserve.finetune.losses.loss import Loss
from coserve.finetune.micro_batch import MicroBatchRunner, run_to_end
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.finetune.packed_rows import EmbeddingNoise, add_noise, pack_jobs
from tests.support.finetuning import CPU, pack_rows, random_corpus, random_pairs, tiny_base
from tests.support.lora_backends import lora_of
from tests.support.tiny_models import tiny_model

NOISE = EmbeddingNoise(5.0, 11)


def test_each_sequence_has_noise_by_its_own_length() -> None:
    lengths, hidden = (900, 100, 400), 64
    noise_TD = NOISE.draw(lengths, hidden, CPU)
    for length, part in zip(lengths, torch.split(noise_TD, lengths), strict=True):
        bound = 5.0 / math.sqrt(length * hidden)
        assert 0.99 * bound < part.abs().max() <= bound
        assert part.abs().mean() == pytest.approx(bound / 2, rel=0.05), "uniform"
        assert abs(part.mean()) < 0.05 * bound
    assert torch.equal(noise_TD, NOISE.draw(lengths, hidden, CPU))
    assert not torch.equal(noise_TD, EmbeddingNoise(5.0, 12).draw(lengths, hidden, CPU))


def test_a_jobs_noise_is_the_same_in_company() -> None:
    one, other = random_corpus(0), random_corpus(1)
    jobs = [(other, (0, 1)), (one, (2, 0, 3)), (other, (4,))]
    rows = pack_jobs([corpus_batch(*job) for job in jobs], CPU)
    first, last = rows.token_bounds[1:3]
    h_1TD = torch.zeros(1, rows.tokens, 32)
    add_noise(h_1TD, rows, (None, NOISE, None))
    alone = pack_rows(one, (2, 0, 3), CPU)
    alone_1TD = torch.zeros(1, alone.tokens, 32)
    add_noise(alone_1TD, alone, (NOISE,))
    assert torch.equal(h_1TD[:, first:last], alone_1TD) and alone_1TD.all()
    assert not h_1TD[:, :first].any() and not h_1TD[:, last:].any()


def test_training_sees_the_noise_and_an_evaluation_does_not() -> None:
    corpus, base = random_corpus(), tiny_base("llama")
    rows = pack_rows(corpus, (0, 3), CPU)
    start = new_adapter(LoraSettings(r=4), base.spec, seed=1, dtype=torch.float32, device="cpu")  # B is 0
    optimizer = AdapterOptimizer(start, base.spec, TrainingSettings(), base.dtype)
    lora = lora_of(optimizer.weights(), rows.tokens)
    runner = MicroBatchRunner(base, recompute=False)
    noisy = runner.forward_backward(rows, lora, optimizer.trainable, optimizer.grads, noises=(NOISE,))
    assert float(run_to_end(noisy)[0, 0]) == pytest.approx(nll(corpus, (0, 3), NOISE), rel=1e-5)
    plain = float(run_to_end(runner.evaluate(rows, lora))[0, 0])
    assert plain == pytest.approx(nll(corpus, (0, 3), None), rel=1e-5)
    assert abs(plain - nll(corpus, (0, 3), NOISE)) > 1e-3


def nll(corpus, rows: tuple[int, ...], noise: EmbeddingNoise | None) -> float:
    """Of the model itself, row by row, with a hook on its embedding."""
    model, total = tiny_model("llama"), 0.0
    lengths = [len(corpus.row(row)[0]) for row in rows]
    hidden = model.config.hidden_size
    parts = torch.split(
        torch.zeros(sum(lengths), hidden) if noise is None else noise.draw(lengths, hidden, CPU), lengths
    )
    for row, part in zip(rows, parts, strict=True):

        def hook(module: object, args: object, output: Tensor, part: Tensor = part) -> Tensor:
            return output + part

        handle = model.get_input_embeddings().register_forward_hook(hook)
        tokens, target = (torch.from_numpy(part.astype("int64")) for part in corpus.row(row))
        with torch.no_grad():
            logits = model(input_ids=tokens[None]).logits[0]
        handle.remove()
        losses = torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="none")
        total += float((losses * target[1:]).sum())
    return total


def test_the_reference_of_a_dpo_loss_has_no_noise() -> None:
    """A new adapter changes nothing: without noise the rewards are 0."""
    base, corpus = tiny_base("llama"), random_pairs()
    rows = pack_rows(corpus, (0, 1), CPU)
    start = new_adapter(LoraSettings(r=4), base.spec, seed=1, dtype=torch.float32, device="cpu")
    optimizer = AdapterOptimizer(start, base.spec, TrainingSettings(), base.dtype)
    lora = lora_of(optimizer.weights(), rows.tokens)
    runner = MicroBatchRunner(base, recompute=False)
    for noises, rewarded in (((), False), ((None,), False), ((NOISE,), True)):
        sums = run_to_end(
            runner.forward_backward(
                rows, lora, optimizer.trainable, optimizer.grads, Loss(preference=DpoLoss(beta=0.5)), noises=noises
            )
        )
        assert bool((sums[0, 2:4].abs() > 1e-3).all()) is rewarded, noises
