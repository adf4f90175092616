"""Every command. The options of `serve` are generated from `config.Config`; nothing here imports torch."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec
import typer
from rich.console import Console

from coserve.client import AsyncClient, Client, GenerateOptions
from coserve.config import Config, load_config
from coserve.errors import CoserveError, StartupError
from coserve.schemas import Adapter, Job
from coserve.workloads.arrivals import Arrivals, Process
from coserve.workloads.metrics import summarise
from coserve.workloads.popularity import Popularity, Shape
from coserve.workloads.replay import Rest, Run, replay
from coserve.workloads.scenario import (
    Scenario,
    Trace,
    bundled_prompts,
    bundled_rows,
    load_trace,
    make_trace,
    save_trace,
)
from coserve.workloads.target import NO_RETRIES, DaemonTarget

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help="Fine-tune and serve many LoRA adapters.")
jobs_app = typer.Typer(no_args_is_help=True, help="List, watch and steer fine-tuning jobs.")
adapters_app = typer.Typer(no_args_is_help=True, help="List, import, download and delete adapters.")
app.add_typer(jobs_app, name="jobs")
app.add_typer(adapters_app, name="adapters")

Url = Annotated[str, typer.Option("--url", envvar="COSERVE_URL", help="where the daemon listens")]
Key = Annotated[str | None, typer.Option("--key", envvar="COSERVE_API_KEY", help="API key")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON, one object a line")]
DEFAULT_URL = "http://127.0.0.1:8000"


def _with_config_options(run: Callable[[dict[str, object]], None]) -> Callable[..., None]:
    """A command with one option per setting; `run` gets the settings that were given."""
    hints = get_type_hints(Config)

    def command(**given: object) -> None:
        settings = {name: value for name, value in given.items() if value is not None}
        for name, value in settings.items():
            if isinstance(value, list):
                settings[name] = tuple(value)
        run({name: value for name, value in settings.items() if value != ()})

    parameters = []
    for f in dataclasses.fields(Config):
        kind = list[str] if hints[f.name] == tuple[str, ...] else hints[f.name]
        note = f.metadata["help"]
        if f.metadata["choices"]:
            note += f" [{'|'.join(f.metadata['choices'])}]"
        if f.default is not None and f.default != ():
            note += f" [default: {f.default}]"
        flag = f"--{f.name.replace('_', '-')}"
        declared = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
        option = typer.Option(None, declared, help=note, show_default=False)
        annotation: Any = kind | None
        parameters.append(
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation)
        )
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__doc__ = run.__doc__
    return command


def _serve(given: dict[str, object]) -> None:
    """Start the daemon. Settings also come from COSERVE_<NAME> and from the TOML file of --config."""
    config = load_config(given)
    from coserve.daemon import serve

    logging.basicConfig(level=logging.INFO, format="%(asctime)s api %(levelname)s %(name)s: %(message)s")
    asyncio.run(serve(config, ready=lambda port: print(f"coserve listens on http://{config.host}:{port}", flush=True)))


app.command("serve")(_with_config_options(_serve))


@app.command("generate")
def generate(
    prompt: Annotated[str, typer.Argument(help="text to continue; '-' reads standard input")],
    adapter: Annotated[str | None, typer.Option(help="NAME or NAME@VERSION; default: the base")] = None,
    chat: Annotated[bool, typer.Option(help="send the prompt as a user's message, through the chat template")] = False,
    max_tokens: Annotated[int, typer.Option(help="most tokens to generate")] = 128,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="the same seed gives the same text")] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Stream one generation to standard output."""
    text = sys.stdin.read() if prompt == "-" else prompt
    options: GenerateOptions = {"max_tokens": max_tokens, "temperature": temperature}
    if seed is not None:
        options["seed"] = seed
    source: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    with Client(url, api_key=key) as client:
        for chunk in client.stream(adapter=adapter, **source, **options):
            print(chunk.text, end="", flush=True)
    print()


