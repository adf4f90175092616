"""Each tracker's own library holds the curve of a job, each step once, however often its process dies."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from coserve.api.tracking.points import Point, Run, Text, values_of
from coserve.api.tracking.task import close_all, track
from coserve.core.errors import TrackingFailed
from coserve.core.training.jobs import JobState
from coserve.core.training.step_metrics import Rewards
from coserve.data.offload.protocol import TaskContext
from tests.support.api_server import tokenizer
from tests.support.event_files import read_curve, read_texts
from tests.support.records import make_metrics
from tests.support.tracker_stand_ins import install

RUN = Run("job-1", "org/poet@2", {"training.learning_rate": 0.1, "metadata.a|b": "<b>"})


def context() -> TaskContext:
    """Of a new helper process."""
    return TaskContext(tokenizer(), lambda: None)


def tell(
    context: TaskContext, tracker: str, folder: Path, after: int, steps: range, ended: JobState | None = None
) -> None:
    texts = [Text(steps[0], 1e9, 0, f"<b>said</b>\nat {steps[0]}")]
    points = [Point(step, 1e9 + step, {"train/loss": 4.0 / 2**step, "train/learning_rate": 0.5}) for step in steps]
    track(context, tracker, str(folder), RUN, after, points, texts, ended)


CURVE = [(step, 4.0 / 2**step) for step in range(1, 6)]


def test_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    killed, later = context(), context()
    tell(killed, "tensorboard", tmp_path, 0, range(1, 3))
    tell(killed, "tensorboard", tmp_path, 2, range(3, 5))  # and nobody learned that it was written
    tell(later, "tensorboard", tmp_path, 2, range(3, 6), JobState.SUCCEEDED)
    assert not later.kept
    close_all(killed)
    assert read_curve(tmp_path / "org+poet@2-job-1") == CURVE
    assert read_curve(tmp_path / "org+poet@2-job-1", "train/learning_rate") == [(step, 0.5) for step, _ in CURVE]
    said = {(step, f"    <b>said</b>\n    at {step}") for step in (1, 3)}
    assert (
        set(read_texts(tmp_path / "org+poet@2-job-1", "samples/0/text_summary")) == said
    )  # a killed process's text may come twice


def test_wandb_has_a_run_for_each_job_and_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb, _ = install(monkeypatch)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    killed, later = context(), context()
    tell(killed, "wandb", tmp_path, 0, range(1, 5))
    tell(later, "wandb", tmp_path, 2, range(3, 6))
    (run,) = wandb.runs.values()
    assert (run.id, run.name, run.project, run.config) == ("job-1", "org/poet@2", "coserve", RUN.settings)
    assert [(step, values["train/loss"]) for step, values in run.history.items()] == CURVE
    assert [values["train/learning_rate"] for values in run.history.values()] == [0.5] * len(CURVE)
    close_all(later)
    assert run.finished and "state" not in run.summary, "the job may go on"
    for ended, code in ((JobState.SUCCEEDED, 0), (JobState.CANCELLED, 1)):
        tell(context(), "wandb", tmp_path, 4, range(5, 6), ended)
        assert (run.finished, run.exit_code, run.summary["state"]) == (True, code, ended.value)


def test_wandb_goes_where_its_variables_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb, _ = install(monkeypatch)
    monkeypatch.setenv("WANDB_PROJECT", "poems")
    tell(context(), "wandb", tmp_path, 0, range(1, 2))
    assert [run.project for run in wandb.runs.values()] == ["poems"]


def test_mlflow_has_a_run_for_each_job_and_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, mlflow = install(monkeypatch)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    tell(context(), "mlflow", tmp_path, 0, range(1, 5))
    tell(context(), "mlflow", tmp_path, 2, range(3, 6), JobState.FAILED)
    (server,) = mlflow.servers.values()
    assert list(mlflow.servers) == [f"sqlite:///{tmp_path}/mlflow.db"] and list(server.experiments) == ["coserve"]
    (run,) = server.runs.values()
    assert [(metric.step, metric.value) for metric in run.metrics if metric.key == "train/loss"] == CURVE
    assert {metric.timestamp - 1000 * metric.step for metric in run.metrics} == {10**12}
    assert run.params == {"training.learning_rate": "0.1", "metadata.a_b": "<b>"}
    assert (run.info.run_name, run.info.status) == ("org/poet@2", "FAILED")


def test_mlflow_takes_long_curves_and_settings_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, mlflow = install(monkeypatch)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker:5000")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "poems")
    settings: dict[str, object] = {f"metadata.{number}": "x" * 9000 for number in range(150)}
    points = [Point(step, 1e9, {f"train/{name}": 1.0 for name in "abc"}) for step in range(1, 1001)]
    run = Run("job-2", "poet@3", settings)
    track(context(), "mlflow", str(tmp_path), run, 0, points, [], JobState.SUCCEEDED)
    (run,) = mlflow.servers["http://tracker:5000"].runs.values()
    assert (len(run.metrics), len(run.params), run.info.status) == (3000, 100, "FINISHED")


def test_a_step_tells_what_was_measured() -> None:
    plain = make_metrics(1)
    names = {"train/loss", "train/learning_rate", "train/grad_norm", "train/epoch", "train/tokens_per_second"}
    assert values_of(plain).keys() == names
    changes = {"token_accuracy": 0.5, "perplexity": 2.0, "valid_loss": 3.0, "valid_token_accuracy": 0.0}
    measured = msgspec.structs.replace(plain, **changes, valid_perplexity=4.0)
    assert values_of(measured) == values_of(plain) | {
        "train/token_accuracy": 0.5,
        "train/perplexity": 2.0,
        "eval/loss": 3.0,
        "eval/token_accuracy": 0.0,
        "eval/perplexity": 4.0,
    }


def test_the_rewards_of_a_dpo_job_have_the_names_of_trl() -> None:
    plain = make_metrics(1)
    rewards = Rewards(chosen=1.0, rejected=-0.5, margin=1.5, accuracy=0.75)
    expected = {"rewards/chosen": 1.0, "rewards/rejected": -0.5, "rewards/margins": 1.5, "rewards/accuracies": 0.75}
    for field, group in (("rewards", "train"), ("valid_rewards", "eval")):
        measured = msgspec.structs.replace(plain, **{field: rewards})
        own = {f"{group}/{name}": value for name, value in expected.items()}
        assert values_of(measured) == values_of(plain) | own


def test_what_a_library_raises_is_told_in_a_line_and_the_run_is_opened_anew(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    folder, own = tmp_path / "curves", context()
    folder.write_text("no folder")
    with pytest.raises(TrackingFailed, match="FileExistsError"):
        tell(own, "tensorboard", folder, 0, range(1, 3))
    folder.unlink()
    tell(own, "tensorboard", folder, 0, range(1, 6), JobState.CANCELLED)
    assert read_curve(folder / "org+poet@2-job-1") == CURVE
