"""The command `coserve learn`: a document becomes an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from coserve.cli.common import DEFAULT_URL, AsJson, Key, Url, Wait, connected
from coserve.cli.finetuning.settings import Detach, SetFields, request_settings
from coserve.cli.jobs import follow_job, print_job, print_note
from coserve.core.document_files import files_of
from coserve.core.schemas.documents import Recipe

_SHOWN = 10
"""Most names of a folder's files in its note."""


def learn(
    adapter: Annotated[str, typer.Argument(help="name of the adapter to make, or to add a version to")],
    files: Annotated[
        list[Path], typer.Argument(help="files of text, Markdown or PDF, or folders of them: one document", exists=True)
    ],
    recipe: Annotated[
        Recipe | None,
        typer.Option(
            help="learn distributions over tokens, answers, or the text itself; or a KV prefix, also by an encoder",
            show_default="topk_kd",
        ),
    ] = None,
    generator: Annotated[
        str | None, typer.Option(help="who asks and answers: base, adapter:NAME or none", show_default="base")
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option(
            help="file of your own questions, one a line, with the answer behind a tab if there is one",
            exists=True,
            dir_okay=False,
            show_default="generated",
        ),
    ] = None,
    questions_per_chunk: Annotated[
        int | None, typer.Option(help="how many questions are generated of each chunk", show_default="32", min=1)
    ] = None,
    set_fields: SetFields = None,
    detach: Detach = False,
    wait: Wait = False,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Make an adapter that knows a document, so that prompts need not carry it.

    The base is asked about each part of the document and answers with that part in its prompt; the adapter learns the
    answers without it. docs/guide/documents.md has the settings and what the evaluation says.
    """
    settings = request_settings({}, set_fields or [])
    given = settings.get("document", {})
    if not isinstance(given, dict) or given.keys() & {"text", "path"}:
        raise typer.BadParameter("--set document: give the document as the argument FILES")
    if others := settings.keys() & {"columns", "teacher", "test"}:
        raise typer.BadParameter(f"--set {min(others)}: coserve learn does not take it")
    own = {
        "recipe": recipe,
        "generator": generator,
        "questions": None if questions is None else _questions(questions),
        "questions_per_chunk": questions_per_chunk,
    }
    document: dict[str, Any] = settings.pop("document", {}) | {n: v for n, v in own.items() if v is not None}
    folders = {folder: files_of(folder) for folder in files if folder.is_dir()}  # as they are now
    with connected(url, key, wait) as client:
        job = client.learn(adapter, file=files, **settings, **document)
        told = job.info.notes
        for folder, own_files in folders.items():
            found = [str(file.relative_to(folder)) for file in own_files]
            more = ", ..." if len(found) > _SHOWN else ""
            print_note(f"note: files of {folder} ({len(found)}): {', '.join(found[:_SHOWN])}{more}")
        for note in told:
            print_note(f"note: {note}")
        if detach:
            print_job(job.info, as_json)
        else:
            for note in follow_job(job, as_json).notes[len(told) :]:
                print_note(f"note: {note}")


def _questions(file: Path) -> list[dict[str, str]]:
    lines = [line.partition("\t") for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise typer.BadParameter(f"--questions: no question in {file}")
    return [{"question": question} | ({"answer": answer} if answer else {}) for question, _, answer in lines]
