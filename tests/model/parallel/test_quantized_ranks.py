"""A base that is quantised at load and shared by ranks: the weights, logits and jobs of one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from coserve.config import Config
from coserve.core.errors import UnsupportedBase
from coserve.model.base import Base
from coserve.model.load import load_base
from coserve.model.parallel.mesh import LoneRank
from coserve.model.parallel.partition import MatrixPartition
from coserve.model.quantized.modules import QuantizedLinear
from tests.support import quantised
from tests.support.examples import in_turns
from tests.support.families import tiny_family
from tests.support.ranks import Ranks
from tests.support.sharded import BATCH, KINDS, Kind, mixed_logits, train

QUANTIZATIONS = ("fp8", "nf4")
SIZES: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
"""Each of two ranks has whole blocks of o_proj's and of down_proj's inputs."""
OF_OTHER_MODULES: dict[str, dict[str, object]] = {
    "qwen2": {},
    "phi3": {},
    "minicpm3": {"kv_lora_rank": 64, "v_head_dim": 16, "num_key_value_heads": 8},
    "qwen3_5_text": {"linear_key_head_dim": 32, "linear_value_head_dim": 64},
    "nemotron_h": {"mamba_head_dim": 64, "ssm_state_size": 16},
    "qwen2_moe": {"shared_expert_intermediate_size": 128},
}


def save(folder: Path, family: str = "llama", **overrides: object) -> Path:
    tiny_family(family, **(SIZES | overrides)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save(tmp_path_factory.mktemp("base")))


def load(folder: str | Path, quantization: str, rank: int | None = None, size: int = 2, **settings: object) -> Base:
    given = {"device": "cpu", "dtype": "auto", "mesh": None if rank is None else LoneRank(rank, size)} | settings
    return load_base(str(folder), quantization=quantization, **given)  # type: ignore[arg-type]


def check_shards(folder: str | Path, quantization: str, **settings: object) -> None:
    """Each rank's values, bit for bit, its memory, and what the base says of itself."""
    whole = load(folder, quantization, **settings)
    for rank in range(2):
        base = load(folder, quantization, rank, **settings)
        assert (base.note, base.spec.quantization) == (whole.note, quantization)
        assert base.sharding is not None and base.spec.sites.keys() == whole.spec.sites.keys()
        assert rank or base.spec.fingerprint == whole.spec.fingerprint
        for path, module in whole.model.named_modules():
            own = base.model.get_submodule(path)
            assert type(own) is type(module)
            if isinstance(own, QuantizedLinear):
                cut = base.sharding.sites[path]
                expected = MatrixPartition(cut.outputs, cut.inputs).shard(module.weight, rank)
                assert own.weight.dtype == whole.dtype and torch.equal(own.weight, expected), path
                assert own.codes.is_contiguous() and own.scales.is_contiguous(), "as kernels read them"
                assert held(own) * module.weight.numel() == pytest.approx(held(module) * expected.numel(), rel=0.05)


def held(module: torch.nn.Module) -> int:
    """Bytes of its tensors, whatever they are for."""
    found = [one for one in (*vars(module).values(), *module.buffers()) if isinstance(one, torch.Tensor)]
    return sum(one.nbytes for one in found)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_shards_have_the_weights_of_one_process(quantization: str, folder: str, tmp_path: Path) -> None:
    """Also where files are rounded to the base's type first, are dequantised, or do not exist."""
    check_shards(folder, quantization)
    check_shards(folder, quantization, dtype="bfloat16")
    check_shards(folder, quantization, load_format="dummy")
    stored, _ = quantised.quantise(Path(folder), tmp_path, quantised.fp8_rows, {"quant_method": "fbgemm_fp8"})
    check_shards(stored, quantization)


@pytest.mark.parametrize("family", in_turns([*OF_OTHER_MODULES], always=("phi3",)))
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_shards_of_other_modules_have_them_too(quantization: str, family: str, tmp_path: Path) -> None:
    check_shards(save(tmp_path, family, **OF_OTHER_MODULES[family]), quantization)


@pytest.mark.parametrize("case", in_turns([(q, s) for q in QUANTIZATIONS for s in ("nfs", "slora")], [("nf4", "nfs")]))
def test_a_mixed_batch_has_the_logits_of_one_process(two: Ranks, folder: str, case: tuple[str, str]) -> None:
    quantization, strategy = case
    expected = mixed_logits(None, folder, strategy, BATCH, quantization).logits
    dense = mixed_logits(None, folder, strategy).logits
    assert (expected - dense).abs().max() > 0.01, "expected weights that rounding changes"
    for found in two.run(mixed_logits, folder, strategy, BATCH, quantization):
        torch.testing.assert_close(found.logits, expected, rtol=1e-4, atol=1e-4)


WAYS = {"nfs": KINDS[0], "slora": KINDS[0], "bd": KINDS[1], "dora": Kind(8, dora=True)}


@pytest.mark.parametrize("case", in_turns([(q, s) for q in QUANTIZATIONS for s in WAYS], [("nf4", "nfs")]))
def test_a_job_has_the_losses_and_the_weights_of_one_process(two: Ranks, folder: str, case: tuple[str, str]) -> None:
    check_job(two, folder, *case, compiled=False)


@pytest.mark.parametrize("case", in_turns([("fp8", "nfs"), ("nf4", "bd"), ("nf4", "slora"), ("nf4", "dora")]))
def test_a_job_by_compiled_layers_has_them_too(two: Ranks, folder: str, case: tuple[str, str]) -> None:
    check_job(two, folder, *case, compiled=True)


def check_job(two: Ranks, folder: str, quantization: str, way: str, *, compiled: bool) -> None:
    kind, strategy = WAYS[way], "nfs" if way == "dora" else way
    steps = {"end": 2, "dropout": 0.0, "quantization": quantization}
    expected = train(None, folder, strategy, kind, **steps)  # type: ignore[arg-type]
    by = {"backend": "segmented", "compiled": True} if compiled else {}
    first, second = two.run(partial(train, **steps, **by), folder, strategy, kind)
    assert (second.losses, second.norms) == (first.losses, first.norms), "bit for bit"
    assert first.losses == pytest.approx(expected.losses, rel=1e-4)
    assert first.norms == pytest.approx(expected.norms, rel=1e-3)
    assert bool(first.passes) == compiled
    for name, tensor in expected.state.items():
        torch.testing.assert_close(first.state[name], tensor, rtol=1e-3, atol=3e-3)  # Adam enlarges small gradients


@pytest.mark.parametrize(
    ("quantization", "family", "sizes", "ranks", "reason"),
    [
        ("nf4", "llama", {"intermediate_size": 192}, 2, "down_proj: expected each of 2 GPUs to hold .* got 96 of 192"),
        ("nf4", "llama", {"intermediate_size": 256}, 4, "o_proj: expected .* in whole blocks of 64, .* got 32 of 128"),
        ("fp8", "llama", {"intermediate_size": 96}, 4, "gate_proj: .* a multiple of 16 output features, .* 24 of 96"),
        ("fp8", "granitemoehybrid", {"mamba_d_head": 32}, 2, "output_linear: .* multiple of 16 input features, .* 24"),
    ],
)
def test_shards_that_the_formats_do_not_allow_are_refused_by_name(
    quantization: str, family: str, sizes: dict[str, object], ranks: int, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedBase, match=reason):
        load(save(tmp_path, family, **sizes), quantization, 0, ranks)


def test_the_settings_go_together() -> None:
    assert Config(tp=2, quantization="nf4").quantization == "nf4"
