"""The web page: its files, which are part of the package, and the history that it draws.

The files need no key: they contain no data of the daemon. The page requests its data with its user's API key, as any
client does.
"""

from __future__ import annotations

import math
from importlib import resources
from pathlib import Path

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from coserve.api.http.route import Route
from coserve.api.http.security import Handler
from coserve.api.page.history import ReportHistory
from coserve.core.errors import InvalidRequest, NotFound
from coserve.core.schemas.service import History, Pointers

INDEX = "index.html"
DOCS = "docs.html"
MEDIA = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    # No inline code or styles, nothing from elsewhere; the page builds DOM elements, and never parses text as HTML.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Cache-Control": "no-cache",  # revalidated each time; 304 if unchanged
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}


def page_files() -> dict[str, Path]:
    """Return the paths of the page's files by name."""
    folder = Path(str(resources.files("coserve"))) / "assets" / "page"
    return {path.name: path for path in folder.iterdir() if path.suffix in MEDIA}


class _File(web.FileResponse):
    """A file that is sent once: `prepare` sends it, and is called by the middleware of connections, then by aiohttp."""

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        return None if self.prepared else await super().prepare(request)


class PageApi:
    """`pointers` answers `GET /` to clients that do not ask for HTML."""

    def __init__(self, history: ReportHistory, pointers: Handler) -> None:
        self._history, self._pointers = history, pointers
        self._files = page_files()

    @Route(
        "GET",
        "/",
        "Where to look; the web page if the client accepts HTML and not JSON",
        response=Pointers,
        public=True,
    )
    async def root(self, request: web.Request) -> web.StreamResponse:
        accepted = request.headers.get("Accept", "")
        html = "text/html" in accepted and "application/json" not in accepted
        response = self._respond(INDEX) if html else await self._pointers(request)
        response.headers["Vary"] = "Accept"
        return response

    @Route("GET", "/page/{id}", "A file of the web page", media="application/octet-stream", public=True)
    async def page_file(self, id: str) -> web.StreamResponse:
        return self._respond(id)

    @Route("GET", "/docs", "This description as a page, with an example for each route", media="text/html", public=True)
    async def docs(self) -> web.StreamResponse:
        return self._respond(DOCS)

    @Route("GET", "/history", "The engine's reports of the last minutes, oldest first", query=("after",))
    async def history(self, request: web.Request) -> History:
        return self._history.after(_seconds(request.query.get("after", "0")))

    def _respond(self, name: str) -> web.FileResponse:
        path = self._files.get(name)
        if path is None:
            raise NotFound(f"the page has no file {name[:80]!r}")
        return _File(path, headers=HEADERS | {"Content-Type": MEDIA[path.suffix]})


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise InvalidRequest(f"expected seconds, got {text[:80]!r}", field="after")
    return found
