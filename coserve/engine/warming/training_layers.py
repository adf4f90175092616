"""Creation of the compiled training layers, the same on every rank."""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext

from coserve.core.errors import UnsupportedBase
from coserve.engine.parts import EngineParts
from coserve.engine.spatial.training_stream import TrainingStream
from coserve.engine.warming.caches import Caches
from coserve.model.agreement import FailedTogether
from coserve.model.parallel.lora import Strategy
from coserve.model.training.compiled_layers import CompiledLayers

log = logging.getLogger(__name__)

FULLY_SHARDED = "training: with lora_sharding slora, layers of jobs without bd_blocks run without CUDA graphs"
EXPECTED = (FailedTogether, UnsupportedBase)
"""Errors whose message is a sufficient reason."""


def make_training_layers(
    parts: EngineParts, caches: Caches | None, training: TrainingStream | None = None
) -> tuple[CompiledLayers | None, tuple[str, ...]]:
    """Return the training layers, compiled or loaded from the caches, and notes for the operator. Tensor-parallel ranks
    call this together, and all of them have layers or none has; an error on only one rank ends it."""
    base = parts.base
    if base.device.type == "cpu":
        return None, ()
    began = time.monotonic()
    try:
        layers = parts.training_layers(caches, nullcontext if training is None else training.enter)
        layers.compile()
    except Exception as error:  # a failing compiler may raise anything
        if base.sharding is not None and not isinstance(error, EXPECTED):
            raise
        return None, (_told("training: layers run operation by operation", error),)
    notes: tuple[str, ...] = (
        (FULLY_SHARDED,) if base.sharding is not None and base.sharding.strategy is Strategy.SLORA else ()
    )
    if layers.may_keep_less and caches is not None:
        notes += compile_levels(layers, caches)
    log.info("layers of training compiled in %.1f s", time.monotonic() - began)
    return layers, notes


def compile_levels(layers: CompiledLayers, caches: Caches) -> tuple[str, ...]:
    """Load the layers that keep less, if they were measured. Returns a note for the operator if there are none; jobs
    then run without them."""
    try:
        costs = caches.level_costs()
        if costs is None:
            raise UnsupportedBase("the warm-up could not compile or measure others")
        layers.compile_levels(costs)
    except Exception as error:  # noqa: BLE001 - as above
        return (_told("training: layers keep all or run their forward again", error),)
    finally:
        layers.forget_examples()
    return ()


def _told(what: str, error: Exception) -> str:
    note = f"{what}: {(str(error) or type(error).__name__).splitlines()[0]}"
    log.warning("%s", note, exc_info=None if isinstance(error, EXPECTED) else error)
    return note
