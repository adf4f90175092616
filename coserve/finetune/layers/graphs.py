"""Compiled layers as CUDA graphs: a layer's forward or backward is one launch, for batches of one shape.

Without them, the host needs longer to launch a small batch than the GPU to compute it. The first batch of a shape runs
without graphs, the second is captured layer by layer, and each further one is copied into the graphs' static inputs. T
packed tokens.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial

from coserve.admission.micro_batch import LEAST_STEP, MOST_SHAPES, padded
from coserve.core.gpu_memory import Kept
from coserve.finetune.layers.compiled import CompiledLayerPass
from coserve.finetune.layers.graph_passes import (
    CapturePass,
    PooledPass,
    ReplayPass,
    ShapeGraphs,
    WarmUpPass,
    copied,
    key_of,
)
from coserve.finetune.layers.interface import LayerPass
from coserve.kernels.attention.fixed import FixedAttention, limits
from coserve.kernels.attention.packed import PackedAttention
from coserve.kernels.gpu.graph_memory import Recorder
from coserve.kernels.lora.interface import PreparedLora
from coserve.model.layers import LayerInputs
from coserve.model.training.compiled_layers import CompiledLayers

log = logging.getLogger(__name__)

NO_MEMORY = "there is not enough memory"
NOT_CAPTURED = (
    "training: layers of jobs whose LoRA rank is no multiple of 8, as of an adapter's ranks by site, and of DoRA jobs, "
    "run without CUDA graphs"
)
RECURRENT = "recurrent layers are not computed by kernels"
MOST_RELEASES = 3
"""Out-of-memory events after which graphs are off until no job is left."""


class LayerGraphs:
    """CUDA graphs of compiled training layers, for the most frequent micro-batch shapes, in one memory pool."""

    def __init__(
        self,
        compiled: CompiledLayers,
        make: Callable[[], Recorder],
        *,
        max_shapes: int = MOST_SHAPES,
        evict_after: int = 64,
        batches_without: int = 64,
        least_step: int = LEAST_STEP,
        ranks: bool = False,
    ) -> None:
        """`make` creates a new memory pool. At most `max_shapes` shapes have graphs; a shape is evicted for another if
        none of the last `evict_after` batches had it. After the pool was freed, the next `batches_without` batches run
        without graphs. `least_step`: see `padded`. `ranks`: other tensor-parallel ranks must pad batches alike and have
        graphs for the same shapes."""
        self._least_step, self._ranks = least_step, ranks
        self._compiled, self._make = compiled, make
        self._max_shapes, self._evict_after, self._batches_without = max_shapes, evict_after, batches_without
        self._shapes: dict[Hashable, ShapeGraphs] = {}
        """Least recently used first."""
        self._recorder: Recorder | None = None
        self._batches = self._releases = self._without_left = 0
        self._running: weakref.ref[LayerPass] | None = None
        self._stopped = ""
        """Why there are no graphs; empty if there may be."""
        self._without: str | None = None
        """Note on jobs that have no graphs while others may."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the operator on why some or all jobs have no graphs."""
        if self._stopped:
            return (_note(self._stopped),)
        return () if self._without is None else (self._without,)

    @property
    def bytes(self) -> int:
        """Size of the memory pool, which nothing else can use."""
        return 0 if self._recorder is None else self._recorder.bytes

    def padded_size(self, tokens: int) -> int:
        """Tokens of a training batch after padding for graphs."""
        return (
            padded(tokens, self._least_step) if self._compiled.ready and (self._ranks or not self._stopped) else tokens
        )

    @property
    def in_use(self) -> bool:
        """Whether there is a memory pool."""
        return self._recorder is not None

    def release(self) -> bool:
        """Free the pool after an out-of-memory or a failed capture. Returns whether memory was freed; with a suspended
        pass it is freed when the pass ends. The batch runs again without graphs; if memory runs out again, its job is
        given less."""
        if self._recorder is None and not self._ranks:
            return False
        freed = self._recorder is not None and not self._busy
        self._free()
        self._without_left = self._batches_without
        self._releases += 1
        if self._releases == MOST_RELEASES:
            self.stop(NO_MEMORY)
        return freed

    def job_ended(self, *, last: bool) -> None:
        """Drop references to past batches' adapters; the next job may reuse the graphs. `last`: no job is left, so
        forget that memory ran out."""
        for shape in self._shapes.values():
            shape.lora.forget()
        if last:
            self._releases = self._without_left = 0
            self._without, self._stopped = None, "" if self._stopped == NO_MEMORY else self._stopped

    def yield_memory(self) -> None:
        """Free the pool for a training batch that runs other layers than these; call it before such a batch. Some
        batches then run without graphs, so that alternating jobs do not free and capture them over and over."""
        self._without_left = self._batches_without
        if not self._busy:
            self._free()

    def in_pool(self, layers: LayerPass) -> LayerPass:
        """Run compiled layers without graphs in the graphs' memory pool, if there is one that no other pass uses."""
        if self._recorder is None or self._busy:
            return layers
        one = PooledPass(layers, self._recorder)
        self._running = weakref.ref(one)
        return one

    @property
    def _busy(self) -> bool:
        """Whether a suspended pass may have tensors in the pool."""
        return self._running is not None and self._running() is not None

    def _free(self) -> None:
        self._shapes.clear()
        self._recorder = self._running = None

    def begin(self, inputs: LayerInputs, lora: PreparedLora, first: int, levels: Sequence[Kept]) -> LayerPass | None:
        """Begin a batch's pass; None if it has no graphs. See `CompiledLayerPass`."""
        if self._without_left:
            self._without_left -= 1
            return None
        if self._stopped or self._busy or not isinstance(inputs.attention, PackedAttention):
            return None
        if lora.structure is None:
            self._tell_without()
            return None
        self._batches += 1
        if self._recorder is None:
            self._recorder = self._make()
        key = _key(inputs, inputs.attention, lora, first, levels), self._compiled.cuts
        shape = self._shapes.pop(key, None) or self._new(inputs, lora, first, levels)
        if shape is None:
            return None
        self._shapes[key], shape.used = shape, self._batches
        if shape.warm and not shape.attention.capturable:
            self.stop("attention runs sequence by sequence")
            return None
        if shape.warm and not shape.attention.recurrence.capturable:
            self.stop(RECURRENT)
            return None
        shape.load(inputs, lora)
        one = self._pass_of(shape, self._recorder)
        self._running = weakref.ref(one)
        return one

    def _pass_of(self, shape: ShapeGraphs, recorder: Recorder) -> LayerPass:
        if shape.complete:
            return ReplayPass(shape)
        return CapturePass(shape, recorder, self.stop) if shape.warm else WarmUpPass(shape, recorder)

    def _new(self, inputs: LayerInputs, lora: PreparedLora, first: int, levels: Sequence[Kept]) -> ShapeGraphs | None:
        if len(self._shapes) >= self._max_shapes:
            oldest = next(iter(self._shapes))
            if self._batches - self._shapes[oldest].used < self._evict_after:
                return None
            del self._shapes[oldest]
        assert isinstance(inputs.attention, PackedAttention), "expected packed rows"
        attention = FixedAttention(inputs.attention.bounds, inputs.h_1TD.device)
        fixed, own = copied(replace(inputs, attention=attention)), lora.fixed()
        compiled = self._compiled.begin(fixed, own)
        if compiled is None:
            return None
        return ShapeGraphs(fixed, attention, own, partial(CompiledLayerPass, compiled, first, levels), first)

    def stop(self, reason: str) -> None:
        """Disable graphs from now on."""
        self._stopped = reason
        log.warning("%s", _note(reason))
        self._shapes.clear()

    def _tell_without(self) -> None:
        if self._without is None and not self._ranks:  # with several ranks the warm-up reports it
            self._without = NOT_CAPTURED
            log.warning("%s", NOT_CAPTURED)


def _key(
    inputs: LayerInputs, attention: PackedAttention, lora: PreparedLora, first: int, levels: Sequence[Kept]
) -> Hashable:
    """Key of a batch shape: batches with the same key share graphs."""
    return key_of(inputs), limits(attention.bounds), lora.structure, first, tuple(levels)


def _note(reason: str) -> str:
    return f"training: layers run without CUDA graphs: {reason}"
