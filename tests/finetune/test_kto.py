"""Jobs of answers with a label (KTO) against TRL's own code: their rows, batches, loss and gradients."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import coserve
from coserve.core.errors import MalformedRow
from coserve.core.training.settings import KtoLoss, TrainingSettings
from coserve.data.corpus.batch import corpus_batch
from coserve.data.corpus.batch_plan import BatchPlan
from coserve.data.corpus.columns import Columns
from coserve.data.corpus.conversion import json_lines
from coserve.data.corpus.rows import ChatRow, CompletionRow, LabelledRow, TextRow, parse_row
from coserve.data.corpus.tokenize import Tokenization, tokenize_rows
from coserve.data.corpus.tokenized import Corpus
from coserve.data.pretrained.tokenizer import Tokenizer
from coserve.finetune.losses.loss import CrossEntropy, Loss
from coserve.finetune.losses.preferences import labelled_loss
from coserve.finetune.micro_batch import MicroBatchRunner, run_to_end
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.finetune.packed_rows import pack_jobs
from coserve.model.base import Base
from tests.support.corpora import check_tables_of, stage
from tests.support.finetuning import Bench, changing_adapter, gradient_sums, job_spec, metrics_of, random_labels
from tests.support.lora_backends import lora_of

TINY = Path(coserve.__file__).parent / "assets" / "tiny"
ROWS: list[dict[str, Any]] = [
    {"prompt": "Greet.", "completion": " Ahoy there!", "label": True},
    {"prompt": "Say no.", "completion": " No.", "label": False},
    {"prompt": "Sing a long song.", "completion": " La la la, and more.", "label": True},
    {"prompt": "One word:", "completion": " yes", "label": False},
    {"prompt": "Count to two.", "completion": " One. Two.", "label": True},
]
TYPES: tuple[Literal["kto", "apo_zero_unpaired"], ...] = ("kto", "apo_zero_unpaired")
LONGEST = 9


def settings(**loss: Any) -> TrainingSettings:
    return TrainingSettings(loss=KtoLoss(**loss))


def tokenized(tokenizer: Tokenizer, *rows: dict[str, Any], max_length: int = 1000) -> Corpus:
    corpus = tokenize_rows([parse_row(row, 7) for row in rows], tokenizer, Tokenization(max_length, labelled=True))
    assert corpus.is_valid()
    return corpus


@pytest.fixture(scope="module")
def trl_trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("trl")
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    args = KTOConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=len(ROWS),
    )
    model, tokenizer = AutoModelForCausalLM.from_pretrained(TINY), AutoTokenizer.from_pretrained(TINY)
    trainer = KTOTrainer(model=model, args=args, train_dataset=Dataset.from_list(ROWS), processing_class=tokenizer)
    trainer.precompute_ref_logps = True
    return trainer


def test_a_batch_has_trls_rows_and_mismatched_answers(trl_trainer: Any, tokenizer: Tokenizer) -> None:
    corpus = tokenized(tokenizer, *ROWS)
    found = corpus_batch(corpus, range(len(ROWS)), settings())
    expected = list(trl_trainer.train_dataset)
    for answer, signs in (("completion_ids", (1, -1)), ("KL_completion_ids", (0, 0))):
        own = [one for one in found.examples if one.sign in signs]
        assert [one.tokens_N.tolist() for one in own] == [row["prompt_ids"] + row[answer] for row in expected]
        assert [one.labels_K.tolist() for one in own] == [row[answer] for row in expected]
    assert [one.sign for one in found.examples] == [1, -1, 1, -1, 1, 0, 0, 0, 0, 0]
    assert found.rows == len(ROWS) and found.targets == corpus.target_tokens
    assert found.tokens == 2 * corpus.token_count
    alone = corpus_batch(corpus, range(len(ROWS)), settings(loss_type="apo_zero_unpaired"))
    assert [one.sign for one in alone.examples] == [1, -1, 1, -1, 1] and alone.tokens == corpus.token_count


def test_a_row_alone_takes_its_neighbours_answer_and_no_more_tokens(tokenizer: Tokenizer) -> None:
    corpus = tokenized(tokenizer, *ROWS)
    for row in range(corpus.rows):
        own, other = corpus_batch(corpus, [row], settings()).examples
        assert (abs(own.sign or 0), other.sign) == (1, 0) and len(other.tokens_N) <= len(own.tokens_N)
        neighbour = corpus_batch(corpus, [(row - 1) % corpus.rows], settings()).examples[0]
        assert len(other.labels_K) and np.array_equal(other.labels_K, neighbour.labels_K[: len(other.labels_K)])


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("shift", [0.0, -2.0], ids=["divergent", "nearer than the reference"])
def test_loss_and_gradients_are_trls(name: Any, shift: float, trl_trainer: Any) -> None:
    generator, count = torch.Generator().manual_seed(3), len(ROWS)
    mask = (torch.arange(LONGEST) < torch.randint(2, LONGEST + 1, (2 * count, 1), generator=generator)).double()
    logps, reference = (-torch.rand(2 * count, LONGEST, dtype=torch.float64, generator=generator) for _ in range(2))
    logps, reference_sums = (logps + shift) * mask, ((reference - 0.3) * mask).sum(1)
    logps.requires_grad_()
    trl_trainer.loss_type, trl_trainer.calculate_KL, trl_trainer.beta = name, name == "kto", 0.3
    trl_trainer.desirable_weight, trl_trainer.undesirable_weight = 1.5, 0.7
    own, other = (torch.cat((torch.zeros(count, 1), part), 1).long() for part in mask.chunk(2))
    labels = torch.tensor([row["label"] for row in ROWS])
    inputs = {"input_ids": own, "attention_mask": own, "completion_mask": own, "label": labels}
    inputs |= {"ref_logps": reference_sums[:count], "ref_KL_logps": reference_sums[count:]}
    inputs |= {f"KL_{name}": other for name in ("input_ids", "attention_mask", "completion_mask")}

    def model(input_ids: Tensor, **_: Any) -> Any:
        part = logps[:count] if input_ids is own else logps[count:]
        return SimpleNamespace(log_probs=part, entropy=part, mean_logits=part)

    loss = trl_trainer.compute_loss(model, inputs)
    loss.backward()

    signs = torch.cat((labels.double() * 2 - 1, torch.zeros(count, dtype=torch.float64)))
    chosen = KtoLoss(beta=0.3, loss_type=name, desirable_weight=1.5, undesirable_weight=0.7)
    every = slice(None) if name == "kto" else slice(count)
    sums, slopes_Q = labelled_loss(-logps.detach().sum(1)[every], -reference_sums[every], signs[every], chosen)
    torch.testing.assert_close(sums[0] / count, loss.detach())
    assert logps.grad is not None
    torch.testing.assert_close(-slopes_Q[:count] / count, logps.grad[:count, 0])
    assert not slopes_Q[count:].any(), "mismatched answers are not learned"
    trl_trainer.log({})
    metrics = {name.removeprefix("eval_"): value for name, value in trl_trainer.state.log_history[-1].items()}
    assert float(sums[1] / sums[4]) == pytest.approx(metrics["rewards/chosen"])
    assert float(sums[2] / (count - sums[4])) == pytest.approx(metrics["rewards/rejected"])


@pytest.mark.parametrize("name", TYPES)
def test_gradients_weigh_each_answers_likelihood(name: Any, base: Base) -> None:
    """As the weights of a client's cross-entropy would, if it knew the derivatives of the loss."""
    corpus, training = random_labels(), settings(loss_type=name, beta=0.5)
    batch, loss = corpus_batch(corpus, range(corpus.rows), training), training.loss
    assert isinstance(loss, KtoLoss)
    runner, cpu = MicroBatchRunner(base, recompute=False, logits_bytes=1), torch.device("cpu")

    def run(weights: list[float], changed: float, own: Loss) -> tuple[Tensor, dict[str, Tensor]]:
        examples = zip(batch.examples, weights, strict=True)
        weighed = [replace(one, weights_K=np.full(len(one.after_K), weight, np.float32)) for one, weight in examples]
        rows, start = pack_jobs([replace(batch, examples=tuple(weighed))], cpu), changing_adapter(base, scale=changed)
        optimizer = AdapterOptimizer(start, base.spec, training, base.dtype)
        lora = lora_of(optimizer.weights(), rows.tokens)
        sums = run_to_end(runner.forward_backward(rows, lora, optimizer.trainable, optimizer.grads, own))
        assert torch.equal(run_to_end(runner.evaluate(rows, lora, own)), sums)
        return sums[0], gradient_sums(optimizer)

    ones, tokens, groups = [1.0] * len(batch.examples), Loss(tokens=CrossEntropy()), []
    for changed in (0.1, 0.0):
        logps, _ = run(ones, changed, tokens)
        groups.append(torch.stack([-part.sum() for part in logps[2:].split([len(e.after_K) for e in batch.examples])]))
    signs = torch.tensor([one.sign for one in batch.examples], dtype=torch.float64)
    expected, slopes_Q = labelled_loss(groups[0], groups[1], signs, loss)
    found, gradients = run(ones, 0.1, Loss(preference=loss))
    assert found[[0, 2, 3, 4, 5]].tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    for site, gradient in run(slopes_Q.tolist(), 0.1, tokens)[1].items():
        torch.testing.assert_close(gradients[site], gradient, rtol=1e-4, atol=1e-6, msg=site)


