"""What is measured is the real step and the real micro-batch; on a GPU the plan is checked against the allocator."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from coserve.core.types import DEFAULT_RANK, LoraSettings
from coserve.finetune.init import zero_adapter
from coserve.finetune.memory_profiling import Conditions, CudaMemoryMeter, MemoryProfiler, plan_memory
from coserve.kernels.gpu.capture import gc_paused
from coserve.kernels.lora.interface import LoraBackend
from coserve.lora.store.packing import packed_bytes
from coserve.memory.plan import GIB, Work
from coserve.memory.profile import fit, load_profile
from coserve.model.base import Base, wrap_base
from tests.support.examples import by_day
from tests.support.families import tiny_family
from tests.support.live_bytes import LiveBytes
from tests.support.lora_backends import GROUPED, SEGMENTED
from tests.support.tiny_models import tiny_model

WORK = Work(step_tokens=64, micro_batch_tokens=96, jobs=2)


class Steps:
    """A meter whose numbers say when it was asked: each question is one more."""

    def __init__(self) -> None:
        self.asked = 0

    def now(self) -> int:
        self.asked += 1
        return self.asked

    peak = now

    def reset(self) -> None: ...


def conditions(lora_backend: LoraBackend, work: Work = WORK, *, recompute: bool = False) -> Conditions:
    return Conditions(lora_backend, recompute, max_running=4, page_tokens=16, work=work)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "recompute"), [("llama", False), ("llama", True), ("gpt2", True), ("gemma3", False)]
)
def test_any_base_can_be_measured_and_stays_what_it_is(family: str, recompute: bool) -> None:
    base = wrap_base(tiny_model(family), name=family, eos_token_ids=())
    before = [parameter.clone() for parameter in base.model.parameters()]
    device = MemoryProfiler(base, Steps(), conditions(GROUPED, recompute=recompute))
    assert device.step(64) == 1
    assert device.step(2 * base.spec.context) == 1, "longer than the context too"
    phases = device.phases(96, recomputed=recompute)
    assert (phases.job, phases.begin, phases.kept, phases.forward) == (1, 1, 2, 3), "asked in this order"
    assert (phases.head, phases.backward, phases.whole) == (4, 5, 6)
    assert all(torch.equal(a, b) for a, b in zip(before, base.model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in base.model.parameters())


class Ring:
    """Only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


class Watched(Steps):
    """Notes whether the collector rests, and whether garbage from before is left, whenever memory is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[bool, bool]] = []
        self.litter()

    def litter(self) -> None:
        self.garbage = weakref.ref(Ring())
        self.seen.clear()

    def now(self) -> int:
        self.seen.append((gc.isenabled(), self.garbage() is None))
        return super().now()

    peak = now


@pytest.mark.slow
def test_nothing_of_before_is_freed_while_memory_is_measured() -> None:
    base = wrap_base(tiny_model("llama"), name="llama", eos_token_ids=())
    meter = Watched()
    device = MemoryProfiler(base, meter, conditions(GROUPED))
    for measured in (lambda: device.step(64), lambda: device.micro_batch(96)):
        with gc_paused():  # or it might be gone too early
            meter.litter()
            assert meter.garbage() is not None
            measured()
        assert meter.seen
        assert set(meter.seen) == {(False, True)}
    assert gc.isenabled()
    device.step(64)
    assert gc.isenabled(), "the collector rests for good"


@pytest.mark.parametrize("recompute", by_day([False, True], True))
def test_memory_grows_as_lines_say(recompute: bool) -> None:
    """By torch's own storages on the CPU: what a job keeps does not grow, what a micro-batch takes is a line."""
    base = wrap_base(tiny_model("llama"), name="llama", eos_token_ids=())
    with LiveBytes() as meter:
        device = MemoryProfiler(base, meter, conditions(GROUPED, recompute=recompute))
        one, two, four = (device.micro_batch(tokens) for tokens in (64, 128, 256))
    every = zero_adapter(LoraSettings(r=DEFAULT_RANK), base.spec, dtype=torch.float32, device=base.device)
    assert one.job == two.job == four.job > 4 * packed_bytes(every)
    assert 0 < one.forward <= one.whole
    assert four.whole - two.whole == pytest.approx(2 * (two.whole - one.whole), rel=0.02)
    assert four.forward - two.forward == pytest.approx(2 * (two.forward - one.forward), rel=0.02)


