"""Scenarios become traces; traces survive a file, and no file is lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coserve.cli.app import run as command_line
from coserve.core.errors import EmptyCorpus, InvalidRequest, MalformedRow
from coserve.data.corpus.rows import parse_row
from coserve.workloads.arrivals import Pattern, Process
from coserve.workloads.bundled import bundled_prompts, bundled_rows
from coserve.workloads.distributions import Lengths, Shape
from coserve.workloads.openai_target import OpenAITarget
from coserve.workloads.opening import open_workload
from coserve.workloads.scenario import Finetuning, Scenario
from coserve.workloads.synthesis import make_trace
from coserve.workloads.trace import Arrival, Repeatable, Trace, count, load_trace, save_trace

PROMPTS = ["one", "two", "three"]
ROWS = [{"text": "a row"}, {"prompt": "p", "completion": " c"}]
SCENARIOS = st.builds(
    Scenario,
    seed=st.integers(0, 2**32),
    duration=st.floats(0.1, 12),
    lead=st.sampled_from((0.0, 2.5)),
    process=st.sampled_from(Process),
    rate=st.floats(0.1, 8),
    pattern=st.sampled_from(Pattern),
    per_adapter=st.booleans(),
    prompt_lengths=st.sampled_from(Lengths),
    max_prompt_tokens=st.integers(1, 20),
    vocab=st.integers(257, 300),
    finetune_period=st.floats(1, 10),
    finetune_rows=st.integers(0, 20),
    adapters=st.integers(0, 5),
    finetune=st.sampled_from(Finetuning),
    popularity=st.sampled_from(Shape),
    min_tokens=st.just(3),
    max_tokens=st.integers(3, 9),
)


@given(SCENARIOS)
def test_a_trace_is_what_the_scenario_says(scenario: Scenario) -> None:
    trace = make_trace(scenario, PROMPTS, ROWS)
    assert [*trace.arrivals] == [*trace.arrivals] == [*make_trace(scenario, PROMPTS, ROWS).arrivals]
    times = [arrival.at for arrival in trace.arrivals]
    assert times == sorted(times)
    begin, end = scenario.window
    assert all(begin <= prompt.at < end for prompt in trace.prompts) and all(
        0 <= job.at < end for job in trace.finetunes
    )
    assert [prompt.index for prompt in trace.prompts] == list(range(len(trace.prompts)))
    assert [job.index for job in trace.finetunes] == list(range(len(trace.finetunes)))
    names = set(scenario.adapter_names)
    assert all(prompt.adapter in (names or {None}) for prompt in trace.prompts)
    for prompt in trace.prompts:
        if scenario.prompt_lengths is Lengths.TEXTS:
            assert prompt.prompt in PROMPTS
        else:
            assert 1 <= len(prompt.prompt) <= scenario.max_prompt_tokens
            assert all(256 <= id < scenario.vocab for id in prompt.prompt)
    assert all(3 <= prompt.max_tokens <= scenario.max_tokens for prompt in trace.prompts)
    assert {job.adapter for job in trace.finetunes} <= names
    if not (scenario.adapters and scenario.finetune_rows) or scenario.finetune is Finetuning.OFF:
        assert not trace.finetunes
    assert (count(trace).prompts, count(trace).jobs) == (len(trace.prompts), len(trace.finetunes))


@given(SCENARIOS)
def test_a_burst_has_at_most_the_rows_and_one_job_an_adapter(scenario: Scenario) -> None:
    bursts: dict[float, list[str]] = {}
    rows: dict[float, int] = {}
    for job in make_trace(replace(scenario, finetune=Finetuning.BURSTS), PROMPTS, ROWS).finetunes:
        bursts.setdefault(job.at, []).append(job.adapter)
        rows[job.at] = rows.get(job.at, 0) + len(job.rows)
        assert job.at / scenario.finetune_period == pytest.approx(round(job.at / scenario.finetune_period))
        assert all(row in ROWS for row in job.rows)
    assert all(len(set(adapters)) == len(adapters) for adapters in bursts.values())
    assert all(1 <= count <= scenario.finetune_rows for count in rows.values())


@given(SCENARIOS)
def test_fine_tuning_does_not_change_the_prompts(scenario: Scenario) -> None:
    quiet = replace(scenario, finetune_rows=0)
    assert make_trace(quiet, PROMPTS, []).prompts == make_trace(scenario, PROMPTS, ROWS).prompts


def test_the_defaults_are_those_of_the_paper() -> None:
    trace = make_trace(Scenario(), bundled_prompts(), bundled_rows())
    assert trace.prompts[7].at == pytest.approx(0.7)
    assert sorted({job.at for job in trace.finetunes}) == [0.0, 20.0, 40.0]
    assert len({prompt.adapter for prompt in trace.prompts}) == 32
    assert (Scenario().rank, Scenario().finetune_rows) == ((32,), 512)


def test_the_bundled_rows_parse() -> None:
    assert len(bundled_prompts()) >= 20
    for line, row in enumerate(bundled_rows(), 1):
        parse_row(row, line)


@given(SCENARIOS)
def test_a_trace_survives_a_file(tmp_path_factory: pytest.TempPathFactory, scenario: Scenario) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    trace = make_trace(scenario, PROMPTS, ROWS)
    save_trace(trace, path)
    found = load_trace(path)
    assert found.scenario == scenario and [*found.arrivals] == [*trace.arrivals]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("duration", 0.0), ("duration", float("inf")), ("finetune_period", -1.0), ("finetune_rows", -1)),
        *(("adapters", -1), ("rank", ()), ("rank", (8, 0)), ("min_tokens", 0), ("max_tokens", 0), ("slo_ttft", 0.0)),
        *(("lead", -1.0), ("vocab", 256), ("preset", "ets"), ("output_lengths", Lengths.TEXTS)),
    ],
)
def test_impossible_scenarios_are_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Scenario(**{name: value})
    assert caught.value.field == name


def test_a_trace_needs_something_to_send() -> None:
    with pytest.raises(InvalidRequest, match="at least one prompt"):
        make_trace(Scenario(), [], ROWS)
    with pytest.raises(EmptyCorpus):
        make_trace(Scenario(), PROMPTS, [])


HEADER = b'{"type":"workload","version":1,"scenario":{}}\n'
PROMPT = b'{"type":"prompt","at":%d,"index":0,"adapter":null,"prompt":"x","max_tokens":1,"seed":0}\n'


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", 1),
        (PROMPT % 0, 1),
        (b'{"type":"workload","version":1,"scenario":{"duraton":3}}\n', 1),
        (b'{"type":"workload","version":1,"scenario":{"duration":-3}}\n', 1),
        (b'{"type":"workload","version":1,"scenario":{"rate":"3"}}\n', 1),
        (HEADER + b"nonsense\n", 2),
        (HEADER + PROMPT % 1 + b'{"type":"party","at":2}\n', 3),
        (HEADER + PROMPT % 2 + PROMPT % 1, 3),
        (b"\n\n" + HEADER + b"nonsense\n", 4),
        (b"\n" + HEADER.replace(b"{}", b'{"duration":-3}'), 2),
        (b"\n" + HEADER.replace(b"{}", b'{"duraton":3}'), 2),
        (b"\n" + HEADER.replace(b"1", b"2"), 2),
        (HEADER.replace(b"{}", b'{"duration":1e999}'), 1),
        (HEADER.replace(b"{}", b"[" * 100_000), 1),
    ],
)
def test_a_damaged_trace_is_refused_with_its_line(tmp_path: Path, content: bytes, line: int) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    with pytest.raises(MalformedRow) as caught:
        list(load_trace(path).arrivals)
    assert caught.value.line == line


def test_blank_lines_are_no_part_of_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\n \n" + HEADER + b"\n" + SOUND)
    assert [arrival.at for arrival in load_trace(path).arrivals] == [0]


@pytest.mark.parametrize("index", [0, 3])
def test_indices_count_up_among_prompts_and_among_jobs(tmp_path: Path, index: int) -> None:
    def at(line: bytes, number: int) -> bytes:
        return line.replace(b'"index":0', b'"index":%d' % number)

    path = tmp_path / "trace.jsonl"
    path.write_bytes(HEADER + at(SOUND, 3) + at(JOB, 3) + at(SOUND, 7) + at(JOB, 4))
    assert [arrival.index for arrival in load_trace(path).arrivals] == [3, 3, 7, 4]
    for line in (SOUND, JOB):
        path.write_bytes(HEADER + at(SOUND, 3) + at(JOB, 3) + at(line, index))
        with pytest.raises(MalformedRow) as caught:
            list(load_trace(path).arrivals)
        assert str(caught.value) == f"trace.jsonl, line 4: index: expected more than 3, got {index}"


JOB = b'{"type":"finetune","at":0,"index":0,"adapter":"a","rows":[{"text":"x"}]}\n'
SOUND = PROMPT % 0


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (b'"max_tokens":1', b'"max_tokens":0', "max_tokens: expected an integer >= 1, got 0"),
        (b'"max_tokens":1', b'"max_tokens":-5', "max_tokens: expected an integer >= 1"),
        (b'"max_tokens":1', b'"max_tokens":1000000000', "max_tokens: expected an integer <= 4194304"),
        (b'"seed":0', b'"seed":-1', "seed: expected an integer >= 0"),
        (b'"seed":0', b'"seed":4611686018427387904', "seed: expected an integer <= "),
        (b'"prompt":"x"', b'"prompt":""', "prompt: expected a string of length >= 1"),
        (b'"prompt":"x"', b'"prompt":[]', "prompt: expected an array of length >= 1"),
        (b'"prompt":"x"', b'"prompt":[3,-1]', "prompt[1]: expected an integer >= 0"),
        (b'"prompt":"x"', b'"prompt":[2147483648]', "prompt[0]: expected an integer <= 2147483647"),
        (b'"prompt":"x"', b'"prompt":"\xff"', "can't decode"),
        (b'"adapter":null', b'"adapter":"../x"', "adapter: expected a name"),
        (b'"adapter":null', b'"adapter":""', "adapter: expected a name"),
        (b'"at":0', b'"at":-1', "at: expected a number >= 0"),
        (b'"at":0', b'"at":1e300', "at: expected a number <= "),
        (b'"at":0', b'"at":1e999', "at: number out of range"),
        (b'"prompt":"x"', b'"prompt":' + b"[" * 100_000, "prompt[0]: expected "),
        (b'[{"text":"x"}]', b"[]", "rows: expected an array of length >= 1"),
        (b'"adapter":"a"', '"adapter":"\u00fc"'.encode(), "adapter: expected a name"),
        (b'"adapter":"a"', b'"adapter":"a@2"', "adapter: expected a name"),
        (b'"text":"x"', b'"text":' + b"[" * 100_000, "expected JSON, got too many brackets inside each other"),
    ],
)
def test_what_no_server_can_take_is_refused(tmp_path: Path, before: bytes, after: bytes, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(HEADER + SOUND + JOB)
    assert len(list(load_trace(path).arrivals)) == 2
    line = SOUND if before in SOUND else JOB
    path.write_bytes(HEADER + SOUND + line.replace(before, after))
    with pytest.raises(MalformedRow) as caught:
        list(load_trace(path).arrivals)
    said = str(caught.value)
    assert said.startswith("trace.jsonl, line 3: ") and message in said
    assert str(tmp_path) not in said


@pytest.mark.parametrize("version", [b"2", b"0", b'"1"', b" 2 "])
def test_a_trace_of_another_version_is_refused(tmp_path: Path, version: bytes) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'{"type":"workload","version":%s,"scenario":{"new_setting":1}}\n' % version)
    expected = f"trace.jsonl, line 1: expected a workload of version 1, got version {version.decode().strip()}"
    with pytest.raises(MalformedRow) as caught:
        load_trace(path)
    assert str(caught.value) == expected


# ---- saving


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_save_that_fails_leaves_the_earlier_file(tmp_path: Path, failure: BaseException) -> None:
    def arrivals() -> Iterator[Arrival]:
        yield from make_trace(Scenario(), PROMPTS, ROWS).arrivals
        raise failure

    path = tmp_path / "t.jsonl"
    path.write_text("good")
    with pytest.raises((KeyboardInterrupt, InvalidRequest)):
        save_trace(Trace(Scenario(), Repeatable(arrivals)), path)
    assert path.read_text() == "good" and [*tmp_path.iterdir()] == [path]


def test_a_trace_is_saved_through_a_link_and_into_a_device(tmp_path: Path) -> None:
    trace = Trace(Scenario(), ())
    (tmp_path / "link").symlink_to(tmp_path / "t.jsonl")
    save_trace(trace, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and [*load_trace(tmp_path / "t.jsonl").arrivals] == []
    save_trace(trace, Path("/dev/null"))
    assert Path("/dev/null").is_char_device()


def test_classes_are_drawn_by_their_share_and_change_nothing_else() -> None:
    plain = make_trace(Scenario(rate=20.0), PROMPTS, ROWS)
    mixed = make_trace(Scenario(rate=20.0, batch_share=0.25), PROMPTS, ROWS)
    assert {prompt.slo_class for prompt in plain.prompts} == {None}
    batch = sum(prompt.slo_class == "batch" for prompt in mixed.prompts)
    assert 0.15 < batch / len(mixed.prompts) < 0.35
    assert [msgspec.structs.replace(prompt, slo_class=None) for prompt in mixed.prompts] == [*plain.prompts]


def test_a_class_is_a_service_tier_of_other_servers() -> None:
    target = OpenAITarget("http://x", model="m")
    (first, *_) = make_trace(Scenario(), PROMPTS, ROWS).prompts
    bodies = [target.body(msgspec.structs.replace(first, slo_class=name)) for name in (None, "batch", "interactive")]
    assert [body.get("service_tier") for body in bodies] == [None, "flex", "priority"]


BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,8,4,12,API\n"


def test_a_trace_saved_over_itself_stays(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    save_trace(open_workload({"duration": 1.0}), path)
    before = path.read_text()
    assert command_line(["bench", "--trace", str(path), "--no-run", "--save", str(path)]) == 0
    assert path.read_text() == before
    assert command_line(["bench", "--trace", str(path), "--slo-ttft", "2", "--no-run", "--save", str(path)]) == 0
    assert path.read_text().splitlines()[1:] == before.splitlines()[1:] and '"slo_ttft":2.0' in path.read_text()


def test_a_recording_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "burst.csv"
    path.write_text(BURSTGPT)
    assert command_line(["bench", "--trace", str(path), "--no-run", "--save", str(path)]) == 2
    assert "save: expected another file than the recording of --trace" in capsys.readouterr().err
    assert path.read_text() == BURSTGPT
