"""The fine-tuning benchmark: what its cases compute, on small shapes and a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.common.traces import Kernel
from benchmarks.finetuning.cases import COMPILED, LLAMA, OURS, PEFT, TINY_GPT2, TINY_LLAMA, Case, Shape, cases, turns
from benchmarks.finetuning.cut import BothWays
from benchmarks.finetuning.ours import make_base, running_jobs
from benchmarks.finetuning.profile import by_kind
from benchmarks.finetuning.report import published, table
from benchmarks.finetuning.with_peft import ChunkedCrossEntropy, batches
from benchmarks.peers.trainer import CHUNK
from coserve.core.training.micro_step import MicroStep
from tests.support.examples import on_days

ROOT = Path(__file__).resolve().parents[2]


def test_the_main_batch_of_each_side_comes_first() -> None:
    order = [(turn.side, case.name) for turn in turns(frozenset()) for case in turn.cases]
    assert order[:6] == [
        (OURS, "8x512"),
        (OURS, "1x512"),
        (OURS, "8jobs1x512"),
        (OURS, "8x512.recompute"),
        (COMPILED, "8x512"),
        (COMPILED, "1x512"),
    ]
    assert sorted(order) == sorted((side, case.name) for case, sides in cases() for side in sides)
    assert len(set(order)) == len(order)


def test_only_names_sides_cases_and_groups() -> None:
    def found(*tokens: str) -> set[tuple[str, str]]:
        return {(turn.side, case.name) for turn in turns(frozenset(tokens)) for case in turn.cases}

    assert found("peft/8x512", "coserve/8jobs1x512") == {(PEFT, "8x512"), (OURS, "8jobs1x512")}
    assert {name for _, name in found("gpt2")} == {case.name for case, _ in cases() if case.gpt2}


@pytest.mark.parametrize("shape", [TINY_LLAMA, TINY_GPT2], ids=lambda shape: shape.name)
def test_parameters_of_gemms(shape: Shape) -> None:
    model = make_base(shape).model
    own = [module.weight.numel() for name, module in model.named_modules() if hasattr(module, "weight") and _gemm(name)]
    assert shape.layer_parameters == sum(own)
    head = shape.hidden * shape.vocab
    assert shape.flop(recompute=True) == 4 * (sum(own) + head) + 2 * sum(own)
    last = shape.layers * shape.hidden * shape.inner
    assert shape.flop(recompute=True, without_last=True) == 4 * (sum(own) + head) + 2 * (sum(own) - last)


def _gemm(name: str) -> bool:
    return name.split(".")[-1] in ("c_attn", "c_proj", "c_fc") or name.endswith("_proj")


def test_the_8b_shape_is_llama_3s() -> None:
    assert LLAMA.layer_parameters + 2 * LLAMA.hidden * LLAMA.vocab == pytest.approx(8.03e9, rel=1e-3)


def test_the_chunked_loss_is_the_cross_entropy() -> None:
    torch.manual_seed(0)
    hidden_ND, weight_VD = torch.randn(CHUNK + 7, 8, requires_grad=True), torch.randn(32, 8)
    labels_N = torch.randint(32, (CHUNK + 7,))
    expected = nn.functional.cross_entropy(hidden_ND @ weight_VD.T, labels_N)
    loss = ChunkedCrossEntropy.apply(hidden_ND, weight_VD, labels_N)
    torch.testing.assert_close(loss, expected)
    gradients = [torch.autograd.grad(3 * each, hidden_ND)[0] for each in (loss, expected)]
    torch.testing.assert_close(*gradients)


def test_both_sides_have_the_same_rows() -> None:
    """Those of the daemon are in its job's corpus; the plan of both is the trainer's own."""
    ids_BL = next(batches(TINY_LLAMA, Case("sizes", 2, 8)))
    assert ids_BL.shape == (2, 8) and not torch.equal(ids_BL[0], ids_BL[1])
    again = next(batches(TINY_LLAMA, Case("sizes", 2, 8)))
    assert torch.equal(ids_BL, again)


@pytest.mark.parametrize("shape", [TINY_LLAMA, TINY_GPT2], ids=lambda shape: shape.name)
def test_the_cut_changes_no_gradient(shape: Shape) -> None:
    ways = BothWays(make_base(shape), shape, Case("costs", 2, 8))
    with torch.no_grad():  # a new adapter's B is 0, and A would learn nothing
        for layer in ways.optimizer.trainable:
            for tensor in layer:
                tensor.add_(torch.randn_like(tensor) * 0.1)
    found = []
    for way in (ways.in_layers, ways.whole):
        ways.optimizer.zero_grad()
        sums = way()
        found.append((sums, [total.clone() for layer in ways.optimizer.grads for total in layer]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
    assert all(float(total.abs().sum()) > 0 for total in found[0][1])


def test_slices_are_of_one_kind_and_do_the_same_work() -> None:
    base, case = make_base(TINY_LLAMA), Case("jobs", 2, 8, jobs=2)
    with running_jobs(base, TINY_LLAMA, case) as jobs:
        assert jobs.train(0) == case.tokens
        kinds = list(jobs.slices(1 << 20))
        assert jobs.jobs_of_batches == {2}
    assert kinds == [getattr(MicroStep, name) for name in ("BEGIN", "FORWARD", "HEAD", "BACKWARD", "OPTIMIZER")]
    with running_jobs(base, TINY_LLAMA, Case("costs", 2, 8), micro_batches=3) as jobs:
        assert jobs.train(0) == 3 * 2 * 8
        assert sum(kind is MicroStep.BEGIN for kind in jobs.slices(1)) == 3


def test_a_profile_by_kind() -> None:
    forward = [
        Kernel("nvjet_tst_128x256", 0.0, 1000.0),
        Kernel("shrink", 500.0, 1500.0),
        Kernel("void pytorch_flash::flash_fwd_kernel", 2000.0, 3000.0),
        Kernel("void at::native::elementwise_kernel", 3000.0, 3500.0),
    ]
    head, update = [Kernel("nvjet_tst_64x8", 0.0, 500.0)], [Kernel("multi_tensor_apply_kernel", 0.0, 250.0)]
    found = by_kind([(MicroStep.FORWARD, forward), (MicroStep.HEAD, head), (MicroStep.OPTIMIZER, update)], 5.0)
    assert found["ms"] == {
        "attention": 1.0,
        "elementwise": 0.5,
        "gemm": 1.0,
        "head": 0.5,
        "lora": 1.0,
        "optimizer": 0.25,
    }
    assert (found["busy_ms"], found["gaps_ms"], found["launches"]) == (3.75, 1.25, 6)


def row(side: str, case: str, value: float, **about: object) -> dict[str, Any]:
    return {"side": side, "case": case, "value": value, "unit": "tok/s"} | about


def test_what_does_not_fit_is_in_the_table_alone() -> None:
    rows = {
        "finetune.tok_s.8x512": row(OURS, "8x512", 9000.4, gib_allocated=20.04),
        "peft.tok_s.8x512": row(PEFT, "8x512", 0.0, oom="CUDA out of memory"),
        "finetune.cut_cost": {"side": OURS, "value": 0.01, "unit": "share"},
    }
    assert set(published(rows)) == {"finetune.tok_s.8x512", "finetune.cut_cost"}
    assert table(rows).splitlines()[2] == "| 8x512 | does not fit |  |  | 9000, 20.0 GiB |"


@on_days(3)
def test_the_script_runs(tmp_path: Path) -> None:
    only = "coserve/8x512,peft/8x512,peft/8x512.recompute,8jobs1x512,costs"
    command = [sys.executable, "-m", "benchmarks.finetuning.measure", "--tiny", "--out", str(tmp_path), "--only", only]
    command += ["--steps", "1", "--warm", "1"]
    subprocess.run(command, check=True, cwd=ROOT, timeout=300)
    rows = json.loads((tmp_path / "finetuning.json").read_text())["rows"]
    wanted = {"finetune.tok_s.8x512", "peft.tok_s.8x512", "finetune.tok_s.8jobs1x512", "finetune.cut_cost"}
    assert wanted | {"finetune.suspend_cost", "finetune.slice_ms.max"} <= set(rows)
    assert rows["finetune.suspend_cost"]["suspensions"] > 10
