"""The web page in a real browser, on a real daemon on a tiny base that asks for a key."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from PIL import Image

from coserve.core.gpu_memory import USES
from coserve.workloads.bundled import bundled_prompts
from tests.support.browser import check_accessible, chromium, open_page
from tests.support.daemon_process import DaemonProcess
from tests.support.model_folder import make_model_folder

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
KEY = "a-key-of-the-tests"
FIGURES = os.environ.get("COSERVE_FIGURES")
"""Where to draw the guide's pictures (docs/figures), then on the bundled base; a folder of the test's own otherwise."""
SIZE = {"width": 1200, "height": 760}
COLORS = 128
ROWS = [{"prompt": f"Question {number}:", "completion": f" answer {number} of many"} for number in range(12)]
DROP = """([zone, name, text]) => {
    const data = new DataTransfer();
    data.items.add(new File([text], name));
    const init = {dataTransfer: data, cancelable: true};
    for (const type of ["dragover", "drop"]) zone.dispatchEvent(new DragEvent(type, init));
}"""


@dataclass
class Node:
    """A daemon that can be killed and started again at its address, and the browser."""

    model: Path
    data: Path
    browser: Browser
    daemon: DaemonProcess = field(init=False)

    def start(self, port: int = 0) -> None:
        options = ("--port", str(port))
        self.daemon = DaemonProcess(self.model, self.data, options=options, environ={"COSERVE_API_KEY": KEY})
        self.daemon.wait_ready()

    def open(self, view: str = "", **settings: Any) -> Any:
        return open_page(self.browser, f"{self.daemon.url}/{view}", KEY, **settings)

    def train(self, adapter: str, **training: Any) -> str:
        """Train a version to its end, and measure it on a row; the job's id."""
        body = {"adapter": adapter, "data": ROWS, "lora": {"r": 4}, "training": {"steps": 3} | training}
        body["test"] = {"data": ROWS[:1], "max_tokens": 4}
        status, job = self.daemon.call("POST", "/finetune", body)
        assert status == 202, job
        states = [event["state"] for event in self.daemon.events("GET", f"/finetune/{job['id']}/events")]
        assert states[-1] == "succeeded"
        return str(job["id"])


def gpu_history() -> dict[str, Any]:
    """What a daemon answers whose GPU memory is planned."""
    counts = ("waiting", "running", "jobs", "generation_steps", "training_batches", "serve_seconds", "train_seconds")
    pages = ("pages_used", "pages_adapters", "pages_total")
    memory = dict.fromkeys(USES, 1 << 30) | {"weights": 16 << 30}
    data = [{"at": 1000.0 + at, "memory": memory} | dict.fromkeys(counts + pages, at) for at in range(5)]
    return {"data": data, "now": 1005.0}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("page")
    with ExitStack() as stack:
        browser = stack.enter_context(chromium())
        model = make_model_folder(folder / "model") if FIGURES is None else Path("bundled")
        node = Node(model, folder / "data", browser)
        node.start()
        try:
            yield node
        finally:
            node.daemon.__exit__()


@pytest.fixture(scope="module")
def trained(node: Node) -> list[str]:
    """Jobs of two versions of `parrot`."""
    return [node.train("parrot", seed=seed, validation_rows=2, eval_steps=1) for seed in (0, 1)]


def test_the_key_is_asked_for_and_the_overview_is_drawn(node: Node, trained: list[str]) -> None:
    node.daemon.call("POST", "/generate", {"prompt": "hello", "max_tokens": 4})
    with open_page(node.browser, node.daemon.url) as page:
        page.get_by_label("Key", exact=True).fill("not the key")
        page.keyboard.press("Enter")
        page.get_by_text("The daemon refuses this key.").wait_for()
        check_accessible(page)
        page.get_by_label("Key", exact=True).fill(KEY)
        page.get_by_role("button", name="Use the key").click()
        page.get_by_role("row", name="Time to first token").get_by_text("2 s", exact=True).wait_for()
        page.locator("#state.ready").wait_for()
        assert "expected 'Authorization" not in page.locator("body").inner_text()
        page.get_by_label("Window").select_option("recent")  # nothing was asked for since the page was opened
        page.get_by_role("row", name="Whole request – – – – –").wait_for()
        chart = page.get_by_role("img", name="Time of the engine, by what the policy chose")
        chart.locator("path.area").nth(1).wait_for()
        assert "training slices: last" in str(chart.get_attribute("aria-label"))
        chart.focus()
        page.keyboard.press("ArrowLeft")
        assert "generation steps" in page.locator("figure").first.locator("output").inner_text()
        check_accessible(page)
        page.route("**/history?*", lambda route: route.fulfill(json=gpu_history()))
        page.reload()  # the key is kept in the tab
        page.get_by_role("img", name=re.compile("^GPU memory by component. weights: last 16 GiB, .* free")).wait_for()


