"""Updates of one adapter: fp32 master weights and the optimizer's state, with compute-dtype copies for the forward.

Letters: K kinds of state (`admission.optimizers`), N elements of a flat buffer of all tensors (`FlatLayout`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from coserve.admission.optimizers import BEST, PIECE, SLICE, WEIGHTS, StateKind, aligned, paged_kinds, state_kinds
from coserve.core.errors import CheckpointUnreadable, NonFiniteLoss
from coserve.core.types import BaseSpec, TrainingSettings
from coserve.finetune.flat_tensors import FlatLayout
from coserve.finetune.gathered_copy import GatheredCopy
from coserve.finetune.host_copy import HostCopy
from coserve.finetune.lora_tensors import named_tensors
from coserve.finetune.update_rules.interface import UpdateRule, WeightRange
from coserve.finetune.update_rules.make import make_rule
from coserve.finetune.update_rules.paged import PagedMoments, Rows, fill
from coserve.kernels.lora.types import LoraPair, MainGrads
from coserve.model.agreement import on_all_ranks
from coserve.model.lora import LoraWeights
from coserve.model.parallel.adapter import AdapterPartition

PairMakers = Mapping[str, Callable[..., LoraPair]]
"""By site: makes a pair of two matrices."""


def _makers(weights: LoraWeights) -> PairMakers:
    return {
        site: partial(type(pair), scaling=pair.scaling, a_blocks=pair.a_blocks, b_blocks=pair.b_blocks)
        for site, pair in weights.sites.items()
    }


class AdapterOptimizer:
    """Master weights and gradient sums of one adapter (fp32), its moments, and the copies that forwards read.

    Each is one flat buffer: an update is a few kernels, however many sites the adapter changes. LoRA+ (Hayou et al.
    2024, https://arxiv.org/abs/2402.12354): the B matrices lie behind the A matrices, and have a learning rate of their
    own.
    """

    def __init__(
        self,
        start: LoraWeights,
        base: BaseSpec,
        training: TrainingSettings,
        dtype: torch.dtype,
        device: torch.device | None = None,
        partition: AdapterPartition | None = None,
        gathering: Callable[[bool], None] = lambda _: None,
        make_rule: Callable[[Sequence[WeightRange], TrainingSettings], UpdateRule] = make_rule,
        piece: int = PIECE,
    ) -> None:
        """`start`: initial weights of the whole adapter, fp32. `dtype`: of the copies. `device`: the base's; None:
        where `start` is.
        `partition`: how the adapter lies on the ranks of a mesh. Each rank trains its part; all of them call
        `divide_grads`, `step` and `snapshot` at the same time. `gathering` is called when a snapshot begins, with its
        `weights_only`. `make_rule` makes the update rule of the weights' ranges. `piece`: most weights of a piece of
        paged moments."""
        optimizer = training.optimizer
        assert partition is None or not (optimizer.eight_bit or optimizer.paged), "such moments cannot be gathered"
        self._settings, self._training = start.settings, training
        self._partition, self._gathering = partition, gathering
        part = start if partition is None else LoraWeights(start.settings, partition.shard(start.sites))
        self._part_pairs, self._whole_pairs = _makers(part), _makers(start)
        self._sites = sorted(start.sites, key=lambda site: (base.sites[site].layer, site))
        whole, found = dict(named_tensors(start)), dict(named_tensors(part))
        names = [f"{site}.{kind}" for site in self._sites for kind in ("a", "b")]
        if training.lora_plus_ratio is not None:
            names.sort(key=lambda name: name.endswith(".b"))  # every A, then every B: two ranges, with a rate each
        alignment = aligned(optimizer)
        self.layout = FlatLayout({name: found[name].shape for name in names}, aligned=alignment)
        """Of this rank's part."""
        self._whole_layout = FlatLayout({name: whole[name].shape for name in names}, aligned=alignment)
        self.kinds = state_kinds(optimizer, early_stopping=training.early_stopping_patience is not None)
        paged = paged_kinds(optimizer)
        self.kept = tuple(kind for kind in self.kinds if kind not in paged)
        """Those of `kinds` that stay on the device."""
        device, size = device or found[names[0]].device, self.layout.size
        self.state = tuple(
            torch.full(
                (size // kind.per,),
                kind.zero,
                dtype=torch.float32 if kind.itemsize == 4 else torch.uint8,
                device=device,
            )
            for kind in self.kept
        )
        """A row for each of `kept` (K), 1-D."""
        self._host: HostCopy | None = None
        self.has_best = False
        """`keep_best` was called: the last row is meaningful."""
        self._weights_N, self._copies_N = self.state[0], torch.zeros(size, dtype=dtype, device=device)
        self._grads_N = torch.zeros(size, device=device)
        self._set_weights(found if found[names[0]].device == device else None, whole)
        self._make_views(base)
        self._moments = [
            (kind, row_N) for kind, row_N in zip(self.kept, self.state, strict=True) if kind not in (WEIGHTS, BEST)
        ]
        starts = [first for first, _ in self._spans()]
        self._paged = PagedMoments(paged, size, self.layout.block, device, starts, piece) if paged else None
        self._rule = make_rule(self._ranges(), training)
        if device.type == "cuda":
            self.warm_up()

    @torch.no_grad()
    def _set_weights(self, part: Mapping[str, Tensor] | None, whole: Mapping[str, Tensor]) -> None:
        """`part`: this rank's weights, if they are on its device; else all of them go there by host memory."""
        source, views = part, self.layout.views(self._weights_N)
        if source is None:
            source, views = whole, self._whole_layout.block_views(self.host.rows[0])
        torch._foreach_copy_(list(views.values()), [source[name].detach() for name in views])
        if part is None:
            self.host.upload(1)
        self._copies_N.copy_(self._weights_N)

    def _make_views(self, base: BaseSpec) -> None:
        """The parts of the flat buffers as tensors and as adapters."""
        masters, grads = self.layout.views(self._weights_N), self.layout.views(self._grads_N)
        self._masters = self._adapter(masters, self._part_pairs)
        copies = {name: view.requires_grad_() for name, view in self.layout.views(self._copies_N).items()}
        self._part_grads = {site: (grads[f"{site}.a"], grads[f"{site}.b"]) for site in self._sites}
        pairs = {
            site: self._part_pairs[site](copies[f"{site}.a"], copies[f"{site}.b"], main_grads=MainGrads(*own))
            for site, own in self._part_grads.items()
        }
        self._weights = LoraWeights(self._settings, pairs)
        layers = [[site for site in self._sites if base.sites[site].layer == i] for i in range(base.layers)]
        parts = [[f"{site}.{part}" for site in sites for part in ("a", "b")] for sites in layers]
        self.trainable = [[copies[name] for name in layer] for layer in parts]
        """The copies, by layer: the tensors to differentiate by."""
        self.grads = [[grads[name] for name in layer] for layer in parts]
        """fp32 gradient sums, by layer, shaped as `trainable`: micro-batches add to them, an update consumes them."""
        self._grad_list = list(grads.values())

    def _spans(self) -> list[tuple[int, int]]:
        """First and last element of the parts of the buffers with a learning rate each: all, or the A and the B
        matrices."""
        ratio = self._training.lora_plus_ratio
        first_b = [] if ratio is None else [self.layout.start(f"{self._sites[0]}.b")]
        return [*pairwise((0, *first_b, self.layout.size))]

    def _ranges(self) -> list[WeightRange]:
        """What the rule updates: the spans, or their pieces whose moments come one after the other."""
        *_, (behind_a, _) = spans = self._spans()
        pieces = spans if self._paged is None else self._paged.spans
        return [
            WeightRange(
                self._weights_N[first:last],
                self._grads_N[first:last],
                [row_N[first // kind.per : last // kind.per] for kind, row_N in self._moments]
                if self._paged is None
                else self._paged.moments(number),
                1.0 if first < behind_a else self._training.lora_plus_ratio or 1.0,
            )
            for number, (first, last) in enumerate(pieces)
        ]

    def weights(self) -> LoraWeights:
        """The copies as an adapter, with their `MainGrads`: a view, changed by every step."""
        return self._weights

    def masters(self) -> LoraWeights:
        """The fp32 weights as an adapter: a view, changed by every step."""
        return self._masters

    @property
    def host(self) -> HostCopy:
        """Host memory for what stays on the device, made when it is first asked for: on a thread."""
        if self._host is None:
            self._host = (
                HostCopy(self.state, [self.layout.block // kind.per for kind in self.kept])
                if self._partition is None
                else GatheredCopy(self.state, self.layout, self._whole_layout, self._partition)
            )
        return self._host

    @torch.no_grad()
    def keep_best(self) -> None:
        """Keep a copy of the weights as they are now. Only for jobs with early stopping."""
        assert BEST in self.kinds, "expected a job with early stopping"
        self._protect_copy()
        self.state[-1].copy_(self._weights_N)
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
        """One step on the gradient sums divided by `targets`; returns their norm before clipping.

        Raises `NonFiniteLoss` for NaN or infinite gradients; the weights are unchanged then.
        """
        norm = float(self.divide_grads(targets))
        self.update(norm, learning_rate)
        return norm

    def warm_up(self) -> None:
        """Load the kernels of an update, by one with zero gradients at a rate of zero: nothing changes. Before the
        first step."""
        self._grads_N.div_(1)
        torch.nn.utils.get_total_norm(self._grad_list)  # of this rank alone: the others are not here at this time
        self.update(0.0, 0.0)
        for kind, row_N in self._moments:  # the moments of 8 bits may have other codes now
            row_N.fill_(kind.zero)
        if self._paged is not None:
            self._paged.clear()
        self._rule.set_steps(0)

    @torch.no_grad()
    def divide_grads(self, targets: int) -> Tensor:
        """Divide the gradient sums by `targets`; returns their norm (scalar, on the device)."""
        if self._partition is not None:
            self._partition.sum_gradients(self._part_grads)
        self._grads_N.div_(targets)
        if self._partition is not None:
            return self._partition.norm(self._part_grads)
        return torch.nn.utils.get_total_norm(self._grad_list)

    def update(self, norm: float, learning_rate: float) -> None:
        """One step on the divided gradients, whose norm is `norm`. The gradient sums are zero afterwards.

        Raises `NonFiniteLoss` for a norm that is not finite; the weights are unchanged then.
        """
        for _ in self.slices(norm, learning_rate):
            pass

    @torch.no_grad()
    def slices(self, norm: float, learning_rate: float) -> Iterator[None]:
        """As `update`, suspended after each slice of it but the last: run it to its end, as some weights are new and
        others are not. Without paged moments it is one slice."""
        if not math.isfinite(norm):
            raise NonFiniteLoss("the gradients are not finite; try a lower learning rate")
        if self._training.max_grad_norm > 0:
            self._grads_N.mul_(min(1.0, self._training.max_grad_norm / (norm + 1e-6)))
        self._protect_copy()
        for done, number in enumerate(range(len(self._spans())) if self._paged is None else self._paged.pieces()):
            if self._paged is not None and done and done % SLICE == 0:
                yield
            self._rule.update(number, learning_rate)
        self._copies_N.copy_(self._weights_N)
        self.zero_grad()

    def snapshot(self, *, weights_only: bool = False) -> Callable[[], dict[str, Tensor]]:
        """Begin to copy the whole adapter's state to the host, as it is now: training may go on meanwhile.
        `weights_only`: without the optimizer's moments, and without the best weights.

        The returned function waits for the copy, on any thread, and returns its tensors by name (`<kind>/<name>`),
        which `restore` continues from bit for bit: views of `host`, valid until the next snapshot. Raises as
        `on_all_ranks`, after `gathering`.
        """
        self._gathering(weights_only)
        best = self.has_best and not weights_only
        kinds = self.kinds[:1] if weights_only else self._kinds(best=best)
        kept = len([kind for kind in kinds if kind in self.kept])
        mesh = None if self._partition is None else self._partition.sharding.mesh
        on_all_ranks(mesh, self._weights_N.device, lambda: self.host.download(kept))
        rows: Rows = ()
        if self._paged is not None and not weights_only:
            self._paged.hold()
            rows = self._paged.rows

        def tensors() -> dict[str, Tensor]:
            self.host.wait()
            if self._paged is not None:
                self._paged.wait()
            return self._on_host(kinds, rows)

        return tensors

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor], *, steps: int) -> None:
        """Load what a snapshot held after `steps` steps; on a thread.

        Raises `CheckpointUnreadable` if names, shapes or dtypes differ; the state is unchanged then.
        """
        has_best = BEST in self.kinds and any(name.startswith(f"{BEST.name}/") for name in state)
        kinds = self._kinds(best=has_best)
        moments: Rows = () if self._paged is None else self._paged.spare()
        by_kind = self._blocks(moments)
        fill([by_kind[kind] for kind in kinds], kinds)
        wanted = self._on_host(kinds, moments)
        for name in state.keys() - wanted.keys():
            raise CheckpointUnreadable(f"the checkpoint's {name} is of another optimizer, or of another adapter")
        for name, tensor in wanted.items():
            found = state.get(name)
            if found is None or found.shape != tensor.shape or found.dtype != tensor.dtype:
                raise CheckpointUnreadable(f"the checkpoint's {name} does not fit the job's adapter and optimizer")
            tensor.copy_(found)
        self.host.upload(len([kind for kind in kinds if kind in self.kept]))
        if self._paged is not None:
            self._paged.exchange()
        self._copies_N.copy_(self._weights_N)
        self._rule.set_steps(steps)
        self.has_best = has_best
        self.zero_grad()

    def _protect_copy(self) -> None:
        """Call before the state changes."""
        if self._host is not None:
            self._host.protect()

    def _kinds(self, *, best: bool) -> tuple[StateKind, ...]:
        """Those that are meaningful."""
        return self.kinds if best else tuple(kind for kind in self.kinds if kind is not BEST)

    def _blocks(self, moments: Rows) -> dict[StateKind, Sequence[Tensor]]:
        """Host memory of each kind's row. `moments`: of the paged ones; none: they are left out."""
        paged = paged_kinds(self._training.optimizer) if moments else ()
        return dict(zip((*self.kept, *paged), (*self.host.rows, *moments), strict=True))

    def _on_host(self, kinds: tuple[StateKind, ...], moments: Rows) -> dict[str, Tensor]:
        """The tensors of these kinds, as views of host memory."""
        blocks = self._blocks(moments)
        return {
            f"{kind.name}/{name}": tensor
            for kind in kinds
            for name, tensor in self._whole_layout.block_views(blocks[kind], kind.per).items()
        }
