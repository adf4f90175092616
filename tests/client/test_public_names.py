"""The SDK's surface: what it exports, what it costs to import, and that its two faces are one."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import get_type_hints

import pytest

import coserve
import coserve.client
from coserve.client import (
    AsyncClient,
    AsyncJobHandle,
    AsyncTrainingSession,
    Client,
    GenerateOptions,
    JobHandle,
    TrainingSession,
)
from coserve.core.sampling import SamplingFields, SamplingOptions
from coserve.core.schemas.generation import GenerateRequest


def test_exported_names() -> None:
    assert coserve.client.__all__ == [
        *("AsyncClient", "AsyncJobHandle", "AsyncTrainingSession", "Client", "GenerateOptions", "HttpTransport"),
        *("JobHandle", "MockTransport", "Request", "Response", "RetryPolicy", "TrainingSession", "Transport"),
        "Upload",
    ]
    assert all(hasattr(coserve.client, name) for name in coserve.client.__all__)
    assert coserve.Client is Client and coserve.AsyncClient is AsyncClient
    with pytest.raises(AttributeError, match="Clinet"):
        coserve.Clinet  # noqa: B018


def public(cls: type) -> dict[str, inspect.Signature]:
    members = inspect.getmembers(cls, callable)
    return {name: inspect.signature(member) for name, member in members if not name.startswith("_")}


@pytest.mark.parametrize(
    ("face", "implementation"),
    [(Client, AsyncClient), (JobHandle, AsyncJobHandle), (TrainingSession, AsyncTrainingSession)],
)
def test_both_faces_take_the_same_arguments(face: type, implementation: type) -> None:
    ours, theirs = public(face), public(implementation)
    assert set(ours) == set(theirs)
    for name, signature in ours.items():
        assert signature.parameters == theirs[name].parameters, name


def test_options_are_the_fields_of_a_request() -> None:
    given_apart = {"prompt", "messages", "adapter", "stream"}
    assert GenerateOptions.__optional_keys__ == set(GenerateRequest.__struct_fields__) - given_apart | {"schema"}
    assert get_type_hints(SamplingOptions) == get_type_hints(SamplingFields)


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import coserve", ("aiohttp", "msgspec", "torch")),
        ("import coserve; coserve.Client", ("torch", "rich", "numpy")),
    ],
)
def test_imports_stay_light(code: str, absent: tuple[str, ...]) -> None:
    check = f"{code}\nimport sys; found = set({absent!r}) & set(sys.modules); assert not found, found"
    done = subprocess.run([sys.executable, "-c", check], check=False, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