def test_a_job_is_started_from_a_file_and_followed(node: Node, trained: list[str]) -> None:
    with node.open("#jobs") as page:
        lines = "\n".join(json.dumps(row) for row in ROWS)
        zone = page.locator(".drop").element_handle()
        page.evaluate(DROP, [zone, "Dropped rows.jsonl", lines])
        assert page.get_by_label("Adapter", exact=True).input_value() == "dropped-rows"
        page.get_by_label("LoRA rank").fill("4")
        page.get_by_label("Sample prompts").fill("Question 1:")
        page.get_by_label("Sample every").fill("2")
        page.get_by_label("Share held back").fill("0.2")
        page.get_by_label("Further settings").fill('{"steps": 6, "eval_steps": 2, "sample_max_tokens": 8}')
        page.get_by_role("button", name="Start the job").click()
        followed = page.get_by_role("heading", name="Follow dropped-rows@1")
        followed.wait_for()
        page.get_by_text("published dropped-rows@1").wait_for()
        page.get_by_role("img", name=re.compile("^Loss. dropped-rows@1: last")).locator("path.line").wait_for()
        page.get_by_role("img", name="Validation loss. dropped-rows@1: last").wait_for()
        assert page.get_by_text("step 6: Question 1:").count() == 1
        check_accessible(page)
        for id in trained:  # compare: at most two are followed
            page.get_by_label(f"Follow {id}").check()
        page.get_by_role("heading", name="Compare parrot@1 and parrot@2").wait_for()
        page.locator("path.line.dashed").first.wait_for()
        page.get_by_text("Settings", exact=True).first.click()
        assert page.locator("tr.differs", has_text="seed").first.is_visible()
        measured = page.get_by_role("region", name=f"Test rows of {trained[0]}")
        measured.get_by_role("row", name=re.compile(r"^adapter 1 \d")).wait_for()
        assert measured.get_by_role("row", name=re.compile(r"^base 1 \d")).is_visible()
        check_accessible(page)


def test_a_job_is_steered(node: Node) -> None:
    body = {"adapter": "long", "data": ROWS, "training": {"steps": 5000}}
    _, job = node.daemon.call("POST", "/finetune", body)
    id = job["id"]
    with node.open(f"#jobs/{id}") as page:
        row = page.get_by_role("row", name=id)
        page.get_by_role("button", name=f"Pause {id}").click()
        row.get_by_text("paused", exact=True).wait_for()
        page.get_by_role("button", name=f"Resume {id}").click()
        page.get_by_role("button", name=f"Cancel {id}").click()
        page.get_by_role("button", name="No").click()
        assert row.is_visible()
        page.get_by_role("button", name=f"Cancel {id}").click()
        page.get_by_role("button", name="Yes").click()
        row.get_by_text("cancelled").wait_for()
        page.get_by_role("button", name=f"Delete {id}").click()
        page.keyboard.press("Enter")
        row.wait_for(state="detached")


def test_versions_are_downloaded_rolled_back_and_deleted(node: Node, tmp_path: Path) -> None:
    for seed in (0, 1):
        node.train("org/kept", seed=seed)
    node.daemon.call("PUT", "/aliases/best", {"target": "org/kept@1", "canary": "org/kept@2", "weight": 0.25})
    with node.open("#adapters") as page:
        page.get_by_label("Search adapters by name").fill("org/kept")
        page.get_by_role("link", name="org/kept").click()
        page.get_by_role("heading", name="org/kept: 2 versions").wait_for()
        page.get_by_role("row", name=re.compile("^@1 best ")).wait_for()
        page.get_by_role("row", name=re.compile(r"^@2 \(current\) best \(canary, 25 %\) ")).wait_for()
        check_accessible(page)
        with page.expect_download() as download:
            page.get_by_role("button", name="Download org/kept@1").click()
        assert download.value.suggested_filename == "org+kept-1.tar"
        download.value.save_as(tmp_path / "kept.tar")
        with tarfile.open(tmp_path / "kept.tar") as archive:
            assert any(name.endswith("adapter_model.safetensors") for name in archive.getnames())
        page.get_by_role("button", name="Make current org/kept@1").click()
        page.get_by_role("rowheader", name="@1 (current)").wait_for()
        assert node.daemon.call("GET", "/adapters/org%2Fkept")[1]["version"] == 1
        node.daemon.call("PUT", "/aliases/best", {"target": "org/kept@1"})
        page.get_by_role("button", name="Delete org/kept@2").click()
        page.get_by_role("button", name="Yes").click()
        page.get_by_role("heading", name="org/kept: 1 version").wait_for()
        assert node.daemon.call("GET", "/adapters/org%2Fkept")[1]["versions"] == [1]


