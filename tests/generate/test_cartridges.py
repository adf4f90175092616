"""Cartridges (trained KV prefixes) against the real `peft` package: files in and out, and what requests get."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from coserve.core.errors import AdapterError, BaseMismatch, InvalidRequest, PromptTooLong, UnsupportedAdapter
from coserve.core.link.generation import Generate, RequestFailed, Tokens
from coserve.core.names import ADAPTER_CONFIG
from coserve.core.types import AdapterRef, LoraSettings
from coserve.finetune.init import first_cartridge
from coserve.lora.files.peft import inspect_adapter
from coserve.lora.files.targets import resolve_targets
from coserve.lora.store.files import load_adapter, save_adapter
from coserve.model.base import wrap_base
from tests.support.cartridges import CARTRIDGE, TOKENS, base_of, make, read, request, run, save_cartridge
from tests.support.examples import sample
from tests.support.families import tiny_family
from tests.support.generation import adapter, text
from tests.support.records import make_spec
from tests.support.shelf import Shelf
from tests.support.tiny_models import tiny_model

OTHER, LORA = AdapterRef("other", 1), AdapterRef("lora", 1)
FAMILIES = ("llama", "qwen3", "gpt2", "mistral")


def by_peft(model: PeftModel, prompt: tuple[int, ...], steps: int = 6) -> tuple[list[int], list[float], list[float]]:
    """Greedy tokens, their log-probabilities and the prompt's, by PEFT's forwards over the whole text."""
    ids, found, scores = list(prompt), list[int](), list[float]()
    for _ in range(steps):
        with torch.no_grad():
            logprobs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        found.append(int(logprobs[-1].argmax()))
        scores.append(float(logprobs[-1].max()))
        ids.append(found[-1])
    at = torch.arange(len(prompt) - 1)
    return found, scores, logprobs[at, torch.tensor(prompt[1:], dtype=torch.long)].tolist()


@pytest.mark.parametrize("family", sample(FAMILIES, "llama"))
def test_a_cartridge_gives_pefts_tokens(family: str, tmp_path: Path) -> None:
    """Greedy tokens and log-probabilities of answers and prompts; alone, beside others that share its pages, in chunks,
    without the prefix cache, and again after they were cached."""
    model, base = save_cartridge(tmp_path, family), base_of(family)
    shelf = Shelf({CARTRIDGE: read(tmp_path, base)})
    prompts = {f"{n}": text(n, n) for n in (1, 2, 13, 30)}
    expected = {id: by_peft(model, prompt) for id, prompt in prompts.items()}
    asked = [request(id, prompt) for id, prompt in prompts.items()]
    scored = [request(id, prompt, prompt_logprobs=0) for id, prompt in prompts.items()]
    for gen in (make(base, shelf), make(base, shelf, step_tokens=5), make(base, shelf, cached=False)):
        for requests in ([asked[0]], asked, scored):
            for id, (tokens, logprobs, prompt) in run(gen, *requests).items():
                want = expected[id]
                assert tokens == want[0]
                assert logprobs == pytest.approx(want[1], abs=1e-4)
                assert prompt == pytest.approx(want[2] if requests is scored else [], abs=1e-4)


def test_sequences_share_a_cartridges_full_pages(tmp_path: Path) -> None:
    base = base_of("llama")
    save_cartridge(tmp_path, "llama")
    gen = make(base, Shelf({CARTRIDGE: read(tmp_path, base)}))
    for number in range(4):
        gen.add(request(f"{number}", text(3, number)))
    gen.step()
    shared, own = TOKENS // 4, 2  # 11 + 3 tokens, and place for one more
    assert gen.pages_used == shared + 4 * own
    while gen.running:
        gen.step()
    assert gen.pages_used == 0


def test_the_pages_of_a_pinned_cartridge_stay(tmp_path: Path) -> None:
    """While others take all pages that they get; an adapter that is not pinned loses its own. Where a request does not
    fit beside them, they go: it was accepted."""
    base = base_of("llama")
    for name, seed in (("pinned", 1), ("other", 2)):
        save_cartridge(tmp_path / name, "llama", seed=seed)
    shelf = Shelf({CARTRIDGE: read(tmp_path / "pinned", base), OTHER: read(tmp_path / "other", base)})
    gen, full = make(base, shelf, tokens=64, max_running=1), TOKENS // 4
    (store,) = shelf.stores

    def cached(tokens: int, ref: AdapterRef | None = CARTRIDGE, seed: int = 1, most: int = 1) -> int:
        """Serve a request; return how many of its tokens the prefix cache had."""
        before = gen.scheduler.active.prefix_hits
        gen.add(request("one", text(tokens, seed), ref, most))
        while gen.running:
            assert not any(isinstance(message, RequestFailed) for message in gen.step())
        return gen.scheduler.active.prefix_hits - before

    def press() -> None:
        for seed in range(4):
            cached(40, None, seed)

    assert (cached(1), cached(1, OTHER), gen.pages_used) == (0, 0, 0)
    store.pin(CARTRIDGE, pinned=True)
    assert (cached(1), gen.pages_used) == (4 * full, full)
    press()
    assert (cached(1), cached(1, OTHER)) == (4 * full, 0)
    for prompt, most in ((60, 4), (50, 13)):  # has not enough room from the start, or as it grows
        cached(prompt, None, most=most)
        assert gen.pages_used == 0
        assert (cached(1), gen.pages_used) == (0, full), "written again, and kept again"
    store.pin(CARTRIDGE, pinned=False)
    press()
    assert (cached(1), gen.pages_used) == (0, 0)


def test_pinned_cartridges_keep_no_more_than_half_of_the_pool(tmp_path: Path) -> None:
    """Others are served as if they were not pinned."""
    base, full, third = base_of("llama"), TOKENS // 4, AdapterRef("third", 1)
    adapters = {}
    for seed, ref in enumerate((CARTRIDGE, OTHER, third)):
        save_cartridge(tmp_path / ref.id, "llama", seed=seed)
        adapters[ref] = read(tmp_path / ref.id, base)
    shelf = Shelf(adapters)
    gen = make(base, shelf, tokens=4 * (4 * full + 1))  # half of it: two prefixes
    (store,) = shelf.stores

    def serve(ref: AdapterRef) -> int:
        """Serve a request; return how many pages are in use then."""
        gen.add(request("one", text(1), ref))
        while gen.running:
            assert not any(isinstance(message, RequestFailed) for message in gen.step())
        return gen.pages_used

    for ref in adapters:
        assert serve(ref) == 0
    for ref in adapters:
        store.pin(ref, pinned=True)
    assert [serve(ref) for ref in (*adapters, *adapters)] == [full, *[2 * full] * 5]
    store.pin(OTHER, pinned=False)
    assert serve(third) == 2 * full, "in the place of the one that is pinned no longer"


def test_the_pages_of_a_pinned_cartridge_move_out_of_an_adapters_way(tmp_path: Path) -> None:
    """The matrices of an adapter need a run of pages. What the cartridge's requests get stays the same."""
    base, full = base_of("llama"), TOKENS // 4
    save_cartridge(tmp_path, "llama")
    shelf = Shelf({CARTRIDGE: read(tmp_path, base), LORA: adapter(base, 5, 3)})
    roomy = make(base, shelf)
    run(roomy, request("lora", text(3), LORA))
    whole, before, answer = roomy.adapter_pages, 4, run(roomy, request("first", text(1)))["first"]
    gen = make(base, shelf, tokens=4 * (whole + before + full - 1), max_running=2)
    (_, store) = shelf.stores
    store.acquire(CARTRIDGE)  # reads it at once
    store.release(CARTRIDGE)
    store.pin(CARTRIDGE, pinned=True)

    def serve(*asked: Generate) -> list[int]:
        """Add each one step after the one before it; return their tokens."""
        tokens, left = list[int](), [*asked]
        while left or gen.running:
            if left:
                gen.add(left.pop(0))
            for message in gen.step():
                assert isinstance(message, Tokens)
                tokens += message.tokens
        return tokens

    serve(request("before it", text(4 * before), None), request("pinned", text(1)))
    assert gen.pages_used == full
    serve(request("in its way", text(3), LORA, 1))
    assert gen.pages_used == full
    found = gen.scheduler.active.prefix_hits
    assert serve(request("again", text(1))) == answer[0]
    assert gen.scheduler.active.prefix_hits == found + 4 * full
    store.pin(CARTRIDGE, pinned=False)
    serve(request("last", text(1)))
    assert gen.pages_used == 0


