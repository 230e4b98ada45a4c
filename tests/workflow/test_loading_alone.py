"""Measurements of loading run alone.

Goal: none begins while another job runs, and of the two means, threads and slots, each suffices. Method: the real rules
with scripts that sleep, two measurements and a job that needs the same files and claims nothing. Oracle: when Snakemake
saw each job start, and when its output was last written. Control: with both means taken away they do overlap.
"""

from __future__ import annotations

import json
from base64 import b64decode
from itertools import combinations

import pytest

SLEEPER = """import time
from pathlib import Path
time.sleep(1.5)
for name in snakemake.output:
    Path(name).write_text("slept")
"""
SLEEPING = ("write_subjects", "measure_loading", "refuse_files")
WANTED = [f"results/tiny/{name}.csv" for name in ("loading/big/torch.load", "loading/big/ours", "refusals")]
THREADS, SLOTS = ("    threads: workflow.cores\n", "    threads: 1\n"), ("slots=ALL_SLOTS", "slots=1")


@pytest.fixture
def sleeping_lab(finished_workflow, tmp_path):
    workflow = finished_workflow.copy(tmp_path)
    workflow.config["loading"] = {"big_mib": 1, "repeats": 1, "methods": ["torch.load", "ours"]}
    for name in SLEEPING:
        (workflow.root / f"workflow/scripts/{name}.py").write_text(SLEEPER)
    return workflow


def take_away(workflow, *means):
    rules = workflow.root / "workflow/rules/loading.smk"
    for means_, replacement in means:
        assert means_ in rules.read_text()
        rules.write_text(rules.read_text().replace(means_, replacement))


def intervals(workflow) -> list[tuple[float, float]]:
    """Start and end of the jobs that made the wanted files."""
    found = {}
    for path in (workflow.root / ".snakemake/metadata").iterdir():
        if (name := b64decode(path.name).decode()) in WANTED:
            record = json.loads(path.read_text())
            found[name] = record["starttime"], record["endtime"]
    assert len(found) == len(WANTED)
    assert all(end - start > 1.4 for start, end in found.values())
    return list(found.values())


def overlaps(workflow) -> bool:
    workflow.run("--", *WANTED)
    pairs = combinations(intervals(workflow), 2)
    return any(max(one[0], other[0]) < min(one[1], other[1]) for one, other in pairs)


@pytest.mark.parametrize("taken", [(), (SLOTS,), (THREADS,)], ids=["both", "threads alone", "slots alone"])
def test_no_measurement_runs_beside_another_job(sleeping_lab, taken):
    take_away(sleeping_lab, *taken)
    assert not overlaps(sleeping_lab)


def test_without_threads_and_slots_they_would_overlap(sleeping_lab):
    take_away(sleeping_lab, THREADS, SLOTS)
    assert overlaps(sleeping_lab)