@app.command("finetune")
def finetune(
    adapter: Annotated[str, typer.Argument(help="name of the adapter to make, or to add a version to")],
    file: Annotated[Path, typer.Argument(help="JSONL file of rows", exists=True, dir_okay=False)],
    rank: Annotated[int | None, typer.Option(help="rank of a new adapter")] = None,
    continue_from: Annotated[str | None, typer.Option(help="go on from NAME or NAME@VERSION")] = None,
    epochs: Annotated[float | None, typer.Option(help="times through the corpus")] = None,
    steps: Annotated[int | None, typer.Option(help="optimizer steps, instead of epochs")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="peak learning rate")] = None,
    batch_tokens: Annotated[int | None, typer.Option(help="tokens of one optimizer step")] = None,
    detach: Annotated[bool, typer.Option(help="print the job and do not wait for it")] = False,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Upload a corpus, start a job and follow it to its end."""
    given = {"epochs": epochs, "steps": steps, "learning_rate": learning_rate, "batch_tokens": batch_tokens}
    training = {name: value for name, value in given.items() if value is not None}
    lora = None if rank is None else {"r": rank}
    with Client(url, api_key=key) as client:
        job = client.finetune(adapter, file=file, continue_from=continue_from, lora=lora, training=training)
        _show_job(job.info if detach else job.wait(), as_json)


@jobs_app.command("list")
def list_jobs(as_json: AsJson = False, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """The newest jobs."""
    with Client(url, api_key=key) as client:
        for job in client.jobs().data:
            _show_job(job, as_json)


@jobs_app.command("show")
def show_job(id: str, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """All that is known of a job, as JSON."""
    with Client(url, api_key=key) as client:
        _show_job(client.job(id).info, True)


@jobs_app.command("watch")
def watch_job(id: str, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """Follow a job to its end."""
    with Client(url, api_key=key) as client:
        _show_job(client.job(id).wait(), False)


@jobs_app.command("pause")
def pause_job(id: str, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """Stop a job at a checkpoint."""
    with Client(url, api_key=key) as client:
        _show_job(client.job(id).pause(), False)


@jobs_app.command("resume")
def resume_job(id: str, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """Put a paused job back in line."""
    with Client(url, api_key=key) as client:
        _show_job(client.job(id).resume(), False)


@jobs_app.command("cancel")
def cancel_job(id: str, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """End a job without an adapter."""
    with Client(url, api_key=key) as client:
        _show_job(client.job(id).cancel(), False)


def _show_job(job: Job, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(job).decode())
        return
    loss = "" if job.loss is None else f"  loss {job.loss:.3f}"
    error = "" if job.error is None else f"  {job.error.code}: {job.error.message}"
    print(f"{job.id}  {job.adapter}@{job.version}  {job.state}  step {job.step}/{job.total_steps}{loss}{error}")


@adapters_app.command("list")
def list_adapters(as_json: AsJson = False, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """Every adapter, its latest version."""
    with Client(url, api_key=key) as client:
        for adapter in client.adapters().data:
            _show_adapter(adapter, as_json)


@adapters_app.command("show")
def show_adapter(name: str, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """All that is known of an adapter, as JSON."""
    with Client(url, api_key=key) as client:
        _show_adapter(client.adapter(name), True)


@adapters_app.command("import")
def import_adapter(name: str, folder: Path, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """Upload a folder of PEFT files as the next version of NAME."""
    with Client(url, api_key=key) as client:
        _show_adapter(client.import_adapter(name, folder), False)


@adapters_app.command("download")
def download_adapter(name: str, folder: Path, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """Save an adapter's PEFT files into a new folder."""
    with Client(url, api_key=key) as client:
        print(client.download_adapter(name, folder))


