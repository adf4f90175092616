"""Finds what a step cannot do inside a CUDA graph, without a GPU: torch's `meta` device stands for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from coserve.kernels.attention.interface import AttentionParams
from coserve.kernels.recurrent.interface import RecurrenceInputs
from coserve.model.base import Base
from coserve.model.fused import FusedBase

META = torch.device("meta")


def copies_from_the_host(base: Base) -> list[str]:
    """Run a decode step of three sequences and return its copies of CPU tensors to the device.

    Raises what torch raises where the host needs a value on the device: `item`, `nonzero`, choices by a mask. Attention
    and recurrences are left out, as are numbers that a layer makes: the compiler turns these into constants. Moves the
    base, which is of no use afterwards.
    """
    base.model.to(META, torch.bfloat16)
    base.device, base.packed_rows = META, ()
    tokens_T, copies = torch.zeros(3, dtype=torch.int64, device=META), _Copies()
    with ExitStack() as hooks, patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
        with torch.device(META) if base.states else nullcontext():
            fused = FusedBase(base, compiled=False)
        for layer in base.layers:
            hooks.enter_context(layer.register_forward_pre_hook(lambda *_: copies.enter(layer=True)))
            hooks.enter_context(layer.register_forward_hook(lambda *_: copies.enter(layer=False)))
        with copies, _Made(copies):
            fused.forward(tokens_T, tokens_T, _Elsewhere(), lora=None, keep=None)
    return copies.found


class _Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.found, self.in_layer = list[str](), False

    def enter(self, *, layer: bool) -> None:
        self.in_layer = layer

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        given = [one for one in args if isinstance(one, Tensor)]
        copied = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        if copied and isinstance(out, Tensor) and out.is_meta and not all(one.is_meta for one in given):
            self.found.append(f"{func} of {given}")
        return out


class _Made(TorchFunctionMode):
    """Finds `torch.tensor(..., device=...)`, which copies, unless the device is `meta`."""

    def __init__(self, copies: _Copies) -> None:
        super().__init__()
        self._copies = copies

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        out = func(*args, **(kwargs or {}))
        if func is torch.tensor and isinstance(out, Tensor) and out.is_meta and not self._copies.in_layer:
            self._copies.found.append(f"torch.tensor of {args}")
        return out


class _Elsewhere:
    """Attention and recurrence that compute nothing."""

    def attend(self, layer: int, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, params: AttentionParams) -> Tensor:
        return q_HTD.new_empty(q_HTD.shape[1], q_HTD.shape[0], v_KTD.shape[2])

    @property
    def recurrence(self) -> _Elsewhere:
        return self

    def convolve(self, layer: int, x_TC: Tensor, *_: object) -> Tensor:
        return torch.empty_like(x_TC)

    def recur(self, layer: int, given: RecurrenceInputs) -> Tensor:
        return torch.empty_like(given.v)
