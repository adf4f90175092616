"""Traces of other projects: read line by line, refused with the line, streamed in constant memory."""

from __future__ import annotations

import codecs
import json
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coserve.core.errors import InvalidRequest, MalformedRow
from coserve.workloads.formats import Recorded, read_burstgpt, read_lines, read_mooncake, read_sharegpt
from coserve.workloads.opening import open_workload
from coserve.workloads.recordings import format_of
from coserve.workloads.scenario import TraceFormat
from coserve.workloads.trace import Trace, count, load_trace, save_trace

HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
BURSTGPT = (
    HEADER + "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,230,1317,API log\n118.5,ChatGPT,417,0,417,API log\n"
)
MOONCAKE = """{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]}
{"timestamp": 500, "input_length": 600, "output_length": 6, "hash_ids": [1, 3]}

{"timestamp": 27482, "input_length": 20, "output_length": 7}
"""
ONE = '{"timestamp": 0, "input_length": 1, "output_length": 1}\n'
DEEP = "[" * 100_000
TALK = {
    "id": "a",
    "conversations": [{"from": "human", "value": "Hello there"}, {"from": "gpt", "value": "Good day to you"}],
}
MONOLOGUE = {"id": "b", "conversations": [{"from": "gpt", "value": "..."}]}


def test_burstgpt(tmp_path: Path) -> None:
    path = write(tmp_path, BURSTGPT)
    assert list(read_burstgpt(path)) == [Recorded(5, 472, 18), Recorded(45, 1087, 230)], "the last one failed"
    assert list(read_burstgpt(path, "GPT-4")) == [Recorded(45, 1087, 230)]


def test_mooncake(tmp_path: Path) -> None:
    found = list(read_mooncake(write(tmp_path, MOONCAKE)))
    assert found[1] == Recorded(0.5, 600, 6, (1, 3)) and found[2] == Recorded(27.482, 20, 7)


@pytest.mark.parametrize(
    "layout", [json.dumps, lambda rows: json.dumps(rows, indent=2), lambda rows: "\n".join(map(json.dumps, rows))]
)
def test_sharegpt(tmp_path: Path, layout: Callable[[list[Any]], str]) -> None:
    found = list(read_sharegpt(write(tmp_path, layout([TALK, MONOLOGUE, TALK]))))
    assert found == [("Hello there", "Good day to you")] * 2


@pytest.mark.parametrize(
    ("read", "content", "line", "message"),
    [
        (read_burstgpt, "Time,Model\n1,2\n", 1, "Timestamp, Request tokens, Response tokens, got no Timestamp"),
        (read_burstgpt, "", 1, "expected columns"),
        (read_burstgpt, HEADER + "5,x,1,1,2,y\nsoon,x,1,1,2,y\n", 3, "expected a number of at least 0, got 'soon'"),
        (read_burstgpt, HEADER + "nan,x,1,1,2,y\n", 2, "Timestamp: expected"),
        (read_burstgpt, HEADER + "5,x,many,1,2,y\n", 2, "Request tokens: expected a number of tokens, got 'many'"),
        (read_burstgpt, HEADER + "5,x,1,-1,2,y\n", 2, "Response tokens: expected"),
        (read_burstgpt, HEADER + f"5,x,1{'0' * 5000},1,2,y\n", 2, "Request tokens: expected at most 4194304 tokens"),
        (read_burstgpt, HEADER + "5,x,1\n", 2, "expected 6 fields, got 3"),
        (read_burstgpt, HEADER + "5,x,1,1,2,y\n4,x,1,1,2,y\n", 3, "expected times in order, got 4 after 5"),
        (read_burstgpt, HEADER.encode() + b"5,x,1,1,2,y\n5,\xff,1,1,2,y\n", 3, "trace, line 3: expected UTF-8"),
        (read_mooncake, ONE.encode() + b'{"\xff": 0}\n', 2, "trace, line 2: "),
        (
            read_sharegpt,
            '[{"conversations": []},\n{"conversations": [{"from": "human", "value": "\\ud800"}, {"from": "gpt", "value": "x"}]}]',  # noqa: E501
            2,
            "trace, line 2: ",
        ),
        (read_mooncake, ONE + "nonsense\n", 2, "malformed"),
        (read_mooncake, '{"timestamp": 0, "input_length": "1", "output_length": 1}', 1, "Expected `int`, got `str`"),
        (read_mooncake, '{"timestamp": 0, "input_length": 0, "output_length": 1}', 1, "Expected `int` >= 1"),
        (read_mooncake, '{"timestamp": 0, "input_length": 1000000000000, "output_length": 1}', 1, "<= 4194304"),
        (read_mooncake, '{"timestamp": 0, "output_length": 1}', 1, "missing required field `input_length`"),
        (read_mooncake, MOONCAKE + ONE, 5, "expected times in order"),
        (read_sharegpt, '[{"conversations": []},\n {"talk": []}]', 2, "missing required field `conversations`"),
        (read_sharegpt, '[{"conversations": [{"from": "human", "value": 3}]}]', 1, "Expected `str`, got `int`"),
        (read_sharegpt, '[{"conversations": []},\n\n{"conversations": ]}]', 2, "expected JSON: Expecting value"),
        (read_sharegpt, '[{"conversations": []}', 1, "the array has no end"),
        (read_sharegpt, '[{"conversations": []}\n{"conversations": []}]', 1, "expected ',' or ']', got '{'"),
        (read_sharegpt, '[{"conversations": []},\n3]', 2, "Expected `object`, got `int`"),
        (read_sharegpt, '[{"conversations": [', 1, "expected JSON: "),
        (read_sharegpt, "[] []", 1, "expected nothing after the array"),
        (read_sharegpt, '{"conversations": []}\n"x"', 2, "Expected `object`, got `str`"),
        (read_sharegpt, b'[{"conversations": []},\n\xff]', 1, "trace, line 1: expected UTF-8"),
        (read_sharegpt, DEEP, 1, "expected JSON of moderate depth"),
        (read_sharegpt, '[{"conversations": []},\n{"x": ' + DEEP + "}]", 2, "line 2: expected JSON of moderate depth"),
        (read_mooncake, MOONCAKE + '{"x": ' + "[" * 100_000, 5, "trace, line 5: expected JSON, got too many brackets"),
        (read_mooncake, '{"timestamp": 1e999, "input_length": 1, "output_length": 1}', 1, "Number out of range"),
    ],
)
def test_a_malformed_line_is_named(
    tmp_path: Path, read: Callable[[Path], Iterator[object]], content: str | bytes, line: int, message: str
) -> None:
    with pytest.raises(MalformedRow) as caught:
        list(read(write(tmp_path, content)))
    assert caught.value.line == line
    assert message in str(caught.value)


