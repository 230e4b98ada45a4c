"""The workflow from end to end: results, resuming, changed configurations, damage.

Goal: what the documents promise of the plain command and of `make verify` holds. Method: the tiny configuration in a
folder of its own. Oracle: bytes of a run left alone, and the documented fields.
"""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys

import pytest

from stores import flip_bit, truncate
from workflows import ROOT, Workflow

VERIFY = ("--forcerun", "verify_cache", "--", "verify")


@pytest.fixture
def workflow(finished_workflow, tmp_path):
    return finished_workflow.copy(tmp_path)


def captured(workflow, part: int) -> str:
    """The last "reused n, captured m shards" of a part's log."""
    return re.findall(r"reused \d+, captured \d+ shards", workflow.log(f"capture_part_{part}"))[-1]


def field_names(report: dict) -> set[str]:
    """Names of all fields, inner ones too; names of tiers are no fields."""
    inner = [report[name] for name in ("active_s", "bytes", "run", "forecast", "pilot") if name in report]
    inner += report.get("disks", []) + list(report.get("tiers", {}).values())
    return set(report).union(*map(field_names, inner))


def undocumented(report: dict) -> set[str]:
    text = (ROOT / "docs/results.md").read_text()
    return {name for name in field_names(report) if f"`{name}`" not in text}


def test_every_result_is_there_with_its_fields(workflow):
    assert {"source", "commit", "weights_digest", "tokenizer_digest", "architecture", "versions"} <= set(
        workflow.report("model")
    )
    corpus = workflow.report("corpus/corpus")
    assert {"rows", "seq_len", "n_tokens", "layout", "source", "text_digest"} <= set(corpus)
    assert corpus["n_tokens"] == 86 * 16
    verify, anchor = workflow.report("verify"), workflow.report("anchor")
    assert {"key", "ok", "depth", "n_shards", "n_bytes", "missing", "corrupt", "orphans"} <= set(verify)
    assert (verify["ok"], verify["depth"], verify["n_shards"]) == (True, "full", 11)
    assert verify["n_bytes"] == sum(map(len, workflow.shards().values()))
    assert anchor["exact"]["n_rows"] >= 34
    assert anchor["exact"]["mismatched"] == 0
    head, *lines = (json.loads(line) for line in workflow.manifest().splitlines())
    assert {"format", "key", "identity"} <= set(head)
    assert all({"shard", "rows", "environment", "tiers"} <= set(line) for line in lines)
    assert all({"file", "bytes", "xxh3_128"} <= set(file) for line in lines for file in line["tiers"].values())
    with open(workflow.results / "memory.csv") as file:
        memory = list(csv.DictReader(file))
    assert [int(row["shard"]) for row in memory] == list(range(11))
    assert {row["part"] for row in memory} == {"0", "1"}
    extrapolation = workflow.report("extrapolation")
    assert undocumented(extrapolation) == set()
    assert (extrapolation["n_shards_used"], extrapolation["n_shards_logged"]) == (3, 11)
    assert extrapolation["bytes"]["measured"] == verify["n_bytes"]
    assert abs(extrapolation["bytes"]["relative_error"]) < 0.01
    assert extrapolation["active_s"]["measured"] > sum(float(row["forward_s"]) for row in memory)
    assert extrapolation["forecast"]["hours_low"] < extrapolation["forecast"]["hours_high"]
    with open(workflow.results / "memory_batches.csv") as file:
        batches = list(csv.DictReader(file))
    assert [int(row["rows_total"]) for row in batches] == [*range(4, 85, 4), 86]
    leak = workflow.report("memory")
    assert (leak["ok"], leak["leak"], leak["n_warmup"]) == (True, None, 22)  # too short to tell
    assert (workflow.results / "memory.svg").read_text().startswith("<?xml")
    with open(workflow.results / "anchor_batches.csv") as file:
        assert [int(row["batch_rows"]) for row in csv.DictReader(file)] == [1, 2, 4, 8, 16, 32]
    assert {report["key"] for report in (verify, anchor, extrapolation, leak, *memory, *batches)} == {head["key"]}
    assert (workflow.results / "anchor_batches.svg").read_text().startswith("<?xml")
    assert "Nothing to be done" in workflow.run()


def test_the_plan_is_made_before_anything_is_captured(corpus_workflow, tmp_path):
    workflow = corpus_workflow.copy(tmp_path)
    command = ("--forcerun", "forecast_run", "--", "plan")
    assert " ".join(command) in (ROOT / "Makefile").read_text()
    output = workflow.run(*command)
    for said in ("residual, GiB", "86 rows: fits", "50,000 rows: fits"):
        assert said in output
    assert sorted(path.name for path in workflow.results.iterdir()) == ["corpus", "logs", "model.json", "plan.json"]
    plan = workflow.report("plan")
    assert undocumented(plan) == set()
    assert plan["run"]["n_files"] == 2 * 11 + 7


