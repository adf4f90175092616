"""What `bdlora/measure.py` measures, as plain data, in the order of importance. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from benchmarks.common.llama import Llama

RANKS = (64, 128, 256, 16, 32)
"""Of LoRA; the first three are those that targets name."""
TINY_RANKS = (16, 8)
BATCHES = (1, 16, 64)
STEP_TOKENS = 1024
"""Most tokens of a prefill step with adapters; the base's prefill of 4096 tokens goes by steps of 2048, the daemon's
default."""


@dataclass(frozen=True)
class Shape(Llama):
    """A Llama with a name."""

    name: str

    def parameters(self) -> tuple[int, int]:
        """Of a layer's matrices; of the embedding, which is as large as the head."""
        kv = self.hidden * self.kv_heads // self.heads
        return self.hidden * (2 * self.hidden + 2 * kv + 3 * self.inner), self.vocab * self.hidden


SHAPES = {
    "8b": Shape(32, 4096, 14336, 32, 8, 128256, 8192, "8b"),
    "70b": Shape(80, 8192, 28672, 64, 8, 128256, 8192, "70b"),
    "tiny": Shape(2, 64, 128, 8, 2, 512, 256, "tiny"),
    "tiny_large": Shape(3, 64, 128, 8, 2, 512, 256, "tiny_large"),
}
"""Tiny ones in place of 8B and 70B: to try the script with; their numbers say nothing."""

Strategy = Literal["bd", "bd2", "nfs", "slora"]
STRATEGIES: tuple[Strategy, ...] = ("bd", "nfs", "slora")


class Variant(NamedTuple):
    """The base alone (no strategy), or one adapter for all sequences."""

    shape: str
    strategy: Strategy | None = None
    rank: int = 0
    """LoRA's. That of `bd` has as many parameters (`bd_rank`), that of `bd2` is twice as large, as in the paper at TP
    8."""

    @property
    def name(self) -> str:
        return "base" if self.strategy is None else f"{self.strategy}.r{self.rank}"

    @property
    def blocked(self) -> bool:
        return self.strategy in ("bd", "bd2")


class Load(NamedTuple):
    """Sequences that begin together."""

    batch: int
    prompt: int
    output: int

    @property
    def name(self) -> str:
        return f"b{self.batch}.{self.prompt}x{self.output}"

    @property
    def context(self) -> int:
        """At half of the output."""
        return self.prompt + self.output // 2


LENGTHS = ((16, 512), (1024, 128), (256, 256))
LOADS = tuple(Load(batch, *lengths) for lengths in LENGTHS for batch in BATCHES)
TARGET = Load(1, 16, 512)
"""The load of the targets."""
TINY_LOADS = tuple(Load(batch, prompt, output) for prompt, output in ((8, 6), (24, 4)) for batch in (1, 2, 4))


def bd_rank(variant: Variant, shape: Shape, blocks: int) -> int:
    """The BD-LoRA paper's r' = r (dH + dI) / (dH + dI / N), which has as many parameters in an MLP, as a multiple of N.

    Whole vectors of 8 a block, where that changes it by less than 2%: what the kernels read at once.
    """
    if variant.strategy == "bd2":
        return 2 * variant.rank
    exact = variant.rank * (shape.hidden + shape.inner) / (shape.hidden + shape.inner / blocks) / blocks
    vectors = 8 * round(exact / 8)
    block = vectors if vectors and abs(vectors / exact - 1) < 0.02 else max(1, round(exact))
    return block * blocks


@dataclass(frozen=True)
class Item:
    """One thing to measure."""

    what: Literal["build", "generate", "decode", "prefill", "train", "profile", "messages", "drop"]
    model: str
    """The shape; with `@1` behind it the whole base on one GPU, rank 0's."""
    variant: Variant
    load: Load = TARGET
    """Of `generate` and `decode`; its prompt of `prefill`."""
    repeats: int = 2
    adapters: int = 1
    """Different ones, which the sequences take in turn."""


PARTS = ("target", "retention", "one_gpu", "profile", "messages", "large", "rest", "large_rest")
"""In the order of importance. Each builds the bases that it needs and that are not there yet."""


