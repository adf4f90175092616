"""The ETS paper's forward and backward: a transformers model, bare or wrapped by PEFT, on a rectangular batch.

`with torch.no_grad(): model(batch)`, `logits = model(batch)` and `logits.sum().backward()`, as in section 4.2.2. The
model is in eval mode, as `from_pretrained` leaves it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import PreTrainedModel

from benchmarks.memory.profile.passes import Passes, settled
from benchmarks.memory.profile.request import Kind, Workload
from coserve.core.errors import ConfigError, InvalidRequest
from coserve.finetune.memory_profiling import MemoryMeter
from coserve.model.fingerprint import is_fake


class PeftTrial:
    """Implements `Trial` for a transformers model."""

    def __init__(self, model: PreTrainedModel, meter: MemoryMeter) -> None:
        self._model, self._meter = model.eval().requires_grad_(False), meter
        self._loaded = settled(meter)

    @contextmanager
    def workload(self, workload: Workload) -> Iterator[Passes]:
        model = self._model
        match workload.kind:
            case Kind.INFERENCE:
                yield Passes(lambda batch, length: _Case(model, batch, length), False, self._loaded)
            case Kind.LORA:
                before = settled(self._meter)
                with _adapted(model, workload) as adapted:
                    weights = self._loaded + settled(self._meter) - before
                    yield Passes(lambda batch, length: _Case(adapted, batch, length), True, weights)
            case Kind.FULL:
                model.requires_grad_(True)
                try:
                    yield Passes(lambda batch, length: _Case(model, batch, length), True, self._loaded)
                finally:
                    model.requires_grad_(False)


@contextmanager
def _adapted(model: PreTrainedModel, workload: Workload) -> Iterator[nn.Module]:
    """Wrap the model with PEFT. Raises `ConfigError` without PEFT, `InvalidRequest` for targets that PEFT does not
    find."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ConfigError("the backend peft needs the package peft for LoRA: pip install peft") from error
    assert workload.rank is not None, "a LoRA has a rank"
    targets = "all-linear" if workload.targets is None else list(workload.targets)
    fake = is_fake(next(model.parameters()))
    with warnings.catch_warnings(), unset_fake_temporarily():
        warnings.simplefilter("ignore")  # PEFT warns that Conv1D stores its weight transposed
        try:
            adapted = get_peft_model(model, LoraConfig(r=workload.rank, target_modules=targets), low_cpu_mem_usage=fake)
        except ValueError as error:
            raise InvalidRequest(str(error).split(". ")[0], field="targets") from error
    if fake:  # PEFT cannot move fake parameters, so the adapter is on meta
        for module in adapted.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter.device.type == "meta":
                    setattr(module, name, nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype)))
    try:
        yield adapted
    finally:
        adapted.unload()
        model.requires_grad_(False)


class _Case:
    def __init__(self, model: nn.Module, batch: int, length: int) -> None:
        self._model = model
        parameter = next(model.parameters())
        self._ids_BL = torch.ones(batch, length, dtype=torch.long, device=parameter.device)

    @torch.no_grad()
    def no_grad(self) -> None:
        self._model(self._ids_BL)

    def train(self) -> Iterator[None]:
        logits: Tensor = self._model(self._ids_BL).logits
        yield
        logits.sum().backward()  # type: ignore[no-untyped-call]
        for parameter in self._model.parameters():
            parameter.grad = None
