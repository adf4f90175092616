"""How soon the web page is painted, and how large it is, in headless Chromium against a daemon on the bundled base.

    python -m benchmarks.page.first_paint [--figures FOLDER]

Each repeat has a new profile, so that nothing is cached. `--figures` also draws the guide's pictures, after a minute of
a job and requests.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from benchmarks.common.options import make_parser
from benchmarks.common.provenance import cpu_name
from benchmarks.common.results import Results, Target
from benchmarks.common.summary import entry, update_summary
from benchmarks.serving.http_daemon import daemon
from coserve.api.page.handlers import page_files
from coserve.workloads.bundled import bundled_prompts
from tests.support.browser import FLAGS

FILE = "page.json"
REPEATS = 15
CHROMIUM = "/usr/bin/chromium"
PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime / 1000"
SIZE = {"width": 1200, "height": 760}
COLORS = 128


def paint(browser: Browser, url: str) -> tuple[float, float]:
    """Seconds from the navigation to the first paint, and to the overview's numbers."""
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(url)
        page.locator("#state.ready").wait_for(timeout=120_000)  # of the first repeat, which is not counted
        page.locator("dl.tiles div").first.wait_for()
        filled = page.evaluate("performance.now() / 1000")
        return float(page.evaluate(PAINT)), float(filled)


def call(url: str, body: Mapping[str, object]) -> None:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.read()


def generate(url: str, ends: threading.Event) -> None:
    """Send requests until `ends` is set, with pauses, so that training gets its share."""
    prompts = bundled_prompts()
    for number in range(1000):
        call(f"{url}/generate", {"prompt": prompts[number % len(prompts)], "max_tokens": 24})
        if ends.wait(number % 7):
            return


def save(page: Page, path: Path) -> None:
    """A screenshot in few colours: a few dozen KB."""
    page.screenshot(path=path, full_page=True)
    with Image.open(path) as image:
        image.convert("RGB").quantize(COLORS).save(path, optimize=True)


def draw(browser: Browser, url: str, folder: Path) -> None:
    """The overview under work, and the playground after the job's end."""
    ends = threading.Event()
    requests = threading.Thread(target=generate, args=(url, ends))
    requests.start()
    try:
        rows = Path("coserve/assets/corpora/pirate.jsonl").read_text().splitlines()
        body = {"adapter": "pirate", "data": [json.loads(row) for row in rows], "training": {"epochs": 10}}
        call(f"{url}/finetune", body)
        page = browser.new_page(viewport=SIZE)
        page.goto(url)
        page.wait_for_timeout(60_000)
        save(page, folder / "page_overview.png")
        page.goto(f"{url}/#jobs")
        page.get_by_role("row", name="pirate@1").get_by_text("succeeded").wait_for(timeout=400_000)
    finally:
        ends.set()
        requests.join()
    page.goto(f"{url}/#playground")
    page.get_by_label("Adapter A").fill("pirate")
    page.get_by_label("Prompt", exact=True).fill("Where is the ship?")
    page.get_by_role("button", name="Generate").click()
    for output in ("A", "B"):
        page.get_by_role("region", name=f"Side {output}").get_by_text("first after").wait_for()
    page.get_by_role("group", name="Output A").locator(".token").nth(4).hover()
    save(page, folder / "page_playground.png")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--figures", type=Path, help="draw the guide's pictures into this folder")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as scratch,
        daemon({"model": "bundled", "device": "cpu", "data_dir": Path(scratch) / "data"}, Path(scratch) / "log") as url,
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS)) as browser,
    ):
        paint(browser, url)
        painted, filled = zip(*(paint(browser, url) for _ in range(REPEATS)), strict=True)
        about = {"chromium": browser.version}
        if options.figures is not None:
            draw(browser, url, options.figures)
    results = Results(
        options.out,
        FILE,
        script="benchmarks.page.first_paint",
        hardware=cpu_name(),
        seed=0,
        revision=options.commit,
        settings={"repeats": REPEATS, "flags": FLAGS},
    )
    size = sum(len(file.content) for file in page_files().values()) / 1000
    results.put("page.first_paint_s", round(statistics.median(painted), 3), "s", Target(1, most=True), painted, about)
    results.put("page.overview_s", round(statistics.median(filled), 3), "s", None, filled, about)
    results.put("page.bundle_kb", round(size, 1), "kB", Target(300, most=True))
    update_summary(
        options.out,
        {
            key: entry(
                row,
                value=row["value"],
                unit=row["unit"],
                target=row["target"],
                script="page/first_paint.py",
                result=FILE,
            )
            for key, row in json.loads((options.out / FILE).read_text())["rows"].items()
        },
    )


if __name__ == "__main__":
    main()
