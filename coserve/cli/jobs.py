"""The commands `coserve jobs`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from coserve.cli import common
from coserve.cli.app import command_group
from coserve.cli.failures import FAILED, usage_errors
from coserve.cli.job_plot import collect_steps, save_plot
from coserve.cli.job_table import cut_line, job_line, job_notes, job_table, preparing_line
from coserve.client import Client, JobHandle
from coserve.client.progress import sample_lines
from coserve.core.errors import InvalidRequest, WrongJobState
from coserve.core.limits import PAGE_SIZE
from coserve.core.schemas.jobs import Job, JobEvent, Sample
from coserve.core.training.jobs import JobState

jobs_app = command_group("List, watch, plot, pause, resume, cancel and delete fine-tuning jobs.")


def follow_job(job: JobHandle, as_json: bool) -> Job:
    """Wait for the job's end and show it. Exit with a failure's status if it left no adapter."""
    try:
        ended = job.wait()
    except KeyboardInterrupt:
        print_note(f"the job keeps running: coserve jobs watch {job.id}, or coserve jobs cancel {job.id}")
        raise
    print_job(ended, as_json)
    if ended.state is JobState.CANCELLED:
        raise typer.Exit(FAILED)
    return ended


def print_note(line: str | None) -> None:
    """Print a line on standard error; None: nothing."""
    if line is not None:
        print(line, file=sys.stderr)


@common.client_command(jobs_app, "list")
def list_jobs(
    client: Client,
    limit: common.Limit = PAGE_SIZE,
    after: Annotated[str | None, typer.Option(help="list the jobs older than this one")] = None,
    notes: Annotated[
        bool, typer.Option("--notes", help="below each job why it failed or waits, and the daemon's notes")
    ] = False,
    as_json: common.AsJson = False,
) -> None:
    """List the newest jobs with their progress."""
    page = client.jobs(after=after, limit=limit)
    common.say_if_starting(client)
    if as_json:
        for job in page.data:
            print_job(job, True)
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print("\n".join([*map(preparing_line, page.preparing), *job_table(page.data, notes=notes, width=width)]))
        if not notes and (noted := sum(bool(job_notes(job)) for job in page.data)):
            print_note(f"jobs with notes: {noted} (coserve jobs list --notes)")
    if page.has_more:
        common.say_more("jobs list", limit, page.data[-1].id)


@common.client_command(jobs_app, "show")
def show_job(client: Client, id: str) -> None:
    """Show a job as JSON."""
    print(common.json_text(client.job(id).info, sys.stdout.isatty()))


@common.client_command(jobs_app, "watch")
def watch_job(client: Client, id: str) -> None:
    """Follow a job to its end."""
    job = client.job(id)
    print_note(cut_line(job.info))
    follow_job(job, False)


@common.client_command(jobs_app, "samples")
def show_samples(client: Client, id: str, as_json: common.AsJson = False) -> None:
    """Show what the adapter of a job has generated while it was trained (--sample-prompt)."""
    job = client.job(id)
    with closing(job.events()) as events:
        for sample in _collect_samples(job.info, events):
            print(common.json_text(sample) if as_json else "\n".join(sample_lines(sample)))


@common.client_command(jobs_app, "plot")
def plot_job(
    client: Client,
    id: str,
    out: Annotated[Path | None, typer.Option(help="file to write", show_default="ID.png")] = None,
) -> None:
    """Draw a job's loss, token accuracy (preference loss: rewards), learning rate and tokens per second in a PNG
    file."""
    path = Path(f"{id}.png") if out is None else out
    with usage_errors():
        if not path.absolute().parent.is_dir():
            raise InvalidRequest(f"no such folder: {path.absolute().parent}")
        if path.is_dir():
            raise InvalidRequest(f"expected a file, got a folder: {path}")
    job = client.job(id)
    with closing(job.events()) as events:
        steps = collect_steps(job.info, events)
    if not steps:
        raise WrongJobState(f"job {id} has not done a step yet: it is {job.info.state}")
    save_plot(path, job.info, steps)
    print(f"saved: {path}")


@common.client_command(jobs_app, "pause")
def pause_job(client: Client, id: str) -> None:
    """Stop a job at a checkpoint."""
    print_job(client.job(id).pause(), False)


@common.client_command(jobs_app, "resume")
def resume_job(client: Client, id: str) -> None:
    """Queue a paused job again."""
    print_job(client.job(id).resume(), False)


@common.client_command(jobs_app, "cancel")
def cancel_job(client: Client, id: str) -> None:
    """Cancel a job; it leaves no adapter."""
    print_job(client.job(id).cancel(), False)


@common.client_command(jobs_app, "delete")
def delete_jobs(client: Client, ids: list[str]) -> None:
    """Delete jobs that have ended, with their events; their adapters stay."""
    for id in ids:
        gone = client.job(id).delete()
        print(f"deleted {gone.id}" + ("" if gone.result is None else f"; {gone.result} stays"))


def print_job(job: Job, as_json: bool) -> None:
    print(common.json_text(job) if as_json else job_line(job))


def _collect_samples(job: Job, events: Iterable[JobEvent]) -> Iterator[Sample]:
    """Yield the job's samples, in the order of the events.

    `events` may be live: they are read up to the samples that `job` shows, or the job's end.
    """
    left = {(sample.step, sample.prompt) for sample in job.samples}
    if not left:
        return
    for event in events:
        if event.sample is not None:
            yield event.sample
            left.discard((event.sample.step, event.sample.prompt))
        if not left and not job.state.terminal:
            return
