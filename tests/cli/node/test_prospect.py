"""`coserve memory` shows what /health says, and `coserve memory MODEL` predicts from a config what a GPU needs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from transformers import DeepseekV3Config, LlamaConfig
from typer.testing import CliRunner

from coserve.admission.prospect import Need, Wish, fit, needed
from coserve.cli.app import app
from coserve.cli.node import memory
from coserve.core.gpu_memory import EXTRA_SLOTS, BaseSizes, MemoryUse
from coserve.memory.kv import KvCache
from coserve.model.base import wrap_base
from coserve.model.formats.sizes import config_sizes
from coserve.model.load import load_base
from coserve.model.parallel.mesh import LoneRank
from tests.support.examples import sample
from tests.support.families import tiny_family
from tests.support.gpu_memory import USE

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
WISH = Wish(adapters=8, rank=16, requests=4, context=100, jobs=1, micro_batch_tokens=2048, fraction=0.9)
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def llama(ranks: int = 1, **settings: int) -> BaseSizes:
    return config_sizes(LlamaConfig(**settings), "bfloat16", name="llama", ranks=ranks)


HYBRIDS = ("qwen3_5_text", "qwen3_next", "nemotron_h", "granitemoehybrid", "falcon_h1", "jamba", "lfm2", "olmo_hybrid")


@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "gemma3_text", "gemma3n_text", "jetmoe", *sample(HYBRIDS, "qwen3_5_text", "lfm2")]
)
@pytest.mark.filterwarnings("ignore")
def test_sizes_are_those_of_the_loaded_base(family: str) -> None:
    model = tiny_family(family)
    found = config_sizes(model.config, "float32", name=family)
    weights = sum(one.numel() * one.element_size() for one in model.parameters())
    base = wrap_base(model, name=family)
    assert found.spec.carried == base.spec.carried
    more = found.spec.sites.items() - base.spec.sites.items()
    assert base.spec.sites.items() <= found.spec.sites.items()
    others = ("dt_proj", "modality_router")
    assert all(site.endswith(others) for site, _ in more), "no others are used by their weight alone, or twice"
    if base.states:
        kv = KvCache.for_base(base, 64, 16, sequences=WISH.requests)
        assert kv.states is not None
        taken = sum(one.conv.nbytes + one.recurrent.nbytes for one in kv.states.layers.values())
        buffer = found.states  # of snapshots: one state, here without the rest of its last page
        assert needed(found, WISH).states == taken + buffer
    assert found.kv == sum(shape.heads * (shape.keys + shape.values) * 4 for shape in base.kv_shapes)
    assert weights <= found.weights <= weights * 1.1  # buffers


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_oss", "gemma3_text", "deepseek_v3", "qwen3_5_text"])
@pytest.mark.filterwarnings("ignore")
def test_sizes_of_ranks_are_those_of_the_loaded_shard(family: str, tmp_path: Path) -> None:
    tiny_family(family).save_pretrained(tmp_path)
    base = load_base(str(tmp_path), device="cpu", dtype="float32", mesh=LoneRank(0, 2))
    found, whole = (config_sizes(base.model.config, "float32", name=family, ranks=ranks) for ranks in (2, 1))
    held = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in base.model.parameters()}
    assert sum(held.values()) <= found.weights <= sum(held.values()) * 1.1  # buffers
    assert found.kv == sum(shape.numbers * 4 for shape in base.kv_shapes) < whole.kv or family == "deepseek_v3"
    assert found.spec == whole.spec and found.weights < whole.weights
    need, alone = needed(found, WISH), needed(whole, WISH)
    assert all(getattr(need, use) <= getattr(alone, use) for use in Need.__struct_fields__)
    assert need.adapters < alone.adapters and need.training < alone.training


def test_activations_are_those_that_an_h100_measured() -> None:
    measured = json.loads((RESULTS / "memory_mixes.json").read_text())
    sizes, costs, tokens = llama(**measured["base"]), measured["costs"], WISH.micro_batch_tokens
    head = costs["head"]["per_token"] * tokens + costs["head"]["per_position"] * tokens
    layers = costs["layer"] * sizes.spec.layers * tokens
    assert needed(sizes, WISH).training == pytest.approx(layers + head, rel=0.05)


def test_a_cache_in_fp8_holds_twice_the_tokens() -> None:
    sizes = llama(**LLAMA_8B)
    assert 2 * needed(sizes, msgspec.structs.replace(WISH, kv_cache_dtype="fp8")).kv == needed(sizes, WISH).kv


def test_heads_of_latent_attention_take_their_own_memory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(DeepseekV3Config(num_hidden_layers=2).to_json_string())
    found = {}
    for mla_cache in ("latents", "heads"):
        options = ["memory", str(tmp_path), "--requests", "1", "--context", "1", "--mla-cache", mla_cache, "--json"]
        found[mla_cache] = json.loads(CliRunner().invoke(app, options).output)["need"]["kv"]
    assert found == {"latents": 2 * 2 * (512 + 64), "heads": 2 * 2 * 128 * (128 + 64 + 128)}
    refused = CliRunner().invoke(app, ["memory", str(tmp_path), "--mla-cache", "all"])
    assert refused.exit_code == 2 and "'all' is not one of 'latents', 'heads'" in refused.output


@pytest.mark.parametrize("state", [0, 13 << 20])
def test_as_many_requests_fit_as_are_shown_and_no_more(state: int) -> None:
    sizes = msgspec.structs.replace(llama(**LLAMA_8B), states=state)
    assert 14.9 < sizes.weights / (1 << 30) < 15.1  # 8.03e9 parameters of two bytes
    assert not fit(sizes, WISH, 24).fits
    most = fit(sizes, WISH, 48).requests
    for requests in (most, most + 1):
        found = fit(sizes, msgspec.structs.replace(WISH, requests=requests), 48)
        assert (found.fits, found.requests) == (requests == most, most)


def test_recurrent_states_take_room_from_requests() -> None:
    sizes = llama(**LLAMA_8B)
    hybrid = msgspec.structs.replace(sizes, states=1 << 20)
    assert needed(hybrid, WISH).total - needed(sizes, WISH).total == (WISH.requests + EXTRA_SLOTS) << 20


def test_the_command_prints_every_use_and_every_gpu(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(LlamaConfig(**LLAMA_8B).to_json_string())
    result = CliRunner().invoke(app, ["memory", str(tmp_path), "--jobs", "0"])
    assert result.exit_code == 0, result.output
    assert all(text in result.output for text in ("in all", "keys and values", "141 GB", "yes"))
    shown = json.loads(CliRunner().invoke(app, ["memory", str(tmp_path), "--jobs", "0", "--json"]).output)
    assert shown["total"] == sum(shown["need"][field] for field in Need.__struct_fields__)
    assert shown["need"]["training"] == shown["need"]["jobs"] == 0


def test_several_gpus_share_the_base(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(LlamaConfig(**LLAMA_8B).to_json_string())
    found = {}
    for tp in ("1", "4"):
        output = CliRunner().invoke(app, ["memory", str(tmp_path), "--tp", tp, "--json"]).output
        found[tp] = json.loads(output)["need"]
    embedding = 128256 * 4096 * 2
    layers = found["1"]["weights"] - 2 * embedding
    assert found["4"]["weights"] == pytest.approx(embedding * 1.25 + layers / 4, rel=1e-3)
    assert found["4"]["kv"] * 4 == found["1"]["kv"]
    assert "on each of 4 GPUs" in CliRunner().invoke(app, ["memory", str(tmp_path), "--tp", "4"]).output
    refused = CliRunner().invoke(app, ["memory", str(tmp_path), "--tp", "3"])
    assert refused.exit_code == 2 and "expected 1, 2, 4 or 8, got 3" in refused.output


def test_requests_are_no_longer_than_the_bases_context() -> None:
    asked = json.loads(CliRunner().invoke(app, ["memory", "bundled", "--context", "9999", "--json"]).output)
    assert asked["wish"]["context"] == 1024


def shown(monkeypatch: pytest.MonkeyPatch, use: MemoryUse | None, *options: str) -> tuple[int, str]:
    client = SimpleNamespace(health=lambda: SimpleNamespace(memory=use, status="ready"), close=lambda: None)
    monkeypatch.setattr(memory, "connect", lambda *_: client)
    result = CliRunner().invoke(app, ["memory", *options])
    return result.exit_code, result.output


def test_every_use_and_every_job_has_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    status, output = shown(monkeypatch, USE)
    assert status == 0
    for text in ("base and buffers", "of them adapters", "other processes", "in all", "job-7", "512", "12 of 32"):
        assert text in output
    assert "for jobs: 140 of 500 MiB needed" in output


def test_layers_that_are_recomputed_but_for_attention_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = USE.each
    use = msgspec.structs.replace(USE, each=(msgspec.structs.replace(job, partly_recomputed_layers=8),))
    assert "12+8 of 32" in shown(monkeypatch, use)[1]


def test_pinned_memory_is_shown_where_there_is_any(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "pinned" not in shown(monkeypatch, USE)[1]
    use = msgspec.structs.replace(USE, pinned=30 << 20, pinned_limit=400 << 20)
    assert "host memory, pinned: 30 of 400 MiB for the state of jobs" in shown(monkeypatch, use)[1]


def test_json_is_what_health_has(monkeypatch: pytest.MonkeyPatch) -> None:
    status, output = shown(monkeypatch, USE, "--json")
    assert status == 0
    assert json.loads(output)["each"][0]["optimizer"] == USE.each[0].optimizer


def test_without_a_plan_there_is_nothing_to_show(monkeypatch: pytest.MonkeyPatch) -> None:
    status, _ = shown(monkeypatch, None)
    assert status != 0
