"""Update rules, which change weights by their gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from coserve.core.training.schemas import OptimStepRequest
from coserve.core.training.settings import TrainingSettings


def make_rule(ranges: Sequence[WeightRange], training: TrainingSettings) -> UpdateRule:
    if training.optimizer.eight_bit:
        return EightBit(ranges, training)
    return Lion(ranges, training) if training.optimizer.lion else AdamW(ranges, training)


@dataclass(frozen=True)
class WeightRange:
    """A range of the flat buffers with its own learning rate. Letters: N elements of the range."""

    weights_N: Tensor  # noqa: N815
    """fp32, changed in place."""
    grads_N: Tensor  # noqa: N815
    """fp32."""
    moments: Sequence[Tensor]
    """One tensor for each kind of moment (`admission.optimizers`), changed in place: (N), or (N / `per`). Ranges share
    memory if their moments are paged."""
    times: float
    """Learning-rate factor, relative to the schedule."""

    def split(self, at_once: int) -> list[tuple[Tensor, ...]]:
        """Cut the range into chunks of `at_once` weights: of each, views of weights, gradients and moments."""
        tensors, size = (self.weights_N, self.grads_N, *self.moments), len(self.weights_N)
        return [*zip(*(torch.split(one, at_once * len(one) // size) for one in tensors), strict=True)]


class UpdateRule(Protocol):
    """Updates the ranges that it was made for."""

    def update(self, number: int, learning_rate: float) -> None:
        """Take one step of range `number`. The gradients may be overwritten: they are not read again."""

    def set_steps(self, steps: int) -> None:
        """Set the number of steps done for all ranges, after a restore."""


class AdamW:
    """Implements `UpdateRule` by torch's AdamW, fused on a GPU. Moments: `exp_avg`, `exp_avg_sq`."""

    def __init__(self, ranges: Sequence[WeightRange], training: TrainingSettings) -> None:
        device = ranges[0].weights_N.device
        fused = device.type == "cuda"
        self._times = [each.times for each in ranges]
        self._steps = torch.zeros(len(ranges), device=device if fused else "cpu")
        self._adamws = list[torch.optim.AdamW]()
        """One optimizer for each range."""
        for each, step in zip(ranges, self._steps, strict=True):
            adamw = torch.optim.AdamW(
                [each.weights_N],
                lr=training.learning_rate,
                betas=(training.beta1, training.beta2),
                eps=training.eps,
                weight_decay=training.weight_decay,
                fused=fused,
            )
            each.weights_N.grad = each.grads_N
            moments = dict(zip(("exp_avg", "exp_avg_sq"), each.moments, strict=True))
            adamw.state[each.weights_N] = {"step": step, **moments}
            self._adamws.append(adamw)

    def update(self, number: int, learning_rate: float) -> None:
        adamw = self._adamws[number]
        adamw.param_groups[0]["lr"] = self._times[number] * learning_rate
        adamw.step()

    def configure(self, adam: OptimStepRequest) -> None:
        """Use these parameters from the next step on."""
        for adamw in self._adamws:
            adamw.param_groups[0] |= {
                "betas": (adam.beta1, adam.beta2),
                "eps": adam.eps,
                "weight_decay": adam.weight_decay,
            }

    def set_steps(self, steps: int) -> None:
        self._steps.fill_(steps)


class Lion:
    """Implements `UpdateRule`. Moments: `exp_avg`.

    Lion (Chen et al. 2023, https://arxiv.org/abs/2302.06675, algorithm 2) takes steps of a fixed size, along the sign
    of a moving average: c = beta1 * m + (1 - beta1) * g, w = w - rate * (sign(c) + weight_decay * w), m = beta2 * m +
    (1 - beta2) * g.
    """

    AT_ONCE: Final = 1 << 22
    """Elements per call: bounds an update's only temporary to 16 MiB, freed before the next micro-batch."""

    def __init__(self, ranges: Sequence[WeightRange], training: TrainingSettings, *, at_once: int = AT_ONCE) -> None:
        """`at_once`: elements per call."""
        self._beta1, self._beta2 = training.beta1, training.beta2
        self._weight_decay = training.weight_decay
        self._times = [each.times for each in ranges]
        self._parts = [each.split(at_once) for each in ranges]

    @torch.no_grad()
    def update(self, number: int, learning_rate: float) -> None:
        rate = self._times[number] * learning_rate
        for weights_N, grads_N, exp_avg_N in self._parts[number]:
            weights_N.mul_(1 - rate * self._weight_decay)
            weights_N.add_(torch.lerp(exp_avg_N, grads_N, 1 - self._beta1).sign_(), alpha=-rate)
            exp_avg_N.lerp_(grads_N, 1 - self._beta2)

    def set_steps(self, steps: int) -> None:
        """Does nothing: no step depends on the number of earlier ones."""


class EightBit:
    """Implements `UpdateRule`: AdamW and Lion with 8-bit moments, block-wise quantized (Dettmers et al. 2022,
    https://arxiv.org/abs/2110.02861), by bitsandbytes. Moments: `exp_avg` and its `absmax`; for AdamW also `exp_avg_sq`
    and its `absmax`.

    Only the library's update function is used, on our buffers. Its optimizer classes wait for the whole device after
    each tensor, checkpoint copies included, and keep tensors below 4096 elements in 32 bits; here all moments have 8
    bits.
    """

    AT_ONCE: Final = 1 << 23
    """Elements per call: the function counts them in 32 bits, and on a CPU makes fp32 copies of the moments."""

    def __init__(self, ranges: Sequence[WeightRange], training: TrainingSettings, *, at_once: int = AT_ONCE) -> None:
        """Imports the library, so construct it on a worker thread. `at_once`: elements per call."""
        from bitsandbytes.functional import create_dynamic_map, optimizer_update_8bit_blockwise

        self._function, self._training = optimizer_update_8bit_blockwise, training
        self._steps, self._times = [0] * len(ranges), [each.times for each in ranges]
        device = ranges[0].weights_N.device
        self._signed, self._unsigned = (create_dynamic_map(signed=signed).to(device) for signed in (True, False))
        self._parts = [each.split(at_once) for each in ranges]

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
