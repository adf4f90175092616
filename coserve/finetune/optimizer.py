"""AdamW on fp32 master weights of one adapter, with compute-dtype copies for the forward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from coserve.errors import CheckpointUnreadable, NonFiniteLoss
from coserve.finetune.lora_tensors import named_tensors
from coserve.kernels.lora.types import LoraPair, MainGrads
from coserve.model.lora import LoraWeights
from coserve.types import BaseSpec, TrainingSettings

_MOMENTS = ("exp_avg", "exp_avg_sq")


class AdapterOptimizer:
    """Master weights, gradient sums and AdamW state of one adapter (all fp32), and the copies that forwards read."""

    def __init__(self, start: LoraWeights, base: BaseSpec, training: TrainingSettings, dtype: torch.dtype) -> None:
        """`start`: initial weights, fp32, on the base's device. `dtype`: of the copies."""
        self._settings, self._training = start.settings, training
        self._scaling = {site: pair.scaling for site, pair in start.sites.items()}
        self._sites = sorted(start.sites, key=lambda site: (base.sites[site].layer, site))
        self._masters = {name: tensor.detach().float().clone() for name, tensor in named_tensors(start)}
        self._copies = {name: master.to(dtype, copy=True).requires_grad_() for name, master in self._masters.items()}
        self._grads = {
            name: torch.zeros_like(master, memory_format=torch.contiguous_format)
            for name, master in self._masters.items()
        }
        copies = self.adapter(self._copies)
        sums = {site: MainGrads(self._grads[f"{site}.a"], self._grads[f"{site}.b"]) for site in self._sites}
        pairs = {site: replace(pair, main_grads=sums[site]) for site, pair in copies.sites.items()}
        self._weights = LoraWeights(self._settings, pairs)
        self._layers = [[site for site in self._sites if base.sites[site].layer == i] for i in range(base.layers)]
        self._adamw = torch.optim.AdamW(
            [self._masters[name] for name in self._names()],
            lr=training.learning_rate,
            betas=(training.beta1, training.beta2),
            eps=training.eps,
            weight_decay=training.weight_decay,
        )

    def _names(self) -> list[str]:
        return [f"{site}.{part}" for site in self._sites for part in ("a", "b")]

    def _by_layer(self, tensors: Mapping[str, Tensor]) -> list[list[Tensor]]:
        return [[tensors[f"{site}.{part}"] for site in sites for part in ("a", "b")] for sites in self._layers]

    @property
    def trainable(self) -> list[list[Tensor]]:
        """The copies, by layer: the tensors to differentiate by."""
        return self._by_layer(self._copies)

    @property
    def grads(self) -> list[list[Tensor]]:
        """fp32 gradient sums, by layer, shaped as `trainable`: micro-batches add to them, `step` consumes them."""
        return self._by_layer(self._grads)

    def weights(self) -> LoraWeights:
        """The copies as an adapter, with their `MainGrads`: a view, changed by every step."""
        return self._weights

    def masters(self) -> LoraWeights:
        """The fp32 weights as an adapter: a view, changed by every step."""
        return self.adapter(self._masters)

    def snapshot(self) -> LoraWeights:
        """A copy of the fp32 weights."""
        return self.adapter({name: master.clone() for name, master in self._masters.items()})

    def adapter(self, tensors: Mapping[str, Tensor]) -> LoraWeights:
        """An adapter of `tensors`, named as by `named_tensors`. Raises `CheckpointUnreadable` if one is missing."""
        try:
            pairs = {s: LoraPair(tensors[f"{s}.a"], tensors[f"{s}.b"], self._scaling[s]) for s in self._sites}
        except KeyError as error:
            raise CheckpointUnreadable("the checkpoint's weights do not fit the job's adapter") from error
        return LoraWeights(self._settings, pairs)

    def zero_grad(self) -> None:
        for gradient in self._grads.values():
            gradient.zero_()

    @torch.no_grad()
    def step(self, *, targets: int, learning_rate: float) -> float:
        """One AdamW step on the gradient sums divided by `targets`; returns their norm before clipping.

        Raises `NonFiniteLoss` for NaN or infinite gradients; the weights are unchanged then.
        """
        grads = [self._grads[name].div_(targets) for name in self._names()]
        norm = torch.nn.utils.get_total_norm(grads)
        size = float(norm)
        if not math.isfinite(size):
            raise NonFiniteLoss("the gradients are not finite; try a lower learning rate")
        if self._training.max_grad_norm > 0:
            scale = min(1.0, self._training.max_grad_norm / (size + 1e-6))
            for gradient in grads:
                gradient.mul_(scale)
        for name, gradient in zip(self._names(), grads, strict=True):
            self._masters[name].grad = gradient
        self._adamw.param_groups[0]["lr"] = learning_rate
        self._adamw.step()
        for name, master in self._masters.items():
            master.grad = None
            self._copies[name].copy_(master)
        self.zero_grad()
        return size

    def state(self) -> dict[str, Tensor]:
        """Weights and moments on the CPU: `restore` continues from them bit for bit."""
        state = {f"weights/{name}": master for name, master in self._masters.items()}
        for name, master in self._masters.items():
            moments = self._adamw.state[master]
            state |= {f"{moment}/{name}": moments.get(moment, torch.zeros_like(master)) for moment in _MOMENTS}
        return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor], *, steps: int) -> None:
        """Load what `state` returned after `steps` steps. Raises `CheckpointUnreadable` if shapes or dtypes differ."""
        for kind in ("weights", *_MOMENTS):
            for name, master in self._masters.items():
                found = state.get(f"{kind}/{name}")
                if found is None or found.shape != master.shape or found.dtype != torch.float32:
                    raise CheckpointUnreadable(f"the checkpoint's {kind} do not fit the job's adapter")
        for name, master in self._masters.items():
            master.copy_(state[f"weights/{name}"])
            self._copies[name].copy_(master)
            moments: dict[str, Tensor] = {"step": torch.tensor(float(steps))}
            for moment in _MOMENTS:
                moments[moment] = torch.empty_like(master).copy_(state[f"{moment}/{name}"])
            self._adamw.state[master] = moments
        self.zero_grad()
