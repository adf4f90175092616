"""The command `coserve memory`: GPU memory of a daemon by component, or the memory that a base will need."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from coserve.admission.prospect import Wish
from coserve.admission.shapes import ITEMSIZE
from coserve.cli.common import DEFAULT_URL, AsJson, Key, Url, connect, print_json
from coserve.cli.node.prospect import show_prospect
from coserve.core.errors import ConfigError, EngineUnavailable
from coserve.core.gpu_memory import USES, JobUse, MemoryUse
from coserve.core.health import starting_line
from coserve.core.types import DEFAULT_RANK

MIB = 1 << 20
QUANTIZATIONS, CACHE_DTYPES, MLA_CACHES = ("none", "fp8", "nf4"), ("auto", "fp8"), ("latents", "heads")


def memory(
    model: Annotated[str | None, typer.Argument(help="a base: a folder with its config.json, or a hub name")] = None,
    adapters: Annotated[int, typer.Option(help="with MODEL: adapters on the GPU at a time", min=0)] = 32,
    rank: Annotated[int, typer.Option(help="with MODEL: rank of adapters and jobs", min=1)] = DEFAULT_RANK,
    requests: Annotated[int, typer.Option(help="with MODEL: requests that run at once", min=1)] = 32,
    context: Annotated[int, typer.Option(help="with MODEL: tokens of a request, prompt and answer", min=1)] = 2048,
    jobs: Annotated[int, typer.Option(help="with MODEL: jobs that train at once; 0: none", min=0)] = 1,
    micro_batch_tokens: Annotated[
        int, typer.Option(help="with MODEL: most tokens of one training forward", min=1)
    ] = 2048,
    memory_fraction: Annotated[
        float, typer.Option(help="with MODEL: share of the GPU's memory for the engine", min=0.01, max=1)
    ] = 0.9,
    dtype: Annotated[str, typer.Option(help="with MODEL: float32, bfloat16 or float16")] = "bfloat16",
    quantization: Annotated[str, typer.Option(help="with MODEL: none, fp8 or nf4")] = "none",
    kv_cache_dtype: Annotated[str, typer.Option(help="with MODEL: auto or fp8")] = "auto",
    mla_cache: Annotated[str, typer.Option(help="with MODEL: latents or heads")] = "latents",
    trust_remote_code: Annotated[bool, typer.Option(help="with MODEL: run code that comes with its config")] = False,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Show what uses the GPU memory of a running daemon, and how much each training job takes. With MODEL, predict
    which GPU it needs: from its config.json alone, without a daemon and without a GPU.
    """
    if model is not None:
        if dtype not in ITEMSIZE:
            raise typer.BadParameter(f"--dtype: expected one of {', '.join(ITEMSIZE)}, got {dtype!r}")
        if quantization not in QUANTIZATIONS:
            raise typer.BadParameter(
                f"--quantization: expected one of {', '.join(QUANTIZATIONS)}, got {quantization!r}"
            )
        if kv_cache_dtype not in CACHE_DTYPES:
            raise typer.BadParameter(f"--kv-cache-dtype: expected auto or fp8, got {kv_cache_dtype!r}")
        if mla_cache not in MLA_CACHES:
            raise typer.BadParameter(f"--mla-cache: expected latents or heads, got {mla_cache!r}")
        wish = Wish(
            adapters=adapters,
            rank=rank,
            requests=requests,
            context=context,
            jobs=jobs,
            micro_batch_tokens=micro_batch_tokens,
            fraction=memory_fraction,
            kv_cache_dtype=kv_cache_dtype,
        )
        show_prospect(
            model,
            wish,
            dtype=dtype,
            quantization=quantization,
            mla_cache=mla_cache,
            trust_remote_code=trust_remote_code,
            as_json=as_json,
        )
        return
    with closing(connect(url, key)) as client:
        health = client.health()
    if (use := health.memory) is None:
        if health.status == "starting":
            raise EngineUnavailable(starting_line(health.warming))
        raise ConfigError("the daemon plans no memory: it runs on a CPU, or kv_tokens is set")
    if as_json:
        print_json(use)
        return
    console = Console()
    console.print(use_table(use))
    print(
        f"for jobs: {mib(use.needed)} of {mib(use.training)} MiB needed; torch's peak: {mib(use.peak)} of "
        f"{mib(use.planned)} MiB planned"
    )
    if use.pinned:
        most = "" if use.pinned_limit is None else f" of {mib(use.pinned_limit)}"
        print(f"host memory, pinned: {mib(use.pinned)}{most} MiB for the state of jobs")
    if use.each:
        console.print(job_table(use))


def use_table(use: MemoryUse) -> Table:
    """Return a table of the components, which add up to the device's memory."""
    numbers = Column("MiB", justify="right"), Column("", justify="right")
    table = Table("use", *numbers, title="GPU memory: MiB", title_justify="left")
    for field, text in USES.items():
        size = getattr(use, field)
        table.add_row(text, mib(size), f"{size / max(use.total, 1):.1%}")
        if field == "pages":
            table.add_row("  of them adapters", mib(use.adapters), "")
    table.add_section()
    table.add_row("in all", mib(use.total), "")
    return table


def job_table(use: MemoryUse) -> Table:
    """Return a table of the jobs that have started. Only one job has activations at a time."""
    names = "adapter", "gradients", "optimizer", "activations", "tokens", "recomputed layers"
    numbers = (Column(name, justify="right") for name in names)
    table = Table("job", *numbers, title="Jobs: MiB", title_justify="left")
    for job in use.each:
        sizes = map(mib, (job.adapter, job.gradients, job.optimizer, job.activations))
        table.add_row(job.id, *sizes, str(job.micro_batch_tokens), _recomputed(job))
    return table


def _recomputed(job: JobUse) -> str:
    """Return the number of fully recomputed layers and, after a plus sign, of those recomputed except for attention."""
    partly = f"+{job.partly_recomputed_layers}" if job.partly_recomputed_layers else ""
    return f"{job.recomputed_layers}{partly} of {job.layers}"


def mib(size: int) -> str:
    """Return bytes as a text in MiB."""
    return f"{size / MIB:,.0f}"
