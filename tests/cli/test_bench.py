"""A benchmark leaves nothing behind, however it ends, in this process and in one of its own, and says how far it is."""

from __future__ import annotations

import asyncio
import resource
import signal
import sys
import threading
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from coserve.cli.app import run as command_line
from coserve.cli.bench import run as bench_run
from coserve.cli.bench.progress import BenchProgress
from coserve.cli.bench.run import Route, Server, ServerKind, run_bench
from coserve.core.errors import MalformedRow
from coserve.workloads.bundled import bundled_prompts
from coserve.workloads.replay import JobUpdate, ReplayResult, Rest
from coserve.workloads.report import files
from coserve.workloads.report.files import Report
from coserve.workloads.scenario import Scenario
from coserve.workloads.synthesis import make_trace
from coserve.workloads.trace import Trace, load_trace, save_trace
from tests.support.api_server import Api
from tests.support.examples import in_turns
from tests.support.fake_openai import BASE, FakeOpenAI, serve_openai
from tests.support.real_server import serve_real

ROWS = [{"text": "one two three four"}]


def trace(rank: int, *, duration: float = 1.0) -> Trace:
    scenario = Scenario(
        duration=duration,
        rate=4,
        finetune_period=1,
        finetune_rows=4,
        adapters=2,
        rank=(rank,),
        min_tokens=2,
        max_tokens=3,
        steps=2,
        batch_tokens=16,
    )
    return make_trace(scenario, bundled_prompts(), ROWS)


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with serve_real(tmp_path) as server:
        yield server


async def run(api: Api, made: Trace, rest: Rest = Rest.DRAIN) -> ReplayResult:
    return await run_bench(made, rest, Server(url=api.url))


async def nothing_is_left(api: Api) -> None:
    _, adapters = await api.call("GET", "/adapters")
    _, jobs = await api.call("GET", "/finetune")
    assert adapters["data"] == []
    assert jobs["data"] == []


@pytest.mark.slow
async def test_runs_of_different_ranks_one_after_the_other_beside_an_adapter_of_that_name(
    api: Api, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"adapter": "load-00", "data": ROWS, "lora": {"r": 2}, "training": {"steps": 1}}
    _, job = await api.call("POST", "/finetune", json=body)
    await api.job_until(job["id"], "succeeded")
    for rank in (4, 8):
        result = await run(api, trace(rank))
        assert all(sample.error is None for sample in result.samples) and result.samples
        assert any(job.trained for job in result.jobs)
    _, adapters = await api.call("GET", "/adapters")
    assert [adapter["ref"] for adapter in adapters["data"]] == ["load-00@1"]
    said = capsys.readouterr().err
    assert "requests:" in said and "fine-tuned" in said and "\x1b" not in said


async def test_adapters_are_named_if_the_clean_up_is_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    class Stuck:
        made = ("bench-a", "bench-b")

        async def clean_up(self) -> list[str]:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await bench_run.clean_up(Stuck())  # type: ignore[arg-type]
    assert "could not delete bench-a, bench-b: " in capsys.readouterr().err


