"""Each reading against sums by hand, against torch's own tracker, and against real tensors in place of fake ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoModelForCausalLM

from benchmarks.memory.profile.coserve_passes import CoserveTrial, SeamBackends
from benchmarks.memory.profile.passes import Passes, read, read_points
from benchmarks.memory.profile.peft_passes import PeftTrial
from benchmarks.memory.profile.report import Readings
from benchmarks.memory.profile.request import Kind, Workload
from coserve.kernels.attention.packed import PackedAttention
from coserve.memory.kv import KvCache
from coserve.model.base import wrap_base
from tests.support.examples import in_turns, on_days
from tests.support.live_bytes import LiveBytes
from tests.support.lora_backends import GROUPED
from tests.support.predicted_memory import fake_tensors
from tests.support.tiny_models import tiny_model
from tests.support.workspaces import workspace_bytes

T, D, H, O = 256, 128, 512, 384
"""Multiples of 128: fp32 tensors of them fill whole blocks of the allocator."""
SCALAR = 512
LORA = Workload(kind=Kind.LORA, rank=8)


class Mlp:
    """x (rows · T, D) -> relu(x W1ᵀ) W2ᵀ."""

    def __init__(self, model: nn.Sequential, rows: int) -> None:
        self.model, self.x_TD = model, torch.empty(rows * T, D)

    @torch.no_grad()
    def no_grad(self) -> None:
        self.model(self.x_TD)

    def train(self) -> Iterator[None]:
        y_TO: Tensor = self.model(self.x_TD)
        yield
        y_TO.sum().backward()  # type: ignore[no-untyped-call]
        for parameter in self.model.parameters():
            parameter.grad = None


def mlp_by_hand(rows: int) -> Readings:
    """What lives at each peak, in fp32."""
    t, weights = rows * T, 4 * (D * H + H * O)
    hidden, output = 4 * t * H, 4 * t * O
    no_grad = forward = 2 * hidden  # relu's input and output; then the input is freed: relu's backward needs the output
    # In relu's backward live its output, both gradients, the model's output, its sum and that one's gradient, and dW2.
    # Before, in that of the second product: relu's output and its gradient, dW2, and a copy of the sum's gradient.
    backward = max(3 * hidden + output, 2 * hidden + 2 * output) + 4 * H * O + 2 * SCALAR
    return Readings(
        weights=weights, no_grad=weights + no_grad, forward=weights + forward, forward_backward=weights + backward
    )


@pytest.mark.parametrize(("rows", "fake"), [(1, False), (1, True), (3, True), (8, True)])
def test_a_multilayer_perceptron_as_by_hand(rows: int, fake: bool) -> None:
    with FakeTensorMode() if fake else nullcontext(), LiveBytes(workspace_bytes) as meter:
        model = nn.Sequential(nn.Linear(D, H, bias=False), nn.ReLU(), nn.Linear(H, O, bias=False))
        passes = Passes(lambda batch, length: Mlp(model, batch), True, meter.now())
        assert read(passes, meter, rows, 1) == mlp_by_hand(rows)


@pytest.mark.parametrize(
    ("shape", "stride", "copied"),
    [((8, 4), (4, 1), 0), ((8, 4), (1, 8), 0), ((8, 4), (0, 0), 8 * 4 * 4), ((8, 4), (8, 2), 8 * 4 * 4)],
)
def test_products_copy_what_cublas_cannot_read(shape: tuple[int, int], stride: tuple[int, int], copied: int) -> None:
    left = torch.empty_strided(shape, stride)
    assert workspace_bytes("aten::mm", (left, torch.empty(4, 4))) == copied
    assert workspace_bytes("aten::addmm", (torch.empty(4), left, torch.empty(4, 4))) == copied
    assert workspace_bytes("aten::add", (left, left)) == 0


def test_flash_attentions_backward_sums_in_fp32_over_rounded_sequences() -> None:
    """Two sequences of 10 tokens, 4 heads of 40 over 2 of keys: dQ of 64 columns and a row's sum; dK and dV of each
    head."""
    q, k = torch.empty(20, 4, 40, dtype=torch.bfloat16), torch.empty(20, 2, 40, dtype=torch.bfloat16)
    bounds = torch.empty(3, dtype=torch.int32)
    found = workspace_bytes("aten::_flash_attention_backward", (q, q, k, k, q, None, bounds, bounds))
    assert found == 4 * (20 + 2 * 128) * 4 * (64 + 1) + 2 * 20 * 4 * 40 * 2
    q, k = torch.empty(2, 4, 10, 40), torch.empty(2, 4, 10, 40)
    args = (q, q, k, k)
    assert workspace_bytes("aten::_scaled_dot_product_flash_attention_for_cpu_backward", args) == 4 * 2 * 4 * 10 * 41
    half = tuple(x.bfloat16() for x in args)
    found = workspace_bytes("aten::_scaled_dot_product_flash_attention_for_cpu_backward", half)
    assert found == 4 * 2 * 128 * 4 * (64 + 1)


@pytest.mark.slow
def test_torchs_own_tracker_finds_the_same_peak() -> None:
    """Its peak cannot be reset, so each pass has a tracker of its own; tensors of the CPU are not rounded there."""

    def passes(model: nn.Module, ids: Tensor, train: bool) -> None:
        if train:
            model(ids).logits.sum().backward()
        else:
            with torch.no_grad():
                model(ids)

    config = tiny_model("llama", hidden_size=128, intermediate_size=256, vocab_size=512).config
    with FakeTensorMode(), LiveBytes() as ours:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        ids = torch.ones(4, 32, dtype=torch.long)
        for train in (False, True):
            before = ours.now()
            ours.reset()
            passes(model, ids, train)
            found = ours.peak() - before
            model.zero_grad()
            tracker = MemTracker()
            tracker.track_external(model)
            with tracker:
                before = _total(tracker, "current")
                passes(model, ids, train)
            model.zero_grad()
            assert found == pytest.approx(_total(tracker, "peak") - before, rel=0.01)


def _total(tracker: MemTracker, kind: str) -> int:
    return tracker.get_tracker_snapshot(kind)[torch.device("cpu")]["Total"]


def trial(meter: LiveBytes, **shape: object) -> CoserveTrial:
    config = tiny_model("llama", **shape).config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    backends = SeamBackends(GROUPED, PackedAttention, KvCache.attention, recompute=False)
    return CoserveTrial(wrap_base(model, name="tiny"), meter, backends)


@pytest.mark.parametrize("kind", in_turns(list(Kind)))
def test_fake_tensors_take_what_real_ones_take(kind: Kind) -> None:
    """The same passes, methods and meter: all but the tensors' contents."""
    workload, found = LORA if kind is Kind.LORA else Workload(kind=kind), []
    for fake in (True, False):
        with fake_tensors() if fake else nullcontext(), LiveBytes() as meter:
            loaded = trial(meter, hidden_size=64, vocab_size=256)
            with loaded.workload(workload) as passes:
                before = meter.now()
                found.append(read(passes, meter, 4, 32))
                assert meter.now() == before, "a pass leaves nothing"
    fake_one, real = ([size for size in msgspec.structs.astuple(one) if size is not None] for one in found)
    assert fake_one == pytest.approx(real, rel=0.005)


