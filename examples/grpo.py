"""GRPO by the Tinker SDK on a daemon: rewards for answers, advantages from the mean of each group.

    coserve serve --model Qwen/Qwen3-8B
    TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-any python examples/grpo.py --model Qwen/Qwen3-8B

The task: sums of two numbers. The rewards are printed for each step; the adapter is served as `<model>-sums`, with dots
for colons, by every route.
"""

from __future__ import annotations

import argparse
import random
import re

import numpy as np
import tinker
from tinker import types
from transformers import AutoTokenizer, PreTrainedTokenizerBase


def reward(text: str, answer: int) -> float:
    """1 for the answer, and a tenth for any number."""
    found = re.search(r"-?\d+", text)
    if found is None:
        return 0.0
    return 1.0 if int(found[0]) == answer else 0.1


def datum(prompt: list[int], sampled: types.SampledSequence, advantage: float) -> types.Datum:
    """What one answer teaches. Tokens of the prompt have no advantage."""
    before = len(prompt) - 1
    logprobs = [0.0] * before + list(sampled.logprobs or ())
    advantages = [0.0] * before + [advantage] * len(sampled.tokens)
    return types.Datum(
        model_input=types.ModelInput.from_ints([*prompt, *sampled.tokens[:-1]]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.array([0] * before + list(sampled.tokens))),
            "logprobs": types.TensorData.from_numpy(np.array(logprobs, np.float32)),
            "advantages": types.TensorData.from_numpy(np.array(advantages, np.float32)),
        },
    )


def train(
    service: tinker.ServiceClient,
    tokenizer: PreTrainedTokenizerBase,
    model: str,
    *,
    steps: int,
    prompts: int,
    group: int,
    learning_rate: float = 4e-5,
) -> list[float]:
    """Train; return the mean reward of each step."""
    trainer = service.create_lora_training_client(base_model=model, rank=16, train_unembed=False).result()
    params = types.SamplingParams(max_tokens=16, temperature=1.0)  # without top_p: q is what was sampled from
    chance, rewards = random.Random(0), list[float]()
    for step in range(steps):
        sampler = trainer.save_weights_and_get_sampling_client().result()
        sums = [(chance.randrange(100), chance.randrange(100)) for _ in range(prompts)]
        encoded = [tokenizer.encode(f"{a} + {b} =") for a, b in sums]
        futures = [sampler.sample(types.ModelInput.from_ints(tokens), group, params) for tokens in encoded]
        data, scores = list[types.Datum](), list[float]()
        for (a, b), tokens, future in zip(sums, encoded, futures, strict=True):
            answers = future.result().sequences
            own = np.array([reward(tokenizer.decode(each.tokens), a + b) for each in answers])
            scores += own.tolist()
            advantages = own - own.mean()
            data += [datum(tokens, *each) for each in zip(answers, advantages.tolist(), strict=True) if each[1]]
        rewards.append(float(np.mean(scores)))
        if data:
            computed = trainer.forward_backward(data, "ppo")
            trainer.optim_step(types.AdamParams(learning_rate=learning_rate)).result()
            computed.result()
        print(f"step {step}: reward {rewards[-1]:.3f}", flush=True)
    print("served as", trainer.save_weights_for_sampler("sums").result().path)
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the daemon's base, by its name")
    parser.add_argument("--tokenizer", default=None, help="a folder or a hub name; default: the model's")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.tokenizer or given.model)
    with tinker.ServiceClient() as service:
        train(service, tokenizer, given.model, steps=given.steps, prompts=given.prompts, group=given.group)


if __name__ == "__main__":
    main()
