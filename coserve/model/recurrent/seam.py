"""Hooks layers with a recurrent state: transformers' short convolutions and recurrences call our functions.

transformers' mixers, whatever their family, call a few functions of their own module: a causal convolution, and the
chunked form of a recurrence. These are replaced, once a module; the mixers' classes stay unmodified. Outside of our
forwards the replaced functions call the original ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from coserve.core.errors import UnsupportedBase
from coserve.kernels.recurrent.interface import Recurrence, RecurrenceInputs, RecurrenceParams
from coserve.model.forward_context import current
from coserve.model.recurrent.ops import RUNNING_RECURRENCE

Function = Callable[..., object]


def mixers(model: nn.Module) -> list[nn.Module]:
    """Return the model's recurrent mixers: modules with a convolution, from Python modules of transformers with
    functions that we replace."""
    known = {module for module in _modules(model) if any(hasattr(module, name) for name in _SEAMS)}
    return [
        module
        for module in model.modules()
        if sys.modules[type(module).__module__] in known
        and any(isinstance(child, nn.Conv1d) for child in module.children())
        and isinstance(getattr(module, "layer_idx", None), int)
    ]


def hook(model: nn.Module) -> bool:
    """Hook the model's recurrent mixers; False if it has none."""
    found = mixers(model)
    for module in {sys.modules[type(mixer).__module__] for mixer in found}:
        for name, make in _SEAMS.items():
            original = getattr(module, name, None)
            if original is not None and not hasattr(original, "coserve_original"):
                setattr(module, name, _replaced(original, make))
    for mixer in found:
        if _enter not in mixer._forward_pre_hooks.values():
            mixer.register_forward_pre_hook(_enter)
    return bool(found)


@contextmanager
def recurring(recurrence: Recurrence) -> Iterator[None]:
    """Let recurrent mixers inside use `recurrence`."""
    before, current.recurrence = current.recurrence, recurrence
    try:
        yield
    finally:
        current.recurrence = before


def _enter(module: nn.Module, args: tuple[object, ...]) -> None:
    if not torch.compiler.is_dynamo_compiling():
        current.layer = cast(int, module.layer_idx)


def _modules(model: nn.Module) -> set[ModuleType]:
    return {sys.modules[type(module).__module__] for module in model.modules()}


def _replaced(original: Function, make: Function) -> Function:
    def function(*args: object, **kwargs: object) -> object:
        if torch.compiler.is_dynamo_compiling():  # traced code must not read the running forward's values
            return make(RUNNING_RECURRENCE, -1, *args, **kwargs)
        if current.recurrence is None:
            return original(*args, **kwargs)
        return make(current.recurrence, current.layer, *args, **kwargs)

    function.coserve_original = original  # type: ignore[attr-defined]
    return function


def _convolve(
    recurrence: Recurrence,
    layer: int,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: object,
) -> Tensor:
    """Replaces the causal convolution: (1, C, T) -> (1, C, T)."""
    return recurrence.convolve(layer, hidden_states[0].T, weight, bias, activation).T[None]


def _delta_rule(
    recurrence: Recurrence,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: object,
) -> tuple[Tensor, None]:
    """Replaces the gated delta rule: q and k (1, T, H, K), v (1, T, H, V), g and beta (1, T, H) -> (1, T, H, V)."""
    _refuse_states(initial_state, output_final_state)
    params = RecurrenceParams(query.shape[-1] ** -0.5, use_qk_l2norm_in_kernel)
    given = RecurrenceInputs(query[0], key[0], value[0], g[0], beta[0], params)
    return recurrence.recur(layer, given)[None], None


def _mamba2(
    recurrence: Recurrence,
    layer: int,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: object,
) -> Tensor:
    """Replaces Mamba-2's scan: x (1, T, H, V), dt (1, T, H), A (H), B and C (1, T, G, K) -> (1, T, H, V) in fp32."""
    _refuse_states(initial_states, return_final_states)
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (softplus(dt) if dt_softplus else dt).clamp(*dt_limit).float()
    x = hidden_states.float()
    given = RecurrenceInputs(C[0], B[0], (x * dt[..., None])[0], (A.float() * dt)[0])
    out_THV = recurrence.recur(layer, given)
    return (out_THV if D is None else out_THV + D[:, None] * x[0])[None]


def _mamba(
    recurrence: Recurrence,
    layer: int,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: object,
) -> Tensor:
    """Replaces Mamba's scan: x and dt (1, H, T), A (H, K), B and C (1, K, T) -> (1, H, T). Each channel is a head with
    V = 1."""
    _refuse_states(None, return_last_state)
    dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[:, None]
    dt_HT = (softplus(dt) if delta_softplus else dt)[0].float()
    x_HT = hidden_states[0].float()
    v_TH1, decay_THK = (x_HT * dt_HT).T[..., None], dt_HT.T[..., None] * A
    q_T1K, k_T1K = C[0].T[:, None], B[0].T[:, None]
    out_HT = recurrence.recur(layer, RecurrenceInputs(q_T1K, k_T1K, v_TH1, decay_THK))[..., 0].T
    if D is not None:
        out_HT = out_HT + x_HT * D[:, None]
    out_1HT = out_HT.to(hidden_states.dtype)[None]
    return out_1HT if z is None else out_1HT * silu(z)


def _refuse_states(initial: Tensor | None, final: bool) -> None:
    if initial is not None or final:
        raise UnsupportedBase("a mixer hands on its own states, which coserve does not implement")


_SEAMS: dict[str, Function] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _mamba,
}
"""Our functions by the names of those that they replace in transformers' modules."""
