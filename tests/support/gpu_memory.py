"""A base that was never measured, and its costs."""

from __future__ import annotations

from coserve.core.gpu_memory import GroupCosts, HeadCosts, JobUse, LinearBytes, MemoryUse, TrainingCosts
from coserve.core.types import SiteSpec
from tests.support.records import make_base_spec

COSTS = TrainingCosts(
    rank=16,
    fixed=0.0,
    layer=9000.0,
    groups=(
        GroupCosts(roles=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), kept=100.0, bottom=8900.0),
        GroupCosts(roles=("self_attn.o_proj",), kept=0.0, bottom=8700.0),
        GroupCosts(roles=("mlp.gate_proj", "mlp.up_proj"), kept=100.0, bottom=8500.0),
        GroupCosts(roles=("mlp.down_proj",), kept=300.0, bottom=8200.0),
    ),
    recompute=LinearBytes(fixed=0.0, per_token=150.0),
    head=HeadCosts(
        norm=LinearBytes(fixed=0.0, per_token=100.0), fixed=0.0, per_token=50.0, per_position=4000.0, most=64
    ),
    last=LinearBytes(fixed=0.0, per_token=400.0),
    others=LinearBytes(fixed=0.0, per_token=600.0),
)

ROLES = {
    "self_attn.q_proj": (1024, 1024),
    "self_attn.k_proj": (1024, 256),
    "self_attn.v_proj": (1024, 256),
    "self_attn.o_proj": (1024, 1024),
    "mlp.gate_proj": (1024, 4096),
    "mlp.up_proj": (1024, 4096),
    "mlp.down_proj": (4096, 1024),
}
BASE = make_base_spec(
    {f"model.layers.{i}.{role}": SiteSpec(*sizes, i) for i in range(4) for role, sizes in ROLES.items()},
    fingerprint="f" * 8,
    dtype="bfloat16",
    device="cuda",
    hidden=1024,
    vocab=32000,
    context=4096,
)

MIB = 1 << 20
USE = MemoryUse(
    total=1000 * MIB,
    weights=300 * MIB,
    pages=200 * MIB,
    adapters=20 * MIB,
    graphs=50 * MIB,
    jobs=40 * MIB,
    temporary=60 * MIB,
    cached=100 * MIB,
    context=70 * MIB,
    others=80 * MIB,
    free=100 * MIB,
    planned=900 * MIB,
    training=500 * MIB,
    needed=140 * MIB,
    peak=800 * MIB,
    each=(
        JobUse(
            id="job-7",
            adapter=5 * MIB,
            gradients=10 * MIB,
            optimizer=25 * MIB,
            activations=100 * MIB,
            micro_batch_tokens=512,
            recomputed_layers=12,
            layers=32,
        ),
    ),
)
"""A GPU with one job."""
