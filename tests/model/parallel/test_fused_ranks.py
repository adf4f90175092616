"""The fused forward of a rank's part: row-parallel sites are summed inside their op, with the residual, and compiled
layers stay few."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from coserve.kernels.attention.packed import PackedAttention
from coserve.kernels.lora.segments import Segments
from coserve.model.base import Base
from coserve.model.fused import FusedBase
from coserve.model.lora import LoraBatch, LoraWeights
from coserve.model.parallel.mesh import Mesh
from tests.support.families import tiny_family
from tests.support.lora_backends import GROUPED
from tests.support.ranks import Ranks
from tests.support.sharded import Kind, load, whole_adapter

BOUNDS = (0, 5, 6, 16)
TOKENS, POSITIONS = torch.arange(16), torch.cat([torch.arange(n) for n in (5, 1, 10)])
SEGMENTS = Segments(BOUNDS, (1, -1, 0))


def _adapters(base: Base) -> tuple[LoraWeights, ...]:
    return tuple(base.shard(whole_adapter(base.spec, kind)) for kind in (Kind(4), Kind(8, blocks=2)))


def _fused(mesh: Mesh, folder: str, quantization: str) -> tuple[list[Tensor], list[int], dict[str, int]]:
    """Logits of the base and of a mixed batch, with sites together and traced; sums that add the residual in each
    graph; collectives of one forward."""
    base = load(folder, mesh, quantization=quantization)
    graphs, found = list[torch.fx.GraphModule](), list[Tensor]()

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    plain = FusedBase(base, compiled=False)
    plain.check()
    for fused in (plain, FusedBase(base, backend=backend)):
        groups = [group for layer in fused.groups for group in layer]
        lora = GROUPED.prepare(SEGMENTS, [own.sites for own in _adapters(base)], groups)
        for terms in (None, lora):
            mesh.traffic.clear()
            found.append(fused.forward(TOKENS, POSITIONS, PackedAttention(BOUNDS), lora=terms, keep=None))
    part_of_vocabulary = plain.forward(
        TOKENS, POSITIONS, PackedAttention(BOUNDS), lora=None, keep=torch.tensor([3, 15]), gather=False
    )
    assert base.sharding is not None
    found.append(base.sharding.vocabulary.likeliest(part_of_vocabulary))
    arguments = {torch.ops.coserve.linear: 6, torch.ops.coserve.linear_quantized: 4}  # with a residual, the last one
    adds = [sum(len(node.args) == arguments.get(node.target) for node in graph.graph.nodes) for graph in graphs]
    return found, adds, dict(mesh.traffic.calls)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "quantization"), [("llama", "none"), ("gpt2", "none"), ("llama", "fp8"), ("llama", "nf4")]
)
def test_a_fused_forward_has_the_logits_of_one_process(
    two: Ranks, family: str, quantization: str, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32} if quantization != "none" else {}
    tiny_family(family, **sizes).save_pretrained(tmp_path)
    base = load(str(tmp_path), quantization=quantization)
    expected = []
    for lora in (None, LoraBatch(SEGMENTS, _adapters(base), GROUPED)):
        with torch.no_grad():
            expected.append(base.forward(TOKENS, POSITIONS, PackedAttention(BOUNDS), lora=lora, keep=None))
    for found, adds, _ in two.run(_fused, str(tmp_path), quantization):
        for got, want in zip(found, [*expected, *expected], strict=False):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        assert torch.equal(found[-1], expected[0][[3, 15]].argmax(-1))
        assert len(adds) <= 2, "layers of one kind share what is traced"
        assert set(adds) == {2}, "attention's and the MLP's"
