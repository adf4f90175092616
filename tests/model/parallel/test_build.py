"""One rank's part of a base: which slices it reads, what it refuses. Without other ranks."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FalconConfig

from coserve.core.errors import UnsupportedBase
from coserve.model.base import Base
from coserve.model.load import load_base
from coserve.model.parallel import checkpoint
from coserve.model.parallel.build import empty_model
from coserve.model.parallel.families.partitions import plan_of, planned_blocks
from coserve.model.parallel.families.plans import PLANS
from coserve.model.parallel.mesh import LoneRank, Mesh
from coserve.model.parallel.vocabulary import VocabularyShard
from tests.support.examples import sample
from tests.support.families import tiny_family
from tests.support.ranks import Ranks
from tests.support.sharded import KINDS, mixed_logits, save_base, train


def _load(folder: Path, rank: int = 0, size: int = 2, **settings: object) -> Base:
    return load_base(str(folder), device="cpu", dtype="auto", mesh=LoneRank(rank, size), **settings)  # type: ignore[arg-type]


def _save(folder: Path, family: str, **overrides: object) -> Path:
    tiny_family(family, **overrides).save_pretrained(folder)
    return folder


def _parameters(base: Base) -> int:
    return sum(parameter.numel() for parameter in base.model.parameters())


@pytest.mark.parametrize(
    ("family", "overrides", "size", "reason"),
    [
        ("llama", {}, 8, "number of query heads"),
        ("llama", {"intermediate_size": 50}, 4, "gate_proj: expected a number of features that 4 GPUs divide"),
        (
            "llama",
            {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 3},
            2,
            "number of key/value heads",
        ),
        (
            "jetmoe",
            {"num_key_value_heads": 1, "num_experts_per_tok": 2},
            2,
            "self_attention: expected a number of key/value heads that 2 GPUs divide, got 1",
        ),
        ("falcon_h1", {"mamba_n_groups": 2}, 4, "in_proj: expected one group of heads"),
    ],
)
def test_what_cannot_be_cut_is_refused(
    family: str, overrides: dict[str, object], size: int, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedBase, match=reason):
        _load(_save(tmp_path, family, **overrides), size=size)


def test_a_family_without_a_plan_is_refused() -> None:
    with pytest.raises(
        UnsupportedBase, match="falcon has no plan for tensor parallelism; run it on one GPU, or one of"
    ):
        plan_of(FalconConfig(), 2)


def test_a_layer_with_a_linear_module_outside_of_the_plan_is_refused() -> None:
    layer = tiny_family("gemma4_text").model.layers[0]
    with pytest.raises(UnsupportedBase, match=r"layers.0.per_layer_input_gate has no plan"):
        planned_blocks(PLANS["llama"], layer, "layers.0")


@pytest.mark.parametrize("tied", [False, True])
def test_a_rank_holds_its_part(tied: bool, tmp_path: Path) -> None:
    base = _load(_save(tmp_path, "llama", tie_word_embeddings=tied), rank=1)
    model = base.model
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    assert [tuple(m.weight.shape) for m in (attention.q_proj, attention.k_proj, attention.o_proj)] == [
        (16, 32),
        (8, 32),
        (32, 16),
    ]
    assert [tuple(m.weight.shape) for m in (mlp.gate_proj, mlp.down_proj)] == [(24, 32), (32, 24)]
    assert (mlp.down_proj.in_features, attention.q_proj.out_features) == (24, 16)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert (embedding.shape[0], head.shape[0]) == (128, 64)
    assert (head.untyped_storage().data_ptr() == embedding.untyped_storage().data_ptr()) == tied
    whole = load_file(tmp_path / "model.safetensors")
    assert torch.equal(attention.q_proj.weight, whole["model.layers.0.self_attn.q_proj.weight"][16:])
    assert torch.equal(attention.o_proj.weight, whole["model.layers.0.self_attn.o_proj.weight"][:, 16:])
    assert base.spec.sites["model.layers.0.mlp.down_proj"].in_features == 48


def test_only_slices_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every matrix that is cut; rank 1 does not compute the fingerprint."""
    read: dict[str, int] = {}
    get = checkpoint.Checkpoint.get

    class Counting:
        def __init__(self, name: str, lazy: checkpoint.Lazy) -> None:
            self.name, self.lazy = name, lazy

        def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
            found = self.lazy[index]
            read[self.name] = read.get(self.name, 0) + found.numel()
            return found

    monkeypatch.setattr(checkpoint.Checkpoint, "get", lambda self, name, shape: Counting(name, get(self, name, shape)))
    base = _load(_save(tmp_path, "llama"), rank=1)
    assert base.sharding is not None
    for site, cut in base.sharding.sites.items():
        whole = cut.inputs.size * cut.outputs.size
        assert read[f"{site}.weight"] == whole // 2
    assert sum(read.values()) == _parameters(base)


