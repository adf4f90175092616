"""The optimizer of one adapter: fp32 master weights, optimizer state, and compute-dtype copies for the forward.

Letters: K kinds of state (`admission.optimizers`), N elements of a flat buffer of all tensors (`FlatLayout`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from coserve.admission.optimizers import BEST, PIECE, SLICE, WEIGHTS, StateKind, aligned, paged_kinds, state_kinds
from coserve.core.errors import CheckpointUnreadable, NonFiniteLoss
from coserve.core.names import is_rows
from coserve.core.training.schemas import OptimStepRequest
from coserve.core.training.settings import TrainingSettings
from coserve.core.types import BaseSpec
from coserve.finetune.dora_scales import SITES_AT_ONCE, DoraScales, RowNorms
from coserve.finetune.host_copy import FlatLayout, GatheredCopy, HostCopy
from coserve.finetune.lora_tensors import named_tensors
from coserve.finetune.update_rules.paged import PagedMoments, Rows, fill
from coserve.finetune.update_rules.rules import AdamW, UpdateRule, WeightRange, make_rule
from coserve.kernels.lora.types import LoraPair, MainGrads
from coserve.lora.store.tensor_writer import OnDemand
from coserve.model.agreement import on_all_ranks
from coserve.model.lora import LoraWeights
from coserve.model.parallel.adapter import AdapterPartition

PairMakers = Mapping[str, Callable[..., LoraPair]]
"""For each site, a function that makes a pair from two matrices."""


def _makers(weights: LoraWeights) -> PairMakers:
    return {
        site: partial(
            type(pair), scaling=pair.scaling, a_blocks=pair.a_blocks, b_blocks=pair.b_blocks, experts=pair.experts
        )
        for site, pair in weights.sites.items()
    }


def _b(tensors: Mapping[str, Tensor], site: str) -> Tensor:
    """Return a site's B; an empty tensor for replaced rows of embedding or head, which have no B."""
    if is_rows(site):
        a_KD = tensors[f"{site}.a"]
        return a_KD.new_empty(0, len(a_KD))
    return tensors[f"{site}.b"]


def _pair(tensors: Mapping[str, Tensor], make: PairMakers, prefix: str, site: str) -> LoraPair:
    """Make a site's pair from tensors whose names begin with `prefix`."""
    name = f"{prefix}{site}"
    return make[site](tensors[f"{name}.a"], _b(tensors, name), magnitude_O=tensors.get(f"{name}.m"))