@pytest.mark.parametrize("read", [read_burstgpt, read_mooncake, read_sharegpt, format_of, load_trace])
def test_a_file_that_is_not_there_is_refused(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    with pytest.raises(InvalidRequest, match="cannot read the trace") as caught:
        list(read(tmp_path / "nothing"))
    assert str(tmp_path) not in str(caught.value)


def test_an_object_without_an_end_takes_bounded_memory(tmp_path: Path) -> None:
    path = write(tmp_path, '[{"conversations": "' + "x" * (1 << 24))
    with pytest.raises(MalformedRow, match="expected at most 1048576 bytes a row"):
        list(read_sharegpt(path, most=1 << 20))


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (BURSTGPT, TraceFormat.BURSTGPT),
        (MOONCAKE, TraceFormat.MOONCAKE),
        (json.dumps([TALK], indent=1), TraceFormat.SHAREGPT),
        (json.dumps(TALK), TraceFormat.SHAREGPT),
        ('{"type":"workload","version":1,"scenario":{}}', TraceFormat.COSERVE),
    ],
)
def test_formats_are_told_apart(tmp_path: Path, content: str, found: TraceFormat) -> None:
    assert format_of(write(tmp_path, content)) is found
    assert format_of(write(tmp_path, codecs.BOM_UTF8 + content.encode())) is found


@pytest.mark.parametrize(
    ("read", "content"), [(read_burstgpt, BURSTGPT), (read_mooncake, MOONCAKE), (read_sharegpt, json.dumps([TALK]))]
)
def test_a_byte_order_mark_is_no_part_of_the_file(
    tmp_path: Path, read: Callable[[Path], Iterator[object]], content: str
) -> None:
    marked = list(read(write(tmp_path, codecs.BOM_UTF8 + content.encode())))
    assert marked == list(read(write(tmp_path, content))) != []


def test_a_long_file_of_one_line_is_told_by_its_beginning(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps([TALK] * 200))
    assert format_of(path) is TraceFormat.SHAREGPT and len(list(read_sharegpt(path))) == 200
    with pytest.raises(MalformedRow, match="expected at most 1000 bytes, got more"):
        list(read_lines(path, 1000))


def test_a_file_of_no_known_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MalformedRow, match="expected a trace of coserve, BurstGPT, Mooncake or ShareGPT, got 'hello'"):
        format_of(write(tmp_path, "hello\n"))


# ---- workloads of recordings


def test_a_mooncake_workload_shares_its_blocks(tmp_path: Path) -> None:
    trace = open_workload({"trace": str(write(tmp_path, MOONCAKE)), "finetune_rows": 0, "adapters": 2, "lead": 1.0})
    first, second, third = trace.prompts
    assert [prompt.at for prompt in trace.prompts] == pytest.approx([1.0, 1.5, 28.482])
    assert [(len(prompt.prompt), prompt.max_tokens) for prompt in trace.prompts] == [(700, 5), (600, 6), (20, 7)]
    assert first.prompt[:512] == second.prompt[:512] and first.prompt[512:600] != second.prompt[512:600]
    assert third.prompt != first.prompt[:20]
    assert trace.scenario.trace == "trace", "without its folder"


