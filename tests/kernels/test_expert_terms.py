"""Kernels of experts' terms in slots: numbers in Triton's interpreter, or on a GPU, and reads in what is compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from coserve.kernels.lora.experts.rows import ExpertRows, counted
from coserve.kernels.lora.experts.slot_terms import DECODING, ExpertSlots, SlotExpertLora, Tiling, add_terms
from coserve.kernels.lora.types import LoraPair

pytest.importorskip("triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXPERTS, SLOTS, SITE = 5, 4, "down_proj"
RANKS = (3, 16, 0, 130)
"""By slot; 0: empty."""


def make_pairs(inputs: int, outputs: int) -> dict[int, LoraPair]:
    g = torch.Generator().manual_seed(3)

    def draw(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=g) * 0.1).to(DEVICE)

    return {
        slot: LoraPair(draw(EXPERTS * rank, inputs), draw(EXPERTS * outputs, rank), 0.5 + slot, experts=EXPERTS)
        for slot, rank in enumerate(RANKS)
        if rank
    }


def wanted(y_SO: Tensor, x_SD: Tensor, slots_T: Tensor, rows: ExpertRows, pairs: dict[int, LoraPair]) -> Tensor:
    found = y_SO.clone()
    for s, (token, expert) in enumerate(zip(rows.token_S.tolist(), rows.expert_S.tolist(), strict=True)):
        pair = pairs.get(int(slots_T[token]))
        if pair is not None and expert < EXPERTS:
            a, b = pair.a_RD.view(EXPERTS, pair.rank, -1)[expert], pair.b_OR.view(EXPERTS, -1, pair.rank)[expert]
            found[s] += pair.scaling * (x_SD[s] @ a.T @ b.T)
    return found


@pytest.mark.parametrize(
    ("tiling", "inputs", "outputs"),
    [
        (DECODING, 200, 72),
        (replace(DECODING, steps=1, inputs=64), 96, 300),
        (replace(DECODING, rows=16, steps=None, early=False), 200, 72),
    ],
)
@pytest.mark.slow
def test_terms_equal_those_of_each_row(tiling: Tiling, inputs: int, outputs: int) -> None:
    """Pairs of one row and of more than a tile, rows of no adapter, of an empty slot and of another GPU's expert,
    ranks of no whole vector and above a block, inputs that fill no split, rows that are part of wider ones."""
    g = torch.Generator().manual_seed(1)
    pairs, table = make_pairs(inputs, outputs), ExpertSlots([SITE, "other"], SLOTS, DEVICE)
    for slot, pair in pairs.items():
        table.put(slot, {SITE: pair})
    tokens = 37
    slots_T = torch.tensor([-1, 1, *[0] * 20, *[3] * 9, 2, 1, *[-1] * 4], dtype=torch.int32, device=DEVICE)
    chosen_TK = torch.stack([torch.randperm(EXPERTS + 1, generator=g)[:2] for _ in range(tokens)]).to(DEVICE)
    rows = SlotExpertLora(table.tables, slots_T, 130).sorted_rows(chosen_TK, EXPERTS)
    x_SD = torch.randn(2 * tokens, 2 * inputs, generator=g).to(DEVICE)[:, :inputs]
    y_SO = torch.randn(2 * tokens, 2 * outputs, generator=g).to(DEVICE)[:, :outputs]
    expected = wanted(y_SO, x_SD, slots_T, rows, pairs)
    assert sum(rows.expert_S.tolist().count(expert) > 9 for expert in range(EXPERTS)) > 2
    add_terms(y_SO, x_SD, slots_T, rows, table.tables["other"], 256, tiling)
    add_terms(y_SO, x_SD, slots_T, rows, table.tables[SITE], 256, tiling)
    torch.testing.assert_close(y_SO, expected, atol=2e-5, rtol=1e-4)


def test_slots_copy_pairs_that_are_not_aligned() -> None:
    """The kernels read 16 bytes at once."""
    inputs, outputs = 24, 16
    pair = make_pairs(inputs, outputs)[1]
    odd = [torch.empty(matrix.numel() + 1, device=DEVICE)[1:].view(matrix.shape) for matrix in (pair.a_RD, pair.b_OR)]
    moved = replace(pair, a_RD=odd[0].copy_(pair.a_RD), b_OR=odd[1].copy_(pair.b_OR))
    table = ExpertSlots([SITE], SLOTS, DEVICE)
    table.put(1, {SITE: moved})
    assert not any(address % 16 for address in table.tables[SITE].addresses.flatten().tolist())
    slots_T = torch.ones(2, dtype=torch.int32, device=DEVICE)
    lora = SlotExpertLora(table.tables, slots_T, 16)
    rows = lora.sorted_rows(torch.tensor([[0, 1], [4, 0]], device=DEVICE), EXPERTS)
    x_SD, y_SO = torch.ones(4, inputs, device=DEVICE), torch.zeros(4, outputs, device=DEVICE)
    torch.testing.assert_close(lora.add(SITE, y_SO.clone(), x_SD, rows), wanted(y_SO, x_SD, slots_T, rows, {1: pair}))


@pytest.mark.parametrize("tokens", [1, 40, 700])
@pytest.mark.parametrize("with_slots", [False, True])
def test_the_kernel_orders_rows_as_a_stable_sort_does(tokens: int, with_slots: bool) -> None:
    """Rows of another GPU's expert and of no slot, experts that nobody chose, more slots than tokens."""
    g, experts, slots = torch.Generator().manual_seed(tokens), 11, 6
    chosen_TK = torch.stack([torch.randperm(experts + 1, generator=g)[:3] for _ in range(tokens)]).to(DEVICE)
    chosen_TK[chosen_TK == 4] = 5
    slots_T = torch.randint(-1, slots, (tokens + 9,), generator=g).int().to(DEVICE) if with_slots else None
    found = ExpertRows(*counted(chosen_TK, experts, slots_T, slots), 3)
    wanted = ExpertRows.by_expert(chosen_TK.cpu(), experts, None if slots_T is None else slots_T.cpu(), slots)
    for field in ("place_S", "expert_S", "token_S", "ends_E"):
        own, other = getattr(found, field), getattr(wanted, field)
        assert own.dtype == other.dtype and torch.equal(own.cpu(), other), field