async def test_a_failure_cleans_up(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: BenchProgress, sample: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(BenchProgress, "observe", fail)
    with pytest.raises(ExceptionGroup):
        await run(api, trace(4))
    await nothing_is_left(api)


def test_the_line_says_what_was_sent_and_what_is_left() -> None:
    now = [100.0]
    progress = BenchProgress(trace(4, duration=10.0).scenario, 40, lambda: now[0])
    assert "making the adapters" in progress.line()
    progress.begin()
    progress.sent, progress.answered, progress.tokens = 3, 2, 4321
    now[0] = 104.0
    assert progress.line() == "requests: 3 of 40 sent, 2 answered; fine-tuned 4,321 tokens; 6 s left"
    now[0], progress.failed = 111.0, 1
    assert "1 failed" in progress.line() and "waiting for the last" in progress.line()
    for i in range(4):  # jobs that train side by side
        now[0] = 112.0 + i / 1000
        progress.moved(JobUpdate(tokens=100))
    now[0] = 114.0
    assert "fine-tuned 4,721 tokens, lately 150/s" in progress.line()


# ---- the same trace for any server

OPTIONS = "--duration 0.3 --rate 10 --adapters 2 --max-tokens 4 --temperature 0 --metrics-interval 0.1"


@pytest.fixture
def peer() -> Iterator[FakeOpenAI]:
    """An OpenAI-style server on an event loop of its own."""
    ready, done = threading.Event(), asyncio.Event()
    server, loop = FakeOpenAI((BASE, "load-00", "load-01")), asyncio.new_event_loop()

    async def main() -> None:
        async with serve_openai(server):
            ready.set()
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    assert ready.wait(30)
    yield server
    loop.call_soon_threadsafe(done.set)
    thread.join()
    loop.close()


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without a plot, which takes most of a short run's time; `test_workload_report` draws them."""
    monkeypatch.setattr(files, "plot_png", lambda *_: b"")


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("condition", "status"), [("slo>=0.99", 0), ("slo>=0.99 and more", 2), ("output_tok_s>=1e6", 1)]
)
def test_the_exit_status_is_that_of_the_conditions(
    peer: FakeOpenAI, tmp_path: Path, condition: str, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = f"bench --server openai --url {peer.url} --report {tmp_path} {OPTIONS} --slo-ttft 30"
    assert command_line([*arguments.split(), "--fail-under", condition]) == status
    said = capfd.readouterr()
    if "more" in condition:
        assert "expected a condition like slo>=0.99" in said.err and not peer.bodies
        return
    assert f"{condition}: " in said.err and ("NOT met" in said.err) == bool(status)
    assert "fine-tuning jobs of the workload are not sent" in said.err
    report = msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=Report)
    assert report.server == "openai" and report.summary.completed == report.summary.requests == 3 == len(peer.bodies)
    assert report.summary.queue is not None and report.summary.queue.waiting_most == 3.0
    assert (tmp_path / "report.html").exists() and "saved:" in said.out


async def test_one_trace_file_for_coserve_and_another_server(api: Api, tmp_path: Path) -> None:
    """On the real engine of the bundled base: the same prompts, arrivals, lengths and adapters, the same count of
    tokens."""
    path = tmp_path / "trace.jsonl"
    save_trace(trace(4), path)
    server = FakeOpenAI((BASE, "load-00", "load-01"))
    url = api.url
    ours = await run_bench(
        load_trace(path), Rest.DRAIN, Server(url=url, route=Route.COMPLETIONS, prefix="", metrics_interval=0.2)
    )
    async with serve_openai(server):
        theirs = await run_bench(load_trace(path), Rest.DRAIN, Server(url=server.url, kind=ServerKind.OPENAI))
    assert len(ours.samples) == len(theirs.samples) == 4 == len(server.bodies)
    for mine, other in zip(ours.samples, theirs.samples, strict=True):
        assert mine.error is other.error is None
        assert (mine.index, mine.adapter, mine.due, mine.tokens) == (
            other.index,
            other.adapter,
            other.due,
            other.tokens,
        )
    assert all(job.trained for job in ours.jobs) and ours.jobs and not theirs.jobs
    assert ours.snapshots and all(snapshot.running is not None for snapshot in ours.snapshots)
    await nothing_is_left(api)