def test_a_batch_mixes_cartridges_with_lora_and_the_base(tmp_path: Path) -> None:
    """Each request gets what it gets alone, also where preemption makes it begin again."""
    base = base_of("llama")
    for name, seed in (("one", 1), ("two", 2)):
        save_cartridge(tmp_path / name, "llama", seed=seed)
    shelf = Shelf(
        {CARTRIDGE: read(tmp_path / "one", base), OTHER: read(tmp_path / "two", base), LORA: adapter(base, 5, 3)}
    )
    same = text(9)
    asked = [request(f"{ref} {n}", same[:n], ref, 9) for ref in (CARTRIDGE, None, OTHER, LORA) for n in (9, 5)]
    alone = {one.id: run(make(base, shelf), one)[one.id] for one in asked}
    assert len({tuple(tokens) for tokens, *_ in alone.values()}) == len(asked), "each is another text"
    roomy = make(base, shelf)
    tight = make(base, shelf, tokens=100)
    for gen in (roomy, tight):
        for id, (tokens, logprobs, _) in run(gen, *asked).items():
            assert tokens == alone[id][0]
            assert logprobs == pytest.approx(alone[id][1], abs=1e-5)
    assert tight.scheduler.preemptions > 0


def test_penalties_see_the_prompt_alone(tmp_path: Path) -> None:
    base = base_of("llama")
    save_cartridge(tmp_path, "llama")
    gen = make(base, Shelf({CARTRIDGE: read(tmp_path, base)}))
    prompt = text(7)
    first = run(gen, request("plain", prompt))["plain"][0]
    again = run(gen, request("bound", prompt, repetition_penalty=1.0001, presence_penalty=1e-4))["bound"][0]
    assert again == first


