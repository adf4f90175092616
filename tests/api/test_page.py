"""The web page's files, and the history that it draws."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path

import pytest

import coserve
from coserve.api.page.history import POINTS, ReportHistory
from tests.support.api_server import Api, serve_api
from tests.support.fake_engine import make_stats

FOLDER = Path(coserve.__file__).parent / "assets" / "page"
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
MAX_BUNDLE = 300_000


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with serve_api(tmp_path, api_key="a-key-of-the-tests") as api:
        yield api


async def test_browsers_get_the_page_without_a_key_and_others_json(api: Api) -> None:
    async with api.http.get("/", headers={"Accept": BROWSER}) as response:
        assert (response.status, response.content_type) == (200, "text/html")
        assert "unsafe" not in response.headers["Content-Security-Policy"]
        assert response.headers["Vary"] == "Accept"
        page = await response.text()
    for accept in ("*/*", "application/json", f"application/json,{BROWSER}"):
        async with api.http.get("/", headers={"Accept": accept}) as response:
            assert (await response.json())["name"] == "coserve"
    async with api.http.get("/docs") as response:
        assert (response.status, response.content_type) == (200, "text/html")
        assert "unsafe" not in response.headers["Content-Security-Policy"]
        page += await response.text()
    names = set(re.findall(r'(?:href|src)="/page/([^"]+)"', page))
    for name in names | {path.name for path in FOLDER.iterdir()}:
        async with api.http.get(f"/page/{name}") as response:
            assert response.status == 200, name
            again = {"If-None-Match": response.headers["ETag"]}
        async with api.http.get(f"/page/{name}", headers=again) as response:
            assert (response.status, await response.read()) == (304, b"")
    for name in ("nothing.js", "..%2Fprompts.txt", "%2e%2e%2freport.html"):
        async with api.http.get(f"/page/{name}") as response:
            assert response.status == 404, name


def test_the_page_is_small_and_asks_nobody_else() -> None:
    files = list(FOLDER.iterdir())
    assert sum(path.stat().st_size for path in files) <= MAX_BUNDLE
    for path in files:
        text = path.read_text()
        assert set(re.findall(r"https?://[\w.]+", text)) <= {"http://www.w3.org"}, path
        assert "innerHTML" not in text
    for path in FOLDER.glob("*.html"):
        assert not re.search(r"<script(?![^>]*src=)|<style| style=| on\w+=", path.read_text())


def test_history_keeps_the_last_reports_and_two_a_second() -> None:
    history = ReportHistory(count(0.0, 0.25).__next__)
    for number in range(4 * POINTS):
        history.report(make_stats(serve_seconds=float(number)), jobs=number)
    points = history.after(0).data
    assert len(points) == POINTS
    assert points[-1].serve_seconds == 4.0 * POINTS - 1, "the newest report is kept"
    assert all(late.at - early.at >= 1 for early, late in zip(points, points[2:], strict=False))
    assert history.after(points[-2].at).data == points[-1:]


def test_history_goes_on_when_the_clock_is_set_back() -> None:
    times = iter([100.0, 5000.0, 5002.0, 110.0, 112.0, 114.0, 116.0])
    history = ReportHistory(times.__next__)
    for number in range(6):
        history.report(make_stats(), jobs=number)
    assert [(point.at, point.jobs) for point in history.after(0).data] == [(100, 0), (110, 3), (112, 4), (114, 5)]


async def test_history_is_asked_for_with_the_key(api: Api) -> None:
    key = {"Authorization": "Bearer a-key-of-the-tests"}
    assert (await api.call("GET", "/history"))[0] == 401
    api.engine.stats(running=2)
    await api.works()
    _, found = await api.call("GET", "/history", headers=key)
    assert found["data"][-1]["running"] == 2
    last = found["data"][-1]["at"]
    assert (await api.call("GET", "/history", headers=key, params={"after": str(last)}))[1]["data"] == []
    _, health = await api.call("GET", "/health")
    assert (health["slo_ttft"], health["slo_tpot"]) == api.config.targets(device="cpu")
    for wrong in ("x", "nan", "inf"):
        status, body = await api.call("GET", "/history", headers=key, params={"after": wrong})
        assert (status, body["error"]["field"]) == (400, "after")