async def test_a_damaged_trace_is_refused_before_anything_is_sent(api: Api, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    save_trace(trace(4), path)
    path.write_bytes(path.read_bytes() + b"{}\n")
    with pytest.raises(MalformedRow, match=r"line \d+:"):
        await run_bench(load_trace(path), Rest.DRAIN, Server(url=api.url))
    await nothing_is_left(api)


@pytest.mark.usefixtures("undrawn")
def test_the_key_of_coserve_is_not_sent_elsewhere(
    peer: FakeOpenAI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COSERVE_API_KEY", "secret-of-sixteen")
    arguments = f"bench --server openai --url {peer.url} --report {tmp_path} {OPTIONS} --finetune off".split()
    assert command_line(arguments) == 0
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    assert command_line(arguments) == 0
    assert command_line([*arguments, "--key", "given"]) == 0
    assert peer.keys[::3] == [None, "Bearer theirs", "Bearer given"]


def test_a_run_that_neither_sends_nor_saves_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["bench", "--no-run"]) == 2
    assert "--no-run needs --save" in capsys.readouterr().err


# ---- runs that measured nothing, and options that do nothing

BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,8,4,12,API\n"


def bench(peer: FakeOpenAI, folder: Path, *more: str, options: str = OPTIONS) -> int:
    arguments = f"bench --server openai --url {peer.url} --report {folder} {options}".split()
    return command_line([*arguments, *more])


@pytest.mark.usefixtures("undrawn")
def test_a_condition_on_what_was_not_measured_is_not_met(
    peer: FakeOpenAI, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert bench(peer, tmp_path, "--fail-under", "slo>=0.5", "--fail-under", "errors<=0") == 1
    said = capfd.readouterr()
    assert "slo>=0.5: not measured without a limit such as --slo-ttft, NOT met" in said.err
    assert "errors<=0: 0, met" in said.err and "Goodput" not in said.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--trace FILE --trace-model GPT-9",
            "one request in the trace, got none with --trace-model GPT-9, --duration 60",
        ),
        ("--trace FILE --trace-start 10", "--duration 60; the first one is at 5.0 s: --trace-start 5.0 skips to it"),
        ("--trace FILE --duration 2", "none with --duration 2; the first one is at 5.0 s: --trace-start 5.0 skips"),
        ("--process poisson --rate 1e-9", "rate: expected at least one request, got none in 60 s at 1e-09 a second"),
    ],
)
@pytest.mark.parametrize("save", [False, True])
def test_a_workload_without_requests_is_refused(
    tmp_path: Path, options: str, message: str, save: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "burst.csv").write_text(BURSTGPT)
    saving = f" --no-run --save {tmp_path / 'saved.jsonl'}" if save else f" --report {tmp_path / 'report'}"
    arguments = f"bench {options.replace('FILE', str(tmp_path / 'burst.csv'))}{saving}"
    assert command_line(arguments.split()) == 2
    said = capsys.readouterr()
    assert message in said.err and len(said.err.splitlines()) == 1
    assert not (tmp_path / "saved.jsonl").exists()


def test_a_trace_of_ours_without_requests_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    save_trace(Trace(Scenario(), ()), path)
    assert command_line(["bench", "--trace", str(path), "--fail-under", "errors<=0"]) == 2
    assert "expected at least one request in the trace, got none (" in capsys.readouterr().err


@pytest.mark.usefixtures("undrawn")
def test_a_run_without_an_answer_fails_and_says_why(
    peer: FakeOpenAI, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    peer.status = 400
    assert bench(peer, tmp_path) == 1
    said = capfd.readouterr()
    assert "coserve: no request was answered: invalid_request 3" in said.err
    assert "failed: invalid_request 3: status 400: no" in said.out
    report = msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=Report)
    assert report.summary.error_messages == {"invalid_request": "status 400: no"}
    assert {sample.message for sample in report.run.samples} == {"status 400: no"}
    assert "status 400: no" in (tmp_path / "report.html").read_text()


@pytest.mark.usefixtures("undrawn")
def test_both_classes_are_shown(peer: FakeOpenAI, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    given = "--batch-share 0.5 --slo-ttft 30 --slo-batch-tpot 40 --rate 40"
    conditions = ("--fail-under", "slo_interactive>=0.99", "--fail-under", "slo_batch>=0.9")
    assert bench(peer, tmp_path, *given.split(), *conditions) == 0
    said = capfd.readouterr()
    for shown in ("interactive (TTFT <= 30.0 s)", "batch (TPOT <= 40.0 s)", "Classes"):
        assert shown in said.out
    assert "slo_batch>=0.9: 1, met" in said.err
    assert "batch (TPOT &lt;= 40.0 s)" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--cv 4 --exponent 2", "--cv has no effect: it needs --process gamma; --exponent has no effect"),
        ("--route completions --server openai", "--route completions has no effect with --server openai"),
        ("--rest drain --server openai", "--rest drain has no effect"),
        ("--model base", "--model has no effect"),
        ("--no-run --save FILE --fail-under slo>=1", "--fail-under has no effect with --no-run"),
    ],
)
def test_an_option_without_effect_is_refused(
    tmp_path: Path, options: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "saved.jsonl"
    assert command_line(["bench", *options.replace("FILE", str(path)).split()]) == 2
    said = capsys.readouterr().err
    assert message in said and len(said.splitlines()) == 1 and not path.exists()


def test_a_setting_without_effect_in_a_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, saved = tmp_path / "my.toml", tmp_path / "saved.jsonl"
    file.write_text("cv = 3\nrate = 5\n")
    assert command_line(["bench", "--workload", str(file), "--no-run", "--save", str(saved)]) == 0
    said = capsys.readouterr()
    assert said.err == f"{file}: cv has no effect: it needs --process gamma\n"
    assert said.out == f"saved: {saved}\n"
    assert command_line(f"bench --workload {file} --process gamma --no-run --save {saved}".split()) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("end", ["/v1", "/v1/", "/"])
def test_the_base_url_of_openais_clients(peer: FakeOpenAI, tmp_path: Path, end: str) -> None:
    peer.url += end
    assert bench(peer, tmp_path) == 0 and len(peer.bodies) == 3
    report = msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=Report)
    assert report.summary.queue is not None, "/metrics is not below /v1"


