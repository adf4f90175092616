"""The head of a fine-tuning micro-batch: logits, their loss and the gradient of the last hidden states, chunk by chunk.

    python -m benchmarks.kernels.loss_head --out benchmarks/results

Three ways, by targets K and targets of a chunk: `autograd` (log-softmax in fp32, differentiated by autograd), `kernel`
(as coserve trains: logits become their gradient in one kernel) and `products`, the two GEMMs alone. Milliseconds of all
K targets, the host's overhead included, and GiB that are allocated at most. Then the kernels alone over 2,048 rows, by
the shape of their programs; a row counts as read once and written once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.common.options import make_parser
from benchmarks.common.provenance import command, gpu_run
from benchmarks.common.timing import event_us
from coserve.kernels.losses import launch

HIDDEN, VOCAB = 4096, 128256
TARGETS = (512, 2048, 4096)
CHUNKS = (1024, 2048, 4096)
"""Targets of a chunk."""
SHAPES = ((1024, 4), (2048, 8), (4096, 8), (4096, 16), (8192, 16), (8192, 32), (16384, 32))
"""Logits that a program has at once, and its warps."""
Way = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of a chunk's hidden states (K, D), weight (V, D), labels (K) and losses (K, 2): the gradient of the hidden states (K,
D)."""


def autograd(x_KD: Tensor, weight_VD: Tensor, labels_K: Tensor, found_K2: Tensor) -> Tensor:
    leaf_KD = x_KD.detach().requires_grad_()
    logits_KV = functional.linear(leaf_KD, weight_VD)
    loss = functional.cross_entropy(logits_KV.float(), labels_K, reduction="sum")
    with torch.no_grad():
        (logits_KV.gather(1, labels_K[:, None])[:, 0] == logits_KV.amax(1)).sum()
    return torch.autograd.grad(loss, leaf_KD)[0]


def kernel(x_KD: Tensor, weight_VD: Tensor, labels_K: Tensor, found_K2: Tensor) -> Tensor:
    leaf_KD = x_KD.detach().requires_grad_()
    logits_KV = functional.linear(leaf_KD, weight_VD)
    launch.negative_log_likelihood_(logits_KV.detach(), labels_K, found_K2)
    return torch.autograd.grad(logits_KV, leaf_KD, logits_KV.detach())[0]


def products(x_KD: Tensor, weight_VD: Tensor, labels_K: Tensor, found_K2: Tensor) -> Tensor:
    return functional.linear(x_KD, weight_VD) @ weight_VD


WAYS: dict[str, Way] = {"autograd": autograd, "kernel": kernel, "products": products}


class Case:
    """K targets of a head."""

    def __init__(self, targets: int, hidden: int, vocab: int, weight_VD: Tensor) -> None:
        device = weight_VD.device
        self.weight_VD = weight_VD
        self.x_KD = torch.randn(targets, hidden, device=device, dtype=weight_VD.dtype)
        self.labels_K = torch.randint(vocab, (targets,), device=device)
        self.found_K2 = torch.empty(targets, 2, device=device, dtype=torch.float64)

    def run(self, way: Way, chunk: int) -> Tensor:
        """The gradient (K, D)."""
        parts = zip(*(torch.split(one, chunk) for one in (self.x_KD, self.labels_K, self.found_K2)), strict=True)
        return torch.cat([way(x_KD, self.weight_VD, labels_K, found_K2) for x_KD, labels_K, found_K2 in parts])


def heads(weight_VD: Tensor) -> list[dict[str, Any]]:
    rows = []
    for targets in TARGETS:
        case = Case(targets, HIDDEN, VOCAB, weight_VD)
        for chunk in (one for one in CHUNKS if one <= max(targets, CHUNKS[0])):
            for name, way in WAYS.items():
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                timing = event_us([partial(case.run, way, chunk)])
                gib = (torch.cuda.max_memory_allocated() - before) / 2**30
                rows.append({"K": targets, "chunk": chunk, "way": name, "ms": timing.us / 1e3, "gib": round(gib, 3)})
    return rows


def kernels(rows: int = 2048) -> list[dict[str, Any]]:
    """Logits become other ones in each call: what they are does not matter."""
    logits_KV, teacher_KV = (torch.randn(rows, VOCAB, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    labels_K = torch.randint(VOCAB, (rows,), device="cuda")
    found_K2 = torch.empty(rows, 2, device="cuda", dtype=torch.float64)
    found = []
    for block, warps in SHAPES:
        shape = {"block": block, "warps": warps}
        ways = {
            "likelihood": partial(launch.negative_log_likelihood_, logits_KV, labels_K, found_K2, **shape),
            "divergence": partial(launch.divergence_, logits_KV, teacher_KV, labels_K, found_K2, **shape),
        }
        for name, run in ways.items():
            us = event_us([run]).us
            tensors = 2 if name == "likelihood" else 3
            found.append({"kernel": name, **shape, "us": us, "gb_s": round(tensors * logits_KV.nbytes / us / 1e3)})
    return found


def main() -> None:
    options = make_parser(__doc__).parse_args()
    torch.manual_seed(0)
    about = gpu_run("benchmarks.kernels.loss_head", "", options.commit, {}) | {
        "command": command("benchmarks.kernels.loss_head")
    }
    shapes = kernels()
    weight_VD = torch.randn(VOCAB, HIDDEN, device="cuda", dtype=torch.bfloat16) * 0.02
    rows = heads(weight_VD)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "loss_head.json").write_text(json.dumps({**about, "rows": rows, "kernels": shapes}, indent=1) + "\n")


if __name__ == "__main__":
    main()