def test_changed_sites_and_back_captures_nothing(workflow):
    shards = workflow.shards()
    tiers = workflow.config["capture"]["tiers"]
    tiers["residual"]["sites"] = ["block.0"]
    workflow.run("--", "cache")
    assert "reused 0, captured 6 shards" in workflow.log("capture_part_0")
    assert "1 earlier configuration(s) hold" in workflow.log("capture_part_0")
    assert workflow.shards().keys() == shards.keys()
    tiers["residual"]["sites"] = ["block.1"]
    workflow.run("--", "cache")
    assert [captured(workflow, part) for part in (0, 1)] == [
        "reused 6, captured 0 shards",
        "reused 5, captured 0 shards",
    ]
    assert workflow.shards() == shards
    output = workflow.run("--", "prune")
    assert output.count("removed results/tiny/staging/") == 1
    assert len(list(workflow.results.glob("staging/*"))) == 1


def test_a_failed_capture_leaves_no_result_of_the_old_key(workflow):
    workflow.config["capture"]["tiers"]["residual"]["sites"] = ["model.layers.1.mlp.up_prj"]
    output = workflow.run(ok=False)
    assert "up_proj" in output  # the near name, from the failed job's log
    for target in ("results/tiny/verify.json", "results/tiny/memory.csv"):
        assert "Nothing to be done" not in workflow.run("--", target, ok=False)
    workflow.config["capture"]["tiers"]["residual"]["sites"] = ["block.1"]
    workflow.run("--", "cache")
    assert [captured(workflow, part) for part in (0, 1)] == [
        "reused 6, captured 0 shards",
        "reused 5, captured 0 shards",
    ]


def test_other_parts_and_rows_reuse_what_they_can(workflow):
    shards = workflow.shards()
    workflow.config["capture"]["parts"] = 3
    workflow.run("--", "cache", "verify")
    assert [captured(workflow, part) for part in range(3)] == [f"reused {n}, captured 0 shards" for n in (4, 4, 3)]
    assert sorted(workflow.shards().values()) == sorted(shards.values())
    workflow.config["capture"]["parts"] = 1
    workflow.config["corpus"]["rows"] = 100
    workflow.run("--", "cache", "verify")
    # Rows 80 to 85 were a short shard of a short batch; it and the two after it are made anew.
    assert captured(workflow, 0) == "reused 10, captured 3 shards"
    assert workflow.report("verify")["orphans"] == []


def test_wreckage_in_staging_is_repaired_and_named(workflow):
    shards, manifest = workflow.shards(), workflow.manifest()
    for path in workflow.results.glob("cache/**/*.*"):
        path.unlink()  # as if killed before publication
    staging = next(workflow.results.glob("staging/*"))
    (staging / "few.shard-000000.safetensors.tmp-77-00112233").write_bytes(b"torn")
    truncate(staging / "pooled.shard-000001.safetensors", 5)
    flip_bit(staging / "residual.shard-000002.safetensors", 2000)
    (staging / "few.shard-000003.safetensors").unlink()
    truncate(staging / "journal-part-1.jsonl", 7)
    workflow.run("--", "cache")
    logs = workflow.log("capture_part_0") + workflow.log("capture_part_1")
    for said in (
        "removed results/tiny/staging/" + staging.name + "/few.shard-000000.safetensors.tmp-77-00112233",
        "shard 1 is not accepted",
        "shard 2 is not accepted",
        "shard 3 is not accepted",
        "shard 10 is not accepted",
    ):
        assert said in logs
    assert [captured(workflow, part) for part in (0, 1)] == [
        "reused 3, captured 3 shards",
        "reused 4, captured 1 shards",
    ]
    assert workflow.shards() == shards
    assert workflow.manifest() == manifest


def test_damage_after_publication_is_named_and_repaired(workflow):
    shards, manifest = workflow.shards(), workflow.manifest()
    cache = workflow.results / "cache"
    flip_bit(cache / "residual/part-0-shard-1.safetensors", 2000)
    truncate(cache / "pooled/part-0-shard-3.safetensors")
    (cache / "few/part-0-shard-5.safetensors").unlink()
    (cache / "few/part-1-shard-9.safetensors").write_bytes(b"orphan")
    assert "Nothing to be done" in workflow.run("--", "verify")  # control: times do not tell
    output = workflow.run(*VERIFY, ok=False)
    report = workflow.report("verify")
    assert report["corrupt"] == ["pooled/part-0-shard-3.safetensors", "residual/part-0-shard-1.safetensors"]
    assert report["missing"] == ["few/part-0-shard-5.safetensors"]
    assert report["orphans"] == ["few/part-1-shard-9.safetensors"]
    for name in (*report["corrupt"], *report["missing"], *report["orphans"]):
        assert name in output
    workflow.run("--", "cache", "verify")
    assert captured(workflow, 0) == "reused 3, captured 3 shards"
    assert "capture_part_1" not in workflow.run("--", "verify")
    assert "Nothing to be done" in workflow.run("--", "cache", "verify")
    assert workflow.shards() == shards
    assert workflow.manifest() == manifest

    truncate(cache / "manifest.jsonl", 30)
    assert "manifest.jsonl" in workflow.run(*VERIFY, ok=False)
    workflow.run("--", "cache", "verify")
    assert "Nothing to be done" in workflow.run("--", "cache", "verify")
    assert workflow.manifest() == manifest


