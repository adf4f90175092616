"""A workload as a sequence of arrivals, and its file: JSON lines, read and written in constant memory.

The first line is `{"type":"workload","version":1,"scenario":{...}}` with the settings that made the trace. Then comes
one line per arrival, ordered by `at`, the seconds after the start. `index` counts prompts and jobs separately:

    {"type":"prompt","at":0.1,"index":0,"adapter":"load-03","prompt":"Act as ...","max_tokens":32,"seed":7}
    {"type":"prompt","at":0.2,"index":1,"adapter":null,"prompt":[512,2048,77],"max_tokens":9,"seed":8}
    {"type":"finetune","at":20.0,"index":0,"adapter":"load-03","rows":[{"text":"..."}]}

`prompt` is a text or token ids; `adapter` null is the base; an answer has exactly `max_tokens` tokens. A prompt may
have a `slo_class`, "interactive" or "batch". A value that no server accepts is refused when the trace is read.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

import msgspec
from msgspec import Meta

from coserve.core.errors import InvalidRequest, MalformedRow
from coserve.core.limits import MAX_ROWS, Seed, TokenId
from coserve.core.names import AdapterName, AdapterRefText
from coserve.core.types import SloClass, Wire
from coserve.core.validation import explain
from coserve.workloads.bounds import MAX_SECONDS
from coserve.workloads.formats import JSON_ERRORS, MAX_TOKENS, not_json, read_lines, reading
from coserve.workloads.scenario import Scenario

T = TypeVar("T")
VERSION = 1
Time = Annotated[float, Meta(ge=0, le=2 * MAX_SECONDS)]
"""Seconds after the start; the limit covers a lead and a window."""


class PromptArrival(Wire, frozen=True, tag="prompt", omit_defaults=True):
    """A generation request that arrives at `at`."""

    at: Time
    index: int
    adapter: AdapterRefText | None
    prompt: Annotated[str, Meta(min_length=1)] | Annotated[tuple[TokenId, ...], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    seed: Seed
    slo_class: SloClass | None = None


class FinetuneArrival(Wire, frozen=True, tag="finetune"):
    """A fine-tuning job that arrives at `at`."""

    at: Time
    index: int
    adapter: AdapterName
    rows: Annotated[tuple[dict[str, Any], ...], Meta(min_length=1, max_length=MAX_ROWS)]


Arrival = PromptArrival | FinetuneArrival


class _Header(Wire, frozen=True, tag="workload"):
    version: int
    scenario: Scenario


_RAW = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True)
class Trace:
    """All arrivals of a workload, by time. `arrivals` can be iterated repeatedly and need not be in memory."""

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
    """An iterable that generates the arrivals anew at each iteration."""

    make: Callable[[], Iterator[Arrival]]

    def __iter__(self) -> Iterator[Arrival]:
        return self.make()


@dataclass(frozen=True)
class Totals:
    """Totals of a trace. `adapters`: names of the adapters of its requests and jobs, sorted."""

    prompts: int
    jobs: int
    adapters: tuple[str, ...]


def count(trace: Trace) -> Totals:
    """Count a trace's content in one iteration with constant memory. Raises what reading it raises."""
    prompts = jobs = 0
    adapters = set[str]()
    for arrival in trace.arrivals:
        prompts += isinstance(arrival, PromptArrival)
        jobs += isinstance(arrival, FinetuneArrival)
        if arrival.adapter is not None:
            adapters.add(arrival.adapter)
    return Totals(prompts, jobs, tuple(sorted(adapters)))


def save_trace(trace: Trace, path: Path) -> None:
    """Save a trace. The file at `path` is replaced only at the end, and kept after a failure, so `path` may be the file
    that `trace` is read from.

    Raises `InvalidRequest` if the file cannot be written, and what reading the trace raises.
    """
    encode = msgspec.json.Encoder().encode
    try:
        with _replacing(path) as file:
            file.write(encode(_Header(version=VERSION, scenario=trace.scenario)) + b"\n")
            for arrival in trace.arrivals:
                file.write(encode(arrival) + b"\n")
    except OSError as error:
        raise InvalidRequest(f"cannot write the trace to {str(path)!r}: {error.strerror}", field="save") from error


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file in the folder of `path` that replaces it once complete. A pipe or a device is written
    directly."""
    target = path.resolve()
    if target.exists() and not target.is_file():
        with target.open("wb") as file:
            yield file
        return
    beside = target.with_name(f".coserve-{secrets.token_hex(8)}.tmp")
    try:
        with beside.open("xb") as file:
            yield file
        beside.replace(target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def load_trace(path: Path) -> Trace:
    """Return a trace whose arrivals are read from the file at iteration.

    Raises `MalformedRow` (with file and line) for a wrong first line, `InvalidRequest` for a missing file. The
    iteration raises `MalformedRow` for any other line that `save_trace` does not write.
    """
    with reading(path):
        number, first = next(read_lines(path), (1, b""))
        if not first:
            raise MalformedRow("expected a workload, got an empty file", line=1)
        header = _decode(first, _RAW, number)
        _refuse_unknown_version(header, number)
        _refuse_unknown_settings(header, number)
        scenario = _decode(first, msgspec.json.Decoder(_Header), number).scenario
    return Trace(scenario=scenario, arrivals=Repeatable(lambda: _arrivals(path)))


def _refuse_unknown_version(header: dict[str, msgspec.Raw], number: int) -> None:
    found = bytes(header.get("version", b"1")).decode(errors="replace")
    if found != str(VERSION):
        raise MalformedRow(f"expected a workload of version {VERSION}, got version {found[:40]}", line=number)


def _refuse_unknown_settings(header: dict[str, msgspec.Raw], number: int) -> None:
    known = {f.name for f in fields(Scenario)}
    for name in _decode(bytes(header.get("scenario", b"{}")), _RAW, number):
        if name not in known:
            raise MalformedRow(f"expected settings of a workload, got {name!r}", line=number)


def _arrivals(path: Path) -> Iterator[Arrival]:
    decoder: msgspec.json.Decoder[Arrival] = msgspec.json.Decoder(Arrival)
    before, last = 0.0, dict[type[Arrival], int]()
    lines = read_lines(path)
    with reading(path):
        next(lines, None)  # skip the settings
        for number, line in lines:
            arrival = _decode(line, decoder, number)
            if arrival.at < before:
                raise MalformedRow(f"expected arrivals in order of time, got {arrival.at} after {before}", line=number)
            kind = type(arrival)
            if kind in last and arrival.index <= last[kind]:
                raise MalformedRow(f"index: expected more than {last[kind]}, got {arrival.index}", line=number)
            before, last[kind] = arrival.at, arrival.index
            yield arrival


def _decode(line: bytes, decoder: msgspec.json.Decoder[T], number: int) -> T:
    try:
        return decoder.decode(line)
    except msgspec.ValidationError as error:
        raise MalformedRow(str(explain(error, _plain(line), PromptArrival)), line=number) from error
    except JSON_ERRORS as error:
        raise not_json(error, number) from error
    except InvalidRequest as error:  # the settings are invalid
        raise MalformedRow(str(error), line=number) from error


def _plain(line: bytes) -> object:
    """Return a line's JSON value; None if it cannot be decoded, as with a too large number."""
    try:
        return msgspec.json.decode(line)
    except JSON_ERRORS:
        return None
