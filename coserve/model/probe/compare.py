"""Compares logits and hidden states with those of the model's own forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from coserve.core.errors import UnsupportedBase
from coserve.kernels.attention.interface import Attention, AttentionParams
from coserve.kernels.recurrent.interface import Recurrence
from coserve.kernels.recurrent.wrappers import ReversedRecurrence, recurrence_of
from coserve.model.fingerprint import is_fake
from coserve.model.probe.forward import Forward, hidden_states, join_streams, part_streams

_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_TOLERANCE_HALF = 0.1
"""Relative tolerance in 16 bits: wide enough for a different choice of expert by rounding, far below the error of a
dropped term."""


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
        given = hidden_states(args, kwargs)
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
