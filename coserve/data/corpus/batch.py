"""Rows that a session computes at once, from a corpus or from a client: tokens, and what to predict after them. No
torch.

Letters: N tokens, K targets (tokens to predict), C candidates of a target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import msgspec
import numpy as np
import numpy.typing as npt

from coserve.core.errors import InvalidRequest
from coserve.core.training.settings import KtoLoss, TrainingSettings
from coserve.data.corpus.tokenized import UNDESIRABLE, Corpus

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Example:
    """A sequence of N tokens, which attend only to each other, and its K targets."""

    tokens_N: npt.NDArray[np.int32]  # noqa: N815
    after_K: Ints  # noqa: N815
    """Index of the token after which each target is predicted, ascending."""
    labels_K: Ints  # noqa: N815
    """The target tokens (K), or several candidates for each (K, C)."""
    weights_K: Floats | None = None  # noqa: N815
    """Shape of `labels_K`; any sign. Read by `CrossEntropy`."""
    sampled_K: Floats | None = None  # noqa: N815
    """Log-probability (nats) with which each label was sampled. Like `advantages_K`, read by the policy-gradient
    losses."""
    advantages_K: Floats | None = None  # noqa: N815
    ratio_mask_K: Floats | None = None  # noqa: N815
    """Not 0: the target counts in the sequence's ratio. Read by `Gspo`."""
    sign: int | None = None
    """For KTO: 1 for a desirable answer, -1 for another one, 0 for the answer of another prompt."""

    def check(self, vocab: int) -> None:
        """Raise `InvalidRequest` unless shapes fit together and tokens are below `vocab`."""
        tokens, after, labels = self.tokens_N, self.after_K, self.labels_K
        if not (
            tokens.ndim == 1
            and len(tokens)
            and after.shape == labels.shape[:1]
            and labels.ndim <= 2
            and 0 not in labels.shape[1:]
        ):
            raise InvalidRequest("expected tokens, and a label (or a row of candidates) for each target")
        if after.size and not (after[0] >= 0 and after[-1] < len(tokens) and np.all(np.diff(after) > 0)):
            raise InvalidRequest(f"expected targets in ascending order after some of the {len(tokens)} tokens")
        for name, ids in (("tokens", tokens), ("labels", labels)):
            if ids.size and not (ids.min() >= 0 and ids.max() < vocab):
                raise InvalidRequest(f"expected {name} from 0 to {vocab - 1}, got {ids.min()} to {ids.max()}")
        for name, values, shape in (
            ("weights", self.weights_K, labels.shape),
            ("sampled", self.sampled_K, after.shape),
            ("advantages", self.advantages_K, after.shape),
            ("ratio_mask", self.ratio_mask_K, after.shape),
        ):
            if values is not None and (values.shape != shape or not np.isfinite(values).all()):
                got = "NaN or infinity" if values.shape == shape else values.shape
                raise InvalidRequest(f"expected finite {name} of shape {shape}, got {got}")


@dataclass(frozen=True)
class Batch:
    """Examples to compute together."""

    examples: tuple[Example, ...]
    pairs: bool = False
    """Whether each two examples are a pair: a prompt with the chosen answer, then with the rejected one."""
    encoded: int = 0
    """Leading examples, without targets, that an encoder reads; the others are decoded from its memory tokens."""

    @property
    def rows(self) -> int:
        """Number of examples, or of pairs, or for KTO of answers to their own prompts."""
        return sum(one.sign != 0 for one in self.examples) // (2 if self.pairs else 1)

    @property
    def tokens(self) -> int:
        return sum(len(one.tokens_N) for one in self.examples)

    @property
    def targets(self) -> int:
        """Targets of these rows."""
        return sum(len(one.after_K) for one in self.examples if one.sign != 0)


def arrays_out(value: object) -> tuple[tuple[int, ...], bytes]:
    """Encode an array for msgspec (`enc_hook`)."""
    if not isinstance(value, np.ndarray):
        raise NotImplementedError
    return value.shape, value.tobytes()


def arrays_in(kind: type, value: tuple[Sequence[int], bytes]) -> npt.NDArray[np.generic]:
    """Decode what `arrays_out` has encoded (`dec_hook`). `kind`: the field's `npt.NDArray`."""
    shape, data = value
    (dtype,) = get_args(get_args(kind)[1])
    return np.frombuffer(data, dtype).reshape(shape)


def examples_out(examples: Sequence[Example]) -> bytes:
    """Encode examples for another process."""
    return _ENCODER.encode(examples)


def examples_in(data: bytes) -> tuple[Example, ...]:
    """Decode what `examples_out` has encoded."""
    return _DECODER.decode(data)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=arrays_out)
_DECODER = msgspec.msgpack.Decoder(tuple[Example, ...], dec_hook=arrays_in)


def corpus_batch(corpus: Corpus, rows: Sequence[int], training: TrainingSettings | None = None) -> Batch:
    """Make a batch of rows of the corpus, given by index."""
    if training is not None and isinstance(training.loss, KtoLoss):
        return Batch(_labelled(corpus, rows, mismatches=training.mismatches))
    if corpus.candidates is not None:
        return Batch(tuple([_soft_example(corpus, row) for row in rows]))
    sequences = [sequence for row in rows for sequence in corpus.sequences(row)]
    return Batch(tuple([_example(*sequence) for sequence in sequences]), pairs=corpus.splits is not None)


def _labelled(corpus: Corpus, rows: Sequence[int], *, mismatches: bool) -> tuple[Example, ...]:
    """Return the rows with their signs. `mismatches`: then each prompt with the answer of the row before it, as in TRL;
    all of them have at most as many tokens as the rows. A row alone takes the answer of its neighbour in the corpus."""
    found = []
    for row in rows:
        tokens_N, target_N = corpus.row(row)
        found.append(replace(_example(tokens_N, target_N), sign=-1 if UNDESIRABLE in target_N else 1))
    alone = len(rows) == 1
    others = [(rows[0] - 1) % corpus.rows] if alone else [*rows[-1:], *rows[:-1]]
    for row, other in zip(rows, others, strict=True) if mismatches else ():
        (tokens_N, target_N), (after_N, after_target_N) = corpus.row(row), corpus.row(other)
        first, after = int(np.argmax(target_N > 0)), int(np.argmax(after_target_N > 0))
        most = len(tokens_N) if alone else corpus.longest
        tokens_N = np.concatenate((tokens_N[:first], after_N[after:]))[:most]
        target_N = np.concatenate((target_N[:first], after_target_N[after:]))[:most]
        found.append(replace(_example(tokens_N, target_N), sign=0))
    return tuple(found)


def _soft_example(corpus: Corpus, row: int) -> Example:
    plain, soft = _example(*corpus.row(row)), corpus.soft_targets(row)
    assert soft is not None, "expected a corpus of soft targets"
    return replace(plain, labels_K=soft[0], weights_K=soft[1])


def _example(tokens_N: npt.NDArray[np.int32], target_N: npt.NDArray[np.uint8]) -> Example:
    targets_K = np.flatnonzero(target_N)
    assert not targets_K.size or targets_K[0] > 0, "a sequence's first token is never a target"
    return Example(tokens_N, targets_K - 1, tokens_N[targets_K].astype(np.int64))
