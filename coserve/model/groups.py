"""Groups of sites that read one input, and their stacked weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from coserve.kernels.attention.packed import PackedAttention
from coserve.kernels.lora.segmented.block_sizes import MAX_SITES
from coserve.kernels.lora.types import FrozenWeight, SiteGroup
from coserve.model.base import Base
from coserve.model.lora import SharedInput
from coserve.model.parallel.modules import shard_of
from coserve.model.quantized.modules import QuantizedLinear


def shared_inputs(base: Base) -> list[list[SiteGroup]]:
    """Return each layer's sites in execution order, grouped: neighbours that receive the same tensor form a group.

    Grouped sites are `nn.Linear`s, or quantised, that all have a bias, or all have none; `MAX_SITES` at most, further
    ones form the next group.
    """
    return [[group for groups in layer for group in groups] for layer in _inputs(base)]


def _inputs(base: Base) -> list[list[list[SiteGroup]]]:
    """Return each layer's inputs in execution order, each as the list of groups that read it."""
    runs: list[list[list[str]]] = [[] for _ in base.layers]
    seen: list[Tensor] = []  # kept alive, so that no other tensor reuses an address
    modules = dict(base.model.named_modules())

    def watch(name: str, layer: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            own = runs[layer]
            if own and seen[-1] is args[0] and _stackable([modules[other] for other in own[-1]], module):
                own[-1].append(name)
            else:
                own.append([name])
            seen.append(args[0])

        return hook

    tokens = torch.arange(4, device=base.device)
    with ExitStack() as hooks, torch.no_grad():
        for name, site in base.spec.sites.items():
            hooks.enter_context(modules[name].register_forward_pre_hook(watch(name, site.layer)))
        base.run(tokens, tokens, PackedAttention((0, 4)), keep=None)
    found: list[list[list[SiteGroup]]] = []
    for layer in runs:
        index, inputs = itertools.count(), list[list[SiteGroup]]()
        for names in layer:
            cuts = [names[first : first + MAX_SITES] for first in range(0, len(names), MAX_SITES)]
            inputs.append([SiteGroup(tuple(cut), next(index)) for cut in cuts])
        found.append(inputs)
    return found


def share_inputs(base: Base) -> list[list[SiteGroup]]:
    """Group sites as `shared_inputs` does and stack the weights of each input, so that its sites run together from now
    on (`LoraSites.share`)."""
    inputs, modules = _inputs(base), dict(base.model.named_modules())
    for groups in itertools.chain.from_iterable(inputs):
        own = [[modules[name] for name in group.names] for group in groups]
        whole, shard = stack([module for part in own for module in part]), shard_of(own[0][0])
        sums = shard is not None and shard.partition.sums
        first, *others = [
            SharedInput(group, whole if len(groups) == 1 else stack(part), sums=sums)
            for group, part in zip(groups, own, strict=True)
        ]
        first.lead(others, whole)
        for shared in (first, *others):
            base.sites.share(shared)
    return [[group for groups in layer for group in groups] for layer in inputs]


def _stackable(before: Sequence[nn.Module], module: nn.Module) -> bool:
    return type(module) in (nn.Linear, QuantizedLinear) and all(
        type(other) is type(module) and (other.bias is None) == (module.bias is None) for other in before
    )


def stack(modules: Sequence[nn.Module]) -> FrozenWeight:
    """Stack the weights of `modules`: they become views of one tensor (ΣO, D)."""
    biases = [bias for module in modules if (bias := cast("nn.Parameter | None", module.bias)) is not None]
    if len(modules) > 1 and biases:
        _restack(biases)
    if isinstance(first := modules[0], QuantizedLinear):
        quantized = [cast(QuantizedLinear, module) for module in modules]
        codes, scales = [one.codes for one in quantized], [one.scales for one in quantized]
        _restack(codes)
        _restack(scales)
        sizes = tuple(len(own) for own in codes)
        bias_O = _whole(biases) if biases else None
        return replace(first.stored, weight=_whole(codes), scales=_whole(scales), bias=bias_O, sizes=sizes)
    weights = [cast(nn.Parameter, module.weight) for module in modules]
    if len(modules) > 1:
        _restack(weights)
    whole = _turn(weights[0]) if isinstance(modules[0], Conv1D) else _whole(weights)
    sizes = (len(whole),) if len(weights) == 1 else tuple(len(weight) for weight in weights)
    return FrozenWeight(whole, _whole(biases) if biases else None, sizes)


def _turn(part: nn.Parameter) -> Tensor:
    """Return Conv1D's weight (D, O) as (O, D), like other linear modules'. The parameter stays (D, O), as a view."""
    if not part.data.T.is_contiguous():
        part.data = part.data.T.contiguous().T
    return part.data.T


def _restack(parts: Sequence[Tensor]) -> None:
    if _neighbours(parts):  # already stacked
        return
    stacked = torch.cat([part.data for part in parts])
    for part, own in zip(parts, torch.split(stacked, [len(part) for part in parts]), strict=True):
        part.data = own


def _neighbours(parts: Sequence[Tensor]) -> bool:
    """Whether the parameters are neighbouring rows of one tensor."""
    first, at = parts[0].data, parts[0].data.data_ptr()
    for part in parts:
        own = part.data
        same = own.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and own.is_contiguous()
        if not same or own.data_ptr() != at:
            return False
        at += own.numel() * own.element_size()
    return True


def _whole(parts: Sequence[Tensor]) -> Tensor:
    """Return the tensor that the parameters, its neighbouring rows, make up."""
    first = parts[0].data
    rows = sum(len(part) for part in parts)
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
