"""Sizes of `many.py`: S-LoRA's settings S1, S2 and S4 (its tables 2 and 4), and small ones to try the script."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.serving.http_case import FULL as FULL_SIZE
from benchmarks.serving.http_case import LLAMA_8B, Size
from benchmarks.serving.http_case import SMALL as SMALL_SIZE

S1, COLD_RANK = (8,), 16
REAL = {"s1": S1 * 4, "s2": (8, 16, 32, 64), "s4": (64, 32, 16)}
"""Ranks of the adapters with files of their own, by setting."""
LLAMA_13B = LLAMA_8B | {
    "vocab_size": 32000,
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


@dataclass(frozen=True)
class Case:
    """Sizes of the run. `cases`, and `uniform` after all other parts: number of adapters, exponent of the popularity,
    key of `REAL`. `few`: the case that others are compared with."""

    size: Size
    few: tuple[int, float, str]
    cases: tuple[tuple[int, float, str], ...]
    uniform: tuple[tuple[int, float, str], ...]
    rate: float
    seconds: float
    longest: int
    cold: int
    processes: int

    @property
    def config(self) -> dict[str, Any]:
        return self.size.config


FULL = Case(
    FULL_SIZE,
    (5, 1, "s1"),
    ((5, 1, "s1"), (500, 1, "s1"), (2000, 1, "s1"), (2000, 1, "s2"), (5000, 1, "s1")),
    ((500, 0, "s1"), (2000, 0, "s1")),
    rate=70,
    seconds=14,
    longest=512,
    cold=12,
    processes=4,
)
SMALL = Case(SMALL_SIZE, (5, 1, "s1"), ((5, 1, "s1"), (20, 1, "s1"), (20, 1, "s2")), ((20, 0, "s1"),), 8, 6, 16, 2, 1)
FULL_13B = replace(
    FULL,
    size=replace(FULL_SIZE, config=LLAMA_13B),
    few=(2, 1, "s4"),
    cases=((2, 1, "s4"), (100, 1, "s4"), (1000, 1, "s4")),
    uniform=(),
    cold=0,
)
SMALL_13B = replace(SMALL, few=(2, 1, "s4"), cases=((2, 1, "s4"), (12, 1, "s4")), uniform=(), cold=0)
