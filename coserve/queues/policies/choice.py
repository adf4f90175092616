"""The policies that the settings can name."""

from __future__ import annotations

from coserve.queues.policies.inference_first import InferenceFirst
from coserve.queues.policies.overlap import Overlap
from coserve.queues.policies.paper import Ets, TemporalSharing
from coserve.queues.policies.slack import Slack
from coserve.queues.policies.spatial import Spatial
from coserve.queues.policy import NamedPolicy, Policy, PolicySettings

POLICIES: dict[str, type[NamedPolicy]] = {
    "slack": Slack,
    "ets": Ets,
    "ts": TemporalSharing,
    "inference-first": InferenceFirst,
    "spatial": Spatial,
    "overlap": Overlap,
}


def policy_class(name: str) -> type[NamedPolicy]:
    """Return the policy's class. `auto`, which `Config.resolved` replaces once the device is known, counts as
    `slack`."""
    return POLICIES.get(name, Slack)


def make_policy(settings: PolicySettings, *, tpot: float | None = None) -> Policy:
    """`tpot`: seconds between the tokens of a usual request; None: unknown."""
    return policy_class(settings.policy).made(settings, tpot)
