from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coserve.core.training.settings import TrainingSettings
from coserve.core.types import LoraSettings
from coserve.finetune.flat_tensors import ALIGNED, FlatLayout
from coserve.finetune.host_copy import HostCopy
from coserve.finetune.init import new_adapter
from coserve.finetune.lora_tensors import named_tensors
from coserve.finetune.optimizer import AdapterOptimizer
from tests.support.finetuning import tiny_base


def same_state(one: AdapterOptimizer, other: AdapterOptimizer) -> bool:
    """Bit for bit."""
    return all(torch.equal(*rows) for rows in zip(one.state, other.state, strict=True))


@given(st.lists(st.integers(1, 300), min_size=1, max_size=12), st.sampled_from([64, 192, 1 << 20]))
def test_tensors_lie_apart_and_in_whole_blocks(sizes: list[int], block: int) -> None:
    """The same tensors, whether the buffer is one piece or lies in blocks, there and back."""
    layout = FlatLayout({str(i): torch.Size((size, 2)) for i, size in enumerate(sizes)}, block)
    state_KN = torch.zeros(2, layout.size)
    for row_N in state_KN:
        for i, view in enumerate(layout.views(row_N).values()):
            view += torch.rand(view.shape) + i
            assert view.is_contiguous() and (view.storage_offset() - row_N.storage_offset()) % ALIGNED == 0
    assert state_KN.count_nonzero() == 4 * sum(sizes), "no two tensors share an element"
    host = HostCopy(state_KN.unbind(), [layout.block] * 2)
    host.download(2)
    host.wait()
    wanted = state_KN.clone()
    for row_N, blocks in zip(wanted, host.rows, strict=True):
        found = layout.block_views(blocks)
        assert all(torch.equal(found[name], view) for name, view in layout.views(row_N).items())
    state_KN.zero_()
    host.upload(1)
    assert torch.equal(state_KN[0], wanted[0]) and not state_KN[1].any()


def test_an_update_by_nothing_changes_nothing() -> None:
    spec = tiny_base("llama").spec
    start = new_adapter(LoraSettings(r=4), spec, seed=1, dtype=torch.float32, device="cpu")
    training = TrainingSettings(weight_decay=0.1)
    one, other = (AdapterOptimizer(start, spec, training, torch.float32) for _ in range(2))
    other.warm_up()
    for optimizer in (one, other):
        for layer in optimizer.grads:
            for gradient in layer:
                gradient.fill_(0.5)
        optimizer.step(targets=1, learning_rate=0.1)
    assert same_state(one, other)


@pytest.mark.parametrize("targets", [("q_proj", "down_proj"), ("k_proj",)])
def test_lora_plus_is_adamw_with_a_group_for_each_kind_of_matrix(targets: tuple[str, ...]) -> None:
    """Also of one that goes on from another's state in the middle."""
    spec = tiny_base("llama").spec
    start = new_adapter(LoraSettings(r=4, targets=targets), spec, seed=1, dtype=torch.float32, device="cpu")
    training = TrainingSettings(weight_decay=0.1, max_grad_norm=0.0, lora_plus_ratio=16.0)
    tensors = {name: tensor.clone() for name, tensor in named_tensors(start)}
    groups = [[tensors[name] for name in tensors if name.endswith(kind)] for kind in (".a", ".b")]
    reference = torch.optim.AdamW(
        [{"params": group, "times": times} for group, times in zip(groups, (1.0, 16.0), strict=True)],
        weight_decay=0.1,
        foreach=False,
    )
    straight, cut = (AdapterOptimizer(start, spec, training, torch.float32) for _ in range(2))
    optimizers = [straight, cut]
    generator = torch.Generator().manual_seed(2)
    for step in range(6):
        if step == 3:
            resumed = AdapterOptimizer(start, spec, training, torch.float32)
            resumed.restore(cut.snapshot()(), steps=step)
            optimizers = [straight, resumed]
        rate = 0.01 / (step + 1)
        gradients = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            tensor.grad = gradients[name]
        for group in reference.param_groups:
            group["lr"] = rate * group["times"]
        reference.step()
        for optimizer in optimizers:
            for site, pair in optimizer.weights().sites.items():
                assert pair.main_grads is not None
                pair.main_grads.a_RD.copy_(gradients[f"{site}.a"])
                pair.main_grads.b_OR.copy_(gradients[f"{site}.b"])
            optimizer.step(targets=1, learning_rate=rate)
    assert same_state(straight, optimizers[1]), "bit for bit"
    for name, tensor in named_tensors(straight.masters()):
        torch.testing.assert_close(tensor, tensors[name], rtol=1e-6, atol=1e-7, msg=name)
