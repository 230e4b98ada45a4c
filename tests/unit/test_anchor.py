"""The anchor: it passes on a true cache, and on nothing else.

Goal: a re-check that finds a single changed number, and says what it demanded. Method: capture a tiny model, anchor
it; then let the model, the store or the environment be another. Control: each of these must be found.
"""

from __future__ import annotations

import pytest
import torch

from anchorage import anchor
from anchorage.anchor import BATCH_SIZES, anchor_cache, sample_rows
from anchorage.errors import AnchorageError
from plans import build_plan, capture


def run_anchor(plan, cache):
    lines: list[str] = []
    report, table = anchor_cache(plan, cache, lines.append)
    return report, table, lines


def test_a_true_cache_is_anchored_exactly(tmp_path):
    plan = build_plan(tmp_path)
    report, table, _ = run_anchor(plan, capture(plan, tmp_path / "cache"))
    assert report["ok"]
    assert report["environment_match"]
    exact = report["exact"]
    assert (exact["mismatched"], exact["max_abs_diff"]) == (0, 0)
    assert exact["n_rows"] >= 34
    assert exact["n_sites"] == 10
    # every stored site of every tier: one residual, ten pooled, and the few tier's six for the rows below 53
    few = sum(row < 53 for row in report["rows"])
    assert exact["n_comparisons"] == 11 * len(report["rows"]) + 6 * few
    assert [line["batch_rows"] for line in table] == list(BATCH_SIZES)
    assert all(line["key"] == plan.key and line["rows"] == len(report["rows"]) for line in table)
    assert all((line["rows_exact"] == line["rows"]) == (line["max_abs_diff"] == 0) for line in table)
    assert report["cast"] == {"storage_dtype": "float16", "n_sites": 10, "n_equal": 10}


def test_both_ends_the_short_batch_and_tier_ends_are_sampled(tmp_path):
    plan = build_plan(tmp_path, corpus={"rows": 86})
    rows = sample_rows(plan)
    assert {0, 85, 84, 52} <= set(rows)
    assert len(rows) == 32 + 4
    assert rows == sample_rows(plan)


@pytest.mark.parametrize("n_rows", [1, 2, 5])
def test_a_run_of_few_rows(tmp_path, n_rows):
    plan = build_plan(tmp_path, corpus={"rows": n_rows})
    report, table, _ = run_anchor(plan, capture(plan, tmp_path / "cache"))
    assert report["ok"]
    assert report["exact"]["n_rows"] == n_rows
    assert {line["rows"] for line in table} == {n_rows}


def change_model(monkeypatch, by):
    load = anchor.load_trunk

    def changed(*arguments):
        trunk = load(*arguments)
        with torch.no_grad():
            trunk.layers[1].mlp.down_proj.weight[0, 0] += by
        return trunk

    monkeypatch.setattr(anchor, "load_trunk", changed)


def test_a_changed_weight_is_found_and_named(tmp_path, monkeypatch):
    plan = build_plan(tmp_path)
    cache = capture(plan, tmp_path / "cache")
    change_model(monkeypatch, 0.25)
    report, _, lines = run_anchor(plan, cache)
    assert not report["ok"]
    assert report["exact"]["mismatched"] > 0
    assert "row 0, tier few, site block.1: differs by at most" in report["faults"][0]
    assert any("tier pooled, site mlp.1" in fault for fault in report["faults"])
    assert any("mlp.1" in line for line in lines)
    assert not any("block.0" in fault for fault in report["faults"])  # before the change nothing differs


def test_in_another_environment_the_tolerance_is_demanded_instead(tmp_path, monkeypatch):
    plan = build_plan(tmp_path)
    cache = capture(plan, tmp_path / "cache")
    monkeypatch.setattr(anchor, "describe_environment", lambda facts: {"device": "another"})
    report, _, _ = run_anchor(plan, cache)
    assert report["ok"]
    assert not report["environment_match"]
    assert "tolerance" in report["demanded"]
    with monkeypatch.context() as patch:
        change_model(patch, 1e-3)
        report, _, _ = run_anchor(plan, cache)
        assert report["exact"]["mismatched"] > 0
        assert report["ok"]  # differs, within 1e-2
    change_model(monkeypatch, 4.0)
    report, _, _ = run_anchor(plan, cache)
    assert not report["ok"]


def test_a_cache_of_another_configuration_is_refused(tmp_path):
    cache = capture(build_plan(tmp_path), tmp_path / "cache")
    other = build_plan(tmp_path, capture={"storage_dtype": "float32"})
    with pytest.raises(AnchorageError, match="belongs to capture key"):
        run_anchor(other, cache)
