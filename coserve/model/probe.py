"""Checks at start: a family either works through the hooks at attention and linear sites, or is refused with the
reason.

Nothing here knows a family by name. A model is observed: its own eager forward, the masks that it would have used,
which linear modules see every token, and whether the hooked model gives the same logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from coserve.core.errors import UnsupportedBase
from coserve.kernels.attention.interface import Attention, AttentionParams, KvShape, Window
from coserve.kernels.recurrent.interface import Recurrence, StateShape
from coserve.kernels.recurrent.wrappers import RecordedStates, ReversedRecurrence, recurrence_of
from coserve.model import seam
from coserve.model.fingerprint import is_fake
from coserve.model.recurrent.seam import hook, mixers, recurring
from coserve.model.settings import refuse_config

_PROBE = "coserve_probe"
_SHAPES = "coserve_shapes"
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_TOLERANCE_HALF = 0.1
"""Relative tolerance in 16 bits: wide enough for a different choice of expert by rounding, far below the error of a
dropped term."""
_SHAPED = 2
"""Tokens that `observe_shapes` runs."""
SEQUENCES = (13, 6)
"""Lengths of the sequences that the checks run."""


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
    """Return the shape of a layer's keys and values. They are another layer's if they are the same tensors as that
    one's in `own`, to which they are added if they are not."""
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
        with _attention(model, _SHAPES), torch.no_grad(), recurring(states), _Values(model):
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
        with _attention(model, _PROBE), torch.no_grad(), recurring(states):
            model(**_inputs(model, SEQUENCES[0]), coserve_observed=seen)
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


class Reversed:
    """Attention for a batch with reversed rows, to show whether tokens interact outside of attention and of the
    recurrences that we hook.

    Any other convolution or recurrence would need a state of its own to resume from a page or a chunk.
    """

    def __init__(self, inner: Attention) -> None:
        self._inner = inner

    def attend(
        self,
        layer: int,
        q_HTD: Tensor,
        k_KTD: Tensor,
        v_KTD: Tensor,
        params: AttentionParams,
    ) -> Tensor:
        q_HTD, k_KTD, v_KTD = q_HTD.flip(1), k_KTD.flip(1), v_KTD.flip(1)
        return self._inner.attend(layer, q_HTD, k_KTD, v_KTD, params).flip(0)

    @property
    def recurrence(self) -> Recurrence:
        return ReversedRecurrence(recurrence_of(self._inner))


def decoder_layers(model: PreTrainedModel, seen: Observed) -> tuple[str, list[nn.Module]]:
    """Return the path and the members of the stack whose layers contain their attention modules."""
    attention = [(seam.layer_of(module), module) for module, _ in seen.layers]
    for name, stack in model.named_modules():
        if not isinstance(stack, nn.ModuleList) or len(stack) != len(seen.kv_shapes):
            continue
        if all(any(inner is module for inner in stack[layer].modules()) for layer, module in attention):
            return name, list(stack)
    raise UnsupportedBase(f"{model.config.model_type}: found no list of decoder layers, one for each attention")


@dataclass(frozen=True)
class Forward:
    """The logits (T, V) of a forward, and for each module of a stack of layers the hidden states (T, D) before and
    after."""

    logits: Tensor
    states: Mapping[nn.Module, tuple[Tensor, Tensor]]

    def flip(self) -> Forward:
        """Return the same with the tokens in reverse order."""
        states = {module: (before.flip(0), after.flip(0)) for module, (before, after) in self.states.items()}
        return Forward(self.logits.flip(0), states)


def join_streams(hidden: Tensor) -> Tensor:
    """Return hidden states as (1, T, D), or as (1, T, S D) where a token has several, (S, 1, T, D)."""
    return hidden if hidden.dim() == 3 else hidden.permute(1, 2, 0, 3).flatten(2)


def part_streams(h_1TD: Tensor, streams: int) -> Tensor:
    """Invert `join_streams`."""
    return h_1TD if streams == 1 else h_1TD.reshape(*h_1TD.shape[:2], streams, -1).permute(2, 0, 1, 3)


@contextmanager
def recorded(modules: Iterable[nn.Module]) -> Iterator[Callable[[Tensor], Forward]]:
    """Record the modules' forwards inside. Yields a function that adds the logits and returns the record.

    Several forwards in sequence are recorded as one forward of all their tokens.
    """
    seen: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}

    def saw(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
        before, after = _states(args, kwargs), output[0] if isinstance(output, tuple) else output
        if isinstance(before, Tensor) and isinstance(after, Tensor) and before.dim() == after.dim() in (3, 4):
            seen.setdefault(module, []).append((join_streams(before)[0], join_streams(after)[0]))

    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_hook(saw, with_kwargs=True))
        yield lambda logits: Forward(
            logits,
            {
                module: (torch.cat([before for before, _ in own]), torch.cat([after for _, after in own]))
                for module, own in seen.items()
            },
        )