@pytest.mark.parametrize("name", TYPES)
def test_a_job_learns_which_answers_are_desirable(name: Any, base: Base, tmp_path: Path) -> None:
    corpus = random_labels()
    job = {"loss": KtoLoss(loss_type=name), "steps": 30, "learning_rate": 0.02, "batch_tokens": 1000}
    spec = job_spec(corpus, **job, micro_batch_tokens=4 * corpus.longest, validation_rows=2)
    bench = Bench(base, tmp_path)
    metrics = metrics_of(bench.train(bench.place(corpus, spec)))
    first, last = metrics[0].rewards, metrics[-1].rewards
    assert first is not None and last is not None and metrics[-1].valid_rewards is not None
    assert metrics[0].loss == pytest.approx(0.5) and metrics[-1].loss < 0.5
    assert first.margin == 0.0 and last.margin > 0 and last.accuracy == 1.0


def test_a_micro_batch_counts_the_mismatched_answers(tokenizer: Tokenizer) -> None:
    corpus = tokenized(tokenizer, *ROWS * 4)
    for name in TYPES:
        own = TrainingSettings(epochs=1, batch_tokens=10_000, loss=KtoLoss(loss_type=name))
        plan = BatchPlan(corpus.lengths, own, 64)
        for rows in plan.step(0).micro_batches:
            assert corpus_batch(corpus, rows, own).tokens <= 64