def bursts(tmp_path: Path, rows: int) -> Path:
    lines = [f"{i // 4},ChatGPT,{10 + i % 7},{3 + i % 5},20,API log" for i in range(rows)]
    return write(tmp_path, HEADER + "\n".join(lines))


@pytest.mark.parametrize("rate", [0.5, 1.0, 4.0, 10.0])
def test_a_recording_at_another_rate_keeps_its_times(tmp_path: Path, rate: float) -> None:
    given = {"trace": str(bursts(tmp_path, 400)), "trace_start": 10.0, "duration": 50.0, "finetune_rows": 0}
    trace = open_workload(given | {"trace_rate": rate})
    times = Counter(prompt.at for prompt in trace.prompts)
    assert sum(times.values()) == round(rate * 50) and set(times) <= set(range(50))
    if rate >= 4.0:
        assert set(times) == set(range(50)) and set(times.values()) <= {4, 8, 9, 10, 11, 12}
    fast = open_workload(given | {"trace_speed": 2.0})
    assert [prompt.at for prompt in fast.prompts][:5] == [0.0, 0.0, 0.0, 0.0, 0.5] and len(fast.prompts) == 360


def test_the_rate_of_a_recording_is_of_the_time_that_it_lasts(tmp_path: Path) -> None:
    given = {"trace": str(bursts(tmp_path, 80)), "trace_start": 4.0, "finetune_rows": 0}
    for duration, requests in ((190.0, 30), (10.0, 20)):
        assert len(open_workload(given | {"trace_rate": 2.0, "duration": duration}).prompts) == requests


def test_flexllms_recipe_is_burstgpts_arrivals_with_sharegpts_prompts(tmp_path: Path) -> None:
    talks = write(tmp_path, json.dumps([MONOLOGUE, TALK]), "talks.json")
    given = {
        "preset": "flexllm-8b",
        "trace": str(bursts(tmp_path, 80)),
        "trace_model": "ChatGPT",
        "prompts": str(talks),
    }
    trace = open_workload(given | {"trace_rate": 1.0, "duration": 10.0})
    assert [prompt.prompt for prompt in trace.prompts] == ["Hello there"] * 10
    assert trace.prompts[0].max_tokens > 2 and trace.prompts[0].at >= trace.scenario.lead == 30
    assert (trace.scenario.slo_ttft, trace.scenario.slo_tpot) == (5.0, 0.045)
    assert len(trace.finetunes) == 16


def test_sharegpt_alone_comes_by_the_scenarios_process(tmp_path: Path) -> None:
    talks = str(write(tmp_path, json.dumps([TALK]), "talks.json"))
    trace = open_workload({"trace": talks, "rate": 2.0, "duration": 2.0, "finetune_rows": 0})
    assert [(prompt.at, prompt.prompt) for prompt in trace.prompts] == [(i / 2, "Hello there") for i in range(4)]
    with pytest.raises(MalformedRow, match="expected a conversation"):
        list(open_workload({"trace": talks, "max_total_tokens": 1}).arrivals)
    with pytest.raises(InvalidRequest, match="expected arrivals"):
        open_workload({"trace": talks, "prompts": talks})


def test_a_saved_workload_is_its_own_and_takes_other_limits_alone(tmp_path: Path) -> None:
    made = open_workload({"duration": 1.0, "finetune_rows": 3})
    save_trace(made, tmp_path / "t.jsonl")
    again = open_workload({"trace": str(tmp_path / "t.jsonl"), "slo_ttft": 0.5})
    assert [*again.arrivals] == [*made.arrivals] and again.scenario.slo_ttft == 0.5
    with pytest.raises(InvalidRequest, match="expected no rate"):
        open_workload({"trace": str(tmp_path / "t.jsonl"), "rate": 3.0})


def test_long_recordings_are_made_saved_and_read_in_constant_memory(tmp_path: Path) -> None:
    """Ten times the file takes no more memory: less than a third of the long one's size, which other tests of the
    process leave room for."""
    peaks = [peak(tmp_path, rows) for rows in (400, 4_000)]
    assert peaks[1] < peaks[0] + 300_000, peaks
    assert peaks[1] < (tmp_path / "t.jsonl").stat().st_size / 3


def peak(tmp_path: Path, rows: int) -> int:
    """Most bytes that were allocated at a time."""
    path = bursts(tmp_path, rows)
    tracemalloc.start()
    trace: Trace = open_workload(
        {"trace": str(path), "trace_rate": 3.0, "duration": float(rows // 5), "finetune_rows": 0}
    )
    save_trace(trace, tmp_path / "t.jsonl")
    totals = count(load_trace(tmp_path / "t.jsonl"))
    found = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert totals.prompts == 3 * (rows // 5)
    return found


def write(folder: Path, content: str | bytes, name: str = "trace") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path
