"""Documents that become cartridges, over HTTP with a real engine on the bundled base, and read by the real `peft`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from coserve.core.types import AdapterRef
from coserve.kernels.attention.interface import AttentionParams
from coserve.kernels.attention.packed import PackedAttention
from coserve.kernels.attention.prefixed import PrefixedAttention
from coserve.kernels.lora.types import LoraPair
from coserve.model.seam import ReferenceAttention
from tests.support.api_server import Api, form, tokenizer
from tests.support.documents import ASKED, SMALL, TEXT
from tests.support.real_server import serve_real

TOKENS, TINY = 9, "coserve/assets/tiny"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Api]:
    async with serve_real(tmp_path_factory.mktemp("cartridges") / "data") as api:
        yield api


async def learn(api: Api, adapter: str, recipe: str, tokens: int | None = TOKENS, **training: Any) -> dict[str, Any]:
    document = SMALL | ASKED | {"recipe": recipe, "prefix_tokens": tokens}
    body = {"adapter": adapter, "document": document, "training": training}
    job = await api.answered(202, "POST", "/finetune", json=body)
    await api.events(job["id"])
    return (await api.call("GET", f"/finetune/{job['id']}"))[1]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_document_becomes_a_cartridge(api: Api) -> None:
    """It is trained, evaluated, served, and read by PEFT, which computes what is served. Its first token stays as it
    began: the base's own keys and values of the document's first token."""
    job = await learn(api, "bridge", "cartridge", steps=10)
    assert job["state"] == "succeeded", job["error"]
    assert job["training"]["learning_rate"] == 0.05
    found = job["document"]["evaluation"]
    assert found["in_context"]["nll"] < found["adapter"]["nll"] < found["floor"]["nll"]
    _, adapter = await api.call("GET", "/adapters/bridge")
    assert (adapter["cartridge"], adapter["rank"], adapter["targets"]) == (True, TOKENS, [])
    folder = api.folder.adapter(AdapterRef("bridge", 1))
    base = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    with torch.no_grad():
        cache = base(torch.tensor([tokenizer().encode(TEXT)[:TOKENS]])).past_key_values
    begun = torch.cat([part[0].transpose(0, 1).flatten(1) for layer in cache for part in layer[:2]], 1)
    trained = load_file(folder / "adapter_model.safetensors")["prompt_embeddings"]
    torch.testing.assert_close(trained[0], begun[0], atol=1e-4, rtol=1e-4)
    assert (trained[1:] - begun[1:]).abs().amax(1).min() > 1e-3, "all others were trained"
    model = PeftModel.from_pretrained(base, str(folder)).eval()
    body = {"prompt": "Where does the bridge stand?", "adapter": "bridge", "max_tokens": 5, "temperature": 0}
    _, answer = await api.call("POST", "/generate", json=body | {"prompt_logprobs": 1})
    tokens = tokenizer().encode(body["prompt"])
    logprobs = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
    served = [entry["logprob"] for entry in answer["prompt_logprobs"][1:]]
    assert served == pytest.approx(logprobs[range(len(tokens) - 1), tokens[1:]].tolist(), abs=1e-4)
    for _ in range(5):
        tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    assert answer["choices"][0]["text"] == tokenizer().decode(tokens[-5:])
    assert answer["usage"]["prompt_tokens"] == len(tokens) - 5


@pytest.mark.asyncio(loop_scope="module")
async def test_a_short_document_begins_as_a_whole(api: Api) -> None:
    job = await learn(api, "whole", "cartridge", None, steps=1)
    assert job["state"] == "succeeded", job["error"]
    assert job["document"]["settings"]["prefix_tokens"] == 512
    _, adapter = await api.call("GET", "/adapters/whole")
    assert adapter["rank"] == len(tokenizer().encode(TEXT))


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.slow
async def test_notes_propose_to_continue_no_cartridge(api: Api) -> None:
    """Neither of a version that a job replaces nor of one that another job is to publish."""
    assert (await learn(api, "again", "cartridge", steps=1))["state"] == "succeeded"
    document = SMALL | ASKED | {"recipe": "cartridge", "prefix_tokens": TOKENS}
    rows = {"data": [{"prompt": "a", "completion": "b"}]}
    steps = {"adapter": "again", "training": {"steps": 1}}
    jobs = [await api.answered(202, "POST", "/finetune", json=steps | one) for one in ({"document": document}, rows)]
    notes = [note for job in jobs for note in job["notes"]]
    assert [note for note in notes if "instead of version 1, which stays available as again@1" in note]
    assert [note for note in notes if "publishes lacks what it learns" in note]
    assert not [note for note in notes if "continue" in note.replace("does not continue from that version", "")]
    for job in jobs:
        await api.events(job["id"])


@pytest.mark.asyncio(loop_scope="module")
async def test_an_encoder_makes_a_cartridge(api: Api) -> None:
    """Of its memory tokens of the document's chunk; it is evaluated and served. The first third of its steps learns the
    document's text, the others do not."""
    job = await learn(api, "read", "encoder", steps=6)
    assert job["state"] == "succeeded", job["error"]
    steps = [event["metrics"] for _, event in await api.events(job["id"]) if event.get("metrics")]
    own = len(tokenizer().encode(TEXT)) - 1
    assert [step["target_tokens"] for step in steps if step["step"] <= 2] == [own, own]
    assert {step["target_tokens"] for step in steps} != {own}
    assert job["training"]["learning_rate"] != 0.05
    assert job["document"]["evaluation"]["adapter"]["nll"] > 0
    _, adapter = await api.call("GET", "/adapters/read")
    assert (adapter["cartridge"], adapter["rank"], adapter["targets"]) == (True, TOKENS, [])
    body = {"prompt": "Where does the bridge stand?", "adapter": "read", "max_tokens": 3}
    await api.answered(200, "POST", "/generate", json=body)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.slow
