"""The families of docs/guide/families.md: what is served equals transformers and PEFT, what is not is refused with the
reason."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import CONFIG_MAPPING

from coserve.core.errors import UnsupportedBase
from coserve.core.link.generation import Generate, Tokens
from coserve.core.sampling import SamplingParams
from coserve.core.training.settings import TrainingSettings
from coserve.core.types import AdapterRef, Slo
from coserve.data.corpus.tokenized import Corpus
from coserve.finetune.micro_batch import MicroBatchRunner, run_to_end
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.generate.generator import Generator
from coserve.kernels.lora.segments import Segments
from coserve.lora.store.files import load_adapter
from coserve.memory.kv import KvCache
from coserve.model.base import Base, wrap_base
from coserve.model.fused import FusedBase
from coserve.model.lora import LoraBatch, LoraWeights
from coserve.model.settings import refuse_config
from tests.support.examples import in_turns
from tests.support.executors import eager
from tests.support.families import (
    ATTENTION_ONLY,
    PUBLISHED,
    REFUSED,
    REFUSED_BY_CONFIG,
    SERVED,
    SERVED_SINCE_5_24,
    tiny_family,
)
from tests.support.finetuning import pack_rows
from tests.support.host_waits import copies_from_the_host
from tests.support.lora_backends import GROUPED
from tests.support.lora_reference import alone, save_peft
from tests.support.shelf import Shelf
from tools import families

PROMPT = (5, 77, 31, 8, 90, 14, 63, 22, 41, 7, 119)
NEW_TOKENS = 4
LOGPROBS = 5
TOLERANCE = 1e-4
"""Of log-probabilities in fp32: between one forward of all tokens and chunks whose keys come from pages."""
RANKS = (3, 5)
ROWS = (PROMPT, PROMPT[:5])
CORPUS = Corpus(
    tokens=np.array([*ROWS[0], *ROWS[1]], np.int32),
    target=np.array([int(i > 0) for row in ROWS for i in range(len(row))], np.uint8),
    bounds=np.array([0, len(ROWS[0]), len(ROWS[0]) + len(ROWS[1])]),
)
OF_EACH_KIND = (
    *("gemma2", "gpt_neox", "gpt_bigcode", "opt", "ctrl", "olmo2", "cohere2", "granite", "qwen2_moe"),
    *("modernbert-decoder", "minicpm3"),
)
"""With `QUICK`: norms, positions, activations, windows, sinks, stacked weights and experts of all kinds."""
ATTENTION = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    *("in_proj_qkvz", "in_proj_ba", "out_proj"),
)
QUICK = ("llama", "gpt2", "gemma3_text", "phi", "mixtral", "gpt_oss")


@dataclass(frozen=True)
class _Told:
    """Greedy tokens (N), and for each of them the log-probabilities of the `LOGPROBS` likeliest, by token."""

    tokens: list[int]
    top: list[dict[int, float]]


def _by_its_own_forward(model: torch.nn.Module) -> tuple[list[int], Tensor]:
    """Greedy tokens (N) and the log-probabilities of the whole vocabulary (N, V), without a cache."""
    tokens, rows = list(PROMPT), []
    for _ in range(NEW_TOKENS):
        rows.append(alone(model, torch.tensor(tokens))[-1].log_softmax(-1))
        tokens.append(int(rows[-1].argmax()))
    return tokens[len(PROMPT) :], torch.stack(rows)


def _served(base: Base, adapters: Mapping[AdapterRef, LoraWeights]) -> dict[str, _Told]:
    """What one batch gives for the base and for each adapter, prompts in chunks and tokens from pages."""
    kv = KvCache.for_base(base, 4096, 4, sequences=4)
    generator = Generator(base, Shelf(adapters).store(), kv, eager(base, kv), max_running=4, step_tokens=8)
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, logprobs=LOGPROBS)
    asked: dict[str, AdapterRef | None] = {"base": None} | {ref.id: ref for ref in adapters}
    for id, adapter in asked.items():
        generator.add(Generate(id=id, prompt=PROMPT, sampling=sampling, adapter=adapter, slo=Slo(ttft=1, tpot=1)))
    found = {id: _Told([], []) for id in asked}
    while generator.running:
        for message in generator.step():
            assert isinstance(message, Tokens), message
            found[message.id].tokens.extend(message.tokens)
            found[message.id].top.extend(dict(one.top) for one in message.logprobs)
    return found


def _targets(family: str, base: Base) -> list[str]:
    names = ATTENTION if family in ATTENTION_ONLY else base.spec.default_targets
    return [site for site in base.spec.sites if site.endswith(names)]


def _loss(model: torch.nn.Module, row: Sequence[int]) -> Tensor:
    """Summed, by its own forward."""
    logits_TV = model(torch.tensor([row])).logits[0]
    return cross_entropy(logits_TV[:-1], torch.tensor(row[1:]), reduction="sum")


@pytest.mark.parametrize("family", in_turns(SERVED, QUICK, always=OF_EACH_KIND))
@pytest.mark.filterwarnings("ignore")
def test_a_familys_tokens_logprobs_and_gradients_are_those_of_transformers_and_peft(
    family: str, tmp_path: Path
) -> None:
    """And its sites stacked into groups, as a GPU serves it without the compiler, give its own logits; a CUDA graph can
    hold its steps."""
    _check(family, tmp_path)


@pytest.mark.parametrize("published", in_turns(PUBLISHED))
@pytest.mark.filterwarnings("ignore")
def test_models_of_a_served_family_that_have_other_parts(
    published: tuple[str, dict[str, object]], tmp_path: Path
) -> None:
    family, settings = published
    _check(family, tmp_path, **settings)


def _check(family: str, tmp_path: Path, **settings: object) -> None:
    base = wrap_base(tiny_family(family, **settings), name=family)
    sites = _targets(family, base)
    expected, adapters = {"base": _by_its_own_forward(tiny_family(family, **settings))}, {}
    for rank in RANKS:
        ref = AdapterRef(f"of-rank-{rank}", 1)
        model = tiny_family(family, **settings)
        peft_model = save_peft(model, tmp_path / ref.id, seed=rank, r=rank, target_modules=sites)
        adapters[ref] = load_adapter(tmp_path / ref.id, base.spec, dtype=torch.float32)
        assert list(adapters[ref].sites) == sites
        expected[ref.id] = _by_its_own_forward(peft_model)
        apart = (expected["base"][1][0] - expected[ref.id][1][0]).abs().max()
        assert apart > 1000 * TOLERANCE, "an adapter that is left out would not be seen"
    for id, told in _served(base, adapters).items():
        tokens, logprobs_NV = expected[id]
        assert told.tokens == tokens, id
        assert [len(top) for top in told.top] == [LOGPROBS] * NEW_TOKENS
        for top, logprobs_V in zip(told.top, logprobs_NV, strict=True):
            found = torch.tensor(list(top.values()))
            torch.testing.assert_close(found, logprobs_V[list(top)], atol=TOLERANCE, rtol=0)
    _check_gradients(base, adapters[ref], peft_model)
    fused = FusedBase(base, compiled=False)
    fused.check()
    assert {name for layer in fused.groups for group in layer for name in group.names} == set(base.spec.sites)
    if family != "jetmoe":  # reads each expert's rows: torch.compile refuses it, which /health says
        assert copies_from_the_host(base) == [], "no CUDA graph could be captured"


def _check_gradients(base: Base, weights: LoraWeights, peft_model: torch.nn.Module) -> None:
    optimizer = AdapterOptimizer(weights, base.spec, TrainingSettings(), base.dtype)
    rows = pack_rows(CORPUS, [0, 1], torch.device("cpu"))
    lora = LoraBatch(Segments((0, rows.tokens), (0,)), (optimizer.weights(),), GROUPED, None)
    step = MicroBatchRunner(base, recompute=False).forward_backward(rows, lora, optimizer.trainable, optimizer.grads)
    loss = run_to_end(step, None)[:, 0]
    expected = torch.stack([_loss(peft_model, row) for row in ROWS]).sum()
    torch.testing.assert_close(loss.sum().float(), expected.detach(), atol=1e-4, rtol=1e-4)
    expected.backward()
    parameters = dict(peft_model.named_parameters())
    for site, pair in optimizer.weights().sites.items():
        assert pair.main_grads is not None
        for part, found in (("A", pair.main_grads.a_RD), ("B", pair.main_grads.b_OR)):
            wanted = parameters[f"base_model.model.{site}.lora_{part}.default.weight"].grad
            assert wanted is not None
            largest = float(wanted.abs().max())  # sums in another order, by the processor: errors are relative to it
            torch.testing.assert_close(found, wanted, atol=1e-4 * max(1.0, largest), rtol=1e-3, msg=site)


@pytest.mark.parametrize("family", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_a_family_that_cannot_be_served_is_refused_with_the_reason(family: str, tmp_path: Path) -> None:
    reason, settings = REFUSED[family]
    try:
        wrap_base(tiny_family(family, **settings), name=family)
    except UnsupportedBase as error:
        assert re.search(reason, str(error))
    else:
        assert family in SERVED_SINCE_5_24
        _check(family, tmp_path)


@pytest.mark.parametrize("family", REFUSED_BY_CONFIG)
def test_a_family_is_refused_by_its_config(family: str) -> None:
    with pytest.raises(UnsupportedBase, match=REFUSED_BY_CONFIG[family]):
        refuse_config(CONFIG_MAPPING[family]())


def test_the_page_names_just_the_families_that_are_tested() -> None:
    page = families.PAGE.read_text()
    assert families.written(page) == page, "run python -m tools.families"
    _, refused = page.split("## Refused")
    named = re.findall(r"`([\w-]+)`", " ".join(re.findall(r"^\|([^|]*)\|", refused, re.MULTILINE)))
    assert sorted(named) == sorted(REFUSED | REFUSED_BY_CONFIG)
