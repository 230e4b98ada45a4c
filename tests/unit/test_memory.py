"""The batch log, its table, and the verdict on the slope.

Goal: the table holds each batch of the run once, whatever was killed and captured again; the slope and its interval are
what the statistics say; a leak is told, or stops the workflow, as configured. Method: a real capture stopped and
resumed, tables made up for the rest. Oracle: scipy for one series, hand-made numbers and simulated coverage for many.
"""

from __future__ import annotations

import itertools
import json
import types

import numpy as np
import pandas as pd
import pytest
from scipy.stats import theilslopes

from anchorage import capture as capture_module
from anchorage.durable import write_json
from anchorage.errors import AnchorageError
from anchorage.gate import pass_gate
from anchorage.job import leak_warning
from anchorage.leak import MATTERS_MIB, judge_memory, sen_slope, variance_inflation
from anchorage.memory import BATCH_COLUMNS, measure_batch, measure_memory, write_batch_table, write_memory_table
from anchorage.store.manifest import read_manifest, write_manifest
from anchorage.store.names import batch_log, memory_log
from anchorage.store.staging import Staging
from plans import build_plan, capture

SHARD_BATCHES, BATCH_ROWS = 4, 8


def batch_table(*series, cuda=None) -> pd.DataFrame:
    """Batches of one process after the other, from the anonymous memory after each."""
    lines = []
    for process, memory in enumerate(series):
        for i, mib in enumerate(memory):
            batch = len(lines)
            place = {"process": f"p{process}", "shard": batch // SHARD_BATCHES, "batch": batch, "rows": BATCH_ROWS}
            rows = {"rows_total": (batch + 1) * BATCH_ROWS, "process_rows": (i + 1) * BATCH_ROWS}
            lines.append(place | rows | {"rss_mib": 2 * mib, "anonymous_mib": mib, "cuda_allocated_mib": cuda})
    return pd.DataFrame(lines)


SHARDS = pd.DataFrame({"memory_log_s": [0.1, np.nan, 0.2], "shard_s": [10.0, 1000.0, 20.0]})


def judge(table, *, forecast_rows=50_000, on_leak="warn", key="k"):
    verdict = judge_memory(table, SHARDS, key=key, forecast_rows=forecast_rows, on_leak=on_leak)
    json.dumps(verdict, allow_nan=False)
    return verdict


def test_a_cheap_reading_agrees_with_the_thorough_one():
    cheap, thorough = measure_batch("cpu"), measure_memory("cpu")
    assert cheap.keys() == thorough.keys() - {"uss_mib"}
    for name in ("rss_mib", "anonymous_mib", "peak_mib"):
        assert cheap[name] == pytest.approx(thorough[name], abs=8)
    assert thorough["uss_mib"] <= thorough["rss_mib"] <= thorough["peak_mib"]


def test_a_stopped_and_resumed_capture_has_each_batch_once(tmp_path, monkeypatch):
    plan, commits = build_plan(tmp_path), itertools.count()
    commit = Staging.commit

    def stop(self, *arguments, **keywords):
        if next(commits) == 3:
            raise KeyboardInterrupt
        return commit(self, *arguments, **keywords)

    def run(process):
        monkeypatch.setattr(capture_module, "process_name", lambda: process)
        return capture(plan, tmp_path / "cache")

    with monkeypatch.context() as patch:
        patch.setattr(Staging, "commit", stop)
        with pytest.raises(KeyboardInterrupt):
            run("first")
    run("second")
    logs, manifest = sorted(plan.staging.glob(batch_log("*"))), tmp_path / "cache/manifest.jsonl"
    assert len(logs) == 2  # a part each
    write_batch_table(tmp_path / "batches.csv", manifest, logs)
    write_memory_table(tmp_path / "memory.csv", manifest, sorted(plan.staging.glob(memory_log("*"))))
    table, shards = pd.read_csv(tmp_path / "batches.csv"), pd.read_csv(tmp_path / "memory.csv")
    assert list(table.columns) == BATCH_COLUMNS
    assert table["batch"].tolist() == list(range(22))
    assert table["rows_total"].tolist() == [*range(4, 85, 4), 86]
    assert (table["tokens"] == table["rows"] * 16).all()
    # The first process filled and logged shard 3, and did not commit it: the second one's lines count.
    assert table["process"].tolist() == ["first"] * 6 + ["second"] * 16
    assert table["process_rows"].tolist() == [*range(4, 25, 4), *range(4, 61, 4), 62]
    by_shard = table.groupby("shard")[["rows", "forward_s", "hash_s"]].sum()
    for name in by_shard:
        assert by_shard[name].to_numpy() == pytest.approx(shards[name].to_numpy(), abs=1e-4)
    assert (shards["memory_log_s"] > 0).all()
    verdict = judge(table)
    assert (verdict["ok"], verdict["leak"], verdict["n_warmup"]) == (True, None, 22)


def test_rows_of_a_shard_captured_again_still_count_for_the_process_that_had_captured_them(tmp_path):
    plan = build_plan(tmp_path, capture={"parts": 1})
    capture(plan, tmp_path / "cache")
    (plan.staging / "pooled.shard-000001.safetensors").unlink()
    capture(plan, tmp_path / "cache")
    write_batch_table(tmp_path / "t.csv", tmp_path / "cache/manifest.jsonl", sorted(plan.staging.glob(batch_log("*"))))
    # One process here, so that it is as if it had gone on: shard 1's rows are its last.
    table = pd.read_csv(tmp_path / "t.csv")
    assert table["process_rows"].tolist() == [4, 8, 90, 94, *range(20, 85, 4), 86]


@pytest.mark.parametrize("n", [2, 3, 8, 61])
@pytest.mark.parametrize("digits", [0, 6], ids=["ties", "no ties"])
def test_one_series_is_scipys(n, digits):
    draw = np.random.default_rng(n)
    for _ in range(20):
        x = np.cumsum(draw.integers(1, 9, n)).astype(float)
        y = np.round(draw.normal(size=n) + 0.02 * x, digits)
        oracle = theilslopes(y, x)
        assert sen_slope([(x, y)]) == pytest.approx([oracle.slope, oracle.low_slope, oracle.high_slope])


def test_pairs_are_taken_within_a_process():
    x = np.arange(12.0)
    series = [(x + 12 * i, 100 + 800 * i + x) for i in range(3)]
    assert sen_slope(series) == (1, 1, 1)
    pooled = theilslopes(np.concatenate([y for _, y in series]), np.concatenate([x for x, _ in series]))
    assert pooled.slope > 30  # control: across the boundary there would be a leak of hundreds of MiB
    slopes = sen_slope([(np.arange(3.0), np.array([0.0, 1, 4])), (np.arange(3.0), np.array([0.0, 10, 19]))])
    assert slopes[0] == (3 + 9) / 2  # by hand: of 1, 2, 3 and 9, 9.5, 10


def test_the_interval_covers_the_truth_with_and_without_dependence():
    draw, n_runs = np.random.default_rng(0), 200
    x = np.arange(60.0)

    def covers(correlation, correct):
        count = 0
        for _ in range(n_runs):
            series = []
            for level in (0.0, 50.0, 20.0):
                noise = draw.normal(size=len(x) + 200)
                for i in range(1, len(noise)):
                    noise[i] += correlation * noise[i - 1]
                series.append((x, level + 0.3 * x + noise[200:]))
            inflation = variance_inflation(series, sen_slope(series)[0]) if correct else 1.0
            _, low, high = sen_slope(series, inflation)
            count += low <= 0.3 <= high
        return count / n_runs

    assert 0.9 <= covers(0.0, correct=False) <= 0.99
    assert 0.9 <= covers(0.0, correct=True) <= 0.99
    assert covers(0.8, correct=False) < 0.7  # control: readings that depend on one another
    assert covers(0.8, correct=True) > 0.85


def test_each_process_begins_a_series_and_warms_up_anew():
    warming = np.concatenate([np.linspace(100, 700, 16), np.full(24, 700.0)])
    other = warming + 500
    verdict = judge(batch_table(warming, other))
    assert (verdict["leak"], verdict["slope_mib_per_1000_rows"]) == (False, 0)
    assert (verdict["n_series"], verdict["n_batches"], verdict["n_warmup"]) == (2, 48, 32)
    short = judge(batch_table(warming, other[:23]))
    assert (short["n_series"], short["n_batches"], short["n_warmup"]) == (1, 24, 32)
    assert verdict["memory_log_share"] == pytest.approx(0.01)  # of the shards whose logging was timed
    none = judge(batch_table(warming[:23], other[:23]))
    assert (none["leak"], none["ok"], none["measure"], none["slope_low"]) == (None, True, None, None)
    assert none["reason"].startswith("too short")
    assert judge(batch_table([1.0]).iloc[:0])["leak"] is None  # no line at all


@pytest.mark.parametrize(("mib_per_1000_rows", "leak"), [(5.0, False), (5.3, True)])
def test_what_matters_is_what_it_adds_up_to(mib_per_1000_rows, leak):
    table = batch_table(500 + mib_per_1000_rows / 1000 * BATCH_ROWS * np.arange(64.0))
    verdict = judge(table)
    assert verdict["slope_mib_per_1000_rows"] == pytest.approx(mib_per_1000_rows)
    assert verdict["growth_mib_at_forecast"] == pytest.approx(50 * mib_per_1000_rows, abs=0.01)
    assert (verdict["leak"], verdict["matters_mib"]) == (leak, MATTERS_MIB)
    assert judge(table, forecast_rows=1000)["leak"] is False


def test_growth_that_noise_hides_is_neither_shown_nor_excluded():
    noise = np.random.default_rng(1).normal(size=40) * 20
    verdict = judge(batch_table(500 + noise))
    assert verdict["leak"] is False
    assert verdict["growth_mib_at_forecast_high"] > MATTERS_MIB
    assert "nor is one of over 256 MiB excluded" in verdict["reason"]


def test_a_leak_on_the_gpu_decides_and_without_proc_resident_memory_is_judged():
    flat, climbing = np.full(40, 500.0), 400 + np.arange(40.0)
    verdict = judge(batch_table(flat, cuda=1.0).assign(cuda_allocated_mib=climbing))
    assert (verdict["measure"], verdict["leak"]) == ("cuda_allocated_mib", True)
    assert {name: found["leak"] for name, found in verdict["measures"].items()} == {
        "anonymous_mib": False,
        "cuda_allocated_mib": True,
    }
    assert "allocated GPU memory grows by 125 MiB" in verdict["warning"]
    assert judge(batch_table(flat).assign(anonymous_mib=np.nan))["measure"] == "rss_mib"


def test_thousands_of_batches_of_many_processes_stay_affordable():
    draw = np.random.default_rng(0)
    verdict = judge(batch_table(*(draw.normal(size=3000) + 0.08 * np.arange(3000) for _ in range(4))))
    assert verdict["n_batches"] == 4 * 2984
    assert verdict["slope_mib_per_1000_rows"] == pytest.approx(10, rel=0.01)


@pytest.mark.parametrize("on_leak", ["warn", "stop"])
def test_a_leak_is_told_or_stops_as_configured(tmp_path, on_leak):
    manifest, report, gate = (tmp_path / name for name in ("cache/manifest.jsonl", "memory.json", "memory.ok"))
    manifest.parent.mkdir()
    write_manifest(manifest, {}, [])
    lines: list[str] = []
    key = read_manifest(manifest).key
    write_json(report, judge(batch_table(500.0 + np.arange(40)), on_leak=on_leak, key=key))
    said = ["grows by 125 MiB per 1,000 rows", "6,250 MiB (6,250 to 6,250) at 50,000 rows", "capture.parts"]
    if on_leak == "stop":
        with pytest.raises(AnchorageError) as error:
            pass_gate(report, manifest, gate, lines.append)
        assert all(text in str(error.value) for text in said)
        assert not gate.exists()
        return
    pass_gate(report, manifest, gate, lines.append)
    assert gate.read_text() == f"{key}\n"
    assert lines[0] == "memory: passed"
    assert lines[1].startswith("WARNING: MEMORY LEAK\n")
    assert all(text in " ".join(lines[1].split()) for text in said)
    settings = types.SimpleNamespace(results=tmp_path)
    assert leak_warning(settings) == lines[1]
    write_manifest(manifest, {"another": "cache"}, [])
    assert leak_warning(settings) is None
    write_manifest(manifest, {}, [])
    write_json(report, judge(batch_table(np.full(40, 500.0)), on_leak=on_leak, key=key))
    assert leak_warning(settings) is None
    pass_gate(report, manifest, gate, lines.append)
    assert lines[2:] == ["memory: passed"]  # control: nothing is told of a run that does not leak
