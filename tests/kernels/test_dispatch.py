from __future__ import annotations

import pytest
import torch

from coserve.errors import ConfigError
from coserve.kernels.lora.backend import TRITON_WAYS, Way, choose_way, lora_add
from tests.support.lora_grids import GRIDS, make_case, relative_error

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_auto_takes_our_kernels_on_a_gpu_and_torch_elsewhere() -> None:
    assert choose_way("auto", GPU, torch.bfloat16) is Way.SEGMENTED
    assert choose_way("auto", CPU, torch.bfloat16) is Way.GROUPED


@pytest.mark.parametrize("way", list(Way))
def test_every_way_can_be_asked_for_on_a_gpu(way: Way) -> None:
    assert choose_way(str(way), GPU, torch.bfloat16) is way


def test_an_unknown_way_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="got 'fast'"):
        choose_way("fast", CPU, torch.float32)


@pytest.mark.parametrize("way", sorted(TRITON_WAYS))
def test_triton_without_a_gpu_is_refused(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        choose_way(way, CPU, torch.float32)


@pytest.mark.parametrize("way", sorted(TRITON_WAYS))
def test_bfloat16_in_the_interpreter_is_refused(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_way(way, CPU, torch.float16) is way
    with pytest.raises(ConfigError, match="got bfloat16"):
        choose_way(way, CPU, torch.bfloat16)
    case = make_case(GRIDS[1], torch.bfloat16)
    with pytest.raises(ConfigError, match="got bfloat16"):
        lora_add(case.y, case.x, case.segments, case.pairs, way)


@pytest.mark.parametrize("way", sorted(set(Way) - TRITON_WAYS))
def test_ways_agree(way: Way) -> None:
    case = make_case(GRIDS[8], torch.float32)
    expected = lora_add(case.y, case.x, case.segments, case.pairs, Way.REFERENCE)
    assert relative_error(lora_add(case.y.clone(), case.x, case.segments, case.pairs, way), expected) < 1e-5
