"""Stand-ins for the libraries of `wandb` and `mlflow`: modules with the part of their API that the sinks use.

Each refuses what the real library refuses: an unknown argument, a wrong type, a step that goes back, a run that has
ended. They keep what they were told in memory.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import pytest


@dataclass(frozen=True)
class WandbSettings:
    """Fields of `wandb.Settings` by their names in wandb 0.19 and later."""

    silent: bool = False
    console: str = "auto"
    disable_git: bool = False
    save_code: bool | None = None
    x_disable_stats: bool = False


@dataclass
class WandbRun:
    id: str
    name: str
    project: str
    config: dict[str, object]
    history: dict[int, dict[str, float]] = field(default_factory=dict)
    summary: dict[str, object] = field(default_factory=dict)
    exit_code: int | None = None
    finished: bool = False

    def log(self, data: Mapping[str, float], step: int | None = None, commit: bool | None = None) -> None:
        assert not self.finished, "run is finished"
        assert isinstance(data, dict) and all(isinstance(key, str) for key in data)
        if step is not None and self.history and step < max(self.history):
            return  # the library warns, and drops it
        self.history.setdefault(step or 0, {}).update(data)

    def finish(self, exit_code: int | None = None, quiet: bool | None = None) -> None:
        self.finished, self.exit_code = True, exit_code or 0


class Wandb(ModuleType):
    """`import wandb`. `runs`: what its server has, by id."""

    Settings = WandbSettings

    def __init__(self) -> None:
        super().__init__("wandb")
        self.runs: dict[str, WandbRun] = {}

    def init(
        self,
        *,
        project: str | None = None,
        id: str | None = None,
        name: str | None = None,
        config: Mapping[str, object] | None = None,
        dir: str | None = None,
        resume: str | bool | None = None,
        reinit: str | bool | None = None,
        settings: WandbSettings | None = None,
    ) -> WandbRun:
        assert resume in ("allow", "never", "must", "auto") and reinit in (
            "create_new",
            "finish_previous",
            "return_previous",
        )
        assert id is not None and name is not None and project is not None and not set(id) & set("/\\#?%:")
        assert isinstance(settings, WandbSettings) and isinstance(config, Mapping)
        run = self.runs.setdefault(id, WandbRun(id, name, project, {}))
        assert resume == "allow" or not run.history, "a run with this id exists"
        run.config |= config
        run.finished = False
        return run


@dataclass(frozen=True)
class Metric:
    """`mlflow.entities.Metric`; `timestamp`: milliseconds."""

    key: str
    value: float
    timestamp: int
    step: int


@dataclass(frozen=True)
class Param:
    key: str
    value: str


@dataclass
class MlflowRun:
    info: SimpleNamespace
    tags: dict[str, str]
    params: dict[str, str] = field(default_factory=dict)
    metrics: list[Metric] = field(default_factory=list)


class MlflowServer:
    """What an address has: experiments by name, and runs by id."""

    def __init__(self) -> None:
        self.experiments: dict[str, SimpleNamespace] = {}
        self.runs: dict[str, MlflowRun] = {}


class Mlflow(ModuleType):
    """`import mlflow`. `servers`: by address."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        servers = self.servers = dict[str, MlflowServer]()

        class MlflowClient:
            def __init__(self, tracking_uri: str | None = None, registry_uri: str | None = None) -> None:
                assert tracking_uri is not None and tracking_uri.startswith(("sqlite:///", "http://", "https://"))
                self._server = servers.setdefault(tracking_uri, MlflowServer())

            def get_experiment_by_name(self, name: str) -> SimpleNamespace | None:
                return self._server.experiments.get(name)

            def create_experiment(self, name: str) -> str:
                assert name not in self._server.experiments, f"Experiment(name={name}) already exists"
                id = str(len(self._server.experiments) + 1)
                self._server.experiments[name] = SimpleNamespace(experiment_id=id, name=name)
                return id

            def search_runs(
                self, experiment_ids: list[str], filter_string: str = "", max_results: int = 1000
            ) -> list[MlflowRun]:
                left, _, value = filter_string.partition(" = ")
                assert left.startswith("tags.`") and left.endswith("`") and value[0] == value[-1] == "'", filter_string
                tag, wanted = left[6:-1], value[1:-1]
                found = [
                    run
                    for run in self._server.runs.values()
                    if run.info.experiment_id in experiment_ids and run.tags.get(tag) == wanted
                ]
                return found[:max_results]

            def create_run(
                self, experiment_id: str, *, run_name: str | None = None, tags: dict[str, str] | None = None
            ) -> MlflowRun:
                assert experiment_id in [found.experiment_id for found in self._server.experiments.values()]
                id = f"{len(self._server.runs):032x}"
                info = SimpleNamespace(run_id=id, experiment_id=experiment_id, run_name=run_name, status="RUNNING")
                self._server.runs[id] = MlflowRun(info, dict(tags or {}))
                return self._server.runs[id]

            def get_metric_history(self, run_id: str, key: str) -> list[Metric]:
                return [metric for metric in self._server.runs[run_id].metrics if metric.key == key]

            def log_batch(self, run_id: str, metrics: Sequence[Metric] = (), params: Sequence[Param] = ()) -> None:
                assert len(metrics) <= 1000 and len(params) <= 100 and len(metrics) + len(params) <= 1000
                run = self._server.runs[run_id]
                for param in params:
                    assert isinstance(param.value, str) and len(param.value) <= 6000
                    assert all(letter.isascii() and (letter.isalnum() or letter in "_-. :/") for letter in param.key)
                    assert run.params.get(param.key, param.value) == param.value, "a parameter cannot change"
                    run.params[param.key] = param.value
                for metric in metrics:
                    assert type(metric.timestamp) is int and type(metric.step) is int
                run.metrics += metrics

            def set_terminated(self, run_id: str, status: str | None = None, end_time: int | None = None) -> None:
                assert status in ("FINISHED", "FAILED", "KILLED"), status
                self._server.runs[run_id].info.status = status

        entities, tracking = ModuleType("mlflow.entities"), ModuleType("mlflow.tracking")
        vars(entities).update(Metric=Metric, Param=Param)
        vars(tracking).update(MlflowClient=MlflowClient)
        self.entities, self.tracking = entities, tracking


def install(monkeypatch: pytest.MonkeyPatch) -> tuple[Wandb, Mlflow]:
    """Imports of both libraries, and of the sinks that use them, give the stand-ins until the test ends."""
    wandb, mlflow = Wandb(), Mlflow()
    stand_ins = {
        "wandb": wandb,
        "mlflow": mlflow,
        "mlflow.entities": mlflow.entities,
        "mlflow.tracking": mlflow.tracking,
    }
    for name, module in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("coserve.api.tracking.sinks.wandb", "coserve.api.tracking.sinks.mlflow"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        del sys.modules[name]  # so that the test's end forgets what is imported meanwhile
    return wandb, mlflow