def test_files_may_be_split_and_lack_the_decoders_prefix(tmp_path: Path) -> None:
    folder = _save(tmp_path, "gpt2")
    expected = _load(folder).model.state_dict()
    tensors = {name.removeprefix("transformer."): t for name, t in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {name: f"model-{i % 2 + 1}-of-2.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name].contiguous() for name in names if files[name] == file}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    found = _load(folder).model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    index.write_text(json.dumps({"weight_map": files | {"wte.weight": "../elsewhere.safetensors"}}))
    with pytest.raises(UnsupportedBase, match="outside of the folder"):
        _load(folder)
    index.write_text("[")
    with pytest.raises(UnsupportedBase, match="index of files is damaged"):
        _load(folder)


@pytest.mark.slow
def test_llama_4_is_read_from_its_files_with_images(tmp_path: Path) -> None:
    folder = _save(tmp_path, "llama4_text")
    tensors = load_file(folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    save_file({f"language_model.{name}": one for name, one in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama4", "text_config": text}))
    base, name = _load(folder, rank=1), "model.layers.0.feed_forward.experts.down_proj"
    assert base.spec.family == "llama4_text"
    assert torch.equal(base.model.get_parameter(name), tensors[name][:, 24:])


def test_missing_and_misshapen_weights_are_named(tmp_path: Path) -> None:
    folder = _save(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({n: t for n, t in tensors.items() if n != name}, folder / "model.safetensors")
    with pytest.raises(UnsupportedBase, match=f"have no {name}"):
        _load(folder)
    save_file(tensors | {name: tensors[name][:40].contiguous()}, folder / "model.safetensors")
    with pytest.raises(UnsupportedBase, match=r"expected model.layers.1.mlp.up_proj.weight of shape \[48, 32\]"):
        _load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedBase, match="safetensors"):
        _load(folder)


def test_buffers_that_nobody_computes_are_refused(tmp_path: Path) -> None:
    """Otherwise they would hold whatever was in memory: Apertus' activation has such, which files have."""
    with pytest.raises(UnsupportedBase, match=r"act_fn.* is a buffer that ranks cannot compute"):
        _load(_save(tmp_path, "llama", hidden_act="xielu"), load_format="dummy")


def test_drawn_weights_are_one_base_on_all_ranks(tmp_path: Path) -> None:
    folder = _save(tmp_path, "gemma2")
    (folder / "model.safetensors").unlink()
    ranks = [_load(folder, rank, load_format="dummy") for rank in range(2)]
    norms = [base.model.model.layers[0].input_layernorm.weight for base in ranks]
    gates = [base.model.model.layers[0].mlp.gate_proj.weight for base in ranks]
    assert torch.equal(norms[0], norms[1])
    assert not torch.equal(gates[0], gates[1])
    assert float(gates[0].std()) == pytest.approx(0.2, rel=0.1)


def test_the_likeliest_token_of_parts() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0, 2.0], [5.0, 0, 0, 0, 0], [0, 0, 0, 0, torch.nan], [-torch.inf] * 5])

    class Parts(Mesh):
        """Both ranks in one process: `likeliest` of the first records, that of the second answers."""

        def __init__(self, rank: int, before: list[Tensor]) -> None:
            super().__init__()
            self.rank, self.size, self.before = rank, 2, before

        def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
            self.before.append(x)
            return torch.cat([*self.before, *[x] * (2 - len(self.before))], dim)

    sent: list[Tensor] = []
    padded = torch.nn.functional.pad(logits, (0, 1), value=9.0)
    for rank in range(2):
        shard = VocabularyShard(Parts(rank, sent), 5)
        found = shard.likeliest(padded[:, 3 * rank : 3 * rank + 3])
    assert found.tolist() == [1, 0, -1, -1]
    assert (shard.local, shard.start, shard.stop) == (3, 3, 5)


def test_the_labels_that_parts_predict() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0, 2.0], [5.0, 0, 0, 0, 0], [0, 0, 0, 0, 7.0], [0, 1, 2, 0, 0]])
    labels = torch.tensor([3, 1, 4, 2])
    barrier, sent = Barrier(2), dict[int, Tensor]()

    class Threads(Mesh):
        """Each rank is a thread."""

        def __init__(self, rank: int) -> None:
            super().__init__()
            self.rank, self.size = rank, 2

        def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
            sent[self.rank] = x
            barrier.wait(10)
            found = torch.cat([sent[0], sent[1]], dim)
            barrier.wait(10)
            return found

        def all_reduce(self, x: Tensor, addend: Tensor | None = None) -> Tensor:
            assert addend is None, "nothing is added to a head's sums"
            return self.all_gather(x[None], 0).sum(0)

    def of_rank(rank: int) -> tuple[Tensor, Tensor]:
        part = torch.nn.functional.pad(logits.detach(), (0, 1), value=9.0)[:, 3 * rank : 3 * rank + 3].clone()
        found_K2 = torch.empty(len(labels), 2, dtype=torch.float64)
        VocabularyShard(Threads(rank), 5).cross_entropy_(part, labels, found_K2)
        return part, found_K2

    losses_K = torch.nn.functional.cross_entropy(logits.requires_grad_(), labels, reduction="none")
    (expected_KV,) = torch.autograd.grad(losses_K.sum(), logits)
    with ThreadPoolExecutor(2) as threads:
        parts, found = zip(*threads.map(of_rank, range(2)), strict=True)
    torch.testing.assert_close(torch.cat(parts, 1), torch.nn.functional.pad(expected_KV, (0, 1)))
    for found_K2 in found:
        torch.testing.assert_close(found_K2[:, 0].float(), losses_K.detach())
        assert found_K2[:, 1].sum() == 3, "one label shares the largest logit, one has not got it"


