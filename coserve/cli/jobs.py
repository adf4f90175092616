"""`coserve finetune` and `coserve jobs`."""

from __future__ import annotations

import sys
import warnings
from contextlib import closing
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from coserve.cli.app import PLAIN, CommandGroup
from coserve.cli.common import (
    DEFAULT_URL,
    AsJson,
    Key,
    Limit,
    Url,
    connect,
    json_text,
    optimizer_named,
    say_if_starting,
    say_more,
    target_names,
)
from coserve.cli.failures import FAILED, usage_errors
from coserve.cli.job_plot import collect_steps, save_plot
from coserve.cli.job_samples import collect_samples
from coserve.cli.job_table import chosen_line, cut_line, job_line, job_table, preparing_line
from coserve.client import JobHandle
from coserve.client.progress import sample_lines
from coserve.errors import InvalidRequest, WrongJobState
from coserve.limits import PAGE_SIZE
from coserve.schemas import Job, OnConflict, Preparing
from coserve.types import JobState, LoraSettings, Optimizer, TrainingRequest, TrainOn

LORA = LoraSettings()
"""Default settings of an adapter."""
TRAINING = TrainingRequest()
"""Default settings of a job."""

jobs_app = typer.Typer(
    cls=CommandGroup,
    rich_markup_mode=PLAIN,
    help="List, watch, plot, pause, resume and cancel fine-tuning jobs.",
)


