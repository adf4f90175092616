from __future__ import annotations

from collections.abc import Mapping

from coserve.core.types import AdapterRef, LoraSettings
from coserve.generate.execution.interface import StepInput
from coserve.kernels.lora.grouped import PerAdapterBackend
from coserve.kernels.lora.types import LoraPair
from coserve.memory.kv import KvCache
from coserve.model.base import wrap_base
from coserve.model.lora import LoraWeights
from tests.support.executors import eager
from tests.support.tiny_models import tiny_model


class Keeping(PerAdapterBackend):
    """Notes which adapters it is to forget."""

    def __init__(self) -> None:
        self.forgotten: list[Mapping[str, LoraPair]] = []

    def forget(self, adapter: Mapping[str, LoraPair]) -> None:
        self.forgotten.append(adapter)


def test_the_backend_forgets_an_adapter_that_lost_its_pages() -> None:
    backend = Keeping()
    base = wrap_base(tiny_model("gpt2"), name="gpt2", eos_token_ids=())
    executor = eager(
        base, KvCache(base.kv_shapes, pages=4, page_tokens=16, dtype=base.dtype, device=base.device), backend
    )
    ref, weights = AdapterRef("a", 1), LoraWeights(LoraSettings(), {})
    executor.launch(StepInput((ref,), []), [weights])
    executor.evicted(AdapterRef("b", 1))
    executor.evicted(ref)
    assert [own is weights.sites for own in backend.forgotten] == [True]
