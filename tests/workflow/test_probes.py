"""The probes through the real workflow: results, what an edit or a seed makes anew, a killed Adam, the gate.

Goal: what the documents promise of `probe/`, `sweep.csv` and `controls.json` holds. Method: the tiny configuration in
a folder of its own, with a copy of the library where that is edited. Oracle: files' times and bytes, and bytes of a run
left alone.
"""

from __future__ import annotations

import json
import re
import shutil

import pandas as pd
import pytest

from anchorage.probe.sweep import COLUMNS
from workflows import ROOT, kill_group, wait_until

TASKS = ["duplicate-token", "previous-token", "position"]
SITES = ["embed", "attn.0", "mlp.0", "block.0", "block.1", "block.2"]
EMBED = [f"results/tiny/probe/{task}/embed.json" for task in TASKS]


@pytest.fixture
def workflow(finished_workflow, tmp_path):
    return finished_workflow.copy(tmp_path)


def probes(workflow) -> dict[str, int]:
    """When each probe's file was written, by task and site."""
    folder = workflow.results / "probe"
    return {str(path.relative_to(folder).with_suffix("")): path.stat().st_mtime_ns for path in folder.rglob("*.json")}


def copy_library(workflow, monkeypatch):
    """A copy of the library that the workflow uses from now on."""
    library = workflow.root / "src"
    shutil.copytree(ROOT / "src", library, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    monkeypatch.setenv("PYTHONPATH", str(library))
    return library


def test_every_probe_is_there_and_the_table_agrees_with_them(workflow):
    assert probes(workflow).keys() == {f"{task}/{site}" for task in TASKS for site in SITES}
    table = pd.read_csv(workflow.results / "sweep.csv")
    assert list(table) == COLUMNS
    assert list(table["site"]) == SITES * 3
    controls, key = workflow.report("controls"), workflow.report("verify")["key"]
    assert controls["ok"]
    assert {controls["key"], *table["key"]} == {key}
    for line in table.itertuples():
        probe = workflow.report(f"probe/{line.task}/{line.site}")
        by_row = probe["by_test_row"]
        assert (probe["task"], probe["site"], probe["key"]) == (line.task, line.site, key)
        assert line.accuracy == pytest.approx(sum(by_row["correct"]) / sum(by_row["n"]))
        assert line.low <= line.accuracy <= line.high
        assert line.shuffled_low <= line.shuffled_accuracy <= line.shuffled_high
        assert line.n_test == sum(by_row["n"])
        assert pd.isna(line.auc) == (line.task != "duplicate-token")
        assert pd.isna(line.macro_f1) == (line.task == "duplicate-token")
    matched = controls["tasks"]["duplicate-token"]
    assert matched["position_only"] == matched["token_only"] == {"train": 0.5, "test": 0.5}
    assert "rows would give" in matched["warnings"][0]  # 53 rows are few
    assert "rows would give" in workflow.log("control_probes")
    assert "bytes from disk" in workflow.log("fit_probes_duplicate-token_0")
    assert (workflow.results / "gates/controls.ok").read_text().strip() == key


@pytest.mark.parametrize(
    ("edited", "rules"),
    [
        (["outliers"], {"measure_outliers", "plot_outliers", "describe_run"}),
        (["probe/sweep"], {"control_probes", "gate", "tabulate_sweep", "plot_sweep", "describe_run"}),
        (
            ["overview", "figures/style"],
            {"describe_run", "plot_anchor", "plot_memory", "plot_outliers", "plot_sweep"},
        ),
    ],
)
def test_an_edit_plans_what_it_decides_and_nothing_of_the_capture(workflow, monkeypatch, edited, rules):
    library = copy_library(workflow, monkeypatch)
    for module in edited:
        with open(library / f"anchorage/{module}.py", "a") as file:
            file.write("# an edit\n")
    planned = re.findall(r"^(\w+) +\d+$", workflow.run("-n"), re.MULTILINE)
    assert set(planned) - {"all", "total"} == rules


def test_an_edited_task_makes_its_own_probes_anew_and_no_others(workflow, monkeypatch):
    library = copy_library(workflow, monkeypatch)
    before, shards = probes(workflow), workflow.shards()
    assert "Nothing to be done" in workflow.run("--", *EMBED)
    with open(library / "anchorage/probe/tasks/position.py", "a") as file:
        file.write("# an edit\n")
    workflow.run("--", *EMBED)
    changed = {name for name, time in probes(workflow).items() if time != before[name]}
    assert changed == {f"position/{site}" for site in SITES}
    assert workflow.shards() == shards


def test_another_seed_makes_all_probes_anew_and_captures_nothing(workflow):
    workflow.config["seed"] = 1
    planned = workflow.run("-n")
    assert re.search(r"^fit_probes_0 +3$", planned, re.MULTILINE)
    assert "capture" not in planned
    assert "build_corpus" not in planned
    before = {task: workflow.report(f"probe/{task}/embed") for task in TASKS}
    workflow.run("--", EMBED[0])
    assert workflow.report("probe/duplicate-token/embed") != before["duplicate-token"]


def test_the_gate_fails_on_controls_off_chance(workflow):
    controls = workflow.report("controls")
    fault = "task duplicate-token: a probe that sees position_only alone scores 0.53 on test tokens, not 1/2"
    (workflow.results / "controls.json").write_text(json.dumps(controls | {"ok": False, "faults": [fault]}))
    output = workflow.run("--", "results/tiny/gates/controls.ok", ok=False)
    assert fault in output
    assert "its accuracies mean nothing" in output
    assert (workflow.results / "controls.json").exists()


def test_no_probe_section_no_probes(workflow):
    workflow.config["probe"] = None
    planned = workflow.run("-n")
    assert "fit_probes" not in planned
    assert "controls" not in planned


def test_adam_killed_and_run_again_ends_with_the_same_bytes(finished_workflow, tmp_path):
    target, found = "results/tiny/probe/position/block.1.json", {}
    for name in ("left alone", "killed"):
        workflow = finished_workflow.copy(tmp_path / name)
        workflow.config["probe"] = {"tier": "residual", "tasks": ["position"], "solver": "adam"}
        if name == "killed":
            process = workflow.start("--", target)
            saved = workflow.results / "checkpoints/position/block.1"
            assert wait_until(lambda saved=saved: any(saved.glob("*/step-*.json")), process)
            kill_group(process)
            # Snakemake removed the result of the run before as the job began: nothing of it is left to be compared.
            assert not (workflow.root / target).exists()
        workflow.run("--", target)
        found[name] = (workflow.root / target).read_bytes()
    assert found["killed"] == found["left alone"]
    assert json.loads(found["killed"])["solver"] == "adam"
    assert "resum" in workflow.log("fit_probes_position_0")
