"""Checks a client's calls, and prepares them for a `ClientTrainee`."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from coserve.core.errors import InvalidRequest
from coserve.core.training.calls import Compute
from coserve.data.corpus.batch import Batch, Example, examples_in
from coserve.data.corpus.packing import pack
from coserve.finetune.losses.loss import Cispo, CrossEntropy, Dro, Gspo, ImportanceSampling, Loss, Ppo, TokenLoss
from coserve.finetune.memory_limits import MicroBatches
from coserve.finetune.passes.mixing import BatchLimits

LOSSES: dict[str, type[TokenLoss]] = {
    "cross_entropy": CrossEntropy,
    "importance_sampling": ImportanceSampling,
    "ppo": Ppo,
    "cispo": Cispo,
    "dro": Dro,
    "gspo": Gspo,
}
"""Losses by the Tinker SDK's names."""
RENAMED = {"clip_low_threshold": "low", "clip_high_threshold": "high"}
"""Fields of losses by the SDK's names."""


@dataclass(frozen=True)
class Work:
    """A forward, and a backward if it `learns`."""

    examples: tuple[Example, ...]
    loss: Loss
    learns: bool
    micro_batches: MicroBatches
    """Indices of examples, within the engine's limits."""


def work_of(call: Compute, vocab: int, limits: BatchLimits) -> Work:
    """Check a call, on any thread: it may have thousands of examples. Raises `InvalidRequest`."""
    loss, examples = Loss(tokens=_loss(call.loss, call.config)), examples_in(call.batch)
    if not examples:
        raise InvalidRequest("expected at least one example", field="data")
    for number, example in enumerate(examples):
        try:
            loss.check(Batch((example,)), vocab)
        except InvalidRequest as error:
            raise InvalidRequest(f"example {number}: {error.message}", field="data") from None
        if (length := len(example.tokens_N)) > limits.tokens:
            raise InvalidRequest(
                f"example {number}: expected at most {limits.tokens} tokens (--micro-batch-tokens), got {length}",
                field="data",
            )
    if len({example.labels_K.shape[1:] for example in examples}) > 1:
        raise InvalidRequest("expected equally many candidates for the targets of all examples", field="data")
    lengths = [len(example.tokens_N) for example in examples]
    packed = pack(lengths, limits.tokens, rows=limits.rows)
    return Work(examples, loss, call.learns, [tuple(rows) for rows in packed])


def _loss(name: str, config: dict[str, float]) -> TokenLoss:
    kind = LOSSES.get(name)
    if kind is None:
        raise InvalidRequest(f"expected one of {', '.join(LOSSES)}, got {name!r}", field="loss_fn")
    known = {field for field in (*RENAMED, "beta") if RENAMED.get(field, field) in kind.__struct_fields__}
    if unknown := config.keys() - known:
        raise InvalidRequest(f"{name} has no {', '.join(sorted(unknown))}", field="loss_fn_config")
    if not np.isfinite([*config.values(), 0.0]).all():
        raise InvalidRequest("expected finite numbers", field="loss_fn_config")
    return msgspec.convert({"type": kind.__name__} | {RENAMED.get(key, key): own for key, own in config.items()}, kind)
