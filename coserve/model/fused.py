"""The unmodified model at full speed: each decoder layer compiled, with attention and linear sites as opaque ops.

A compiled layer contains two of our ops: `coserve::attend`, and `coserve::linear`, one for all the sites that read one
input (q, k and v; gate and up): one GEMM of their stacked weights, one LoRA shrink, one expand. Everything else (norms,
rotary, activation) is the model's own code, which torch.compile fuses (regional compilation).

Both ops look up the running forward's attention and adapters (`forward_context`) when they run, not when they are
traced, so that one compiled layer serves every layer, every batch, with and without adapters, and can be captured in
CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import cast

import torch
from torch import Tensor

from coserve.kernels.attention.interface import Attention, AttentionFields, AttentionParams
from coserve.kernels.attention.packed import PackedAttention
from coserve.kernels.gpu.host_numbers import HostNumbers
from coserve.kernels.lora.exchange import Exchange
from coserve.kernels.lora.interface import PreparedLora
from coserve.kernels.lora.types import FrozenWeight, SiteGroup
from coserve.kernels.quantized.weights import QuantizedWeight
from coserve.model.adapters.end_terms import Ends
from coserve.model.base import Base
from coserve.model.compiled import Backend, Layers, compiler
from coserve.model.experts.forward import OPAQUE
from coserve.model.forward_context import (
    ATTENTION_FIELDS,
    ForwardContext,
    Fused,
    current,
    register_ops,
    running,
    running_fused,
)
from coserve.model.gemm_choice import GemmChoice, GemmOutput, measure_gemms
from coserve.model.groups import share_inputs
from coserve.model.parallel.exchange import exchanges_of
from coserve.model.parallel.mesh import Mesh
from coserve.model.parallel.modules import shard_of
from coserve.model.parallel.residual import add_in_sums
from coserve.model.probe.compare import check_forward
from coserve.model.probe.forward import SEQUENCES, check_tokens, recorded
from coserve.model.recurrent.ops import RUNNING_RECURRENCE
from coserve.model.recurrent.unrepeated import drop_repeats

INDUCTOR = {"combo_kernels": True}
"""Options of torch.compile: independent small kernels are fused into one (the rotary embeddings of q and k)."""
RECOMPILES = 64
"""Most compiled variants of one layer: kinds of layers, windows, one row and many."""


def _attend(q: Tensor, k: Tensor, v: Tensor, *params: *AttentionFields) -> Tensor:
    """Run `Attention.attend` of the running context and layer: (H, T, D), (K, T, D), (K, T, E) -> (T, H, E)."""
    return running_fused().attention.attend(current.layer, q, k, v, AttentionParams(*params)).contiguous()


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sequence[int], group: int, residual: Tensor | None = None
) -> Tensor:
    """Return the outputs of the sites of one input, concatenated, LoRA terms included: (..., D) -> (..., ΣO).

    `sizes`: each site's O. `group`: index of the first of the groups that read x. For row-parallel sites the output is
    the sum of all ranks' outputs, and of `residual` (..., ΣO) if it is given (`parallel.residual`).
    """
    fused, lora = running_fused(), current.context.lora
    sites, x_TD = fused.groups[current.layer][group], x.reshape(-1, x.shape[-1])
    output = fused.gemms.linear(x_TD, weight, bias, before_shrink=lora is not None and lora.changes(sites))
    y_TO = _added(output, x_TD, sizes, fused.groups[current.layer][group:], lora)
    return _summed(y_TO, sites, residual).view(*x.shape[:-1], y_TO.shape[1])


def _linear_quantized(x: Tensor, width: int, group: int, residual: Tensor | None = None) -> Tensor:
    """Compute `_linear` with the quantised weights of a group. `width`: ΣO."""
    fused, lora = running_fused(), current.context.lora
    sites, x_TD = fused.groups[current.layer][group], x.reshape(-1, x.shape[-1])
    weights = fused.quantized[sites]
    output = fused.gemms.quantized_linear(x_TD, weights, before_shrink=lora is not None and lora.changes(sites))
    y_TO = _added(output, x_TD, weights.sizes, fused.groups[current.layer][group:], lora)
    return _summed(y_TO, sites, residual).view(*x.shape[:-1], width)


def _summed(y_TO: Tensor, sites: SiteGroup, residual: Tensor | None) -> Tensor:
    """Return the sum of all ranks' `y_TO` and `residual`, for row-parallel sites; `y_TO` itself for others."""
    shard = running_fused().summed.get(sites)
    if shard is not None:
        return shard.sum(y_TO, None if residual is None else residual.reshape(y_TO.shape))
    assert residual is None, "expected sites whose terms are summed over the ranks"
    return y_TO


