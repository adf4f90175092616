"""The command `coserve profile`: GPU memory by component, for inference, LoRA and full fine-tuning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from coserve.cli.common import target_names
from coserve.cli.failures import usage_errors
from coserve.core.errors import InvalidRequest
from coserve.data.pretrained.source import check_source
from coserve.engine.profile_request import table
from coserve.engine.profile_request.figure import save_figure
from coserve.engine.profile_request.launch import run_profile
from coserve.engine.profile_request.messages import Step
from coserve.engine.profile_request.presets import Preset, preset_request
from coserve.engine.profile_request.report import ProfileReport
from coserve.engine.profile_request.request import Backend, ProfileRequest, check_request, make_workloads

ALL = "all"


OF_PRESETS = ("ranks", "targets", "full", "batches", "lengths", "dtype", "recompute", "trust_remote_code")
"""Options that a preset sets."""


def profile(
    ctx: typer.Context,
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="a folder, a hub name or 'bundled'; only its config is read")
    ] = None,
    preset: Annotated[Preset | None, typer.Option(help="a published profile, instead of MODEL")] = None,
    backend: Annotated[list[Backend] | None, typer.Option(help="library whose passes run; may be repeated")] = None,
    ranks: Annotated[str, typer.Option(help="ranks of LoRA, such as 8,32")] = "16",
    targets: Annotated[
        list[str] | None,
        typer.Option(help="linear modules to adapt, such as q_proj,v_proj, or all; repeated: one profile for each"),
    ] = None,
    full: Annotated[bool, typer.Option(help="profile full fine-tuning, too")] = True,
    batches: Annotated[str, typer.Option(help="rows of a batch, such as 1,2,4")] = "1,2,4,8",
    lengths: Annotated[str, typer.Option(help="tokens of a row, such as 128,512")] = "512",
    dtype: Annotated[str, typer.Option(help="type of the base: float32, bfloat16 or float16")] = "bfloat16",
    recompute: Annotated[
        bool, typer.Option(help="training keeps only each layer's input and computes the layer again (backend coserve)")
    ] = False,
    predict: Annotated[bool, typer.Option(help="predict with fake tensors although there is a GPU")] = False,
    trust_remote_code: Annotated[bool, typer.Option(help="run Python code that the model brings")] = False,
    out: Annotated[Path | None, typer.Option(help="JSON file to write the profile to")] = None,
    figure: Annotated[Path | None, typer.Option(help="PNG file to draw the profile in")] = None,
) -> None:
    """Measure the GPU memory that MODEL takes: weights, a forward without gradients, activations, the backward.

    With a GPU each pass is run and its peak measured, on random weights. Without one the peaks are predicted.
    """
    if (model is None) == (preset is None):
        raise typer.BadParameter("expected a MODEL, or --preset")
    with usage_errors():
        if preset is not None:
            _check_preset(ctx)
            request = preset_request(preset)
            request = msgspec.structs.replace(request, predict=predict, backends=_backends(backend) or request.backends)
        else:
            assert model is not None, "checked above"
            request = ProfileRequest(
                model=model,
                workloads=make_workloads(
                    _numbers(ranks, "ranks"), [_targets(own) for own in targets or [ALL]], full=full
                ),
                batches=tuple(sorted(set(_numbers(batches, "batches")))),
                lengths=_numbers(lengths, "lengths"),
                backends=_backends(backend) or (Backend.COSERVE,),
                dtype=dtype,
                recompute=recompute,
                predict=predict,
                trust_remote_code=trust_remote_code,
            )
            check_source(model, weights=False)
        check_request(request)
        for path in (out, figure):
            if path is not None and not path.absolute().parent.is_dir():
                raise InvalidRequest(f"no such folder: {path.absolute().parent}")
            if path is not None and path.is_dir():
                raise InvalidRequest(f"expected a file, got a folder: {path}")
    report = _run(request)
    _show(report)
    if out is not None:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    if figure is not None:
        save_figure(figure, report)
    if saved := [str(path) for path in (out, figure) if path is not None]:
        print("saved:", *saved)


def _check_preset(ctx: typer.Context) -> None:
    for name in OF_PRESETS:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            raise InvalidRequest(f"the preset says it: expected no --{name.replace('_', '-')}")


def _run(request: ProfileRequest) -> ProfileReport:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def progress(step: Step) -> None:
            bar.update(task, description=step.text, completed=step.done, total=step.total)

        return run_profile(request, progress)


def _show(report: ProfileReport) -> None:
    console = Console()
    console.print(table.source_text(report), highlight=False, soft_wrap=True)
    for series in report.series:
        console.print(table.series_table(series))
        for note in table.notes(series):
            console.print(note, highlight=False, soft_wrap=True)


def _backends(given: list[Backend] | None) -> tuple[Backend, ...]:
    return tuple(dict.fromkeys(given or ()))


def _targets(text: str) -> tuple[str, ...] | None:
    return None if text == ALL else target_names(text)


def _numbers(text: str, field: str) -> tuple[int, ...]:
    """Parse comma-separated numbers. Raises `InvalidRequest` for anything but whole numbers."""
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",") if part.strip()))
    except ValueError as error:
        raise InvalidRequest(f"expected whole numbers separated by commas, got {text[:80]!r}", field=field) from error
