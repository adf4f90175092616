"""The OpenAI endpoints over a real engine: texts are the model's own, and scores equal direct scoring.

lm-evaluation-harness itself runs where it is installed; what it sends and how it reads the answer is replayed anyway.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import cache
from importlib import resources
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from coserve.lora.store.files import save_adapter
from coserve.model.lora import LoraWeights
from tests.support.api_server import Api, tokenizer
from tests.support.examples import by_day, in_turns
from tests.support.real_server import bundled_base, loud_adapter, serve_real

openai = pytest.importorskip("openai")

Score = tuple[float, bool]
"""A continuation's log-probability, and whether every token of it is the likeliest."""

PAIRS = [
    ("The little cat sat on the", " mat and slept."),
    ("The little cat sat on the", " moon quietly"),
    ("Once upon a time there was a", " girl"),
    ("Once upon a time there was a girl who lived in a small house near the forest.", " She had a dog<|endoftext|>"),
    ("Hello", " there, old friend, said the bear to the fox."),
]


@cache
def weights() -> LoraWeights:
    """An adapter that changes what the base says."""
    return loud_adapter(1)


@cache
def model(name: str) -> PreTrainedModel:
    """transformers' own, with the adapter merged into its weights."""
    folder = str(resources.files("coserve") / "assets" / "tiny")
    found: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if name == "poet":
        for site, pair in weights().sites.items():
            found.get_submodule(site).weight.data += pair.scaling * (pair.b_OR @ pair.a_RD)
    return found


@torch.no_grad()
def direct(name: str, context: list[int], continuation: list[int]) -> Score:
    """One sequence, one call, one log-softmax."""
    ids = context + continuation
    logprobs = model(name)(torch.tensor([ids])).logits[0].log_softmax(-1)[len(context) - 1 : -1]
    chosen = logprobs.gather(1, torch.tensor(continuation)[:, None])
    return chosen.sum().item(), bool((logprobs.argmax(-1) == torch.tensor(continuation)).all())


@pytest.fixture
async def real(tmp_path: Path) -> AsyncIterator[Api]:
    """A real engine that takes prompts in small chunks, with an adapter `poet`."""
    root = tmp_path / "root"
    (root / "poet").mkdir(parents=True)
    save_adapter(root / "poet", weights(), bundled_base().spec)
    async with serve_real(tmp_path / "data", data_root=root, step_tokens=16) as api:
        await api.answered(201, "POST", "/adapters", json={"name": "poet", "path": "poet"})
        yield api


def encode_pair(context: str, continuation: str) -> tuple[list[int], list[int]]:
    """As lm-evaluation-harness cuts them: the whole, without the context's tokens."""
    ids = tokenizer().encode(context, add_special=False)
    return ids, tokenizer().encode(context + continuation, add_special=False)[len(ids) :]


def parse_logprobs(body: dict[str, Any], ctxlens: list[int]) -> list[Score]:
    """As lm-evaluation-harness reads an answer: the entry of the one generated token is cut off."""
    found = []
    for choice, ctxlen in zip(sorted(body["choices"], key=itemgetter("index")), ctxlens, strict=True):
        values = choice["logprobs"]["token_logprobs"][ctxlen:-1]
        tops = choice["logprobs"]["top_logprobs"][ctxlen:-1]
        found.append((sum(values), all(value == max(top.values()) for value, top in zip(values, tops, strict=True))))
    return found


def check(found: list[Score], expected: list[Score]) -> None:
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-3)


