"""Recorded arrivals and contents as the source of a workload: detects formats, selects windows, resamples rates, counts
tokens."""

from __future__ import annotations

import codecs
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from coserve.core.errors import InvalidRequest, MalformedRow
from coserve.data.pretrained.tokenizer import Tokenizer
from coserve.workloads.formats import TIME, Recorded, read_burstgpt, read_mooncake, read_sharegpt, reading
from coserve.workloads.scenario import Scenario, TraceFormat

BEGINNING = 4096
"""Bytes of a file that are read to detect its format; a file may be one line."""


class Content(NamedTuple):
    """A prompt, as a text or token ids, and the tokens of its answer."""

    prompt: str | tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class Source:
    """Factories of recorded data. `recorded` makes the arrivals (None: the scenario's process); `conversations` makes
    the contents (None: none recorded)."""

    recorded: Callable[[], Iterator[Recorded]] | None = None
    conversations: Callable[[], Iterator[Content]] | None = None

    @property
    def has_contents(self) -> bool:
        return self.recorded is not None or self.conversations is not None

    def contents(self) -> Iterator[Content] | None:
        """Yield contents endlessly, restarting the file at its end. Raises `MalformedRow` if it has none that are
        usable."""
        return None if self.conversations is None else _endless(self.conversations)


def open_source(scenario: Scenario) -> Source:
    """Open the files that the scenario names; they are read when the workload is made.

    Raises `InvalidRequest` for a missing file, `MalformedRow` for one of unknown format.
    """
    conversations = None if scenario.prompts is None else Path(scenario.prompts)
    read, found = _reader(scenario), trace_format(scenario)
    if read is None and found is not None:
        if found is not TraceFormat.SHAREGPT or conversations is not None:
            raise InvalidRequest(f"expected arrivals to make a workload of, got a {found} file", field="trace")
        conversations = Path(str(scenario.trace))
    recorded = None if read is None else partial(_window, scenario, read)
    if conversations is None:
        return Source(recorded)
    return Source(recorded, partial(_conversations, scenario, conversations, Tokenizer.load(scenario.tokenizer)))


def first_request(scenario: Scenario) -> float | None:
    """Return seconds from the recording's beginning to its first request, regardless of the selected window; None
    without a recording or request.

    Raises `InvalidRequest` or `MalformedRow` as the workload does.
    """
    read = _reader(scenario)
    return None if read is None else next((record.at for record in read()), None)


def _reader(scenario: Scenario) -> Callable[[], Iterator[Recorded]] | None:
    """Return a function that reads the recorded arrivals; None if the trace has none."""
    match trace_format(scenario):
        case TraceFormat.BURSTGPT:
            return partial(read_burstgpt, Path(str(scenario.trace)), scenario.trace_model)
        case TraceFormat.MOONCAKE:
            return partial(read_mooncake, Path(str(scenario.trace)))
    return None


def trace_format(scenario: Scenario) -> TraceFormat | None:
    """Return the format of the trace file; None without one. Raises as `format_of`."""
    if scenario.trace is None:
        return None
    return format_of(Path(scenario.trace)) if scenario.trace_format is TraceFormat.AUTO else scenario.trace_format


def format_of(path: Path) -> TraceFormat:
    """Detect a file's format by its beginning. Raises `MalformedRow`, `InvalidRequest` for a missing file."""
    with reading(path), path.open("rb") as file:
        start = file.read(BEGINNING).removeprefix(codecs.BOM_UTF8).lstrip().partition(b"\n")[0]
    if TIME.encode() in start.split(b",")[0] or b"," + TIME.encode() in start:
        return TraceFormat.BURSTGPT
    if start.startswith(b"["):
        return TraceFormat.SHAREGPT
    for key, found in (
        (b'"workload"', TraceFormat.COSERVE),
        (b'"input_length"', TraceFormat.MOONCAKE),
        (b'"conversations"', TraceFormat.SHAREGPT),
    ):
        if start.startswith(b"{") and key in start:
            return found
    got = start[:40].decode(errors="replace")
    with reading(path):
        raise MalformedRow(f"expected a trace of coserve, BurstGPT, Mooncake or ShareGPT, got {got!r}", line=1)


def _window(scenario: Scenario, read: Callable[[], Iterator[Recorded]]) -> Iterator[Recorded]:
    """Yield the selected window of the recording, with times from 0 to the duration, at the wanted rate.

    The rate is reached by dropping or repeating requests at random, in order (FlexLLM's recipe), so that bursts remain
    bursts. It holds as far as the recording reaches. The file is read twice for it.
    """
    cut = itertools.takewhile(lambda record: record.at < scenario.duration, _moved(scenario, read()))
    if scenario.trace_rate is None:
        return cut
    have, seconds = 0, 0.0
    for record in _moved(scenario, read()):
        seconds = min(record.at, scenario.duration)
        if record.at >= scenario.duration:
            break
        have += 1
    want = round(scenario.trace_rate * seconds)
    return _resampled(cut, have, want, random.Random(f"{scenario.seed}/trace"))


def _moved(scenario: Scenario, records: Iterator[Recorded]) -> Iterator[Recorded]:
    """Yield the records from `trace_start` on, with times from 0 at the wanted speed."""
    for record in records:
        if record.at >= scenario.trace_start:
            yield record._replace(at=(record.at - scenario.trace_start) / scenario.trace_speed)


def _resampled(records: Iterator[Recorded], have: int, want: int, rng: random.Random) -> Iterator[Recorded]:
    """Yield `want` records out of `have`: each record floor(want / have) times, and a uniform random subset once more
    (Knuth's algorithm S)."""
    each, more = divmod(want, have) if have else (0, 0)
    for seen, record in enumerate(records):
        extra = rng.random() * (have - seen) < more
        more -= extra
        yield from itertools.repeat(record, each + extra)


def _conversations(scenario: Scenario, path: Path, tokenizer: Tokenizer) -> Iterator[Content]:
    most = scenario.max_total_tokens
    for found in read_sharegpt(path):
        answer = len(tokenizer.encode(found.answer, add_special=False))
        if answer and (most is None or answer + len(tokenizer.encode(found.prompt)) <= most):
            yield Content(found.prompt, answer)


def _endless(make: Callable[[], Iterator[Content]]) -> Iterator[Content]:
    while True:
        found = False
        for content in make():
            found = True
            yield content
        if not found:
            raise MalformedRow("expected a conversation with a prompt and an answer, got none")
