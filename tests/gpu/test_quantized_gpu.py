"""Quantised bases on a GPU: kernels, captured steps and compiled training layers. Run with `pytest -m gpu`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from coserve.core.training.settings import TrainingSettings
from coserve.core.types import LoraSettings
from coserve.finetune.init import new_adapter
from coserve.finetune.micro_batch import MicroBatchRunner, run_to_end
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.kernels.attention.packed import PackedAttention
from coserve.kernels.gemm import gemv, skinny
from coserve.kernels.lora.segments import Segments
from coserve.kernels.quantized import fp8, nf4
from coserve.kernels.quantized.weights import Fp8Weight
from coserve.model.base import Base
from coserve.model.fused import FusedBase
from coserve.model.layers import LayerCut
from coserve.model.load import load_base
from coserve.model.lora import LoraBatch
from coserve.model.training.compiled_layers import CompiledLayers
from tests.support.families import tiny_family
from tests.support.finetuning import pack_rows, random_corpus
from tests.support.generation import prompt
from tests.support.gpu_engine import request, texts
from tests.support.lora_backends import SEGMENTED

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "max_position_embeddings": 512,
    # As trained models have them: with larger weights each layer multiplies the rounding of the one before.
    "initializer_range": 0.02,
}


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(sum(shape)), device=DEVICE)


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    tiny_family("llama", **SIZES).save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=["fp8", "nf4"])
def base(request: pytest.FixtureRequest, folder: Path) -> Base:
    return load_base(str(folder), device="cuda", dtype="auto", quantization=request.param)


@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 14336), (48, 64)])
def test_kernels_are_exact(outputs: int, inputs: int) -> None:
    weight = draw(outputs, inputs).bfloat16()
    codes, scales = fp8.quantize(weight)
    own_codes, own_scales = fp8.quantize_activations(weight)
    torch.testing.assert_close(own_scales, scales)
    assert distance(own_codes, codes) < 1e-3
    expected = (codes.float() * scales[:, None]).bfloat16()
    assert torch.equal(fp8.dequantize(codes, scales, torch.bfloat16), expected)
    codes, absmax = nf4.quantize(weight)
    plain = nf4.dequantize(codes.cpu(), absmax.cpu(), torch.bfloat16)
    assert torch.equal(nf4.dequantize(codes, absmax, torch.bfloat16).cpu(), plain)


@pytest.mark.parametrize("rows", [1, 16, 33, 64, 65, 2048])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 14336)])
def test_products_in_fp8(outputs: int, inputs: int, rows: int) -> None:
    """By every kernel, and by tensor cores, which round x, too."""
    codes, scales = fp8.quantize(draw(outputs, inputs) * 0.02)
    weights, x = Fp8Weight(codes, None, (outputs,), scales), draw(rows, inputs).bfloat16()
    expected = x.float() @ weights.dense(torch.float32).T
    assert distance(weights.linear(x), expected) < (0.05 if rows > fp8.FEW_ROWS else 0.01)
    if rows == 1:
        for shape in gemv.shapes_of(inputs):
            assert distance(gemv.gemv(x[0], codes, None, shape, scales), expected[0]) < 0.01
    if skinny.rows_of(rows):
        counters = skinny.make_counters(outputs, DEVICE)
        for rounded, most in ((False, 0.01), (True, 0.05)):
            for shape in skinny.shapes_of(inputs, outputs, x.dtype, skinny.rows_of(rows) or rows, rounded=rounded):
                found, _ = skinny.skinny_gemm(x, codes, None, counters, shape, scales, rounded=rounded)
                assert distance(found, expected) < most, shape
        assert not counters.any()


@pytest.mark.parametrize(("outputs", "inputs"), [(28672, 4096), (4096, 14336), (144, 272)])
def test_gradients_in_fp8(outputs: int, inputs: int) -> None:
    """Rounded by rows of `dy scale`, beside the dequantised weight's."""
    codes, scales = fp8.quantize(draw(outputs, inputs) * 0.02)
    assert torch.equal(fp8.transposed(codes).view(torch.uint8), codes.view(torch.uint8).T)
    weights, dy = Fp8Weight(codes, None, (outputs,), scales), draw(2048, outputs).bfloat16()
    found = weights.backward(dy)
    assert 0.01 < distance(found, dy.float() @ weights.dense(torch.float32)) < 0.05


