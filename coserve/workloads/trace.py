"""A workload as a sequence of arrivals, and the file that keeps one: JSON lines, read and written in constant memory.

The first line is `{"type":"workload","version":1,"scenario":{...}}` with the settings that made the trace. Then comes one line an
arrival, ordered by `at`, the seconds after the start:

    {"type":"prompt","at":0.1,"index":0,"adapter":"load-03","prompt":"Act as ...","max_tokens":32,"seed":7}
    {"type":"prompt","at":0.2,"index":1,"adapter":null,"prompt":[512,2048,77],"max_tokens":9,"seed":8}
    {"type":"finetune","at":20.0,"index":0,"adapter":"load-03","rows":[{"text":"..."}]}

`prompt` is a text or token ids; `adapter` null is the base; an answer has exactly `max_tokens` tokens. A prompt may have a
`slo_class`, "interactive" or "batch".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from coserve.errors import InvalidRequest, MalformedRow
from coserve.types import SloClass, Wire
from coserve.workloads.formats.lines import read_lines
from coserve.workloads.scenario import Scenario

T = TypeVar("T")
VERSION = 1


class PromptArrival(Wire, frozen=True, tag="prompt", omit_defaults=True):
    """A generation request that comes at `at`."""

    at: float
    index: int
    adapter: str | None
    prompt: str | tuple[int, ...]
    max_tokens: int
    seed: int
    slo_class: SloClass | None = None


class FinetuneArrival(Wire, frozen=True, tag="finetune"):
    """A fine-tuning job that comes at `at`."""

    at: float
    index: int
    adapter: str
    rows: tuple[dict[str, Any], ...]


Arrival = PromptArrival | FinetuneArrival


class _Header(Wire, frozen=True, tag="workload"):
    version: int
    scenario: Scenario


@dataclass(frozen=True)
class Trace:
    """All arrivals of a workload, by time. `arrivals` can be iterated again and again; it need not be in memory."""

    scenario: Scenario
    arrivals: Iterable[Arrival]

    @property
    def prompts(self) -> tuple[PromptArrival, ...]:
        return tuple(arrival for arrival in self.arrivals if isinstance(arrival, PromptArrival))

    @property
    def finetunes(self) -> tuple[FinetuneArrival, ...]:
        return tuple(arrival for arrival in self.arrivals if isinstance(arrival, FinetuneArrival))


@dataclass(frozen=True)
class Repeatable:
    """Arrivals that are made anew each time."""

    make: Callable[[], Iterator[Arrival]]

    def __iter__(self) -> Iterator[Arrival]:
        return self.make()


@dataclass(frozen=True)
class Totals:
    """What a trace holds in all. `adapters`: those of its requests and jobs, in order of their names."""

    prompts: int
    jobs: int
    adapters: tuple[str, ...]


def count(trace: Trace) -> Totals:
    """Read a trace once, in constant memory. Raises what reading it raises."""
    prompts = jobs = 0
    adapters = set[str]()
    for arrival in trace.arrivals:
        prompts += isinstance(arrival, PromptArrival)
        jobs += isinstance(arrival, FinetuneArrival)
        if arrival.adapter is not None:
            adapters.add(arrival.adapter)
    return Totals(prompts, jobs, tuple(sorted(adapters)))


def save_trace(trace: Trace, path: Path) -> None:
    """Raises `InvalidRequest` where nothing can be written."""
    encode = msgspec.json.Encoder().encode
    try:
        with path.open("wb") as file:
            file.write(encode(_Header(version=VERSION, scenario=trace.scenario)) + b"\n")
            for arrival in trace.arrivals:
                file.write(encode(arrival) + b"\n")
    except OSError as error:
        raise InvalidRequest(f"cannot write the trace to {str(path)!r}: {error.strerror}", field="save") from error


def load_trace(path: Path) -> Trace:
    """A trace whose arrivals are read from the file when they are iterated.

    Raises `MalformedRow` (with the line) for a wrong first line, and so does the iteration for any other line that `save_trace`
    does not write; `InvalidRequest` for no file.
    """
    _, first = next(read_lines(path), (1, b""))
    if not first:
        raise MalformedRow("expected a workload, got an empty file", line=1)
    header = _decode(first, msgspec.json.Decoder(dict[str, msgspec.Raw]), 1)
    _refuse_unknown_settings(header)
    scenario = _decode(first, msgspec.json.Decoder(_Header), 1).scenario
    return Trace(scenario=scenario, arrivals=Repeatable(lambda: _arrivals(path)))


def _refuse_unknown_settings(header: dict[str, msgspec.Raw]) -> None:
    known = {f.name for f in fields(Scenario)}
    for name in _decode(bytes(header.get("scenario", b"{}")), msgspec.json.Decoder(dict[str, msgspec.Raw]), 1):
        if name not in known:
            raise MalformedRow(f"expected settings of a workload, got {name!r}", line=1)


def _arrivals(path: Path) -> Iterator[Arrival]:
    decoder: msgspec.json.Decoder[Arrival] = msgspec.json.Decoder(Arrival)
    before = 0.0
    for number, line in read_lines(path):
        if number == 1:
            continue
        arrival = _decode(line, decoder, number)
        if arrival.at < before:
            raise MalformedRow(f"expected arrivals in order of time, got {arrival.at} after {before}", line=number)
        before = arrival.at
        yield arrival


def _decode(line: bytes, decoder: msgspec.json.Decoder[T], number: int) -> T:
    try:
        return decoder.decode(line)
    except msgspec.MsgspecError as error:
        raise MalformedRow(str(error), line=number) from error
    except InvalidRequest as error:  # a scenario that cannot be
        raise MalformedRow(str(error), line=number) from error
