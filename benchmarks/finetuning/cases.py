"""What fine-tuning is measured on: bases, batches, sides, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from transformers import GPT2Config, PretrainedConfig

from benchmarks.common.llama import Llama, llama_config
from benchmarks.peers.trainer import TARGETS as LLAMA_TARGETS

RANK = 16
SEED = 0
OURS, PEFT, COMPILED, GRAPHS = "coserve", "peft", "peft_compiled", "peft_graphs"
PEFT_MODES = {PEFT: None, COMPILED: "default", GRAPHS: "reduce-overhead"}
"""Modes of `torch.compile` of each side of PEFT; None: not compiled."""
RECOMPUTED = 28 / 32
"""Layers that coserve computes again in cases with `recompute`: the fewest with which 8 rows of 512 tokens take at most
21 GiB. PEFT's side computes all of them again."""
KEYS = {OURS: "finetune"}
"""How a side's keys begin, where it is not the side's name."""
GROUPS = ("sizes", "jobs", "costs", "gpt2")
COSTS = "costs"


@dataclass(frozen=True)
class Shape(Llama):
    """Sizes of a Llama, or of a GPT-2."""

    name: str
    family: str
    device: str
    speed: float
    """Tokens a second that the estimates of a case's time count on."""

    @property
    def targets(self) -> tuple[str, ...]:
        return LLAMA_TARGETS if self.family == "llama" else ("c_attn", "c_proj", "c_fc")

    @property
    def layer_parameters(self) -> int:
        """Of the GEMMs of all layers."""
        keys = self.hidden * self.kv_heads // self.heads
        mlp = (3 if self.family == "llama" else 2) * self.hidden * self.inner
        return self.layers * (2 * self.hidden * (self.hidden + keys) + mlp)

    def flop(self, *, recompute: float, without_last: bool = False) -> float:
        """Of a token's forward and backward: 4 for each parameter in a GEMM, the head's included (2 forward, 2 for the
        gradient of its input; the base has no weight gradients), and 2 more for those of layers that are computed
        again, a share of all; `without_last`: but for their last GEMM, whose output no backward reads. Attention and
        LoRA do not count."""
        again = self.layer_parameters - without_last * self.layers * self.hidden * self.inner
        return 4.0 * (self.layer_parameters + self.hidden * self.vocab) + 2.0 * again * recompute

    def config(self) -> PretrainedConfig:
        """Without dropout."""
        if self.family == "llama":
            return llama_config(self)
        sizes = {"n_embd": self.hidden, "n_layer": self.layers, "n_head": self.heads, "n_positions": self.context}
        no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return GPT2Config(vocab_size=self.vocab, **sizes, **no_dropout, bos_token_id=0, eos_token_id=1)


LLAMA = Shape(32, 4096, 14336, 32, 8, 128256, 8192, "llama-8b", "llama", "cuda", 5000)
GPT2_MEDIUM = Shape(24, 1024, 4096, 16, 16, 50257, 1024, "gpt2-medium", "gpt2", "cuda", 30_000)
TINY_LLAMA = Shape(2, 32, 64, 4, 2, 128, 8192, "tiny-llama", "llama", "cpu", 100_000)
TINY_GPT2 = Shape(2, 32, 128, 4, 4, 128, 1024, "tiny-gpt2", "gpt2", "cpu", 100_000)


@dataclass(frozen=True)
class Case:
    """One batch that is trained over and over."""

    group: str
    rows: int
    """Of one job's optimizer step."""
    length: int
    jobs: int = 1
    recompute: bool = False
    gpt2: bool = False

    @property
    def name(self) -> str:
        jobs = f"{self.jobs}jobs" if self.jobs > 1 else ""
        base = "gpt2." if self.gpt2 else ""
        if self.group == COSTS:
            return f"{base}{COSTS}"
        return f"{base}{jobs}{self.rows}x{self.length}" + ".recompute" * self.recompute

    @property
    def batch(self) -> int:
        """Sequences of one forward."""
        return min(self.jobs * self.rows, max(MOST_SEQUENCES, self.rows))

    @property
    def tokens(self) -> int:
        return self.batch * self.length


