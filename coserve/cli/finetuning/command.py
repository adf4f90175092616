"""The command `coserve finetune`."""

from __future__ import annotations

import codecs
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from coserve.cli import common
from coserve.cli.finetuning.settings import (
    ColumnNames,
    Detach,
    SetFields,
    column_names,
    field_options,
    request_settings,
)
from coserve.cli.job_table import chosen_line, cut_line, preparing_line
from coserve.cli.jobs import follow_job, print_job, print_note
from coserve.core.errors import CorpusError
from coserve.core.schemas.jobs import Preparing
from coserve.core.training.settings import Optimizer
from coserve.data.corpus.columns import Columns
from coserve.data.corpus.conversion import json_lines
from coserve.data.corpus.jsonl import parse_jsonl
from coserve.data.corpus.rows import choose_columns


def _finetune(
    adapter: Annotated[str, typer.Argument(help="name of the adapter to make, or to add a version to")],
    file: Annotated[
        Path, typer.Argument(help="file of rows: JSON Lines, CSV, parquet or a JSON array", exists=True, dir_okay=False)
    ],
    columns: ColumnNames = None,
    validation_file: Annotated[
        Path | None,
        typer.Option(
            help="file of rows, of any such format, that are not learned: the loss on them is measured every "
            "training.eval_steps steps",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    targets: Annotated[
        list[str] | None,
        typer.Option(help="linear modules to adapt, such as q_proj,v_proj", show_default="all of the decoder layers"),
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
            parser=common.optimizer_named,
            metavar=f"<{'|'.join(Optimizer)}>",
        ),
    ] = None,
    sample_prompt: Annotated[
        list[str] | None,
        typer.Option(help="show what the adapter in training generates of this text; may be given several times"),
    ] = None,
    test: Annotated[
        Path | None,
        typer.Option(
            help="file of rows, of any such format, that are not learned: the trained adapter and the base answer "
            "them, as in coserve eval; --set test.regex=... or test.json_field=... compares a part of the answers",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    set_fields: SetFields = None,
    detach: Detach = False,
    wait: common.Wait = False,
    as_json: common.AsJson = False,
    url: common.Url = common.DEFAULT_URL,
    key: common.Key = None,
    *,
    options: dict[str, Any],
) -> None:
    """Upload a corpus, start a job and follow it to its end.

    Rows are JSON objects, one a line, or the records of a CSV file: {"text": ...}, {"prompt": ..., "completion": ...},
    {"messages": [...]}, {"instruction": ..., "output": ...} (alpaca), {"conversations": [...]} (ShareGPT),
    {"input_ids": [...], "labels": [...]} (tokenised) or, with --dpo-beta, {"prompt": ..., "chosen": ...,
    "rejected": ...}; docs/guide/data.md describes them.

    Epochs, learning rate and batch are chosen from the size of the corpus and the width of the base unless they are
    given. --set gives further settings (schedule, dropout, early stopping, checkpoints, ...), which
    docs/guide/fine-tune.md lists.
    """
    named = column_names(columns or [])
    own = {
        "columns": named or None,
        "targets": [name for text in targets for name in common.target_names(text)] if targets else None,
        "dpo_beta": None if dpo_beta is None else {"type": "dpo", "beta": dpo_beta},
        "optimizer": optimizer,
        "sample_prompt": sample_prompt or None,
        "test": None if test is None else _rows(test, named),
    }
    settings = request_settings({**options, **own}, set_fields or [])
    if settings.get("continue_from") is not None and settings.get("lora"):
        raise typer.BadParameter(
            "--rank, --alpha, --targets, --bd-blocks and fields of lora shape a new adapter; --continue-from has its "
            "own"
        )
    with common.connected(url, key, wait) as client:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # printed below instead
            job = client.finetune(
                adapter, file=file, validation=validation_file, on_preparing=_show_preparing, **settings
            )
        for note in job.info.notes:
            print_note(f"note: {note}")
        print_note(cut_line(job.info))
        if not as_json and (chosen := chosen_line(job.info)) is not None:
            print(chosen)
        if detach:
            print_job(job.info, as_json)
        else:
            follow_job(job, as_json)


finetune = common.with_options(_finetune, field_options())


def _rows(file: Path, names: dict[str, str]) -> list[dict[str, Any]]:
    """Return a file's rows, by the names of their fields."""
    try:
        with json_lines(file, Columns(names)) as lines:
            for _ in parse_jsonl(lines, columns=Columns(names)):
                pass  # raises for what is wrong, with its line
            texts = lines.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
    except CorpusError as error:
        raise typer.BadParameter(f"--test: {error.message}") from None
    rows = [msgspec.json.decode(text, type=dict[str, Any]) for text in texts if text.strip()]
    return [_named(row, Columns(names)) for row in rows] if names else rows


def _named(row: dict[str, Any], columns: Columns) -> dict[str, Any]:
    found = {name: value for name, value in row.items() if value is not None}
    return {field: found[column] for field, column in choose_columns(found, 1, columns)[1].items()}


def _show_preparing(preparing: Preparing) -> None:
    """Show the progress of tokenising on a terminal, in one line that is overwritten."""
    if sys.stderr.isatty():
        end = "\n" if preparing.progress == 1 else ""
        print(f"\r{preparing_line(preparing)}", end=end, file=sys.stderr, flush=True)
