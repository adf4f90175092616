"""Adapters of the input embedding and the head, in one batch with others: each row gets what PEFT gives its sequence
alone, and the adapter is written back as PEFT reads it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from coserve.core.errors import UnsupportedAdapter
from coserve.core.names import ADAPTER_WEIGHTS
from coserve.kernels.lora.segments import Segments
from coserve.lora.files.peft import inspect_adapter
from coserve.lora.store.files import load_adapter, save_adapter
from coserve.lora.store.packing import packed
from coserve.model.base import wrap_base
from coserve.model.lora import LoraBatch, LoraWeights
from tests.support.lora_backends import GROUPED
from tests.support.lora_reference import adapted, alone, save_peft, tokens_of
from tests.support.lora_reference import packed as packed_logits
from tests.support.tiny_models import VOCAB, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")
LENGTHS, BATCH = (5, 9, 3, 4), (1, -1, 0, 1)
"""Of each sequence; adapter 1 changes an end, 0 is plain, -1 is the base alone."""
BOUNDS = (0, 5, 14, 17, 21)
SEQUENCES = [tokens_of(length, seed) for seed, length in enumerate(LENGTHS)]
TOKENS = [*sorted({int(token) for tokens_T in SEQUENCES for token in tokens_T})[::3], 1]
"""Some of the sequences' tokens, and another one; not in order."""


def tied_llama() -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "initializer_range": 0.2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
        return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **shape, **heads)).eval()


def model_of(family: str) -> PreTrainedModel:
    return tied_llama() if family == "tied" else tiny_model(family)


