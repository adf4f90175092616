"""The command `coserve finetune`."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

from coserve.cli.common import DEFAULT_URL, AsJson, Key, Url, connect, optimizer_named, target_names
from coserve.cli.finetuning.settings import column_names, request_settings
from coserve.cli.job_table import chosen_line, cut_line, preparing_line
from coserve.cli.jobs import follow_job, print_job, print_note
from coserve.core.schemas import OnConflict, Preparing
from coserve.core.types import LoraSettings, Optimizer, TrainingRequest, TrainOn

LORA = LoraSettings()
"""Default settings of an adapter."""
TRAINING = TrainingRequest()
"""Default settings of a job."""


def finetune(
    adapter: Annotated[str, typer.Argument(help="name of the adapter to make, or to add a version to")],
    file: Annotated[
        Path, typer.Argument(help="file of rows: JSON Lines, CSV, parquet or a JSON array", exists=True, dir_okay=False)
    ],
    columns: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=COLUMN",
            help="columns of the file that are called otherwise than the fields of a row, such as "
            "prompt=question,completion=answer",
            show_default="the fields' own names",
        ),
    ] = None,
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
        OnConflict | None,
        typer.Option(
            help="if an unfinished job trains ADAPTER: with --continue-from ADAPTER wait for it and continue from its "
            "version, begin beside it from the current version (fork), or refuse",
            show_default="wait",
        ),
    ] = None,
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
    set_fields: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="FIELD=VALUE",
            help="any field of POST /finetune, such as training.schedule=cosine or lora.dropout=0.05; may be given "
            "several times",
        ),
    ] = None,
    detach: Annotated[bool, typer.Option(help="print the job and do not wait for it")] = False,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Upload a corpus, start a job and follow it to its end.

    Rows are JSON objects, one a line, or the records of a CSV file: {"text": ...}, {"prompt": ..., "completion": ...},
    {"messages": [...]}, {"instruction": ..., "output": ...} (alpaca), {"conversations": [...]} (ShareGPT) or, with
    --dpo-beta, {"prompt": ..., "chosen": ..., "rejected": ...}; docs/guide/data.md describes them.

    Epochs, learning rate and batch are chosen from the size of the corpus and the width of the base unless they are
    given. --set gives further settings (schedule, dropout, early stopping, checkpoints, ...), which
    docs/guide/fine-tune.md lists.
    """
    settings = request_settings(
        {
            "columns": column_names(columns) if columns else None,
            "continue_from": continue_from,
            "on_conflict": on_conflict,
            "lora.r": rank,
            "lora.alpha": alpha,
            "lora.targets": [name for text in targets for name in target_names(text)] if targets else None,
            "lora.bd_blocks": bd_blocks,
            "training.epochs": epochs,
            "training.steps": steps,
            "training.learning_rate": learning_rate,
            "training.batch_tokens": batch_tokens,
            "training.validation_split": validation_split,
            "training.train_on": train_on,
            "training.loss": None if dpo_beta is None else {"type": "dpo", "beta": dpo_beta},
            "training.optimizer": optimizer,
            "training.lora_plus_ratio": lora_plus_ratio,
            "training.neftune_alpha": neftune_alpha,
            "training.sample_prompts": sample_prompt or None,
            "training.sample_steps": sample_steps,
            "training.sample_max_tokens": sample_max_tokens,
        },
        set_fields or [],
    )
    if settings.get("continue_from") is not None and settings.get("lora"):
        raise typer.BadParameter(
            "--rank, --alpha, --targets, --bd-blocks and fields of lora shape a new adapter; --continue-from has its "
            "own"
        )
    with connect(url, key) as client:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # printed below instead
            job = client.finetune(adapter, file=file, on_preparing=_show_preparing, **settings)
        for note in job.info.notes:
            print_note(f"note: {note}")
        print_note(cut_line(job.info))
        if not as_json and (chosen := chosen_line(job.info)) is not None:
            print(chosen)
        if detach:
            print_job(job.info, as_json)
        else:
            follow_job(job, as_json)


def _show_preparing(preparing: Preparing) -> None:
    """Show the progress of tokenising on a terminal, in one line that is overwritten."""
    if sys.stderr.isatty():
        end = "\n" if preparing.progress == 1 else ""
        print(f"\r{preparing_line(preparing)}", end=end, file=sys.stderr, flush=True)