@adapters_app.command("delete")
def delete_adapter(name: str, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """Delete every version of an adapter."""
    with Client(url, api_key=key) as client:
        print(f"deleted {name}, versions {', '.join(map(str, client.delete_adapter(name).versions))}")


def _show_adapter(adapter: Adapter, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(adapter).decode())
        return
    print(f"{adapter.ref}  rank {adapter.rank}  {adapter.bytes / 2**20:.1f} MiB  {adapter.source}")


@app.command("bench")
def bench(
    duration: Annotated[float, typer.Option(help="seconds in which requests arrive")] = 60.0,
    rate: Annotated[float, typer.Option(help="requests a second")] = 10.0,
    process: Annotated[Process, typer.Option(help="how requests arrive")] = Process.CONSTANT,
    finetune_period: Annotated[float, typer.Option(help="seconds between bursts of fine-tuning rows")] = 20.0,
    finetune_rows: Annotated[int, typer.Option(help="most rows of a burst; 0: no fine-tuning")] = 512,
    adapters: Annotated[int, typer.Option(help="adapters that requests and rows are spread over")] = 32,
    rank: Annotated[int, typer.Option(help="rank of the adapters")] = 32,
    popularity: Annotated[Shape, typer.Option(help="how often each adapter is asked for")] = Shape.UNIFORM,
    max_tokens: Annotated[int, typer.Option(help="most new tokens of a request")] = 64,
    seed: Annotated[int, typer.Option(help="the same seed gives the same workload")] = 0,
    trace: Annotated[Path | None, typer.Option(help="replay this trace instead of making one")] = None,
    save: Annotated[Path | None, typer.Option(help="save the trace here")] = None,
    rest: Annotated[Rest, typer.Option(help="what becomes of unfinished jobs at the end")] = Rest.CANCEL,
    report: Annotated[Path, typer.Option(help="folder for report.json and report.png")] = Path("bench-report"),
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Put the ETS paper's synthetic workload (its table 5.1 by default) on a running daemon and report."""
    scenario = Scenario(
        seed=seed,
        duration=duration,
        arrivals=Arrivals(process=process, rate=rate),
        finetune_period=finetune_period,
        finetune_rows=finetune_rows,
        adapters=adapters,
        rank=rank,
        popularity=Popularity(shape=popularity),
        min_new_tokens=min(16, max_tokens),
        max_new_tokens=max_tokens,
    )
    made = make_trace(scenario, bundled_prompts(), bundled_rows()) if trace is None else load_trace(trace)
    if save is not None:
        save_trace(made, save)
    run = asyncio.run(_replay(made, rest, url, key))
    _print_report(report, run)


async def _replay(trace: Trace, rest: Rest, url: str, key: str | None) -> Run:
    async with AsyncClient(url, api_key=key, retry=NO_RETRIES) as client:
        target = DaemonTarget(client, trace.scenario)
        await target.prepare()
        return await replay(trace, target, rest=rest)


def _print_report(folder: Path, run: Run) -> None:
    from coserve.workloads.report import latency_table, totals_table, write_report

    console, summary = Console(), summarise(run)
    console.print(latency_table(summary))
    console.print(totals_table(summary))
    print("saved:", *write_report(folder, run, summary))


@app.command("demo")
def demo(report: Annotated[Path, typer.Option(help="folder for the report")] = Path("demo-report")) -> None:
    """Show everything once, in about two minutes: stream, fine-tune two adapters under load, compare, report."""
    from coserve.demo import demo as run

    report.mkdir(parents=True, exist_ok=True)
    asyncio.run(run(report))


@app.command("config")
def show_config(config: Annotated[Path | None, typer.Option(help="TOML file")] = None) -> None:
    """Print every setting with its value from the environment and the file."""
    loaded = load_config({"config": config} if config else {})
    for f in dataclasses.fields(Config):
        shown = "***" if f.name == "api_key" and loaded.api_key else getattr(loaded, f.name)
        print(f"{f.name} = {shown}")


def main() -> None:
    """The console script. A refused start or a failed request ends with one line, not with a traceback."""
    try:
        app()
    except StartupError as error:
        print(f"coserve: {error.message}", file=sys.stderr)
        sys.exit(2)
    except CoserveError as error:
        print(f"coserve: {error.code}: {error.message}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