async def test_an_encoder_and_its_decoder_make_one_adapter(api: Api, tmp_path: Path) -> None:
    """PEFT computes what is served from the two halves of its files. It is no teacher and is not trained further."""
    document = SMALL | ASKED | {"recipe": "encoder", "prefix_tokens": TOKENS, "decoder_lora": True}
    body = {"adapter": "both", "document": document, "training": {"steps": 6}, "lora": {"r": 2}}
    job = await api.answered(202, "POST", "/finetune", json=body)
    await api.events(job["id"])
    ended = (await api.call("GET", f"/finetune/{job['id']}"))[1]
    assert ended["state"] == "succeeded", ended["error"]
    _, adapter = await api.call("GET", "/adapters/both")
    assert (adapter["cartridge"], adapter["rank"], adapter["prefix_tokens"]) == (False, 2, TOKENS)
    assert "q_proj" in adapter["targets"]
    folder = api.folder.adapter(AdapterRef("both", 1))
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    assert all(tensor.any() for tensor in tensors.values()), "all matrices were trained"
    halves = {"cartridge": {"prompt_embeddings": tensors.pop("prompt_embeddings")}, "lora": tensors}
    for name, own in halves.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(config[name]))
        save_file(own, tmp_path / name / "adapter_model.safetensors")
    base = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, str(tmp_path / "lora")).merge_and_unload()
    model = PeftModel.from_pretrained(merged, str(tmp_path / "cartridge")).eval()
    tokens = tokenizer().encode("Where does the bridge stand?")
    with torch.no_grad():
        logprobs = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
    body = {"prompt": tokens, "adapter": "both", "max_tokens": 1, "prompt_logprobs": 1}
    _, answer = await api.call("POST", "/generate", json=body)
    served = [entry["logprob"] for entry in answer["prompt_logprobs"][1:]]
    assert served == pytest.approx(logprobs[range(len(tokens) - 1), tokens[1:]].tolist(), abs=1e-4)
    rows = {"adapter": "more", "data": [{"prompt": "a", "completion": "b"}]}
    for field in ("continue_from", "teacher"):
        status, refused = await api.call("POST", "/finetune", json=rows | {field: "both"})
        assert (status, refused["error"]["field"]) == (400, field)
    status, refused = await api.call("POST", "/adapters/both/convert", json={"bd_blocks": 2})
    assert status == 422 and "cartridge" in refused["error"]["message"]
    async with api.http.get("/adapters/both/download") as response:
        (tmp_path / "both.tar").write_bytes(await response.read())
    files = form({"name": "copy"}, tmp_path / "both.tar")
    copy = await api.answered(201, "POST", "/adapters", data=files)
    assert (copy["prefix_tokens"], copy["sha256"]) == (TOKENS, adapter["sha256"])
    _, again = await api.call("POST", "/generate", json=body | {"adapter": "copy"})
    assert again["prompt_logprobs"] == answer["prompt_logprobs"]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"lora": {"r": 4}}, "lora"),
        ({"document": {"decoder_lora": True}}, "document.decoder_lora"),
        ({"document": {"recipe": "encoder", "decoder_lora": True}, "lora": {"use_dora": True}}, "lora.use_dora"),
        ({"document": {"recipe": "encoder"}, "lora": {"bd_blocks": 2}}, "lora.bd_blocks"),
        ({"training": {"learning_rate": 0.05, "lora_plus_ratio": 16}}, "training.lora_plus_ratio"),
        ({"document": {"prefix_tokens": 4096}}, "document.prefix_tokens"),
        ({"document": {"recipe": "encoder", "prefix_tokens": 800}}, "document.prefix_tokens"),
        ({"document": {"recipe": "encoder", "prefix_tokens": 1000}}, "document"),
        ({"document": {"recipe": "encoder"}, "continue_from": "bridge"}, "continue_from"),
        (
            {"document": {"recipe": "encoder"}, "lora": {"trainable_token_indices": {"embed_tokens": [3]}}},
            "lora.trainable_token_indices",
        ),
        (
            {"document": {"recipe": "encoder"}, "training": {"early_stopping_patience": 1}},
            "training.early_stopping_patience",
        ),
    ],
)
async def test_settings_that_do_not_fit_are_refused(api: Api, body: dict[str, Any], field: str) -> None:
    document = SMALL | {"recipe": "cartridge"} | body.pop("document", {})
    status, answer = await api.call("POST", "/finetune", json={"adapter": "no", "document": document} | body)
    assert (status, answer["error"]["field"]) == (400, field)


