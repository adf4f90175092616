"""Runs the parts of a warm-up in a worker: the engine's own code with many sizes, so that every kernel is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path

import torch

from coserve.adapters.targets import resolve_targets
from coserve.config import Config
from coserve.engine.sizes import STEP_TOKENS
from coserve.engine.warming import compiled_terms
from coserve.engine.warming.client import gemm_paths
from coserve.engine.warming.compile_pool import compilations_beside_requests
from coserve.engine.warming.compiled_terms import CompiledTerms
from coserve.engine.warming.gemm_cases import gemm_cases
from coserve.engine.warming.layer_measurements import measure_layers, measure_levels
from coserve.engine.warming.other_kernels import launch_other_kernels
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
from coserve.errors import InvalidRequest, NonFiniteLoss, UnsupportedBase
from coserve.finetune.init import new_adapter
from coserve.finetune.memory_profiling import WARM_UP_TOKENS, Conditions, CudaMemoryMeter, MemoryProfiler, NoMeter
from coserve.generate.execution.eager import EagerExecutor
from coserve.generate.execution.graph_executor import GraphExecutor
from coserve.generate.execution.graph_sizes import DECODE_BATCHES, MIXED_TOKENS
from coserve.generate.execution.interface import BASE_ONLY, SequenceInput, StepExecutor, StepInput
from coserve.generate.execution.start import INDUCTOR, wake_compiler
from coserve.generate.sampling.device_sampler import DeviceSampler
from coserve.generate.sampling.rows import SamplingRow
from coserve.kernels.attention.interface import TokenRun
from coserve.kernels.gpu.compile_process import OnCompiled, ignore_compiled
from coserve.kernels.gpu.launcher import compile_only
from coserve.kernels.lora.backend import choose_backend
from coserve.kernels.lora.types import StackedWeights
from coserve.memory.kv import KvCache
from coserve.memory.plan import Work
from coserve.memory.profile import sizes as profiled_sizes
from coserve.model.base import Base
from coserve.model.fused import FusedBase
from coserve.model.gemm_choice import GemmChoice, load_gemms, measure_gemms, run_gemms, save_gemms
from coserve.model.layers import LayerCut
from coserve.model.lora import LoraWeights
from coserve.model.training.compiled_layers import CompiledLayers
from coserve.processes import usable_cores
from coserve.types import DEFAULT_RANK, AdapterRef, LoraSettings, SamplingParams
from coserve.warmup.messages import WarmUpTask
from coserve.warmup.parts import FIRST, GEMMS, SCORED, SLOT_KERNELS, TRAINING_LAYERS, TRAINING_LEVELS

TARGETS = (
    ("q_proj", "v_proj"),
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("gate_up_proj", "down_proj"),
    ("gate_proj", "up_proj", "down_proj"),
    ("c_attn",),
)
"""Target modules that adapters often have, besides all of them."""
Adapter = tuple[AdapterRef, LoraWeights]


class PartRunner:
    """Runs parts over a base of few layers."""

    def __init__(
        self,
        base: Base,
        conditions: Conditions,
        task: WarmUpTask,
        processes: Executor | None = None,
        on_compiled: OnCompiled = ignore_compiled,
    ) -> None:
        """`processes`, `on_compiled`: see `compile_only`."""
        self._base, self._conditions, self._task = base, conditions, task
        self._processes, self._on_compiled = processes, on_compiled
        self._max_concurrent: int | None = None  # see `compile_only`
        self._max_running, self._step_tokens = conditions.max_running, conditions.work.step_tokens
        longest, page_tokens = max(CONTEXTS) + self._step_tokens, conditions.page_tokens
        self._kv = KvCache.for_base(base, max(longest, 16 * page_tokens), page_tokens)
        self._eager = EagerExecutor(base, self._kv, conditions.lora_backend)
        self._mixes = step_mixes(self._max_running, self._step_tokens, min(base.spec.context, longest))
        self._first_mixes = [mix for mix in self._mixes if not mix.position]
        """Mixes at position 0: LoRA kernels do not depend on positions."""
        self._rare_mixes = rare_mixes(self._max_running, self._step_tokens, min(base.spec.context, longest))
        self._number = 0
        self._compiler_initialized = False
        self._on_gpu = base.device.type == "cuda"
        self._ranks = 1 if base.sharding is None else base.sharding.mesh.size

    def run(self, name: str) -> Iterator[tuple[int, int]]:
        """Run a part of `warmup.parts.all_parts`. Yields (done, total) after each piece of its work."""
        beside = compilations_beside_requests(self._task.workers, usable_cores())
        self._max_concurrent = None if name in (*FIRST, *GEMMS, *SCORED, SLOT_KERNELS) else beside
        kind, _, number = name.partition("-")
        match kind:
            case "steps":
                return self._steps()
            case "adapters":
                sets = self._adapter_sets(int(number))
                mixes = [*self._first_mixes, *self._rare_mixes]
                return self._adapters([*product(mixes, sets[:1]), *self._some_sites(sets, 8)])
            case "decodes" | "prompts":
                mixes = [mix for mix in self._first_mixes if mix.decodes is (kind == "decodes")]
                return self._adapters([*product(mixes, self._adapter_sets(int(number))[:1])])
            case "sites":
                sets = self._adapter_sets(int(number))
                return self._adapters([*product(self._rare_mixes, sets[:1]), *self._some_sites(sets, 4)])
            case "profile":
                return self._profile()
            case "training" if name == TRAINING_LAYERS:
                return self._training_layers()
            case "training" if name == TRAINING_LEVELS:
                return self._training_levels()
            case "training":
                return self._training(int(number))
            case "blocks":
                return self._training(int(number), bd_blocks=2 * self._ranks)
            case "gpu":
                return self._other_gpu()
            case "layers":
                return self._layers()
            case "kernels":
                return self._slot_kernels(int(number))
            case "gemms":
                return self._gemms(int(number), gemm_paths(self._task)[GEMMS.index(name)])
            case "graphs":
                return self._graphs(int(number), decodes=True)
            case "mixed":
                return self._graphs(int(number), decodes=False)
        raise AssertionError(f"expected a part of a warm-up, got {name!r}")

    def preload_kernels(
        self, executor: Callable[[KvCache], StepExecutor | None] | None = None, *, decodes: bool = True
    ) -> None:
        """Run a few steps of each kind: a process loads a kernel from disk at its first launch. `executor` makes the step
        executor; None: eager steps. Without `decodes`, prompts only."""
        steps = self._eager if executor is None else executor(self._kv)
        if steps is None:
            return
        adapters = self._copies(DEFAULT_RANK, self._base.spec.default_targets)
        for mix in first_steps(self._max_running, self._step_tokens, self._base.spec.context, decodes=decodes):
            for count in sorted({0, *adapter_counts(mix, len(adapters))}):
                self._step(steps, mix, adapters[:count])
        if decodes:
            self._sampled(steps)

    def preload_training(self) -> None:
        """Run a few micro-batches of a job with an adapter of `DEFAULT_RANK`, and their updates, on the current stream."""
        profiler = MemoryProfiler(self._base, NoMeter(), self._conditions, rank=DEFAULT_RANK)
        for tokens in first_micro_batches(self._conditions.work.micro_batch_tokens):
            profiler.micro_batch(tokens)

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        """Inside, kernels are compiled and not launched, those of backward passes too: autograd's own threads know nothing of it."""
        with (
            compile_only(self._processes, self._on_compiled, self._max_concurrent),
            torch.autograd.set_multithreading_enabled(False),
        ):
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
        """Steps with every kind of sampling."""
        for params in SAMPLED:
            for tokens in ((1,), (1,) * min(5, self._max_running), (8,)):
                self._step(executor, Mix(tokens, 0), (), params)

    def _adapters(self, steps: Sequence[tuple[Mix, list[Adapter]]]) -> Iterator[tuple[int, int]]:
        with self._compiling():
            for done, (mix, adapters) in enumerate(steps):
                yield done, len(steps)
                for count in adapter_counts(mix, len(adapters)):
                    self._step(self._eager, mix, adapters[:count])

    def _some_sites(self, sets: Sequence[list[Adapter]], step: int) -> list[tuple[Mix, list[Adapter]]]:
        """One of `step` sizes: these adapters differ from those of all sites in how many share a launch only."""
        return [(mix, adapters) for adapters in sets[1:] for mix in self._first_mixes[::step]]

    def _adapter_sets(self, rank: int) -> list[list[Adapter]]:
        """Adapters of this rank: first with all target modules, then with some of them."""
        names = self._base.spec.default_targets
        targets = [names, *(one for one in TARGETS if set(one) <= set(names) and set(one) != set(names))]
        return [self._copies(rank, one) for one in targets]

    def _copies(self, rank: int, targets: Sequence[str]) -> list[Adapter]:
        """One adapter under as many ids as sequences can run: kernels depend on how many adapters a step has, not on weights."""
        settings, base = LoraSettings(r=rank, targets=tuple(targets)), self._base
        weights = base.shard(new_adapter(settings, base.spec, seed=0, dtype=base.dtype, device=base.device))
        self._number += 1
        return [(AdapterRef(f"warm-up-{self._number}-{place}", 1), weights) for place in range(self._max_running)]

    def _step(
        self,
        executor: StepExecutor,
        mix: Mix,
        adapters: Sequence[Adapter],
        params: SamplingParams | None = None,
    ) -> None:
        """Run a step and drop its results, which mean nothing: its sequences share pages."""
        refs, sequences = tuple(ref for ref, _ in adapters), list[SequenceInput]()
        for place, tokens in enumerate(mix.tokens):
            self._number += 1
            pages = self._kv.pages_for(mix.position + tokens)
            given = [1] * tokens
            how = params or SamplingParams(temperature=0.0)
            sampling = SamplingRow(self._number, how, 0, tokens=given, prompt_tokens=tokens)
            run = TokenRun(tokens, mix.position, tuple(range(pages)))
            which = place % len(adapters) if adapters else BASE_ONLY
            sequences.append(SequenceInput(self._number, which, given, run, sampling, None, False))
        for step in executor.launch(StepInput(refs, sequences), [weights for _, weights in adapters]):
            step.collect()
        for own in sequences:
            executor.forget(own.sequence)

    # ---- training

    def _profile(self) -> Iterator[tuple[int, int]]:
        """Run what memory profiling runs."""
        self._stacked()
        profiler, work = self._profiler(DEFAULT_RANK), self._conditions.work
        steps = [(profiler.step, size) for size in (WARM_UP_TOKENS, *profiled_sizes(work.step_tokens))]
        batches = [(profiler.micro_batch, size) for size in (WARM_UP_TOKENS, *profiled_sizes(work.micro_batch_tokens))]
        others = [(profiler.costs, work.micro_batch_tokens), (lambda _: launch_other_kernels(self._base), 0)]
        yield from self._compile_training([*steps, *batches, *others])

    def _training(self, rank: int, bd_blocks: int = 1) -> Iterator[tuple[int, int]]:
        """`bd_blocks`: two for each GPU that shares the base, so that its part of an adapter is block-diagonal. Nothing happens where
        the base cannot have such adapters."""
        settings = LoraSettings(r=rank, bd_blocks=bd_blocks)
        try:
            resolve_targets(settings, self._base.spec)
        except InvalidRequest:
            return
        self._stacked()
        base, backend = self._base, self._conditions.lora_backend
        runs: list[Callable[[int], object]] = [self._profiler(rank, bd_blocks).micro_batch]
        if compiled_terms.differ(base, backend):
            runs.append(CompiledTerms(base, backend, settings).launch)
        sizes = micro_batch_sizes(self._conditions.work.micro_batch_tokens)
        yield from self._compile_training([(run, size) for run in runs for size in sizes])

    def _compile_training(self, work: Sequence[tuple[Callable[[int], object], int]]) -> Iterator[tuple[int, int]]:
        with self._compiling():
            for done, (run, size) in enumerate(work):
                yield done, len(work)
                with suppress(NonFiniteLoss):  # kernels that were not launched wrote nothing
                    run(size)
                if self._on_gpu:
                    torch.cuda.empty_cache()  # the next size would find no block that fits, and take more beside the engine

    def _profiler(self, rank: int, bd_blocks: int = 1) -> MemoryProfiler:
        """For compilations."""
        meter = CudaMemoryMeter(self._base.device) if self._on_gpu else NoMeter()
        given = self._base, meter, self._conditions
        return MemoryProfiler(*given, rank=rank, bd_blocks=bd_blocks, warm_up=False)

    # ---- compiled layers

    def _fused(self, gemms: GemmChoice) -> FusedBase:
        self._wake_compiler()
        return FusedBase(self._base, compiled=self._on_gpu, options=INDUCTOR, gemms=gemms)

    def _wake_compiler(self) -> None:
        if self._on_gpu and not self._compiler_initialized:
            wake_compiler(self._base.device)
            self._compiler_initialized = True

    def _stacked(self) -> list[StackedWeights]:
        return FusedBase(self._base, compiled=False, gemms=GemmChoice()).stacked

    def _other_gpu(self) -> Iterator[tuple[int, int]]:
        """What inductor compiles for this GPU. Triton's kernels are those of the first."""
        kinds = [(rank, decodes) for rank in (0, DEFAULT_RANK) for decodes in (True, False)]
        for done, (rank, decodes) in enumerate(kinds):
            for _ in self._graphs(rank, decodes=decodes):
                yield done, len(kinds) + 1
        yield len(kinds), len(kinds) + 1
        self._compiled_layers()

    def _layers(self) -> Iterator[tuple[int, int]]:
        yield 0, 2
        self._fused(GemmChoice()).shadow().check()

    def _training_layers(self) -> Iterator[tuple[int, int]]:
        yield 0, 2
        layers = self._compiled_layers()
        if layers is not None:
            yield 1, 2
            measure_layers(layers, self._base, self._conditions, self._task)

    def _training_levels(self) -> Iterator[tuple[int, int]]:
        yield 0, 2
        layers = None if self._base.sharding is not None else self._compiled_layers()
        if layers is not None:
            yield 1, 2
            measure_levels(layers, self._base, self._conditions, self._task)

    def _compiled_layers(self) -> CompiledLayers | None:
        """Those of training; None: the engine says why there are none."""
        if self._on_gpu and self._conditions.lora_backend.groups_inputs:
            self._wake_compiler()
            with suppress(UnsupportedBase):
                layers = CompiledLayers(self._base, LayerCut(self._base))
                layers.compile()
                return layers
        return None

    def _gemms(self, rows: int, path: Path) -> Iterator[tuple[int, int]]:
        yield 0, 2
        stacked, choice = self._stacked(), GemmChoice()
        if self._on_gpu:
            with self._compiling():  # measured one by one, they would be compiled one by one
                run_gemms(stacked, self._base.device, (rows,))
            choice = measure_gemms(gemm_cases(stacked), self._base.device, (rows,))
        save_gemms(path, choice, stacked, (rows,))

    def _slot_kernels(self, rank: int) -> Iterator[tuple[int, int]]:
        """Run what `_graphs` runs before its captures, without compiled layers."""
        executor = self._executor(FusedBase(self._base, compiled=False, gemms=GemmChoice()))
        for done in self._slot_steps(executor, self._first_mixes, rank):
            yield done, len(self._first_mixes)

    def _executor(self, fused: FusedBase) -> GraphExecutor:
        """None of its steps captures."""
        return GraphExecutor(
            fused,
            self._kv,
            self._eager,
            max_running=self._max_running,
            step_tokens=self._step_tokens,
            on_disk=lambda _: False,
        )

    def _slot_steps(self, executor: GraphExecutor, mixes: Sequence[Mix], rank: int) -> Iterator[int]:
        """Run steps without graphs; `rank`: of their adapters, 0: none. Yields how many of the `mixes` are done."""
        adapters = self._adapter_sets(rank)[0] if rank else []
        with self._compiling():
            for done, mix in enumerate(mixes):
                yield done
                for count in adapter_counts(mix, len(adapters)):
                    self._step(executor, mix, adapters[:count])

    def _graphs(self, rank: int, *, decodes: bool) -> Iterator[tuple[int, int]]:
        """Run decode steps, or all others, without graphs; then capture the graphs."""
        stacked = self._stacked()
        gemms = load_gemms(gemm_paths(self._task), stacked, self._base.device)
        fused = self._fused(gemms or GemmChoice())
        fused.shadow().check()
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


def make_part_runner(
    base: Base,
    config: Config,
    task: WarmUpTask,
    processes: Executor | None = None,
    on_compiled: OnCompiled = ignore_compiled,
) -> PartRunner:
    """A runner for these settings. `processes`, `on_compiled`: see `PartRunner`."""
    lora_backend = choose_backend(config.lora_backend, base.device, base.dtype)
    step_tokens = config.step_tokens or STEP_TOKENS[base.device.type]
    work = Work(step_tokens, config.micro_batch_tokens, config.max_active_jobs)
    conditions = Conditions(lora_backend, config.recompute, config.batch_requests, config.page_tokens, work)
    return PartRunner(base, conditions, task, processes, on_compiled)
