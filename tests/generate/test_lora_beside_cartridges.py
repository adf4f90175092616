"""Adapters of LoRA beside a cartridge, against the real `peft` package: files in and out, and what requests get."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from coserve.core.errors import CorruptAdapter, PromptTooLong, UnsupportedAdapter
from coserve.core.types import AdapterDigests, AdapterRef
from coserve.lora.files.peft import inspect_adapter
from coserve.lora.files.wrapped import rename_decoder
from coserve.lora.store.files import load_adapter, load_packed, save_adapter
from coserve.lora.store.packing import packed_bytes
from coserve.lora.store.store import AdapterStore
from coserve.memory.kv import KvCache
from coserve.model.fused import FusedBase
from coserve.model.lora import LoraWeights
from tests.support.cartridges import CARTRIDGE, TOKENS, base_of, make, read, request, run, save_cartridge
from tests.support.examples import sample
from tests.support.generation import adapter, text
from tests.support.shelf import Shelf
from tests.support.tiny_models import tiny_model

BOTH, LORA = AdapterRef("both", 1), AdapterRef("lora", 1)
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def save_both(folder: Path, family: str, tokens: int = TOKENS, **lora: Any) -> tuple[PeftModel, torch.Tensor]:
    """Write PEFT's files of a random LoRA (`lora`) and a random cartridge (`cartridge`), and those of both (`both`).
    Return the model with the LoRA, and the cartridge's tensor."""
    save_cartridge(folder / "cartridge", family, tokens)
    torch.manual_seed(1)
    settings = {"target_modules": "all-linear", "fan_in_fan_out": family == "gpt2"} | lora
    config = LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False, **settings)
    model = get_peft_model(tiny_model(family), config)
    model.save_pretrained(str(folder / "lora"))
    parts = {name: json.loads((folder / name / CONFIG).read_text()) for name in ("lora", "cartridge")}
    tensors = {name: tensor for part in parts for name, tensor in load_file(folder / part / WEIGHTS).items()}
    (folder / "both").mkdir()
    (folder / "both" / CONFIG).write_text(json.dumps({"peft_type": "LORA_AND_CARTRIDGE", **parts}))
    save_file(tensors, folder / "both" / WEIGHTS)
    return model.eval(), tensors["prompt_embeddings"]


def with_cartridge(
    model: torch.nn.Module, embeddings_PN: torch.Tensor, prompt: tuple[int, ...], steps: int = 6
) -> tuple[list[int], list[float], list[float]]:
    """Greedy tokens, their log-probabilities and the prompt's, by forwards over the whole text with the cartridge as
    `past_key_values`."""
    text_config, ids, found, scores = model.config, list(prompt), list[int](), list[float]()
    heads = getattr(text_config, "num_key_value_heads", text_config.num_attention_heads)
    parts = embeddings_PN.chunk(2 * text_config.num_hidden_layers, 1)
    for _ in range(steps):
        cache = DynamicCache()
        for layer, both in enumerate(zip(parts[::2], parts[1::2], strict=True)):
            cache.update(*(own.view(1, len(own), heads, -1).transpose(1, 2) for own in both), layer)
        at = torch.arange(len(embeddings_PN), len(embeddings_PN) + len(ids))
        with torch.no_grad():
            out = model(input_ids=torch.tensor([ids]), position_ids=at[None], past_key_values=cache)
        logprobs = out.logits[0].log_softmax(-1)
        found.append(int(logprobs[-1].argmax()))
        scores.append(float(logprobs[-1].max()))
        ids.append(found[-1])
    places = torch.arange(len(prompt) - 1)
    return found, scores, logprobs[places, torch.tensor(prompt[1:], dtype=torch.long)].tolist()


