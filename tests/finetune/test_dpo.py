"""Jobs with a DPO loss, against PEFT's model and torch's own backward: their reference is the adapter that they start
from, or the base."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch.nn.functional import logsigmoid

from coserve.admission.recompute_plan import RecomputePlan
from coserve.core.training.micro_step import MicroStep
from coserve.core.training.settings import DpoLoss, TrainingSettings
from coserve.core.training.step_metrics import Rewards
from coserve.core.types import AdapterRef
from coserve.data.corpus.tokenized import Corpus
from coserve.finetune.losses.loss import Loss
from coserve.finetune.memory_limits import BatchLimits
from coserve.finetune.micro_batch import MicroBatchRunner, run_to_end
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.lora.files.record import record_adapter
from coserve.lora.store.files import save_adapter
from coserve.model.base import Base
from coserve.model.lora import LoraWeights
from tests.support.finetuning import (
    Bench,
    changing_adapter,
    gradient_sums,
    job_spec,
    metrics_of,
    pack_rows,
    random_corpus,
    random_pairs,
    tiny_base,
    train_together,
)
from tests.support.lora_backends import lora_of
from tests.support.tiny_models import tiny_model

PAIRS = random_pairs()
BETA = 0.3
DPO = DpoLoss(beta=BETA)
START = AdapterRef("start", 1)
JOB: dict[str, Any] = {"loss": DPO, "steps": 5, "batch_tokens": 40, "micro_batch_tokens": 40, "checkpoint_steps": 2}


class Reference:
    """Plain PEFT, one sequence at a time. With `copy` as in TRL: the loss is relative to a second adapter, a copy of
    the first one as it starts; else to the base."""

    def __init__(self, family: str, weights: LoraWeights, *, copy: bool = False) -> None:
        base, self._copy = tiny_base(family), copy
        config = peft.LoraConfig(
            r=4, lora_alpha=8, target_modules=list(base.spec.default_targets), fan_in_fan_out=family == "gpt2"
        )
        self.model = peft.get_peft_model(tiny_model(family), config)
        self.parameters: dict[str, torch.nn.Parameter] = {}
        for site, pair in weights.sites.items():
            module = self.model.get_submodule(f"base_model.model.{site}")
            for name, layers, tensor in (("a", module.lora_A, pair.a_RD), ("b", module.lora_B, pair.b_OR)):
                layers["default"].weight.data.copy_(tensor)
                self.parameters[f"{site}.{name}"] = layers["default"].weight
        if copy:
            self.model.add_adapter("reference", config)
            for name, tensor in list(self.model.named_parameters()):
                if ".default." in name:
                    self.model.get_parameter(name.replace(".default.", ".reference.")).data.copy_(tensor.data)

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        with torch.no_grad():
            if not self._copy:
                with self.model.disable_adapter():
                    yield
                return
            self.model.set_adapter("reference")
            yield
            self.model.set_adapter("default")

    def log_probability(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Of the targets, summed."""
        log_probs = self.model(input_ids=tokens[None]).logits[0].log_softmax(-1)
        return (log_probs[:-1].gather(1, tokens[1:, None])[:, 0] * target[1:]).sum()

    def losses(self, corpus: Corpus) -> tuple[torch.Tensor, list[float], list[float]]:
        """The summed loss, and the rewards of the chosen and of the rejected answers."""
        total, rewards = torch.zeros(()), ([], [])
        for row in range(corpus.rows):
            pair = []
            for tokens, target in corpus.sequences(row):
                sequence = torch.from_numpy(tokens.astype("int64")), torch.from_numpy(target.astype("int64"))
                with self.as_reference():
                    reference = self.log_probability(*sequence)
                pair.append(BETA * (self.log_probability(*sequence) - reference))
            total = total - logsigmoid(pair[0] - pair[1])
            for own, reward in zip(rewards, pair, strict=True):
                own.append(float(reward.detach()))
        return total, *rewards


