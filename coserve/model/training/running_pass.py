"""The state behind the opaque ops of compiled layers, during one forward and backward of packed rows.

Letters: T packed tokens, D inputs, O outputs, G sites, R LoRA ranks, H query heads, K key-value heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.kernels.attention.interface import AttentionParams
from coserve.kernels.attention.packed import PackedAttention
from coserve.kernels.lora.interface import PreparedLora
from coserve.kernels.recurrent.interface import RecurrenceInputs
from coserve.model.forward_context import current
from coserve.model.lora import SharedInput
from coserve.model.parallel.mesh import Mesh


@dataclass(frozen=True)
class Again:
    """Operations of a layer's forward that its backward recomputes. Data for their gradients is kept when the backward
    runs them, not in the forward."""

    groups: frozenset[int] = frozenset()
    """Groups whose `learn` is recomputed."""
    attention: bool = False
    recurrence: bool = False


NOTHING = Again()


class RunningPass:
    """Implements the opaque ops with the base's weights, the adapters' terms and attention.

    It keeps what a layer's backward needs of its forward besides its saved tensors.
    """

    def __init__(
        self,
        attention: PackedAttention,
        lora: PreparedLora | None,
        groups: Sequence[Sequence[SharedInput]],
        mesh: Mesh | None = None,
    ) -> None:
        """`groups`: of each layer. `lora`: None for the base alone. `mesh`: the ranks that share the base."""
        self._attention, self._lora, self._groups, self._mesh = attention, lora, groups, mesh
        self._again: Again | None = NOTHING
        self._unread_sums = frozenset[int]()
        self._kept: dict[tuple[int, int], object] = {}
        """Kept data of LoRA terms, by layer and group."""
        self._sums: dict[int, Tensor] = {}
        """Attention's log-sum-exp, by layer."""
        self._solved: dict[int, Tensor] = {}
        """Results of `PackedRecurrence.recur_keeping` for the backward, by layer."""

    def begin_forward(self, again: Again | None) -> None:
        """Prepare for a layer's forward. `again`: operations that its backward recomputes, for which nothing is kept
        now.

        None: there is no backward.
        """
        self._again = again

    def begin_backward(self, unread_sums: frozenset[int]) -> None:
        """Prepare for a layer's backward, which keeps data of the operations that it recomputes.

        `unread_sums`: indices of sums over ranks that are left out.
        """
        self._again, self._unread_sums = NOTHING, unread_sums

    def learn(self, layer: int, group: int, x_TD: Tensor) -> Tensor:
        """Return the outputs of a group's sites, concatenated: (T, ΣO), LoRA terms included. `group`: its index in the
        layer."""
        shared = self._groups[layer][group]
        y_TO = self._local(layer, group, x_TD)
        return self.summed(f"sites {group}", y_TO) if shared.sums else y_TO

    def _local(self, layer: int, group: int, x_TD: Tensor) -> Tensor:
        """Return this rank's outputs of a group, before any sum over the ranks."""
        shared = self._groups[layer][group]
        if self._lora is None:
            return shared.stacked.linear(x_TD)
        keep = self._again is not None and group not in self._again.groups
        y_TO, kept = self._lora.linear_forward(shared.group, x_TD, shared.stacked, keep=keep)
        if keep and kept is not None:
            self._kept[layer, group] = kept
        return y_TO

    def learn_backward(self, layer: int, group: int, dy_TO: Tensor, x_TD: Tensor) -> Tensor:
        """Return the gradient of x; add those of the adapters to their sums."""
        shared = self._groups[layer][group]
        if self._lora is None:
            return shared.stacked.backward(dy_TO)
        kept = self._kept.pop((layer, group), None)
        return self._lora.linear_backward(shared.group, dy_TO, x_TD, kept, shared.stacked)

    def attend(self, layer: int, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, params: AttentionParams) -> Tensor:
        out_THD, sums = self._attention.attend_keeping(q_HTD, k_KTD, v_KTD, params)
        if self._again is not None and not self._again.attention and sums is not None:
            self._sums[layer] = sums
        return out_THD

    def attend_backward(
        self, layer: int, qkv: tuple[Tensor, Tensor, Tensor], out_THD: Tensor, dout_THD: Tensor, params: AttentionParams
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v."""
        return self._attention.gradients(qkv, out_THD, dout_THD, self._sums.pop(layer, None), params)

    def row_offsets(self, device: torch.device) -> Tensor:
        """Return each packed row's index in its own sequence: (T) int32."""
        return self._attention.recurrence.offsets(device)

    def recur(self, given: RecurrenceInputs) -> Tensor:
        """Compute `Recurrence.recur` of `normalized` inputs."""
        out_THV, solved = self._attention.recurrence.recur_keeping(given)
        if self._again is not None and not self._again.recurrence and solved is not None:
            self._solved[current.layer] = solved
        return out_THV

    def recur_backward(self, given: RecurrenceInputs, dout_THV: Tensor) -> list[Tensor]:
        """Return the gradients of q, k, v, the decay and, if there is one, beta."""
        return self._attention.recurrence.gradients(given, dout_THV, self._solved.pop(current.layer, None))

    def sum_ranks(self, place: int, x: Tensor) -> Tensor:
        """Return the sum of all ranks' `x`, without changing `x`. `place`: index among the layer's sums."""
        if place in self._unread_sums:
            return x.clone(memory_format=torch.contiguous_format)
        return self.summed(f"inputs {place}", x, out_of_place=True)

    def summed(self, what: str, x: Tensor, *, out_of_place: bool = False) -> Tensor:
        """Return the sum of all ranks' `x`, which may be overwritten unless `out_of_place`. `what`: name of the sum in
        its layer."""
        assert self._mesh is not None, "expected the ranks' mesh"
        return self._mesh.all_reduce_out_of_place(x) if out_of_place else self._mesh.all_reduce(x)


class AlonePass(RunningPass):
    """The pass of one rank without the others: sums return its own summand."""

    def __init__(self, attention: PackedAttention, groups: Sequence[Sequence[SharedInput]]) -> None:
        super().__init__(attention, None, groups)
        self.collectives: list[str] = []
        """Names of the sums, in order."""

    def summed(self, what: str, x: Tensor, *, out_of_place: bool = False) -> Tensor:
        self.collectives.append(what)
        return x.clone(memory_format=torch.contiguous_format) if out_of_place else x
