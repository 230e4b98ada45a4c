"""The power cut of a whole run: the real workflow captures on a logging drive, then the power goes at many moments.

Goal: what a resume takes over, and what part lists and manifest name, is whole at every cut; the plain command then
ends as if there had been no cut. Method: the tiny workflow on ext4; the lab mounts each image and reads it with the
real staging and manifest code; on one image the command runs to its end. Oracle: the bytes of the uninterrupted run.
Control: on a drive that ignores flushes shards are lost.
"""

from __future__ import annotations

import pytest

from anchorage.durability import workflowcut
from anchorage.durability.mounts import FILESYSTEMS, why_not
from anchorage.durability.workflowcut import COLUMNS, cut_workflow
from anchorage.settings import load_settings


def test_a_run_survives_the_power_cut_at_every_moment_tried(corpus_workflow, tmp_path):
    if reason := why_not(FILESYSTEMS["ext4"]):
        pytest.skip(f"not run: {reason}")
    workflow = corpus_workflow.copy(tmp_path / "source")
    workflow.config["capture"]["parts"] = 1
    table = cut_workflow(
        workflow.root,
        workflow.command("--", "cache"),
        load_settings(workflow.config),
        folder=tmp_path / "lab",
        prefixes=40,
        samples=30,
        reruns=1,
        seed=0,
    )
    row, lying = table.iloc[0], table.iloc[1]
    assert list(table.columns) == list(COLUMNS)
    assert (row.torn, row.gone, row.unmountable) == (0, 0, 0)
    assert row.old > 0
    assert row.mounted >= 40
    assert row.shards_accepted > 100  # there was something to lose
    assert lying.gone + lying.torn > 0
    assert (row.reruns, row.reruns_identical) == (1, 1)
    assert not any((tmp_path / "lab").iterdir())


def test_where_something_is_missing_it_is_not_run(corpus_workflow, tmp_path, monkeypatch):
    monkeypatch.setattr(workflowcut, "why_not", lambda filesystem: "needs root")
    settings = load_settings(corpus_workflow.config)
    table = cut_workflow(tmp_path, [], settings, folder=tmp_path, prefixes=9, samples=9, reruns=1, seed=0)
    assert table[["status", "reason"]].values.tolist() == [["not run", "needs root"]] * 2