MOST_SEQUENCES = 16
"""Of one forward that jobs share."""


def cases() -> list[tuple[Case, tuple[str, ...]]]:
    """All cases with the sides that measure them, by group."""
    every, ours, compiled = (OURS, COMPILED, PEFT), (OURS,), (OURS, COMPILED)
    found: list[tuple[Case, tuple[str, ...]]] = [
        (Case("sizes", 8, 512), every),
        (Case("sizes", 1, 512), (*every, GRAPHS)),
        (Case("jobs", 1, 512, jobs=8), ours),
        (Case("sizes", 8, 512, recompute=True), compiled),
        (Case(COSTS, 8, 512), ours),
    ]
    sizes = ((16, 512), (4, 512), (8, 1024), (4, 2048), (2, 4096), (1, 8192))
    found += [(Case("sizes", rows, length), every) for rows, length in sizes]
    found += [(Case("jobs", 1, 512, jobs=jobs), ours) for jobs in (2, 4, 16)]
    found += [(Case("jobs", 8, 512, jobs=jobs), ours) for jobs in (2, 4, 8, 16)]
    found += [(Case("gpt2", rows, length, gpt2=True), every) for rows, length in ((8, 512), (1, 512), (16, 512))]
    found += [(Case("gpt2", 1, 512, jobs=8, gpt2=True), ours)]
    return found


@dataclass(frozen=True)
class Turn:
    """Cases of one side on one base, which is loaded once for them."""

    side: str
    cases: tuple[Case, ...]
    gpt2: bool = False


def turns(tokens: frozenset[str]) -> list[Turn]:
    """Everything that `tokens` chose (see `chosen`), the most important first: the main batch of each side, then their
    other sizes."""
    everything = cases()
    main = [case for case, _ in everything[:4]]

    def of(side: str, *, gpt2: bool, first: bool) -> tuple[Case, ...]:
        return tuple(
            case
            for case, sides in everything
            if side in sides and case.gpt2 == gpt2 and (case in main) == first and chosen(side, case, tokens)
        )

    sides = (OURS, COMPILED, GRAPHS, PEFT)
    found = [Turn(side, of(side, gpt2=False, first=True)) for side in sides]
    found += [Turn(side, of(side, gpt2=False, first=False)) for side in sides]
    found += [Turn(side, of(side, gpt2=True, first=False), gpt2=True) for side in sides]
    return [turn for turn in found if turn.cases]


def chosen(side: str, case: Case, tokens: frozenset[str]) -> bool:
    """Whether `--only` names the side, the case, its group, or SIDE/CASE; nothing named: all."""
    names = {side, case.name, case.group, f"{side}/{case.name}", f"{side}/{case.group}"}
    return not tokens or bool(names & tokens)


def names() -> Iterator[str]:
    """What `--only` may name."""
    everything = cases()
    yield from (OURS, *PEFT_MODES, *GROUPS)
    for case, _ in everything:
        yield case.name
    for side in (OURS, *PEFT_MODES):
        for case, _ in everything:
            yield from (f"{side}/{case.name}", f"{side}/{case.group}")


def tiny(case: Case) -> Case:
    """As many tokens as a CPU computes at once; the name stays."""
    return replace(case, length=max(8, case.length // 64), rows=min(case.rows, 2))


def key(side: str, quantity: str, case: Case) -> str:
    """Of a row."""
    return f"{KEYS.get(side, side)}.{quantity}.{case.name}"


def expected_seconds(side: str, case: Case, shape: Shape, steps: int, warm: int) -> float:
    """A rough upper estimate of a case's time, the loading of its base aside."""
    compiling = 60.0 if PEFT_MODES.get(side) else 15.0
    passes = warm + steps + (1 if side in PEFT_MODES else 4)
    if case.group == COSTS:
        passes *= 6
    return compiling + passes * case.tokens / shape.speed
