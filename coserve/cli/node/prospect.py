"""`coserve memory MODEL`: which GPU a base, its adapters, requests and jobs need."""

from __future__ import annotations

from importlib import import_module

from msgspec.structs import replace
from rich.console import Console
from rich.table import Column, Table

from coserve.admission.prospect import GPUS, Wish, fit, needed
from coserve.cli.common import print_json
from coserve.core.gpu_memory import GIB, BaseSizes

USES = {
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


def show_prospect(
    model: str, wish: Wish, *, dtype: str, quantization: str, mla_cache: str, trust_remote_code: bool, as_json: bool
) -> None:
    """Print the memory by use and which sizes of GPU suffice, from the config of `model`."""
    # torch and transformers, which the other commands do without
    sizes: BaseSizes = import_module("coserve.model.formats.sizes").read_sizes(
        model, dtype, quantization=quantization, mla_cache=mla_cache, trust_remote_code=trust_remote_code
    )
    wish = replace(wish, context=min(wish.context, sizes.spec.context))  # no request is longer than the base's context
    need, fits = needed(sizes, wish), [fit(sizes, wish, gb) for gb in GPUS]
    if as_json:
        print_json({"wish": wish, "need": need, "total": need.total, "gpus": fits})
        return
    console = Console()
    gib, title = Column("GiB", justify="right"), f"GPU memory of {model}: GiB"
    table = Table("use", gib, title=title, title_justify="left")
    for field, text in USES.items():
        table.add_row(text, _gib(getattr(need, field)))
    table.add_section()
    table.add_row("in all", _gib(need.total))
    console.print(table)
    requests = Column(f"requests of {wish.context} tokens at once", justify="right")
    title = f"GPUs, with {wish.fraction:.0%} of their memory"
    table = Table("GPU", Column("GiB", justify="right"), "fits", requests, title=title, title_justify="left")
    for one in fits:
        table.add_row(f"{one.gb} GB", _gib(one.budget), "yes" if one.fits else "no", str(one.requests))
    console.print(table)


def _gib(size: int) -> str:
    return f"{size / GIB:,.2f}"
