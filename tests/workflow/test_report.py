"""The report: one file that needs nothing else, opens on provenance and findings, shows every figure with a caption.

Goal: what `make report` hands over can be sent to someone without a network and read there. Method: Snakemake's report
of the tiny run, read as text and opened in a browser that has no network. Oracle: the files of the run and the sources
of the captions. Controls: copies of the report with a planted load, error or broken figure, which the same look finds.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from workflows import ROOT

WINDOW = {"width": 1280, "height": 800}
NATURAL_SIZE = "async i => { try { await i.decode() } catch {} return i.naturalWidth * i.naturalHeight }"
PLANTED = {
    "a load": ("</head>", '<script src="https://planted.example/x.js"></script></head>'),
    "an error": ("</body>", "<script>throw new Error('planted')</script></body>"),
}


class Page(HTMLParser):
    """Loads of a page from elsewhere than itself, and its scripts by id."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.scripts: dict[str, str] = {}
        self.element, self.id = "", ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.element, self.id = tag, values.get("id") or ""
        sources = [values.get(name) for name in ("src", "srcset", "data", "poster")]
        sources += [values.get("href")] if tag in ("link", "base") else []
        self.loads += [source for source in sources if source and not source.startswith("data:")]

    def handle_data(self, data):
        if self.element == "script":
            self.scripts[self.id] = self.scripts.get(self.id, "") + data
        if self.element == "style":
            self.loads += re.findall(r"@import[^;]*|url\(\s*['\"]?(?!data:|#)[^)]*", data)

    def handle_endtag(self, tag):
        self.element = ""

    def value(self, script: str):
        return json.loads(re.search(r"= (.*);\s*$", self.scripts[script].strip(), re.DOTALL)[1])


