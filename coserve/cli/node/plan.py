"""The command `coserve plan`: how many adapters of a mixture of experts must fit on the GPUs, and on how many."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from coserve.cli.common import AsJson, print_json
from coserve.core.errors import InvalidRequest
from coserve.core.types import DEFAULT_RANK
from coserve.workloads.distributions import Popularity, Shape, shares
from coserve.workloads.provisioning import Hardware, MoeShape, immediate_admission, least_capacity, plan_servers

GB = 1e9
SHARES = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
"""Capacities in the table, as fractions of all adapters."""


def plan(
    model: Annotated[Path, typer.Argument(help="a folder with the config.json of a mixture of experts")],
    adapters: Annotated[int, typer.Option(help="adapters in all", min=1)] = 512,
    exponent: Annotated[
        float, typer.Option(help="popularity: the i-th adapter has i ** -EXPONENT of the requests; 0: all alike", min=0)
    ] = 1.2,
    trace: Annotated[
        Path | None,
        typer.Option(help="instead of --adapters and --exponent: JSON lines with `adapter` or `model`, one a request"),
    ] = None,
    batch: Annotated[int, typer.Option(help="requests that run at once in an engine", min=1)] = 64,
    engines: Annotated[int, typer.Option(help="engines that share the adapters", min=1)] = 1,
    target: Annotated[
        float, typer.Option(help="share of requests that must not wait for room: 0.95 for a P95 of the first token")
    ] = 0.95,
    tpot: Annotated[float, typer.Option(help="seconds between tokens", min=1e-4)] = 0.1,
    rank: Annotated[int, typer.Option(help="rank of each expert's pair", min=1)] = DEFAULT_RANK,
    gpu_gb: Annotated[float, typer.Option(help="GB for adapters on one GPU", min=0.001)] = 120.0,
    link_gb: Annotated[float, typer.Option(help="GB a second between GPUs, in one direction", min=0.001)] = 300.0,
    latency_us: Annotated[float, typer.Option(help="microseconds of a message or kernel", min=0)] = 10.0,
    as_json: AsJson = False,
) -> None:
    """Plan GPU memory for the adapters of a mixture of experts, by InfiniLoRA's model of admission: how many adapters
    must fit so that requests are admitted at once, and how many GPUs of a separate LoRA server would hold and compute
    them. A prediction: nothing is started or measured."""
    shape = read_shape(model)
    found = read_trace(trace) if trace is not None else shares(Popularity(Shape.POWER_LAW, exponent), adapters)
    running = batch * engines
    capacity = least_capacity(found, running, target)
    hardware = Hardware(memory=gpu_gb * GB, link=link_gb * GB, latency=latency_us * 1e-6)
    server = plan_servers(shape, rank, capacity, found, batch=batch, engines=engines, tpot=tpot, hardware=hardware)
    table = {size: immediate_admission(found, running, size) for size in _sizes(len(found), capacity)}
    if as_json:
        answer = {
            "adapters": len(found),
            "adapter_bytes": shape.adapter_bytes(rank),
            "capacity": capacity,
            "admission": {str(size): share for size, share in table.items()},
            "server": server,
        }
        print_json(answer)
        return
    view = Table(title=f"{len(found)} adapters of rank {rank}, {running} requests at once", title_justify="left")
    for name in ("adapters that fit", "GB", "admitted at once"):
        view.add_column(name, justify="right")
    for size, share in table.items():
        bold = "bold" if size == capacity else None
        view.add_row(str(size), f"{size * shape.adapter_bytes(rank) / GB:,.1f}", f"{share:.1%}", style=bold)
    Console().print(view)
    gpus = "1 GPU" if server.gpus == 1 else f"{server.gpus} GPUs"
    command = f"coserve serve --lora-server {server.gpus} --lora-server-ep {server.ep}"
    if engines > 1:
        command = f"coserve lora-server FOLDER --servers {server.gpus}, and {command} --lora-server-at FOLDER"
        command += "; unless servers see the daemons' GPUs, messages take longer than this counts"
    parts = " + ".join(f"{1e6 * one:.0f}" for one in (server.receive, server.compute, server.send))
    print(
        f"{capacity} adapters must fit. Apart from the engines: {gpus} (experts among {server.ep}, layers "
        f"among {server.pp}), {parts} microseconds a layer to receive, compute and send; bound by {server.bound}: "
        f"{command}"
    )


def _sizes(adapters: int, capacity: int) -> list[int]:
    return sorted({capacity, *(max(1, round(part * adapters)) for part in SHARES)})


def read_shape(model: Path) -> MoeShape:
    """Read a mixture's sizes from its config. Raises `InvalidRequest` if it has no experts."""
    file = model / "config.json" if model.is_dir() else model
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"expected a folder with a config.json, got {str(model)!r}", field="model") from error
    config = config.get("text_config") or config

    def size(*names: str) -> int:
        found = next((config[name] for name in names if isinstance(config.get(name), int)), None)
        if found is None:
            raise InvalidRequest(f"expected a mixture of experts: its config has no {names[0]}", field="model")
        return int(found)

    return MoeShape(
        layers=size("num_hidden_layers") - _dense_layers(config),
        hidden=size("hidden_size"),
        inner=size("moe_intermediate_size", "intermediate_size"),
        experts=size("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
        chosen=size("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k"),
    )


def _dense_layers(config: Mapping[str, object]) -> int:
    """Count the layers without experts, as the families' configs tell."""
    kinds = config.get("mlp_layer_types") or config.get("moe_layer_freq")
    if isinstance(kinds, list):
        return sum(kind in ("dense", 0) for kind in kinds)
    dense = config.get("mlp_only_layers")
    first = config.get("first_k_dense_replace") or config.get("moe_layer_start_index")
    return first if isinstance(first, int) else len(dense) if isinstance(dense, list) else 0


def read_trace(file: Path) -> list[float]:
    """Read each adapter's fraction of the requests from JSON lines, the most popular first. Left out are requests to
    the base (`adapter` null) and, in traces of `coserve bench`, lines that are no requests."""
    count = Counter[str]()
    try:
        with file.open() as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if isinstance(row, dict) and row.get("type", "prompt") != "prompt":
                    continue
                if not isinstance(row, dict) or not {"adapter", "model"} & row.keys():
                    raise InvalidRequest(f"line {number}: expected an object with `adapter` or `model`", field="trace")
                name = row["adapter"] if "adapter" in row else row["model"]
                if name is not None:
                    count[str(name)] += 1
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"expected JSON lines, got {str(file)!r}: {error}", field="trace") from error
    if not count:
        raise InvalidRequest("expected at least one request for an adapter", field="trace")
    return [found / count.total() for _, found in count.most_common()]
