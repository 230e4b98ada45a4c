"""Several processes that hold the same tensors.

Goal: private copies add a file each, a shared map one for all; what cannot be measured is said not to be. Method:
small files, 1 to 4 real processes, a planted kill and damage. Oracle: psutil, the sum over a process's mappings, and
the size of the file. Control: the copying method does not share.
"""

from __future__ import annotations

import os

import psutil
import pytest

import held
from anchorage.errors import MeasurementError
from anchorage.loading import workers
from anchorage.loading.fresh import FreshProcesses
from anchorage.loading.workers import COLUMNS, COMPARED, WORKERS, hold_together, measure_workers
from held import build_subject

MIB, FILE_MIB = 2**20, 64

if not workers._ROLLUP.exists():
    pytest.skip("not run: the kernel has no smaps_rollup", allow_module_level=True)


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    return build_subject(tmp_path_factory.mktemp("workers"), FILE_MIB)


@pytest.fixture(scope="module")
def table(subject):
    lines = []
    rows = measure_workers("k", subject, methods=[*COMPARED, "one-tensor"], seed=0, log=lines.append)
    assert len(lines) == len(rows)
    return rows.to_dict("records")


@pytest.fixture(scope="module")
def processes():
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(held.TESTS), before]))
    with FreshProcesses("torch", "safetensors.torch", "held") as server:
        yield server
    os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


def rises(table, method, column):
    """What holding the tensors adds, MiB, by number of workers."""
    rows = [row for row in table if row["method"] == method]
    assert [row["n_workers"] for row in rows] == list(WORKERS)
    return {row["n_workers"]: row[column] - row[f"base_{column}"] for row in rows}


def test_a_copying_worker_adds_a_file_each(table):
    # Beside the file, loading touches some MiB of code, and of objects that were the parent's until then.
    for column in ("pss_mib", "anonymous_mib"):
        assert all(0 <= rise - FILE_MIB * n < 6 * n for n, rise in rises(table, "torch.load", column).items())


@pytest.mark.parametrize("method", ["load_file", "torch.load-mmap"])
def test_mapping_workers_share_one_file(table, method):
    assert all(0 <= rise - FILE_MIB < 6 * n for n, rise in rises(table, method, "pss_mib").items())
    assert all(abs(rise) < n for n, rise in rises(table, method, "anonymous_mib").items())
    assert rises(table, method, "pss_mib")[3] < rises(table, "torch.load", "pss_mib")[3] / 2


def test_rows_are_whole_and_in_an_order_drawn_with_the_seed(table, subject):
    for row in table:
        assert list(row) == list(COLUMNS)
        assert row["status"] == "measured"
        assert row["page_cache_mib"] == pytest.approx(row["file_bytes"] / MIB, abs=0.01)
        assert row["file_bytes"] == subject.file_bytes[".pt" if "torch" in row["method"] else ".safetensors"]
    positions = [row["position"] for row in table]
    assert positions != sorted(positions) == list(range(len(COMPARED) * len(WORKERS)))


def test_sums_equal_what_psutil_and_the_mappings_say(processes, subject):
    found = processes.call(held.hold_and_look, subject=subject.to_json(), method="load_file", n_workers=2)
    assert len(found["seen"]) == 2
    for oracle, column in (("by_hand", "pss_mib"), ("pss", "pss_mib"), ("rss", "rss_mib")):
        # The kernel keeps fractions of a page that each mapping rounds.
        assert sum(seen[oracle] for seen in found["seen"]) / MIB == pytest.approx(found[column], abs=1)


def test_a_killed_worker_is_told_and_the_others_end(processes, subject):
    found = processes.call(held.hold_with_a_killed_worker, subject=subject.to_json(), method="", n_workers=3)
    assert "a worker was killed" in found["killed"]
    assert found["left"] == 0


def test_a_worker_that_cannot_load_is_an_error(processes, subject, tmp_path):
    torn = tmp_path / "torn.safetensors"
    with open(subject.files[".safetensors"], "rb") as file:
        torn.write_bytes(file.read(MIB))
    facts = subject.to_json() | {"files": {".safetensors": str(torn)}}
    with pytest.raises(MeasurementError, match=r"a worker could not load(.|\n)*SafetensorError"):
        processes.call(hold_together, subject=facts, method="load_file", n_workers=2)


def test_a_worker_that_holds_other_bytes_is_an_error(processes, subject):
    facts = subject.to_json()
    facts["digests"] |= {"t3": "0" * 16}
    with pytest.raises(MeasurementError, match="a worker could not load"):
        processes.call(hold_together, subject=facts, method="torch.load", n_workers=1)


def test_what_the_memory_does_not_hold_is_not_run(subject, monkeypatch):
    little = type("Memory", (), {"available": 1.5 * FILE_MIB * MIB})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: little)
    assert workers._why_not(subject, "torch.load", 1) is None
    assert workers._why_not(subject, "load_file", 4) is None  # once in the page cache
    reason = f"it would take {2 * FILE_MIB} MiB of memory, and {1.5 * FILE_MIB:.0f} MiB are available"
    assert workers._why_not(subject, "torch.load", 2) == reason


def test_without_the_kernels_sums_nothing_is_run(subject, monkeypatch, tmp_path):
    monkeypatch.setattr(workers, "_ROLLUP", tmp_path / "missing")
    rows = measure_workers("k", subject, methods=["load_file"], seed=0, log=lambda line: None)
    assert len(rows) == len(WORKERS)
    assert set(rows["status"]) == {"not run"}
    assert rows["reason"].str.contains("smaps_rollup").all()
    assert rows["pss_mib"].isna().all()
