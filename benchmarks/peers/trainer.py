"""The fine-tuning process beside another server: PEFT's LoRA training without a pause, one line of JSON for each
optimizer step.

    python -m benchmarks.peers.trainer --trace trace.jsonl --model FOLDER [--plain] > steps.jsonl

Batches, row lengths, learning rate, rank and rows are those of the trace's fine-tuning jobs. As a careful user runs
PEFT: each decoder layer compiled, the loss in chunks of 1024 tokens, fused AdamW; `--plain` leaves all that out. A line
on standard input is a duty cycle: 0.5 pauses after each step for as long as it took. Ends with its standard input.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coserve.data.pretrained.tokenizer import Tokenizer
from coserve.workloads.trace import load_trace

if TYPE_CHECKING:
    import torch

CHUNK = 1024
ROW_TOKENS = 512
"""Of a trace that does not say."""
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Duty:
    """The share of the time in which the trainer computes."""

    def __init__(self) -> None:
        self._share, self._changed = 1.0, threading.Event()

    def set(self, share: float) -> None:
        """Also ends a pause."""
        self._share = share
        self._changed.set()

    def pause(self, worked: float) -> None:
        """After `worked` seconds of a step."""
        self._changed.clear()
        self._changed.wait(worked * (1 / self._share - 1))


def batches(trace: Path, model: Path, rows: int, length: int) -> Iterator[list[list[int]]]:
    """Endless batches of `rows` rows of `length` token ids: the texts of the trace's jobs, cut to their length, the
    shorter ones joined to full rows.
    """
    tokenizer = Tokenizer.load(str(model))
    ids: list[int] = []
    for job in load_trace(trace).finetunes[:1]:
        for row in job.rows:
            ids += tokenizer.encode(str(row.get("text") or " ".join(map(str, row.values()))))[:length]
    if not ids:
        raise SystemExit("expected fine-tuning jobs in the trace")
    ids *= -(-rows * length // len(ids)) + 1
    at = 0
    while True:
        if at + rows * length > len(ids):
            at = 0
        yield [ids[at + i * length : at + (i + 1) * length] for i in range(rows)]
        at += rows * length


def build(model: Path, rank: int, device: str, *, plain: bool) -> Any:  # noqa: ANN401 - a PEFT model, whose members have no types
    """The base with random weights and one trained adapter."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=dtype)
    return adapted(base, rank, TARGETS, compiled=not plain)


def adapted(base: Any, rank: int, targets: Sequence[str], *, compiled: bool, mode: str = "default") -> Any:  # noqa: ANN401 - as `build` has it
    """The base in a PEFT model, with one trained adapter. `compiled`: each decoder layer is, for one shape of batches,
    in this mode of `torch.compile`."""
    import peft
    from torch import nn

    settings = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(targets), task_type="CAUSAL_LM")
    # In the base's type, which is faster than PEFT's default of float32 adapters.
    found = peft.get_peft_model(base, settings, autocast_adapter_dtype=False)
    if compiled:
        inner: Any = found.get_base_model()
        for layer in next(each for each in inner.base_model.children() if isinstance(each, nn.ModuleList)):
            layer.compile(dynamic=False, mode=mode)
    return found


def chunked_loss(model: Any, ids: torch.Tensor, chunk: int = CHUNK) -> torch.Tensor:  # noqa: ANN401 - as `build` has it
    """Mean cross-entropy of the next tokens; logits of `chunk` tokens at a time, computed again in the backward."""
    import torch
    from torch.utils.checkpoint import checkpoint

    base = model.get_base_model()
    hidden = base.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
    wanted = ids[:, 1:].flatten()
    head = base.get_output_embeddings()

    def loss_of(part: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(head(part).float(), targets, reduction="sum")

    parts = zip(torch.split(hidden, chunk), torch.split(wanted, chunk), strict=True)
    losses = [checkpoint(loss_of, part, targets, use_reentrant=False) for part, targets in parts]
    return torch.stack(losses).sum() / wanted.numel()


def train(options: argparse.Namespace, duty: Duty) -> None:
    import torch

    scenario = load_trace(options.trace).scenario
    length = scenario.row_tokens or ROW_TOKENS
    rows = max(1, scenario.batch_tokens // length)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(scenario.seed)
    model = build(options.model, scenario.rank[0], device, plain=options.plain)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=scenario.learning_rate, fused=True if device == "cuda" else None)
    for batch in batches(options.trace, options.model, rows, length):
        began = time.monotonic()
        ids = torch.tensor(batch, device=device)
        loss = model(input_ids=ids, labels=ids).loss if options.plain else chunked_loss(model, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        value = float(loss.detach())  # waits for the GPU: the step has ended
        print(json.dumps({"at": time.monotonic(), "tokens": ids.numel(), "loss": round(value, 4)}), flush=True)
        duty.pause(time.monotonic() - began)


def follow_standard_input(duty: Duty) -> None:
    """Take duty cycles, and end with the input: the parent closes it, also when it is killed."""
    for line in sys.stdin:
        duty.set(float(line))
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="folder with config.json and a tokenizer")
    parser.add_argument("--plain", action="store_true", help="nothing compiled, the loss as transformers computes it")
    options = parser.parse_args()
    threading.Thread(target=follow_standard_input, args=(duty := Duty(),), daemon=True).start()
    train(options, duty)


if __name__ == "__main__":
    main()
