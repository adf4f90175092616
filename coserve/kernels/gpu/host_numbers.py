"""Puts numbers of the host into device tensors without a copy from host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class HostNumbers(TorchFunctionMode):
    """Context in which `number.to(device)`, of a tensor of one number on the CPU, is a kernel that writes the number.

    A copy would wait until the device has done all work before it, so that no CUDA graph could be captured. Gemma 3n's
    own code moves a constant in each forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moved = False
        """Whether there was such a call."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is Tensor.to and isinstance(number := args[0], Tensor) and number.dim() == 0 and number.is_cpu:
            wanted = (*args[1:], *(kwargs or {}).values())
            device = next((one for one in wanted if isinstance(one, torch.device | str)), None)
            if device is not None:
                self.moved, kinds = True, (one for one in wanted if isinstance(one, torch.dtype))
                return torch.full((), number.item(), dtype=next(kinds, number.dtype), device=device)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Leave the context inside."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's own, as below
        try:
            yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]