def test_two_adapters_answer_side_by_side(node: Node, trained: list[str]) -> None:
    with node.open("#playground") as page:
        first, second = (page.get_by_role("group", name=f"Output {side}") for side in "AB")
        page.get_by_label("Adapter A").fill("parrot@1")
        page.get_by_label("Prompt", exact=True).fill("Question 3:")
        page.get_by_label("Max tokens").fill("200")
        generate = page.get_by_role("button", name="Generate")
        generate.click()
        first.locator(".token").nth(3).wait_for()  # streamed: it can be stopped
        page.get_by_role("button", name="Stop").click()
        first.get_by_text("stopped").wait_for()
        page.get_by_label("Max tokens").fill("12")
        generate.click()
        page.get_by_text("parrot@1 · 12 tokens").wait_for()
        page.get_by_text("base · 12 tokens").wait_for()
        asked = {"prompt": "Question 3:", "max_tokens": 12, "temperature": 0.8, "seed": 1}
        for output, more in ((first, {"adapter": "parrot@1"}), (second, {})):
            _, expected = node.daemon.call("POST", "/generate", asked | more)
            assert output.locator(".answer").text_content() == expected["choices"][0]["text"]
        first.locator(".token").nth(2).hover()
        assert page.get_by_role("tooltip").locator("li").count() >= 5
        first.focus()
        page.keyboard.press("ArrowRight")
        assert "%" in page.get_by_role("tooltip").inner_text()
        check_accessible(page)
        page.get_by_text("JSON schema", exact=True).click()
        page.get_by_label("The output follows this schema").fill('{"enum": ["yes", "no"]}')
        generate.click()
        page.get_by_text(re.compile("^base · .* · stop$")).wait_for()
        assert json.loads(second.locator(".answer").inner_text()) in ("yes", "no")
        page.get_by_label("The output follows this schema").fill("{")
        generate.click()
        page.get_by_text("JSON schema: ").wait_for()
        page.get_by_label("The output follows this schema").fill("")
        page.get_by_label("Kind").select_option("chat")
        page.get_by_label("System message").fill("Be brief.")
        for turn in (1, 2):
            generate.click()
            page.get_by_text("base · 12 tokens").wait_for()
            second.locator(".answer").nth(turn - 1).wait_for()
        assert second.locator(".asked").count() == 2


def test_every_view_fits_a_phone_in_the_dark(node: Node, trained: list[str]) -> None:
    with node.open(color_scheme="dark", viewport={"width": 360, "height": 740}) as page:
        for view in ("overview", f"jobs/{','.join(trained)}", "adapters/parrot", "playground"):
            name = view.partition("/")[0]
            page.evaluate("view => location.hash = view", view)
            page.locator(f"#view-{name}").get_by_role("heading", level=1).wait_for()
            page.locator("#state.ready").wait_for()
            check_accessible(page)
            assert page.evaluate("document.documentElement.scrollWidth") <= 360, view
            assert page.evaluate("document.activeElement.id") in (f"title-{name}", ""), "focus follows the view"


def save(page: Any, path: Path) -> None:
    """A screenshot in few colours: a few dozen KB."""
    page.screenshot(path=path, full_page=True)
    with Image.open(path) as image:
        image.convert("RGB").quantize(COLORS).save(path, optimize=True)


