"""The planner of adapters' room: InfiniLoRA's formula as it is printed, a simulation, and GPUs that suffice."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from coserve.cli.app import app
from coserve.cli.node.plan import read_shape
from coserve.core.errors import InvalidRequest
from coserve.workloads.distributions import Popularity, Shape, shares
from coserve.workloads.provisioning import (
    Hardware,
    MoeShape,
    below_without_each,
    immediate_admission,
    least_capacity,
    occupied,
    plan_servers,
    residency,
)
from tests.support.examples import examples

QWEN = MoeShape(layers=48, hidden=2048, inner=768, experts=128, chosen=8)
chances = st.lists(st.floats(0, 1), min_size=1, max_size=12)


def printed(found: list[float], batch: float, capacity: int, resident: list[float]) -> float:
    """Lines 7 to 18 of Algorithm 1, as they are printed: O(N³)."""
    total = 0.0
    for i, share in enumerate(found):
        dp = [1.0] + [0.0] * len(found)
        for j in range(len(found)):
            if j != i:
                for k in range(len(found) - 1, 0, -1):
                    dp[k] = dp[k] * (1 - resident[j]) + dp[k - 1] * resident[j]
                dp[0] *= 1 - resident[j]
        total += share * (resident[i] + (1 - resident[i]) * sum(dp[:capacity]))
    return total


@given(
    weights=st.lists(st.floats(0.001, 1), min_size=1, max_size=10),
    batch=st.floats(0.5, 60),
    capacity=st.integers(1, 10),
    keeps_idle=st.booleans(),
)
@settings(max_examples=examples(60))
def test_one_capacity_is_that_of_the_printed_algorithm(
    weights: list[float], batch: float, capacity: int, keeps_idle: bool
) -> None:
    found = [weight / sum(weights) for weight in weights]
    resident = residency(found, batch, capacity, keeps_idle=keeps_idle)
    expected = printed(found, batch, capacity, list(resident))
    assert math.isclose(immediate_admission(found, batch, capacity, keeps_idle=keeps_idle), expected, abs_tol=1e-9)
    if keeps_idle:
        assert math.isclose(resident.sum(), min(capacity, len(found)), abs_tol=1e-6)


@given(found=chances, limit=st.integers(0, 13))
@settings(max_examples=examples(60))
def test_an_adapter_is_divided_out_of_the_distribution(found: list[float], limit: int) -> None:
    expected = [occupied(np.array(found[:i] + found[i + 1 :]))[:limit].sum() for i in range(len(found))]
    np.testing.assert_allclose(below_without_each(np.array(found), limit), expected, atol=1e-9)


def test_many_adapters_are_divided_out_without_loss() -> None:
    found = np.array([random.Random(i).random() for i in range(600)])
    one_out = [occupied(np.delete(found, i))[:300].sum() for i in (0, 17, 599)]
    np.testing.assert_allclose(below_without_each(found, 300)[[0, 17, 599]], one_out, atol=1e-9)


@given(weights=st.lists(st.floats(0.001, 1), min_size=1, max_size=30), batch=st.floats(1, 100))
@settings(max_examples=examples(30))
def test_the_least_capacity_is_the_first_that_a_scan_finds(weights: list[float], batch: float) -> None:
    found = [weight / sum(weights) for weight in weights]
    enough = [size for size in range(1, len(found) + 1) if immediate_admission(found, batch, size) >= 0.95]
    assert least_capacity(found, batch, 0.95) == min(enough, default=len(found))


def test_adapters_with_thousands_of_requests_have_a_threshold() -> None:
    """Their Poisson probabilities of few requests are smaller than the least number."""
    assert residency([0.25] * 4, 4096, 2, keeps_idle=True) == pytest.approx([0.5] * 4)
    assert residency([0.98, 0.01, 0.01], 4000, 1) == pytest.approx([1, 0, 0], abs=1e-6)
    assert residency([0.5, 0.5, 0.0], 4, 1, keeps_idle=True) == pytest.approx([0.5, 0.5, 0.0])


def test_admission_is_that_of_random_batches() -> None:
    """Requests of a Poisson number for each adapter, and one more: does it find its adapter, or a free place?"""
    found, batch, chance = shares(Popularity(Shape.POWER_LAW, 1.1), 60), 30, np.random.default_rng(1)
    capacity = least_capacity(found, batch, 0.9)
    running = chance.poisson(batch * np.array(found), (20_000, 60)) > 0
    asked = chance.choice(60, 20_000, p=found)
    at_once = running[range(20_000), asked] | (running.sum(1) < capacity)
    assert abs(at_once.mean() - immediate_admission(found, batch, capacity)) < 0.01


def test_gpus_hold_the_adapters_and_keep_the_time() -> None:
    assert QWEN.adapter_bytes(16) == 1_258_291_200
    popular = shares(Popularity(Shape.POWER_LAW, 1.2), 512)

    def gpus(capacity: int, engines: int, tpot: float) -> tuple[int, str]:
        hardware = Hardware(memory=100e9)
        found = plan_servers(QWEN, 16, capacity, popular, batch=64, engines=engines, tpot=tpot, hardware=hardware)
        assert found.ep * found.pp == found.gpus
        assert found.receive + found.compute + found.send <= 0.5 * tpot / QWEN.layers
        return found.gpus, found.bound

    assert gpus(70, 1, 0.1) == (1, "memory")
    assert gpus(150, 1, 0.1) == (2, "memory")
    assert gpus(70, 1, 0.012) > (1, "")
    assert gpus(70, 60, 0.1)[1] == "load"
    with pytest.raises(InvalidRequest, match="no 64 GPUs return"):
        gpus(70, 1, 0.001)
    with pytest.raises(InvalidRequest, match="no 64 GPUs serve 100000 engines") as refused:
        gpus(70, 100_000, 0.1)
    assert refused.value.field == "engines"
    with pytest.raises(InvalidRequest, match="need 101 GPUs") as refused:
        gpus(8000, 1, 0.1)
    assert refused.value.field == "gpu_gb"


def test_a_division_that_is_too_slow_bounds_nothing_where_another_is_in_time() -> None:
    hardware = Hardware(memory=80e9, bandwidth=1e11)
    found = plan_servers(QWEN, 16, 64, [1 / 64] * 64, batch=16, engines=1, tpot=0.03, hardware=hardware)
    assert (found.gpus, found.ep, found.bound) == (2, 2, "memory")


def test_experts_are_divided_where_pairs_take_longer_than_messages() -> None:
    """A GPU more of a layer halves the reading of its pairs, and costs a message in each round."""
    popular = [1 / 512] * 512

    def divided(rank: int, latency: float) -> tuple[int, int]:
        hardware = Hardware(memory=1e12, latency=latency)
        held = 4 * 1e12 // QWEN.adapter_bytes(rank)
        found = plan_servers(QWEN, rank, int(held), popular, batch=64, engines=1, tpot=0.1, hardware=hardware)
        return found.ep, found.pp

    assert divided(4, 10e-6) == (1, 4)
    assert divided(64, 1e-6) == (4, 1)
    assert QWEN.token_bytes(2) == (4 * (2048 + 8 * 768), 4 * (8 * 2 * 768 + 2048))


def test_the_command_plans_from_a_config_and_a_trace(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 48, "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"num_experts_per_tok": 8}))
    trace = tmp_path / "trace.jsonl"
    rows: list[dict[str, str | None]] = [{"type": "workload"}, {"type": "prompt", "adapter": None}, {"model": "a6"}]
    rows += [{"type": "finetune", "adapter": "job"}]
    rows += [{"adapter": f"a{i % 7}"} for i in range(50)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    runner = CliRunner()
    answer = json.loads(runner.invoke(app, ["plan", str(tmp_path), "--trace", str(trace), "--json"]).stdout)
    assert answer["adapters"] == 7 and 1 <= answer["capacity"] <= 7 and answer["server"]["gpus"] == 1
    shown = runner.invoke(app, ["plan", str(tmp_path), "--adapters", "512", "--rank", "4", "--batch", "128"])
    assert shown.exit_code == 0 and "coserve serve --lora-server 1 --lora-server-ep 1" in shown.stdout
    shared = runner.invoke(app, ["plan", str(tmp_path), "--engines", "2"])
    assert re.search(
        r": coserve lora-server FOLDER --servers (\d+), and coserve serve --lora-server \1 ", shared.stdout
    )
    assert "unless servers see the daemons' GPUs" in " ".join(shared.stdout.split())
    assert "--lora-server-at FOLDER" in shared.stdout
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2, "hidden_size": 8}))
    refused = runner.invoke(app, ["plan", str(tmp_path)])
    assert isinstance(refused.exception, InvalidRequest)


@pytest.mark.parametrize(
    ("named", "layers", "chosen"),
    [
        ({"n_routed_experts": 64, "first_k_dense_replace": 3, "num_experts_per_tok": 8}, 45, 8),
        ({"n_routed_experts": 64, "moe_layer_freq": [0, *[1] * 47], "num_experts_per_tok": 8}, 47, 8),
        ({"n_routed_experts": 64, "mlp_layer_types": ["dense", *["sparse"] * 47], "num_experts_per_tok": 4}, 47, 4),
        ({"num_experts": 64, "mlp_only_layers": [0, 7], "num_experts_per_tok": 8}, 46, 8),
        ({"moe_num_experts": 64, "moe_k": 6, "moe_layer_start_index": 1}, 47, 6),
        ({"num_experts": 64, "moe_topk": 1}, 48, 1),
    ],
    ids=["deepseek_v3", "mimo_v2", "glm4_lite", "qwen", "ernie", "hunyuan"],
)
def test_layers_without_experts_have_no_pairs(
    named: dict[str, object], layers: int, chosen: int, tmp_path: Path
) -> None:
    sizes = {"num_hidden_layers": 48, "hidden_size": 2048, "moe_intermediate_size": 768}
    (tmp_path / "config.json").write_text(json.dumps(sizes | named))
    assert read_shape(tmp_path) == MoeShape(layers, 2048, 768, 64, chosen)
