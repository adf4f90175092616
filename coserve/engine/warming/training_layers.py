"""The compiled layers of training as every rank makes them."""

from __future__ import annotations

import logging
from contextlib import nullcontext

from coserve.engine.parts import EngineParts
from coserve.engine.spatial.training_stream import TrainingStream
from coserve.errors import UnsupportedBase
from coserve.generate.execution.start import WarmKernels
from coserve.model.agreement import FailedTogether
from coserve.model.training.compiled_layers import CompiledLayers
from coserve.parallel.lora import Strategy

log = logging.getLogger(__name__)

FULLY_SHARDED = "training: with lora_sharding slora, layers of jobs without bd_blocks run without CUDA graphs"


def make_training_layers(
    parts: EngineParts, warm: WarmKernels | None, training: TrainingStream | None = None
) -> tuple[CompiledLayers | None, tuple[str, ...]]:
    """The layers of training that can be compiled, and notes for the operator. Ranks that share a base compile them now, all at the same
    time, and all of them have some or none has: an error that is one rank's alone ends it."""
    try:
        layers = parts.training_layers(warm, nullcontext if training is None else training.enter)
        if parts.base.sharding is not None:
            layers.compile()
    except Exception as error:  # whatever a compiler raises that does not work
        if parts.base.sharding is not None and not isinstance(error, FailedTogether | UnsupportedBase):
            raise
        if parts.base.device.type == "cpu":
            return None, ()
        note = training_note(error)
        log.warning("%s", note, exc_info=None if isinstance(error, FailedTogether | UnsupportedBase) else error)
        return None, (note,)
    sharding = parts.base.sharding
    return layers, (FULLY_SHARDED,) if sharding is not None and sharding.strategy is Strategy.SLORA else ()


def compile_layers(layers: CompiledLayers) -> str:
    """Compile them; returns a note for the operator where that failed."""
    try:
        layers.compile()
    except Exception as error:
        note = training_note(error)
        log.warning("%s", note, exc_info=error)
        return note
    return ""


def training_note(why: Exception) -> str:
    """For the operator: jobs run the base's own layers."""
    return f"training: layers run operation by operation: {first_line(why)}"


def first_line(error: Exception) -> str:
    """What it says, or its name."""
    return (str(error) or type(error).__name__).splitlines()[0]