@pytest.mark.slow
def test_one_shared_head_and_a_vocabulary_that_nobody_divides(two: Ranks, tmp_path: Path) -> None:
    folder = save_base(tmp_path, num_key_value_heads=1, vocab_size=129, attention_bias=True)
    expected = mixed_logits(None, folder, "nfs").logits
    for strategy in ("nfs", "slora"):
        for found in two.run(mixed_logits, folder, strategy):
            torch.testing.assert_close(found.logits, expected, rtol=1e-4, atol=1e-4)
    alone = train(None, folder, "nfs", KINDS[0], 0, 1)
    for trained in two.run(train, folder, "nfs", KINDS[0], 0, 1):
        assert trained.losses == pytest.approx(alone.losses, rel=1e-5)
        assert trained.norms == pytest.approx(alone.norms, rel=1e-4)


def test_plans_name_no_family_twice() -> None:
    assert list(PLANS) == sorted(PLANS)


@pytest.mark.parametrize("family", ["deepseek_v3", *sample(["ernie4_5_moe", "nemotron_h", "llama", "mimo_v2_flash"])])
@pytest.mark.filterwarnings("ignore")
def test_what_transformers_keeps_in_fp32_ranks_keep_so(family: str, tmp_path: Path) -> None:
    tiny_family(family).bfloat16().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    empty = empty_model(loaded.config, torch.bfloat16, trust_remote_code=False)
    expected = {name: one.dtype for name, one in (*loaded.named_parameters(), *loaded.named_buffers())}
    found = {name: one.dtype for name, one in (*empty.named_parameters(), *empty.named_buffers())}
    assert found == expected
    assert (torch.float32 in found.values()) or family == "llama"
