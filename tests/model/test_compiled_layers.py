"""Compiled training layers against the base's own layers and autograd. The graphs run operation by operation: no
compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, fx, nn

from coserve.core.errors import UnsupportedBase
from coserve.finetune.memory_limits import AS_CONFIGURED, StepRecompute
from coserve.finetune.micro_batch import MicroBatchRunner, run_to_end
from coserve.finetune.packed_rows import PackedRows
from coserve.kernels.attention.packed import PackedAttention
from coserve.kernels.lora.interface import LoraBackend
from coserve.kernels.lora.segments import Segments
from coserve.model.base import Base, wrap_base
from coserve.model.dropout import DropoutSpec, dropout_of
from coserve.model.layers import LayerCut
from coserve.model.lora import LoraBatch, LoraWeights
from coserve.model.training.compiled_layers import CompiledLayers, relative_error
from coserve.model.training.kinds import kind_of
from coserve.model.training.trace import Compile, CompiledLayer, trace_layer
from tests.support.families import tiny_family
from tests.support.finetuning import CPU, Bench, job_spec, pack_rows, random_corpus, started, tiny_base
from tests.support.gpu_memory import COSTS
from tests.support.interpreted import interpreted
from tests.support.lora_backends import GROUPED, SEGMENTED

CORPUS = random_corpus()


class Counted:
    """`Compile` that counts the runs of forwards and backwards."""

    def __init__(self, compile: Compile = interpreted) -> None:
        self.forwards = self.backwards = 0
        self._compile = compile

    def __call__(
        self, graph: fx.GraphModule, inputs: Sequence[object], *, is_backward: bool
    ) -> Callable[[list[object]], Sequence[Tensor]]:
        run = self._compile(graph, inputs, is_backward=is_backward)

        def counted(given: list[object]) -> Sequence[Tensor]:
            self.forwards += not is_backward
            self.backwards += is_backward
            return run(given)

        return counted

    def reset(self) -> None:
        self.forwards = self.backwards = 0


def compiled_layers(base: Base, compile: Compile) -> CompiledLayers:
    layers = CompiledLayers(base, LayerCut(base), compile, costs=lambda: COSTS)
    assert not layers.ready and layers.costs is None
    layers.compile()
    assert layers.ready and layers.costs is COSTS
    return layers


def lora_of(
    rows: PackedRows, optimizer, lora_backend: LoraBackend = SEGMENTED, dropout: DropoutSpec | None = None
) -> LoraBatch:
    masks = None if dropout is None else dropout_of((0, rows.tokens), [dropout])
    return LoraBatch(Segments((0, rows.tokens), (0,)), (optimizer.weights(),), lora_backend, masks)


def gradients(
    base: Base,
    compiled: CompiledLayers | None,
    packs: Sequence[list[int]],
    how: StepRecompute = AS_CONFIGURED,
    **options,
) -> tuple[Tensor, ...]:
    """The loss's sums and all gradients of these rows."""
    optimizer = started(base)
    runner = MicroBatchRunner(base, recompute=options.pop("recompute", False), compiled=compiled)
    total = torch.zeros(1, 2, dtype=torch.float64)
    for indices in packs:
        rows = pack_rows(CORPUS, indices, CPU)
        lora = lora_of(rows, optimizer, **options)
        total += run_to_end(runner.forward_backward(rows, lora, optimizer.trainable, optimizer.grads, how=how))
    return total, *(one.clone() for layer in optimizer.grads for one in layer)


def equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for own, right in zip(found, expected, strict=True):
        torch.testing.assert_close(own, right, rtol=2e-4, atol=2e-5)


@pytest.fixture(scope="module")
def llama() -> tuple[Base, CompiledLayers, Counted]:
    base, counted = tiny_base("llama"), Counted()
    return base, compiled_layers(base, counted), counted


PACKS = ([1, 3],)


@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gradients_are_those_of_autograd(llama: tuple[Base, CompiledLayers, Counted], recompute: bool) -> None:
    base, compiled, counted = llama
    counted.reset()
    found = gradients(base, compiled, PACKS, recompute=recompute)
    layers = len(base.layers) * len(PACKS)
    assert (counted.forwards, counted.backwards) == (layers * (2 if recompute else 1), layers)
    equal(found, gradients(base, None, PACKS))


def test_layers_that_are_recomputed_change_nothing(llama: tuple[Base, CompiledLayers, Counted]) -> None:
    base, compiled, counted = llama
    kept = gradients(base, compiled, PACKS)
    for layers in (1, len(base.layers)):
        counted.reset()
        found = gradients(base, compiled, PACKS, StepRecompute(recomputed=layers))
        assert counted.forwards == len(base.layers) + layers
        assert all(torch.equal(one, other) for one, other in zip(found, kept, strict=True))


