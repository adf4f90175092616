"""A headless Chromium for tests of the web page, and what it complains about."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
ASKED_FOR = ("status of 401", "status of 503", "net::ERR_")
"""Parts of messages that Chromium itself logs: no key yet, the daemon starts, there is none, or it died."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser with a new profile. Skips where there is no Chromium or no Playwright."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("THE WEB PAGE IS NOT TESTED: no chromium here (Debian: apt-get install chromium)")
    api = pytest.importorskip("playwright.sync_api", reason="THE WEB PAGE IS NOT TESTED: no playwright (make test-all)")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def open_page(browser: Browser, url: str, key: str | None = None, **settings: Any) -> Iterator[Page]:
    """The daemon's page in a context of its own, with the key given; `settings`: of the context, such as `viewport`.
    At the end nothing was logged: no error of a script, no violation of the CSP, no response that failed."""
    with browser.new_context(**settings) as context:
        page = context.new_page()
        page.set_default_timeout(120_000)
        logged: list[str] = []
        page.on("console", lambda message: logged.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: logged.append(f"uncaught: {error}"))
        if key is not None:
            page.add_init_script(f"sessionStorage.setItem('coserve-key', '{key}')")
        page.goto(url)
        try:
            yield page
        finally:
            assert [line for line in logged if not any(part in line for part in ASKED_FOR)] == []


def check_accessible(page: Page) -> None:
    """axe-core finds nothing: roles, names, contrast, landmarks, order of headings."""
    package = pytest.importorskip("axe_playwright_python", reason="no axe-core (make test-all)")
    if not page.evaluate("'axe' in window"):
        page.evaluate((Path(package.__file__).parent / "axe.min.js").read_text())
    found = page.evaluate("axe.run()")["violations"]
    wrong = [(each["id"], [node["html"] for node in each["nodes"]]) for each in found]
    assert wrong == [], wrong
