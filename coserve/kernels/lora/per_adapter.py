"""`naive`: one forward of the base per adapter, the paper's first baseline (ETS §4.3.2).

Only generation does so: `generate.batch.pack` cuts a step into one batch per adapter. Within each of them the terms are
computed as `grouped` computes them. A training step has one adapter anyway, and runs as with `grouped`.
"""

from __future__ import annotations

from coserve.kernels.lora.grouped import GroupedBackend


class PerAdapterBackend(GroupedBackend):
    """`grouped` over batches of one adapter each."""

    name = "naive"
    one_adapter_a_step = True