def test_files_go_out_as_they_came_in(tmp_path: Path) -> None:
    base = base_of("llama")
    save_cartridge(tmp_path / "in", "llama")
    (tmp_path / "out").mkdir()
    save_adapter(tmp_path / "out", read(tmp_path / "in", base), base.spec)
    first, second = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("in", "out"))
    assert first.keys() == second.keys()
    assert torch.equal(first["prompt_embeddings"], second["prompt_embeddings"])
    model = PeftModel.from_pretrained(tiny_model("llama"), str(tmp_path / "out")).eval()
    prompt = text(5)
    assert by_peft(model, prompt)[0] == by_peft(save_cartridge(tmp_path / "again", "llama"), prompt)[0]
    info = inspect_adapter(tmp_path / "out", base.spec)
    assert (info.settings.cartridge, info.rank, info.targets) == (True, TOKENS, ())


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("num_virtual_tokens", 0, "expected a whole number of at least 1"),
        ("num_virtual_tokens", str(TOKENS), "expected a whole number of at least 1"),
        ("num_frozen_tokens", -1, "expected a whole number"),
        ("num_frozen_tokens", TOKENS + 1, f"expected at most num_virtual_tokens, {TOKENS}"),
    ],
)
def test_sizes_that_peft_refuses_are_refused_by_name(tmp_path: Path, key: str, value: object, expected: str) -> None:
    save_cartridge(tmp_path, "llama")
    config = tmp_path / ADAPTER_CONFIG
    config.write_text(json.dumps(json.loads(config.read_text()) | {key: value}))
    with pytest.raises(AdapterError, match=expected) as refused:
        inspect_adapter(tmp_path, base_of("llama").spec)
    assert refused.value.field == key


def test_heads_of_latent_attention_take_cartridges() -> None:
    """PEFT cannot tell what they are to give: its prefix is of heads, and transformers caches latents. One that is not
    trained yet is the beginning of a text."""
    model = tiny_family("mistral4", v_head_dim=12, max_position_embeddings=256)
    whole, settings = text(TOKENS + 9), LoraSettings(r=TOKENS, cartridge=True)
    latents = wrap_base(model, name="mistral4", eos_token_ids=()).spec
    with pytest.raises(InvalidRequest, match=r"one size, .* only with --mla-cache heads"):
        resolve_targets(settings, latents)
    base = wrap_base(model, name="mistral4", eos_token_ids=(), mla_cache="heads")
    cartridge = first_cartridge(make_spec(lora=settings, prefix=whole[:TOKENS]), base)
    asked = request("behind", whole[TOKENS:]), request("whole", whole, None)
    found = run(make(base, Shelf({CARTRIDGE: cartridge})), *asked)
    assert found["behind"][0] == found["whole"][0]
    assert found["behind"][1] == pytest.approx(found["whole"][1], abs=1e-4)


def test_other_bases_and_other_uses_are_refused(tmp_path: Path) -> None:
    save_cartridge(tmp_path, "llama")
    with pytest.raises(BaseMismatch, match="expected token_dim"):
        inspect_adapter(tmp_path, base_of("gpt2").spec)
    base = base_of("llama")
    with pytest.raises(UnsupportedAdapter, match="expected LoRA, got a cartridge"):
        load_adapter(tmp_path, base.spec, dtype=torch.float32)
    gen = make(base, Shelf({CARTRIDGE: read(tmp_path, base)}))
    with pytest.raises(PromptTooLong, match=f"{TOKENS} of which the adapter's prefix takes"):
        gen.add(request("long", text(base.spec.context - TOKENS)))
    assert not gen.running
    small = make(base, Shelf({CARTRIDGE: read(tmp_path, base)}), tokens=32)
    with pytest.raises(PromptTooLong, match=f"32 tokens, {TOKENS} of which the adapter's prefix takes, got 24 and 6"):
        small.add(request("long", text(24)))
