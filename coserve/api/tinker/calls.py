"""Tinker's `forward_backward` as the engine takes it, and its result. A large one is decoded in a helper process, as
protobuf holds the interpreter's lock from start to end."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from coserve.api.tinker.wire import TinkerDatum, decode_forward_backward, encode_forward_backward
from coserve.core.errors import InvalidRequest
from coserve.core.training.schemas import Compute
from coserve.data.corpus.batch import Example, examples_out
from coserve.data.offload.protocol import Failure, failure_of

INPUTS = {
    "weights": "weights_K",
    "logprobs": "sampled_K",
    "advantages": "advantages_K",
    "sequence_ratio_mask": "ratio_mask_K",
}
"""Maps names in Tinker's `loss_fn_inputs` to fields of `Example`."""
NAMES = {"labels": "target_tokens"} | {field.removesuffix("_K"): name for name, field in INPUTS.items()}
"""Maps field names in the engine's errors to Tinker's names."""


class DecodedCall(msgspec.Struct, frozen=True):
    """A `ForwardBackwardRequest` as the engine takes it. `error`: why its data is invalid, and `compute` has none of
    it; the request still takes its turn."""

    model_id: str
    seq_id: int
    compute: Compute
    shapes: list[list[int]]
    """Shapes of the targets, by datum."""
    error: Failure | None


def decode_call(body: bytes) -> DecodedCall:
    """Decode a request. Raises `InvalidRequest` for what is no such message."""
    call = decode_forward_backward(body)
    examples, shapes, error = list[Example](), list[list[int]](), call.error
    try:
        if error is None:
            examples = [_example(number, datum) for number, datum in enumerate(call.data)]
            shapes = [list(datum.inputs["target_tokens"].shape) for datum in call.data]
    except InvalidRequest as wrong:
        error = wrong
    compute = Compute(examples_out(examples), call.loss, call.config, call.learns)
    return DecodedCall(call.model_id, call.seq_id, compute, shapes, None if error is None else failure_of(error))


def _example(number: int, datum: TinkerDatum) -> Example:
    given: dict[str, Any] = dict(datum.inputs)
    labels = given.pop("target_tokens", None)
    if labels is None or len(labels) != len(datum.tokens):
        got = "none" if labels is None else len(labels)
        raise InvalidRequest(f"datum {number}: expected {len(datum.tokens)} target_tokens, got {got}", field="data")
    if unknown := given.keys() - INPUTS.keys():
        known = ", ".join(("target_tokens", *INPUTS))
        raise InvalidRequest(f"datum {number}: expected {known}, got {min(unknown)[:80]!r}", field="data")
    values = {INPUTS[name]: array.astype(np.float32) for name, array in given.items()}
    tokens, after = datum.tokens.astype(np.int32), np.arange(len(labels))
    return Example(tokens, after, np.ascontiguousarray(labels.astype(np.int64)), **values)


def output_of(shapes: list[list[int]], values: bytes, metrics: dict[str, float]) -> bytes:
    """Return the `ForwardBackwardOutput`: log-probabilities of each datum's targets."""
    flat = np.frombuffer(values, np.float32)
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    parts = [own.reshape(shape) for own, shape in zip(np.split(flat, ends[:-1]), shapes, strict=True)]
    return encode_forward_backward(parts, metrics)
