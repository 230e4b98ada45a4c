"""Power cuts under our own writers, and under writers known to be unsafe.

Goal: no cut loses or tears what our shard commit, publication, manifest and checkpoint have acknowledged. Method: the
durability lab's small profile: a logging drive, cuts at many points, each image mounted and read by the real readers.
Controls: each unsafe recipe is bad in its expected column; our writers, broken on purpose, are; so are good ones on a
drive that lies. The number of mounted images is asserted, so that nothing passes blind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from anchorage import durable
from anchorage.durability import ourrecipes, powercut
from anchorage.durability.command import run_command
from anchorage.durability.mounts import FILESYSTEMS, why_not
from anchorage.durability.ourrecipes import ALL_RECIPES, OURS
from anchorage.durability.powercut import COLUMNS, FAILING, LYING, RETRYING, Caps, cut_power
from anchorage.durability.profiles import PROFILES
from anchorage.errors import MeasurementError
from workflows import ROOT

SMALL = PROFILES["small"].controls
SUBJECTS = ["shard/new name", "publication/overwrite", "manifest/overwrite", "checkpoint/new name"]


def needs_lab(filesystem="ext4"):
    if reason := why_not(FILESYSTEMS[filesystem]):
        pytest.skip(f"not run: {reason}")


@pytest.fixture
def cut(tmp_path):
    """Cut the power under one recipe, on one filesystem, in one schedule; gives the table's row."""

    def run(recipe, schedule, filesystem="ext4", caps=SMALL):
        needs_lab(filesystem)
        recipe = (ALL_RECIPES | RETRYING)[recipe] if isinstance(recipe, str) else recipe
        table = cut_power([recipe], [filesystem], [schedule], folder=tmp_path, caps=lambda _: caps, seed=0)
        assert not any(tmp_path.iterdir())
        return table.iloc[0]

    return run


@pytest.mark.parametrize("filesystem", ["ext4", "xfs", "btrfs"])
def test_no_cut_loses_or_tears_what_our_writers_acknowledged(tmp_path, filesystem):
    needs_lab(filesystem)
    table = cut_power(
        [OURS[name] for name in SUBJECTS],
        [filesystem],
        ["neighbour", "writeback"],
        folder=tmp_path,
        caps=lambda _: PROFILES["small"].ours,
        seed=1,
    )
    assert list(table.columns) == list(COLUMNS)
    assert (table[["torn", "gone", "unmountable"]] == 0).all(axis=None), table.to_string()
    assert table.points.sum() == table[["old", "new"]].sum().sum() >= 200
    assert table.mounted.sum() >= 100
    assert (table.mounted == table.distinct).all()
    assert (table.old > 0).all()


# Where the notes of the lab's method expect them to fail: what a missing step costs, and in which schedule it shows.
CONTROLS = [
    ("naive/overwrite", "neighbour", "ext4", "torn"),
    ("naive/new name", "neighbour", "ext4", "torn"),
    ("naive/new name", "quiet", "ext4", "gone"),
    ("rename only/overwrite", "quiet", "ext4", "gone"),
    ("rename only/new name", "neighbour", "ext4", "torn"),
    ("rename only/overwrite", "neighbour", "ext4-noauto", "torn"),
    ("rename only/overwrite", "neighbour", "xfs", "torn"),
    ("fsync, rename/new name", "quiet", "ext4", "gone"),
    ("fsync, rename/overwrite", "quiet", "xfs", "gone"),
    ("fsync, rename/overwrite", "quiet", "btrfs", "gone"),
    ("fsync before flush/overwrite", "neighbour", "xfs", "torn"),
    ("fsync before flush/new name", "neighbour", "ext4", "torn"),
    ("fsync before flush/new name", "neighbour", "btrfs", "torn"),
    ("temp elsewhere, move/new name", "neighbour", "ext4", "torn"),
]


@pytest.mark.parametrize(("recipe", "schedule", "filesystem", "column"), CONTROLS)
def test_each_unsafe_recipe_is_bad_in_its_column(cut, recipe, schedule, filesystem, column):
    row = cut(recipe, schedule, filesystem)
    assert row[column] > 0
    assert row.mounted >= 10


@pytest.mark.parametrize("case", ["overwrite", "new name"])
def test_the_full_recipe_is_not(cut, case):
    row = cut(f"full/{case}", "neighbour")
    assert (row.torn, row.gone, row.unmountable) == (0, 0, 0)
    assert row.mounted >= 15


def test_a_writer_without_fsync_tears(cut, monkeypatch):
    monkeypatch.setattr(durable, "sync_descriptor", lambda descriptor: None)
    assert cut("shard/new name", "neighbour").torn > 0
    assert cut("shard/new name", "quiet").gone > 0


def test_a_writer_without_the_folders_fsync_loses(cut, monkeypatch):
    monkeypatch.setattr(durable, "sync_folder", lambda folder: None)
    assert cut("write_bytes/new name", "quiet").gone > 0


def test_a_writer_that_syncs_before_it_flushes_tears(cut, monkeypatch):
    def write_bytes(path, data):
        with open(durable.temp_path(path), "wb", 8192) as file:
            file.write(data[:-3000])
            file.write(data[-3000:])
            durable.sync_descriptor(file.fileno())
        os.replace(file.name, path)
        durable.sync_folder(path.parent)

    recipe = ourrecipes.by_case("late flush", write_bytes)["late flush/new name"]
    assert cut(recipe, "neighbour").torn > 0