@pytest.mark.parametrize(
    ("family", "logits_bytes", "recompute"), [("llama", 1 << 27, False), ("llama", 1, True), ("gpt2", 1, False)]
)
def test_loss_rewards_and_gradients_equal_pefts(family: str, logits_bytes: int, recompute: bool) -> None:
    base = tiny_base(family)
    weights, rows = changing_adapter(base), pack_rows(PAIRS, range(PAIRS.rows), torch.device("cpu"))
    optimizer = AdapterOptimizer(weights, base.spec, TrainingSettings(), base.dtype)
    runner = MicroBatchRunner(base, recompute=recompute, logits_bytes=logits_bytes)
    assert rows.targets > 16, "several chunks of the smallest size"
    lora = lora_of(optimizer.weights(), rows.tokens)
    found = run_to_end(runner.forward_backward(rows, lora, optimizer.trainable, optimizer.grads, Loss(preference=DPO)))
    evaluated = run_to_end(runner.evaluate(rows, lora, Loss(preference=DPO)))

    reference = Reference(family, weights)
    loss, chosen, rejected = reference.losses(PAIRS)
    loss.backward()
    wins = sum(first > second for first, second in zip(chosen, rejected, strict=True))
    assert 0 < wins < PAIRS.rows
    expected = [float(loss.detach()), sum(chosen), sum(rejected), wins]
    assert found[0, [0, 2, 3, 4]].tolist() == pytest.approx(expected, abs=1e-5)
    assert torch.equal(evaluated, found)
    for name, gradient in gradient_sums(optimizer).items():
        torch.testing.assert_close(gradient, reference.parameters[name].grad, rtol=1e-4, atol=1e-5, msg=name)


def test_the_reference_is_suspended_like_the_rest(base: Base) -> None:
    rows = pack_rows(PAIRS, [0, 1], torch.device("cpu"))
    optimizer = AdapterOptimizer(changing_adapter(base), base.spec, TrainingSettings(), base.dtype)
    lora = lora_of(optimizer.weights(), rows.tokens)
    runner = MicroBatchRunner(base, recompute=False)
    steps = list(runner.forward_backward(rows, lora, optimizer.trainable, optimizer.grads, Loss(preference=DPO)))
    assert steps == [
        *(MicroStep.EVALUATE, MicroStep.EVALUATE_HEAD, MicroStep.FORWARD, MicroStep.FORWARD, MicroStep.HEAD),
        *(MicroStep.BACKWARD, MicroStep.BACKWARD),
    ]


def test_a_job_learns_the_preference_and_starts_at_the_reference(base: Base, tmp_path: Path) -> None:
    bench = Bench(base, tmp_path)
    job = JOB | {"steps": 30, "learning_rate": 0.02, "batch_tokens": 1000, "micro_batch_tokens": 30}
    metrics = metrics_of(bench.train(bench.place(PAIRS, job_spec(PAIRS, **job))))
    assert metrics[0].rewards == Rewards(chosen=0.0, rejected=0.0, margin=0.0, accuracy=0.0), (
        "a new adapter changes nothing"
    )
    assert metrics[0].loss == pytest.approx(0.6931, abs=1e-4)
    last = metrics[-1]
    assert last.rewards is not None and last.rewards.accuracy == 1.0
    assert last.rewards.margin == pytest.approx(last.rewards.chosen - last.rewards.rejected) and last.rewards.margin > 1
    assert last.loss < 0.3
    assert (last.tokens, last.target_tokens) == (PAIRS.token_count, PAIRS.target_tokens)


def put_adapter(bench: Bench, ref: AdapterRef, weights: LoraWeights) -> None:
    folder = bench.folder.adapter(ref)
    folder.mkdir(parents=True)
    save_adapter(folder, weights, bench.base.spec)
    record_adapter(folder, ref, bench.base.spec, source="import", created_at=0.0)


CONTINUED = JOB | {
    "init_from": START,
    "steps": 6,
    "batch_tokens": 1000,
    "micro_batch_tokens": 1000,
    "r": 4,
    "alpha": 8.0,
}


def test_the_reference_of_a_job_that_continues_an_adapter_is_that_adapter_as_in_trl(base: Base, tmp_path: Path) -> None:
    bench = Bench(base, tmp_path, limits=BatchLimits(1000))
    put_adapter(bench, START, changing_adapter(base))
    spec = bench.place(PAIRS, job_spec(PAIRS, **CONTINUED))
    found = metrics_of(bench.train(spec))
    assert found[0].loss == pytest.approx(math.log(2), abs=1e-6)
    assert found[0].rewards == Rewards(chosen=0.0, rejected=0.0, margin=0.0, accuracy=0.0)

    reference = Reference("llama", changing_adapter(base), copy=True)
    parameters = [*reference.parameters.values()]
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.0)
    for step, metrics in enumerate(found):
        loss, chosen, rejected = reference.losses(PAIRS)
        assert metrics.rewards is not None
        values = [metrics.loss, metrics.rewards.chosen, metrics.rewards.rejected]
        sums = [float(loss.detach()), sum(chosen), sum(rejected)]
        assert values == pytest.approx([each / PAIRS.rows for each in sums], abs=1e-5), step
        (loss / PAIRS.rows).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.param_groups[0]["lr"] = metrics.learning_rate
        optimizer.step()
        optimizer.zero_grad()
    assert found[-1].loss < 0.65, "it has learned"


