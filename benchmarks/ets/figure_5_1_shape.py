"""What figure 5.1 of the ETS paper is measured on."""

from __future__ import annotations

from dataclasses import dataclass

SEED = 0
RANKS = (64, 16, 128, 32)
GRAPHS = "segmented+graphs"
TRAINER = "segmented+trainer"
METHODS = ("segmented", GRAPHS, "block_sparse", "grouped", "naive", TRAINER)
NOT_MEASURED = {("finetuning", GRAPHS), ("inference", TRAINER)}
AS_SEGMENTED = ("segmented", TRAINER)
TASKS = ("inference", "finetuning")
AXES = ("adapters", "batch")
FINETUNING_REPEATS = 7
"""Times that each batch of fine-tuning by `segmented` is timed."""


@dataclass(frozen=True)
class Shape:
    """What is measured; the paper's, or a small one to try the script with."""

    device: str
    layers: int
    hidden: int
    heads: int
    vocab: int
    prompt: int
    output: int
    length: int
    repeats: int
    counts: tuple[int, ...]
    """Of adapters, and of sequences."""
    batch: int
    adapters: int
    naive_most: int
    """Most sequences or adapters for `naive`, which takes minutes beyond."""
    kv_tokens: int = 48_000
    """For the adapters too."""


PAPER = Shape("cuda", 24, 1024, 16, 50257, 32, 24, 512, 3, (1, 4, 16, 64), 16, 24, 24)
TINY = Shape("cpu", 2, 32, 2, 64, 4, 3, 8, 1, (1, 2), 2, 2, 2, 8192)
