"""Background work for a job, with the permissions of the job's project."""

from __future__ import annotations

from coserve.core.access.principal import Principal, Scope, act_as
from coserve.state.thread import RegistryThread


async def act_as_owner(registry: RegistryThread, job: str) -> None:
    """Let the running task act for the project of a job. Raises `JobNotFound`."""
    project = await registry(lambda registry: registry.project_of_job(job))
    act_as(Principal(project, frozenset({Scope.TRAIN, Scope.GENERATE})))