@on_days(5)
def test_what_libraries_keep_is_not_the_adapters() -> None:
    """A GPU's libraries allocate workspaces in the first pass, before an adapter is made: here 4 MiB."""
    config = tiny_model("llama").config
    with fake_tensors() as meter:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        found = []
        for loaded in (PeftTrial(model, meter), trial(meter)):
            held = torch.empty(1 << 20)
            with loaded.workload(LORA) as passes:
                found.append((passes.weights, passes.optimizer))
            del held
            with loaded.workload(LORA) as passes:
                assert (passes.weights, passes.optimizer) == pytest.approx(found[-1], abs=4096)
    assert found[0][1] == 0 < found[1][1]


class Limited:
    """Fits up to a number of rows."""

    def __init__(self, meter: LiveBytes, most: int, batch: int) -> None:
        self.meter, self.most, self.batch = meter, most, batch

    def no_grad(self) -> None:
        if self.batch > self.most:
            raise torch.OutOfMemoryError
        torch.empty(self.batch, 128)

    def train(self) -> Iterator[None]:
        raise AssertionError


@pytest.mark.parametrize(
    ("most", "rows", "message"), [(4, [1, 4], "at 16 rows; 4 rows fitted"), (0, [], "at 1 rows; no")]
)
def test_a_series_ends_where_memory_does(most: int, rows: list[int], message: str) -> None:
    begun, freed = list[int](), list[int]()
    with LiveBytes() as meter:
        passes = Passes(lambda batch, length: Limited(meter, most, batch), False, 1000)
        points, ended, workspace = read_points(
            passes, meter, (1, 4, 16, 64), 8, begun.append, lambda: freed.append(1), warm_up=True
        )
    assert [point.batch for point in points] == rows
    assert [point.readings.no_grad for point in points] == [1000 + 512 * batch for batch in rows]
    assert ended is not None and message in ended
    assert begun == [1, 4, 16, 64][: len(rows) + 1], "larger sizes are not tried"
    assert len(freed) == len(begun) + 1, "after the first run, too"
    assert workspace == 0
