"""`naive`: one forward of the base per adapter, the paper's first baseline (ETS §4.3.2).

Only generation does this: `generate.batch.pack` cuts a step into one batch per adapter, and each batch is computed like
`grouped`. A training step has only one adapter, and runs like `grouped`.
"""

from __future__ import annotations

from coserve.kernels.lora.grouped import GroupedBackend


class PerAdapterBackend(GroupedBackend):
    """`grouped` over batches with one adapter each."""

    name = "naive"
    one_adapter_a_step = True
