"""Whether a step's first layers can run while the last layers of its adapter are copied, on one GPU.

    python -m benchmarks.adapters.layerwise --out benchmarks/results

A step is a CUDA graph, which begins as a whole. But a graph can hold waits for external events: here one before every
`LAYERS / PARTS` layers. The adapter's bytes are copied in as many parts on a stream of their own, and each part is
followed by its event. All linear sites of the Llama-3.1-8B shape, one cold adapter of rank 16 (84 MB).

`step`: the graph without waits, nothing is copied. `waits`: the graph with waits for events of the past: what the waits
cost every step. `whole`: the copies, then the step, as the engine does it where a step needs what is copied.
`layerwise`: the copies beside the graph with waits. `kept`: 1 if that graph did wait: its result is right though a part
comes late. Layer-wise copies are worth it if `kept` is 1, `waits` costs less than 1% of a step, and a cold step becomes
at least a tenth shorter (S-LoRA, section 4.2; InfiniLoRA, section 5.3). About 30 s.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

from benchmarks.adapters.steps import BLOCK, LAYERS, RANK, adapter_bytes, stack
from benchmarks.common.options import make_parser
from benchmarks.common.results import Results
from benchmarks.kernels import lora_backends as backends
from benchmarks.kernels import lora_cases as cases
from benchmarks.kernels.lora import step_call

TOKENS, PARTS, ROUNDS, LATE = (1, 16, 64), (2, 4, 8), 30, 200_000_000
"""Tokens of a step; parts of the adapter; rounds of each; cycles of a late copy, about 0.1 s."""


class Step:
    """A step of `tokens` tokens, and one adapter's bytes that arrive in `parts` parts."""

    def __init__(self, tokens: int, parts: int) -> None:
        layers = stack(tokens, 1)
        groups, size = len(layers) // LAYERS, adapter_bytes(layers)
        calls = list[list[backends.Call]]()
        for first in range(0, len(layers), groups):
            own = layers[first : first + groups]
            products = [backends.base_call(layer, backends.base_weights(layer)) for layer in own]
            calls.append([*products, step_call(own, [0] * tokens, [RANK], None)])
        self._blocks = [min(BLOCK, size - at) for at in range(0, size, BLOCK)]
        self._host = [torch.ones(n, dtype=torch.uint8, pin_memory=True) for n in self._blocks]
        self._device = [torch.zeros(n, dtype=torch.uint8, device=cases.DEVICE) for n in self._blocks]
        self._own = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._events = [torch.cuda.Event(external=True) for _ in range(parts)]  # type: ignore[no-untyped-call]
        self._seen = torch.zeros(parts, dtype=torch.uint8, device=cases.DEVICE)
        """The last byte of each part, as the graph with waits has read it."""
        _all([call for layer in calls for call in layer])
        for event in self._events:
            event.record()  # torch creates an event when it is first recorded
        torch.cuda.synchronize()
        self.plain = _graph(lambda: _all([call for layer in calls for call in layer]))
        self._waiting = _graph(lambda: self._captured(calls))

    def _captured(self, calls: list[list[backends.Call]]) -> None:
        each = LAYERS // len(self._events)
        for part, event in enumerate(self._events):
            torch.cuda.current_stream().wait_event(event)
            self._seen[part : part + 1].copy_(self._device[self._last(part)][-1:])
            for layer in calls[part * each : (part + 1) * each]:
                _all(layer)

    def _last(self, part: int) -> int:
        """The last block of a part."""
        return len(self._blocks) * (part + 1) // len(self._events) - 1

    def copy(self, late: int = 0) -> None:
        """Copy all parts, each followed by its event; `late`: cycles before each."""
        self._own.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._own):
            begin = 0
            for part, event in enumerate(self._events):
                if late:
                    torch.cuda._sleep(late)  # type: ignore[no-untyped-call]
                for block in range(begin, self._last(part) + 1):
                    self._device[block].copy_(self._host[block], non_blocking=True)
                begin = self._last(part) + 1
                event.record(self._own)

    def waits(self) -> None:
        self._waiting.replay()

    def whole(self) -> None:
        self.copy()
        torch.cuda.current_stream().wait_stream(self._own)
        self.plain.replay()

    def layerwise(self) -> None:
        self.copy()
        self._waiting.replay()

    def kept(self) -> bool:
        """Whether the graph waits for each part, though it comes late."""
        for block in self._device:
            block.zero_()
        self._seen.zero_()
        torch.cuda.synchronize()
        self.copy(LATE)
        self._waiting.replay()
        torch.cuda.synchronize()
        return bool(self._seen.all())


def _graph(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def _all(calls: list[backends.Call]) -> None:
    for call in calls:
        call()


def _ms(call: Callable[[], object]) -> float:
    times = list[float]()
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times[3:])


def main() -> None:
    options = make_parser(__doc__).parse_args()
    results = Results.of(
        options, "adapter_layerwise.json", __file__, {"layers": LAYERS, "rank": RANK, "rounds": ROUNDS}
    )
    for tokens in TOKENS:
        for parts in PARTS:
            torch.manual_seed(0)
            step = Step(tokens, parts)
            kept = step.kept()
            ways = {"step": step.plain.replay, "waits": step.waits, "whole": step.whole, "layerwise": step.layerwise}
            found = {name: _ms(call) for name, call in ways.items()}
            about = {f"{name}_ms": round(ms, 3) for name, ms in found.items()} | {"kept": int(kept)}
            key = f"adapters.layerwise_gain.b{tokens}.p{parts}"
            gain = 1 - found["layerwise"] / found["whole"]
            results.put(key, round(gain, 4), "of a cold step's time", about=about)
            del step
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
