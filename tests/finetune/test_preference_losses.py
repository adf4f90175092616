"""Preference losses against TRL's own code, and jobs with them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import coserve
from coserve.core.training.micro_step import MicroStep
from coserve.core.training.settings import DpoLoss, OrpoLoss, PreferenceLoss, SimpoLoss, TrainingSettings
from coserve.finetune.losses.loss import Loss
from coserve.finetune.losses.preferences import pair_loss
from coserve.finetune.micro_batch import MicroBatchRunner
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.model.base import Base
from tests.support.finetuning import Bench, changing_adapter, job_spec, metrics_of, pack_rows, random_pairs
from tests.support.lora_backends import lora_of

TINY = Path(coserve.__file__).parent / "assets" / "tiny"
PAIRS, LONGEST = 6, 9
PAIR_ROWS = random_pairs()


@pytest.fixture(scope="module")
def trl_trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("trl")
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    args = DPOConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")), use_cpu=True, bf16=False, gradient_checkpointing=False
    )
    rows = Dataset.from_list([{"prompt": "a", "chosen": " b", "rejected": " c"}])
    model, tokenizer = AutoModelForCausalLM.from_pretrained(TINY), AutoTokenizer.from_pretrained(TINY)
    trainer = DPOTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
    trainer.precompute_ref_logps = True
    return trainer


def scored(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random log-probabilities of tokens (2 P, T), chosen answers first, a mask of the answers' tokens, and the
    reference's sums (2 P)."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, LONGEST + 1, (2 * PAIRS, 1), generator=generator)
    mask = (torch.arange(LONGEST) < lengths).double()
    logps, reference = (-torch.rand(2 * PAIRS, LONGEST, dtype=torch.float64, generator=generator) * 2 for _ in range(2))
    return logps * mask, mask, (reference * mask).sum(1)


def by_pairs(x: Tensor) -> Tensor:
    return torch.stack(x.chunk(2), 1)


@pytest.mark.parametrize(
    ("name", "smoothing"),
    [
        *((name, 0.0) for name in ("sigmoid", "hinge", "ipo", "robust", "nca_pair", "bco_pair", "sppo_hard")),
        *((name, 0.0) for name in ("apo_zero", "apo_down", "sigmoid_norm", "aot", "discopop")),
        *((name, 0.2) for name in ("robust", "exo_pair", "aot", "aot_unpaired")),
    ],
)
def test_dpo_losses_are_trls(name: Any, smoothing: float, trl_trainer: Any) -> None:
    logps, mask, reference = scored(len(name))
    trl_trainer.loss_types, trl_trainer.loss_weights = [name], [1.0]
    trl_trainer.beta, trl_trainer.label_smoothing = 0.3, smoothing
    logps.requires_grad_()
    outputs = SimpleNamespace(
        log_probs=logps, entropy=logps, mean_logits=logps, is_top1=torch.zeros_like(mask, dtype=torch.bool)
    )
    whole = torch.cat((torch.zeros(2 * PAIRS, 1), mask), 1)  # the first token is the prompt
    chosen, rejected = reference.chunk(2)
    inputs = {"input_ids": whole.long(), "attention_mask": whole.long(), "completion_mask": whole.long()}
    loss = trl_trainer.compute_loss(
        lambda **_: outputs, inputs | {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    )
    loss.backward()

    sums, slopes_P2 = pair_loss(
        by_pairs(-logps.detach().sum(1)),
        by_pairs(-reference),
        by_pairs(mask.sum(1)),
        DpoLoss(beta=0.3, loss_type=name, label_smoothing=smoothing),
    )
    torch.testing.assert_close(sums[0] / PAIRS, loss.detach())
    assert logps.grad is not None
    torch.testing.assert_close(-slopes_P2 / PAIRS, by_pairs(logps.grad[:, 0]))


def test_label_smoothing_and_the_chosen_answers_likelihood() -> None:
    """cDPO's formula (Mitchell 2023), and TRL's `sft` by answers."""
    logps, mask, reference = scored(1)
    p, ref, counts = by_pairs(logps.sum(1)), by_pairs(reference), by_pairs(mask.sum(1))
    margin = 0.3 * ((p - ref)[:, 0] - (p - ref)[:, 1])
    expected = -(0.9 * margin.sigmoid().log() + 0.1 * (-margin).sigmoid().log()) - 0.5 * p[:, 0] / counts[:, 0]
    sums, _ = pair_loss(-p, -ref, counts, DpoLoss(beta=0.3, label_smoothing=0.1, sft_weight=0.5))
    torch.testing.assert_close(sums[0], expected.sum())


def test_orpo_and_simpo_are_trls() -> None:
    pytest.importorskip("trl")
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    logps, mask, _ = scored(2)
    p, counts = by_pairs(logps.sum(1)), by_pairs(mask.sum(1))
    mean = (p / counts).float()
    here = SimpleNamespace(device=torch.device("cpu"))
    ratio, *rewards, _, _ = ORPOTrainer.odds_ratio_loss(SimpleNamespace(beta=0.3, accelerator=here), *mean.unbind(1))
    sums, slopes = pair_loss(-p, torch.zeros_like(p), counts, OrpoLoss(beta=0.3))
    torch.testing.assert_close(sums[0].float(), (-mean[:, 0] - ratio).sum(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sums[1:3].float(), torch.stack(rewards).sum(1), rtol=1e-4, atol=1e-5)
    assert (slopes[:, 0] > 0).all() and (slopes[:, 1] < 0).all(), "the chosen answer's likelihood rises"

    trainer = SimpleNamespace(
        beta=2.0, simpo_gamma=0.5, label_smoothing=0.0, alpha=0.0, loss_type="simpo", accelerator=here
    )
    losses, *rewards = CPOTrainer.cpo_loss(trainer, *mean.unbind(1))
    sums, _ = pair_loss(-p, torch.zeros_like(p), counts, SimpoLoss(beta=2.0, gamma=0.5))
    torch.testing.assert_close(sums[0].float(), losses.sum(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sums[1:3].float(), torch.stack(rewards).sum(1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("nlls", [(0.0, 3.0), (3.0, 0.0), (0.0, 0.0), (1e-18, 2.0), (2.0, 1e-18)])
def test_orpo_of_answers_that_are_certain_is_finite(nlls: tuple[float, float]) -> None:
    """In fp32 a token's likelihood is 1 from a logit of 17 above all others on: then the odds are infinite."""
    nll_P2, counts = torch.tensor([nlls, (5.0, 6.0)], dtype=torch.float64), torch.ones(2, 2, dtype=torch.float64)
    sums, slopes = pair_loss(nll_P2, torch.zeros_like(nll_P2), counts, OrpoLoss())
    assert sums.isfinite().all() and slopes.isfinite().all()
    alone, slopes_alone = pair_loss(nll_P2[1:], torch.zeros(1, 2), counts[1:], OrpoLoss())
    assert sums[0] >= alone[0] and torch.equal(slopes[1:], slopes_alone)
    assert slopes[0, 0] >= 1, "the chosen answer is still learned"


