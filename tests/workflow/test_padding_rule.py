"""The rule that measures padding.

Goal: it needs the model and the corpus, no cache, and its files agree with one another. Method: the tiny run.
"""

from __future__ import annotations

import pandas as pd

from anchorage.padding import COLUMNS, NORM_COLUMNS, TOLERANCES


def test_padding_is_measured_without_a_cache(corpus_workflow, tmp_path):
    workflow = corpus_workflow.copy(tmp_path)
    files = [f"results/tiny/padding{end}" for end in (".json", ".csv", "_norms.csv", ".svg", ".png")]
    workflow.run("--", "padding")
    assert all((workflow.root / path).stat().st_size for path in files)
    assert not (workflow.results / "cache").exists()
    report = workflow.report("padding")
    table, norms = (pd.read_csv(workflow.root / path) for path in files[1:3])
    assert (list(table), list(norms)) == (COLUMNS, NORM_COLUMNS)
    assert report["ok"], report["faults"]
    assert {report["key"]} == set(table["key"]) == set(norms["key"])
    assert set(table["site"]) == set(report["sites"]) >= {"block.1", "block.2"}  # the tier of all rows; the deepest
    demanded = table[(table["position_ids"] == "explicit") & (table["masked"] != "no")]
    assert demanded["relative_error"].max() <= report["tolerance"] == TOLERANCES["float32"]
    assert (workflow.results / "gates/padding.ok").read_text() == f"{report['key']}\n"
    assert "pads on the left, explicit position ids: masked error" in workflow.log("measure_padding")