@pytest.mark.parametrize(
    "params",
    [
        AttentionParams(0.3),
        AttentionParams(0.3, window=4),
        AttentionParams(0.3, softcap=2.0),
        AttentionParams(0.3, window=3, sinks=torch.tensor([0.1, -0.2, 0.5, 0.0])),
    ],
)
def test_a_prefix_is_attended_as_tokens_before_each_sequence(params: AttentionParams) -> None:
    """Outputs, and gradients of the keys and values, whose first token is frozen."""
    torch.manual_seed(0)
    heads, kv, width, prefix, bounds = 4, 2, 8, 5, (0, 3, 3, 10)
    pair = LoraPair(torch.randn(prefix, kv * width), torch.randn(kv * width, prefix), 1.0)
    for tensor in (pair.a_RD, pair.b_OR):
        tensor.requires_grad_()
    q, k, v = (torch.randn(each, bounds[-1], width) for each in (heads, kv, kv))
    got = PrefixedAttention(bounds, (pair,), 1).attend(0, q, k, v, params)
    want = []
    for start, end in ((0, 3), (3, 10)):
        before = [own.view(prefix, kv, width).transpose(0, 1) for own in (pair.a_RD, pair.b_OR.T)]
        whole = [torch.cat([first, own[:, start:end]], 1) for first, own in zip(before, (k, v), strict=True)]
        padded = torch.cat([torch.zeros(heads, prefix, width), q[:, start:end]], 1)
        for attention in (ReferenceAttention((0, prefix + end - start)), PackedAttention((0, prefix + end - start))):
            found = attention.attend(0, padded, *whole, params)[prefix:]
        want.append(found)
    torch.testing.assert_close(got, torch.cat(want))
    weights = torch.randn_like(got)
    ours = torch.autograd.grad((got * weights).sum(), (pair.a_RD, pair.b_OR))
    theirs = torch.autograd.grad((torch.cat(want) * weights).sum(), (pair.a_RD, pair.b_OR))
    assert not ours[0][0].any() and not ours[1][:, 0].any()
    torch.testing.assert_close(ours[0][1:], theirs[0][1:])
    torch.testing.assert_close(ours[1][:, 1:], theirs[1][:, 1:])
