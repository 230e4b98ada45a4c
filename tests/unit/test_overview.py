"""The report's first page tells what the results say, whatever characters they hold.

Goal: every value reaches the reader as it stands in its file, and no result of another capture is told of. Method:
results written by hand, the page taken through Jinja and docutils as Snakemake does. Oracle: the text of the HTML.
"""

from __future__ import annotations

import csv
import json
from html.parser import HTMLParser

import jinja2
import pytest
from docutils.core import publish_parts

from anchorage.errors import AnchorageError
from anchorage.overview import describe_run
from anchorage.rst import plain
from anchorage.store.manifest import FileRecord, ShardRecord, read_manifest, write_manifest
from loading_tables import loading_table

HOSTILE = "- *a* `b`_ |c| {{ 1 + 1 }} {% d %} {# e #} <script>f</script> \\g h_ :i:`j` https://k.org .. l:: *"
ENVIRONMENTS = [
    {"device": "cpu", "device_name": "chip {x}", "cpu_capability": "AVX2", "system": "Linux", "threads": 2},
    {"device": "cuda:0", "device_name": "card_1", "system": "Linux", "threads": None},
]
IDENTITY = {"dtype": "float32", "attention": "sdpa", "batch_rows": 4, "storage_dtype": "float16"}
SWEEP = [  # task, site, accuracy, shuffled
    ("copy_", "block.0", 0.75, 0.52),
    ("copy_", "embed", 0.5, 0.48),
    ("copy_", "block.1", 0.625, 0.5),
    ("place", "embed", 0.9, 0.11),
    ("place", "block.0", 0.25, 0.09),
]
PROBED = ("sweep", "controls", "sweep_figure")


FORECAST = {"rows": 50_000, "hours": 2.5, "hours_low": 2.25, "hours_high": 3, "gib": 11.27, "one_layer_gib": 4.58}


