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

from coserve.kernels.lora.experts.interface import ExpertLora
from coserve.kernels.lora.experts.rows import ExpertRows, grouped, summed
from coserve.model.forward_context import current

SITES = "coserve_experts"
"""Attribute of a hooked module: the names of its parameters, gate and up first."""


def experts_forward(
    module: nn.Module, lora: ExpertLora, hidden_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """Return the module's output (T, D), LoRA terms included."""
    rows = lora.sorted_rows(chosen_TK, cast(int, module.num_experts))

    def product(place: int, x_SD: Tensor) -> Tensor:
        site = cast("tuple[str, str]", getattr(module, SITES))[place]
        weight_EOD, bias_EO = _parameters(module, site.rpartition(".")[2])
        y_SO = grouped(x_SD, weight_EOD, rows.ends_E)
        return lora.add(site, y_SO if bias_EO is None else y_SO + bias_EO[rows.expert_S], x_SD, rows)

    h_SI = _activation(module, product(0, hidden_TD[rows.token_S]))
    return summed(product(1, h_SI), rows.order_S, weights_TK).to(hidden_TD.dtype)


def traced_forward(module: nn.Module, hidden_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Return the module's output in a fused forward; traced by torch.compile."""
    order_S, ends_E = torch.ops.coserve.experts_order(chosen_TK, module.num_experts)
    expert_S, token_S = chosen_TK.reshape(-1)[order_S], order_S // chosen_TK.shape[1]

    def product(place: int, x_SD: Tensor) -> Tensor:
        leaf = ("gate_up_proj" if module.has_gate else "up_proj") if place == 0 else "down_proj"
        weight_EOD, bias_EO = _parameters(module, leaf)
        added = None if bias_EO is None else bias_EO[expert_S]
        y_SO: Tensor = torch.ops.coserve.experts_linear(x_SD, weight_EOD, added, expert_S, token_S, ends_E, place)
        return y_SO

    h_SI = _activation(module, product(0, hidden_TD[token_S]))
    return summed(product(1, h_SI), order_S, weights_TK).to(hidden_TD.dtype)


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


def _order(chosen_TK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return the order of the rows, by expert and then as the running step's LoRA terms need it, and the ends of the
    experts."""
    lora = _running()
    rows = ExpertRows.by_expert(chosen_TK, experts) if lora is None else lora.sorted_rows(chosen_TK, experts)
    return rows.order_S, rows.ends_E


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
    lora, fused = _running(), current.context.fused
    if lora is None:
        return y_SO
    assert fused is not None, "expected to run within FusedBase.forward"
    rows = ExpertRows(token_S, expert_S, token_S, ends_E, 0)  # slots need neither the order nor the number chosen
    return lora.add(fused.experts[current.layer][place], y_SO, x_SD, rows)


def _order_fake(chosen_TK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    order_S = chosen_TK.new_empty(chosen_TK.shape[0] * chosen_TK.shape[1], dtype=torch.int64)
    return order_S, chosen_TK.new_empty(experts, dtype=torch.int32)


def _linear_fake(x_SD: Tensor, weight_EOD: Tensor, *_: object) -> Tensor:
    return x_SD.new_empty(x_SD.shape[0], weight_EOD.shape[1])


def _register() -> torch.library.Library:
    ops = torch.library.Library("coserve", "FRAGMENT")  # type: ignore[no-untyped-call]
    rows = "Tensor expert, Tensor token, Tensor ends, int place"
    for name, schema, real, fake in (
        ("experts_order", "(Tensor chosen, int experts) -> (Tensor, Tensor)", _order, _order_fake),
        ("experts_linear", f"(Tensor x, Tensor weight, Tensor? added, {rows}) -> Tensor", _linear, _linear_fake),
    ):
        ops.define(name + schema)  # type: ignore[no-untyped-call]
        ops.impl(name, real, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"coserve::{name}", fake, lib=ops)
    return ops


_OPS = _register()
