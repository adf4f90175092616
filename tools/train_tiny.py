"""Make the bundled base again: corpus and tokenizer, then the model.

    python tools/train_tiny.py corpus --out build/tiny                  # CPython 3.11; a minute
    python tools/train_tiny.py train --corpus build/tiny --out coserve/assets/tiny    # one GPU; minutes

The first step depends on the Python version alone (it reads that Python's own text); the second on the first's output
and the seed, up to the GPU's rounding.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import platform
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import AdamW
    from torch.optim.lr_scheduler import LambdaLR
    from transformers import LlamaForCausalLM

SPECIAL_TOKENS = ["<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
VOCAB = 4096
CONTEXT = 1024
CHAT_TEMPLATE = (
    "{%- for message in messages -%}\n"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('expected the role system, user or assistant, got ' ~ message['role']) -}}"
    "{%- endif -%}\n"
    "{{- '<|' ~ message['role'] ~ '|>' ~ message['content'] ~ '<|end|>' -}}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}\n"
)


@dataclass(frozen=True)
class Recipe:
    """Hyper-parameters of a training run; a batch is `batch` sequences of `CONTEXT` tokens."""

    steps: int = 1500
    batch: int = 64
    learning_rate: float = 3e-3
    warmup: int = 100
    weight_decay: float = 0.1
    dropout: float = 0.2
    clip: float = 1.0
    seed: int = 0
    evaluate: int = 50
    context: int = CONTEXT


def write_corpus(out: Path) -> None:
    """`corpus.jsonl.gz` (rows of name, held_out, text) and the tokenizer's files."""
    from tiny_corpus import build_corpus, training_texts

    rows = [
        {"name": document.name, "held_out": document.held_out, "text": text}
        for document in build_corpus()
        for text in training_texts(document)
    ]
    out.mkdir(parents=True, exist_ok=True)
    body = "".join(json.dumps(row) + "\n" for row in rows)
    (out / "corpus.jsonl.gz").write_bytes(gzip.compress(body.encode(), mtime=0))
    about = {"python": platform.python_version(), "characters": sum(len(row["text"]) for row in rows)}
    (out / "about.json").write_text(json.dumps(about))
    write_tokenizer(out, [row["text"] for row in rows if not row["held_out"]])
    print(f"{len(rows)} texts, {about['characters']} characters")


def write_tokenizer(out: Path, texts: list[str]) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def train(corpus: Path, out: Path, recipe: Recipe) -> None:
    """Train, keep the weights with the best held-out loss, write the folder."""
    import torch

    torch.manual_seed(recipe.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    texts = read_texts(corpus, device)
    print(f"{texts.learn_tokens} tokens to learn from, {texts.held_tokens} held out, on {device}")
    model = new_model().to(device)
    if recipe.dropout:
        add_dropout(model, recipe.dropout)
    started = time.perf_counter()
    best_step = fit(model, texts, recipe, device)
    seconds = time.perf_counter() - started
    model.to(torch.bfloat16)
    report = {
        "held_out_loss": mean_loss(model, texts.held, device),
        "held_out_prose_loss": mean_loss(model, texts.held_prose, device),
        "best_step": best_step,
        "seconds": seconds,
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "torch": torch.__version__,
        "learn_tokens": texts.learn_tokens,
        "held_out_tokens": texts.held_tokens,
        "trained_tokens": best_step * recipe.batch * recipe.context,
        "parameters": sum(p.numel() for p in model.parameters()),
        "recipe": asdict(recipe),
        "corpus": json.loads((corpus / "about.json").read_text()),
    }
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(corpus / name, out / name)
    (out / "README.md").write_text(model_card(report))
    print(json.dumps(report, indent=2))


@dataclass(frozen=True)
class Texts:
    """Token ids of the texts, one tensor each; `held_prose` is `held` without the conversations."""

    learn: list[Tensor]
    held: list[Tensor]
    held_prose: list[Tensor]

    @property
    def learn_tokens(self) -> int:
        return sum(map(len, self.learn))

    @property
    def held_tokens(self) -> int:
        return sum(map(len, self.held))


def read_texts(corpus: Path, device: str) -> Texts:
    import torch
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(corpus / "tokenizer.json"))
    rows = [json.loads(line) for line in gzip.decompress((corpus / "corpus.jsonl.gz").read_bytes()).splitlines()]
    encoded = tokenizer.encode_batch([row["text"] for row in rows], add_special_tokens=False)
    pairs = [(row, torch.tensor(e.ids, device=device)) for row, e in zip(rows, encoded, strict=True)]
    return Texts(
        learn=[ids for row, ids in pairs if not row["held_out"]],
        held=[ids for row, ids in pairs if row["held_out"]],
        held_prose=[ids for row, ids in pairs if row["held_out"] and not row["text"].startswith("<|")],
    )