COMPILED = """
import torch
from triton.runtime import driver
from triton import compile
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from coserve.kernels.gpu.device import H200
from coserve.kernels.gpu.launcher import compile_only
from coserve.kernels.lora.experts import slot_terms
from coserve.kernels.lora.experts.order_kernel import order_rows
from coserve.kernels.lora.experts.rows import BLOCK, CHUNK, ExpertRows
from tests.support.kernels import NoGpu


def warmup(self, *arguments, **rest):
    compiled = compiles(self, *arguments, **rest)
    code, fits = compiled.asm["ptx"], compiled.metadata.shared <= H200.shared_bytes
    wide, narrow, early = (code.count(part) for part in ("cp.async.cg", "ld.global.b16", "griddepcontrol"))
    name = self.fn.__name__
    print(name, narrow == 0, (wide if name == "shrink" else code.count("ld.global.v4")) > 0, early > 0, fits)


driver.set_active(NoGpu())
compiles, JITFunction.warmup = JITFunction.warmup, warmup
slot_terms.device_info = lambda device: H200
x, y = torch.empty(16, 768, dtype=torch.bfloat16), torch.empty(16, 2048, dtype=torch.bfloat16)
number, slots = torch.zeros(16, dtype=torch.int64), torch.zeros(16, dtype=torch.int32)
rows = ExpertRows(number, number, number, slots, 8)
table = slot_terms.ExpertSlots(["site"], 4, x.device).tables["site"]
with compile_only(None):
    for width in (16, 128, 256):  # above, each thread has one element of y
        slot_terms.add_terms(y, x, slots, rows, table, width)
for slotted in (False, True):
    signature = dict.fromkeys(("chosen_ptr", "place_ptr", "expert_ptr", "token_ptr"), "*i64")
    signature |= {"slots_ptr": "*i32", "ends_ptr": "*i32"} | dict.fromkeys(("S", "K", "E", "slots"), "i32")
    constants = {"SLOTS": slotted, "BLOCK": BLOCK, "CHUNK": CHUNK}
    names = order_rows.arg_names
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(order_rows, {name: signature[name] for name in names}, constants)
    print("order", len(compile(source, target=NoGpu().get_current_target()).asm["cubin"]) > 0)
"""


@pytest.mark.slow
def test_compiled_kernels_read_whole_vectors(tmp_path: Path) -> None:
    """For an H200, without one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert done.stdout.splitlines() == [
        *3 * ["shrink True True True True", "expand True True True True"],
        *2 * ["order True"],
    ], done.stderr