def test_the_reference_may_be_the_base(base: Base, tmp_path: Path) -> None:
    bench = Bench(base, tmp_path, limits=BatchLimits(1000))
    put_adapter(bench, START, changing_adapter(base))
    loss = DpoLoss(beta=BETA, reference="base")
    (step,) = metrics_of(bench.train(bench.place(PAIRS, job_spec(PAIRS, **(CONTINUED | {"loss": loss, "steps": 1})))))
    expected, chosen, rejected = Reference("llama", changing_adapter(base)).losses(PAIRS)
    assert step.rewards is not None
    assert step.loss == pytest.approx(float(expected.detach()) / PAIRS.rows, abs=1e-5)
    found = step.rewards.chosen, step.rewards.rejected
    assert found == pytest.approx((sum(chosen) / PAIRS.rows, sum(rejected) / PAIRS.rows), abs=1e-5)


@pytest.mark.parametrize("start", [None, START], ids=["new", "continued"])
def test_an_interrupted_job_repeats_every_bit(base: Base, tmp_path: Path, start: AdapterRef | None) -> None:
    job = JOB | {"validation_split": 0.3, "eval_steps": 2, "dropout": 0.2, "max_grad_norm": 0.1}
    job |= {"init_from": start, "r": 4, "alpha": 8.0, "learning_rate": 0.01}
    whole = Bench(base, tmp_path / "whole")
    for root in ("whole", "parts"):
        put_adapter(Bench(base, tmp_path / root), START, changing_adapter(base))
    expected = metrics_of(whole.train(whole.place(PAIRS, job_spec(PAIRS, **job))))
    assert expected[1].valid_rewards is not None and expected[0].valid_rewards is None

    first, spec = Bench(base, tmp_path / "parts"), job_spec(PAIRS, **job)
    first.start(first.place(PAIRS, spec))
    found = metrics_of(first.run(spec.id, micro_steps=1, until=lambda _: first.trainer.checkpoint_due(spec.id)))
    first.save(spec.id)
    for _ in range(3):
        first.trainer.advance(spec.id, 1)  # in the reference's forward, when it is killed
    again = Bench(base, tmp_path / "parts")
    found = found[: again.start(spec).resumed_from] + metrics_of(again.run(spec.id))
    assert found == expected
    assert again.folder.adapter(AdapterRef("learned", 1)).joinpath("adapter_model.safetensors").read_bytes() == (
        whole.folder.adapter(AdapterRef("learned", 1)).joinpath("adapter_model.safetensors").read_bytes()
    )


def test_such_a_job_trains_alone_beside_jobs_that_share_batches(base: Base, tmp_path: Path) -> None:
    alone, bench = Bench(base, tmp_path / "alone"), Bench(base, tmp_path / "together")
    specs = [job_spec(PAIRS, "job-dpo", adapter="preferred", **JOB)]
    specs += [job_spec(random_corpus(seed), f"job-{seed}", adapter=f"a{seed}", batch_tokens=48) for seed in (1, 2)]
    expected = metrics_of(alone.train(alone.place(PAIRS, specs[0])))
    for spec, corpus in zip(specs, (PAIRS, random_corpus(1), random_corpus(2)), strict=True):
        bench.start(bench.place(corpus, spec))
    found = train_together(bench, specs)
    assert metrics_of(found["job-dpo"]) == expected, "to the last bit"
    batches = bench.trainer.batches
    assert batches.jobs > batches.count > 0, "the others shared some"


def test_pairs_stay_together_where_memory_is_short(base: Base, tmp_path: Path) -> None:
    bench = Bench(base, tmp_path)
    spec = bench.place(PAIRS, job_spec(PAIRS, **(JOB | {"batch_tokens": 1000, "micro_batch_tokens": 1000, "steps": 1})))
    whole = metrics_of(Bench(base, tmp_path).train(spec))
    bench.start(spec)
    bench.trainer.limit(spec.id, RecomputePlan(1, recomputed=2))
    (lowered,) = metrics_of(bench.run(spec.id))
    assert (lowered.loss, lowered.rewards) == (pytest.approx(whole[0].loss), whole[0].rewards)


def test_the_file_of_a_corpus_keeps_its_pairs(tmp_path: Path) -> None:
    PAIRS.save(tmp_path / "corpus")
    found = Corpus.load(tmp_path / "corpus")
    assert found.splits is not None and PAIRS.splits is not None
    assert found.splits.tolist() == PAIRS.splits.tolist()
    for broken in (PAIRS.splits[1:], PAIRS.splits.astype("int32"), PAIRS.bounds[1:], PAIRS.splits - 1):
        assert not replace(PAIRS, splits=broken).is_valid()
