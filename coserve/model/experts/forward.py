"""The forward of transformers' experts with LoRA terms: those of gate and up before the activation, those of down
before the sum over a token's experts.

It computes what `transformers.integrations.moe.grouped_mm_experts_forward` does, with the module's own activation.
T tokens, K experts chosen by each, S = T K rows sorted by expert, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import Tensor, nn

from coserve.kernels.lora.experts.interface import ExpertLora
from coserve.kernels.lora.experts.rows import ExpertRows, grouped


def experts_forward(
    module: nn.Module,
    sites: tuple[str, str],
    lora: ExpertLora,
    hidden_TD: Tensor,
    chosen_TK: Tensor,
    weights_TK: Tensor,
) -> Tensor:
    """Return the module's output (T, D), LoRA terms included. `sites`: its parameters, gate and up first."""
    rows = ExpertRows(chosen_TK, cast(int, module.num_experts))
    up, down = sites
    x_SD = hidden_TD[rows.token_S]
    y_SO = lora.add(up, _product(module, up, x_SD, rows), x_SD, rows)
    activation = cast("Callable[[Tensor], Tensor]", module._apply_gate if module.has_gate else module.act_fn)
    h_SI = activation(y_SO)
    z_SD = lora.add(down, _product(module, down, h_SI, rows), h_SI, rows)
    return rows.summed(z_SD, weights_TK).to(hidden_TD.dtype)


def _product(module: nn.Module, site: str, x_SD: Tensor, rows: ExpertRows) -> Tensor:
    """Return the base's output of one parameter."""
    leaf = site.rpartition(".")[2]
    weight_EOD = cast(Tensor, getattr(module, leaf))
    y_SO = grouped(x_SD, weight_EOD.mT if module.is_transposed else weight_EOD, rows.ends_E)
    return y_SO + cast(Tensor, getattr(module, f"{leaf}_bias"))[rows.expert_S] if module.has_bias else y_SO
