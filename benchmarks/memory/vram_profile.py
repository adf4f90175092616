"""Figure 4.1 of the ETS paper: GPU memory by component over the batch size, GPT-2 XL, rows of 11 tokens.

    python -m benchmarks.memory.vram_profile --out benchmarks/results
    python -m benchmarks.memory.vram_profile --plot [FOLDER/vram_profile.json]     (draws the committed result, or \
        takes this one in)
    python -m benchmarks.memory.vram_profile --tiny --out /tmp/tried               (a small shape, predicted where \
        there is no GPU)
    python -m benchmarks.memory.vram_profile --model MODEL --ranks 8 32            (tables of another base)

As in its section 4.2: batches of 3 to 1000, LoRA of rank 32 on `c_attn` and `c_proj`, as transformers and PEFT run it
in float32; besides, the same in bfloat16, and as the daemon runs it. Random weights of the true shape..
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from benchmarks.common.options import RESULTS, make_parser
from benchmarks.common.provenance import command, commit
from benchmarks.common.summary import Key, update_summary
from benchmarks.memory.profile.figure import save_figure
from benchmarks.memory.profile.report import ProfileReport
from benchmarks.memory.profile.request import (
    DTYPES,
    Backend,
    Kind,
    ProfileRequest,
    figure_4_1,
    make_workloads,
)
from benchmarks.memory.profile.run import Step, profile
from benchmarks.memory.profile.table import notes, series_table, source_text

NAME = "vram_profile.json"
FIGURE = Path("docs/figures/figure_4_1.png")
GONE = 0.1
"""M_backward has gone where it is below this part of what it is in the smallest batch."""
PAPERS_GONE = 70
TINY: dict[str, object] = {
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def requests(*, tiny: bool) -> list[ProfileRequest]:
    """The paper's profile, the same in bfloat16, and the daemon's."""
    paper = figure_4_1()
    if tiny:
        assert paper.config is not None, "a shape"
        paper = msgspec.structs.replace(paper, config=paper.config | TINY, batches=(1, 4, 16))
    half = msgspec.structs.replace(paper, dtype="bfloat16")
    return [paper, half, msgspec.structs.replace(half, backends=(Backend.COSERVE,))]


def measure(out: Path, revision: str, *, tiny: bool) -> None:
    """Writes the reports into `out`, each as soon as it is there."""

    def say(step: Step) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {step.done + 1}/{step.total}  {step.text}", flush=True)

    began, reports = time.monotonic(), list[ProfileReport]()
    head, note = (revision, None) if revision else commit()
    run: dict[str, Any] = {
        "commit": head,
        "command": command("benchmarks.memory.vram_profile"),
        "script": "benchmarks/memory/vram_profile.py",
    }
    run |= {"date": datetime.now(UTC).isoformat(timespec="seconds")} | ({} if note is None else {"note": note})
    out.mkdir(parents=True, exist_ok=True)
    for request in requests(tiny=tiny):
        reports.append(profile(request, say))
        run["seconds"] = round(time.monotonic() - began, 1)
        content = {"run": run, "reports": msgspec.to_builtins(reports)}
        (out / NAME).write_text(json.dumps(content, indent=1) + "\n")


def gone_at(report: ProfileReport) -> int | None:
    """The smallest batch in which M_backward of full fine-tuning has gone; None: in none."""
    points = next(series.points for series in report.series if series.workload.kind is Kind.FULL)
    first = points[0].components.backward or 0
    return next((point.batch for point in points if (point.components.backward or 0) < GONE * first), None)


def saving(report: ProfileReport) -> tuple[int, float]:
    """The largest batch that both fit, and the share of full fine-tuning's memory that LoRA saves in it."""
    totals = {
        kind: {
            point.batch: point.components.total
            for series in report.series
            if series.workload.kind is kind
            for point in series.points
        }
        for kind in (Kind.FULL, Kind.LORA)
    }
    batch = max(totals[Kind.FULL].keys() & totals[Kind.LORA].keys())
    return batch, 1 - totals[Kind.LORA][batch] / totals[Kind.FULL][batch]


def publish(out: Path = RESULTS, figure: Path = FIGURE) -> None:
    """Draws the figure and updates the keys in summary.json, from the result in `out`."""
    content = json.loads((out / NAME).read_text())
    reports = msgspec.convert(content["reports"], list[ProfileReport])
    draw(figure, reports)
    paper = reports[0]
    batch, saved = saving(paper)
    found: dict[str, Key] = {f"vram.figure_4_1.lora_saving.b{batch}": (round(saved, 4), "share", None, content["run"])}
    if (gone := gone_at(paper)) is not None:
        target = f"about {PAPERS_GONE} in the paper"
        found["vram.figure_4_1.backward_gone"] = gone, "rows", target, content["run"]
    update_summary(out, "memory/vram_profile.py", NAME, found)


def draw(path: Path, reports: Sequence[ProfileReport]) -> None:
    """The paper's profile; the others beside it, `<name>_<dtype>_<backend>`."""
    for number, report in enumerate(reports):
        beside = path.with_stem(f"{path.stem}_{report.dtype}_{report.series[0].backend}")
        save_figure(beside if number else path, report)


def show(request: ProfileRequest) -> None:
    """Prints the tables of a profile."""
    report = profile(request, lambda step: print(f"{step.done + 1}/{step.total}  {step.text}", flush=True))
    console = Console()
    console.print(source_text(report), highlight=False, soft_wrap=True)
    for series in report.series:
        console.print(series_table(series), *notes(series), sep="\n", highlight=False)


def main() -> None:
    parser = make_parser(__doc__, tiny="a small shape, to try the script")
    parser.add_argument(
        "--plot", nargs="*", type=Path, help="take in the result named, draw, put the keys in summary.json, and stop"
    )
    parser.add_argument("--model", help="print tables of this base: a folder, or 'bundled'; only its config is read")
    parser.add_argument("--ranks", nargs="*", type=int, default=[16], help="ranks of LoRA")
    parser.add_argument("--targets", nargs="*", help="linear modules to adapt; default: all")
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 2, 4, 8], help="rows of a batch")
    parser.add_argument("--lengths", nargs="*", type=int, default=[512], help="tokens of a row")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--backend", choices=[*Backend], default=Backend.COSERVE, help="whose passes run")
    parser.add_argument("--predict", action="store_true", help="predict with fake tensors although there is a GPU")
    given = parser.parse_args()
    if given.model is not None:
        request = ProfileRequest(
            model=given.model,
            workloads=make_workloads(given.ranks, (given.targets,)),
            batches=tuple(sorted(given.batches)),
            lengths=tuple(given.lengths),
            backends=(Backend(given.backend),),
            dtype=given.dtype,
            predict=given.predict,
        )
        show(request)
        return
    if given.plot is not None:
        for file in given.plot:
            shutil.copyfile(file, RESULTS / NAME)
        publish()
        return
    measure(given.out, given.commit, tiny=given.tiny)
    reports = msgspec.convert(json.loads((given.out / NAME).read_text())["reports"], list[ProfileReport])
    draw(given.out / FIGURE.name, reports)
    print(
        "M_backward has gone at",
        gone_at(reports[0]),
        "rows; LoRA saves",
        "{1:.1%} at {0} rows".format(*saving(reports[0])),
    )


if __name__ == "__main__":
    main()
