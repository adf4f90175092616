"""The command `coserve memory`: GPU memory of a daemon by component, or the memory that a base will need."""

from __future__ import annotations

from contextlib import closing
from importlib import import_module
from typing import Annotated, Literal

import typer
from msgspec.structs import replace
from rich.console import Console
from rich.table import Column, Table

from coserve.admission.prospect import GPUS, Wish, fit, needed
from coserve.cli.common import DEFAULT_URL, AsJson, Key, Url, connect, print_json
from coserve.core.errors import ConfigError, EngineUnavailable
from coserve.core.gpu_memory import GIB, USES, BaseSizes, JobUse, MemoryUse
from coserve.core.health import starting_line
from coserve.core.types import DEFAULT_RANK

MIB = 1 << 20
NEEDS = {
    "weights": "base",
    "context": "CUDA context and libraries",
    "graphs": "CUDA graphs",
    "step": "a generation step",
    "kv": "keys and values of requests",
    "states": "recurrent states of requests",
    "adapters": "adapters",
    "jobs": "adapters, gradients and optimizers of jobs",
    "training": "a training micro-batch",
}


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
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="with MODEL: of its weights")
    ] = "bfloat16",
    quantization: Annotated[Literal["none", "fp8", "nf4"], typer.Option(help="with MODEL: of its weights")] = "none",
    kv_cache_dtype: Annotated[Literal["auto", "fp8"], typer.Option(help="with MODEL: of keys and values")] = "auto",
    mla_cache: Annotated[
        Literal["latents", "heads"], typer.Option(help="with MODEL: what latent attention caches")
    ] = "latents",
    tp: Annotated[
        int, typer.Option(help="with MODEL: GPUs that share the base: 1, 2, 4 or 8; sizes are those of each")
    ] = 1,
    trust_remote_code: Annotated[bool, typer.Option(help="with MODEL: run code that comes with its config")] = False,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Show what uses the GPU memory of a running daemon, and how much each training job takes. With MODEL, predict
    which GPU it needs: from its config.json alone, without a daemon and without a GPU.
    """
    if tp not in (1, 2, 4, 8):
        raise typer.BadParameter(f"expected 1, 2, 4 or 8, got {tp}", param_hint="--tp")
    if model is not None:
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
        # torch and transformers, which the other commands do without
        sizes: BaseSizes = import_module("coserve.model.formats.sizes").read_sizes(
            model,
            dtype,
            quantization=quantization,
            mla_cache=mla_cache,
            ranks=tp,
            trust_remote_code=trust_remote_code,
        )
        _show_prospect(model, sizes, wish, as_json)
    else:
        _show_use(url, key, as_json)


def _show_use(url: str, key: str | None, as_json: bool) -> None:
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


def _show_prospect(model: str, sizes: BaseSizes, wish: Wish, as_json: bool) -> None:
    """Print the memory that a base needs, by use, and which sizes of GPU suffice."""
    wish = replace(wish, context=min(wish.context, sizes.spec.context))  # no request is longer than the base's context
    need, fits = needed(sizes, wish), [fit(sizes, wish, gb) for gb in GPUS]
    if as_json:
        print_json({"wish": wish, "tp": sizes.ranks, "need": need, "total": need.total, "gpus": fits})
        return
    console = Console()
    each = "" if sizes.ranks == 1 else f" on each of {sizes.ranks} GPUs"
    gib, title = Column("GiB", justify="right"), f"GPU memory of {model}{each}: GiB"
    table = Table("use", gib, title=title, title_justify="left")
    for field, text in NEEDS.items():
        table.add_row(text, _gib(getattr(need, field)))
    table.add_section()
    table.add_row("in all", _gib(need.total))
    console.print(table)
    requests = Column(f"requests of {wish.context} tokens at once", justify="right")
    title = f"GPUs{'' if sizes.ranks == 1 else f', {sizes.ranks} of them'}, with {wish.fraction:.0%} of their memory"
    table = Table("GPU", Column("GiB", justify="right"), "fits", requests, title=title, title_justify="left")
    for one in fits:
        table.add_row(f"{one.gb} GB", _gib(one.budget), "yes" if one.fits else "no", str(one.requests))
    console.print(table)


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


def _gib(size: int) -> str:
    return f"{size / GIB:,.2f}"