@dataclass(frozen=True)
class Plan:
    """Items by part, of one number of ranks."""

    size: int
    ranks: tuple[int, ...] = RANKS
    loads: tuple[Load, ...] = LOADS
    small: str = "8b"
    large: str = "70b"

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        return (*STRATEGIES, "bd2") if self.size == 8 else STRATEGIES

    def with_ranks(self, ranks: tuple[int, ...]) -> Plan:
        return replace(self, ranks=ranks)

    def items(self, part: str) -> list[Item]:
        """The items of one of `PARTS`."""
        match part:
            case "target":
                every = (Variant(self.small), *self._variants(self.small))
                return [Item("generate", self.small, one, self.loads[0]) for one in every]
            case "retention":
                return self._retention()
            case "one_gpu":
                return self._one_gpu(self.small)
            case "profile":
                rank = 128 if 128 in self.ranks else self.ranks[0]
                some = (Variant(self.small), Variant(self.small, "bd", rank), Variant(self.small, "slora", rank))
                return [Item("profile", self.small, one, self.loads[0]) for one in some]
            case "messages":
                return [Item("messages", self.small, Variant(self.small))]
            case "large":
                return self._large(self.large)
            case "rest":
                return self._rest(self.small)
            case "large_rest":
                return self._large_rest(self.large)
        raise AssertionError(part)

    def models(self, parts: Sequence[str]) -> list[str]:
        """The bases of these parts, in the order in which they are built."""
        items = [item for part in parts for item in self.items(part)]
        return list(dict.fromkeys(item.model for item in items if item.what != "messages"))

    def _variants(self, shape: str) -> list[Variant]:
        return [Variant(shape, strategy, rank) for rank in self.ranks for strategy in self.strategies]

    def _retention(self) -> list[Item]:
        """Of `bd` at rank 128 at one and at the largest batch, at the load of the targets."""
        rank = 128 if 128 in self.ranks else self.ranks[0]
        pair = (Variant(self.small), Variant(self.small, "bd", rank))
        return [Item("decode", self.small, one, load) for load in self.loads[:3] for one in pair]

    def _one_gpu(self, small: str) -> list[Item]:
        """The base on one GPU and on all: decode of one sequence, prefill, fine-tuning."""
        base, found = Variant(small), list[Item]()
        prompts = (1024, 4096) if small != "tiny" else (24,)
        for model in (small, f"{small}@1"):
            found.append(Item("decode", model, base, self.loads[0]))
            found += [Item("prefill", model, base, Load(1, prompt, 1), 7) for prompt in prompts]
            found.append(Item("train", model, base, repeats=6))
        return [*found, Item("drop", f"{small}@1", base)]

    def _large(self, large: str) -> list[Item]:
        """Decode: the base at all batches, all variants at one sequence, then the first rank at all batches."""
        base, every = Variant(large), self._variants(large)
        found = [Item("decode", large, base, load, 1) for load in self.loads[:3]]
        found += [Item("decode", large, one, self.loads[0], 1) for one in every]
        prompt = Load(1, self.loads[0].prompt, 1)
        found += [Item("prefill", large, one, prompt, 3) for one in (base, *every[: len(self.strategies)])]
        some = every[: len(self.strategies)]
        return found + [Item("decode", large, one, load, 1) for one in some for load in self.loads[1:3]]

    def _rest(self, small: str) -> list[Item]:
        """Every load by its parts; some loads really run; different adapters for the requests of a batch."""
        base, every, found = Variant(small), self._variants(small), list[Item]()
        for one in (base, *every):
            found += [Item("prefill", small, one, Load(1, prompt, 1), 5) for prompt in self._prompts()]
            found += [Item("decode", small, one, load, 1) for load in self.loads]
            if one in (base, every[0]):
                found += [Item("generate", small, one, load, 1) for load in self.loads[1:]]
        some = every[: len(self.strategies)]
        return found + [Item("decode", small, one, load, 1, 4) for one in some for load in self.loads[1:3]]

    def _large_rest(self, large: str) -> list[Item]:
        base, every, found = Variant(large), self._variants(large), list[Item]()
        for one in (base, *every):
            found += [Item("prefill", large, one, Load(1, prompt, 1), 3) for prompt in self._prompts()]
            found += [Item("decode", large, one, load, 1) for load in self.loads]
        return [*found, Item("generate", large, base, self.loads[0], 1)]

    def _prompts(self) -> list[int]:
        return sorted({load.prompt for load in self.loads})