def make_report(workflow) -> subprocess.CompletedProcess[str]:
    """Run `make report` with the libraries at hand in place of an environment of its own."""
    shutil.copy(ROOT / "Makefile", workflow.root)
    workflow.command()  # writes run.yaml
    command = ["make", "report", "CONFIG=run.yaml", f"BIN={Path(sys.executable).parent}", "-o", ".venv/run.stamp"]
    return subprocess.run(command, cwd=workflow.root, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def run(finished_workflow, tmp_path_factory):
    workflow = finished_workflow.copy(tmp_path_factory.mktemp("report"))
    done = make_report(workflow)
    assert done.returncode == 0, done.stderr
    assert "open results/tiny/report.html" in done.stdout
    return SimpleNamespace(workflow=workflow, html=workflow.results / "report.html")


@pytest.fixture(scope="module")
def chromium():
    """A browser, as small and as offline as can be."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        names = ("chromium", "chromium-browser", "google-chrome", "chrome")
        found = next(filter(None, map(shutil.which, names)), playwright.chromium.executable_path)
        if not Path(found).exists():
            pytest.skip(f"not run: no browser: none of {', '.join(names)} is installed here")
        sandbox = [] if os.geteuid() else ["--no-sandbox"]  # which Chromium refuses to root
        browser = playwright.chromium.launch(executable_path=found, args=sandbox)
        yield browser
        browser.close()


@dataclass
class Visit:
    """A look at a report in a browser: what went wrong, and the open page."""

    page: object
    faults: list[str] = field(default_factory=list)

    def wait_for_faults(self) -> list[str]:
        """All faults until now. They arrive some time after they happened, so one more is made and waited for."""
        with self.page.expect_event("pageerror", lambda error: str(error) == "the last"):
            self.page.evaluate("setTimeout(() => { throw 'the last' })")
        return [fault for fault in self.faults if fault != "the last"]

    def look_at_images(self) -> None:
        """Note it as a fault if an image in view has no size of its own."""
        images = self.page.locator("#app > div > div img")
        images.first.wait_for()
        for image in images.all():
            if not image.evaluate(NATURAL_SIZE):
                self.faults.append("an image shows nothing")


@pytest.fixture
def visit(chromium):
    context = chromium.new_context(viewport=WINDOW)
    context.set_offline(True)
    page = context.new_page()
    page.set_default_timeout(5000)
    seen = Visit(page)

    def note(route):
        if route.request.url.startswith("file:"):
            return route.continue_()
        seen.faults.append(f"asks for {route.request.url}")
        return route.abort()

    context.route("**/*", note)
    page.on("console", lambda line: line.type == "error" and seen.faults.append(line.text))
    page.on("pageerror", lambda error: seen.faults.append(str(error)))
    yield seen
    context.close()


def caption(path: str) -> str:
    """A caption's source as one line of text."""
    return " ".join((ROOT / "workflow/report" / f"{path}.rst").read_text().split())


def text_of(html: str) -> str:
    return " ".join(re.sub("<[^>]*>", "", html).split())


def test_the_report_is_one_file_with_captions_and_provenance(run):
    page = Page(run.html.read_text())
    first, results = page.value("workflow-desc"), page.value("results")
    assert page.loads == []
    assert Page(first).loads == []
    model, corpus = run.workflow.report("model"), run.workflow.report("corpus/corpus")
    for said in (model["weights_digest"], model["tokenizer_digest"], corpus["text_digest"], model["source"]):
        assert said in first
    assert run.workflow.report("anchor")["key"] in first
    assert "system-message" not in first
    assert "failed" not in text_of(first)
    shown = {Path(path).name: result for path, result in results.items()}
    assert {"anchor.json", "anchor_batches.svg", "memory.csv", "memory.json", "memory.svg", "verify.json"} <= set(shown)
    for name, result in shown.items():
        assert text_of(result["caption"]) == caption(Path(name).stem), name
        # One label a result: of two, Snakemake's page makes a switch, and breaks where a pair is missing.
        assert list(result["labels"]) == ["result"]
    assert sorted(page.value("categories"))[:2] == ["1 Anchoring", "2 Memory"]


def test_a_load_in_the_file_would_be_found(run):
    for planted in (
        '<img src="https://planted.example/x.png">',
        '<link rel="stylesheet" href="//planted.example/x.css">',
        "<style>@import 'x.css'; p {background: url(https://planted.example)}</style>",
        PLANTED["a load"][1],
    ):
        assert Page(run.html.read_text().replace("</head>", planted + "</head>", 1)).loads


def test_in_a_browser_without_network(run, visit):
    visit.page.goto(run.html.as_uri())
    for digest in ("weights_digest", "tokenizer_digest"):
        box = visit.page.get_by_text(run.workflow.report("model")[digest]).bounding_box()
        assert 0 <= box["y"] < box["y"] + box["height"] <= WINDOW["height"]  # seen without scrolling
        assert 0 <= box["x"] < box["x"] + box["width"] <= WINDOW["width"]
    visit.look_at_images()
    page = Page(run.html.read_text())
    results = page.value("results")
    for category, kinds in sorted(page.value("categories").items()):
        visit.page.get_by_text(category, exact=True).click()
        rows = visit.page.locator("nav tbody tr")
        paths = [path for paths in kinds.values() for path in paths]
        assert rows.count() == len(paths)
        for path in paths:
            row = rows.filter(has_text=results[path]["labels"]["result"])
            see, tell = row.locator("a").all()
            if path.endswith(".svg"):
                see.click()
                visit.look_at_images()
            else:
                assert see.get_attribute("download") == Path(path).name
            tell.click()
            assert caption(Path(path).stem) in " ".join(visit.page.locator("nav").first.inner_text().split())
            visit.page.locator("nav nav").get_by_text(category).click()
        visit.page.locator("nav nav a").first.click()
    assert visit.wait_for_faults() == []


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_fault_would_be_found(run, visit, tmp_path, planted):
    (tmp_path / "report.html").write_text(run.html.read_text().replace(*PLANTED[planted], 1))
    visit.page.goto((tmp_path / "report.html").as_uri())
    assert any("planted" in fault for fault in visit.wait_for_faults())


def test_a_broken_figure_would_be_found(run, visit, tmp_path):
    broken = re.sub(r"data:image/svg\+xml;base64,\w{9}", "data:image/svg+xml;base64,AAAAAAAAA", run.html.read_text())
    (tmp_path / "report.html").write_text(broken)
    visit.page.goto((tmp_path / "report.html").as_uri())
    visit.look_at_images()
    assert set(visit.wait_for_faults()) == {"an image shows nothing"}


def plant_fault(workflow, check: str) -> str:
    """Let a check's report say that it failed."""
    fault = f"planted in {check}: row 7 differs"
    path = workflow.results / f"{check}.json"
    path.write_text(json.dumps(workflow.report(check) | {"ok": False, "faults": [fault], "n_faults": 1}))
    return fault


def test_make_report_tells_of_a_failed_check_and_ends_with_the_status_of_the_run(finished_workflow, tmp_path):
    workflow = finished_workflow.copy(tmp_path)
    (workflow.results / "report.html").write_text("that of a run before")
    fault = plant_fault(workflow, "anchor")
    done = make_report(workflow)
    assert done.returncode != 0
    assert fault in done.stdout + done.stderr  # the gate's error
    first = text_of(Page((workflow.results / "report.html").read_text()).value("workflow-desc"))
    assert fault in first
    assert "failed" in first


def test_make_report_of_a_cache_that_is_not_whole_writes_none_and_says_why(finished_workflow, tmp_path):
    workflow = finished_workflow.copy(tmp_path)
    (workflow.results / "report.html").write_text("that of a run before")
    fault = plant_fault(workflow, "verify")
    done = make_report(workflow)
    assert done.returncode != 0
    assert fault in done.stdout + done.stderr
    assert "no report: the run failed before its first page" in done.stderr
    assert not (workflow.results / "report.html").exists()
