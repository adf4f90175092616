"""Losses of a micro-batch chunk by chunk, against autograd over all logits at once."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from coserve.data.corpus.batch import corpus_batch
from coserve.finetune.losses.chunked import Likelihood, target_chunks
from coserve.finetune.packed_rows import PackedRows, pack_jobs
from tests.support.finetuning import CPU, pack_rows, random_corpus


@pytest.mark.parametrize("size", [1, 4, 100])
def test_sums_of_several_jobs_in_chunks_that_cut_them(size: int) -> None:
    jobs = [(random_corpus(1), [0, 3]), (random_corpus(2), [1]), (random_corpus(3), [2, 4, 0])]
    rows = pack_jobs([corpus_batch(*job) for job in jobs], CPU)
    logits = torch.randn(rows.targets, 40, generator=torch.Generator().manual_seed(0)).requires_grad_()
    losses = functional.cross_entropy(logits, rows.labels_K % 40, reduction="none")
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    predicted = logits.argmax(1) == rows.labels_K % 40
    loss, parts = Likelihood(rows, rows.job_targets, None), []
    chunks = target_chunks(rows, size)
    assert torch.equal(torch.cat([chunk.keep_K for chunk in chunks]), rows.keep_K)
    for chunk in chunks:
        parts.append(chunk.of(logits.detach()).clone())
        chunk.labels_K.remainder_(40)
        loss.add(parts[-1], chunk)
    found = loss.finish(None)
    assert found.dtype == torch.float64
    for job, part in enumerate(torch.split(torch.stack((losses.detach(), predicted), 1), list(rows.job_targets))):
        assert found[job].tolist() == pytest.approx(part.double().sum(0).tolist(), rel=1e-6)
    torch.testing.assert_close(torch.cat(parts), gradient)


def test_a_micro_batch_without_targets_has_no_chunks() -> None:
    tokens, none = torch.arange(4), torch.empty(0, dtype=torch.int64)
    rows = PackedRows(tokens, tokens, (0, 4), none, none)
    assert target_chunks(rows, 8) == []
    assert Likelihood(rows, rows.job_targets, None).finish(None).tolist() == [[0.0, 0.0]]


def test_packed_tensors_are_aligned() -> None:
    """Kernels are compiled anew for tensors that lie elsewhere."""
    rows = pack_rows(random_corpus(), [3, 0, 1], CPU)
    for tensor in (rows.tokens_T, rows.positions_T, rows.keep_K, rows.labels_K):
        assert tensor.storage_offset() % 16 == 0 and tensor.is_contiguous()
