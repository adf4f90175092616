"""Observes a model's attention: the shapes of keys and values, the masks and windows, and the list of decoder layers.

Attention is replaced by a function that records its calls. A model whose attention cannot be hooked is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from coserve.core.errors import UnsupportedBase
from coserve.kernels.attention.interface import KvShape, Window
from coserve.kernels.recurrent.interface import StateShape
from coserve.kernels.recurrent.wrappers import RecordedStates
from coserve.model import seam
from coserve.model.fingerprint import is_fake
from coserve.model.probe.forward import SEQUENCES, check_inputs, use_attention
from coserve.model.recurrent.seam import hook, mixers, recurring
from coserve.model.settings import refuse_config

_PROBE = "coserve_probe"
_SHAPES = "coserve_shapes"
_SHAPED = 2
"""Tokens that `observe_shapes` runs."""


def refuse_statically(model: PreTrainedModel) -> None:
    """Raise `UnsupportedBase` if the class and the config alone rule the model out."""
    family, config = model.config.model_type, model.config
    refuse_config(config)
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedBase(f"{family}: quantized weights are not supported")
    if not getattr(model, "_supports_attention_backend", False) and not mixers(model):
        raise UnsupportedBase(
            f"{family} does not support attention backends in this version of transformers: its attention cannot read "
            "our pages"
        )
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise UnsupportedBase(f"{family} cannot compute the logits of chosen tokens only (no `logits_to_keep`)")
    if model.get_output_embeddings() is None:
        raise UnsupportedBase(f"{family} is not a language model: it has no output head")


@dataclass
class Observed:
    """Record of one forward through the probe."""

    layers: list[tuple[nn.Module, int]] = field(default_factory=list)
    """The attention module and the window (0: none) of each layer, in order of the calls."""
    masks: list[object] = field(default_factory=list)
    kv_shapes: list[KvShape] = field(default_factory=list)
    """Shapes of all layers; zeros for those without keys and values of their own."""
    kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Keys and values of each layer that has its own."""
    chunks: dict[nn.Module, int] = field(default_factory=dict)
    """Chunk size of each attention module with chunked attention (`Window.chunked`)."""
    states: dict[int, StateShape] = field(default_factory=dict)
    """The state's sizes of each layer that has a recurrent one."""

    @property
    def attention(self) -> list[nn.Module]:
        return [module for module, _ in self.layers]


@dataclass(frozen=True)
class _Mask:
    """Replaces a mask; records the rule `(batch, head, query, key) -> visible` that a layer would have used."""

    rule: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    local: int | None
    """Size of the window or chunk, if the rule has one."""


def _probe_mask(
    *,
    mask_function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    local_size: int | None = None,
    **_: object,
) -> _Mask:
    return _Mask(mask_function, local_size)


def _probe_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    *,
    coserve_observed: Observed | None = None,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    if coserve_observed is not None:
        coserve_observed.layers.append((module, sliding_window or 0))
        coserve_observed.masks.append(attention_mask)
        coserve_observed.kv_shapes.append(_kv_shape(coserve_observed.kv, seam.layer_of(module), key, value))
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


def _kv_shape(own: dict[int, tuple[Tensor, Tensor]], layer: int, key: Tensor, value: Tensor) -> KvShape:
    """Return the shape of a layer's keys and values.

    `own`: the keys and values of earlier layers. A layer with the same tensors reads that layer's; else its tensors
    are added.
    """
    source = next((source for source, (k, v) in own.items() if k is key and v is value), None)
    if source is not None:
        return KvShape(0, 0, 0, source)
    own[layer] = key, value
    return KvShape(key.shape[1], key.shape[3], value.shape[3])


AttentionInterface.register(_PROBE, _probe_attention)
AttentionMaskInterface.register(_PROBE, _probe_mask)
AttentionInterface.register(_SHAPES, _probe_attention)
AttentionMaskInterface.register(_SHAPES, lambda **_: None)