@pytest.mark.parametrize("name", by_day(["bundled", "poet"], "poet"))
async def test_scores_equal_direct_scoring(real: Api, name: str) -> None:
    pairs = [encode_pair(*pair) for pair in PAIRS]
    body = {
        "model": name,
        "prompt": [context + continuation for context, continuation in pairs],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    for _ in range(2):  # the second time nothing may come from a cache of pages
        answer = await real.answered(200, "POST", "/v1/completions", json=body)
        check(
            parse_logprobs(answer, [len(context) for context, _ in pairs]),
            [direct(name, context, continuation) for context, continuation in pairs],
        )


async def test_the_best_of_several_choices(real: Api) -> None:
    async with real.openai() as client:
        asked = {"model": "poet", "prompt": ["The bear", "A fox"], "max_tokens": 6, "temperature": 1.0, "seed": 5}
        every = await client.completions.create(**asked, n=4, logprobs=0)
        best = await client.completions.create(**asked, n=2, extra_body={"best_of": 4})
    means = []
    for choice in every.choices:
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        values = choice.logprobs.token_logprobs
        means.append((sum(values) / len(values), choice.text))
    expected = [text for start in (0, 4) for _, text in sorted(means[start : start + 4], reverse=True)[:2]]
    assert [choice.text for choice in best.choices] == expected
    assert [(choice.index, choice.logprobs) for choice in best.choices] == [(i, None) for i in range(4)]
    assert best.usage == every.usage


async def test_one_entry_is_generated_even_for_the_end_of_a_text(real: Api) -> None:
    ids = tokenizer().encode("The end.")
    body = {"model": "bundled", "prompt": [ids], "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
    end = tokenizer().eos_token_id
    _, answer = await real.call("POST", "/v1/completions", json=body | {"logit_bias": {str(end): 100}})
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["token_logprobs"]) == len(ids) + 1
    assert choice["logprobs"]["tokens"][-1] == "<|endoftext|>"
    _, plain = await real.call("POST", "/v1/completions", json=body)
    scored = slice(0, len(ids))
    assert plain["choices"][0]["logprobs"]["token_logprobs"][scored] == choice["logprobs"]["token_logprobs"][scored]


@pytest.mark.slow
async def test_prompts_as_long_as_the_context(real: Api) -> None:
    context = bundled_base().spec.context
    ids = (tokenizer().encode("The bear and the fox went home. ") * context)[: context - 1]
    body = {"model": "bundled", "prompt": [ids], "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
    answer = await real.answered(200, "POST", "/v1/completions", json=body)
    (found,) = parse_logprobs(answer, [1])
    expected, _ = direct("bundled", ids[:1], ids[1:])
    assert found[0] == pytest.approx(expected, abs=1e-3 * context / 10)  # a sum of a thousand


@pytest.mark.parametrize("name", by_day(["bundled", "poet"], "poet"))
async def test_texts_are_the_models_own(real: Api, name: str) -> None:
    ids = tokenizer().encode("Once upon a time")
    expected = model(name).generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, pad_token_id=0)[0]
    text = tokenizer().decode(expected[len(ids) :].tolist())
    async with real.openai() as client:
        done = await client.completions.create(model=name, prompt="Once upon a time", max_tokens=12, temperature=0)
        assert done.choices[0].text == text
        stream = await client.completions.create(
            model=name, prompt=ids, max_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}
        )
        parts = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in parts[:-1]) == text
    assert parts[-1].usage is not None
    assert parts[-1].usage.completion_tokens == len(expected) - len(ids)


async def test_a_chat(real: Api) -> None:
    async with real.openai() as client:
        assert [found.id async for found in client.models.list()] == ["bundled", "poet"]
        turns: list[Any] = [{"role": "user", "content": "Tell me of the sea."}]
        done = await client.chat.completions.create(
            model="poet", messages=turns, max_completion_tokens=8, temperature=0, logprobs=True, top_logprobs=2
        )
        stream = await client.chat.completions.create(
            model="poet", messages=turns, max_completion_tokens=8, temperature=0, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert done.choices[0].message.content == text
    logprobs = done.choices[0].logprobs
    assert logprobs is not None
    for entry in logprobs.content or []:
        assert entry.logprob == entry.top_logprobs[0].logprob  # greedy: the same number


HARNESSED: dict[str, dict[str, int]] = {"bundled": {}, "poet": {"num_concurrent": 3}, "poet@1": {"batch_size": 4}}


@pytest.mark.filterwarnings("ignore")  # of the harness's own making, which is installed by `make test-all`
@pytest.mark.parametrize("name", in_turns(HARNESSED.keys()))
async def test_lm_evaluation_harness(real: Api, name: str) -> None:
    harness = pytest.importorskip("lm_eval.models.openai_completions", exc_type=ImportError)
    instance = pytest.importorskip("lm_eval.api.instance").Instance

    def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        return [instance(request_type=kind, doc={}, arguments=each, idx=i) for i, each in enumerate(arguments)]

    def evaluate() -> tuple[list[Score], list[float], list[str]]:
        lm = harness.LocalCompletionsAPI(
            base_url=f"{real.url}/v1/completions", model=name, max_length=1024, max_retries=1, **HARNESSED[name]
        )
        assert lm.tokenizer_backend == "remote"
        options = {"until": ["."], "max_gen_toks": 8, "temperature": 0.0, "do_sample": False}
        return (
            lm.loglikelihood(requests("loglikelihood", list(PAIRS))),
            lm.loglikelihood_rolling(requests("loglikelihood_rolling", [(PAIRS[0][0],)])),
            lm.generate_until(requests("generate_until", [(PAIRS[0][0], options)])),
        )

    scores, rolling, texts = await asyncio.to_thread(evaluate)
    weights_of = name.partition("@")[0]
    check(scores, [direct(weights_of, *encode_pair(*pair)) for pair in PAIRS])
    end = tokenizer().eos_token_id
    assert end is not None
    expected, _ = direct(weights_of, [end], tokenizer().encode(PAIRS[0][0]))
    assert rolling == [pytest.approx(expected, abs=1e-3)]
    ids = tokenizer().encode(PAIRS[0][0])
    own = model(weights_of).generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, pad_token_id=0)[0]
    assert texts == [tokenizer().decode(own[len(ids) :].tolist()).split(".")[0]]
