"""Steps of `bdlora/measure.py` through coserve's executor: the same on every rank, the next one launched before the
last is collected."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.bdlora.plan import Load
from coserve.core.sampling import SamplingParams
from coserve.core.types import AdapterRef
from coserve.generate.execution.interface import BASE_ONLY, SequenceInput, StepExecutor, StepInFlight, StepInput
from coserve.generate.sampling.choices import Choice
from coserve.generate.sampling.rows import SamplingRow
from coserve.kernels.attention.interface import TokenRun
from coserve.memory.kv import KvCache
from coserve.model.lora import LoraWeights

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass
class _Sequence:
    number: int
    adapter: int
    pages: tuple[int, ...]
    position: int
    """Of the next token that is computed."""
    output: int = 0


@dataclass(frozen=True)
class Generated:
    """One run of a load."""

    seconds: float
    prefill_ms: float
    """To the first token of the last prompt."""
    step_ms: list[float]
    """Between two steps' tokens on the host."""


class Schedule:
    """Runs loads for one executor and its adapters. Greedy; tokens reach the host, as the daemon sends them."""

    def __init__(
        self,
        executor: StepExecutor,
        kv: KvCache,
        vocab: int,
        adapters: Sequence[tuple[AdapterRef, LoraWeights]],
        sequences: int,
        *,
        dry: bool = False,
    ) -> None:
        """`sequences`: numbers below it were used before. `dry`: kernels are compiled and not launched; no token is
        ever read."""
        self._dry = dry
        self.executor, self.sequences = executor, sequences
        self._kv, self._vocab, self._adapters = kv, vocab, adapters
        self._in_flight: list[StepInFlight] = []
        self._tokens: dict[int, int] = {}
        """Newest tokens by sequence, where the host knows them."""
        self._collected: list[float] = []
        """When the tokens of each step were there."""

    def generate(self, load: Load, step_tokens: int) -> Generated:
        """The load from its first prompt's step to its last token."""
        running = self._begin(load.batch, load.prompt + load.output)
        began = time.perf_counter()
        for chunks in _chunks(load.batch, load.prompt, step_tokens):
            self._launch([self._prompt(running[which], first, last, load) for which, first, last in chunks])
        prefilled = len(self._collected) + bool(self._in_flight)
        for _ in range(load.output - 1):
            self._launch([self._next(own) for own in running])
        self._collect()
        times = self._collected
        first = times[prefilled - 1]
        found = Generated(times[-1] - began, (first - began) * 1e3, _gaps(times[prefilled - 1 :]))
        self._end(running)
        return found

    def decode(self, batch: int, context: int, steps: int) -> list[float]:
        """Milliseconds of steps from `context` on, whose pages hold what they hold."""
        running = self._begin(batch, context + steps + 1)
        for own in running:
            own.position = context
            self._tokens[own.number] = (own.number * 7919 + 2) % self._vocab
        for _ in range(steps + 1):
            self._launch([self._next(own) for own in running])
        self._collect()
        found = _gaps(self._collected)
        self._end(running)
        return found

    def close(self) -> None:
        """The adapters' weights may change afterwards."""
        for ref, _ in self._adapters:
            self.executor.evicted(ref)

    def _begin(self, batch: int, tokens: int) -> list[_Sequence]:
        self._collected, self._tokens = [], {}
        running = []
        for i in range(batch):
            pages = self._kv.allocate(self._kv.pages_for(tokens))
            assert pages is not None, "the cache was sized for the largest load"
            adapter = i % len(self._adapters) if self._adapters else BASE_ONLY
            running.append(_Sequence(self.sequences, adapter, tuple(pages), 0))
            self.sequences += 1
        return running

    def _end(self, running: Sequence[_Sequence]) -> None:
        for own in running:
            self.executor.forget(own.number)
            self._kv.free(list(own.pages))

    def _prompt(self, own: _Sequence, first: int, last: int, load: Load) -> SequenceInput:
        """Tokens `first` to `last` of the prompt, which are functions of the sequence's number and the place."""
        tokens = [(own.number * 31 + place * 7919) % (self._vocab - 2) + 2 for place in range(first, last)]
        own.position = last
        return self._input(own, tokens, TokenRun(last - first, first, own.pages), samples=last == load.prompt)

    def _next(self, own: _Sequence) -> SequenceInput:
        known = 1 if self._dry else self._tokens.get(own.number)
        run = TokenRun(1, own.position, own.pages)
        own.position += 1
        return self._input(own, [] if known is None else [known], run, samples=True)

    def _input(self, own: _Sequence, tokens: list[int], run: TokenRun, *, samples: bool) -> SequenceInput:
        row = SamplingRow(own.number, GREEDY, own.output) if samples else None
        own.output += samples
        return SequenceInput(own.number, own.adapter, tokens, run, row, None, False)

    def _launch(self, sequences: list[SequenceInput]) -> None:
        refs = tuple(ref for ref, _ in self._adapters)
        launched = self.executor.launch(StepInput(refs, sequences), [weights for _, weights in self._adapters])
        self._collect()
        for own in sequences:
            self._tokens.pop(own.sequence, None)  # the newest token is now the step's
        self._in_flight = list(launched)
        if not all(step.overlaps for step in launched):
            self._collect()

    def _collect(self) -> None:
        """The tokens of the step in flight."""
        for step in () if self._dry else self._in_flight:
            for number, choice in step.collect().sampled:
                assert isinstance(choice, Choice), f"expected a token, got {choice}"
                self._tokens[number] = choice.token
        if self._in_flight:
            self._collected.append(time.perf_counter())
        self._in_flight = []


def _chunks(batch: int, prompt: int, step_tokens: int) -> list[list[tuple[int, int, int]]]:
    """The prompts' chunks (sequence, first, last) by step."""
    steps, left = list[list[tuple[int, int, int]]](), 0
    for which in range(batch):
        first = 0
        while first < prompt:
            if not left:
                steps.append([])
                left = step_tokens
            last = min(prompt, first + left)
            steps[-1].append((which, first, last))
            left -= last - first
            first = last
    return steps


def _gaps(times: Sequence[float]) -> list[float]:
    return [(after - before) * 1e3 for before, after in pairwise(times)]