def _added(
    output: GemmOutput, x_TD: Tensor, sizes: Sequence[int], groups: Sequence[SiteGroup], lora: PreparedLora | None
) -> Tensor:
    """Return a GEMM's output with the LoRA terms added in place, if any. `groups`: the groups of its sites, in order;
    any after those are ignored."""
    if lora is not None:
        ys, overlapped = torch.split(output.y, list(sizes), 1), output.workspace is not None
        for group in groups:
            own, ys = ys[: len(group.names)], ys[len(group.names) :]
            if own and lora.changes(group):
                # Keep `output`, and so the GEMM's workspace, until the terms have memory of their own.
                lora.add_(group, own, x_TD, overlapped=overlapped)
                overlapped = False
    return output.y


def _linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sequence[int], *_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], sum(sizes)))


def _linear_quantized_fake(x: Tensor, width: int, *_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], width))


def _register() -> torch.library.Library:
    attend = f"(Tensor q, Tensor k, Tensor v, {ATTENTION_FIELDS}) -> Tensor"
    linear = "(Tensor x, Tensor weight, Tensor? bias, int[] sizes, int group, Tensor? residual=None) -> Tensor"
    quantized = "(Tensor x, int width, int group, Tensor? residual=None) -> Tensor"
    return register_ops(
        ("attend", attend, _attend, lambda q, k, v, *_: q.new_empty((q.shape[1], q.shape[0], v.shape[2]))),
        ("linear", linear, _linear, _linear_fake),
        ("linear_quantized", quantized, _linear_quantized, _linear_quantized_fake),
    )


_OPS = _register()


class RunningAttention:
    """The `Attention` of a compiled layer: delegates to the running context's, in the layer that runs."""

    any_layer = True
    """Tells that the layer's index need not be passed. A compiled layer stands for all of its kind, so it must not
    depend on its index."""
    reads_pages = True
    recurrence = RUNNING_RECURRENCE

    def attend(
        self,
        layer: int,
        q_HTD: Tensor,
        k_KTD: Tensor,
        v_KTD: Tensor,
        params: AttentionParams,
    ) -> Tensor:
        """Call the running context's `Attention.attend`; ignores `layer`."""
        out: Tensor = torch.ops.coserve.attend(q_HTD, k_KTD, v_KTD, *params)
        return out


RUNNING_ATTENTION = RunningAttention()


