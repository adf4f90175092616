"""The base in the package: it loads with plain transformers, stays small, and was trained."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import coserve

TINY = Path(coserve.__file__).parent / "assets" / "tiny"
HELD_OUT = [
    "Return a list of the lines in the string, breaking at line boundaries.",
    "If the file does not exist, an exception is raised and nothing is written to the directory.",
    "The default value of the argument is None, which means that the whole sequence is used.",
    "This method is called when the object is about to be destroyed by the garbage collector.",
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(TINY, local_files_only=True)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(TINY, local_files_only=True, dtype=torch.float32).eval()


def test_folder_is_complete_and_at_most_12_megabytes() -> None:
    sizes = {path.name: path.stat().st_size for path in TINY.iterdir()}
    assert set(sizes) == {
        *("README.md", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
    }
    assert sum(sizes.values()) <= 12_000_000
    assert json.loads((TINY / "config.json").read_text())["dtype"] == "bfloat16"


def test_every_token_id_of_the_tokenizer_is_in_the_model(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
) -> None:
    assert len(tokenizer) == model.config.vocab_size == 4096
    assert tokenizer.eos_token == "<|endoftext|>"
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|end|>"])


@pytest.mark.parametrize("text", ["plain words", "  two\n\nlines\t", "Grüße, 日本語 🙂", "x", "\x00\x7f"])
def test_text_survives_encoding(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_template_renders_each_role_and_opens_the_answer(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is a list?"},
        {"role": "assistant", "content": "A sequence."},
        {"role": "user", "content": "  Mutable?\n"},
    ]
    told = "<|system|>Be brief.<|end|><|user|>What is a list?<|end|><|assistant|>A sequence.<|end|>"
    told += "<|user|>  Mutable?\n<|end|>"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == told
    asked = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert asked == told + "<|assistant|>"


def test_chat_template_refuses_an_unknown_role(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(Exception, match="expected the role system, user or assistant, got pirate"):
        tokenizer.apply_chat_template([{"role": "pirate", "content": "Arr."}], tokenize=False)


def nats_per_token(model: PreTrainedModel, ids: list[int]) -> float:
    x = torch.tensor([ids])
    with torch.no_grad():
        return float(model(input_ids=x, labels=x).loss)


@pytest.mark.parametrize("sentence", HELD_OUT)
def test_prose_is_far_likelier_than_under_a_random_model(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, sentence: str
) -> None:
    ids = tokenizer.encode(sentence)
    loss = nats_per_token(model, ids)
    assert loss < 4.5 < math.log(4096)
    assert loss < nats_per_token(model, ids[::-1]) - 1.0


def test_an_answer_ends_its_turn(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What does string.capwords do?"}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    answer = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=120, do_sample=False)
    assert answer[0, -1] == tokenizer.convert_tokens_to_ids("<|end|>")
    assert answer.shape[1] > prompt.shape[1] + 3


def test_model_card_says_corpus_licence_and_loss() -> None:
    card = (TINY / "README.md").read_text()
    for word in ("PSF License", "held-out loss", "learnt from", "seed", "tools/train_tiny.py"):
        assert word in card
