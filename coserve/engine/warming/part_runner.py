"""Runs the parts of a warm-up in a worker: the engine's own code at many sizes, so that every kernel is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from itertools import product

import torch

from coserve.config import Config
from coserve.core.errors import InvalidRequest, NonFiniteLoss, UnsupportedBase
from coserve.core.sampling import SamplingParams
from coserve.core.types import DEFAULT_RANK, AdapterRef, LoraSettings
from coserve.engine.warming.caches import Caches
from coserve.engine.warming.conditions import conditions_of
from coserve.engine.warming.layer_measurements import measure_layers, measure_levels
from coserve.engine.warming.other_kernels import CompiledTerms, differ, launch_other_kernels
from coserve.engine.warming.step_mixes import (
    CONTEXTS,
    SAMPLED,
    Mix,
    adapter_counts,
    first_micro_batches,
    first_steps,
    micro_batch_sizes,
    rare_mixes,
    step_mixes,
)
from coserve.engine.warmup.parts import TRAINING_LAYERS, TRAINING_LEVELS, WarmUpTask
from coserve.finetune.init import new_adapter
from coserve.finetune.memory_profiling import WARM_UP_TOKENS, CudaMemoryMeter, MemoryProfiler, NoMeter
from coserve.generate.execution.eager import EagerExecutor
from coserve.generate.execution.graph_executor import GraphExecutor
from coserve.generate.execution.graph_sizes import DECODE_BATCHES, MIXED_TOKENS
from coserve.generate.execution.interface import BASE_ONLY, SequenceInput, StepExecutor, StepInput
from coserve.generate.execution.start import CompiledSteps
from coserve.generate.sampling.device_sampler import DeviceSampler
from coserve.generate.sampling.rows import SamplingRow
from coserve.kernels.attention.interface import TokenRun
from coserve.kernels.gpu.compile_process import OnCompiled, ignore_compiled
from coserve.kernels.gpu.launcher import compile_only
from coserve.kernels.lora.types import FrozenWeight
from coserve.lora.files.targets import resolve_targets
from coserve.memory.kv import KvCache
from coserve.memory.profile import sizes as profiled_sizes
from coserve.model.base import Base
from coserve.model.fused import FusedBase
from coserve.model.gemm_choice import GemmChoice, gemm_cases, measure_gemms, run_gemms, save_gemms
from coserve.model.layers import LayerCut
from coserve.model.lora import LoraWeights
from coserve.model.training.compiled_layers import CompiledLayers

TARGETS = (
    ("q_proj", "v_proj"),
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("gate_up_proj", "down_proj"),
    ("gate_proj", "up_proj", "down_proj"),
    ("c_attn",),
)
"""Target modules that adapters often have, besides all modules."""
SOME = 4
"""One in this many mixes is also run with adapters of some modules only."""
Adapter = tuple[AdapterRef, LoraWeights]


class PartRunner:
    """Runs warm-up parts over a base with few layers."""

    def __init__(
        self,
        base: Base,
        config: Config,
        task: WarmUpTask,
        processes: Executor | None = None,
        on_compiled: OnCompiled = ignore_compiled,
    ) -> None:
        """`processes`, `on_compiled`: see `compile_only`."""
        conditions = conditions_of(config, base)
        self._base, self._conditions, self._caches = base, conditions, Caches(task)
        self._processes, self._on_compiled = processes, on_compiled
        self._max_running, self._step_tokens = conditions.max_running, conditions.work.step_tokens
        longest, page_tokens = max(CONTEXTS) + self._step_tokens, conditions.page_tokens
        self._kv = KvCache.for_base(
            base,
            max(longest, 16 * page_tokens),
            page_tokens,
            sequences=conditions.max_running,
            kv_cache_dtype=conditions.kv_cache_dtype,
        )
        self._eager = EagerExecutor(base, self._kv, conditions.lora_backend)
        self._mixes = step_mixes(self._max_running, self._step_tokens, min(base.spec.context, longest))
        self._first_mixes = [mix for mix in self._mixes if not mix.position]
        """Mixes at position 0: LoRA kernels do not depend on positions."""
        self._rare_mixes = rare_mixes(self._max_running, self._step_tokens, min(base.spec.context, longest))
        self._number = 0
        self._on_gpu = base.device.type == "cuda"
        self._opaque_experts = config.lora_server > 0
        self._ranks = 1 if base.sharding is None else base.sharding.mesh.size

    def run(self, name: str) -> Iterator[tuple[int, int]]:
        """Run a part of `warmup.parts.all_parts`. Yields (done, total) after each piece of its work."""
        kind, _, which = name.partition("-")
        if name in (TRAINING_LAYERS, TRAINING_LEVELS):
            return self._training_layers(levels=name == TRAINING_LEVELS)
        number = int(which or 0)
        match kind:
            case "layers":
                return self._layers()
            case "gemms":
                return self._gemms(number, name)
            case "graphs" | "mixed":
                return self._graphs(number, decodes=kind == "graphs")
            case "kernels":
                return self._slot_kernels(number)
            case "steps":
                return self._steps()
            case "adapters":
                return self._adapters(number)
            case "profile":
                return self._profile()
            case "training":
                return self._training(number)
            case "blocks":
                return self._training(number, bd_blocks=2 * self._ranks)
            case "gpu":
                return self._other_gpu()
        raise AssertionError(f"expected a part of a warm-up, got {name!r}")

    def run_steps(self, executor: Callable[[KvCache], StepExecutor] | None = None, *, decodes: bool = True) -> None:
        """Run a few steps of each kind. `executor` makes the step executor; None: eager steps. `decodes` False: prompts
        only."""
        steps = self._eager if executor is None else executor(self._kv)
        adapters = self._copies(DEFAULT_RANK, self._base.spec.default_targets)
        for mix in first_steps(self._max_running, self._step_tokens, self._base.spec.context, decodes=decodes):
            for count in sorted({0, *adapter_counts(mix, len(adapters))}):
                self._step(steps, mix, adapters[:count])
        if decodes:
            self._sampled(steps)

    def run_micro_batches(self) -> None:
        """Run a few micro-batches of a job with an adapter of LoRA rank `DEFAULT_RANK`, and their updates, on the
        current stream."""
        profiler = MemoryProfiler(self._base, NoMeter(), self._conditions, rank=DEFAULT_RANK)
        for tokens in first_micro_batches(self._conditions.work.micro_batch_tokens):
            profiler.micro_batch(tokens)

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        """Context in which kernels are compiled and not launched, also in backward passes: autograd's own threads,
        which would ignore it, are off."""
        with compile_only(self._processes, self._on_compiled), torch.autograd.set_multithreading_enabled(False):
            yield

    # ---- eager steps

    def _steps(self) -> Iterator[tuple[int, int]]:
        total = len(self._mixes) + 1
        with self._compiling():
            for done, mix in enumerate(self._mixes):
                yield done, total
                self._step(self._eager, mix, ())
        DeviceSampler(self._base.spec.vocab, self._base.device).warm_up(self._base.dtype)
        self._sampled(self._eager)

    def _sampled(self, executor: StepExecutor) -> None:
        """Run steps with every kind of sampling."""
        for params in SAMPLED:
            for tokens in ((1,), (1,) * min(5, self._max_running), (8,)):
                self._step(executor, Mix(tokens, 0), (), params)

    def _adapters(self, rank: int) -> Iterator[tuple[int, int]]:
        """Run all mixes with adapters of all target modules, and some mixes with adapters of some modules, which differ
        only in how many sites share a launch."""
        every, *others = self._adapter_sets(rank)
        some = self._first_mixes[:: SOME if rank == DEFAULT_RANK else 2 * SOME]
        steps = [*product([*self._first_mixes, *self._rare_mixes], [every]), *product(some, others)]
        with self._compiling():
            for done, (mix, adapters) in enumerate(steps):
                yield done, len(steps)
                for count in adapter_counts(mix, len(adapters)):
                    self._step(self._eager, mix, adapters[:count])

    def _adapter_sets(self, rank: int) -> list[list[Adapter]]:
        """Adapters of this LoRA rank: first with all target modules, then with some of them."""
        names = self._base.spec.default_targets
        targets = [names, *(one for one in TARGETS if set(one) <= set(names) and set(one) != set(names))]
        return [self._copies(rank, one) for one in targets]

    def _copies(self, rank: int, targets: Sequence[str]) -> list[Adapter]:
        """Return one adapter under as many ids as sequences can run: kernels depend on the number of adapters in a
        step, not on weights."""
        settings, base = LoraSettings(r=rank, targets=tuple(targets)), self._base
        weights = base.shard(new_adapter(settings, base.spec, seed=0, dtype=base.dtype, device=base.device))
        self._number += 1
        return [(AdapterRef(f"warm-up-{self._number}-{place}", 1), weights) for place in range(self._max_running)]

    def _step(
        self, executor: StepExecutor, mix: Mix, adapters: Sequence[Adapter], params: SamplingParams | None = None
    ) -> None:
        """Run a step and drop its results, which are meaningless because its sequences share pages."""
        refs, sequences = tuple(ref for ref, _ in adapters), list[SequenceInput]()
        for place, tokens in enumerate(mix.tokens):
            self._number += 1
            pages = self._kv.pages_for(mix.position + tokens)
            given = [1] * tokens
            how = params or SamplingParams(temperature=0.0)
            sampling = SamplingRow(self._number, how, 0, tokens=given, prompt_tokens=tokens)
            run = TokenRun(tokens, mix.position, tuple(range(pages)), slot=place)
            which = place % len(adapters) if adapters else BASE_ONLY
            sequences.append(SequenceInput(self._number, which, given, run, sampling, None, False))
        for step in executor.launch(StepInput(refs, sequences), [weights for _, weights in adapters]):
            step.collect()
        for own in sequences:
            executor.forget(own.sequence)

    # ---- training

    def _profile(self) -> Iterator[tuple[int, int]]:
        """Run the work of memory profiling."""
        self._stacked()
        profiler, work = self._profiler(DEFAULT_RANK), self._conditions.work
        steps = [(profiler.step, size) for size in (WARM_UP_TOKENS, *profiled_sizes(work.step_tokens))]
        batches = [(profiler.micro_batch, size) for size in (WARM_UP_TOKENS, *profiled_sizes(work.micro_batch_tokens))]
        others = [(profiler.costs, work.micro_batch_tokens), (lambda _: launch_other_kernels(self._base), 0)]
        yield from self._compile_training([*steps, *batches, *others])

    def _training(self, rank: int, bd_blocks: int = 1) -> Iterator[tuple[int, int]]:
        """Run micro-batches. `bd_blocks`: two for each GPU that shares the base, so that its shard of an adapter is
        block-diagonal. Does nothing if the base cannot have such adapters."""
        settings = LoraSettings(r=rank, bd_blocks=bd_blocks)
        try:
            resolve_targets(settings, self._base.spec)
        except InvalidRequest:
            return
        self._stacked()
        base, backend = self._base, self._conditions.lora_backend
        runs: list[Callable[[int], object]] = [self._profiler(rank, bd_blocks).micro_batch]
        if differ(base, backend):
            runs.append(CompiledTerms(base, backend, settings).launch)
        sizes = micro_batch_sizes(self._conditions.work.micro_batch_tokens)
        yield from self._compile_training([(run, size) for run in runs for size in sizes])

    def _compile_training(self, work: Sequence[tuple[Callable[[int], object], int]]) -> Iterator[tuple[int, int]]:
        with self._compiling():
            for done, (run, size) in enumerate(work):
                yield done, len(work)
                with suppress(NonFiniteLoss):  # the kernels were not launched
                    run(size)
                if self._on_gpu:
                    torch.cuda.empty_cache()  # otherwise no cached block fits the next size

    def _profiler(self, rank: int, bd_blocks: int = 1) -> MemoryProfiler:
        """A profiler for compilations, without its own warm-up."""
        meter = CudaMemoryMeter(self._base.device) if self._on_gpu else NoMeter()
        given = self._base, meter, self._conditions
        return MemoryProfiler(*given, rank=rank, bd_blocks=bd_blocks, warm_up=False)

    # ---- compiled layers

    def _fused(self, gemms: GemmChoice, *, compiled: bool = True) -> FusedBase:
        """Fuse the base's layers, and compile them where the engine does."""
        compiled = compiled and self._on_gpu
        return FusedBase(self._base, compiled=compiled, gemms=gemms, opaque_experts=self._opaque_experts)

    def _stacked(self) -> list[FrozenWeight]:
        return FusedBase(self._base, compiled=False, gemms=GemmChoice()).stacked

    def _other_gpu(self) -> Iterator[tuple[int, int]]:
        """Compile what inductor needs for this GPU. Triton kernels are shared with the first GPU."""
        kinds = [(rank, decodes) for rank in (0, DEFAULT_RANK) for decodes in (True, False)]
        for done, (rank, decodes) in enumerate(kinds):
            for _ in self._graphs(rank, decodes=decodes):
                yield done, len(kinds) + 1
        yield len(kinds), len(kinds) + 1
        self._compiled_layers()

    def _layers(self) -> Iterator[tuple[int, int]]:
        yield 0, 2
        self._fused(GemmChoice()).check()

    def _training_layers(self, *, levels: bool) -> Iterator[tuple[int, int]]:
        yield 0, 2
        layers = None if levels and self._base.sharding is not None else self._compiled_layers()
        if layers is not None:
            yield 1, 2
            measure = measure_levels if levels else measure_layers
            measure(layers, self._base, self._conditions, self._caches)

    def _compiled_layers(self) -> CompiledLayers | None:
        """Compile the training layers; None if there are none, for a reason that the engine reports."""
        if self._on_gpu and self._conditions.lora_backend.groups_inputs:
            with suppress(UnsupportedBase):
                layers = CompiledLayers(self._base, LayerCut(self._base))
                layers.compile()
                return layers
        return None

    def _gemms(self, rows: int, part: str) -> Iterator[tuple[int, int]]:
        yield 0, 2
        stacked, choice = self._stacked(), GemmChoice()
        if self._on_gpu:
            with self._compiling():  # compiles in parallel what is measured one by one below
                run_gemms(stacked, self._base.device, (rows,))
            choice = measure_gemms(gemm_cases(stacked), self._base.device, (rows,))
        save_gemms(self._caches.path(part), choice, stacked, (rows,))

    def _slot_kernels(self, rank: int) -> Iterator[tuple[int, int]]:
        """Run the steps that precede the captures in `_graphs`, without compiled layers."""
        executor = self._executor(self._fused(GemmChoice(), compiled=False))
        for done in self._slot_steps(executor, self._first_mixes, rank):
            yield done, len(self._first_mixes)

    def _executor(self, fused: FusedBase) -> GraphExecutor:
        """Make an executor that never captures."""
        return CompiledSteps(fused, self._eager, self._max_running, self._step_tokens).executor(self._kv, capture=False)

    def _slot_steps(self, executor: GraphExecutor, mixes: Sequence[Mix], rank: int) -> Iterator[int]:
        """Run steps without graphs. `rank`: LoRA rank of their adapters; 0: no adapters. Yields how many `mixes` are
        done."""
        adapters = self._adapter_sets(rank)[0] if rank else []
        with self._compiling():
            for done, mix in enumerate(mixes):
                yield done
                for count in adapter_counts(mix, len(adapters)):
                    self._step(executor, mix, adapters[:count])

    def _graphs(self, rank: int, *, decodes: bool) -> Iterator[tuple[int, int]]:
        """Run decode steps, or all other steps, without graphs; then capture their graphs."""
        stacked = self._stacked()
        fused = self._fused(self._caches.gemms(stacked, self._base.device) or GemmChoice())
        fused.check()
        executor = self._executor(fused)
        mixes = [mix for mix in (self._first_mixes if rank else self._mixes) if mix.decodes is decodes]
        total = len(mixes) + 4 * (len(DECODE_BATCHES) if decodes else len(MIXED_TOKENS))
        for done in self._slot_steps(executor, mixes, rank):
            yield done, total
        self._sampled(executor)
        captures = executor.captures(rank, decodes=decodes)
        with self._compiling():
            for done, _ in enumerate(captures, len(mixes)):
                yield min(done, total - 1), total