def finetune(
    adapter: Annotated[str, typer.Argument(help="name of the adapter to make, or to add a version to")],
    file: Annotated[Path, typer.Argument(help="JSONL or parquet file of rows", exists=True, dir_okay=False)],
    rank: Annotated[int | None, typer.Option(help="rank of a new adapter", show_default=str(LORA.r))] = None,
    alpha: Annotated[
        float | None, typer.Option(help="its scale is alpha / rank", show_default="twice the rank")
    ] = None,
    targets: Annotated[
        list[str] | None,
        typer.Option(help="linear modules to adapt, such as q_proj,v_proj", show_default="all of the decoder layers"),
    ] = None,
    bd_blocks: Annotated[
        int | None,
        typer.Option(
            help="BD-LoRA: diagonal blocks, for tensor parallelism over as many GPUs", show_default="plain LoRA"
        ),
    ] = None,
    continue_from: Annotated[
        str | None,
        typer.Option(help="continue training NAME or NAME@VERSION, with its rank, alpha, targets and blocks"),
    ] = None,
    on_conflict: Annotated[
        OnConflict,
        typer.Option(
            help="if an unfinished job trains ADAPTER: with --continue-from ADAPTER wait for it and continue from its version, begin beside "
            "it from the current version (fork), or refuse"
        ),
    ] = "wait",
    epochs: Annotated[float | None, typer.Option(help="times through the corpus", show_default="chosen")] = None,
    steps: Annotated[int | None, typer.Option(help="optimizer steps, instead of epochs")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="peak learning rate", show_default="chosen")] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(help="tokens of one optimizer step", show_default="chosen")
    ] = None,
    validation_split: Annotated[
        float | None,
        typer.Option(help="share of the rows held back to measure the loss on, from 0 to 1", show_default="0"),
    ] = None,
    train_on: Annotated[
        TrainOn | None,
        typer.Option(
            help="tokens to learn: the last answer alone, every turn of the assistant, or all",
            show_default="by the format of a row",
        ),
    ] = None,
    dpo_beta: Annotated[
        float | None,
        typer.Option(
            help='direct preference optimization with this beta, of rows {"prompt", "chosen", "rejected"}',
            show_default="off; 0.1 is usual",
        ),
    ] = None,
    optimizer: Annotated[
        Optimizer | None,
        typer.Option(
            help="what updates the weights; the 8-bit ones need coserve[bitsandbytes]",
            show_default=Optimizer.ADAMW,
            parser=optimizer_named,
            metavar=f"<{'|'.join(Optimizer)}>",
        ),
    ] = None,
    lora_plus_ratio: Annotated[
        float | None,
        typer.Option(
            help="LoRA+: the learning rate of every B in multiples of --learning-rate", show_default="off; 16 is usual"
        ),
    ] = None,
    neftune_alpha: Annotated[
        float | None,
        typer.Option(help="NEFTune: noise on the embeddings in training", show_default="off; 5 is usual"),
    ] = None,
    sample_prompt: Annotated[
        list[str] | None,
        typer.Option(help="show what the adapter in training generates of this text; may be given several times"),
    ] = None,
    sample_steps: Annotated[
        int | None,
        typer.Option(help="optimizer steps between two samples", show_default=str(TRAINING.sample_steps)),
    ] = None,
    sample_max_tokens: Annotated[
        int | None, typer.Option(help="longest sample", show_default=str(TRAINING.sample_max_tokens))
    ] = None,
    detach: Annotated[bool, typer.Option(help="print the job and do not wait for it")] = False,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Upload a corpus, start a job and follow it to its end.

    Rows are JSON objects, one a line: {"text": ...}, {"prompt": ..., "completion": ...}, {"messages": [...]},
    {"instruction": ..., "output": ...} (alpaca), {"conversations": [...]} (ShareGPT) or, with --dpo-beta,
    {"prompt": ..., "chosen": ..., "rejected": ...}; docs/data.md describes them.

    Epochs, learning rate and batch are chosen from the size of the corpus and the width of the base unless they are
    given. POST /finetune has further settings (schedule, dropout, early stopping, checkpoints, ...).
    """
    training = _given(
        epochs=epochs,
        steps=steps,
        learning_rate=learning_rate,
        batch_tokens=batch_tokens,
        validation_split=validation_split,
        train_on=train_on,
        optimizer=optimizer,
        lora_plus_ratio=lora_plus_ratio,
        neftune_alpha=neftune_alpha,
        loss=None if dpo_beta is None else {"type": "dpo", "beta": dpo_beta},
        sample_prompts=sample_prompt or None,
        sample_steps=sample_steps,
        sample_max_tokens=sample_max_tokens,
    )
    names = None if not targets else [name for text in targets for name in target_names(text)]
    lora = _given(r=rank, alpha=alpha, targets=names, bd_blocks=bd_blocks) or None
    if continue_from is not None and lora is not None:
        raise typer.BadParameter(
            "--rank, --alpha, --targets and --bd-blocks shape a new adapter; --continue-from has its own"
        )
    with connect(url, key) as client:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # printed below instead
            job = client.finetune(
                adapter,
                file=file,
                continue_from=continue_from,
                lora=lora,
                training=training,
                on_conflict=on_conflict,
                on_preparing=_show_preparing,
            )
        for note in job.info.notes:
            _warn(f"note: {note}")
        _warn(cut_line(job.info))
        if not as_json and (chosen := chosen_line(job.info)) is not None:
            print(chosen)
        if detach:
            _show_job(job.info, as_json)
        else:
            follow_job(job, as_json)


def _given(**options: object) -> dict[str, object]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def follow_job(job: JobHandle, as_json: bool) -> Job:
    """Wait for its end and show it; the exit status is that of a failure where it has left no adapter."""
    try:
        ended = job.wait()
    except KeyboardInterrupt:
        _warn(f"the job keeps running: coserve jobs watch {job.id}, or coserve jobs cancel {job.id}")
        raise
    _show_job(ended, as_json)
    if ended.state is JobState.CANCELLED:
        raise typer.Exit(FAILED)
    return ended


def _show_preparing(preparing: Preparing) -> None:
    """On a terminal, in a line that is written again and again."""
    if sys.stderr.isatty():
        end = "\n" if preparing.progress == 1 else ""
        print(f"\r{preparing_line(preparing)}", end=end, file=sys.stderr, flush=True)


def _warn(line: str | None) -> None:
    if line is not None:
        print(line, file=sys.stderr)


@jobs_app.command("list")
def list_jobs(
    limit: Limit = PAGE_SIZE,
    after: Annotated[str | None, typer.Option(help="list the jobs older than this one")] = None,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """List the newest jobs with their progress."""
    with connect(url, key) as client:
        page = client.jobs(after=after, limit=limit)
        say_if_starting(client)
    if as_json:
        for job in page.data:
            _show_job(job, True)
    else:
        print("\n".join([*map(preparing_line, page.preparing), *job_table(page.data)]))
    if page.has_more:
        say_more("jobs list", limit, page.data[-1].id)


@jobs_app.command("show")
def show_job(id: str, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """Show a job as JSON."""
    with connect(url, key) as client:
        print(json_text(client.job(id).info, sys.stdout.isatty()))


@jobs_app.command("watch")
def watch_job(id: str, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """Follow a job to its end."""
    with connect(url, key) as client:
        job = client.job(id)
        _warn(cut_line(job.info))
        follow_job(job, False)


@jobs_app.command("samples")
def show_samples(id: str, as_json: AsJson = False, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """Show what the adapter of a job has generated while it was trained (--sample-prompt)."""
    with connect(url, key) as client:
        job = client.job(id)
        with closing(job.events()) as events:
            for sample in collect_samples(job.info, events):
                print(msgspec.json.encode(sample).decode() if as_json else "\n".join(sample_lines(sample)))


@jobs_app.command("plot")
def plot_job(
    id: str,
    out: Annotated[Path | None, typer.Option(help="file to write", show_default="ID.png")] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Draw a job's loss, token accuracy (DPO: rewards), learning rate and tokens per second in a PNG file."""
    path = Path(f"{id}.png") if out is None else out
    with usage_errors():
        if not path.absolute().parent.is_dir():
            raise InvalidRequest(f"no such folder: {path.absolute().parent}")
        if path.is_dir():
            raise InvalidRequest(f"expected a file, got a folder: {path}")
    with connect(url, key) as client:
        job = client.job(id)
        with closing(job.events()) as events:
            steps = collect_steps(job.info, events)
    if not steps:
        raise WrongJobState(f"job {id} has not done a step yet: it is {job.info.state}")
    save_plot(path, job.info, steps)
    print(f"saved: {path}")


@jobs_app.command("pause")
def pause_job(id: str, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """Stop a job at a checkpoint."""
    with connect(url, key) as client:
        _show_job(client.job(id).pause(), False)


@jobs_app.command("resume")
def resume_job(id: str, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """Queue a paused job again."""
    with connect(url, key) as client:
        _show_job(client.job(id).resume(), False)


@jobs_app.command("cancel")
def cancel_job(id: str, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """Cancel a job; it leaves no adapter."""
    with connect(url, key) as client:
        _show_job(client.job(id).cancel(), False)


def _show_job(job: Job, as_json: bool) -> None:
    print(msgspec.json.encode(job).decode() if as_json else job_line(job))
