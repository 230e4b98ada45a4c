"""Faults: a recipe that is right raises, keeps the old version and renames nothing after a failed fsync.

Goal: faults.csv can be believed, and our writers stand in it. Method: every kind of call of a save fails once, by
strace; a full filesystem and a closed folder are real. Controls go on after a failed fsync, call it twice, or believe
what they find, and the table must show each of it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from anchorage.durability import faults
from anchorage.durability.attempt import attempt_on_full
from anchorage.durability.faults import COLUMNS, measure_faults
from anchorage.durability.recipes import elsewhere
from anchorage.durability.syscalls import strace_refusal
from anchorage.loading.fresh import FreshProcesses, KilledError

TEXTBOOK = ["full/overwrite", "naive/new name", "remove, rename/overwrite"]
OURS = ["write_bytes/overwrite", "journal/overwrite", "publication/overwrite"]


def need_strace():
    if refusal := strace_refusal():
        pytest.skip(refusal)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    need_strace()
    return measure_faults([*TEXTBOOK, *OURS], tmp_path_factory.mktemp("faults"), max_places=2)


@pytest.fixture(scope="module")
def careless_table(tmp_path_factory):
    need_strace()
    keys = ["go on/overwrite", "try again/overwrite", "believe/new name"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)  # for the forking server
        patch.setattr(faults, "_WARM", [])
        return measure_faults(keys, tmp_path_factory.mktemp("careless"), max_places=2, table="careless")


def rows_of(table, key, call=None, error=None):
    name, case = key.split("/")
    rows = table[(table["recipe"] == name) & (table["case"] == case) & (table["status"] == "measured")]
    rows = rows if call is None else rows[rows["call"] == call]
    return rows if error is None else rows[rows["error"] == error]


def outcomes(table, key, call, error):
    rows = rows_of(table, key, call, error)
    assert len(rows), (key, call, error)
    return set(rows["outcome"])


def test_the_table_is_whole(table):
    assert list(table.columns) == list(COLUMNS)
    assert set(table["status"]) <= {"measured", "no such call", "not run"}
    measured = table[table["status"] == "measured"]
    assert len(measured) > 50
    assert set(measured["acknowledged"]) == {True, False}
    assert (measured.loc[~measured["acknowledged"].astype(bool), "raised"] != "").all()
    assert measured["retry_ok"].all()


def test_the_full_recipe_keeps_the_old_version(table):
    for call, error in [("write", "EIO"), ("write", "ENOSPC"), ("fsync", "EIO"), ("rename", "EIO"), ("close", "EIO")]:
        assert outcomes(table, "full/overwrite", call, error) == {"old"}
    assert outcomes(table, "full/overwrite", "save", "EACCES") == {"old"}


def test_a_folder_that_cannot_be_synced_leaves_the_new_version_unconfirmed(table):
    for key in ("full/overwrite", "write_bytes/overwrite"):
        assert outcomes(table, key, "folder fsync", "EIO") == {"unconfirmed"}


def test_a_naive_save_is_torn_and_an_early_removal_loses_the_file(table):
    assert outcomes(table, "naive/new name", "write", "EIO") == {"torn"}
    assert outcomes(table, "remove, rename/overwrite", "rename", "EIO") == {"gone"}
    fsyncs = table[(table["recipe"] == "naive") & (table["call"] == "fsync")]
    assert set(fsyncs["status"]) == {"no such call"}


@pytest.mark.parametrize("key", OURS)
def test_our_writers_raise_and_lose_nothing(key, table):
    rows = rows_of(table, key)
    assert not rows["renamed_after_failed_fsync"].eq(True).any()
    assert False in set(rows["renamed_after_failed_fsync"])
    assert set(rows["outcome"]) <= {"old", "unconfirmed", "new"}
    quiet = rows[rows["acknowledged"].astype(bool)]
    assert set(quiet["call"]) <= {"link"}  # where no link can be made, a copy is
    assert set(rows.loc[rows["call"].isin(["write", "fsync"]), "outcome"]) == {"old"}


@pytest.mark.parametrize("key", OURS)
def test_our_writers_write_again_after_a_failed_write_or_fsync(key, table):
    failed = rows_of(table, key)
    failed = failed[failed["call"].isin(["write", "fsync"]) & (failed["how"] == "injected")]
    assert set(failed["retry_writes"]) == {True}


def test_a_full_filesystem_raises_and_keeps_the_old_version(table):
    rows = table[(table["call"] == "write") & (table["how"] == "real")]
    if os.geteuid() or sys.platform != "linux":
        assert set(rows["status"]) == {"not run"}
        pytest.skip("mounting needs root and Linux")
    assert set(rows["status"]) == {"measured"}
    assert rows["raised"].str.contains("No space left").all()
    assert set(rows["outcome"]) == {"old", "torn"}
    assert list(rows.loc[rows["outcome"] == "torn", "recipe"]) == ["naive"]
    assert "/faults" not in Path("/proc/mounts").read_text()


def test_a_kill_leaves_no_mount(tmp_path, monkeypatch):
    if os.geteuid() or sys.platform != "linux":
        pytest.skip("mounting needs root and Linux")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
    with FreshProcesses("careless") as processes, pytest.raises(KilledError):
        processes.call(attempt_on_full, table="careless", key="die/new name", folder=str(tmp_path))
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    assert list(tmp_path.iterdir()) == []


def test_a_temp_file_elsewhere_is_swept_and_its_process_is_not_told(tmp_path):
    need_strace()
    before = set(elsewhere(tmp_path).glob("anchorage-*"))
    table = measure_faults(["temp elsewhere, move/new name"], tmp_path, max_places=1)
    assert set(elsewhere(tmp_path).glob("anchorage-*")) <= before
    assert not table["raised"].str.contains(r"anchorage-\d", na=False).any()


def test_a_rename_after_a_failed_fsync_is_seen(careless_table):
    for key in ("go on/overwrite", "try again/overwrite"):
        rows = rows_of(careless_table, key, "fsync", "EIO")
        assert list(rows["renamed_after_failed_fsync"]) == [True]
        assert list(rows["acknowledged"]) == [True]


def test_a_retry_that_writes_nothing_is_seen(careless_table):
    rows = rows_of(careless_table, "believe/new name", "fsync", "EIO")
    assert list(rows["outcome"]) == ["unconfirmed"]
    assert list(rows["retry_writes"]) == [False]


def test_a_relative_folder_hides_no_call(tmp_path, monkeypatch):
    if reason := faults.strace_refusal():
        pytest.skip(f"not run: {reason}")
    monkeypatch.chdir(tmp_path)  # strace tells absolute paths
    found = measure_faults(["full/new name"], Path("."), max_places=1)
    hit = found[(found["status"] == "measured") & (found["how"] == "injected")]
    assert {"write", "fsync", "folder fsync", "rename"} <= set(hit["call"])


def test_without_strace_rows_say_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "strace_refusal", lambda: "strace is not installed")
    monkeypatch.setattr(faults, "_WARM", [])
    table = measure_faults(["full/overwrite"], tmp_path)
    injected = table[table["how"] == "injected"]
    assert set(injected["status"]) == {"not run"}
    assert set(injected["reason"]) == {"strace is not installed"}
    assert list(table.loc[table["call"] == "save", "outcome"]) == ["old"]
    assert list(tmp_path.iterdir()) == []


def test_without_root_nothing_is_mounted(tmp_path, monkeypatch):
    monkeypatch.setattr(faults.os, "geteuid", lambda: 1000)
    recipe = faults.find_recipe(faults.TABLE, "full/overwrite")
    row = faults._fill_filesystem(faults._Bench(None, faults.TABLE, recipe, tmp_path))
    assert row["status"] == "not run"
    assert "root" in row["reason"]


def test_of_many_places_the_first_and_the_last_are_tried():
    assert faults._spread(3, 6) == [0, 1, 2]
    assert faults._spread(10, 4) == [0, 3, 6, 9]
    assert faults._spread(0, 4) == []
    assert faults._spread(10, 1) == [0]