class _Values(TorchFunctionMode):
    """Answers what a model asks about values, which tensors on the `meta` device do not have: no token is padding, and
    the first expert has all tokens."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self._experts = getattr(model.config.get_text_config(), "num_experts_per_tok", 0)

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        first = args[0] if args else None
        if isinstance(first, Tensor) and first.is_meta:
            if func is Tensor.__bool__:
                return True
            if func is Tensor.tolist:
                return [_SHAPED * self._experts] + [0] * (len(first) - 1)
        return func(*args, **(kwargs or {}))


def observe_shapes(model: PreTrainedModel) -> Observed:
    """Run a model on the `meta` device with attention that only records its calls. Nothing is checked. Raises
    `UnsupportedBase` if its shapes depend on values."""
    seen, states, row = Observed(), RecordedStates(), torch.zeros(1, _SHAPED, dtype=torch.int64, device="meta")
    hook(model)
    try:
        with use_attention(model, _SHAPES), torch.no_grad(), recurring(states), _Values(model):
            model(input_ids=row, position_ids=row, attention_mask=row + 1, use_cache=False, coserve_observed=seen)
    except (TypeError, AttributeError, ValueError, KeyError, RuntimeError) as error:
        raise UnsupportedBase(f"{model.config.model_type}: its sizes cannot be computed: {error}") from error
    seen.states = states.shapes
    _place_layers(seen, model)
    return seen


def observe(model: PreTrainedModel, context: int) -> Observed:
    """Run the model with attention that only records its calls.

    Raises:
        UnsupportedBase: attention does not run exactly once per layer, in order, or a layer's mask is anything but
            causal, causal within the window that it passes to attention, or causal within chunks, up to `context`
            tokens.
    """
    family, seen, states = model.config.model_type, Observed(), RecordedStates()
    try:
        with use_attention(model, _PROBE), torch.no_grad(), recurring(states):
            model(**check_inputs(model, SEQUENCES[0]), coserve_observed=seen)
    except (TypeError, AttributeError, ValueError, KeyError, RuntimeError) as error:
        raise UnsupportedBase(f"{family} does not run with a replaced attention: {error}") from error
    count = model.config.get_text_config().num_hidden_layers
    indices, seen.states = [seam.layer_of(module) for module, _ in seen.layers], states.shapes
    if indices != (sorted({*indices} & {*range(count)}) if states.shapes else list(range(count))):
        raise UnsupportedBase(
            f"{family}: expected attention through transformers' interface once in each of {count} layers, "
            f"got calls in layers {indices}"
        )
    if not indices:
        raise UnsupportedBase(f"{family} has no layer with attention: nothing could be kept in pages")
    for layer, (module, tokens), mask in zip(indices, seen.layers, seen.masks, strict=True):
        window = Window(tokens) if tokens else None
        if window is None and isinstance(mask, _Mask) and mask.local is not None and mask.local < context:
            window = Window(mask.local, chunked=True)
            seen.chunks[module] = mask.local
        _check_mask(f"{family}, layer {layer}", mask, window, context, model.device)
    _place_layers(seen, model)
    return seen


def _place_layers(seen: Observed, model: PreTrainedModel) -> None:
    """Give layers without attention their zeros in `kv_shapes`."""
    shapes = dict(zip((seam.layer_of(module) for module, _ in seen.layers), seen.kv_shapes, strict=True))
    count = model.config.get_text_config().num_hidden_layers
    seen.kv_shapes = [shapes.get(layer, KvShape(0, 0, 0)) for layer in range(count)]


def _check_mask(where: str, mask: object, window: Window | None, context: int, device: torch.device) -> None:
    if not isinstance(mask, _Mask):
        raise UnsupportedBase(f"{where}: the attention mask is not made by transformers' mask interface")
    zero, keys = torch.tensor(0, device=device), torch.arange(context, device=device)
    if is_fake(keys):
        return
    edges = {0, 1, context // 2, context - 1}
    if window is not None:
        size = window.tokens
        edges |= {size - 1, size, size + 1, 2 * size}
    for query in sorted(edge for edge in edges if 0 <= edge < context):
        expected = (keys <= query) & (keys >= (0 if window is None else window.first(query)))
        try:
            got = mask.rule(zero, zero, torch.tensor(query, device=device), keys)
        except (IndexError, RuntimeError) as error:
            raise UnsupportedBase(f"{where}: the attention mask depends on more than positions") from error
        if not torch.equal(expected, torch.as_tensor(got, device=device).expand(context)):
            within = "" if window is None else f" within {'chunks of ' * window.chunked}{window.tokens} tokens"
            raise UnsupportedBase(f"{where}: expected an attention mask that is causal{within}, got another rule")


def decoder_layers(model: PreTrainedModel, seen: Observed) -> tuple[str, list[nn.Module]]:
    """Return the path and the members of the stack whose layers contain their attention modules."""
    attention = [(seam.layer_of(module), module) for module, _ in seen.layers]
    for name, stack in model.named_modules():
        if not isinstance(stack, nn.ModuleList) or len(stack) != len(seen.kv_shapes):
            continue
        if all(any(inner is module for inner in stack[layer].modules()) for layer, module in attention):
            return name, list(stack)
    raise UnsupportedBase(f"{model.config.model_type}: found no list of decoder layers, one for each attention")
