"""The pilot forecasts a run that has not begun, and leaves nothing behind.

Goal: its bytes are those of the capture, its verdict that of the free space, and staging is as it was, whatever
happens. Method: a tiny plan, captured or not, with the disk's free space made up. Oracle: the files of the capture
itself, the folder's bytes before and after.
"""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest

from anchorage import pilot
from anchorage.pilot import forecast_run
from anchorage.store.format import ShardBuffer
from plans import build_plan, capture
from stores import tree

HEADER_BYTES = 1500  # at most, of a file


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with model and corpus; nothing is captured there."""
    root = tmp_path_factory.mktemp("pilot")
    build_plan(root)
    return root


@pytest.fixture(autouse=True)
def _few_batches(monkeypatch):
    monkeypatch.setattr(pilot, "_MIN_S", 0.0)


@pytest.fixture
def plan(root, tmp_path):
    """A plan that stages in a folder of its own, which is not there yet."""
    return build_plan(root, capture={"staging_dir": str(tmp_path / "staging")})


def free(monkeypatch, n_bytes: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=n_bytes))


def test_it_forecasts_the_bytes_of_the_capture_and_leaves_nothing(plan, tmp_path):
    log: list[str] = []
    found = forecast_run(plan, log.append)
    assert list(tmp_path.iterdir()) == []
    run, forecast, measured = found["run"], found["forecast"], found["pilot"]
    assert (found["key"], run["rows"], run["n_shards"], run["n_shards_staged"]) == (plan.key, 86, 11, 0)
    assert (forecast["rows"], forecast["tiers"]["few"]["rows"]) == (50_000, 53)
    assert 0 <= run["hours_low"] <= run["hours"] <= run["hours_high"] < forecast["hours"]
    assert measured["n_batches"] == 2 * 8  # two sets of tiers: with and without the one that ends
    assert measured["write_mib_s"] > 0
    assert measured["peak_mib"] > measured["buffers_mib"] > 0
    text = "\n".join(log)
    for said in ("rows ", "time ", "residual, GiB", "0 of 11", "86 rows: fits", "50,000 rows: fits", "peak memory"):
        assert said in text
    assert "WARNING" not in text
    files = [record for _, _, record in capture(plan, tmp_path / "cache").manifest.files.values()]
    assert run["n_files"] == len(files)
    excess = sum(record.bytes for record in files) - run["gib"] * 2**30
    assert 0 < excess < HEADER_BYTES * len(files)


def test_staged_shards_stay_as_they_are_and_are_not_counted_again(plan, tmp_path):
    capture(plan, tmp_path / "cache")
    before = tree(tmp_path)
    (plan.settings.staging / "pilot-tiny").mkdir()
    (plan.settings.staging / "pilot-tiny/residual").write_bytes(b"of a killed pilot")
    found = forecast_run(plan, lambda line: None)
    assert tree(tmp_path) == before
    assert found["run"]["n_shards_staged"] == 11
    assert found["run"]["disks"][0]["needed_gib"] == 0
    assert found["forecast"]["n_shards_staged"] == 11
    assert 0 < found["forecast"]["disks"][0]["needed_gib"] < found["forecast"]["gib"]


def test_a_disk_too_small_is_told_of_loudly(plan, monkeypatch, tmp_path):
    free(monkeypatch, (256 << 20) + (1 << 20))  # a MiB beyond what is kept for logs: enough for 86 rows
    log: list[str] = []
    found = forecast_run(plan, log.append)
    assert found["run"]["fits"]
    assert not found["forecast"]["fits"]
    short = found["forecast"]["gib"] - 2**-10
    assert found["forecast"]["verdict"] == f"does not fit: needs {short:.2f} GiB more in {tmp_path}"
    assert log[-1].startswith("WARNING: 50,000 rows: does not fit")


def test_a_disk_without_room_for_a_shard(plan, monkeypatch, tmp_path):
    free(monkeypatch, 1000)
    log: list[str] = []
    found = forecast_run(plan, log.append)
    assert found["pilot"]["write_mib_s"] is None
    assert not found["run"]["fits"]
    assert found["run"]["hours"] > 0
    assert "not even one shard fits" in log[-3]
    assert log[-2].startswith("WARNING: 86 rows: does not fit: needs 0.25 GiB more")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_nothing(plan, monkeypatch, tmp_path):
    def fail(self, file, n_rows, metadata):
        file.write(b"some")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ShardBuffer, "write", fail)
    with pytest.raises(OSError, match="No space left"):
        forecast_run(plan, lambda line: None)
    assert list(tmp_path.iterdir()) == []


def test_it_goes_on_for_its_time_or_to_the_end_of_the_corpus(plan, monkeypatch):
    monkeypatch.setattr(pilot, "_MIN_S", 1e6)
    assert forecast_run(plan, lambda line: None)["pilot"]["n_batches"] == 2 * 22


def test_rows_that_no_tier_holds_take_no_time(root, tmp_path):
    tiers = {"few": {"sites": ["block.0"], "rows": 20}}
    plan = build_plan(root, capture={"staging_dir": str(tmp_path / "staging"), "tiers": tiers}, corpus={"rows": 20})
    found = forecast_run(plan, lambda line: None)
    assert found["forecast"]["hours"] < 10 * found["run"]["hours"]  # the rows are 2,500 times as many
    assert found["forecast"]["n_files"] == found["run"]["n_files"] == 3
