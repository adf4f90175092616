"""The families of docs/families.md: what is served equals transformers and PEFT, what is not is refused with the reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from coserve.adapters.files import load_adapter
from coserve.errors import UnsupportedBase
from coserve.generate.generator import Generator
from coserve.kernels.lora.backend import Way
from coserve.link import Generate, Tokens
from coserve.memory.kv import KvCache
from coserve.model.base import Base, wrap_base
from coserve.model.lora import LoraWeights
from coserve.types import AdapterRef, SamplingParams, Slo
from tests.support.families import ATTENTION_ONLY, REFUSED, SERVED, tiny_family
from tests.support.lora_reference import alone, save_peft

PROMPT = (5, 77, 31, 8, 90, 14, 63, 22, 41, 7, 119)
NEW_TOKENS = 4
REF = AdapterRef("a", 1)
TABLE = Path(__file__).parents[2] / "docs" / "families.md"


class _OneAdapter:
    def __init__(self, weights: LoraWeights) -> None:
        self._weights = weights

    def acquire(self, ref: AdapterRef) -> LoraWeights:
        return self._weights

    def release(self, ref: AdapterRef) -> None: ...


def _greedy(model: torch.nn.Module) -> list[int]:
    """By the model's own forward, without a cache."""
    tokens = list(PROMPT)
    for _ in range(NEW_TOKENS):
        tokens.append(int(alone(model, torch.tensor(tokens))[-1].argmax()))
    return tokens[len(PROMPT) :]


def _served(base: Base, weights: LoraWeights) -> dict[str, list[int]]:
    """What one batch gives for the base and for the adapter, prompts in chunks and tokens from pages."""
    kv = KvCache.for_base(base, 1024, 4)
    generator = Generator(base, _OneAdapter(weights), kv, max_running=4, step_tokens=8, way=Way.GROUPED)
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    for id, adapter in (("base", None), ("adapter", REF)):
        generator.add(Generate(id=id, prompt=PROMPT, sampling=sampling, adapter=adapter, slo=Slo(ttft=1, tpot=1)))
    found: dict[str, list[int]] = {"base": [], "adapter": []}
    while generator.running:
        for message in generator.step():
            assert isinstance(message, Tokens), message
            found[message.id] += message.tokens
    return found


@pytest.mark.parametrize("family", SERVED)
@pytest.mark.filterwarnings("ignore")
def test_a_familys_greedy_tokens_are_those_of_transformers_and_peft(family: str, tmp_path: Path) -> None:
    base = wrap_base(tiny_family(family), name=family)
    every = family not in ATTENTION_ONLY
    sites = [site for site in base.spec.sites if every or site.endswith(("q_proj", "k_proj", "v_proj", "o_proj"))]
    peft_model = save_peft(tiny_family(family), tmp_path, r=3, target_modules=sites)
    weights = load_adapter(tmp_path, base.spec, device="cpu", dtype=torch.float32)
    expected = {"base": _greedy(tiny_family(family)), "adapter": _greedy(peft_model)}
    assert _served(base, weights) == expected
    assert list(weights.sites) == sites


@pytest.mark.parametrize("family", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_a_family_that_cannot_be_served_is_refused_with_the_reason(family: str) -> None:
    reason, settings = REFUSED[family]
    with pytest.raises(UnsupportedBase, match=reason):
        wrap_base(tiny_family(family, **settings), name=family)


def test_the_table_names_just_the_families_that_are_tested() -> None:
    served, refused = TABLE.read_text().split("## Refused")
    assert sorted(re.findall(r"^\| `([\w-]+)`", served, re.MULTILINE)) == sorted(SERVED)
    named = re.findall(r"`([\w-]+)`", " ".join(re.findall(r"^\|([^|]*)\|", refused, re.MULTILINE)))
    assert sorted(named) == sorted(REFUSED)