def eager_forward(model: PreTrainedModel) -> tuple[Forward, dict[str, nn.Module]]:
    """Run the model's own forward on each of the check's sequences separately.

    Also returns the possible sites: the linear modules and embeddings, by path, that saw every token exactly once and
    returned one tensor (some routers of experts return more).
    """
    family, rows, logits = model.config.model_type, [], []
    count = model.config.get_text_config().num_hidden_layers
    stacks = [stack for stack in model.modules() if isinstance(stack, nn.ModuleList) and len(stack) == count]
    calls: dict[str, list[int]] = {}
    modules = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D | nn.Embedding)}

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], object], None]:
        def saw(module: nn.Module, args: tuple[Tensor, ...], output: object) -> None:
            seen = args[0] if isinstance(module, nn.Embedding) else args[0][..., 0]
            calls.setdefault(name, []).append(seen.numel() if isinstance(output, Tensor) else 0)

        return saw

    with ExitStack() as hooks:
        for name, module in modules.items():
            hooks.enter_context(module.register_forward_hook(watch(name)))
        try:
            with _attention(model, "eager"), torch.no_grad(), recorded(chain.from_iterable(stacks)) as forward:
                for length in SEQUENCES:
                    logits.append(model(**_inputs(model, length)).logits[0])
                    rows.append(length)
        except (TypeError, AttributeError, ValueError, KeyError, RuntimeError) as error:
            raise UnsupportedBase(f"{family} does not run with eager attention: {error}") from error
    return forward(torch.cat(logits)), {name: module for name, module in modules.items() if calls.get(name) == rows}


def tokens(model: PreTrainedModel, length: int) -> Tensor:
    """Return fixed token ids (length,) for a check."""
    vocab: int = model.config.get_text_config().vocab_size
    return (torch.arange(1, length + 1, device=model.device) * 7919) % vocab


def check_forward(what: str, run: Callable[[], Tensor], layers: Sequence[nn.Module], expected: Forward) -> None:
    """Raise `UnsupportedBase` unless `run`, a forward through `layers`, computes the expected logits, up to rounding.

    If the logits differ by more, `run` is called again, and each layer is compared on its expected input: rounding in
    one layer changes the next one's input, and with random weights the error grows with every layer (0.01 after 2 of
    them, 0.15 after 80, in bfloat16). All ranks have the same logits, so all of them call it again or none does.
    """
    try:
        check_equal(what, run(), expected.logits)
    except UnsupportedBase:
        if not all(layer in expected.states for layer in layers):
            raise
        with _each_on_expected_inputs(what, layers, expected):
            check_equal(what, run(), expected.logits)


@contextmanager
def _each_on_expected_inputs(what: str, layers: Sequence[nn.Module], expected: Forward) -> Iterator[None]:
    """Compare layers one by one inside, replacing each output by the expected one, except in rows that pad the
    batch."""

    def replaced(what: str, got: Tensor, expected: Tensor, change: Tensor) -> Tensor:
        rows, got_TD = expected.shape[0], join_streams(got)[0]
        _check_states(what, got_TD[:rows], expected, change)
        return part_streams(torch.cat((expected, got_TD[rows:]))[None], 1 if got.dim() == 3 else got.shape[0])

    def enter(
        layer: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        before, _ = expected.states[layer]
        given = _states(args, kwargs)
        assert isinstance(given, Tensor), "expected hidden states as before"
        h_1TD = replaced(f"{what}, the input of layer {layers.index(layer)}", given, before, before)
        return ((h_1TD, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": h_1TD})

    def leave(layer: nn.Module, args: tuple[object, ...], output: object) -> object:
        before, after = expected.states[layer]
        got = output[0] if isinstance(output, tuple) else output
        assert isinstance(got, Tensor), "expected hidden states as before"
        h_1TD = replaced(f"{what}, layer {layers.index(layer)}", got, after, after - before)
        return (h_1TD, *output[1:]) if isinstance(output, tuple) else h_1TD

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(enter, with_kwargs=True))
            hooks.enter_context(layer.register_forward_hook(leave))
        yield


def _check_states(what: str, got: Tensor, expected: Tensor, change: Tensor) -> None:
    """Compare hidden states. `change`: what a layer adds to its input; the input may be much larger, and its rounding
    affects the sum."""
    error, rounding = (got.float() - expected.float()).norm(), torch.finfo(expected.dtype).eps * expected.float().norm()
    allowed = _TOLERANCE.get(expected.dtype, _TOLERANCE_HALF) * change.float().norm() + rounding
    if not float(error) <= float(allowed):
        raise UnsupportedBase(
            f"{what}: expected the output of the model's own forward, got a difference of "
            f"{float(error / change.float().norm().clamp_min(1e-12)):.1e}"
        )


def _states(args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
    """Return the hidden states among a layer's arguments."""
    return args[0] if args else kwargs.get("hidden_states")


def check_equal(what: str, got: Tensor, expected: Tensor) -> None:
    """Raise `UnsupportedBase` unless two sets of logits are equal up to rounding. Fake ones are not compared."""
    if is_fake(expected):
        return
    if not torch.isfinite(expected).all():
        raise UnsupportedBase(f"{what}: the base's logits are not finite")
    error = float((got.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-12))
    if not error <= _TOLERANCE.get(expected.dtype, _TOLERANCE_HALF):
        raise UnsupportedBase(
            f"{what}: expected the logits of the model's own forward, got a difference of {error:.1e}"
        )


def _inputs(model: PreTrainedModel, length: int) -> dict[str, Tensor | bool]:
    positions = torch.arange(length, device=model.device)[None]
    return {"input_ids": tokens(model, length)[None], "position_ids": positions, "use_cache": False}


@contextmanager
def _attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Switch the model to another attention implementation inside."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
