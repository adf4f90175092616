"""Quantises the frozen linear modules of a base's layers, in place of their 16-bit weights.

Embeddings, the head, norms, routers and experts that are no linear modules keep their dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from coserve.core.errors import UnsupportedBase
from coserve.kernels.quantized import fp8, nf4
from coserve.kernels.quantized.weights import Fp8Weight, Nf4Weight, QuantizedWeight
from coserve.model.fingerprint import WHOLE, thinned

ROUTERS = ("gate", "router", "shared_expert_gate")
"""Last names of linear modules that choose experts: rounding would change the choice."""
TEXTS = {
    "fp8": "the base's linear modules are quantised to FP8 at load (e4m3, a scale for each output row); on a GPU "
    "products of over 16 rows round activations, too",
    "nf4": "the base's linear modules are quantised to NF4 at load (QLoRA's 4-bit NormalFloat, a scale for each block)",
}
"""Notes for the operator."""


def quantizable(name: str, inputs: int, outputs: int, quantization: str) -> bool:
    """Whether a linear module of a layer is quantised, by its name and sizes."""
    if name.rsplit(".", 1)[-1] in ROUTERS:
        return False
    return inputs % nf4.BLOCK == 0 if quantization == "nf4" else not (inputs % fp8.MULTIPLE or outputs % fp8.MULTIPLE)


def weight_bytes(inputs: int, outputs: int, quantization: str) -> int:
    """Return the bytes of a quantised weight: codes and scales."""
    elements = inputs * outputs
    return elements // 2 + 4 * elements // nf4.BLOCK if quantization == "nf4" else elements + 4 * outputs


class QuantizedLinear(nn.Linear):
    """A linear module whose weight is quantised. Its `weight` is the dequantised one, made at each access.

    Differentiable in its input.
    """

    _is_hf_initialized = True  # tells transformers not to draw its weight
    codes: Tensor
    scales: Tensor
    original: Tensor | None
    """Elements of the original weight for the base's fingerprint, until that is known."""

    def __init__(self, linear: nn.Linear, quantization: str, *, whole: bool) -> None:
        """Take the module's bias, and its weight unless it is on the `meta` device. `whole`: see `thinned`."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.quantization, self.dtype, self._whole = quantization, linear.weight.dtype, whole
        self.register_parameter("bias", linear.bias)
        self._parameters["weight"] = cast(nn.Parameter, linear.weight)  # transformers finds it there
        self.original = None
        if not linear.weight.is_meta:
            self.take(linear.weight.detach())

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """(O, D), in the base's dtype."""
        empty = self._parameters.get("weight")
        return self.stored.dense(self.dtype) if empty is None else empty

    @torch.no_grad()
    def take(self, weight_OD: Tensor) -> None:
        """Quantise the weight on its device."""
        self.hold(*(nf4 if self.quantization == "nf4" else fp8).quantize(weight_OD))
        self.original = thinned(weight_OD, whole=self._whole)

    def hold(self, codes: Tensor, scales: Tensor) -> None:
        """Become a module with this quantised weight: see `fp8.quantize` and `nf4.quantize`."""
        self._parameters.pop("weight", None)
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)

    @property
    def stored(self) -> QuantizedWeight:
        """The weight and bias as stored."""
        kind = Nf4Weight if self.quantization == "nf4" else Fp8Weight
        return kind(self.codes, self.bias, (self.out_features,), self.scales)

    def forward(self, input: Tensor) -> Tensor:
        y: Tensor = _Linear.apply(input, self)  # type: ignore[no-untyped-call]
        return y


class _Linear(torch.autograd.Function):
    """`QuantizedLinear.forward`: the products of `QuantizedWeight`, also for autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: QuantizedLinear) -> Tensor:  # noqa: ANN401 - torch's own signature
        ctx.module = module
        y_TO = module.stored.linear(x.reshape(-1, x.shape[-1]))
        return y_TO.view(*x.shape[:-1], y_TO.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401 - torch's own signature
        dx_TD = ctx.module.stored.backward(dy.reshape(-1, dy.shape[-1]))
        return dx_TD.view(*dy.shape[:-1], dx_TD.shape[-1]), None


def quantize_layers(model: PreTrainedModel, quantization: str) -> None:
    """Quantise the linear modules of the model's layers, one by one. Those on the `meta` device follow when they take
    their weights. Raises `UnsupportedBase` if there are none."""
    text = model.config.get_text_config()
    total = sum(parameter.numel() for parameter in model.parameters())
    tied = getattr(model.config, "tie_word_embeddings", False)  # read as transformers reads it
    if tied and model.device.type == "meta":  # the two are tied after the weights are read
        total -= text.vocab_size * text.hidden_size
    found = list(_linears(model, quantization))
    if not found:
        raise UnsupportedBase(
            f"{model.config.model_type}: no linear module of its layers can be quantised to {quantization}"
        )
    for name, linear in found:
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, QuantizedLinear(linear, quantization, whole=total <= WHOLE))


def _linears(model: PreTrainedModel, quantization: str) -> Iterator[tuple[str, nn.Linear]]:
    layers = model.config.get_text_config().num_hidden_layers
    for path, stack in model.named_modules():
        if isinstance(stack, nn.ModuleList) and len(stack) == layers:
            for name, module in stack.named_modules():
                if type(module) is nn.Linear and quantizable(
                    name, module.in_features, module.out_features, quantization
                ):
                    yield f"{path}.{name}", module


def quantization_of(model: PreTrainedModel) -> str:
    """Return how a model's layers are quantised, or `none`."""
    return next((one.quantization for one in model.modules() if isinstance(one, QuantizedLinear)), "none")
