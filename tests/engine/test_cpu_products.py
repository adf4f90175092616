"""What all promises of equal bits on a CPU rest on: a row of a product does not depend on the other rows."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import torch
from coserve.config import Config
from coserve.engine.threads import set_up_threads

set_up_threads(Config())
g = torch.Generator().manual_seed(0)
for inputs, outputs in ((64, 96), (64, 64), (128, 352), (576, 1536), (40, 128)):
    weight, x = torch.randn(outputs, inputs, generator=g), torch.randn(200, inputs, generator=g)
    whole = torch.nn.functional.linear(x, weight)
    for rows in (16, 17, 23, 32, 33, 48, 64, 80, 112, 160):
        assert torch.equal(torch.nn.functional.linear(x[:rows], weight), whole[:rows]), (inputs, outputs, rows)
"""


@pytest.mark.parametrize("instructions", [None, "AVX2"])
def test_a_row_has_the_same_bits_in_any_batch(instructions: str | None) -> None:
    """On this processor, and with the instructions of older ones and of most laptops."""
    given = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"} | {"OMP_NUM_THREADS": "2"}
    if instructions is not None:
        given |= {"MKL_ENABLE_INSTRUCTIONS": instructions, "ATEN_CPU_CAPABILITY": instructions.lower()}
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, env=given, timeout=300)


def test_lora_servers_have_the_same_bits_in_any_batch() -> None:
    """Whoever starts them."""
    code = (
        "import os, sys\nfrom coserve.engine.lora_server import process as own\nown.obey_parent = lambda: None\n"
        "sys.argv[1:] = ['-1']\ntry:\n    own.main()\nexcept (OSError, ValueError):\n    print(os.environ['MKL_CBWR'])"
    )
    given = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    found = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "AUTO,STRICT"