def test_rows_are_texts_or_messages_with_a_label(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = {"prompt": "a", "completion": "b", "label": False}
    assert parse_row(texts, 1) == LabelledRow(1, CompletionRow(1, "a", "b"), label=False)
    chat = {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}
    row = parse_row(chat | {"label": True}, 1)
    assert isinstance(row, LabelledRow) and isinstance(row.answer, ChatRow) and row.label
    named = {"prompt": "q", "completion": "a", "label": "good"}
    read = parse_row({"q": "a", "a": "b", "good": False, "label": 3}, 1, Columns(named))
    assert read == parse_row(texts, 1)
    del named["label"]
    assert parse_row({"q": "a", "a": "b", "label": False}, 1, Columns(named)) == CompletionRow(1, "a", "b")
    assert parse_row({"text": "a", "label": True}, 1) == TextRow(1, "a")
    check_tables_of(texts, tmp_path)
    corpus = tokenized(tokenizer, texts, chat | {"label": True})
    shown = [set(corpus.row(row)[1].tolist()) for row in range(2)]
    assert shown == [{0, 2}, {0, 1}]


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_a_staged_file_keeps_the_labels(form: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    source, target = tmp_path / "rows", tmp_path / "staged" / "corpus"
    lines = [json.dumps(row) for row in ROWS]
    if form == "csv":
        lines = ["prompt,completion,label"]
        lines += [f'"{row["prompt"]}","{row["completion"]}",{row["label"]}' for row in ROWS]
    source.write_text("\n".join(lines) + "\n")
    with json_lines(source, Columns()) as read:
        staged = stage(read, target, tokenizer, 40, labelled=True)
    expected, found = tokenized(tokenizer, *ROWS), Corpus.load(target)
    assert staged.target_tokens == expected.target_tokens
    for name in ("tokens", "target", "bounds"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.parametrize(
    ("row", "labelled", "says"),
    [
        ({"prompt": "a", "completion": "b"}, True, r"training\.loss \(kto\) expects rows of .*, got a label that is"),
        ({"prompt": "a", "completion": "b", "label": 1}, True, "got a label that is neither, or none"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, True, r"training\.loss \(kto\) expects rows of"),
        ({"prompt": "a", "completion": "b", "label": True}, False, r"training\.loss \(kto\) is missing"),
        ({"messages": [], "label": True}, True, "label is not used: training.loss kto reads it beside prompt"),
    ],
)
def test_rows_and_loss_belong_together(row: dict[str, Any], labelled: bool, says: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(MalformedRow, match=says) as refused:
        tokenize_rows([parse_row(row, 7)], tokenizer, Tokenization(100, labelled=labelled))
    assert refused.value.line == 7
