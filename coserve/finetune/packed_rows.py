"""Rows of one or several jobs, packed into one sequence of tokens on the base's device, and noise on their embeddings.

Letters: T packed tokens, K kept tokens (those whose next token is a target), J jobs, Q sequences, D hidden.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coserve.core.errors import InvalidRequest
from coserve.data.corpus.batch import Batch, Example, Floats
from coserve.kernels.gpu.device import to_device
from coserve.kernels.lora.segments import Segments

ALIGNED = 16
"""Alignment in int64 elements: 128 bytes."""


@dataclass(frozen=True)
class TargetValues:
    """Numbers that token losses read of each target, fp32: see `Example`."""

    weights_K: Tensor | None = None  # noqa: N815
    sampled_K: Tensor | None = None  # noqa: N815
    advantages_K: Tensor | None = None  # noqa: N815
    ratio_mask_K: Tensor | None = None  # noqa: N815
    first_K: Tensor | None = None  # noqa: N815
    """Index of the first target of each target's sequence (int64); only with `ratio_mask_K`."""


@dataclass(frozen=True)
class PackedRows:
    """A packed batch. Token t of `keep_K` predicts `labels_K` (K), or one of several candidates (K, C), in token order.
    These tensors are int64. Sequence i is `bounds[i]:bounds[i + 1]`: a row, or half of a pair. The rows of each job are
    contiguous. Padding tokens, which belong to no job, form one last sequence."""

    tokens_T: Tensor  # noqa: N815
    positions_T: Tensor  # noqa: N815
    bounds: tuple[int, ...]
    keep_K: Tensor  # noqa: N815
    labels_K: Tensor  # noqa: N815
    jobs: tuple[tuple[int, int], ...] = ()
    """Tokens and targets of each job (J); empty: all rows belong to one job."""
    sequence_targets: tuple[int, ...] = ()
    """For preference losses: targets of each sequence (Q). A pair's two sequences are adjacent."""
    sequences_T: Tensor | None = None  # noqa: N815
    """For preference losses: the sequence index of each token."""
    signs: tuple[int, ...] = ()
    """For KTO: `Example.sign` of each sequence (Q)."""
    values: TargetValues = TargetValues()
    encoded: int = 0
    """Leading sequences that an encoder reads: see `Batch.encoded`. The batch is then of one job."""

    @property
    def tokens(self) -> int:
        return self.bounds[-1]

    @property
    def targets(self) -> int:
        return self.keep_K.shape[0]

    @property
    def token_bounds(self) -> tuple[int, ...]:
        """Job j has tokens `token_bounds[j]:token_bounds[j + 1]`."""
        return (0, *accumulate(tokens for tokens, _ in self.jobs)) if self.jobs else (0, self.tokens)

    @property
    def segment_bounds(self) -> tuple[int, ...]:
        """`token_bounds`, with padding tokens added to the last job's segment. They get no gradient."""
        return (*self.token_bounds[:-1], self.tokens)

    @property
    def segments(self) -> Segments:
        """The tokens that each job's adapter changes. An encoder's changes only the leading sequences (`encoded`)."""
        if self.encoded:
            return Segments((0, self.bounds[self.encoded], self.tokens), (0, -1))
        return Segments(self.segment_bounds, tuple(range(max(1, len(self.jobs)))))

    def segments_of(self, adapters: int) -> Segments:
        """`segments`, with a second adapter for the decoded sequences if there are more `adapters` than jobs."""
        own = self.segments
        return Segments(own.bounds, (0, 1)) if self.encoded and adapters > 1 else own

    @property
    def job_targets(self) -> tuple[int, ...]:
        """Number of targets of each job, in their order in `keep_K`."""
        return tuple(targets for _, targets in self.jobs) or (self.targets,)