class FusedBase:
    """A base's forward with compiled layers and sites grouped by input. Inference only.

    Groups are observed: sites that got the same tensor in one run. The weights of a group's linear modules become views
    of one stacked weight; modules, classes and values stay the same.
    """

    def __init__(
        self,
        base: Base,
        *,
        backend: Backend | None = None,
        compiled: bool = True,
        gemms: GemmChoice | None = None,
        opaque_experts: bool = False,
    ) -> None:
        """`backend`: None is inductor. `compiled=False`: the layers run uncompiled, through the same two ops.
        `gemms`: None measures them on a GPU. `opaque_experts`: LoRA servers may compute experts' terms."""
        self.base = base
        with HostNumbers() as numbers:
            self.groups = share_inputs(base)
            """Groups of each layer, in execution order."""
        self._numbers = numbers if numbers.moved else None
        modules = dict(base.model.named_modules())
        self._shards = {
            group: shard
            for layer in self.groups
            for group in layer
            if (shard := shard_of(modules[group.names[0]])) is not None
        }
        names = [*base.spec.experts]
        pairs = zip(names[::2], names[1::2], strict=True)
        experts = {base.spec.experts[up].layer: (up, down) for up, down in pairs}
        found = experts.items() if opaque_experts else ()
        opaque = {layer: modules[up.rpartition(".")[0]] for layer, (up, _) in found}
        for module in opaque.values():
            setattr(module, OPAQUE, True)
        self._summed = {group: shard for group, shard in self._shards.items() if shard.partition.sums}
        if gemms is None:
            gemms = measure_gemms(self.stacked, base.device) if base.device.type == "cuda" else GemmChoice()
        self.gemms = gemms
        whole = {shared.group: shared.whole for shared in base.sites.shared()}
        self._fused = partial(
            Fused,
            groups=self.groups,
            summed=self._summed,
            quantized={group: weight for group, weight in whole.items() if isinstance(weight, QuantizedWeight)},
            experts=experts,
            opaque_experts=opaque,
            mesh=Mesh() if base.sharding is None else base.sharding.mesh,
        )
        forwards: list[Callable[..., object]] = [type(layer).forward for layer in base.layers]
        if compiled:
            made = compiler(self._rewriting(backend or _inductor))
            # One function for all layers of a class, so that they share its compiled graphs.
            unique = {f: torch.compile(f, backend=made, dynamic=True, fullgraph=True) for f in dict.fromkeys(forwards)}
            forwards = [unique[forward] for forward in forwards]
        self._layers = Layers(base.layers, forwards)
        self._stubs = [self._stub(index) for index in range(len(base.layers))]

    def _rewriting(self, backend: Backend) -> Backend:
        """Wrap `backend` so that sums over the ranks in a layer also add the residual, and recurrences read no repeated
        heads."""
        groups = [group for layer in self.groups for group in layer]
        adding = {group for group, shard in self._summed.items() if shard.mesh.adds_at_once}
        sums = {group.index for group in groups if group in adding} - {
            each.index for each in groups if each not in adding
        }

        def traced(module: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Sequence[object]]:
            add_in_sums(module, sums)
            drop_repeats(module)
            return backend(module, inputs)

        return traced if sums or self.base.states else backend

    @property
    def stacked(self) -> list[FrozenWeight]:
        """The stacked weights of each input's sites."""
        return [shared.whole for shared in self.base.sites.shared() if shared.whole is not None]

    @property
    def exchanges(self) -> Mapping[SiteGroup, Exchange]:
        """Exchanges of fully sharded adapters, by group; empty if the base is not sharded."""
        return exchanges_of(self._shards)

    @torch.no_grad()
    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attention: Attention,
        *,
        lora: PreparedLora | None,
        keep: Tensor | None,
        gather: bool = True,
        ends: Ends | None = None,
    ) -> Tensor:
        """Compute `Base.forward`, never padded. `lora` is prepared for `groups`. `gather`: see `Base.run`. `ends`: what
        adapters change at the model's ends."""
        context = ForwardContext(lora, fused=self._fused(attention, self.gemms), ends=ends)
        self._layers.begin(tokens_T.shape[0])
        with running(context), self._patched(), self._numbers or nullcontext():
            # A copy of the positions: compiled code would guard on the size of a view's whole storage.
            return self.base.run(tokens_T, positions_T.clone(), RUNNING_ATTENTION, keep, gather=gather)

    def check(self) -> None:
        """Raise `UnsupportedBase` if compiled layers give other logits than the model does, for many rows and for
        one."""
        for length in (SEQUENCES[0], 1):
            tokens_T = check_tokens(self.base.model, length)
            positions_T, attention = torch.arange(length, device=self.base.device), PackedAttention((0, length))
            with torch.no_grad(), recorded(self.base.layers) as forward:
                expected = forward(self.base.run(tokens_T, positions_T, attention, keep=None))
            compiled = partial(self.forward, tokens_T, positions_T, attention, lora=None, keep=None)
            what = f"{self.base.spec.family}, compiled, {length} rows"
            check_forward(what, compiled, self.base.layers, expected)

    def _stub(self, index: int) -> Callable[..., object]:
        """Make a replacement of a layer's forward that also sets `current.layer`."""
        layers, numbers = self._layers, self._numbers

        def run(*args: object, **kwargs: object) -> object:
            current.layer = index
            if numbers is None:
                return layers.call(index, args, kwargs)
            with numbers.suspended():  # compiled layers contain their constants
                return layers.call(index, args, kwargs)

        return run

    @contextmanager
    def _patched(self) -> Iterator[None]:
        layers = self.base.layers
        try:
            with torch._dynamo.config.patch(recompile_limit=RECOMPILES):
                for layer, stub in zip(layers, self._stubs, strict=True):
                    vars(layer)["forward"] = stub  # like assignment, without nn.Module's check for parameters
                yield
        finally:
            for layer in layers:
                vars(layer).pop("forward", None)


def _inductor(module: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Sequence[object]]:
    compiled = torch._inductor.compile(module, list(inputs), options=dict(INDUCTOR))
    return cast("Callable[..., Sequence[object]]", compiled)
