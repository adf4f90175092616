"""DPO by the Tinker SDK on a daemon: a loss of one's own, by `forward_backward_custom`.

    coserve serve --model Qwen/Qwen3-8B
    TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-any python examples/dpo.py --model Qwen/Qwen3-8B

Pairs of answers, a polite one chosen and a curt one rejected; the reference is the base. The loss begins at ln 2.
(A job with `training.loss` of type `dpo` does the same without a program, from a file of pairs.)
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import tinker
import torch
from tinker import types
from torch.nn.functional import logsigmoid
from transformers import AutoTokenizer, PreTrainedTokenizerBase

BETA = 0.1
PAIRS = [
    ("Can you help me?", " Of course, with pleasure!", " No."),
    ("Where is the station?", " Around the corner; have a good trip!", " Look it up."),
    ("Is it raining?", " It is, so do take an umbrella!", " Yes."),
    ("What time is it?", " It is noon, my friend!", " Noon."),
]


def datum(prompt: list[int], answer: list[int]) -> types.Datum:
    tokens, weights = [*prompt, *answer], [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.array(tokens[1:])),
            "weights": types.TensorData.from_numpy(np.array(weights, np.float32)),
        },
    )


def answer_logprobs(data: list[types.Datum], found: list[Any]) -> torch.Tensor:
    """Log-probability of each answer."""
    weights = [each.loss_fn_inputs["weights"].to_torch() for each in data]
    return torch.stack([(own * p).sum() for own, p in zip(weights, found, strict=True)])


def train(
    service: tinker.ServiceClient,
    tokenizer: PreTrainedTokenizerBase,
    model: str,
    *,
    steps: int,
    learning_rate: float = 1e-4,
) -> list[float]:
    """Train; return the loss of each step."""
    trainer = service.create_lora_training_client(base_model=model, rank=16, train_unembed=False).result()
    data = [
        datum(tokenizer.encode(prompt), tokenizer.encode(answer, add_special_tokens=False))
        for prompt, *answers in PAIRS
        for answer in answers
    ]
    reference = trainer.forward(data, "cross_entropy").result().loss_fn_outputs
    before = answer_logprobs(data, [each["logprobs"].to_torch() for each in reference])

    def loss(data: list[types.Datum], found: list[Any]) -> tuple[torch.Tensor, dict[str, float]]:
        rewards = BETA * (answer_logprobs(data, found) - before).view(-1, 2)
        margins = rewards[:, 0] - rewards[:, 1]
        value = -logsigmoid(margins).mean()
        return value, {"loss": value.item(), "accuracy": (margins > 0).float().mean().item()}

    losses = []
    for step in range(steps):
        computed = trainer.forward_backward_custom(data, loss)
        stepped = trainer.optim_step(types.AdamParams(learning_rate=learning_rate))
        metrics = computed.result().metrics
        stepped.result()
        losses.append(metrics["loss"])
        print(f"step {step}: loss {metrics['loss']:.4f}, accuracy {metrics['accuracy']:.2f}", flush=True)
    print("served as", trainer.save_weights_for_sampler("polite").result().path)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the daemon's base, by its name")
    parser.add_argument("--tokenizer", default=None, help="a folder or a hub name; default: the model's")
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.tokenizer or given.model)
    with tinker.ServiceClient() as service:
        train(service, tokenizer, given.model, steps=given.steps)


if __name__ == "__main__":
    main()
