"""Which bases' LoRA kernels are compiled once more for compiled layers."""

from __future__ import annotations

import pytest

from coserve.engine.warming.other_kernels import differ
from coserve.model.base import wrap_base
from coserve.model.fused import FusedBase
from tests.support.lora_backends import GROUPED, SEGMENTED
from tests.support.tiny_models import tiny_model


@pytest.mark.parametrize(("intermediate", "expected"), [(48, False), (40, True)])
def test_outputs_of_a_shared_input_that_16_does_not_divide_have_kernels_of_their_own(
    intermediate: int, expected: bool
) -> None:
    base = FusedBase(wrap_base(tiny_model("llama", intermediate_size=intermediate), name="tiny"), compiled=False).base
    assert differ(base, SEGMENTED) is expected
    assert not differ(base, GROUPED), "its sites share no input"
