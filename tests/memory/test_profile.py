"""Lines through what was measured: they never fall short, and say how well they would have predicted."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coserve.core.gpu_memory import LinearBytes, TrainingCosts
from coserve.memory.profile import (
    Profile,
    TrainingPeaks,
    fit,
    load_graph_bytes,
    load_layer_costs,
    load_profile,
    measure,
    save_graph_bytes,
    save_layer_costs,
    save_profile,
    sizes,
)
from tests.support.gpu_memory import COSTS

SAMPLES = st.lists(st.tuples(st.integers(1, 1 << 16), st.integers(0, 1 << 37)), min_size=1, max_size=5)


class Fake:
    """A device on which everything is a line, but for a bend in the backward."""

    def __init__(self, bend: int = 0) -> None:
        self.bend = bend
        self.steps: list[int] = []
        self.batches: list[int] = []

    def step(self, tokens: int) -> int:
        self.steps.append(tokens)
        return 1000 + 10 * tokens

    def micro_batch(self, tokens: int) -> TrainingPeaks:
        self.batches.append(tokens)
        bend = self.bend if tokens >= 2048 else 0
        return TrainingPeaks(forward=50 * tokens, whole=60 * tokens + 500 + bend, job=7777)

    def costs(self, tokens: int) -> TrainingCosts:
        assert tokens == self.batches[-1], "from micro-batches up to the full size"
        return COSTS


def test_a_line_is_found_again() -> None:
    line = fit([(tokens, 123 + 7 * tokens) for tokens in (512, 1024, 2048)])
    assert line.per_token == pytest.approx(7)
    assert line.at(4096) == 123 + 7 * 4096


@given(SAMPLES)
def test_no_sample_lies_above_the_line(samples: list[tuple[int, int]]) -> None:
    line = fit(samples)
    assert line.per_token >= 0
    assert all(line.at(tokens) >= size * (1 - 1e-9) - 1 for tokens, size in samples)


def test_one_size_gives_a_constant() -> None:
    assert fit([(5, 100)]) == LinearBytes(fixed=100, per_token=0)


@pytest.mark.parametrize(("most", "expected"), [(2048, (512, 1024, 2048)), (3, (1, 3)), (1, (1,))])
def test_sizes_end_with_the_full_one(most: int, expected: tuple[int, ...]) -> None:
    assert sizes(most) == expected


def test_a_profile_has_the_papers_components() -> None:
    device = Fake()
    profile = measure(device, step_tokens=1024, micro_batch_tokens=2048)
    assert device.steps == [256, 512, 1024]
    assert device.batches == [512, 1024, 2048]
    assert profile.no_grad.at(1024) == 1000 + 10 * 1024
    assert profile.act.at(2048) == 50 * 2048
    assert profile.act.at(2048) + profile.backward.at(2048) == 60 * 2048 + 500
    assert profile.job == 7777
    assert profile.costs == COSTS
    assert profile.error == pytest.approx(0, abs=1e-6)


def test_the_full_size_checks_the_prediction_and_counts() -> None:
    bend = 20_000
    profile = measure(Fake(bend), step_tokens=1024, micro_batch_tokens=2048)
    real, step = 60 * 2048 + 500 + bend, 1000 + 10 * 1024
    assert profile.error == pytest.approx(-bend / (real + step), abs=1e-3)
    assert profile.act.at(2048) + profile.backward.at(2048) >= real - 1


def test_kept_for_the_same_conditions_only(tmp_path: Path) -> None:
    path = tmp_path / "memory.json"
    assert load_profile(path, ("a",)) is None
    profile = measure(Fake(), step_tokens=8, micro_batch_tokens=8)
    save_profile(path, ("a", "bfloat16"), profile)
    assert load_profile(path, ("a", "bfloat16")) == profile
    assert load_profile(path, ("a", "float32")) is None
    assert [entry.name for entry in tmp_path.iterdir()] == ["memory.json"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"key": [], "profile": {"no_grad": 1}}'])
def test_what_cannot_be_read_is_measured_again(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "memory.json"
    path.write_bytes(content)
    assert load_profile(path, ()) is None


def test_a_disk_that_takes_nothing_costs_the_file_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    line = LinearBytes(fixed=1, per_token=1)
    profile = Profile(no_grad=line, act=line, backward=line, job=1, costs=COSTS, error=0)
    save_profile(tmp_path / "nowhere" / "memory.json", (), profile)
    save_graph_bytes(tmp_path / "nowhere" / "graphs.json", (), 1)
    save_layer_costs(tmp_path / "nowhere" / "layers.json", COSTS)
    profiles, graphs, layers = caplog.messages
    assert "memory.json cannot be written (No such file or directory): the next start measures" in profiles
    assert "graphs.json cannot be written" in graphs
    assert "layers.json cannot be written" in layers and "planned without compiled layers" in layers


def test_the_memory_of_layers_is_kept_beside_their_kernels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "layers.json"
    assert load_layer_costs(path) is None
    save_layer_costs(path, COSTS)
    assert load_layer_costs(path) == COSTS
    path.write_bytes(b"{")
    assert load_layer_costs(path) is None and "it is damaged" in caplog.text
    path.unlink()
    path.mkdir()
    assert load_layer_costs(path) is None and "Is a directory" in caplog.text


def test_the_size_of_graphs_is_kept_for_the_same_conditions(tmp_path: Path) -> None:
    path = tmp_path / "graphs.json"
    assert load_graph_bytes(path, ("a",)) is None
    save_graph_bytes(path, ("a",), 7)
    assert load_graph_bytes(path, ("a",)) == 7
    assert load_graph_bytes(path, ("b",)) is None