def fit(model: LlamaForCausalLM, texts: Texts, recipe: Recipe, device: str) -> int:
    """Train in place; leaves the best weights in the model and returns their step."""
    import torch

    optimizer, schedule = new_optimizer(model, recipe)
    windows = endless_windows(texts.learn, recipe, device)
    best_loss, best_step, best = math.inf, 0, model.state_dict()
    for step in range(1, recipe.steps + 1):
        model.train()
        x = next(windows)
        with torch.autocast(device, torch.bfloat16):
            loss = model(input_ids=x, labels=x, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % recipe.evaluate == 0 or step == recipe.steps:
            held_loss = mean_loss(model, texts.held, device)
            if held_loss < best_loss:
                best_loss, best_step = held_loss, step
                best = {name: value.detach().clone() for name, value in model.state_dict().items()}
            print(f"step {step}: loss {loss.item():.3f}, held out {held_loss:.3f}", flush=True)
    model.load_state_dict(best)
    return best_step


def new_model() -> LlamaForCausalLM:
    """A Llama of 4.7 million parameters, freshly initialised, float32."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=[0, 1],
        pad_token_id=0,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=[0, 1], pad_token_id=0, do_sample=True, temperature=0.8)
    return model


def add_dropout(model: LlamaForCausalLM, p: float) -> None:
    """Dropout on the embeddings and on each residual branch, by hooks: the saved model knows nothing of it."""
    from torch import nn

    def drop(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return nn.functional.dropout(output, p, module.training)

    model.model.embed_tokens.register_forward_hook(drop)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.register_forward_hook(drop)


def new_optimizer(model: LlamaForCausalLM, recipe: Recipe) -> tuple[AdamW, LambdaLR]:
    """AdamW with decay on matrices only; linear warm-up, then a cosine down to a tenth."""
    import torch

    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95))

    def factor(step: int) -> float:
        if step < recipe.warmup:
            return (step + 1) / recipe.warmup
        done = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
        return 0.55 + 0.45 * math.cos(math.pi * min(1.0, done))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def endless_windows(texts: list[Tensor], recipe: Recipe, device: str) -> Iterator[Tensor]:
    """Batches (batch, context): each epoch joins the texts in a new order and cuts them at a new offset."""
    import torch

    generator = torch.Generator().manual_seed(recipe.seed)
    left = torch.empty(0, recipe.context, dtype=torch.long, device=device)
    while True:
        order = torch.randperm(len(texts), generator=generator).tolist()
        offset = int(torch.randint(recipe.context, (), generator=generator))
        stream = torch.cat([texts[i] for i in order])[offset:]
        whole = stream[: len(stream) // recipe.context * recipe.context].view(-1, recipe.context)
        left = torch.cat([left, whole])
        while len(left) >= recipe.batch:
            yield left[: recipe.batch]
            left = left[recipe.batch :]


def mean_loss(model: LlamaForCausalLM, texts: list[Tensor], device: str) -> float:
    """Nats per token over the texts, joined and cut into windows of the context; dropout is off."""
    import torch

    model.eval()
    stream = torch.cat(texts)
    windows = stream[: len(stream) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        losses = [model(input_ids=x, labels=x, use_cache=False).loss.float() * len(x) for x in windows.split(32)]
    return float(torch.stack(losses).sum()) / len(windows)


def model_card(report: dict[str, Any]) -> str:
    recipe, corpus = report["recipe"], report["corpus"]
    return f"""---
license: apache-2.0
language: en
library_name: transformers
---

# The bundled base of coserve

A Llama of {report["parameters"] / 1e6:.2f} million parameters (5 layers, hidden 256, 8 heads and 4 key-value heads of 32,
MLP 688, tied embeddings, context {CONTEXT}) in bfloat16, with a byte-level BPE vocabulary of {VOCAB} and a chat template.
It exists so that coserve can be shown and tested on two CPU cores with a language model that was trained. It writes
English that reads like Python's documentation; it knows nothing, and its answers are not facts.

## Corpus

The prose that CPython {corpus["python"]} itself carries: the Language Reference (`pydoc_data.topics`), IDLE's help, docstrings
and comments of the standard library and its tests, docstrings of the C modules, comments of the C headers; and
conversations made from the docstrings ("What does textwrap.wrap do?"). {corpus["characters"] / 1e6:.1f} million characters,
{(report["learn_tokens"] + report["held_out_tokens"]) / 1e6:.2f} million tokens. CPython is under the PSF License Agreement 2.0: Copyright (c)
2001-2023 Python Software Foundation; All Rights Reserved. It allows derivative works that keep this notice and summarise
the changes: here the text served to train these weights, and is not shipped itself. Files of CPython with a licence
notice of their own were left out. The weights are under coserve's own licence, Apache-2.0.

## Training

| | |
|---|---|
| held-out loss | {report["held_out_loss"]:.3f} nats per token (prose alone {report["held_out_prose_loss"]:.3f}; ln {VOCAB} = {math.log(VOCAB):.2f}) |
| held out | {report["held_out_tokens"]} tokens: whole sources, about one in 64, chosen by a hash of the name |
| learnt from | {report["learn_tokens"]} tokens, {report["trained_tokens"] / 1e6:.0f} million read ({report["trained_tokens"] / report["learn_tokens"]:.0f} epochs) |
| kept | step {report["best_step"]} of {recipe["steps"]}, the best on the held-out text |
| batch | {recipe["batch"]} x {recipe["context"]} tokens |
| optimizer | AdamW, betas 0.9 and 0.95, weight decay {recipe["weight_decay"]}, clip {recipe["clip"]} |
| learning rate | {recipe["learning_rate"]}, {recipe["warmup"]} steps of warm-up, cosine to a tenth |
| dropout | {recipe["dropout"]} on embeddings and residual branches, in training only |
| seed | {recipe["seed"]} |
| hardware | {report["device"]}, {report["seconds"]:.0f} s, torch {report["torch"]}, bfloat16 autocast |

Made by `tools/train_tiny.py`, which holds every step:

    python tools/train_tiny.py corpus --out build/tiny
    python tools/train_tiny.py train --corpus build/tiny --out coserve/assets/tiny
"""  # noqa: E501


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    corpus = commands.add_parser("corpus", help="corpus and tokenizer, from this Python's own text")
    corpus.add_argument("--out", type=Path, required=True)
    training = commands.add_parser("train", help="the model, its card and the tokenizer beside it")
    training.add_argument("--corpus", type=Path, required=True)
    training.add_argument("--out", type=Path, required=True)
    for field in fields(Recipe):
        training.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    given = vars(parser.parse_args())
    if given.pop("command") == "corpus":
        write_corpus(given["out"])
    else:
        train(given.pop("corpus"), given.pop("out"), Recipe(**given))


if __name__ == "__main__":
    main()
