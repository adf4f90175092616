"""A request's latency targets: its own, otherwise those of its class. Pure."""

from __future__ import annotations

from coserve.config import Config
from coserve.core.schemas import GenerateRequest
from coserve.core.types import Slo


def targets_of(request: GenerateRequest, config: Config, *, device: str, sheds: bool = True) -> Slo:
    """Return the latency targets. `device`: the base's. `sheds`: whether the request may be shed for its deadline."""
    batch = request.slo_class == "batch"
    ttft, tpot = (config.slo_batch_ttft, config.slo_batch_tpot) if batch else config.targets(device=device)
    sheds = sheds and not config.policy_class.in_batches
    every, explicit = sheds and config.shed == "all", sheds and config.shed == "explicit"
    return Slo(
        ttft=request.slo_ttft or ttft,
        tpot=request.slo_tpot or tpot,
        e2e=request.slo_e2e,
        batch=batch,
        shed=every or (explicit and (request.slo_class == "interactive" or request.slo_ttft is not None)),
        shed_e2e=(every or explicit) and request.slo_e2e is not None,
    )
