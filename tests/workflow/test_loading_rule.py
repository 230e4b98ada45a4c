"""The loading lab through the real workflow.

Goal: the target's results are all there, every cold line is proved cold and every warm one warm, the big files are gone
afterwards, a second run does nothing. Method: the tiny run, with a repeat of two methods. Oracle: the tables' columns
against the sizes of files, and the folder as it was left. (That measurements run alone: test_loading_alone.py.)
"""

from __future__ import annotations

import json
from mmap import PAGESIZE

import pandas as pd
import pytest

from anchorage.loading.measuring import COLUMNS
from workflows import ROOT

LAB = {"big_mib": 8, "repeats": 1, "methods": ["torch.load", "ours"], "drop_caches": False}
TABLES = ("loading", "workers", "pressure", "device_copy", "accident", "refusals")


@pytest.fixture(scope="module")
def measured(finished_workflow, tmp_path_factory):
    """The tiny run with its loading lab run. Copy it, do not run it."""
    workflow = finished_workflow.copy(tmp_path_factory.mktemp("loading"))
    workflow.config["loading"] = LAB
    workflow.run("--", "loading")
    return workflow


def table(workflow, name) -> pd.DataFrame:
    return pd.read_csv(workflow.results / f"{name}.csv")


def test_every_result_is_there_with_its_columns_and_key(measured):
    key = json.loads(measured.manifest().splitlines()[0])["key"]
    documented = (ROOT / "docs/results.md").read_text()
    for name in TABLES:
        found = table(measured, name)
        assert len(found), name
        assert set(found["key"]) == {key}, name
        assert all(f"`{column}`" in documented for column in found), name
    assert list(table(measured, "loading")) == list(COLUMNS)
    assert (measured.results / "loading.svg").read_text().startswith("<?xml")
    assert (measured.results / "loading.png").read_bytes().startswith(b"\x89PNG")
    advice = (measured.results / "loading.md").read_text()
    assert ("Cold means guest-cold" in advice) is (cold_kinds(measured) == {"guest-cold"})
    assert "Cold: no page of any file in the page cache before: met" in advice
    assert "Warm: nothing read from the disk: met" in advice


def cold_kinds(workflow) -> set[str]:
    return set(table(workflow, "loading")["cold_kind"].dropna())


def test_cold_is_cold_and_warm_is_warm(measured):
    lines = table(measured, "loading")
    assert set(lines["status"]) == {"measured"}
    ran = lines["use"] == "forward"
    assert set(lines["subject"][ran]) == {"weights"}
    assert ran.sum() == len(LAB["methods"]) * 2 * LAB["repeats"]
    assert lines["first_forward_s"].notna().equals(ran)
    assert len(lines) == 3 * len(LAB["methods"]) * (1 + 2 * LAB["repeats"]) + ran.sum()
    used_s = lines["first_forward_s"].where(ran, lines["touch_s"])
    assert ((lines["load_s"] + used_s - lines["total_s"]).abs() < 3e-6).all()
    cold, warm = (lines[lines["state"] == state] for state in ("cold", "warm"))
    assert (cold["resident_before"] == 0).all()
    whole = cold[(cold["method"] == "torch.load") | (cold["subject"] != "shard")]
    assert (abs(whole["bytes_from_disk"] - whole["file_bytes"]) <= 0.02 * whole["file_bytes"] + PAGESIZE).all()
    assert (warm["resident_before"] == 1).all()
    assert (warm["bytes_from_disk"] == 0).all()
    one = cold[(cold["method"] == "ours") & (cold["subject"] == "shard")]
    assert (one["bytes_from_disk"] < one["file_bytes"]).all()


def test_the_big_files_are_gone_and_a_second_run_does_nothing(measured, tmp_path):
    left = sorted(path.name for path in (measured.results / "loading").rglob("*") if path.is_file())
    assert "subjects.json" in left
    assert not [name for name in left if name.endswith((".pt", ".safetensors"))]
    assert "Nothing to be done" in measured.copy(tmp_path).run("--", "loading")


def test_more_repeats_measure_anew_and_capture_nothing(measured, tmp_path):
    workflow = measured.copy(tmp_path)
    workflow.config["loading"] = LAB | {"repeats": 2, "methods": ["torch.load"]}
    before, captured = workflow.manifest(), workflow.log("capture_part_0")
    wanted = "results/tiny/loading/big/torch.load.csv"
    workflow.run("--", wanted)
    lines = pd.read_csv(workflow.root / wanted)
    assert list(lines.loc[lines["state"] == "cold", "repeat"]) == [0, 1]
    assert (workflow.manifest(), workflow.log("capture_part_0")) == (before, captured)
