"""AdamW on fp32 master weights of one adapter, with compute-dtype copies for the forward.

Letters: K kinds of state (`KINDS`), N elements of a flat buffer of all tensors (`FlatLayout`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from coserve.errors import CheckpointUnreadable, NonFiniteLoss
from coserve.finetune.flat_tensors import FlatLayout
from coserve.finetune.gathered_copy import GatheredCopy
from coserve.finetune.host_copy import HostCopy
from coserve.finetune.lora_tensors import named_tensors
from coserve.kernels.lora.types import LoraPair, MainGrads
from coserve.model.lora import LoraWeights
from coserve.parallel.adapter import AdapterPartition
from coserve.types import BaseSpec, TrainingSettings

WEIGHTS = "weights"
KINDS = (WEIGHTS, "exp_avg", "exp_avg_sq")
"""Kinds of state, in the order of their rows: master weights and AdamW's moments."""
BEST = "best"
"""The last kind, of jobs with early stopping: the weights of the best evaluation."""


PairMakers = Mapping[str, Callable[..., LoraPair]]
"""By site: makes a pair of two matrices."""


def _makers(weights: LoraWeights) -> PairMakers:
    return {
        site: partial(type(pair), scaling=pair.scaling, a_blocks=pair.a_blocks, b_blocks=pair.b_blocks)
        for site, pair in weights.sites.items()
    }


