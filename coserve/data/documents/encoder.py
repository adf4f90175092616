"""A context encoder's rows in a job's spec (the S-LoRA thesis, section 3). No torch.

The encoder is the base with a LoRA. It reads each chunk of a document and K memory tokens behind it, whose embeddings
it learns. The keys and values that it computes for all memory tokens stand for the document: as a cartridge. The
decoder is the base, or the base with a second LoRA (`LoraSettings.decoder`), which is then served beside the cartridge.

The memory tokens are K of the vocabulary that the document does not have, the `trainable_token_indices` of its LoRA.
`JobSpec.prefix` has the chunks one after the other, each with the memory tokens behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

from coserve.core.training.jobs import JobSpec
from coserve.core.types import LoraSettings


def memory_ids(settings: LoraSettings) -> Sequence[int]:
    """Return the ids of an encoder's memory tokens (K)."""
    found = settings.trainable_token_indices
    assert isinstance(found, dict), "expected an encoder's settings"
    return next(iter(found.values()))


def unused_ids(used: Sequence[int], count: int, vocab: int) -> list[int]:
    """Return the `count` highest ids of the vocabulary that are not in `used`; fewer if there are not as many."""
    taken = set(used)
    return [id for id in reversed(range(vocab)) if id not in taken][:count]


def encoder_rows(spec: JobSpec) -> list[list[int]]:
    """Return the encoder's rows, chunk by chunk; none for a job without an encoder."""
    if spec.lora.cartridge or not spec.prefix:
        return []
    last, rows = memory_ids(spec.lora)[-1], [list[int]()]
    for id in spec.prefix:
        rows[-1].append(id)
        if id == last:
            rows.append([])
    return rows[:-1]


def encoded_tokens(spec: JobSpec) -> int:
    """Return the tokens of the encoder's rows, which every micro-batch of the job has besides its own."""
    return 0 if spec.lora.cartridge else len(spec.prefix)


def prefix_tokens(spec: JobSpec) -> int:
    """Return P: the tokens of the cartridge that the job publishes; 0 for LoRA."""
    if spec.lora.cartridge or not spec.prefix:
        return len(spec.prefix)
    return len(encoder_rows(spec)) * len(memory_ids(spec.lora))