def test_the_hub_configurations_pass_a_dry_run_offline(fresh_workflow, tmp_path):
    workflow = fresh_workflow.copy(tmp_path)
    for name in ("gpt2-wikitext", "tiered-50k", "config"):
        command = [sys.executable, "-m", "snakemake", "-n", "--cores", "4", "--configfile", f"config/{name}.yaml"]
        done = subprocess.run(command, cwd=workflow.root, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "capture_part" in done.stdout + done.stderr


def test_the_gpt2_configuration_on_a_local_model_and_parquet(tmp_path):
    import pandas as pd
    import yaml

    workflow = Workflow(tmp_path, kind="gpt2")
    text = pd.read_json(tmp_path / "resources/corpora/tiny.jsonl", lines=True)
    text.to_parquet(tmp_path / "wikitext.parquet")
    local = {"model": workflow.config["model"]["source"], "corpus": "wikitext.parquet"}
    workflow.config = yaml.safe_load((ROOT / "config/gpt2-wikitext.yaml").read_text())
    workflow.config["model"] |= {"source": local["model"]}
    workflow.config["corpus"] |= {"source": local["corpus"], "name": None, "rows": 70}
    sweep = workflow.config["capture"]["tiers"]["sweep"]
    sweep["sites"] = sweep["sites"][:6]  # all twelve blocks are spelled out there, the tiny model has three
    workflow.config |= {"probe": None, "loading": None}  # they are tried elsewhere
    workflow.run()
    anchor = workflow.report("anchor")
    assert anchor["ok"]
    assert anchor["exact"]["n_sites"] == 6  # embed, attn.0, mlp.0 and three blocks
    assert workflow.report("verify")["n_shards"] == 1


def test_without_the_package_the_snakefile_says_what_to_do(fresh_workflow, tmp_path):
    workflow = fresh_workflow.copy(tmp_path)
    blocked = "import sys; sys.modules['anchorage'] = None; from snakemake.cli import main; main(['--cores', '1'])"
    done = subprocess.run(
        [sys.executable, "-c", blocked], cwd=workflow.root, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    said = [line for line in (done.stdout + done.stderr).splitlines() if "anchorage" in line]
    assert len(said) == 1
    assert "make run" in said[0]


def test_the_readme_reads_what_was_stored(workflow, monkeypatch):
    text = (ROOT / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    # The tiny run has three blocks, 86 rows of 16 tokens and its own name.
    for written, tiny in {"smollm2-wikipedia": "tiny", "block.8": "block.1", "block.3": "block.2", "100": "50"}.items():
        assert written in code
        code = code.replace(written, tiny)
    monkeypatch.chdir(workflow.root)
    names: dict = {}
    exec(code, names)
    assert names["x"].shape == (50, 16, 16)
    assert names["pooled"].shape == (86, 16)
    assert names["ids"].shape == (50, 16)
    assert names["cache"].sites[0] == "embed"


COLD_READ = """
import os, pathlib
import anchorage
cache = anchorage.open_cache("results/tiny/cache")
rows = list(range(0, 48, 3))
for path in pathlib.Path("results/tiny/cache").rglob("*.safetensors"):
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
read = lambda: int(open("/proc/self/io").read().split("read_bytes: ")[1].split()[0])
cache.read("block.1", rows[:1], tier="few")  # code and first pages
before = read()
value = cache.read("block.1", rows[1:], tier="few")
print(read() - before, value.numel() * value.element_size(), len(rows) - 1)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="not run: /proc/self/io is Linux's")
def test_a_cold_read_takes_from_disk_what_it_returns(workflow):
    # Within a page a row, and the header's pages once a shard; by the kernel's own count of bytes read.
    command = [sys.executable, "-c", COLD_READ]
    done = subprocess.run(command, cwd=workflow.root, capture_output=True, text=True, check=True)
    from_disk, returned, n_rows = map(int, done.stdout.split())
    if not from_disk:
        pytest.skip("not run: this filesystem lies in memory, nothing on it is ever cold")
    page, shards = 4096, 6
    assert from_disk <= returned + n_rows * page + shards * 3 * page
