"""Steps without CUDA graphs: an ordinary forward, run when collected. Serves every base, device and request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from coserve.core.types import AdapterRef
from coserve.generate.execution.interface import StepExecutor, StepInput, StepResult
from coserve.generate.execution.packing import PackedStep, by_adapter, pack
from coserve.generate.execution.snapshots import snapshots
from coserve.generate.sampling.choices import Chosen, choices
from coserve.generate.sampling.masks import NO_MASKS, Masks
from coserve.generate.sampling.rows import is_likeliest
from coserve.generate.sampling.sampler import choose
from coserve.generate.sampling.scoring import prompt_logprobs
from coserve.generate.sampling.transfer import send_ids
from coserve.kernels.attention.expanded import StepTerms
from coserve.kernels.lora.experts.interface import RemoteExperts, none_lost
from coserve.kernels.lora.interface import LoraBackend
from coserve.kernels.lora.segments import Segments
from coserve.memory.kv import KvCache
from coserve.model.base import Base
from coserve.model.lora import LoraBatch, LoraWeights


class EagerExecutor(StepExecutor):
    """Runs a step when it is collected, as one forward, or as one per adapter if the LoRA backend computes one at a
    time."""

    def __init__(self, base: Base, kv: KvCache, lora_backend: LoraBackend, remote: RemoteExperts | None = None) -> None:
        """`remote`: the LoRA servers, if there are any."""
        self._remote = remote
        self._base, self._kv, self._lora_backend = base, kv, lora_backend.keeping()
        self._seen: dict[AdapterRef, LoraWeights] = {}
        """GPU copies of adapters that ran. The LoRA backend may keep tensors derived from them."""
        self._masks: Masks = NO_MASKS

    def launch(self, step: StepInput, adapters: Sequence[LoraWeights]) -> list[EagerStep]:
        groups, self._masks = by_adapter(step.sequences), NO_MASKS
        self._seen.update(zip(step.adapters, adapters, strict=True))
        parts = [[group] for group in groups] if self._lora_backend.one_adapter_a_step else [groups]
        return [self._step(pack(part), adapters) for part in parts]

    def choose(self, masks: Masks) -> None:
        self._masks = masks

    def evicted(self, adapter: AdapterRef) -> None:
        weights = self._seen.pop(adapter, None)
        if weights is not None:
            self._lora_backend.forget(weights.sites)

    def _step(self, packed: PackedStep, adapters: Sequence[LoraWeights]) -> EagerStep:
        return EagerStep([own.sequence for own in packed.sequences], lambda: self._checked(packed, adapters))

    def _checked(self, packed: PackedStep, adapters: Sequence[LoraWeights]) -> StepResult:
        """Run a step. Raises `LoraServerLost` if LoRA servers were lost meanwhile."""
        check = None if self._remote is None else none_lost(self._remote)
        found = self._run(packed, adapters)
        if check is not None:
            if self._base.device.type == "cuda":
                torch.cuda.current_stream(self._base.device).synchronize()  # a step without results has not waited
            check()
        return found

    def _run(self, packed: PackedStep, adapters: Sequence[LoraWeights]) -> StepResult:
        rows = [own.sampling for own in packed.sequences if own.sampling is not None]
        scorings = [(own.sequence, own.scoring) for own in packed.sequences if own.scoring is not None]
        sharding = self._base.sharding
        if sharding is not None and not scorings and rows and all(map(is_likeliest, rows)):
            tokens_B = sharding.vocabulary.likeliest(self._forward(packed, adapters, gather=False))
            chosen = choices(Chosen(tokens_B, None))
            return StepResult(sampled=[(row.sequence, choice) for row, choice in zip(rows, chosen, strict=True)])
        logits_BV = self._forward(packed, adapters)
        scores = prompt_logprobs(logits_BV[len(rows) :], [scoring for _, scoring in scorings])
        chosen = choose(logits_BV[: len(rows)], rows, masks=self._masks) if rows else []
        return StepResult(
            sampled=[(row.sequence, choice) for row, choice in zip(rows, chosen, strict=True)],
            scores=[(sequence, entries) for (sequence, _), entries in zip(scorings, scores, strict=True)],
        )

    def _forward(self, packed: PackedStep, adapters: Sequence[LoraWeights], *, gather: bool = True) -> Tensor:
        """Return logits (rows, V): of the rows that sample a token, then of those that score. `gather`: see
        `Base.run`."""
        tokens, positions, sampled, scored = list[int](), list[int](), list[int](), list[int]()
        for own in packed.sequences:
            first, start = len(tokens), own.run.position
            assert len(own.tokens) == own.run.tokens, "expected tokens that the host knows"
            tokens.extend(own.tokens)
            positions.extend(range(start, start + own.run.tokens))
            if own.scoring is not None:
                scored.extend(first + own.scoring.first_row + row for row in range(len(own.scoring.targets)))
            if own.sampling is not None:
                sampled.append(len(tokens) - 1)
        lora = self._lora(packed, adapters)
        tokens_T, positions_T, keep_R = send_ids(self._base.device, tokens, positions, sampled + scored)
        terms = None if lora is None else StepTerms(lora.segments, partial(self._base.sites.terms, lora))
        with snapshots(self._kv, packed.sequences):
            return self._base.forward(
                tokens_T,
                positions_T,
                self._kv.attention([own.run for own in packed.sequences], terms),
                lora=lora,
                keep=keep_R,
                gather=gather,
            )

    def _lora(self, packed: PackedStep, adapters: Sequence[LoraWeights]) -> LoraBatch | None:
        if not packed.adapters:
            return None
        segments = Segments(packed.bounds, packed.segment_adapters(range(len(packed.adapters))))
        own = tuple(adapters[index] for index in packed.adapters)
        return LoraBatch(segments, own, self._lora_backend, remote=self._remote)


@dataclass(frozen=True)
class EagerStep:
    """One forward. It runs in `collect`, so its errors are raised where they are handled."""

    sequences: list[int]
    run: Callable[[], StepResult]
    overlaps: bool = False

    def collect(self) -> StepResult:
        return self.run()
