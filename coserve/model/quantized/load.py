"""Quantises a base's weights while transformers loads them, one at a time, by its interface for quantisers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from coserve.model.quantized.modules import QuantizedLinear, quantize_layers, weight_bytes

NAME = "coserve"
"""Our name among transformers' quantisers."""


@register_quantization_config(NAME)
class QuantizeAtLoad(QuantizationConfigMixin):  # type: ignore[misc]
    """Tells `from_pretrained` to quantise the layers' linear modules."""

    def __init__(self, quantization: str, device: torch.device) -> None:
        """`quantization`: fp8 or nf4. `device`: where to quantise, and to keep the result."""
        self.quant_method, self.quantization, self.device = NAME, quantization, device


@register_quantizer(NAME)
class _Quantizer(HfQuantizer):  # type: ignore[misc]
    """Replaces the modules while they are on the `meta` device. Each takes its weight as soon as that is read."""

    quantization_config: QuantizeAtLoad

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: object) -> None:
        quantize_layers(model, self.quantization_config.quantization)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: object) -> None:
        self.remove_quantization_config(model)

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: object) -> bool:
        return _owner(model, param_name) is not None

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: torch.Tensor) -> float:
        if (module := _owner(model, param_name)) is None:
            return param.element_size()
        sizes = module.in_features, module.out_features
        return weight_bytes(*sizes, module.quantization) / param.numel()

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self.quantization_config.device)

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return True


class _Quantize(ConversionOps):  # type: ignore[misc]
    """Gives a weight to its module, and nothing else to transformers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def convert(self, input_dict: dict[str, Any], *, model: nn.Module, **kwargs: Any) -> dict[str, Any]:  # noqa: ANN401
        missing: set[str] = kwargs.get("missing_keys") or set()
        for name, value in input_dict.items():
            module = _owner(model, name)
            assert module is not None, "expected the weight of a quantised module"
            module.take((value[0] if isinstance(value, list) else value).to(self._device))
            missing.discard(name)
        return {}


def _owner(model: nn.Module, name: str) -> QuantizedLinear | None:
    """Return the quantised module whose weight has this name."""
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path) if path else model
    return module if own == "weight" and isinstance(module, QuantizedLinear) else None