@pytest.mark.parametrize("family", sample(("llama", "qwen3", "gpt2", "mistral"), "llama"))
def test_lora_beside_a_cartridge_gives_pefts_tokens(family: str, tmp_path: Path) -> None:
    """The LoRA applies to the sequence's own tokens, which follow the cartridge; alone, beside others, in chunks,
    without the prefix cache, and again after pages were cached."""
    model, embeddings_PN = save_both(tmp_path, family)
    base = base_of(family)
    shelf = Shelf({BOTH: read(tmp_path / "both", base)})
    prompts = {f"{n}": text(n, n) for n in (1, 2, 13, 30)}
    expected = {id: with_cartridge(model, embeddings_PN, prompt) for id, prompt in prompts.items()}
    asked = [request(id, prompt, BOTH) for id, prompt in prompts.items()]
    scored = [request(id, prompt, BOTH, prompt_logprobs=0) for id, prompt in prompts.items()]
    for gen in (make(base, shelf), make(base, shelf, step_tokens=5), make(base, shelf, cached=False)):
        for requests in ([asked[0]], asked, scored):
            for id, (tokens, logprobs, prompt) in run(gen, *requests).items():
                want = expected[id]
                assert tokens == want[0]
                assert logprobs == pytest.approx(want[1], abs=1e-4)
                assert prompt == pytest.approx(want[2] if requests is scored else [], abs=1e-4)


