from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.api_server import Api, serve_api


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    """The API over a fake engine, with a small queue and short deadlines."""
    root = tmp_path / "root"
    root.mkdir()
    async with serve_api(
        tmp_path / "data", max_queue=4, max_jobs=3, read_timeout=60.0, max_body_bytes=1 << 20, data_root=root
    ) as api:
        yield api