def test_a_journal_line_before_its_shard_is_caught(cut, monkeypatch):
    whole = durable.append_line
    commit = ourrecipes._commit

    def early(staging, shard):
        """Dry-run elsewhere for the record, its journal line first, then the shard."""
        before = set(staging.folder.glob("journal*"))
        lines = []
        monkeypatch.setattr(durable, "append_line", lambda path, line: lines.append((path, line)))
        record = commit(staging, shard)
        monkeypatch.setattr(durable, "append_line", whole)
        for tier in record.tiers.values():
            (staging.folder / tier.file).unlink()
        for path, line in lines:
            whole(path, line)
        assert before or lines
        monkeypatch.setattr(durable, "append_line", lambda path, line: None)
        commit(staging, shard)
        monkeypatch.setattr(durable, "append_line", whole)
        return record

    monkeypatch.setattr(ourrecipes, "_commit", early)
    assert cut("shard/new name", "quiet").torn > 0


def test_no_recipe_is_safe_on_a_drive_that_ignores_flushes(cut):
    row = cut("full/new name", LYING, caps=Caps(10, 60))
    assert row.gone > 0


def test_an_fsync_tried_again_is_no_cure_for_one_that_failed(cut):
    bad = cut("full, fsync tried again/new name", FAILING)
    assert bad.torn > 0
    assert bad.refused == 0
    good = cut("full/new name", FAILING)
    assert (good.torn, good.gone) == (0, 0)
    assert good.refused == 1


@pytest.mark.parametrize("filesystem", ["ext4", "xfs"])
def test_a_line_whose_fsync_failed_is_no_line_for_whoever_comes_next(cut, filesystem):
    row = cut("journal/overwrite", FAILING, filesystem)
    assert (row.torn, row.gone) == (0, 0)
    assert row.refused == 1


def test_what_is_missing_is_said_and_not_passed(tmp_path, monkeypatch):
    monkeypatch.setattr(powercut, "why_not", lambda filesystem: f"mkfs.{filesystem.kind} is not installed")
    table = cut_power([OURS[SUBJECTS[0]]], ["xfs"], ["quiet"], folder=tmp_path, caps=lambda _: Caps(9, 9), seed=0)
    assert table[["status", "reason", "points"]].values.tolist() == [["not run", "mkfs.xfs is not installed", 0]]


def test_without_root_it_is_not_run(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert why_not(FILESYSTEMS["ext4"]) == "needs root"


def left_behind(pid):
    """Loop devices that still lie over an image of a process, and mounts of its namespace."""
    files = [path.read_text() for path in Path("/sys/block").glob("loop*/loop/backing_file")]
    return [file for file in files if f"anchorage-{pid}" in file]


def wait_for(condition, timeout_s=10):
    """The kernel ends a dead process's namespace a moment later."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_terminals_interrupt_reaches_the_whole_group_and_leaves_nothing(tmp_path):
    needs_lab()
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", LAB, tmp_path]
    lab = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True, start_new_session=True)
    assert lab.stdout
    assert "cuts" in lab.stdout.readline()
    os.killpg(lab.pid, signal.SIGINT)
    lab.communicate(timeout=60)
    assert lab.returncode not in (0, None)
    wait_for(lambda: not left_behind(lab.pid))
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    assert not list(tmp_path.iterdir())  # it was unmounted in order: the drive's server was there until the end
    assert not [process.pid for process in psutil.process_iter() if _session(process.pid) == lab.pid]


def _session(pid):
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def test_a_command_ends_with_the_thread_that_runs_it_and_when_it_is_to_stop(tmp_path):
    script = "import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(60)"
    lab = (
        "import pathlib, sys; from anchorage.durability.command import run_command; "
        f"run_command([sys.executable, '-c', {script!r}], pathlib.Path({str(tmp_path)!r}))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen([sys.executable, "-c", lab], env=environment)
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    process.kill()
    process.wait()
    if sys.platform == "linux":
        wait_for(lambda: not psutil.pid_exists(int((tmp_path / "pid").read_text())))
    stop = threading.Event()
    stop.set()
    with pytest.raises(KeyboardInterrupt):
        run_command([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path, stop=stop)
    with pytest.raises(MeasurementError, match="failed with 3: why"):
        run_command([sys.executable, "-c", "print('why'); exit(3)"], tmp_path)


LAB = """
import sys, pathlib
from anchorage.durability.profiles import PROFILES
from anchorage.durability.powercut import Caps, cut_power
from anchorage.durability.recipes import RECIPES
cut_power([RECIPES["full/new name"]] * 100, ["ext4"], ["quiet"], folder=pathlib.Path(sys.argv[1]),
          caps=lambda _: Caps(99, 99), seed=0, log=lambda line: print(line, flush=True))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_an_ended_lab_leaves_no_mount_and_no_device(cut, tmp_path, number):
    needs_lab()
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    lab = subprocess.Popen([sys.executable, "-c", LAB, tmp_path], stdout=subprocess.PIPE, env=environment, text=True)
    assert lab.stdout
    assert "cuts" in lab.stdout.readline()
    lab.send_signal(number)
    lab.communicate(timeout=60)
    assert lab.returncode not in (0, None)
    wait_for(lambda: not left_behind(lab.pid))
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    assert cut("full/new name", "quiet", caps=Caps(5, 5)).points >= 5  # and the next one sweeps the empty folder
