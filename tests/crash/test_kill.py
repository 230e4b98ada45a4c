"""kill -9 at every stage of a run, then the plain command.

Goal: nothing is lost but the shard at work, nothing is written twice, and the end is byte for byte that of an
uninterrupted run. Method: start the real workflow, wait for an event, kill the process group (or the driver alone),
run the same command. Oracle: the bytes of an uninterrupted run.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from workflows import kill_group, wait_until, write_uneven


@pytest.fixture(scope="session")
def uninterrupted(corpus_workflow, tmp_path_factory):
    """Shards and manifest of a run left alone, by number of parts."""
    known = {}

    def run(parts):
        if parts not in known:
            workflow = corpus_workflow.copy(tmp_path_factory.mktemp(f"whole-{parts}"))
            workflow.config["capture"]["parts"] = parts
            workflow.run("--", "cache")
            known[parts] = (workflow.shards(), workflow.manifest())
        return known[parts]

    return run


def captured_since(workflow, moment: float) -> int:
    """Shards captured by jobs that began after a moment, as their logs say."""
    logs = (workflow.results / "logs").glob("capture_part_*.log")
    texts = [path.read_text() for path in logs if path.stat().st_mtime > moment]
    return sum(int(number) for text in texts for number in re.findall(r"captured (\d+) shards", text))


MOMENTS = {
    "the driver has just begun": lambda w: (w.root / ".snakemake/log").exists(),
    "the model loads": lambda w: (w.results / "staging").exists() and any(w.results.glob("staging/*/lock")),
    "a shard is being written": lambda w: any(w.results.glob("staging/*/*.tmp-*")),
    "1 shard is durable": lambda w: w.journal_lines() >= 1,
    "3 shards are durable": lambda w: w.journal_lines() >= 3,
    "5 shards are durable": lambda w: w.journal_lines() >= 5,
    "8 shards are durable": lambda w: w.journal_lines() >= 8,
    "all shards are durable": lambda w: w.journal_lines() >= 11,
    "a part is published": lambda w: any(w.results.glob("cache/part-*.jsonl")),
    "the manifest is written": lambda w: (w.results / "cache/manifest.jsonl").exists(),
}
CASES = [(2, moment) for moment in MOMENTS] + [(parts, "5 shards are durable") for parts in (1, 3)]


@pytest.mark.parametrize(("parts", "moment"), CASES, ids=[f"{parts} parts, {moment}" for parts, moment in CASES])
def test_killed_and_run_again_it_ends_as_if_never_killed(corpus_workflow, uninterrupted, tmp_path, parts, moment):
    shards, manifest = uninterrupted(parts)
    workflow = corpus_workflow.copy(tmp_path)
    workflow.config["capture"]["parts"] = parts
    process = workflow.start("--", "cache")
    assert wait_until(lambda: MOMENTS[moment](workflow), process)
    kill_group(process)
    durable, killed = workflow.journal_lines(), time.time()
    workflow.run("--", "cache")
    assert captured_since(workflow, killed) == 11 - durable
    assert workflow.journal_lines() == 11  # no shard was made durable twice
    assert workflow.shards() == shards
    assert workflow.manifest() == manifest
    assert not any(workflow.results.rglob("*.tmp-*"))


def test_killed_before_the_corpus_and_in_the_checks(fresh_workflow, uninterrupted, tmp_path):
    workflow = fresh_workflow.copy(tmp_path)
    workflow.config["probe"] = None
    for event in ("logs/resolve_model.log", "logs/build_corpus.log", "logs/anchor_cache.log"):
        process = workflow.start()
        assert wait_until(lambda event=event: (workflow.results / event).exists(), process)
        time.sleep(0.5)
        kill_group(process)
    workflow.run()
    assert (workflow.shards(), workflow.manifest()) == uninterrupted(2)
    assert workflow.report("anchor")["ok"]
    assert "Nothing to be done" in workflow.run()


def test_200_documents_of_uneven_length_killed_verified_and_anchored(fresh_workflow, tmp_path):
    workflow = fresh_workflow.copy(tmp_path / "killed")
    write_uneven(workflow.root / "resources/corpora/uneven.jsonl", 200)
    workflow.config["corpus"] |= {"source": "resources/corpora/uneven.jsonl", "layout": "padded", "min_chars": 1}
    workflow.config["corpus"] |= {"rows": 200, "seq_len": 48}
    workflow.config["capture"]["shard_rows"] = 16
    workflow.config["probe"] = None
    whole = workflow.copy(tmp_path / "whole")
    process = workflow.start("--", "anchor")
    assert wait_until(lambda: workflow.journal_lines() >= 4, process)
    kill_group(process)
    assert workflow.journal_lines() < 13
    workflow.run("--", "anchor")
    whole.run("--", "cache")
    assert (workflow.shards(), workflow.manifest()) == (whole.shards(), whole.manifest())
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
