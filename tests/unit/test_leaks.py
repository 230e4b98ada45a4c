"""Planted leaks are found, and a capture without one is not accused.

Goal: the verdict of memory.json is right for the real capture loop. Method: captures of a tiny model in fresh
processes, each with another thing wrong (tests/leaking.py): 1 MiB allocated and touched a batch, outputs kept with
their autograd graphs, copies of the captured activations kept in a list; and one of 2,000 batches with nothing wrong.
Tables and verdict are made by the code that the workflow runs.

    pytest -s tests/unit/test_leaks.py      prints each slope with its interval
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pandas as pd
import pytest

from anchorage.leak import judge_memory
from anchorage.memory import BATCH_COLUMNS, write_batch_table, write_memory_table
from anchorage.store.manifest import read_manifest
from anchorage.store.names import batch_log, memory_log
from leaking import BATCH_ROWS, KEPT_MIB, run_case

N_BATCHES = {"clean": 2000, "allocation": 200, "graph": 200, "list": 200}


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """Each case's batch table and verdict."""
    roots = {case: tmp_path_factory.mktemp(case) for case in N_BATCHES}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["leaking"])  # imported once; each process still begins with no capture behind it
    processes = {case: context.Process(target=run_case, args=(roots[case], case, N_BATCHES[case])) for case in roots}
    for process in processes.values():
        process.start()
    for case, process in processes.items():
        process.join(timeout=300)
        assert process.exitcode == 0, case
    return {case: judge(root) for case, root in roots.items()}


def judge(root: Path):
    manifest, staging = root / "cache/manifest.jsonl", next((root / "staging").glob("*/*"))
    write_memory_table(root / "memory.csv", manifest, sorted(staging.glob(memory_log("*"))))
    write_batch_table(root / "batches.csv", manifest, sorted(staging.glob(batch_log("*"))))
    batches, shards = pd.read_csv(root / "batches.csv"), pd.read_csv(root / "memory.csv")
    key = read_manifest(manifest).key
    return batches, judge_memory(batches, shards, key=key, forecast_rows=50_000, on_leak="warn")


@pytest.mark.parametrize("case", ["allocation", "graph", "list"])
def test_a_planted_leak_is_found(judged, case):
    _, verdict = judged[case]
    print(f"\n{case}: leak {verdict['leak']}, {verdict['reason']}")
    assert verdict["leak"] is True
    assert verdict["reason"] in " ".join(verdict["warning"].split())
    # The slope's oracle is what was kept. An allocator never takes less; of 1 MiB at a time it takes no more.
    kept = 1000 / BATCH_ROWS * KEPT_MIB[case]
    assert verdict["slope_mib_per_1000_rows"] > 0.95 * kept
    if case == "allocation":
        assert verdict["slope_mib_per_1000_rows"] == pytest.approx(kept, rel=0.05)


def test_a_clean_run_of_2000_batches_is_not_accused(judged):
    batches, verdict = judged["clean"]
    print(f"\nclean: leak {verdict['leak']}, {verdict['reason']}")
    assert list(batches.columns) == BATCH_COLUMNS
    assert batches["batch"].tolist() == list(range(2000))
    assert (verdict["leak"], verdict["warning"], verdict["measure"]) == (False, None, "anonymous_mib")
    assert (verdict["n_series"], verdict["n_batches"], verdict["n_warmup"]) == (1, 1600, 400)
    assert verdict["slope_low"] <= verdict["slope_mib_per_1000_rows"] <= verdict["slope_high"]
    assert verdict["growth_mib_at_forecast_high"] < 256  # not only not shown: excluded
    assert verdict["memory_log_share"] > 0  # how small it is, only a model that takes its time can show