@pytest.mark.parametrize("rows", [17, 64])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)])
def test_rounded_rows_in_a_graph(outputs: int, inputs: int, rows: int) -> None:
    """x made by the kernel right ahead, as often as a model has layers, the memory of what is done used again: the
    numbers of torch's product of the same codes."""
    codes, scales = fp8.quantize(draw(outputs, inputs) * 0.02)
    given, bias = draw(rows, inputs).bfloat16(), draw(outputs).bfloat16()
    x, counters = torch.empty_like(given), skinny.make_counters(outputs, DEVICE)
    for shape in skinny.shapes_of(inputs, outputs, x.dtype, 64, rounded=True):

        def run(shape: skinny.Shape = shape) -> list[Tensor]:
            found = []
            for scale in range(1, 9):
                torch.mul(given, scale, out=x)
                found.append(skinny.skinny_gemm(x, codes, bias, counters, shape, scales, rounded=True)[0])
            return found

        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = run()
        for _ in range(3):
            for y in got:
                y.fill_(float("nan"))
            given.copy_(torch.randn_like(given))
            graph.replay()
            for scale, y in enumerate(got, 1):
                expected = fp8.product((given * scale).bfloat16(), codes, scales).float() + bias
                assert distance(y, expected) < 5e-3, (shape, scale)
        assert not counters.any()


def test_graphs_repeat_themselves(base: Base) -> None:
    """Captured steps give the same texts again and again, and compiled layers the model's logits."""
    fused = FusedBase(base)
    fused.check()
    asked = [request(str(n), prompt(n)) for n in (3, 17, 41, 90)]
    first = texts(base, asked, fused=fused)
    assert texts(base, asked, fused=fused) == first


@pytest.mark.parametrize("gradients", [False, True])
def test_compiled_training_layers_learn_as_autograd_does(base: Base, gradients: bool) -> None:
    """In layer 0, too; also with products of the backward in FP8, which autograd's layers do not have."""
    settings, corpus = LoraSettings(r=8), random_corpus(0, (70, 60, 90))
    compiled = CompiledLayers(base, LayerCut(base))
    for shared in base.sites.shared():
        if isinstance(shared.stacked, Fp8Weight):
            shared.stacked = replace(shared.stacked, rounds_gradients=gradients)
    compiled.compile()
    found = []
    for layers in (compiled, None):
        start = base.begun(new_adapter(settings, base.spec, seed=3, dtype=torch.float32, device="cuda"))
        optimizer = AdapterOptimizer(start, base.spec, TrainingSettings(), base.dtype, row_norms=base.row_norms)
        rows = pack_rows(corpus, [0, 1, 2], DEVICE)
        lora = LoraBatch(Segments((0, rows.tokens), (0,)), (optimizer.weights(),), SEGMENTED)
        runner = MicroBatchRunner(base, recompute=False, compiled=layers)
        run_to_end(runner.forward_backward(rows, lora, optimizer.trainable, optimizer.grads))
        found.append([one.clone() for layer in optimizer.grads for one in layer])
    for own, right in zip(*found, strict=True):
        assert right.norm() == 0 or distance(own, right) < 0.15


def rounded(weight: Tensor, quantization: str) -> Tensor:
    """`weight (outputs, inputs)` as the quantised base knows it."""
    if quantization == "nf4":
        return nf4.dequantize(*nf4.quantize(weight), weight.dtype)
    codes, scales = fp8.quantize(weight)
    return fp8.dequantize(codes, scales, weight.dtype)


def test_logits_are_those_of_the_dequantised_weights(base: Base, folder: Path) -> None:
    plain = load_base(str(folder), device="cuda", dtype="auto")
    assert base.spec.quantization is not None
    for module in (module for layer in plain.layers for module in layer.modules()):
        if isinstance(module, torch.nn.Linear):
            module.weight.data = rounded(module.weight.data, base.spec.quantization)
    ids_T = torch.arange(3, 100, device=DEVICE)
    positions_T, attention = torch.arange(len(ids_T), device=DEVICE), PackedAttention((0, len(ids_T)))
    with torch.no_grad():
        found, expected = (one.forward(ids_T, positions_T, attention, lora=None, keep=None) for one in (base, plain))
    assert distance(found, expected) < 0.1