def pack_jobs(batches: Sequence[Batch], device: torch.device, tokens_in_all: int = 0) -> PackedRows:
    """Concatenate the examples of each job's batch; attention treats each as its own sequence. Padded to
    `tokens_in_all`."""
    examples = [example for batch in batches for example in batch.examples]
    lengths = [len(example.tokens_N) for example in examples]
    missing = max(0, tokens_in_all - sum(lengths))
    starts = (0, *np.cumsum(lengths).tolist())
    arrays = [
        np.pad(np.concatenate([example.tokens_N for example in examples]).astype(np.int64), (0, missing)),
        np.pad(np.concatenate([np.arange(length) for length in lengths]), (0, missing)),  # padding: at position 0
        np.concatenate([start + example.after_K for start, example in zip(starts, examples, strict=False)]),
        _labels(examples),
    ]
    signs = tuple(example.sign for example in examples if example.sign is not None)
    by_sequence = bool(signs) or all(batch.pairs for batch in batches)
    if by_sequence:
        arrays.append(np.pad(np.repeat(np.arange(len(examples)), lengths), (0, missing)))
    masked = all(example.ratio_mask_K is not None for example in examples)
    if masked:
        counts = [len(example.after_K) for example in examples]
        arrays.append(np.repeat(np.cumsum(counts) - counts, counts))
    moved = _moved(arrays, device)
    return PackedRows(
        tokens_T=moved[0],
        positions_T=moved[1],
        bounds=(*starts, starts[-1] + missing) if missing else starts,
        keep_K=moved[2],
        labels_K=moved[3],
        jobs=tuple((batch.tokens, sum(len(example.after_K) for example in batch.examples)) for batch in batches),
        sequence_targets=tuple(len(example.after_K) for example in examples) if by_sequence else (),
        sequences_T=moved[4] if by_sequence else None,
        signs=signs,
        values=TargetValues(
            _values([example.weights_K for example in examples], device),
            _values([example.sampled_K for example in examples], device),
            _values([example.advantages_K for example in examples], device),
            _values([example.ratio_mask_K for example in examples], device),
            moved[-1] if masked else None,
        ),
        encoded=batches[0].encoded,
    )


def _labels(examples: Sequence[Example]) -> NDArray[np.int64]:
    shapes = {example.labels_K.shape[1:] for example in examples}
    if len(shapes) > 1:
        raise InvalidRequest("expected equally many candidates for the targets of all rows")
    return np.concatenate([example.labels_K for example in examples])


def _values(given: Sequence[Floats | None], device: torch.device) -> Tensor | None:
    found = [values for values in given if values is not None]
    if len(found) < len(given):
        return None
    host = torch.from_numpy(np.concatenate(found))
    return to_device(host, device)


def _moved(arrays: Sequence[NDArray[np.int64]], device: torch.device) -> list[Tensor]:
    """Copy the arrays to the device at once. The host memory is pinned, so this does not wait for a GPU; torch keeps it
    until the copy has ended. Each array is aligned to `ALIGNED` elements, since Triton recompiles a kernel for
    unaligned tensors."""
    starts = [0, *accumulate(-(-array.size // ALIGNED) * ALIGNED for array in arrays)]
    host = torch.zeros(starts[-1], dtype=torch.int64, pin_memory=device.type == "cuda")
    for start, array in zip(starts, arrays, strict=False):
        host[start : start + array.size] = torch.from_numpy(array.reshape(-1))
    whole = host.to(device, non_blocking=True)
    return [whole[start : start + array.size].view(array.shape) for start, array in zip(starts, arrays, strict=False)]


@dataclass(frozen=True)
class EmbeddingNoise:
    """One job's noise in one micro-batch: uniform in plus and minus `alpha` / sqrt(L D), with L the sequence's length.

    The noise depends only on `seed` and the job's rows, so a resumed job draws it again, whichever jobs share the
    batch. `seed` must change with every micro-batch.
    """

    alpha: float
    seed: int

    def draw(self, lengths: Sequence[int], hidden: int, device: torch.device) -> Tensor:
        """Draw the noise of consecutive sequences of these lengths: fp32 (T, D)."""
        digest = hashlib.blake2b(f"{self.seed}/neftune".encode(), digest_size=8).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
        noise_TD = torch.empty(sum(lengths), hidden, device=device).uniform_(-1, 1, generator=generator)
        for part_LD in torch.split(noise_TD, list(lengths)):
            part_LD.mul_(self.alpha / (part_LD.numel() ** 0.5))
        return noise_TD


@torch.no_grad()
def add_noise(h_1TD: Tensor, rows: PackedRows, noises: Sequence[EmbeddingNoise | None]) -> None:
    """Add the noise of each job (J) to the hidden states of its rows, in place."""
    for noise, (first, last) in zip(noises, pairwise(rows.token_bounds), strict=True):
        if noise is not None:
            own = [bound for bound in rows.bounds if first <= bound <= last]
            lengths = [end - begin for begin, end in pairwise(own)]
            h_1TD[0, first:last] += noise.draw(lengths, h_1TD.shape[-1], h_1TD.device).to(h_1TD.dtype)
