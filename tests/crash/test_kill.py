"""kill -9 at every stage of a run, then the plain command.

Goal: nothing is lost but the shard at work, nothing is written twice, and the end is byte for byte that of an
uninterrupted run. Method: start the real workflow, wait for an event, kill the process group,
run the same command. Oracle: the bytes of an uninterrupted run.
"""

from __future__ import annotations

import time

import pytest

from workflows import kill_group, wait_until

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
    assert workflow.captured_since(killed) == 11 - durable
    assert workflow.journal_lines() == 11  # no shard was made durable twice
    assert workflow.shards() == shards
    assert workflow.manifest() == manifest
    assert not any(workflow.results.rglob("*.tmp-*"))
