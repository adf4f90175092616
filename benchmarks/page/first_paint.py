"""How soon the web page is painted, and how large it is, in headless Chromium against a daemon on the bundled base.

    python -m benchmarks.page.first_paint

Each repeat has a new profile, so that nothing is cached.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from benchmarks.common.options import make_parser
from benchmarks.common.provenance import cpu_name
from benchmarks.common.results import Results, Target, summarize
from benchmarks.serving.http_daemon import daemon
from coserve.api.page.handlers import page_files
from tests.support.browser import FLAGS

FILE = "page.json"
REPEATS = 15
CHROMIUM = "/usr/bin/chromium"
PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime / 1000"


def paint(browser: Browser, url: str) -> tuple[float, float]:
    """Seconds from the navigation to the first paint, and to the overview's numbers."""
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(url)
        page.locator("#state.ready").wait_for(timeout=120_000)  # of the first repeat, which is not counted
        page.locator("dl.tiles div").first.wait_for()
        filled = page.evaluate("performance.now() / 1000")
        return float(page.evaluate(PAINT)), float(filled)


def main() -> None:
    options = make_parser(__doc__).parse_args()
    with (
        tempfile.TemporaryDirectory() as scratch,
        daemon({"model": "bundled", "device": "cpu", "data_dir": Path(scratch) / "data"}, Path(scratch) / "log") as url,
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS)) as browser,
    ):
        paint(browser, url)
        painted, filled = zip(*(paint(browser, url) for _ in range(REPEATS)), strict=True)
        about = {"chromium": browser.version}
    results = Results.of(options, FILE, __file__, {"repeats": REPEATS, "flags": FLAGS}, hardware=cpu_name())
    size = sum(path.stat().st_size for path in page_files().values()) / 1000
    results.put("page.first_paint_s", round(statistics.median(painted), 3), "s", Target(1, most=True), painted, about)
    results.put("page.overview_s", round(statistics.median(filled), 3), "s", None, filled, about)
    results.put("page.bundle_kb", round(size, 1), "kB", Target(300, most=True))
    summarize(FILE, options.out)


if __name__ == "__main__":
    main()
