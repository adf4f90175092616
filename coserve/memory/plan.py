"""How the GPU's memory is divided: what everything else needs at most is set aside, and the page pool gets the rest."""

from __future__ import annotations

from dataclasses import dataclass

from coserve.errors import ConfigError
from coserve.memory.profile import Profile

GRAPHS = 2 << 30
"""Bytes set aside for CUDA graphs and the compiler's trials: the pool must lie where it is before graphs are captured."""
GIB = 1 << 30


@dataclass(frozen=True)
class GpuMemory:
    """Bytes of a GPU's memory: all of it, and what is free now, with the base loaded."""

    total: int
    free: int


@dataclass(frozen=True)
class Work:
    """What the engine must be able to do at once beside holding pages: a step while a micro-batch is suspended."""

    step_tokens: int
    micro_batch_tokens: int
    jobs: int
    """Jobs that train side by side."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by use; `pages` of the pool, and the one more that stays zero, are what the others leave."""

    pages: int
    page_bytes: int
    taken: int
    """Before the pool: the base's weights, the CUDA context, other processes."""
    step: int
    training: int
    jobs: int
    error: float

    @property
    def set_aside(self) -> int:
        """Bytes beside what was taken before."""
        return self.step + self.training + self.jobs + GRAPHS + (self.pages + 1) * self.page_bytes

    def note(self, page_tokens: int) -> str:
        """For an operator."""
        return (
            f"memory: pool of {self.pages} pages ({self.pages * page_tokens} tokens, {_gib(self.pages * self.page_bytes)}) "
            f"for KV and adapters; weights and context {_gib(self.taken)}, a step {_gib(self.step)}, training "
            f"{_gib(self.training)}, jobs {_gib(self.jobs)}, graphs {_gib(GRAPHS)}; half a step and "
            f"half a micro-batch predicted the whole ones with an error of {self.error:+.1%}"
        )


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


def make_plan(
    gpu: GpuMemory, fraction: float, profile: Profile, work: Work, *, page_bytes: int, least: int
) -> MemoryPlan:
    """The pool gets what `fraction` of the GPU's memory leaves; at least `least` pages.

    Raises:
        ConfigError: nothing is left, with the setting to change: `micro_batch_tokens` where training is what does not
            fit, else `memory_fraction`.
    """
    taken = gpu.total - gpu.free
    budget = int(gpu.total * fraction) - taken
    step = profile.no_grad.at(work.step_tokens)
    training = profile.act.at(work.micro_batch_tokens) + profile.backward.at(work.micro_batch_tokens)
    jobs = profile.job * work.jobs
    needed = (least + 1) * page_bytes + step + GRAPHS
    pages = (budget - step - training - jobs - GRAPHS) // page_bytes - 1
    if pages >= least:
        return MemoryPlan(pages, page_bytes, taken, step, training, jobs, profile.error)
    if needed > budget:
        raise ConfigError(
            f"memory_fraction: expected room for {_gib(needed)} beside the base's {_gib(taken)}, but {fraction} of "
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