class AdapterOptimizer:
    """One adapter's master weights and gradient sums (fp32), its moments, and the copies that forwards read.

    Each is one flat buffer: an update is a few kernels, however many sites the adapter has. With LoRA+ (Hayou et al.
    2024, https://arxiv.org/abs/2402.12354), all B matrices follow all A matrices and have their own learning rate.
    """

    def __init__(
        self,
        start: LoraWeights,
        base: BaseSpec,
        training: TrainingSettings,
        dtype: torch.dtype,
        device: torch.device | None = None,
        partition: AdapterPartition | None = None,
        make_rule: Callable[[Sequence[WeightRange], TrainingSettings], UpdateRule] = make_rule,
        piece: int = PIECE,
        row_norms: RowNorms | None = None,
        part: LoraWeights | None = None,
    ) -> None:
        """`start`: initial weights of the whole adapter, fp32. `dtype`: of the copies. `device`: None: the device of
        `start`. `partition`: how the adapter is sharded over tensor-parallel ranks. Each rank trains its shard; all of
        them call `divide_grads`, `step` and `snapshot` at the same time. `make_rule`: makes the update rule for ranges
        of the weights. `piece`: most weights in a piece of paged moments. `row_norms`: for DoRA adapters. `part`: this
        rank's shard of `start`, which may be on the meta device then; None: taken here."""
        optimizer = training.optimizer
        assert partition is None or not (optimizer.eight_bit or optimizer.paged), "such moments cannot be gathered"
        self._settings, self._training, self._max_grad_norm = start.settings, training, training.max_grad_norm
        self._partition = partition
        if part is None:
            part = start if partition is None else LoraWeights(start.settings, partition.shard(start.sites))
        self._part_pairs, self._whole_pairs = _makers(part), _makers(start)
        self._sites = sorted(start.sites, key=lambda site: (base.site(site).layer, site))
        found = dict(named_tensors(part))
        kinds = ("a", "b", "m") if start.settings.use_dora else ("a", "b")
        names = [name for site in self._sites for kind in kinds if (name := f"{site}.{kind}") in found]
        if training.lora_plus_ratio is not None:
            # Every A, then the rest, as in PEFT: two ranges, with a rate each.
            names.sort(key=lambda name: not name.endswith(".a"))
        alignment = aligned(optimizer)
        self.layout = FlatLayout({name: found[name].shape for name in names}, aligned=alignment)
        """Layout of this rank's shard."""
        self.kinds = state_kinds(optimizer, early_stopping=training.early_stopping_patience is not None)
        paged = paged_kinds(optimizer)
        self.kept = tuple(kind for kind in self.kinds if kind not in paged)
        """The state kinds that stay on the device."""
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
        """One 1-D row for each of `kept` (K)."""
        self._host: HostCopy | None = None
        self.has_best = False
        """Whether `keep_best` was called, so that the last row of `state` holds weights."""
        self._awaits_scales = False
        """Whether forwards need `compute_scales` first: DoRA's scales need the other ranks, without which weights are
        loaded, and no update has computed them since."""
        self._weights_N, self._copies_N = self.state[0], torch.zeros(size, dtype=dtype, device=device)
        self._grads_N = torch.zeros(size, device=device)
        self._set_weights(found)
        self._make_views(base, row_norms)
        self._moments = [
            (kind, row_N) for kind, row_N in zip(self.kept, self.state, strict=True) if kind not in (WEIGHTS, BEST)
        ]
        starts = [first for first, _ in self._spans()]
        self._paged = PagedMoments(paged, size, self.layout.block, device, starts, piece) if paged else None
        self._rule = make_rule(self._ranges(), training)
        if device.type == "cuda":
            self.warm_up()

    @torch.no_grad()
    def _set_weights(self, part: Mapping[str, Tensor]) -> None:
        """Load this rank's initial weights from the device, or from the CPU through host memory."""
        on_device = next(iter(part.values())).device == self._weights_N.device
        if not on_device and isinstance(self.host, GatheredCopy):
            named = {f"{WEIGHTS.name}/{name}": own.detach() for name, own in part.items()}
            self.host.load(named, [WEIGHTS.name], shards=True)
            return
        views = self.layout.views(self._weights_N) if on_device else self.layout.block_views(self.host.rows[0])
        torch._foreach_copy_(list(views.values()), [part[name].detach() for name in views])
        if not on_device:
            self.host.upload(1)

    @torch.no_grad()
    def begin_with(self, start: LoraWeights) -> None:
        """Replace the initial weights, before the first step. `start`: fp32 on the CPU."""
        self._set_weights(dict(named_tensors(start)))
        deque(self._copying(), maxlen=0)

    def _copying(self, *, together: bool = False) -> Iterator[None]:
        """Refresh what forwards read after a change of the weights, in slices. `together`: all ranks do."""
        self._copies_N.copy_(self._weights_N)
        self._awaits_scales = self._dora is not None and self._partition is not None and not together
        if self._dora is not None and not self._awaits_scales:
            yield from self._dora.slices(self._weights.sites)

    def compute_scales(self) -> None:
        """Compute DoRA's scales if several ranks have loaded weights and not yet updated them. Call it before each
        forward, on all ranks at the same time."""
        if self._dora is not None and self._awaits_scales:
            deque(self._dora.slices(self._weights.sites), maxlen=0)

    def _make_views(self, base: BaseSpec, row_norms: RowNorms | None) -> None:
        masters, grads = self.layout.views(self._weights_N), self.layout.views(self._grads_N)
        pairs = {site: _pair(masters, self._part_pairs, "", site) for site in self._sites}
        self._masters = LoraWeights(self._settings, pairs)
        copies = {name: view.requires_grad_() for name, view in self.layout.views(self._copies_N).items()}
        self._part_grads = dict[str, tuple[Tensor, ...]]()
        for site in self._sites:
            magnitude = (grads[f"{site}.m"],) if self._settings.use_dora else ()
            self._part_grads[site] = (grads[f"{site}.a"], _b(grads, site), *magnitude)
        self._dora: DoraScales | None = None
        if self._settings.use_dora:
            assert row_norms is not None, "expected the norms of the base's rows"
            of_masters, of_grads = ({site: own[f"{site}.m"] for site in self._sites} for own in (masters, grads))
            # With several ranks an update is one slice.
            at_once = SITES_AT_ONCE if self._partition is None else len(self._sites)
            self._dora = DoraScales(of_masters, of_grads, row_norms, at_once)
            copies |= {f"{site}.m": scale for site, scale in self._dora.scales.items()}
        pairs = {
            site: self._part_pairs[site](
                copies[f"{site}.a"],
                _b(copies, site),
                main_grads=MainGrads(*own),
                scale_O=copies[f"{site}.m"] if self._dora is not None else None,
            )
            for site, own in self._part_grads.items()
        }
        self._weights = LoraWeights(self._settings, pairs)
        deque(self._copying(), maxlen=0)
        layers = [[site for site in self._sites if base.site(site).layer == i] for i in range(base.layers)]
        kinds = ("a", "b") if self._dora is None else ("a", "b", "m")
        parts = [[f"{site}.{part}" for site in sites for part in kinds] for sites in layers]
        self.trainable = [[copies[name] for name in layer] for layer in parts]
        """The compute-dtype copies, and DoRA's scales, by layer: the tensors to differentiate with respect to."""
        self.grads = [[grads[name] for name in layer] for layer in parts]
        """fp32 gradient sums, by layer, shaped as `trainable`: micro-batches add to them, an update consumes them."""
        self._grad_list = list(grads.values())

    def _spans(self) -> list[tuple[int, int]]:
        """First and last element of each region with its own learning rate: the whole buffer, or the A and the B
        matrices."""
        ratio = self._training.lora_plus_ratio
        first_b = [] if ratio is None else [self.layout.start(f"{self._sites[0]}.b")]
        return [*pairwise((0, *first_b, self.layout.size))]

    def _ranges(self) -> list[WeightRange]:
        """The ranges that the rule updates: the spans, or, with paged moments, pieces of them that are updated in
        turn."""
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
        """The compute-dtype copies as an adapter, with their `MainGrads`: a view that every step changes."""
        return self._weights

    def masters(self) -> LoraWeights:
        """The fp32 weights as an adapter: a view that every step changes."""
        return self._masters

    @property
    def host(self) -> HostCopy:
        """Host memory for the state on the device. The first access allocates it: do that on a worker thread."""
        if self._host is None:
            self._host = (
                HostCopy(self.state, [self.layout.block // kind.per for kind in self.kept])
                if self._partition is None
                else GatheredCopy(self.state, self.layout, self._sites, self._partition)
            )
        return self._host

    @torch.no_grad()
    def keep_best(self) -> None:
        """Copy the current weights as the best ones. Only for jobs with early stopping."""
        assert BEST in self.kinds, "expected a job with early stopping"
        self._protect_copy()
        self.state[-1].copy_(self._weights_N)
        self.has_best = True

    def adapter(self, tensors: Mapping[str, Tensor], kind: StateKind) -> LoraWeights:
        """The whole adapter in a snapshot's tensors: its `WEIGHTS` or `BEST`. A pair is made when it is read."""
        read = partial(_pair, tensors, self._whole_pairs, f"{kind.name}/")
        return LoraWeights(self._settings, OnDemand(dict.fromkeys(self._sites), read))

    def configure(self, adam: OptimStepRequest) -> None:
        """Use these parameters from the next step on. Only with AdamW and moments of 32 bits."""
        assert isinstance(self._rule, AdamW), "expected AdamW"
        self._rule.configure(adam)
        self._max_grad_norm = adam.grad_clip_norm

    def zero_grad(self) -> None:
        self._grads_N.zero_()

    def step(self, *, targets: int, learning_rate: float) -> float:
        """Take one step with the gradient sums divided by `targets`; return their norm before clipping.

        Raises `NonFiniteLoss` for NaN or infinite gradients; the weights are then unchanged.
        """
        norm = float(self.divide_grads(targets))
        self.update(norm, learning_rate)
        return norm

    def warm_up(self) -> None:
        """Load the kernels of an update by running one with zero gradients and a zero rate, which changes nothing. Call
        it before the first step."""
        self._grads_N.div_(1)
        torch.nn.utils.get_total_norm(self._grad_list)  # without collectives: the other ranks do not take part
        deque(self._slices(0.0, 0.0, together=False), maxlen=0)
        for kind, row_N in self._moments:  # 8-bit moments may have changed codes
            row_N.fill_(kind.zero)
        if self._paged is not None:
            self._paged.clear()
        self._rule.set_steps(0)

    @torch.no_grad()
    def divide_grads(self, targets: int) -> Tensor:
        """Divide the gradient sums by `targets`; return their norm (scalar, on the device)."""
        if self._partition is not None:
            self._partition.sum_gradients(self._part_grads)
        self._grads_N.div_(targets)
        if self._dora is not None:
            self._dora.to_magnitudes()
        if self._partition is not None:
            return self._partition.norm(self._part_grads)
        return torch.nn.utils.get_total_norm(self._grad_list)

    def update(self, norm: float, learning_rate: float) -> None:
        """Take one step with the divided gradients, whose norm is `norm`. Afterwards the gradient sums are zero.

        Raises `NonFiniteLoss` for a norm that is not finite; the weights are then unchanged.
        """
        for _ in self.slices(norm, learning_rate):
            pass

    def slices(self, norm: float, learning_rate: float) -> Iterator[None]:
        """Like `update`, suspended after each slice but the last. It must be run to its end: in between, only some
        weights are updated. Without paged moments and DoRA there is one slice."""
        if not math.isfinite(norm):
            raise NonFiniteLoss("the gradients are not finite; try a lower learning rate")
        return self._slices(norm, learning_rate, together=True)

    @torch.no_grad()
    def _slices(self, norm: float, learning_rate: float, *, together: bool) -> Iterator[None]:
        if self._max_grad_norm > 0:
            self._grads_N.mul_(min(1.0, self._max_grad_norm / (norm + 1e-6)))
        self._protect_copy()
        for done, number in enumerate(range(len(self._spans())) if self._paged is None else self._paged.pieces()):
            if self._paged is not None and done and done % SLICE == 0:
                yield
            self._rule.update(number, learning_rate)
        yield from self._copying(together=together)
        self.zero_grad()

    def snapshot(self, *, weights_only: bool = False) -> Callable[[], Mapping[str, Tensor]]:
        """Begin to copy the whole adapter's current state to the host; training may continue meanwhile. `weights_only`:
        without the optimizer's moments and the best weights.

        The returned function waits for the copy, on any thread, and returns the tensors by name (`<kind>/<name>`).
        `restore` continues from them bit for bit. They are views of `host`, valid until the next snapshot; with several
        ranks, rank 0's are made when they are read, and the others' have only their own shards. `snapshot` raises like
        `on_all_ranks`.
        """
        best = self.has_best and not weights_only
        kinds = self.kinds[:1] if weights_only else self._kinds(best=best)
        kept = len([kind for kind in kinds if kind in self.kept])
        mesh = None if self._partition is None else self._partition.sharding.mesh
        on_all_ranks(mesh, self._weights_N.device, lambda: self.host.download(kept))
        rows: Rows = ()
        if self._paged is not None and not weights_only:
            self._paged.hold()
            rows = self._paged.rows

        def tensors() -> Mapping[str, Tensor]:
            self.host.wait()
            if isinstance(self.host, GatheredCopy):
                return self.host.tensors([kind.name for kind in kinds])
            if self._paged is not None:
                self._paged.wait()
            return self._on_host(kinds, rows)

        return tensors

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor], *, steps: int) -> None:
        """Load the state that a snapshot held after `steps` steps. Call it on a worker thread.

        Raises `CheckpointUnreadable` if names, shapes or dtypes differ; the state is then unchanged.
        """
        has_best = BEST in self.kinds and any(name.startswith(f"{BEST.name}/") for name in state)
        kinds = self._kinds(best=has_best)
        if isinstance(self.host, GatheredCopy):
            _check(state, self.host.tensors([kind.name for kind in kinds]).like)
            self.host.load(state, [kind.name for kind in kinds])
        else:
            moments: Rows = () if self._paged is None else self._paged.spare()
            by_kind = self._blocks(moments)
            fill([by_kind[kind] for kind in kinds], kinds)
            wanted = self._on_host(kinds, moments)
            _check(state, wanted)
            for name, tensor in wanted.items():
                tensor.copy_(state[name])
            self.host.upload(len([kind for kind in kinds if kind in self.kept]))
        if self._paged is not None:
            self._paged.exchange()
        deque(self._copying(), maxlen=0)
        self._rule.set_steps(steps)
        self.has_best = has_best
        self.zero_grad()

    def _protect_copy(self) -> None:
        """Make the stream wait for a running download; call it before the state changes."""
        if self._host is not None:
            self._host.protect()

    def _kinds(self, *, best: bool) -> tuple[StateKind, ...]:
        """The state kinds with meaningful contents."""
        return self.kinds if best else tuple(kind for kind in self.kinds if kind is not BEST)

    def _blocks(self, moments: Rows) -> dict[StateKind, Sequence[Tensor]]:
        """Host memory of each kind's row. `moments`: rows of paged moments; empty: they are left out."""
        paged = paged_kinds(self._training.optimizer) if moments else ()
        return dict(zip((*self.kept, *paged), (*self.host.rows, *moments), strict=True))

    def _on_host(self, kinds: tuple[StateKind, ...], moments: Rows) -> dict[str, Tensor]:
        """The tensors of these kinds, as views of host memory."""
        blocks = self._blocks(moments)
        return {
            f"{kind.name}/{name}": tensor
            for kind in kinds
            for name, tensor in self.layout.block_views(blocks[kind], kind.per).items()
        }


def _check(state: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Raise `CheckpointUnreadable` unless the tensors have the names, shapes and dtypes of `wanted`."""
    for name in state.keys() - wanted.keys():
        raise CheckpointUnreadable(f"the checkpoint's {name} is of another optimizer, or of another adapter")
    for name, tensor in wanted.items():
        found = state.get(name)
        if found is None or found.shape != tensor.shape or found.dtype != tensor.dtype:
            raise CheckpointUnreadable(f"the checkpoint's {name} does not fit the job's adapter and optimizer")