@pytest.mark.parametrize("loss", [OrpoLoss(), SimpoLoss()])
def test_a_loss_without_a_reference_runs_no_other_forward(loss: PreferenceLoss, base: Base) -> None:
    rows = pack_rows(PAIR_ROWS, [0, 1], torch.device("cpu"))
    optimizer = AdapterOptimizer(changing_adapter(base), base.spec, TrainingSettings(), base.dtype)
    lora = lora_of(optimizer.weights(), rows.tokens)
    runner = MicroBatchRunner(base, recompute=False)
    steps = list(runner.forward_backward(rows, lora, optimizer.trainable, optimizer.grads, Loss(preference=loss)))
    assert not {MicroStep.EVALUATE, MicroStep.EVALUATE_HEAD} & set(steps)


@pytest.mark.parametrize("loss", [DpoLoss(loss_type="ipo", beta=0.1), OrpoLoss(beta=1.0), SimpoLoss()])
def test_a_job_learns_the_preference(loss: PreferenceLoss, base: Base, tmp_path: Path) -> None:
    bench = Bench(base, tmp_path)
    job = {"loss": loss, "steps": 30, "learning_rate": 0.02, "batch_tokens": 1000, "micro_batch_tokens": 30}
    metrics = metrics_of(bench.train(bench.place(PAIR_ROWS, job_spec(PAIR_ROWS, **job))))
    first, last = metrics[0].rewards, metrics[-1].rewards
    assert first is not None and last is not None
    assert last.accuracy == 1.0 and last.margin > first.margin and metrics[-1].loss < metrics[0].loss
