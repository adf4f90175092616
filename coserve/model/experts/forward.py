"""The forward of transformers' experts with LoRA terms: those of gate and up before the activation, those of down
before the sum over a token's experts.

It computes what `transformers.integrations.moe.grouped_mm_experts_forward` does, with the module's own activation. In
compiled layers, the order of the rows and the two products are ops that look up the step's terms when they run.
T tokens, K experts chosen by each, S = T K rows sorted by expert, E experts.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from coserve.kernels.lora.experts.interface import ExpertLora, RemoteTerms
from coserve.kernels.lora.experts.rows import ExpertRows, grouped, summed
from coserve.model.experts.shards import EXPERTS, FIRST, expert_shard, local_experts
from coserve.model.forward_context import current, register_ops, running_fused

SITES = "coserve_experts"
"""Attribute of a hooked module: the names of its parameters, gate and up first."""
OPAQUE = "coserve_opaque_experts"
"""Attribute of a module whose compiled layer leaves it whole, as LoRA servers may compute its terms."""


def experts_forward(
    module: nn.Module, lora: ExpertLora | None, hidden_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """Return the module's output (T, D), LoRA terms and other ranks' parts included."""
    experts, first, absent_S1 = cast(int, module.num_experts), getattr(module, FIRST, None), None
    if first is not None:
        chosen_TK = local_experts(chosen_TK, first, experts)
    rows = _sorted_rows(lora, chosen_TK, experts)
    if first is not None:
        absent_S1 = _absent(rows.expert_S, experts)
    h_SI = _activation(module, _product(module, 0, _without(hidden_TD[rows.token_S], absent_S1), rows, lora))
    y_SO = _without(_product(module, 1, h_SI, rows, lora), absent_S1)
    y_TO, shard = summed(y_SO, rows.place_S, weights_TK).to(hidden_TD.dtype), expert_shard(module)
    return y_TO if shard is None else shard.sum(y_TO)


def remote_forward(
    module: nn.Module,
    lora: ExpertLora | None,
    remote: RemoteTerms,
    hidden_TD: Tensor,
    chosen_TK: Tensor,
    weights_TK: Tensor,
) -> Tensor:
    """Return the output (T, D) of a module that is not sharded, with terms that LoRA servers compute while the base's
    products run, and those of other adapters (`lora`). Inference only."""
    sites = cast("tuple[str, str]", getattr(module, SITES))
    rows = _sorted_rows(lora, chosen_TK, cast(int, module.num_experts))
    terms = remote.gate_up(sites[0], hidden_TD, chosen_TK)
    y_SO = _product(module, 0, hidden_TD[rows.token_S], rows, lora)
    h_SI = _activation(module, y_SO.index_add_(0, rows.place_S, terms()))
    terms = remote.down(sites[1], h_SI[rows.place_S], weights_TK)
    y_SO = _product(module, 1, h_SI, rows, lora)
    return summed(y_SO, rows.place_S, weights_TK).to(hidden_TD.dtype) + terms()


def scored_forward(module: nn.Module, hidden_KD: Tensor) -> Tensor:
    """Return the output of a shard of Llama 4's experts, to which adapters add nothing.

    Each of E experts gets all T tokens, scaled by their scores: K = E T rows. The family's own code then adds up the E
    rows of each token. So the sum over experts and ranks is returned in the first expert's T rows and the others are
    zero: the ranks exchange only T rows.
    """
    shard = expert_shard(module)
    assert shard is not None, "expected a shard of experts"
    whole, rank = shard.partitions["down_proj"].experts, shard.mesh.rank
    ((first, last),) = whole.ranks[rank]
    hidden_ETD = hidden_KD.view(whole.size, -1, hidden_KD.shape[-1])
    y_KD = cast(Tensor, type(module).forward(module, hidden_ETD[first:last]))
    y_TD = y_KD.view(last - first, *hidden_ETD.shape[1:]).sum(0)
    y_TD = torch.ops.coserve.rank_sum(y_TD) if torch.compiler.is_dynamo_compiling() else shard.sum(y_TD)
    return nn.functional.pad(y_TD, (0, 0, 0, len(hidden_KD) - len(y_TD)))


def _sorted_rows(lora: ExpertLora | None, chosen_TK: Tensor, experts: int) -> ExpertRows:
    return ExpertRows.by_expert(chosen_TK, experts) if lora is None else lora.sorted_rows(chosen_TK, experts)


def _product(module: nn.Module, place: int, x_SD: Tensor, rows: ExpertRows, lora: ExpertLora | None) -> Tensor:
    """Return the products of the rows with their experts' matrices, biases and this process's LoRA terms added.
    `place`: 0: gate and up, 1: down."""
    site = cast("tuple[str, str]", getattr(module, SITES))[place]
    weight_EOD, bias_EO = _parameters(module, site.rpartition(".")[2])
    y_SO = grouped(x_SD, weight_EOD, rows.ends_E)
    if bias_EO is not None:
        y_SO = y_SO + bias_EO[rows.expert_S.clamp(max=rows.experts - 1)]
    return y_SO if lora is None else lora.add(site, y_SO, x_SD, rows)


def _absent(expert_S: Tensor, experts: int) -> Tensor:
    """Return which rows belong to other ranks' experts: bool (S, 1). They come last, and products do not write them."""
    return (expert_S >= experts).unsqueeze(-1)


