from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.support.api_server import Api, serve_api

if TYPE_CHECKING:
    from openai import AsyncOpenAI


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Api]:
    root = folder / "root"
    root.mkdir()
    async with serve_api(
        folder / "data", max_queue=4, max_jobs=3, read_timeout=60.0, max_body_bytes=1 << 20, data_root=root
    ) as api:
        yield api


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    """The API over a fake engine, with a small queue and short deadlines."""
    async with serving(tmp_path) as api:
        yield api


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lasting_api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Api]:
    """As `api`, one for all tests of a module, on the module's event loop: for requests that leave nothing behind."""
    async with serving(tmp_path_factory.mktemp("lasting")) as api:
        yield api


@pytest.fixture
async def client(api: Api) -> AsyncIterator[AsyncOpenAI]:
    """OpenAI's own client of `api`."""
    async with api.openai() as client:
        yield client
