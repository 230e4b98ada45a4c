"""What an fsync costs: the calls are the ones named, their times are told as they were, and nothing is left behind.

Goal: fsync_cost.csv can be believed. Method: the calls are counted and put in order by standing in for them; a clock
that is known gives the expected percentiles; reads that did not come from the disk must not be reported. No figure of
this machine is looked at.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from anchorage.durability import fsynccost
from anchorage.durability.disk import describe_disk
from anchorage.durability.fsynccost import COLUMNS, MODES, measure_costs
from anchorage.errors import MeasurementError

N = 40


def measure(folder, **options):
    return measure_costs(folder, **({"n_calls": N, "big_mib": 1, "big_repeats": 2, "file_mib": 1} | options))


def row(table, what, mode):
    return table[(table["what"] == what) & (table["mode"] == mode)].iloc[0]


def spy(monkeypatch, name, log):
    original = getattr(os, name)

    def called(*words, **named):
        result = original(*words, **named)
        log.append((name, words, result))
        return result

    monkeypatch.setattr(os, name, called)


def test_every_question_has_its_rows_and_nothing_stays(tmp_path):
    table = measure(tmp_path)
    assert list(table.columns) == list(COLUMNS)
    assert [(r.what, r.mode) for r in table.itertuples()] == [(what, mode) for what in MODES for mode in MODES[what]]
    measured = table[table["status"] == "measured"]
    assert (measured["n"] > 0).all()
    times = measured[["p10_us", "p50_us", "p90_us", "p99_us"]].to_numpy()
    assert (np.diff(times, axis=1) >= 0).all()
    assert (times > 0).all()
    missing = table[table["status"] == "not run"]
    assert (missing["reason"] != "").all()
    assert missing["p50_us"].isna().all()
    assert row(table, "big write", "write")["bytes"] == 1 << 20
    assert row(table, "big write", "fsync")["n"] == 2
    assert list(tmp_path.iterdir()) == []


def test_what_the_system_lacks_is_not_run(tmp_path):
    table = measure(tmp_path)
    lacking = "fdatasync" if sys.platform == "darwin" else "F_FULLFSYNC"
    assert row(table, "write 4 KiB", lacking)["status"] == "not run"
    assert row(table, "write 4 KiB", lacking)["reason"] == "this system does not have it"


def test_each_write_is_followed_by_its_own_call_in_alternating_rounds(tmp_path, monkeypatch):
    log, costs = [], fsynccost._Costs()
    for name in ("open", "write", "fsync", "fdatasync"):
        spy(monkeypatch, name, log)
    fsynccost._append_blocks(costs, tmp_path, N)
    opened = {result: (os.path.basename(words[0]), words[1]) for name, words, result in log if name == "open"}
    flags = dict(opened.values())
    assert flags["O_SYNC"] & os.O_SYNC == os.O_SYNC
    assert flags["O_DSYNC"] & os.O_DSYNC
    assert not flags["none"] & os.O_DSYNC
    calls = [(opened[words[0]][0], name) for name, words, _ in log if name != "open"]
    for mode in flags:
        forced = [name for of, name in calls if of == mode]
        assert forced == (["write", mode] if mode in {"fsync", "fdatasync"} else ["write"]) * N
    turns = [mode for mode, _ in itertools.groupby(calls, key=lambda call: call[0])]
    assert turns == list(flags) * 2  # 40 calls are two rounds of twenty


def test_times_are_told_as_the_clock_gave_them(tmp_path, monkeypatch):
    costs = fsynccost._Costs()
    for seconds in range(1, 101):
        costs.add("rename", "rename", seconds * 1e-6, 0)
    found = row(fsynccost._tabulate(costs), "rename", "rename")
    assert found["p50_us"] == pytest.approx(50.5)
    assert found["p99_us"] == pytest.approx(99.01)
    assert found["mean_us"] == pytest.approx(50.5)
    assert found["n"] == 100


def test_reads_from_memory_are_not_reported_as_cold(tmp_path, monkeypatch):
    monkeypatch.setattr(fsynccost, "bytes_from_disk", lambda: 0)
    table = measure(tmp_path)
    for mode in ("sequential", "scattered"):
        found = row(table, "read 4 KiB", mode)
        assert found["status"] == "not run"
        assert "not cold" in found["reason"]


def test_reads_that_the_kernel_counts_are_reported(tmp_path, monkeypatch):
    counters = itertools.count(0, 10**9)
    monkeypatch.setattr(fsynccost, "bytes_from_disk", lambda: next(counters))
    if not hasattr(os, "posix_fadvise"):
        pytest.skip("this system cannot be asked to drop a file from memory")
    assert row(measure(tmp_path), "read 4 KiB", "scattered")["status"] == "measured"


def test_what_one_mode_reads_ahead_is_no_proof_for_the_other(tmp_path, monkeypatch):
    counters = itertools.accumulate(itertools.cycle([10**9, 0, 0, 0]))  # before and after, sequential and scattered
    monkeypatch.setattr(fsynccost, "bytes_from_disk", lambda: next(counters))
    if not hasattr(os, "posix_fadvise"):
        pytest.skip("this system cannot be asked to drop a file from memory")
    table = measure(tmp_path)
    statuses = {mode: row(table, "read 4 KiB", mode)["status"] for mode in ("sequential", "scattered")}
    assert statuses == {"sequential": "not run", "scattered": "not run"}


def test_scattered_overwrites_go_elsewhere_than_sequential_ones(tmp_path, monkeypatch):
    log = []
    spy(monkeypatch, "pwrite", log)
    measure(tmp_path)
    places = [words[2] // 4096 for _, words, _ in log]
    sequential, scattered = places[:20] + places[40:60], places[20:40] + places[60:80]
    assert sequential == list(range(N))
    assert len(set(scattered)) == N
    assert sum(abs(b - a) > 1 for a, b in itertools.pairwise(scattered)) > N / 2


def test_without_room_nothing_is_begun(tmp_path):
    with pytest.raises(MeasurementError, match="lower big_mib"):
        measure(tmp_path, big_mib=1 << 30)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwrite", lambda *words: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        measure(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_disk_is_described(tmp_path):
    facts = describe_disk(tmp_path)
    assert tmp_path.resolve().is_relative_to(facts["mount_point"])
    assert facts["filesystem"]
    assert facts["kernel"] == os.uname().release
    if sys.platform == "linux":
        with open("/proc/sys/vm/dirty_expire_centisecs") as file:
            assert facts["dirty_expire_centisecs"] == int(file.read())
    assert facts["write_cache"] in {None, "write back", "write through"}


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no filesystem in memory at /dev/shm")
def test_a_filesystem_in_memory_has_no_device():
    facts = describe_disk(Path("/dev/shm"))
    assert facts["mount_point"] == "/dev/shm"
    assert facts["device"] is facts["write_cache"] is None