def _without(rows_SD: Tensor, absent_S1: Tensor | None) -> Tensor:
    """Return zeros in place of absent rows, which may hold NaN, in the backward too."""
    return rows_SD if absent_S1 is None else rows_SD.masked_fill(absent_S1, 0.0)


def traced_forward(module: nn.Module, hidden_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Return the module's output in a fused forward; traced by torch.compile."""
    if hasattr(module, OPAQUE):
        return cast(Tensor, torch.ops.coserve.opaque_experts(hidden_TD, chosen_TK, weights_TK))
    experts, first, absent_S1 = cast(int, module.num_experts), getattr(module, FIRST, None), None
    if first is not None:
        chosen_TK = local_experts(chosen_TK, first, experts)
    place_S, expert_S, token_S, ends_E = torch.ops.coserve.experts_order(chosen_TK, experts)
    if first is not None:
        absent_S1 = _absent(expert_S, experts)

    def product(place: int, x_SD: Tensor) -> Tensor:
        leaf = ("gate_up_proj" if module.has_gate else "up_proj") if place == 0 else "down_proj"
        weight_EOD, bias_EO = _parameters(module, leaf)
        added = None if bias_EO is None else bias_EO[expert_S.clamp(max=experts - 1)]
        y_SO: Tensor = torch.ops.coserve.experts_linear(x_SD, weight_EOD, added, expert_S, token_S, ends_E, place)
        return y_SO

    h_SI = _activation(module, product(0, _without(hidden_TD[token_S], absent_S1)))
    y_SO = _without(product(1, h_SI), absent_S1)
    y_TO = summed(y_SO, place_S, weights_TK).to(hidden_TD.dtype)
    return cast(Tensor, torch.ops.coserve.rank_sum(y_TO)) if hasattr(module, EXPERTS) else y_TO


def _activation(module: nn.Module, y_SO: Tensor) -> Tensor:
    return cast(Tensor, module._apply_gate(y_SO) if module.has_gate else module.act_fn(y_SO))  # type: ignore[operator]


def _parameters(module: nn.Module, leaf: str) -> tuple[Tensor, Tensor | None]:
    """Return a parameter (E, O, D) and its bias (E, O)."""
    weight_EOD = cast(Tensor, getattr(module, leaf))
    bias_EO = cast(Tensor, getattr(module, f"{leaf}_bias")) if module.has_bias else None
    return weight_EOD.mT if module.is_transposed else weight_EOD, bias_EO


def _running() -> ExpertLora | None:
    lora = current.context.lora
    return None if lora is None else lora.experts


def _order(chosen_TK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort the rows by expert, and within an expert as the running step's LoRA terms need it. Return the row of each
    choice, each row's expert and token, and the end of each expert's rows, as in `ExpertRows`."""
    rows = _sorted_rows(_running(), chosen_TK, experts)
    return rows.place_S, rows.expert_S, rows.token_S, rows.ends_E


def _linear(
    x_SD: Tensor,
    weight_EOD: Tensor,
    added_SO: Tensor | None,
    expert_S: Tensor,
    token_S: Tensor,
    ends_E: Tensor,
    place: int,
) -> Tensor:
    """Return the products of the rows with their experts' matrices, plus `added_SO` and the running step's terms.
    `place`: 0: gate and up, 1: down."""
    y_SO = grouped(x_SD, weight_EOD, ends_E)
    y_SO = y_SO if added_SO is None else y_SO + added_SO
    lora = _running()
    if lora is None:
        return y_SO
    rows = ExpertRows(token_S, expert_S, token_S, ends_E, 0)  # `place_S` and `chosen` are not read
    return lora.add(running_fused().experts[current.layer][place], y_SO, x_SD, rows)


def _opaque_experts(hidden_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Return the output (T, D) of the running layer's experts, with the running step's terms."""
    module, lora = running_fused().opaque_experts[current.layer], current.context.lora
    if lora is not None and lora.remote is not None:
        return remote_forward(module, lora.experts, lora.remote, hidden_TD, chosen_TK, weights_TK)
    return experts_forward(module, _running(), hidden_TD, chosen_TK, weights_TK)


def _sum(y_TO: Tensor) -> Tensor:
    """Return the sum of all ranks' `y` in the running step, in new memory."""
    return running_fused().mesh.all_reduce_out_of_place(y_TO)


def _order_fake(chosen_TK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    count = chosen_TK.shape[0] * chosen_TK.shape[1]
    place_S, expert_S, token_S = (chosen_TK.new_empty(count, dtype=torch.int64) for _ in range(3))
    return place_S, expert_S, token_S, chosen_TK.new_empty(experts, dtype=torch.int32)


def _register() -> torch.library.Library:
    rows = "Tensor expert, Tensor token, Tensor ends, int place"
    return register_ops(
        (
            "experts_order",
            "(Tensor chosen, int experts) -> (Tensor, Tensor, Tensor, Tensor)",
            _order,
            _order_fake,
        ),
        (
            "experts_linear",
            f"(Tensor x, Tensor weight, Tensor? added, {rows}) -> Tensor",
            _linear,
            lambda x, weight, *_: x.new_empty(x.shape[0], weight.shape[1]),
        ),
        ("rank_sum", "(Tensor y) -> Tensor", _sum, torch.empty_like),
        (
            "opaque_experts",
            "(Tensor hidden, Tensor chosen, Tensor weights) -> Tensor",
            _opaque_experts,
            lambda hidden, *_: hidden.new_empty(hidden.shape),
        ),
    )


_OPS = _register()
