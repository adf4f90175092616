"""AdamW and Lion with 8-bit moments, block-wise quantized (Dettmers et al. 2022, https://arxiv.org/abs/2110.02861), by
bitsandbytes.

Only its update function is used, on our buffers. Its optimizer classes wait for the whole device after each tensor,
checkpoint copies included, and keep tensors below 4096 elements in 32 bits; here all moments have 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from coserve.admission.optimizers import QUANTIZED
from coserve.core.training.settings import TrainingSettings
from coserve.finetune.update_rules.interface import WeightRange

AT_ONCE = 1 << 23
"""Elements per call: the function counts them in 32 bits, and on a CPU makes fp32 copies of the moments."""


class EightBit:
    """Implements `UpdateRule`. Moments: `exp_avg` and its `absmax`; for AdamW also `exp_avg_sq` and its `absmax`."""

    def __init__(self, ranges: Sequence[WeightRange], training: TrainingSettings, *, at_once: int = AT_ONCE) -> None:
        """Imports the library, so construct it on a worker thread. `at_once`: elements per call."""
        from bitsandbytes.functional import create_dynamic_map, optimizer_update_8bit_blockwise

        self._function, self._training = optimizer_update_8bit_blockwise, training
        self._steps, self._times = [0] * len(ranges), [each.times for each in ranges]
        device = ranges[0].weights_N.device
        self._signed, self._unsigned = (create_dynamic_map(signed=signed).to(device) for signed in (True, False))
        self._parts = [
            [
                *zip(
                    *(torch.split(tensor, at_once) for tensor in (each.weights_N, each.grads_N)),
                    *(
                        torch.split(tensor, at_once if tensor.dtype == torch.uint8 else at_once // QUANTIZED)
                        for tensor in each.moments
                    ),
                    strict=True,
                )
            ]
            for each in ranges
        ]
        """Chunks of each range: weights, gradients, moments."""

    @torch.no_grad()
    def update(self, number: int, learning_rate: float) -> None:
        self._steps[number] += 1
        with _default_stream_in_turn(self._signed.device):
            self._update_parts(number, self._times[number] * learning_rate)

    def _update_parts(self, number: int, rate: float) -> None:
        training = self._training
        for weights_N, grads_N, *moments in self._parts[number]:
            first, first_absmax, second, second_absmax = (*moments, None, None)[:4]
            self._function(
                "lion" if training.optimizer.lion else "adam",
                grads_N,
                weights_N,
                first,
                second,
                training.beta1,
                training.beta2,
                beta3=0.0,
                alpha=0.0,
                eps=training.eps,
                step=self._steps[number],
                lr=rate,
                qmap1=self._signed,
                qmap2=None if second is None else self._unsigned,
                absmax1=first_absmax,
                absmax2=second_absmax,
                weight_decay=training.weight_decay,
            )

    def set_steps(self, steps: int) -> None:
        self._steps = [steps] * len(self._steps)


@contextmanager
def _default_stream_in_turn(device: torch.device) -> Iterator[None]:
    """Order launches inside on the default stream, which the library's kernels always use, after the current stream's
    earlier work and before its later work."""
    if device.type != "cuda":
        yield
        return
    default, current = torch.cuda.default_stream(device), torch.cuda.current_stream(device)
    default.wait_stream(current)
    yield
    current.wait_stream(default)