class Text(HTMLParser):
    """Text of a page, white space made one, and the sources of its images."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.images: list[str] = []
        self.feed(page)
        self.text = " ".join("".join(self.parts).split())

    def handle_data(self, data):
        self.parts.append(data)

    def handle_starttag(self, tag, attrs):
        if tag == "img":
            self.images.append(dict(attrs)["src"])


@pytest.fixture
def files(tmp_path):
    shards = [
        ShardRecord(i, (8 * i, 8 * i + 8), environment, {"all": FileRecord(f"all/{i}", 9, "0" * 32, 8, "0" * 32)})
        for i, environment in enumerate([*ENVIRONMENTS, ENVIRONMENTS[0]])
    ]
    write_manifest(tmp_path / "manifest", IDENTITY, shards)
    key = read_manifest(tmp_path / "manifest").key
    exact = {"n_rows": 3, "n_sites": 2, "n_comparisons": 1234, "mismatched": 0, "max_abs_diff": 0.0}
    model = {"source": HOSTILE, "commit": None, "weights_digest": "wd", "tokenizer_digest": "td"}
    architecture = {"class": "Gpt_Model", "n_layers": 2, "width": 6}
    control = {"matched": False, "warnings": [f"told by {HOSTILE}"]}
    contents = {
        "model": model | {"architecture": architecture, "versions": {"torch": "2.1_x"}},
        "corpus": {"source": "a_/b", "name": None, "revision": "r1", "split": "train", "text_digest": "xd"}
        | {"rows": 24, "n_tokens": 96},
        "verify": {"key": key, "ok": True, "depth": "full", "n_shards": 3, "n_files": 3, "n_bytes": 3 << 19}
        | {"missing": [], "corrupt": [], "orphans": [], "faults": []},
        "anchor": {"key": key, "ok": True, "exact": exact, "demanded": "bit-equal for 3 rows", "faults": []},
        "controls": {"key": key, "ok": True, "faults": [], "tasks": {"copy_": control}},
        "leak": {"key": key, "ok": True, "leak": False, "reason": "memory_x grows by 0", "faults": []}
        | {"memory_log_share": 0.0042},
        "extrapolation": {"key": key, "n_shards": 3, "n_shards_used": 1, "forecast": FORECAST}
        | {"active_s": {"relative_error": 0.0321}, "bytes": {"relative_error": -0.0004}},
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(json.dumps(content))
    write_table(tmp_path / "memory", [{"key": key, "peak_mib": p, "tokens_per_s": p / 10} for p in (100, 400, 300)])
    outliers = [("embed", 2.5, 4, 0), ("block.0", 27344.4, 447, 2), ("block.1", 300, 1, 1)]
    names = ("site", "max_abs", "max_dimension", "n_outliers")
    write_table(tmp_path / "outliers", [{"key": key} | dict(zip(names, row, strict=True)) for row in outliers])
    rows = [
        {"key": key, "task": task, "site": site, "site_index": ["embed", "block.0", "block.1"].index(site)}
        | {"accuracy": accuracy, "low": accuracy - 0.125, "high": accuracy + 0.0625, "shuffled_accuracy": shuffled}
        | {"chance": 0.5, "position_only_accuracy": 0.51, "token_only_accuracy": 0.53}
        | {"warning": "few rows" if (task, site) == ("place", "embed") else ""}
        for task, site, accuracy, shuffled in SWEEP
    ]
    write_table(tmp_path / "sweep", rows)
    for name in ("anchor_figure", "memory_figure", "sweep_figure"):
        (tmp_path / f"{name}.svg").write_text("<svg/>" * 3000)
    named = {name: tmp_path / name for name in ("manifest", "memory", "outliers", "sweep", *contents)}
    return named | {name: tmp_path / f"{name}.svg" for name in ("anchor_figure", "memory_figure", "sweep_figure")}


def write_table(path, rows):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def show(source: str) -> Text:
    """As Snakemake 9.27 renders the text of `report:`."""
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    page = publish_parts(template.render(), writer="html", settings_overrides={"report_level": 2})["html_body"]
    assert "system-message" not in page, page
    return Text(page)


def change(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_page_tells_findings_and_provenance(files):
    page = show(describe_run("a_run", files))
    for said in (
        "Anchorage: run a_run",
        "24 rows, 96 tokens through Gpt_Model (2 layers, width 6)",
        "1.50 MiB in 3 shards",
        "3 rows computed again at 2 sites: 1,234 comparisons, 0 mismatched",
        "Memory no leak Highest resident size 400 MiB in 3 shards; median 30 tokens a second. Memory_x grows by 0. "
        "Reading and logging memory took 0.42 % of the capture's time.",
        "Best accuracy on held-out rows: copy_ 0.750 at block.0 (chance 0.500); place 0.900 at embed (chance 0.500). "
        "Warned of (sweep.csv): place.",
        "predicted from the first 1 of 3 shards: off by +3.2 %; bytes: off by -0.04 %.",
        "50,000 rows would take 2.5 h (2.2 to 3.0) and 11.3 GiB, one layer only 4.6 GiB.",
        "3 files of 1,572,864 bytes, depth full: 0 missing, 0 corrupt, 0 orphans.",
        "Weights digest wd",
        "Tokenizer digest td",
        "Text digest xd",
        f"Capture key {read_manifest(files['manifest']).key}",
        "Corpus a_/b, r1, train",
        "cpu, chip {x}, AVX2, Linux, threads 2; cuda:0, card_1, Linux",
        "torch 2.1_x",
        "copy_ 0.750 at block.0 (chance 0.500); place 0.900 at embed (chance 0.500)",
        "copy_ block.0 0.750 (0.625 to 0.812) 0.500 0.625 (block.1) 0.480 to 0.520 0.500 0.510 0.530",
        "place embed 0.900 (0.775 to 0.963) 0.900 0.250 (block.0) 0.090 to 0.110",
        "In 2 of 3 sites; the largest value is 27,344.4, in dimension 447 of block.0.",
        "0 of 1 tasks matched; copy_: told by",
    ):
        assert said in page.text, said
    assert "failed" not in page.text
    assert len(page.images) == 3
    assert all(image.startswith("data:image/svg+xml;base64,") for image in page.images)


def test_every_value_is_shown_as_it_stands(files):
    change(files["anchor"], ok=False, faults=[HOSTILE, "second"])
    change(files["leak"], leak=True, ok=False, faults=["it grows"])
    page = show(describe_run("run", files))
    assert "Memory leak Highest" in page.text
    assert "it grows" in page.text
    assert page.text.count(HOSTILE) == 3  # the model's source, a warning, a fault
    assert "failed" in page.text


@pytest.mark.parametrize("value", ["{{ 1 + 1 }}", "{% d %}", "{# e #}", "*a* b", "h_ x", "|c| d"])
def test_an_unescaped_value_would_be_found(value):
    assert value in show(plain(value).replace("{", "{{ '{' }}")).text
    with pytest.raises((AssertionError, jinja2.TemplateError)):
        assert value in show(value).text


def test_the_loading_lab_has_a_line(files, tmp_path):
    assert "Loading" not in show(describe_run("run", files)).text
    key = read_manifest(files["manifest"]).key
    loading_table(key=key).to_csv(tmp_path / "loading.csv", index=False)
    page = show(describe_run("run", files | {"loading": tmp_path / "loading.csv"}))
    assert (
        "torch.load of the weights takes 1.01 (1.00 to 1.02) s cold and 0.505 (0.500 to 0.510) s warm, 2.00 times as "
        "long; one site of a shard by our reader, cold: 16.0 times as fast as torch.load of all; one site of a shard "
    ) in page.text
    loading_table(["one-tensor"], key=key).to_csv(tmp_path / "loading.csv", index=False)
    assert "See loading.md." in show(describe_run("run", files | {"loading": tmp_path / "loading.csv"})).text
    loading_table().to_csv(tmp_path / "loading.csv", index=False)
    with pytest.raises(AnchorageError, match=r"loading.csv belongs to capture key k"):
        describe_run("run", files | {"loading": tmp_path / "loading.csv"})


def test_without_probes_the_page_tells_of_none(files):
    page = show(describe_run("run", {name: path for name, path in files.items() if name not in PROBED}))
    assert "sweep" not in page.text
    assert "controls" not in page.text
    assert len(page.images) == 2


@pytest.mark.parametrize("name", ["verify", "anchor", "controls", "memory", "outliers", "sweep"])
def test_a_result_of_another_capture_is_refused(files, name):
    text = files[name].read_text()
    files[name].write_text(text.replace(read_manifest(files["manifest"]).key, "f" * 32, 1))
    with pytest.raises(AnchorageError, match=f"{name} belongs to capture key f"):
        describe_run("run", files)
