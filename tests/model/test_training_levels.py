"""Compiled training layers that keep less than all, against those that keep all and against the base's own layers and
autograd."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import msgspec
import pytest
import torch
from torch import Tensor

from coserve.core.errors import UnsupportedBase
from coserve.core.gpu_memory import Kept
from coserve.core.training.settings import DpoLoss, TrainingSettings
from coserve.finetune import lora_tensors
from coserve.finetune.init import new_adapter
from coserve.finetune.layers.compiled import levels_of
from coserve.finetune.losses.loss import Loss
from coserve.finetune.memory_limits import StepRecompute
from coserve.finetune.micro_batch import MicroBatchRunner, run_to_end
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.kernels.attention.packed import PackedAttention
from coserve.kernels.lora.segments import Segments
from coserve.model.base import Base, wrap_base
from coserve.model.layers import LayerCut
from coserve.model.lora import LoraBatch
from coserve.model.training.compiled_layers import CompiledLayers
from coserve.model.training.running_pass import RunningPass
from coserve.model.training.trace import Compile, inductor
from tests.support.examples import in_turns, on_days
from tests.support.finetuning import CPU, SETTINGS, pack_rows, random_corpus, random_pairs, started, tiny_base
from tests.support.gpu_memory import COSTS
from tests.support.interpreted import interpreted
from tests.support.lora_backends import SEGMENTED
from tests.support.tiny_models import tiny_model

CORPUS = random_corpus()


def with_levels(base: Base, compile: Compile = interpreted) -> CompiledLayers:
    layers = CompiledLayers(base, LayerCut(base), compile, costs=lambda: COSTS)
    layers.compile()
    layers.compile_levels(COSTS)
    return layers


def gradients(base: Base, compiled: CompiledLayers | None, *, recompute: bool = False, **counts: int) -> list[Tensor]:
    """The loss's sums and all gradients."""
    optimizer, rows = started(base), pack_rows(CORPUS, [1, 3], CPU)
    lora = LoraBatch(Segments((0, rows.tokens), (0,)), (optimizer.weights(),), SEGMENTED)
    runner = MicroBatchRunner(base, recompute=recompute, compiled=compiled)
    sums = run_to_end(
        runner.forward_backward(rows, lora, optimizer.trainable, optimizer.grads, how=StepRecompute(**counts))
    )
    return [sums, *(one for layer in optimizer.grads for one in layer)]


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    for own, right in zip(found, expected, strict=True):
        torch.testing.assert_close(own, right, rtol=2e-4, atol=2e-5)


