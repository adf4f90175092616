"""Hooks the input embedding and the head of the base, to add what the running batch's adapters change there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MethodType

import msgspec
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coserve.core.errors import InvalidRequest
from coserve.core.names import TOKEN_ROWS, WHOLE_COPY, end_of
from coserve.core.types import SiteSpec
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair
from coserve.model.adapters.end_terms import EndChange, Ends, EndTerms
from coserve.model.forward_context import current
from coserve.model.lora import LoraWeights

AT_ONCE = 8192
"""Rows of a weight that are compared at once."""
END = "coserve_end"
"""Attribute of a hooked module that holds its own forward."""


@dataclass(frozen=True)
class EndSites:
    """Those of the embedding and the head that adapters may change, hooked in place."""

    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    """The embedding and the head by name; either may be missing."""
    specs: Mapping[str, SiteSpec] = field(default_factory=dict)
    tied: bool = False

    @staticmethod
    def hook(model: PreTrainedModel, layers: int, seen: Mapping[str, nn.Module]) -> EndSites:
        """Hook the ends that adapters can change. `seen`: modules that saw every token once in one forward.

        Leaves out a head with a bias, and an embedding that does more than look up rows and scale them.
        """
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        assert isinstance(embedding, nn.Module) and isinstance(head, nn.Module)
        modules, specs = dict[str, nn.Module](), dict[str, SiteSpec]()
        forward: Callable[[nn.Module, Tensor], Tensor]
        for name, module in seen.items():
            if module is embedding and isinstance(module, nn.Embedding):
                plain = type(module) is nn.Embedding or hasattr(module, "embed_scale")
                rows, width = module.weight.shape
                spec, forward = SiteSpec(rows, width, layer=-1), _embed
            elif module is head and isinstance(module, nn.Linear):
                plain = module.bias is None
                rows, width = module.weight.shape
                spec, forward = SiteSpec(width, rows, layer=layers), _logits
            else:
                continue
            if plain:
                modules[name], specs[name] = module, spec
                if END not in vars(module):
                    vars(module)[END] = module.forward
                vars(module)["forward"] = MethodType(forward, module)
        return EndSites(modules, specs, tied=getattr(head, "weight", None) is embedding.weight)

    def prepare(
        self,
        segments: Segments,
        adapters: Sequence[LoraWeights],
        kept: Sequence[int] | Tensor | None,
        device: torch.device,
    ) -> Ends | None:
        """Return the terms of one forward; None if no adapter with rows changes an end. `kept`: rows of the step that
        the head sees; None: all."""
        if not any(adapters[index].ends for index in segments.runs):
            return None
        kept = kept.tolist() if isinstance(kept, Tensor) else kept
        of_T = [-1] * segments.tokens
        for adapter, (start, end) in zip(segments.adapters, pairwise(segments.bounds), strict=True):
            of_T[start:end] = [adapter] * (end - start)
        of_K = of_T if kept is None else [of_T[row] for row in kept]
        found = dict[int, EndTerms]()
        for name, spec in self.specs.items():
            tied, head = next((other for other in self.specs if self.tied and other != name), ""), spec.layer >= 0
            owners, changes = of_K if head else of_T, list[tuple[Tensor, EndChange]]()
            for index in dict.fromkeys(owners):
                if index < 0:
                    continue
                tokens = adapters[index].settings.trainable_token_indices or {}
                if (change := EndChange.of(name, adapters[index].ends, tokens, tied, head=head)) is not None:
                    rows = [row for row, owner in enumerate(owners) if owner == index]
                    changes.append((torch.tensor(rows, device=device), change))
            if changes:
                found[min(spec.layer, 0)] = EndTerms(changes, len(owners))
        return Ends(found.get(-1), found.get(0))

    def without_copies(self, weights: LoraWeights) -> LoraWeights:
        """Return an adapter without copies of the base's own weights: PEFT may write them beside a LoRA of an end."""
        ends = (name for name in weights.ends if name.endswith(WHOLE_COPY))
        same = {name for name in ends if _equal(weights.sites[name].a_RD, self._weight(end_of(name)))}
        if not same:
            return weights
        saved = tuple(name for name in weights.settings.modules_to_save or () if name + WHOLE_COPY not in same)
        settings = msgspec.structs.replace(weights.settings, modules_to_save=saved or None)
        return LoraWeights(settings, {name: weights.sites[name] for name in weights.sites if name not in same})

    def with_rows(self, weights: LoraWeights) -> LoraWeights:
        """Give a new adapter the base's rows for its trainable tokens; other adapters are returned as they are. Raises
        `InvalidRequest` for an adapter that replaces a whole weight."""
        whole = next((end_of(name) for name in weights.ends if name.endswith(WHOLE_COPY)), None)
        if whole is not None:
            raise InvalidRequest(f"an adapter that replaces all of {whole} can be served, not trained")
        new = {
            name + TOKEN_ROWS: tokens
            for name, tokens in (weights.settings.trainable_token_indices or {}).items()
            if name + TOKEN_ROWS not in weights.sites
        }
        if not new:
            return weights
        like = next(iter(weights.sites.values())).a_RD
        rows = {name: self._weight(end_of(name))[list(tokens)].to(like) for name, tokens in new.items()}
        return LoraWeights(weights.settings, {**weights.sites, **{name: replaced(own) for name, own in rows.items()}})

    def _weight(self, name: str) -> Tensor:
        weight = self.modules[name].weight
        assert isinstance(weight, Tensor)
        return weight.detach()


def replaced(rows_KD: Tensor) -> LoraPair:
    """Return replaced rows in the form of `LoraWeights.ends`."""
    return LoraPair(rows_KD, rows_KD.new_empty(0, len(rows_KD)), 1.0)


def _equal(own_VD: Tensor, base_VD: Tensor) -> bool:
    """Whether two weights are equal in the coarser of their dtypes."""
    dtype = min(own_VD.dtype, base_VD.dtype, key=lambda dtype: dtype.itemsize)
    parts = zip(torch.split(own_VD, AT_ONCE), torch.split(base_VD, AT_ONCE), strict=True)
    return all(torch.equal(own.to(base.device, dtype), base.to(dtype)) for own, base in parts)


def _embed(module: nn.Module, ids: Tensor) -> Tensor:
    """The `forward` of the hooked embedding: (1, T) to (1, T, D)."""
    e: Tensor = vars(module)[END](ids)
    ends = current.context.ends
    if ends is None or ends.embedding is None:
        return e
    scale = getattr(module, "embed_scale", None)
    scale = scale if scale is None or isinstance(scale, Tensor) else torch.tensor(scale, device=e.device)
    return ends.embedding.embed(ids.reshape(-1), e.reshape(-1, e.shape[-1]), scale).view(e.shape)


def _logits(module: nn.Module, x: Tensor) -> Tensor:
    """The `forward` of the hooked head: (..., D) to (..., V)."""
    y: Tensor = vars(module)[END](x)
    ends = current.context.ends
    if ends is None or ends.head is None:
        return y
    return ends.head.logits(x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])).view(y.shape)