class AdapterOptimizer:
    """Master weights, gradient sums and AdamW state of one adapter (all fp32), and the copies that forwards read.

    Each is one flat buffer: an update is a few kernels, however many sites the adapter changes. LoRA+ (Hayou et al. 2024,
    https://arxiv.org/abs/2402.12354): the B matrices lie behind the A matrices, and have a learning rate of their own.
    """

    def __init__(
        self,
        start: LoraWeights,
        base: BaseSpec,
        training: TrainingSettings,
        dtype: torch.dtype,
        device: torch.device | None = None,
        partition: AdapterPartition | None = None,
        gathering: Callable[[], None] = lambda: None,
    ) -> None:
        """`start`: initial weights of the whole adapter, fp32. `dtype`: of the copies. `device`: the base's; None: where `start` is.
        `partition`: how the adapter lies on the ranks of a mesh. Each rank trains its part; all of them call `divide_grads`, `step` and
        `snapshot` at the same time. `gathering` is called when a snapshot begins."""
        self._settings, self._training, self._partition, self._gathering = (
            start.settings,
            training,
            partition,
            gathering,
        )
        part = start if partition is None else LoraWeights(start.settings, partition.shard(start.sites))
        self._part_pairs, self._whole_pairs = _makers(part), _makers(start)
        self._sites = sorted(start.sites, key=lambda site: (base.sites[site].layer, site))
        whole, found = dict(named_tensors(start)), dict(named_tensors(part))
        plus = training.lora_plus_ratio is not None
        names = [f"{site}.{kind}" for site in self._sites for kind in ("a", "b")]
        if plus:
            names.sort(key=lambda name: name.endswith(".b"))  # every A, then every B: two ranges, with a rate each
        self.layout = FlatLayout({name: found[name].shape for name in names})
        """Of this rank's part."""
        self._whole_layout = FlatLayout({name: whole[name].shape for name in names})
        self.kinds = KINDS if training.early_stopping_patience is None else (*KINDS, BEST)
        device, size = device or found[names[0]].device, self.layout.size
        self.state_KN = torch.zeros(len(self.kinds), size, device=device)
        """A row for each of `kinds`."""
        self._host: HostCopy | None = None
        self.has_best = False
        """`keep_best` was called: the last row is meaningful."""
        self._weights_N, self._copies_N = self.state_KN[0], torch.zeros(size, dtype=dtype, device=device)
        self._grads_N = torch.zeros(size, device=device)
        here = found[names[0]].device == device
        views = self.layout.views(self._weights_N) if here else self._whole_layout.block_views(self.host.rows[0])
        source = found if here else whole
        with torch.no_grad():
            torch._foreach_copy_([views[name] for name in names], [source[name].detach() for name in names])
        if not here:
            self.host.upload(1)
        self._copies_N.copy_(self._weights_N)

        masters, grads = self.layout.views(self._weights_N), self.layout.views(self._grads_N)
        self._masters = self._adapter(masters, self._part_pairs)
        copies = {name: view.requires_grad_() for name, view in self.layout.views(self._copies_N).items()}
        pairs = {
            site: self._part_pairs[site](
                copies[f"{site}.a"],
                copies[f"{site}.b"],
                main_grads=MainGrads(grads[f"{site}.a"], grads[f"{site}.b"]),
            )
            for site in self._sites
        }
        self._weights = LoraWeights(self._settings, pairs)
        self._part_grads = {site: (grads[f"{site}.a"], grads[f"{site}.b"]) for site in self._sites}
        layers = [[site for site in self._sites if base.sites[site].layer == i] for i in range(base.layers)]
        parts = [[f"{site}.{part}" for site in sites for part in ("a", "b")] for sites in layers]
        self.trainable = [[copies[name] for name in layer] for layer in parts]
        """The copies, by layer: the tensors to differentiate by."""
        self.grads = [[grads[name] for name in layer] for layer in parts]
        """fp32 gradient sums, by layer, shaped as `trainable`: micro-batches add to them, an update consumes them."""
        self._grad_list = list(grads.values())

        fused = device.type == "cuda"
        first_b = [self.layout.start(f"{self._sites[0]}.b")] if plus else []
        ranges = [slice(*both) for both in pairwise((0, *first_b, size))]
        self._rates = (1.0,) if training.lora_plus_ratio is None else (1.0, training.lora_plus_ratio)
        """Learning rates of the ranges, in multiples of the schedule's."""
        self._adamw = torch.optim.AdamW(
            [{"params": [self._weights_N[span]]} for span in ranges],
            lr=training.learning_rate,
            betas=(training.beta1, training.beta2),
            eps=training.eps,
            weight_decay=training.weight_decay,
            fused=fused,
        )
        self._steps = torch.zeros(len(ranges), device=device if fused else "cpu")
        for group, span, step in zip(self._adamw.param_groups, ranges, self._steps, strict=True):
            (weights,) = group["params"]
            weights.grad = self._grads_N[span]
            moments = {"exp_avg": self.state_KN[1, span], "exp_avg_sq": self.state_KN[2, span]}
            self._adamw.state[weights] = {"step": step, **moments}
        if fused:
            self.warm_up()

    def weights(self) -> LoraWeights:
        """The copies as an adapter, with their `MainGrads`: a view, changed by every step."""
        return self._weights

    def masters(self) -> LoraWeights:
        """The fp32 weights as an adapter: a view, changed by every step."""
        return self._masters

    @property
    def host(self) -> HostCopy:
        """Host memory for the state, made when it is first asked for: on a thread."""
        if self._host is None:
            self._host = (
                HostCopy(self.state_KN, self.layout.block)
                if self._partition is None
                else GatheredCopy(self.state_KN, self.layout, self._whole_layout, self._partition)
            )
        return self._host

    @torch.no_grad()
    def keep_best(self) -> None:
        """Keep a copy of the weights as they are now. Only for jobs with early stopping."""
        assert BEST in self.kinds, "expected a job with early stopping"
        self._protect_copy()
        self.state_KN[-1].copy_(self._weights_N)
        self.has_best = True

    def adapter(self, tensors: Mapping[str, Tensor]) -> LoraWeights:
        """The whole adapter of `tensors`, named as by `named_tensors`."""
        return self._adapter(tensors, self._whole_pairs)

    def _adapter(self, tensors: Mapping[str, Tensor], make: PairMakers) -> LoraWeights:
        pairs = {site: make[site](tensors[f"{site}.a"], tensors[f"{site}.b"]) for site in self._sites}
        return LoraWeights(self._settings, pairs)

    def zero_grad(self) -> None:
        self._grads_N.zero_()

    def step(self, *, targets: int, learning_rate: float) -> float:
        """One AdamW step on the gradient sums divided by `targets`; returns their norm before clipping.

        Raises `NonFiniteLoss` for NaN or infinite gradients; the weights are unchanged then.
        """
        norm = float(self.divide_grads(targets))
        self.update(norm, learning_rate)
        return norm

    def warm_up(self) -> None:
        """Load the kernels of an update, by one with zero gradients at a rate of zero: nothing changes."""
        self._grads_N.div_(1)
        torch.nn.utils.get_total_norm(self._grad_list)  # of this rank alone: the others are not here at this time
        self.update(0.0, 0.0)
        self._steps.zero_()

    @torch.no_grad()
    def divide_grads(self, targets: int) -> Tensor:
        """Divide the gradient sums by `targets`; returns their norm (scalar, on the device)."""
        if self._partition is not None:
            self._partition.sum_gradients(self._part_grads)
        self._grads_N.div_(targets)
        if self._partition is not None:
            return self._partition.norm(self._part_grads)
        return torch.nn.utils.get_total_norm(self._grad_list)

    @torch.no_grad()
    def update(self, norm: float, learning_rate: float) -> None:
        """One AdamW step on the divided gradients, whose norm is `norm`. The gradient sums are zero afterwards.

        Raises `NonFiniteLoss` for a norm that is not finite; the weights are unchanged then.
        """
        if not math.isfinite(norm):
            raise NonFiniteLoss("the gradients are not finite; try a lower learning rate")
        if self._training.max_grad_norm > 0:
            self._grads_N.mul_(min(1.0, self._training.max_grad_norm / (norm + 1e-6)))
        self._protect_copy()
        for group, times in zip(self._adamw.param_groups, self._rates, strict=True):
            group["lr"] = times * learning_rate
        self._adamw.step()
        self._copies_N.copy_(self._weights_N)
        self.zero_grad()

    def snapshot(self) -> Callable[[], dict[str, Tensor]]:
        """Begin to copy the whole adapter's state to the host, as it is now: training may go on meanwhile.

        The returned function waits for the copy, on any thread, and returns its tensors by name (`<kind>/<name>`), which
        `restore` continues from bit for bit: views of `host`, valid until the next snapshot.
        """
        self._gathering()
        kinds = self.kinds if self.has_best else KINDS
        self.host.download(len(kinds))

        def tensors() -> dict[str, Tensor]:
            self.host.wait()
            return self._on_host(kinds)

        return tensors

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor], *, steps: int) -> None:
        """Load what a snapshot held after `steps` steps; on a thread.

        Raises `CheckpointUnreadable` if shapes or dtypes differ; the state is unchanged then.
        """
        has_best = BEST in self.kinds and any(name.startswith(f"{BEST}/") for name in state)
        kinds = self.kinds if has_best else KINDS
        for name, tensor in self._on_host(kinds).items():
            found = state.get(name)
            if found is None or found.shape != tensor.shape or found.dtype != torch.float32:
                raise CheckpointUnreadable(f"the checkpoint's {name} does not fit the job's adapter")
            tensor.copy_(found)
        self.host.upload(len(kinds))
        self._copies_N.copy_(self._weights_N)
        self._steps.fill_(steps)
        self.has_best = has_best
        self.zero_grad()

    def _protect_copy(self) -> None:
        """Call before the state changes."""
        if self._host is not None:
            self._host.protect()

    def _on_host(self, kinds: tuple[str, ...]) -> dict[str, Tensor]:
        return {
            f"{kind}/{name}": tensor
            for kind, blocks in zip(kinds, self.host.rows, strict=False)
            for name, tensor in self._whole_layout.block_views(blocks).items()
        }