class Calls:
    """How often products of sites, and attention, run."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.groups, self.attention = list[tuple[int, int]](), list[int]()
        learn, attend = RunningPass.learn, RunningPass.attend

        def counted_learn(own: RunningPass, layer: int, group: int, x_TD: Tensor) -> Tensor:
            self.groups.append((layer, group))
            return learn(own, layer, group, x_TD)

        def counted_attend(own: RunningPass, layer: int, *given) -> Tensor:
            self.attention.append(layer)
            return attend(own, layer, *given)

        patch.setattr(RunningPass, "learn", counted_learn)
        patch.setattr(RunningPass, "attend", counted_attend)


@pytest.fixture
def calls() -> Iterator[Calls]:
    with pytest.MonkeyPatch.context() as patch:
        yield Calls(patch)


@pytest.fixture(scope="module")
def llama() -> tuple[Base, CompiledLayers]:
    base = tiny_base("llama")
    return base, with_levels(base)


FORWARD = [(layer, group) for layer in (0, 1) for group in range(4)]
AGAIN = (0, 1, 2)
"""Groups of a Llama layer whose products are computed again: nobody reads that of the last one, `down_proj`, in a
backward."""


@pytest.mark.parametrize(
    ("counts", "again", "attention"),
    [
        pytest.param({}, [], [], marks=pytest.mark.slow),
        pytest.param({"partly": 2}, [0, 1], [], marks=pytest.mark.slow),
        pytest.param({"recomputed": 2}, [0, 1], [0, 1], marks=pytest.mark.slow),
        ({"recomputed": 1, "partly": 1}, [0, 1], [0]),
        pytest.param({"recomputed": 1}, [0], [0], marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_autograd_and_nothing_is_computed_twice_in_vain(
    llama: tuple[Base, CompiledLayers], calls: Calls, counts: dict[str, int], again: list[int], attention: list[int]
) -> None:
    base, compiled = llama
    found = gradients(base, compiled, **counts)
    assert sorted(calls.groups) == sorted(FORWARD + [(layer, group) for layer in again for group in AGAIN])
    assert sorted(calls.attention) == sorted([0, 1, *attention])
    close(found, gradients(base, None))


@on_days(1)
def test_the_setting_recompute_keeps_inputs_alone(llama: tuple[Base, CompiledLayers], calls: Calls) -> None:
    base, compiled = llama
    found = gradients(base, compiled, recompute=True)
    assert sorted(calls.attention) == [0, 0, 1, 1]
    close(found, gradients(base, None))


@on_days(1)
def test_layers_that_are_not_cut_so_yet_run_their_forward_again(calls: Calls) -> None:
    base = tiny_base("llama")
    layers = CompiledLayers(base, LayerCut(base), interpreted, costs=lambda: COSTS)
    layers.compile()
    assert layers.cuts == {Kept.ALL}
    calls.groups.clear()
    found = gradients(base, layers, recomputed=1, partly=1)
    assert sorted(calls.groups) == sorted([*FORWARD, *FORWARD])
    close(found, gradients(base, None))
    layers.compile_levels(COSTS)
    assert layers.cuts == {*Kept}
    close(gradients(base, layers, recomputed=1, partly=1), found)


@on_days(1)
def test_a_pass_that_began_before_the_cuts_goes_on_as_it_began() -> None:
    base = tiny_base("llama")
    layers = CompiledLayers(base, LayerCut(base), interpreted, costs=lambda: COSTS)
    layers.compile()
    optimizer, rows = started(base), pack_rows(CORPUS, [1, 3], CPU)
    lora = LoraBatch(Segments((0, rows.tokens), (0,)), (optimizer.weights(),), SEGMENTED)
    runner = MicroBatchRunner(base, recompute=True, compiled=layers)
    steps = runner.forward_backward(rows, lora, optimizer.trainable, optimizer.grads)
    next(steps)
    next(steps)
    layers.compile_levels(COSTS)
    sums = run_to_end(steps)
    close([sums, *(one for layer in optimizer.grads for one in layer)], gradients(base, None))


def test_costs_of_a_base_that_refused_a_batch_stay_forgotten() -> None:
    """Jobs are planned for the base's own layers then."""
    base = tiny_base("llama")
    layers = CompiledLayers(base, LayerCut(base), interpreted, costs=lambda: COSTS)
    layers.compile()
    inputs = layers.cut.embed(torch.arange(1, 8), torch.arange(7), PackedAttention((0, 7)))
    inputs.calls[0].kwargs["use_cache"] = True
    assert layers.begin(inputs, None) is None
    assert layers.notes and layers.costs is None
    layers.compile_levels(COSTS)
    assert layers.costs is None


@pytest.mark.slow
def test_a_cut_that_computes_something_else_is_refused() -> None:
    base = tiny_base("llama")
    later = list[bool]()

    def wrong(graph, inputs, *, is_backward: bool):
        run = interpreted(graph, inputs, is_backward=is_backward)
        return (lambda given: [2 * run(given)[0]]) if later and is_backward else run

    layers = CompiledLayers(base, LayerCut(base), wrong, costs=lambda: COSTS)
    layers.compile()
    later.append(True)
    with pytest.raises(UnsupportedBase, match="gradient"):
        layers.compile_levels(COSTS)
    assert layers.cuts == {Kept.ALL}


def test_cuts_that_keep_less_are_checked_with_few_tokens() -> None:
    """Jobs run beside, and leave little memory."""
    base, sizes = tiny_base("llama"), list[int]()

    def counted(graph, inputs, *, is_backward: bool):
        run = interpreted(graph, inputs, is_backward=is_backward)

        def counted_run(given):
            sizes.extend(one.shape[1] for one in given if isinstance(one, Tensor) and one.ndim == 3)
            return run(given)

        return counted_run

    layers = CompiledLayers(base, LayerCut(base), counted, costs=lambda: COSTS)
    layers.compile()
    assert max(sizes) > 2000, "as many as the kernels are compiled for"
    sizes.clear()
    layers.compile_levels(COSTS)
    assert 200 < max(sizes) < 300


