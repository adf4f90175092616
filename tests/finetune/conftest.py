"""What tests of fine-tuning have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from coserve.data.pretrained.tokenizer import Tokenizer

if TYPE_CHECKING:
    from coserve.model.base import Base


@pytest.fixture(scope="module")
def base() -> Base:
    """A small Llama, the same for all tests of a module: none of them changes it."""
    from tests.support.finetuning import tiny_base  # not before Triton's setting

    return tiny_base("llama")


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load("bundled")
