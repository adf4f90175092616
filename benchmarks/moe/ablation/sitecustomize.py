"""Turns parts of LoRA servers off in a benchmark's daemon: Python runs this file at its start where the folder is on
PYTHONPATH. `ABLATION`: `overlap`, the engine waits for the terms before it multiplies with the base's weights;
`layerwise`, a server answers once it has read all of its layers; `placement`, servers have consecutive layers, and all
experts of these."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

if {"coserve.engine.process", "coserve.engine.lora_server.process"} & {*sys.orig_argv}:
    from torch import Tensor

    from coserve.core.types import BaseSpec
    from coserve.engine.lora_server import placement, remote_step, running, server
    from coserve.engine.lora_server.reading import PairsReader
    from coserve.kernels.lora.experts.interface import Pending

    match os.environ["ABLATION"]:
        case "overlap":

            def at_once(method: Callable[..., Pending]) -> Callable[..., Pending]:
                def wait(*args: Tensor) -> Pending:
                    found = method(*args)()
                    return lambda: found

                return wait

            for name in ("gate_up", "down"):
                setattr(remote_step.RemoteStep, name, at_once(getattr(remote_step.RemoteStep, name)))
        case "layerwise":

            def in_one(self: PairsReader, names: Sequence[str]) -> list[list[str]]:
                return [[*names]] if names else []

            PairsReader._runs = in_one  # type: ignore[method-assign]
        case "placement":

            def consecutive(spec: BaseSpec, index: int, servers: int, ep: int) -> placement.ServerPart:
                layers = sorted({site.layer for site in spec.experts.values()})
                own = layers[len(layers) * index // servers : len(layers) * (index + 1) // servers]
                whole = placement.part_of(spec, 0, 1, 1)
                return replace(whole, sites={name: site for name, site in whole.sites.items() if site.layer in own})

            running.part_of = server.part_of = consecutive  # type: ignore[attr-defined]
        case other:
            raise SystemExit(f"expected overlap, layerwise or placement, got {other!r}")