def test_the_guides_pictures_are_drawn(node: Node, tmp_path: Path) -> None:
    """The overview while a job trains and requests run, and the playground after the job's end."""
    folder = tmp_path if FIGURES is None else Path(FIGURES)
    rows = (ROOT / "coserve/assets/corpora/pirate.jsonl").read_text().splitlines()
    training = {"steps": 40} if FIGURES is None else {"epochs": 10}
    body = {"adapter": "pirate", "data": [json.loads(row) for row in rows], "training": training}
    _, job = node.daemon.call("POST", "/finetune", body)
    prompts, drawn = bundled_prompts(), False
    with node.open(viewport=SIZE) as page:
        for number, event in enumerate(node.daemon.events("GET", f"/finetune/{job['id']}/events")):
            if number % 3 == 0:
                node.daemon.call("POST", "/generate", {"prompt": prompts[number % len(prompts)], "max_tokens": 24})
            if (event["metrics"] or {}).get("step", 0) > 0.8 * job["total_steps"] and not drawn:
                page.get_by_role("img", name="Time of the engine").locator("path.area").nth(1).wait_for()
                save(page, folder / "page_overview.png")
                drawn = True
        page.goto(f"{node.daemon.url}/#playground")
        page.get_by_label("Adapter A").fill("pirate")
        page.get_by_label("Prompt", exact=True).fill("Where is the ship?")
        page.get_by_role("button", name="Generate").click()
        for output in ("A", "B"):
            page.get_by_role("region", name=f"Side {output}").get_by_text("first after").wait_for()
        page.get_by_role("group", name="Output A").locator(".token").nth(4).hover()
        save(page, folder / "page_playground.png")
    for name in re.findall(r"figures/(page_\w+\.png)", (ROOT / "docs/guide/page.md").read_text()):
        assert 20_000 < (folder / name).stat().st_size < 200_000


def test_a_dead_daemon_is_shown_and_recovered_from(node: Node) -> None:
    """The last test: the daemon that the others use is killed."""
    body = {"adapter": "survivor", "data": ROWS, "training": {"steps": 60, "checkpoint_steps": 5}}
    _, job = node.daemon.call("POST", "/finetune", body)
    with node.open(f"#jobs/{job['id']}") as page:
        page.get_by_text("running: 60 steps").wait_for()
        port = urlsplit(node.daemon.url).port
        node.daemon.end()
        page.get_by_role("alert").get_by_text("The daemon does not answer.").wait_for()
        check_accessible(page)
        node.daemon.__exit__()
        node.start(port or 0)
        page.locator("#state.ready").wait_for()
        page.locator("#down").wait_for(state="hidden")
        page.get_by_text("published survivor@1").wait_for()  # the stream went on after the last event seen
        page.get_by_role("img", name=re.compile("^Loss. survivor@1")).wait_for()


def test_the_api_is_described_with_an_example_for_each_route(node: Node) -> None:
    """Each route shows its fields and a curl command; some run as shown."""
    _, api = node.daemon.call("GET", "/openapi.json")
    operations = [each["operationId"] for item in api["paths"].values() for each in item.values()]
    run = ("/generate", "/finetune", "/v1/completions", "/tokenize", "/detokenize")
    with node.open("docs") as page:
        page.locator("details.route").first.wait_for()
        routes = page.locator("details.route")
        assert routes.count() == len(operations)
        assert page.locator("#groups a").all_inner_texts()[:2] == ["coserve", "Web page"]
        routes.evaluate_all("(all) => all.forEach((each) => (each.open = true))")
        page.wait_for_function("document.querySelectorAll('details.route:has(pre)').length === " + str(len(operations)))
        for command in page.locator("details.route pre").all_inner_texts():
            assert command.startswith("curl -s") and "undefined" not in command, command
        for path in run:
            id = api["paths"][path]["post"]["operationId"]
            command = page.locator(f"#{id} pre").first.inner_text()
            done = subprocess.run(
                ["bash", "-c", command],
                env=os.environ | {"COSERVE_API_KEY": KEY},
                capture_output=True,
                text=True,
                check=True,
            )
            assert "error" not in {key for key, value in json.loads(done.stdout).items() if value}, done.stdout
        page.locator("#generate").get_by_role("link", name="GenerateRequest").first.click()
        page.get_by_role("region", name="Fields of GenerateRequest").wait_for()
        routes.evaluate_all(
            "(all) => all.forEach((each, at) => (each.open = at % 8 === 0))"
        )  # axe reads all that is shown
        check_accessible(page)
        page.get_by_label("Filter routes").fill("get aliases")
        assert 0 < page.locator("details.route:visible").count() < 10