def test_levels_that_found_no_memory_may_be_compiled_again() -> None:
    base = tiny_base("llama")
    errors = list[Exception]()

    def full(graph, inputs, *, is_backward: bool):
        if errors:
            raise errors.pop()
        return interpreted(graph, inputs, is_backward=is_backward)

    layers = CompiledLayers(base, LayerCut(base), full, costs=lambda: COSTS)
    layers.compile()
    errors.append(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        layers.compile_levels(COSTS)
    assert layers.cuts == {Kept.ALL}
    layers.compile_levels(COSTS)
    assert layers.cuts == {*Kept}


@on_days(1)
def test_rewards_are_0_at_the_reference_whatever_layers_keep() -> None:
    """Of a new adapter, and of one that a job continues. In 16 bits by the real compiler, where the cuts round
    otherwise. Its evaluations do not change when levels are loaded."""
    base = wrap_base(tiny_model("llama").to(torch.float16), name="llama")
    layers = CompiledLayers(base, LayerCut(base), inductor, costs=lambda: COSTS)
    layers.compile()
    pairs, settings = random_pairs(rows=3), msgspec.structs.replace(SETTINGS, targets=("q_proj", "down_proj"))
    weights = new_adapter(settings, base.spec, seed=3, dtype=torch.float32, device="cpu")
    optimizer, rows = (
        AdapterOptimizer(weights, base.spec, TrainingSettings(), base.dtype),
        pack_rows(pairs, range(3), CPU),
    )
    lora = LoraBatch(Segments((0, rows.tokens), (0,)), (optimizer.weights(),), SEGMENTED)
    runner, loss = MicroBatchRunner(base, recompute=False, compiled=layers), Loss(preference=DpoLoss(beta=0.3))

    def likelihood() -> Tensor:
        return run_to_end(runner.evaluate(rows, lora))

    def rewards(**counts: int) -> list[list[float]]:
        learned = runner.forward_backward(
            rows, lora, optimizer.trainable, optimizer.grads, loss, StepRecompute(**counts)
        )
        return [run_to_end(steps)[0, 2:].tolist() for steps in (learned, runner.evaluate(rows, lora, loss))]

    def continued(**counts: int) -> list[float]:
        own = runner.forward_backward(
            rows, changed, adapter.trainable, adapter.grads, replace(loss, reference=start), StepRecompute(**counts)
        )
        return cast(list[float], run_to_end(own)[0, 2:].tolist())

    adapter = started(base, settings)
    start = lora_tensors.cast(adapter.weights(), base.dtype)
    for _, tensor in lora_tensors.named_tensors(start):
        tensor.requires_grad_()
    changed = replace(lora, adapters=(adapter.weights(),))
    before = likelihood()
    for levels, *cases in ((False, {}, {"recomputed": 1}), (True, {"partly": 2}, {"recomputed": 1, "partly": 1})):
        if levels:
            layers.compile_levels(COSTS)
        for counts in cases:
            assert rewards(**counts) == [[0.0] * 3] * 2, (levels, counts)
            assert continued(**counts) == [0.0] * 3, (levels, counts)
    assert torch.equal(likelihood(), before)
    found, expected = gradients(base, layers, recomputed=1, partly=1), gradients(base, None)
    for own, right in zip(found, expected, strict=True):
        assert torch.linalg.vector_norm((own - right).float()) <= 0.02 * torch.linalg.vector_norm(right.float())


@pytest.mark.parametrize("family", in_turns(["gpt2", "gemma2", "gemma3", "mistral", "phi", "phi3", "qwen3"], days=7))
def test_gradients_of_other_families(family: str) -> None:
    base = tiny_base(family)
    compiled, expected = with_levels(base), gradients(base, None)
    for counts in ({}, {"partly": len(base.layers)}, {"recomputed": len(base.layers)}):
        close(gradients(base, compiled, **counts), expected)
    assert not compiled.notes, "none was refused"


def test_which_layers_keep_what() -> None:
    low, middle, all = Kept.INPUT, Kept.ATTENTION, Kept.ALL
    assert levels_of(5, 1, 1, 2) == (all, low, middle, middle, all)
    assert levels_of(3, 0, 0, 0) == (all, all, all)
    assert levels_of(3, 1, 3, 0)[1:] == (low, low)
    assert levels_of(3, 1, 1, 9)[1:] == (low, middle)
