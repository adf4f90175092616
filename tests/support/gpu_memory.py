"""Costs of a base that was never measured."""

from __future__ import annotations

from coserve.gpu_memory import GroupCosts, HeadCosts, Line, TrainingCosts

COSTS = TrainingCosts(
    rank=16,
    fixed=0.0,
    layer=1000.0,
    groups=(
        GroupCosts(roles=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), kept=100.0, bottom=900.0),
        GroupCosts(roles=("self_attn.o_proj",), kept=0.0, bottom=700.0),
        GroupCosts(roles=("mlp.gate_proj", "mlp.up_proj"), kept=100.0, bottom=500.0),
        GroupCosts(roles=("mlp.down_proj",), kept=300.0, bottom=200.0),
    ),
    recompute=Line(fixed=0.0, per_token=150.0),
    head=HeadCosts(norm=Line(fixed=0.0, per_token=100.0), fixed=0.0, per_token=50.0, per_position=4000.0, most=64),
    last=Line(fixed=0.0, per_token=400.0),
    others=Line(fixed=0.0, per_token=600.0),
)
