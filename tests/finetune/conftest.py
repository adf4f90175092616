"""What tests of fine-tuning have in common."""

from __future__ import annotations

import pytest

from coserve.model.base import Base
from tests.support.finetuning import tiny_base


@pytest.fixture(scope="module")
def base() -> Base:
    """A small Llama, the same for all tests of a module: none of them changes it."""
    return tiny_base("llama")
