"""The routes of the web page."""

from __future__ import annotations

from coserve.api.http.route import Route
from coserve.api.page.handlers import PageApi
from coserve.core.schemas import History, Pointers


def page_routes(api: PageApi) -> tuple[Route, ...]:
    """The page itself, its files, and its history."""
    return (
        Route(
            "GET",
            "/",
            api.root,
            "Where to look; the web page if the client accepts HTML and not JSON",
            response=Pointers,
            public=True,
        ),
        Route(
            "GET",
            "/page/{id}",
            api.page_file,
            "A file of the web page",
            media="application/octet-stream",
            errors=(404,),
            public=True,
        ),
        Route(
            "GET",
            "/docs",
            api.docs,
            "This description as a page, with an example for each route",
            media="text/html",
            public=True,
        ),
        Route(
            "GET",
            "/history",
            api.history,
            "The engine's reports of the last minutes, oldest first",
            response=History,
            query=("after",),
        ),
    )
