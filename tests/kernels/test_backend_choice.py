from __future__ import annotations

import pytest
import torch

from coserve.core.errors import ConfigError
from coserve.kernels.lora.backend import BACKENDS, choose_backend, make_backend
from coserve.kernels.lora.interface import LoraBackend
from tests.support.lora_backends import BLOCK_SPARSE, GROUPED, NAIVE, REFERENCE, SEGMENTED
from tests.support.lora_grids import GRIDS, adding, make_case, prepared, relative_error

CPU, GPU = torch.device("cpu"), torch.device("cuda")
TRITON = [BLOCK_SPARSE, SEGMENTED]


def test_auto_takes_our_kernels_on_a_gpu_and_torch_elsewhere() -> None:
    assert choose_backend("auto", GPU, torch.bfloat16).name == "segmented"
    assert choose_backend("auto", CPU, torch.bfloat16).name == "grouped"


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_can_be_asked_for_on_a_gpu(name: str) -> None:
    assert choose_backend(name, GPU, torch.bfloat16).name == name


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="got 'fast'"):
        choose_backend("fast", CPU, torch.float32)


@pytest.mark.parametrize("backend", TRITON)
def test_triton_without_a_gpu_is_refused(backend: LoraBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        choose_backend(backend.name, CPU, torch.float32)


@pytest.mark.parametrize("backend", TRITON)
def test_bfloat16_in_the_interpreter_is_refused(backend: LoraBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_backend(backend.name, CPU, torch.float16).name == backend.name
    with pytest.raises(ConfigError, match="got bfloat16"):
        choose_backend(backend.name, CPU, torch.bfloat16)
    case = make_case(GRIDS[1], torch.bfloat16)
    with pytest.raises(ConfigError, match="got bfloat16"):
        backend.prepare(case.segments, [{"site": pair} for pair in case.pairs if pair is not None], [])


@pytest.mark.parametrize("backend", [REFERENCE, NAIVE, GROUPED])
def test_backends_agree(backend: LoraBackend) -> None:
    case = make_case(GRIDS[8], torch.float32)
    expected = adding(REFERENCE)(case.y, case.x, case.segments, case.pairs)
    got = adding(backend)(case.y.clone(), case.x, case.segments, case.pairs)
    assert relative_error(got, expected) < 1e-5
    lora, group = prepared(backend, case.segments, [case.pairs])
    in_place = case.y.clone()
    lora.add_(group, [in_place], case.x)
    assert torch.equal(in_place, got)


@pytest.mark.parametrize("name", BACKENDS)
def test_only_sites_that_an_adapter_has_are_changed(name: str) -> None:
    case = make_case(GRIDS[3], torch.float32)  # adapter 1 only, at the only site
    for pairs, changes in ((case.pairs, True), ((None, None), False)):
        lora, group = prepared(make_backend(name), case.segments, [pairs])
        assert lora.changes(group) is changes
