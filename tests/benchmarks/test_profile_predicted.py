"""Predictions through fake tensors: of any family, linear in rows, with the paper's trends; on a GPU, against what is
measured."""

from __future__ import annotations

import msgspec
import pytest
import torch

from benchmarks.memory.profile.report import ProfileReport, Series
from benchmarks.memory.profile.request import Backend, Kind, ProfileRequest, make_workloads
from benchmarks.memory.profile.run import Step, profile
from coserve.core.errors import InvalidRequest, UnsupportedBase
from tests.support.examples import in_turns, on_days
from tests.support.predicted_memory import fake_tensors
from tests.support.tiny_models import FAMILIES, tiny_model

GPT2: dict[str, object] = {
    "model_type": "gpt2",
    "n_embd": 256,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "vocab_size": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA: dict[str, object] = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 128,
}
ONE_LAYER = LLAMA | {"num_hidden_layers": 1}


def quiet(step: Step) -> None: ...


def request(config: dict[str, object] | None, batches: tuple[int, ...], **changes: object) -> ProfileRequest:
    whole = ProfileRequest(
        model="tiny", config=config, workloads=make_workloads((8,)), batches=batches, lengths=(16,), predict=True
    )
    return msgspec.structs.replace(whole, **changes)


def by_kind(report: ProfileReport) -> dict[Kind, Series]:
    return {series.workload.kind: series for series in report.series}


@pytest.mark.slow
def test_the_daemons_passes_grow_with_rows_as_lines_and_longer_rows_cost_the_same_a_token() -> None:
    steps: list[Step] = []
    asked = request(ONE_LAYER, (2, 4, 8), lengths=(16, 64), workloads=make_workloads((8,), full=False))
    report = profile(asked, steps.append)
    assert not report.measured
    assert (report.device, report.family) == ("none", "llama")
    assert [step.done for step in steps] == list(range(12))
    assert {step.total for step in steps} == {12}
    inference, _, lora, long = report.series
    for series in report.series:
        assert series.ended is None
        assert series.kv_per_token == 2 * 2 * 32 * 2, "keys and values of two heads of 32, in 2 bytes"
        assert all(line.r2 > 0.999 for line in series.lines.values())
    assert set(inference.lines) == {"no_grad", "total"}
    assert set(lora.lines) == {"no_grad", "act", "backward", "total"}
    weights = inference.points[0].readings.weights
    assert weights == pytest.approx(2 * report.parameters, rel=0.02)
    # q and o (128 + 128), k and v (128 + 64), gate, up and down (128 + 256).
    adapter = 8 * (2 * 256 + 2 * 192 + 3 * 384)
    assert lora.points[0].readings.weights - weights == 2 * adapter
    assert lora.optimizer == pytest.approx(4 * 4 * adapter, rel=0.01), "weights, two moments, gradient sums in fp32"
    assert (lora.length, long.length) == (16, 64)
    for name in ("no_grad", "act"):
        assert long.lines[name].per_token == pytest.approx(lora.lines[name].per_token, rel=0.02)


@on_days(0)
def test_recomputation_keeps_only_inputs_of_layers() -> None:
    asked = request(LLAMA | {"num_hidden_layers": 3}, (8,), workloads=make_workloads((8,), full=False)[1:])
    kept, recomputed = (
        profile(msgspec.structs.replace(asked, recompute=recompute), quiet).series[0].points[0].readings
        for recompute in (False, True)
    )
    assert kept.forward is not None and recomputed.forward is not None
    assert recomputed.forward - recomputed.weights < 0.5 * (kept.forward - kept.weights)


@on_days(4)
def test_the_papers_trends() -> None:
    """Section 4.2.3 on a small GPT-2: M_no_grad and M_act are lines; M_backward of full fine-tuning is the gradients
    where the batch is small, and falls until activations outweigh them; LoRA has next to none, and saves little of a
    large batch."""
    targets = (("c_attn", "c_proj"),)
    asked = request(GPT2, (1, 16, 64), workloads=make_workloads((8,), targets), backends=(Backend.PEFT,))
    found = by_kind(profile(asked, quiet))
    full, lora = ([point.components for point in found[kind].points] for kind in (Kind.FULL, Kind.LORA))
    assert full[0].backward == pytest.approx(full[0].weights, rel=0.15)
    shares = [(one.backward or 0) / one.total for one in full]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.1
    assert all((one.backward or 0) < 0.1 * one.total for one in lora)
    assert lora[0].total < 0.7 * full[0].total
    assert lora[-1].total == pytest.approx(full[-1].total, rel=0.2)
    for series in found.values():
        assert series.lines["no_grad"].r2 > 0.999
        assert series.workload.kind is Kind.INFERENCE or series.lines["act"].r2 > 0.999


@pytest.mark.parametrize("family", in_turns(FAMILIES, days=len(FAMILIES)))
def test_any_family_is_predicted(family: str) -> None:
    report = profile(request(tiny_model(family).config.to_dict(), (2,)), quiet)
    assert [len(series.points) for series in report.series] == [1, 1, 1]
    assert all(point.components.total > 0 for series in report.series for point in series.points)


def test_shapes_that_depend_on_values_cannot_be_predicted() -> None:
    with pytest.raises(UnsupportedBase, match="only measured on a GPU"), fake_tensors():
        torch.zeros(4).nonzero()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workloads": make_workloads((8,), (("nowhere",),))}, "expected targets among q_proj"),
        pytest.param(
            {"workloads": make_workloads((8,), (("nowhere",),)), "backends": (Backend.PEFT,)},
            "targets: .*nowhere",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.slow
def test_what_the_base_does_not_have_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        profile(request(LLAMA, (1,), **changes), quiet)


def test_a_base_that_is_not_served_is_not_profiled() -> None:
    bloom = {"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 64}
    with pytest.raises(UnsupportedBase, match="bloom"):
        profile(request(bloom, (1,)), quiet)


GPU_SHAPE = LLAMA | {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "max_position_embeddings": 2048,
}


@pytest.mark.gpu
@pytest.mark.parametrize("backend", list(Backend))
def test_predictions_are_within_a_few_percent_of_measurements(backend: Backend) -> None:
    asked = request(GPU_SHAPE, (8, 32), lengths=(512,), backends=(backend,), predict=False)
    predicted = profile(msgspec.structs.replace(asked, predict=True), quiet)
    measured = profile(asked, quiet)
    assert measured.measured and not predicted.measured
    for guess, truth in zip(predicted.series, measured.series, strict=True):
        for expected, found in zip(guess.points, truth.points, strict=True):
            for name in ("weights", "no_grad", "forward", "forward_backward"):
                size, wanted = getattr(found.readings, name), getattr(expected.readings, name)
                print(backend.value, truth.workload.name, found.batch, name, size, wanted)
                assert size is None or wanted == pytest.approx(size, rel=0.05), (truth.workload.name, name)


@pytest.mark.gpu
def test_a_gpu_that_is_full_ends_the_series() -> None:
    workloads = make_workloads((8,), full=False)[:1]
    asked = request(GPU_SHAPE, (1, 4096), lengths=(2048,), workloads=workloads, predict=False)
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (2 << 30)) / total)
    try:
        (series,) = profile(asked, quiet).series
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert [point.batch for point in series.points] == [1]
    assert series.ended == "out of memory at 4096 rows; 1 rows fitted"