def test_a_server_of_another_kind_is_no_missing_adapter(
    peer: FakeOpenAI, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    peer.url += "/elsewhere"
    assert bench(peer, tmp_path) == 1
    assert f"no OpenAI-style server answers at {peer.url}: status 404" in capfd.readouterr().err


async def test_rows_that_are_cut_are_one_plain_line(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = Scenario(
        duration=1.0,
        rate=4,
        finetune_period=0.5,
        finetune_rows=4,
        adapters=1,
        rank=(2,),
        max_tokens=2,
        row_tokens=2,
        steps=1,
    )
    made = make_trace(scenario, bundled_prompts(), ROWS)
    assert len((await run(api, made)).jobs) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "too long" in line]
    assert len(lines) == 1 and lines[0].startswith("fine-tuning: ")
    assert "UserWarning" not in lines[0] and ".py" not in lines[0]


LONG = "--duration 600 --rate 2 --adapters 2 --rank 4 --max-tokens 8 --finetune-rows 8 --steps 1000"


@pytest.mark.parametrize("ending", in_turns([signal.SIGTERM, signal.SIGINT], [signal.SIGTERM]))
@pytest.mark.slow
async def test_a_run_that_is_ended_cleans_up_and_reports_what_it_has(tmp_path: Path, ending: signal.Signals) -> None:
    async with serve_real(tmp_path / "data") as api:
        url = api.url
        command = f"-m coserve bench --url {url} --report {tmp_path / 'report'} {LONG}".split()
        bench = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=DEVNULL, stderr=PIPE)
        while True:
            _, adapters = await api.call("GET", "/adapters")
            _, jobs = await api.call("GET", "/finetune")
            answered = "coserve_requests_total{" in await (await api.http.get("/metrics")).text()
            if len(adapters["data"]) == 2 and answered and any(job["version"] > 1 for job in jobs["data"]):
                break
            await asyncio.sleep(0.05)
        bench.send_signal(ending)
        _, said = await bench.communicate()
        *_, cleaned, told = said.decode().splitlines()
        assert bench.returncode == 130, said.decode()
        assert cleaned == "deleting the adapters and jobs of this run"
        assert told == "interrupted; the report is of what was answered until then"
        report = msgspec.json.decode((tmp_path / "report" / "report.json").read_bytes())
        assert report["summary"]["completed"] > 0 and report["run"]["interrupted"]
        _, adapters = await api.call("GET", "/adapters")
        _, jobs = await api.call("GET", "/finetune")
        assert adapters["data"] == []
        assert jobs["data"] == []


@pytest.mark.slow
async def test_a_run_that_may_open_few_files_says_so_and_cleans_up(tmp_path: Path) -> None:
    """The connections of its requests leave room for those of its clean-up."""
    options = "--route completions --duration 0.5 --rate 400 --adapters 2 --rank 2 --max-tokens 8 --finetune off"
    async with serve_real(tmp_path / "data") as api:
        url = api.url
        command = f"-m coserve bench --url {url} --report {tmp_path / 'report'} {options}".split()
        bench = await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            stdout=DEVNULL,
            stderr=PIPE,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
        )
        _, said = await bench.communicate()
        assert "this process may open 64 files (ulimit -Hn)" in said.decode()
        assert "could not be deleted" not in said.decode()
        _, adapters = await api.call("GET", "/adapters")
        assert adapters["data"] == []
