"""Measurements that a start's compiling processes have left in the cache folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from coserve.core.gpu_memory import TrainingCosts
from coserve.engine.warmup.key import GEMM_FOLDER
from coserve.engine.warmup.parts import GEMMS, TRAINING_LAYERS, TRAINING_LEVELS, WarmUpTask
from coserve.kernels.lora.types import FrozenWeight
from coserve.memory.profile import load_layer_costs
from coserve.model.gemm_choice import GemmChoice, load_gemms


class Caches:
    """Reads cached measurements for this base and these settings."""

    def __init__(self, task: WarmUpTask) -> None:
        self._folder, self._shape = Path(task.folder) / GEMM_FOLDER, task.shape

    def path(self, part: str) -> Path:
        """Path of the file with a warm-up part's measurements."""
        return self._folder / f"{self._shape}-{part}.json"

    def gemms(self, stacked: Sequence[FrozenWeight], device: torch.device) -> GemmChoice | None:
        """The fastest GEMM kernels; None if they were not measured."""
        return load_gemms(map(self.path, GEMMS), stacked, device)

    def layer_costs(self) -> TrainingCosts | None:
        """Memory of compiled training layers; None if it was not measured."""
        return load_layer_costs(self.path(TRAINING_LAYERS))

    def level_costs(self) -> TrainingCosts | None:
        """As `layer_costs`, plus memory and times of layers that keep fewer activations; None if they were not
        measured."""
        return load_layer_costs(self.path(TRAINING_LEVELS))