def test_merged_lora_and_pefts_cartridge_are_the_same_model(tmp_path: Path) -> None:
    """So each half can be given to PEFT by itself, one after the other."""
    model, embeddings_PN = save_both(tmp_path, "llama")
    prompt = text(9)
    want = with_cartridge(model, embeddings_PN, prompt)
    whole = PeftModel.from_pretrained(model.merge_and_unload(), str(tmp_path / "cartridge")).eval()
    with torch.no_grad():
        logprobs = whole(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert int(logprobs[-1].argmax()) == want[0][0]
    assert float(logprobs[-1].max()) == pytest.approx(want[1][0], abs=1e-4)


@pytest.mark.slow
def test_a_batch_mixes_all_kinds_of_adapters(tmp_path: Path) -> None:
    """Each request gets what it gets alone, also where preemption makes it begin again and its adapter's pages go to
    others meanwhile, and in steps that are launched ahead of their tokens."""
    base = base_of("llama")
    save_both(tmp_path, "llama")
    both, cartridge = (read(tmp_path / name, base) for name in ("both", "cartridge"))
    shelf = Shelf({BOTH: both, CARTRIDGE: cartridge, LORA: adapter(base, 5, 3)})
    same = text(9)
    asked = [request(f"{ref} {n}", same[:n], ref, 9) for ref in (BOTH, None, CARTRIDGE, LORA) for n in (9, 5)]
    alone = {one.id: run(make(base, shelf), one)[one.id] for one in asked}
    assert len({tuple(tokens) for tokens, *_ in alone.values()}) == len(asked), "each is another text"
    roomy = make(base, shelf)
    pages = sum(KvCache.for_base(base, 4, 4).buffer.pages_for(packed_bytes(own)) for own in shelf.weights.values())
    tight = make(base, shelf, tokens=4 * (pages + 4))
    ahead = make(base, shelf, fused=FusedBase(base, compiled=False))
    for gen in (roomy, tight, ahead):
        for id, (tokens, logprobs, _) in run(gen, *asked).items():
            assert tokens == alone[id][0]
            assert logprobs == pytest.approx(alone[id][1], abs=1e-5)
    assert tight.scheduler.preemptions > 0


class Slow(Shelf):
    """Host copies leave as soon as they may. A load waits for `gate`."""

    def __init__(self, weights: dict[AdapterRef, LoraWeights]) -> None:
        super().__init__(weights)
        self.gate = threading.Event()
        self.gate.set()
        self.own = AdapterStore(self.load, 1)

    def store(self) -> AdapterStore:
        return self.own

    def load(self, ref: AdapterRef, digests: AdapterDigests | None) -> LoraWeights:
        assert self.gate.wait(60)
        return super().load(ref, digests)


@pytest.mark.asyncio
async def test_the_copy_in_pages_is_enough(tmp_path: Path) -> None:
    """A request begins while the host copy, which has left, is read again."""
    base = base_of("llama")
    save_both(tmp_path, "llama")
    shelf = Slow({BOTH: read(tmp_path / "both", base), LORA: adapter(base, 5, 3)})
    gen, first = make(base, shelf, cached=False), request("first", text(5), BOTH)
    expected = run(gen, first)["first"]
    run(gen, request("other", text(5), LORA))  # its host copy takes the other's place
    shelf.gate.clear()
    shelf.own.prefetch(BOTH)
    assert run(gen, request("again", text(5), BOTH))["again"] == expected
    shelf.gate.set()


def test_files_go_out_as_they_came_in(tmp_path: Path) -> None:
    """PEFT refuses them, as it would leave out a half."""
    base = base_of("llama")
    save_both(tmp_path, "llama", target_modules=["q_proj", "down_proj"])
    first = load_file(tmp_path / "both" / WEIGHTS)
    for name, for_kernels in (("padded", True), ("out", False)):
        (tmp_path / name).mkdir()
        weights = load_packed(tmp_path / "both", base.spec, dtype=torch.float32, for_kernels=for_kernels)
        save_adapter(tmp_path / name, weights, base.spec)
        second = load_file(tmp_path / name / WEIGHTS)
        assert first.keys() == second.keys()
        assert all(torch.equal(own, second[name]) for name, own in first.items())
    info = inspect_adapter(tmp_path / "out", base.spec)
    assert (info.settings.cartridge, info.settings.prefix_tokens, info.rank) == (False, TOKENS, 4)
    assert {*info.targets} == {"q_proj", "down_proj"}
    with pytest.raises(KeyError, match="LORA_AND_CARTRIDGE"):
        PeftModel.from_pretrained(tiny_model("llama"), str(tmp_path / "out"))
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    halves = load_file(tmp_path / "out" / WEIGHTS)
    prefix = {"prompt_embeddings": halves.pop("prompt_embeddings")}
    for name, tensors in (("lora", halves), ("cartridge", prefix)):
        folder = tmp_path / "halves" / name
        folder.mkdir(parents=True)
        (folder / CONFIG).write_text(json.dumps(config[name]))
        save_file(tensors, folder / WEIGHTS)
        PeftModel.from_pretrained(tiny_model("llama"), str(folder))


def test_a_wrappers_names_leave_the_cartridge_as_it_is(tmp_path: Path) -> None:
    save_both(tmp_path, "llama")
    rename_decoder(tmp_path / "both", "model.language_model")
    tensors = load_file(tmp_path / "both" / WEIGHTS)
    assert torch.equal(
        tensors.pop("prompt_embeddings"), load_file(tmp_path / "cartridge" / WEIGHTS)["prompt_embeddings"]
    )
    assert all(name.startswith("base_model.model.model.language_model.layers.") for name in tensors)
    config = json.loads((tmp_path / "both" / CONFIG).read_text())
    assert "language_model" in str(config["lora"]["target_modules"])
    assert config.keys() == {"peft_type", "lora", "cartridge"}


def test_what_cannot_be_served_is_refused(tmp_path: Path) -> None:
    base = base_of("llama")
    save_both(tmp_path / "plain", "llama")
    folder = tmp_path / "plain" / "both"
    with pytest.raises(UnsupportedAdapter, match="expected LoRA, got a cartridge beside it"):
        load_adapter(folder, base.spec, dtype=torch.float32)
    gen = make(base, Shelf({BOTH: read(folder, base)}))
    with pytest.raises(PromptTooLong, match=f"{TOKENS} of which the adapter's prefix takes"):
        gen.add(request("long", text(base.spec.context - TOKENS), BOTH))
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config["lora"]))
    with pytest.raises(UnsupportedAdapter, match="prompt_embeddings"):
        inspect_adapter(folder, base.spec)
    (folder / CONFIG).write_text(json.dumps(config | {"revision": None}))
    with pytest.raises(CorruptAdapter, match="expected the configs lora and cartridge"):
        inspect_adapter(folder, base.spec)
    (folder / CONFIG).write_text(json.dumps(config | {"lora": config["lora"] | {"use_qalora": True}}))
    with pytest.raises(UnsupportedAdapter, match="use_qalora"):
        inspect_adapter(folder, base.spec)
    save_both(tmp_path / "dora", "llama", use_dora=True)
    with pytest.raises(UnsupportedAdapter, match="expected plain LoRA beside a cartridge"):
        inspect_adapter(tmp_path / "dora" / "both", base.spec)