@pytest.mark.slow
def test_a_batch_that_is_refused_after_all_recomputes_the_layers_that_it_has_no_memory_for(
    llama: tuple[Base, CompiledLayers, Counted], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, compiled, _ = llama
    expected, refused = gradients(base, None, PACKS), lambda self, tokens: False
    with monkeypatch.context() as patch:
        patch.setattr(CompiledLayer, "fits", refused)
        ran, layer = list[int](), LayerCut.layer

        def run(self: LayerCut, i: int, *given) -> Tensor:
            ran.append(i)
            return layer(self, i, *given)

        patch.setattr(LayerCut, "layer", run)
        found = gradients(base, compiled, PACKS, StepRecompute(compiled=True))
    assert ran == [*range(len(base.layers)), *reversed(range(len(base.layers)))]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert compiled.costs is None, "jobs are planned for the layers themselves from now on"
    assert "other sizes" in compiled.notes[0]
    compiled.notes, compiled.costs = (), COSTS


def test_an_evaluation_runs_compiled_forwards(llama: tuple[Base, CompiledLayers, Counted]) -> None:
    base, compiled, counted = llama
    optimizer, rows = started(base), pack_rows(CORPUS, [0, 2], CPU)
    counted.reset()
    found, expected = (
        run_to_end(MicroBatchRunner(base, recompute=False, compiled=own).evaluate(rows, lora_of(rows, optimizer)))
        for own in (compiled, None)
    )
    assert (counted.forwards, counted.backwards) == (len(base.layers), 0)
    equal([found], [expected])


@pytest.mark.parametrize(
    "options", [pytest.param({"dropout": DropoutSpec(0.5, 3)}, marks=pytest.mark.slow), {"lora_backend": GROUPED}]
)
def test_what_they_cannot_do_runs_the_layers_themselves(
    llama: tuple[Base, CompiledLayers, Counted], options: dict[str, object]
) -> None:
    base, compiled, counted = llama
    counted.reset()
    found = gradients(base, compiled, PACKS, **options)
    assert (counted.forwards, counted.backwards) == (0, 0)
    equal(found, gradients(base, None, PACKS, **options))


@pytest.mark.slow
def test_two_adapters_in_one_batch_that_begin_at_the_second_layer(llama: tuple[Base, CompiledLayers, Counted]) -> None:
    """A pass without a backward in the first layer, and gradients of each adapter in its own sums."""
    base, compiled, counted = llama
    upper = [site for site, spec in base.spec.sites.items() if spec.layer == 1]

    def both(layers: CompiledLayers | None) -> list[Tensor]:
        optimizers = [started(base), started(base)]
        weights = tuple(
            LoraWeights(one.weights().settings, {site: one.weights().sites[site] for site in upper})
            for one in optimizers
        )
        rows = pack_rows(CORPUS, [1, 3], CPU)
        lora = LoraBatch(Segments((0, 5, rows.tokens), (0, 1)), weights, SEGMENTED)
        joined = [
            [tensor for own in pair for tensor in own] if layer else []
            for layer, pair in enumerate(zip(*(one.trainable for one in optimizers), strict=True))
        ]
        sums = [
            [tensor for own in pair for tensor in own] if layer else []
            for layer, pair in enumerate(zip(*(one.grads for one in optimizers), strict=True))
        ]
        runner = MicroBatchRunner(base, recompute=False, compiled=layers)
        return [run_to_end(runner.forward_backward(rows, lora, joined, sums)), *sums[1]]

    counted.reset()
    found = both(compiled)
    assert (counted.forwards, counted.backwards) == (2, 1)
    expected = both(None)
    assert all(float(one.abs().sum()) > 0 for one in expected)
    equal(found, expected)


def test_other_arguments_than_the_traced_ones_run_the_layers_themselves_and_are_told(
    llama: tuple[Base, CompiledLayers, Counted],
) -> None:
    _, compiled, _ = llama
    tokens, positions = torch.arange(1, 8), torch.arange(7)
    inputs = compiled.cut.embed(tokens, positions, PackedAttention((0, 7)))
    assert compiled.begin(inputs, None) is not None and not compiled.notes
    call = inputs.calls[1]
    other = replace(call, kwargs=call.kwargs | {"use_cache": True})
    assert compiled.begin(replace(inputs, calls=(inputs.calls[0], other)), None) is None
    assert "operation by operation" in compiled.notes[0]
    compiled.notes = ()


def test_a_job_trains_through_them_and_one_with_dropout_says_why_not(
    llama: tuple[Base, CompiledLayers, Counted], tmp_path: Path
) -> None:
    base, compiled, counted = llama
    bench, corpus = Bench(base, tmp_path, compiled=compiled, lora_backend=SEGMENTED), random_corpus(lengths=(4, 3))
    plain = bench.start(bench.place(corpus, job_spec(corpus, "plain", steps=1))).id
    counted.reset()
    bench.run(plain)
    assert counted.backwards == len(base.layers) and not bench.trainer.notes
    bench.start(bench.place(corpus, job_spec(corpus, "dropping", steps=1, dropout=0.1)))
    assert [note for note in bench.trainer.notes if "LoRA dropout" in note and note.startswith("job dropping")]


def test_layers_that_differ_in_a_number_are_of_two_kinds() -> None:
    base = tiny_base("llama")
    first, second = base.layers[:2]
    groups = {}
    assert kind_of(first, groups) == kind_of(second, groups)
    cast(nn.Module, second.input_layernorm).variance_epsilon = 0.5
    assert kind_of(first, groups) != kind_of(second, groups)


def test_layers_with_experts_are_of_one_kind() -> None:
    base = wrap_base(tiny_family("mixtral"), name="mixtral")
    first, second = base.layers[:2]
    assert kind_of(first, {}) == kind_of(second, {})


def test_a_layer_for_one_number_of_tokens_is_refused() -> None:
    def run(hidden: Tensor) -> Tensor:
        return hidden * 2 if hidden.shape[1] == 37 else hidden

    with pytest.raises(UnsupportedBase, match="37"):
        trace_layer(run, [torch.randn(1, 37, 4)], 37).compile(interpreted)


def test_a_condition_on_the_number_of_tokens_is_kept() -> None:
    def run(hidden: Tensor) -> Tensor:
        return hidden * 2 if hidden.shape[1] < 100 else hidden * 3

    layer = trace_layer(run, [torch.randn(1, 37, 4)], 37).compile(interpreted)
    assert [tokens for tokens in (2, 37, 99, 100, 5000) if layer.fits(tokens)] == [2, 37, 99]


def test_a_compiler_may_replace_the_nodes_that_a_backward_reads() -> None:
    """Inductor does so on a GPU, where a softmax's maximum and sum are computed together."""

    def replacing(
        graph: fx.GraphModule, inputs: Sequence[object], *, is_backward: bool
    ) -> Callable[[list[object]], Sequence[Tensor]]:
        for node in [node for node in graph.graph.nodes if node.op == "call_function"]:
            with graph.graph.inserting_before(node):
                node.replace_all_uses_with(graph.graph.node_copy(node, lambda own: own))
            graph.graph.erase_node(node)
        return interpreted(graph, inputs, is_backward=is_backward)

    hidden, weight = torch.randn(1, 37, 4, requires_grad=True), torch.randn(4, 64)
    run = lambda hidden, weight: hidden + (hidden @ weight).softmax(-1) @ weight.T
    layer = trace_layer(run, [hidden.detach(), weight], 37).compile(replacing)
    with torch.no_grad():
        output, saved = layer.forward([hidden, weight])
        gradient = layer.backward(saved, torch.ones_like(hidden).cumsum(1))
    expected = run(hidden, weight)
    equal([output], [expected])
    equal([gradient], torch.autograd.grad(expected, hidden, torch.ones_like(hidden).cumsum(1)))


def test_a_layer_that_reads_a_tensor_of_its_own_is_refused() -> None:
    hidden_one = torch.randn(4)
    with pytest.raises(UnsupportedBase):
        trace_layer(lambda hidden: hidden * hidden_one, [torch.randn(1, 37, 4)], 37)


def test_compiled_functions_run_beside() -> None:
    """fx says of the whole process that it traces, and functions of torch.compile raise then: nothing is traced in
    `compile`."""
    base = tiny_base("llama")
    layers = CompiledLayers(base, LayerCut(base), interpreted)
    step = torch.compile(lambda x_T: x_T + 1, backend="eager")
    x_T = torch.ones(4)
    step(x_T)
    with ThreadPoolExecutor(1) as thread:
        compiling = thread.submit(layers.compile)
        while not compiling.done():
            assert step(x_T).tolist() == [2.0] * 4
        compiling.result()
    assert layers.ready


def test_tokens_of_other_experts_do_not_fail_a_check() -> None:
    right = torch.ones(1, 8, 4)
    one, three = right.clone(), right.clone()
    one[:, 5], three[:, :3] = 9.0, 9.0
    assert relative_error(one, right, routed=True) == 0
    assert relative_error(three, right, routed=True) > 1
    assert relative_error(one, right, routed=False) > 1
