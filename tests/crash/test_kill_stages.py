"""kill -9 of a run before and after its capture, of the driver alone, and of a run on padded rows.

Goal: the same command goes on, whatever was killed; a live driver is not disturbed. Method: as in test_kill.py. Oracle:
the bytes of an uninterrupted run; of padded rows the anchor, which computes them again.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from workflows import kill_group, wait_until, write_uneven


def test_killed_before_the_corpus_and_in_the_checks(fresh_workflow, uninterrupted, tmp_path):
    workflow = fresh_workflow.copy(tmp_path)
    workflow.config["probe"] = None
    for event in ("logs/resolve_model.log", "logs/build_corpus.log", "logs/anchor_cache.log"):
        process = workflow.start("--", "anchor")
        assert wait_until(lambda event=event: (workflow.results / event).exists(), process)
        time.sleep(0.5)
        kill_group(process)
    workflow.run("--", "anchor")
    assert (workflow.shards(), workflow.manifest()) == uninterrupted(2)
    assert workflow.report("anchor")["ok"]


def test_200_documents_of_uneven_length_killed_verified_and_anchored(fresh_workflow, tmp_path):
    workflow = fresh_workflow.copy(tmp_path / "killed")
    write_uneven(workflow.root / "resources/corpora/uneven.jsonl", 200)
    workflow.config["corpus"] |= {"source": "resources/corpora/uneven.jsonl", "layout": "padded", "min_chars": 1}
    workflow.config["corpus"] |= {"rows": 200, "seq_len": 48}
    workflow.config["capture"]["shard_rows"] = 16
    workflow.config["probe"] = None
    process = workflow.start("--", "anchor")
    assert wait_until(lambda: workflow.journal_lines() >= 4, process)
    kill_group(process)
    durable, killed = workflow.journal_lines(), time.time()
    workflow.run("--", "anchor")
    assert workflow.captured_since(killed) == 13 - durable > 0
    assert workflow.journal_lines() == 13
    anchor, verify = workflow.report("anchor"), workflow.report("verify")
    assert (verify["ok"], anchor["ok"], anchor["exact"]["mismatched"]) == (True, True, 0)


def writers(workflow) -> set[int]:
    """Processes that run a script of this workflow's folder."""
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                command = Path(f"/proc/{entry}/cmdline").read_bytes()
                if os.readlink(f"/proc/{entry}/cwd") == str(workflow.root) and b"capture_part" in command:
                    found.add(int(entry))
            except OSError:
                continue
    return found


@pytest.mark.parametrize("moment", ["the jobs are importing", "2 shards are durable"])
def test_the_driver_alone_killed_its_jobs_end_and_the_plain_command_goes_on(
    corpus_workflow, uninterrupted, tmp_path, moment
):
    shards, manifest = uninterrupted(2)
    workflow = corpus_workflow.copy(tmp_path)
    process = workflow.start("--", "cache")
    importing = moment == "the jobs are importing"
    assert wait_until(lambda: bool(writers(workflow)) if importing else workflow.journal_lines() >= 2, process)
    old = writers(workflow)
    assert old
    assert importing is not (workflow.results / "staging").exists()
    os.kill(process.pid, signal.SIGKILL)
    workflow.run("--", "cache")
    process.communicate()
    assert not old & writers(workflow)
    assert workflow.journal_lines() == 11  # a shard written by two processes would have two lines
    assert workflow.shards() == shards
    assert workflow.manifest() == manifest


def test_a_second_driver_is_kept_out_while_one_is_live(corpus_workflow, uninterrupted, tmp_path):
    workflow = corpus_workflow.copy(tmp_path)
    process = workflow.start("--", "cache")
    assert wait_until(lambda: workflow.journal_lines() >= 1, process)
    output = workflow.run("--", "cache", ok=False)
    assert f"another snakemake (process {process.pid}) is at work on run 'tiny'" in output
    process.communicate(timeout=120)
    assert process.returncode == 0
    assert workflow.shards() == uninterrupted(2)[0]
