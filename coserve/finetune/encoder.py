"""Trains a context encoder: adds its rows to micro-batches, gives their positions, and makes the final cartridge.

Reading and decoding are one forward (`EncodedAttention`): the encoder's memory tokens keep their keys and values of
every layer, as in 500xCompressor (arXiv 2408.03094), where ICAE (arXiv 2307.06945) and the S-LoRA thesis pass on the
last layer's output alone. So a document's memory is a cartridge, and is served as any other.

Letters: T packed tokens, K memory tokens of a chunk, P memory tokens of all chunks.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import torch
from torch import Tensor

from coserve.core.training.jobs import JobSpec
from coserve.core.types import LoraSettings
from coserve.data.corpus.batch import Batch, Example
from coserve.data.documents.encoder import encoder_rows, memory_ids, prefix_tokens
from coserve.finetune.init import RecordingAttention
from coserve.finetune.packed_rows import PackedRows, pack_jobs
from coserve.kernels.lora.interface import LoraBackend
from coserve.kernels.lora.types import LoraPair
from coserve.model.base import Base
from coserve.model.lora import LoraBatch, LoraWeights


def with_encoder(spec: JobSpec, batch: Batch) -> Batch:
    """Return the batch with the rows of the job's encoder in front of it; the batch itself if it has none."""
    rows = encoder_rows(spec)
    nothing = np.zeros(0, np.int64)
    read = [
        replace(
            batch.examples[0],
            tokens_N=np.array(row, np.int32),
            after_K=nothing,
            labels_K=batch.examples[0].labels_K[:0],
            weights_K=None if batch.examples[0].weights_K is None else batch.examples[0].weights_K[:0],
        )
        for row in rows
    ]
    return replace(batch, examples=(*read, *batch.examples), encoded=len(rows)) if rows else batch


def encoded_positions(rows: PackedRows, memory: int) -> Tensor:
    """Return positions (T): a chunk's tokens begin at 0, the memory tokens are the prefix at 0 to P - 1, whatever the
    length of their chunk, and the decoded sequences begin at P."""
    positions_T = rows.positions_T.clone()
    for chunk, end in enumerate(rows.bounds[1 : rows.encoded + 1]):
        positions_T[end - memory : end] = torch.arange(chunk * memory, (chunk + 1) * memory, device=positions_T.device)
    positions_T[rows.bounds[rows.encoded] :] += rows.encoded * memory
    return positions_T


@torch.no_grad()
def encode(spec: JobSpec, base: Base, weights: LoraWeights, backend: LoraBackend) -> LoraWeights:
    """Return the document's cartridge: the keys and values of all memory tokens, fp32 on the CPU. Call it between
    steps: it runs the base. `weights`: the job's, in the base's dtype."""
    nothing = np.zeros(0, np.int64)
    examples = [Example(np.array(row, np.int32), nothing, nothing) for row in encoder_rows(spec)]
    rows = pack_jobs([Batch(tuple(examples), encoded=len(examples))], base.device)
    memory = len(memory_ids(spec.lora))
    at_P = [at for end in rows.bounds[1:] for at in range(end - memory, end)]
    seen, lora = RecordingAttention(rows.bounds), LoraBatch(rows.segments, weights.parts[:1], backend)
    positions_T = encoded_positions(rows, memory)
    base.forward(rows.tokens_T, positions_T, seen, lora=lora, keep=rows.tokens_T.new_zeros(1))
    found = {
        name: LoraPair(k_TW[at_P], v_WT[:, at_P].contiguous(), 1.0)
        for name, (k_TW, v_WT) in ((name, seen.pairs[site.layer]) for name, site in base.spec.prefixes.items())
    }
    return LoraWeights(LoraSettings(r=prefix_tokens(spec), cartridge=True), found)


def beside(cartridge: LoraWeights, weights: LoraWeights) -> LoraWeights:
    """Return the adapter of a document's cartridge and its decoder's LoRA. `weights`: the job's, fp32 on the CPU."""
    decoder = weights.parts[1]
    settings = msgspec.structs.replace(decoder.settings, prefix_tokens=cartridge.settings.r)
    return LoraWeights(settings, {**decoder.sites, **cartridge.sites})
