"""The policy that the settings name."""

from __future__ import annotations

from coserve.config import Config
from coserve.queues.policies.ets import Ets
from coserve.queues.policies.inference_first import InferenceFirst
from coserve.queues.policies.overlap import Overlap
from coserve.queues.policies.slack import Slack
from coserve.queues.policies.spatial import Spatial
from coserve.queues.policies.temporal_sharing import TemporalSharing
from coserve.queues.policy import Policy


def make_policy(config: Config, *, tpot: float | None = None) -> Policy:
    """`config`: with `auto`, which `Config.resolved` replaces where the device is known, takes turns as `slack`. `tpot`: seconds between the tokens of a usual request; None: unknown."""
    size, delay = config.batch_requests, config.inference_delay
    match config.policy:
        case "ets":
            return Ets(size, delay)
        case "ts":
            return TemporalSharing(config.ts_n, size, delay, "batch" if config.ts_unit == "batch" else "request")
        case "inference-first":
            return InferenceFirst()
        case "spatial":
            return Spatial()
        case "overlap":
            return Overlap(
                config.train_patience,
                floor=config.train_floor,
                weight=config.train_weight,
                tpot=tpot,
                overlapped=config.overlap_steps == "beside",
            )
        case _:
            return Slack(config.train_patience, floor=config.train_floor, weight=config.train_weight, tpot=tpot)