CASES = {
    "head": ("llama", {"target_modules": ["q_proj", "lm_head"], "rank_pattern": {"lm_head": 7}}),
    "tied-head": ("tied", {"target_modules": ["q_proj", "lm_head"], "use_rslora": True}),
    "embedding": ("llama", {"target_modules": ["q_proj", "embed_tokens"]}),
    "both": ("tied", {"target_modules": ["embed_tokens", "v_proj", "lm_head"]}),
    "tied-both": ("tied", {"target_modules": ["embed_tokens", "v_proj"], "ensure_weight_tying": True}),
    "scaled": ("gemma3", {"target_modules": ["q_proj", "embed_tokens"]}),
    "whole-head": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "whole-embedding": ("tied", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    "whole-both": ("gemma3", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
    "tokens": ("llama", {"target_modules": ["q_proj"], "trainable_token_indices": TOKENS}),
    "tied-tokens": ("tied", {"target_modules": ["q_proj", "lm_head"], "trainable_token_indices": TOKENS}),
    "tokens-of-both": (
        "tied",
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": TOKENS, "lm_head": [2, 3]}},
    ),
    "scaled-tokens": ("gemma3", {"target_modules": ["q_proj"], "trainable_token_indices": TOKENS}),
    "gpt2-tokens": (
        "gpt2",
        {"target_modules": ["c_attn"], "fan_in_fan_out": True, "trainable_token_indices": {"wte": TOKENS}},
    ),
    "dora-and-tokens": ("tied", {"target_modules": ["q_proj"], "use_dora": True, "trainable_token_indices": TOKENS}),
}
"""The model, and PEFT's settings of the adapter."""


@pytest.mark.parametrize("case", CASES)
def test_rows_of_a_mixed_batch_equal_pefts(case: str, tmp_path: Path) -> None:
    family, settings = CASES[case]
    base, names = wrap_base(model_of(family), name="tiny"), settings["target_modules"]
    fan = {"fan_in_fan_out": family == "gpt2"}
    plain = save_peft(model_of(family), tmp_path / "0", seed=0, r=3, target_modules=names[:1], **fan)
    ends = save_peft(model_of(family), tmp_path / "1", seed=1, r=5, **settings)
    models = {-1: model_of(family), 0: plain, 1: ends}

    def served(folder: Path) -> LoraWeights:
        return base.served(load_adapter(folder, base.spec, dtype=torch.float32))

    adapters = (served(tmp_path / "0"), served(tmp_path / "1"))
    expected = [alone(models[own], tokens_T) for own, tokens_T in zip(BATCH, SEQUENCES, strict=True)]
    segments, without = Segments(BOUNDS, BATCH), packed_logits(base, SEQUENCES)
    for both in (adapters, tuple(packed(one, for_kernels=False) for one in adapters)):
        got = packed_logits(base, SEQUENCES, LoraBatch(segments, both, GROUPED))
        for own, mine_TV, peft_TV, base_TV in zip(BATCH, got, expected, without, strict=True):
            torch.testing.assert_close(mine_TV, peft_TV, rtol=2e-4, atol=2e-4)
            assert torch.equal(mine_TV, base_TV) == (own == -1)
    keep = torch.tensor([20, 4, 13, 16])
    (kept,) = packed_logits(base, SEQUENCES, LoraBatch(segments, adapters, GROUPED), keep)
    torch.testing.assert_close(kept, torch.cat(expected)[keep], rtol=2e-4, atol=2e-4)
    one = packed_logits(base, SEQUENCES[:1], LoraBatch(Segments((0, 5), (0,)), adapters[1:], GROUPED))
    assert torch.equal(one[0], got[0]), "a row's bits depend on the batch"

    (tmp_path / "2").mkdir()
    save_adapter(tmp_path / "2", adapters[1] if "dora" not in case else load_dora(tmp_path, base), base.spec)
    again = PeftModel.from_pretrained(model_of(family), str(tmp_path / "2")).eval()
    torch.testing.assert_close(alone(again, SEQUENCES[0]), expected[0], rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(
        packed_logits(base, SEQUENCES, LoraBatch(segments, (adapters[0], served(tmp_path / "2")), GROUPED)), got
    )


@pytest.mark.parametrize("kind", ["embed_tokens", "lm_head", "weight of embed_tokens", "weight of lm_head"])
def test_a_changed_weight_that_embedding_and_head_share_replaces_both(kind: str, tmp_path: Path) -> None:
    """PEFT writes the weight under a LoRA of the embedding, or of a resized model, and loads it into the base."""
    trained, (*_, end) = tied_llama(), kind.split()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        trained.get_input_embeddings().weight += 0.2 * torch.randn(VOCAB, 32)
    only = kind.startswith("weight")
    model = save_peft(trained, tmp_path, target_modules=["q_proj"] if only else ["q_proj", end])
    if only:
        model.save_pretrained(str(tmp_path), save_embedding_layers=True)
        tensors = load_file(tmp_path / ADAPTER_WEIGHTS)
        kept = {name: one for name, one in tensors.items() if "lora_" in name or end in name}
        assert len(kept) == len(tensors) - 1
        save_file(kept, tmp_path / ADAPTER_WEIGHTS)
    expected = alone(PeftModel.from_pretrained(tied_llama(), str(tmp_path)).eval(), SEQUENCES[0])
    base = wrap_base(tied_llama(), name="tiny")
    got = adapted(base, base.served(load_adapter(tmp_path, base.spec, dtype=torch.float32)), SEQUENCES[0])
    torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-4)


def load_dora(folder: Path, base) -> LoraWeights:
    """What is stored of a DoRA adapter, magnitudes included."""
    return load_adapter(folder / "1", base.spec, dtype=torch.float32)


@pytest.mark.parametrize("case", ["head", "embedding", "whole-head", "whole-embedding", "tokens"])
def test_a_base_on_several_gpus_says_that_ends_need_one(case: str, tmp_path: Path) -> None:
    family, settings = CASES[case]
    spec = wrap_base(model_of(family), name="tiny").spec
    save_peft(model_of(family), tmp_path, seed=0, r=3, **settings)
    inspect_adapter(tmp_path, spec)
    with pytest.raises(UnsupportedAdapter, match="on several GPUs"):
        inspect_adapter(tmp_path, msgspec.structs.replace(spec, ends={}))
