"""Warnings at the start of a command that runs a base: unknown environment variables, and settings without effect."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping

from coserve.config import Config, setting_sources
from coserve.core.hints import variable_hint
from coserve.queues.policies.choice import POLICIES

OTHER_VARIABLES = ("COSERVE_URL", "COSERVE_DEBUG", "COSERVE_FAILPOINTS")
"""Environment variables that are no settings of the daemon."""
KUBERNETES = re.compile(r"COSERVE_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
"""Variables that Kubernetes sets for a Service named coserve, or coserve-something."""
KUBERNETES_PORT = re.compile(r"COSERVE_(\w+_)?PORT")
"""Kubernetes' variable for the port, whose value is an address such as `tcp://10.0.0.1:80`."""
POLICIES_OF = {
    setting: tuple(name for name, policy in POLICIES.items() if setting in policy.settings)
    for setting in dict.fromkeys(setting for policy in POLICIES.values() for setting in policy.settings)
}
"""Maps each setting that only some policies read to the names of these policies."""
OF_A_GPU = ("memory_fraction", "compile", "pinned_memory_bytes")
"""Settings without effect on a CPU."""


def start_warnings(config: Config, given: Mapping[str, object], environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return a line for each unknown variable and for each given setting that does less than its value says.

    `config`: the result of `load_config` for `given` and `environ`.
    """
    return [*unknown_variables(environ), *_without_effect(config, setting_sources(given, environ))]


def unknown_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return a line for each `COSERVE_` variable that is not a setting, except those that Kubernetes sets."""
    settings = [f.name for f in dataclasses.fields(Config)]
    known = {f"COSERVE_{name.upper()}" for name in settings} | set(OTHER_VARIABLES)
    return [
        f"{name} is no setting{variable_hint(name, settings)}"
        for name in sorted(environ)
        if name.startswith("COSERVE_") and name not in known and not _from_kubernetes(name, environ[name])
    ]


def _from_kubernetes(name: str, value: str) -> bool:
    return bool(KUBERNETES.fullmatch(name) or (KUBERNETES_PORT.fullmatch(name) and "://" in value))


def _without_effect(config: Config, sources: Mapping[str, str]) -> Iterator[str]:
    given = {name for name, source in sources.items() if source != "default"}
    devices = ("cpu", "cuda") if config.device == "auto" else (config.device,)
    possible = {config.resolved(device=device).policy for device in devices}
    for name, policies in POLICIES_OF.items():
        if name in given and possible.isdisjoint(policies):
            yield f"{name} has no effect with policy {config.policy!r}, only with {' or '.join(policies)}"
    if config.device == "cpu":
        yield from (f"{name} has no effect on a CPU" for name in OF_A_GPU if name in given)
    if "lora_sharding" in given and config.tp == 1:
        yield "lora_sharding has no effect on one GPU, only with tp above 1"
    if {"memory_fraction", "kv_tokens"} <= given and config.kv_tokens is not None:
        yield "memory_fraction has no effect with kv_tokens"
    if not config.policy_class.in_batches:
        return
    size, most = config.inference_batch_size, config.max_running
    if "inference_batch_size" in given and size > most:
        yield f"inference_batch_size {size} is above max_running: a batch has at most {most} requests"
    if "max_running" in given and most > size:
        yield (
            f"max_running {most} is above inference_batch_size: with policy {config.policy!r} a batch runs to its end, "
            f"so at most {size} requests run at once"
        )