@pytest.mark.slow
def test_recomputed_layers_leave_their_inputs_only() -> None:
    base = wrap_base(tiny_model("llama", num_hidden_layers=6), name="llama", eos_token_ids=())
    with LiveBytes() as meter:
        kept, recomputed = (
            MemoryProfiler(base, meter, conditions(GROUPED, recompute=recompute)).micro_batch(256).forward
            for recompute in (False, True)
        )
    assert recomputed < 0.4 * kept


@pytest.mark.slow
def test_a_plan_is_measured_once_for_its_conditions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the numbers, which a fake device gives."""
    base, path = wrap_base(tiny_model("llama", num_hidden_layers=1), name="llama"), tmp_path / "memory.json"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60 * GIB, 64 * GIB))
    meter, again, other = Steps(), Steps(), Steps()
    first = plan_memory(base, conditions(GROUPED), fraction=0.5, path=path, meter=meter)
    assert plan_memory(base, conditions(GROUPED), fraction=0.5, path=path, meter=again) == first
    assert meter.asked > 0 and again.asked == 0
    assert first.pages * first.page_bytes == pytest.approx(26 * GIB, rel=1e-3)
    plan_memory(base, conditions(GROUPED, recompute=True), fraction=0.5, path=path, meter=other)
    assert other.asked > 0


@pytest.mark.slow
def test_what_is_cached_of_latent_attention_is_a_condition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60 * GIB, 64 * GIB))
    for mla_cache in ("latents", "heads"):
        base, meter = wrap_base(tiny_family("minicpm3"), name="minicpm3", mla_cache=mla_cache), Steps()
        plan_memory(base, conditions(GROUPED), fraction=0.5, path=tmp_path / "memory.json", meter=meter)
        assert meter.asked > 0, "another profile was taken"


def gpu_base() -> Base:
    model = tiny_model("llama", hidden_size=256, intermediate_size=1024, num_hidden_layers=4, vocab_size=4096)
    return wrap_base(model.to("cuda", torch.bfloat16), name="tiny", eos_token_ids=())


@pytest.mark.gpu
def test_lines_predict_the_allocators_peak() -> None:
    base, work = gpu_base(), Work(step_tokens=4096, micro_batch_tokens=4096, jobs=2)
    device = MemoryProfiler(base, CudaMemoryMeter(base.device), conditions(SEGMENTED, work))
    one, two, four = (device.micro_batch(tokens) for tokens in (2048, 4096, 8192))
    assert one.job == two.job == four.job > 0
    assert 0 < one.forward <= one.whole
    assert four.whole - two.whole == pytest.approx(2 * (two.whole - one.whole), rel=0.1)
    steps = [(tokens, device.step(tokens)) for tokens in (1024, 2048, 4096)]
    line, (_, most) = fit(steps), (8192, device.step(8192))
    # Not one line, as logits weigh more in small steps: what counts is what the plan leaves for the largest.
    assert all(line.at(tokens) >= peak for tokens, peak in steps)
    assert line.at(8192) == pytest.approx(most, rel=0.25)


@pytest.mark.gpu
def test_a_plan_is_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, path = gpu_base(), tmp_path / "memory.json"
    free, total = 60 * GIB, 64 * GIB  # what other tests leave of the same GPU changes meanwhile
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, total))
    same = conditions(SEGMENTED, Work(step_tokens=2048, micro_batch_tokens=2048, jobs=2))
    plan = plan_memory(base, same, fraction=0.5, path=path)
    written = path.stat().st_mtime_ns
    assert plan.taken == total - free
    assert plan.taken + plan.step + plan.training + plan.jobs + plan.pages * plan.page_bytes < 0.5 * total
    assert plan.pages * plan.page_bytes > 0.5 * total - plan.taken - 6 * GIB
    assert abs(plan.error) < 0.1
    again = plan_memory(base, same, fraction=0.5, path=path)
    assert path.stat().st_mtime_ns == written
    assert again.pages == pytest.approx(plan.pages, rel=0.01)
    assert load_profile(path, ("another",)) is None
    print(plan.note(16))
