"""The memory plan: reserves the peak of everything else, and gives the remaining GPU memory to the page pool."""

from __future__ import annotations

from dataclasses import dataclass

from coserve.core.errors import ConfigError
from coserve.core.gpu_memory import GIB, GRAPHS, TrainingCosts
from coserve.memory.profile import Profile

SPARE_GRAPHS = 1.1
"""Factor by which the reservation exceeds the measured size of the graphs: other adapters may need further graphs."""


@dataclass(frozen=True)
class GpuMemory:
    """Total bytes of a GPU's memory, and bytes free after the base was loaded."""

    total: int
    free: int


@dataclass(frozen=True)
class Work:
    """The work that needs memory at the same time as the pages: a generation step while a micro-batch is suspended."""

    step_tokens: int
    micro_batch_tokens: int
    jobs: int
    """Jobs that train at the same time."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by use, and the number of pages that fit into the rest, excluding the page that stays zero."""

    pages: int
    page_bytes: int
    taken: int
    """Bytes in use before the pool: the base's weights, the CUDA context, other processes."""
    step: int
    training: int
    jobs: int
    graphs: int
    """For CUDA graphs, and for weights that the LoRA backend keeps across steps."""
    costs: TrainingCosts
    """Training costs of adapters with other ranks and sites than the profiled one."""
    error: float
    states: int = 0
    """Recurrent states of `max_running` sequences."""

    @property
    def set_aside(self) -> int:
        """Bytes reserved in addition to `taken`."""
        own = self.step + self.training + self.jobs + self.graphs + self.states
        return own + (self.pages + 1) * self.page_bytes

    def note(self, page_tokens: int) -> str:
        """Describe the plan for an operator."""
        states = f"recurrent states {_gib(self.states)} (max_running), " if self.states else ""
        return (
            f"memory: pool of {self.pages} pages ({self.pages * page_tokens} tokens, "
            f"{_gib(self.pages * self.page_bytes)}) "
            f"for KV and adapters; {states}weights and context {_gib(self.taken)}, a step {_gib(self.step)}, training "
            f"{_gib(self.training)}, jobs {_gib(self.jobs)}, graphs {_gib(self.graphs)}; half a step and "
            f"half a micro-batch predicted the whole ones with an error of {self.error:+.1%}"
        )


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


def make_plan(
    gpu: GpuMemory,
    fraction: float,
    profile: Profile,
    work: Work,
    *,
    page_bytes: int,
    least: int,
    graphs: int = GRAPHS,
    states: int = 0,
) -> MemoryPlan:
    """Plan a pool of at least `least` pages within `fraction` of the GPU's memory. `graphs`, `states`: see
    `MemoryPlan`.

    Raises:
        ConfigError: too little is left. It names the setting to change: `micro_batch_tokens` if only training does not
            fit, else `memory_fraction`.
    """
    taken = gpu.total - gpu.free
    budget = int(gpu.total * fraction) - taken
    step = profile.no_grad.at(work.step_tokens)
    training = profile.act.at(work.micro_batch_tokens) + profile.backward.at(work.micro_batch_tokens)
    jobs = profile.job * work.jobs
    needed = (least + 1) * page_bytes + step + graphs + states
    pages = (budget - step - training - jobs - graphs - states) // page_bytes - 1
    if pages >= least:
        return MemoryPlan(pages, page_bytes, taken, step, training, jobs, graphs, profile.costs, profile.error, states)
    if needed > budget >= needed - states:
        raise ConfigError(
            f"max_running: the recurrent states of so many sequences take {_gib(states)}, but the base and generation "
            f"leave {_gib(budget - needed + states)}",
            field="max_running",
        )
    if needed > budget:
        raise ConfigError(
            f"memory_fraction: expected {_gib(needed)} besides the base's {_gib(taken)}, but {fraction} of "
            f"{_gib(gpu.total)} leaves {_gib(max(budget, 0))}",
            field="memory_fraction",
        )
    left = budget - needed - jobs - profile.act.fixed - profile.backward.fixed
    most = int(left / max(profile.act.per_token + profile.backward.per_token, 1e-9))
    advice = f"at most {most} fit" if most > 0 else "not even the jobs' adapters fit (see max_active_jobs)"
    raise ConfigError(
        f"micro_batch_tokens: training with {work.micro_batch_tokens} needs {_gib(training + jobs)}, but the base and "
        f"generation leave {_gib(max(budget - needed, 0))}: {advice}",
        field="micro_batch_tokens",
    )
