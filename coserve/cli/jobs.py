"""`coserve finetune` and `coserve jobs`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from coserve.cli.common import DEFAULT_URL, AsJson, Key, Url
from coserve.client import Client
from coserve.schemas import Job

jobs_app = typer.Typer(no_args_is_help=True, help="List, watch and steer fine-tuning jobs.")


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
        for note in job.info.notes:
            print(f"note: {note}", file=sys.stderr)
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
