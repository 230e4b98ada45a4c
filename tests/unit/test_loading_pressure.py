"""Mapped and copied tensors under a memory limit.

Goal: under a limit a mapping is read again and lives, a copy is killed; no control group stays, however its maker ends;
where none can be made, the table says so. Method: real control groups, small files, planted kills. Oracle: the group's
own files, read by hand, and sizes. Controls: without a limit the second pass reads nothing, and a copy that fits lives.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from anchorage.loading import memorygroup, pressure
from anchorage.loading.memorygroup import MemoryGroup, NoGroupError, find_parent, make_group, sweep_groups
from anchorage.loading.pagecache import never_cold
from anchorage.loading.pressure import CASES, COLUMNS, measure_pressure
from held import build_subject

MIB, FILE_MIB = 2**20, 48
SLEEP = [sys.executable, "-S", "-c", "import time; print(1, flush=True); time.sleep(600)"]
ALLOCATE = "import sys; sys.stdin.readline(); held = bytearray(int(sys.argv[1])); print(1, flush=True); input()"


def quiet(line):
    pass


@pytest.fixture
def groups():
    """Where control groups can be made; at the end none of ours is left there."""
    try:
        with make_group() as group:
            parent = group.folder.parent
    except NoGroupError as error:
        pytest.skip(f"not run: {error}")
    yield parent
    assert not list(parent.glob(f"anchorage-memory-{os.getpid()}-*"))


def put_in(group, command, **options):
    """Start a process, move it into a group by hand, and wait until it has said its first line."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options)
    (group.folder / "cgroup.procs").write_text(str(process.pid))
    process.stdin.write(b"go\n")
    process.stdin.flush()
    process.stdout.readline()
    return process


def end_by(process, how):
    process.send_signal(how)
    return process.wait()


@pytest.fixture
def table(groups, tmp_path):
    if reason := never_cold(tmp_path):
        pytest.skip(f"not run: the folder of temporary files is {reason}")
    lines = []
    found = measure_pressure("k", build_subject(tmp_path, FILE_MIB, 8), lines.append)
    assert len(lines) == len(found) == len(CASES)
    return found


def test_a_mapping_is_read_again_and_a_copy_is_killed(table):
    assert list(table.columns) == list(COLUMNS)
    rows = table.set_index(["method", "limit_of"]).to_dict("index")
    free, tight = rows["load_file", "none"], rows["load_file", "60% of the file"]
    killed, fits = rows["torch.load", "60% of the file"], rows["torch.load", "150% of the file"]
    assert free["status"] == tight["status"] == fits["status"] == "measured"
    for row in (free, tight, fits):
        assert row["resident_before"] == 0
        assert row["first_bytes_from_disk"] >= FILE_MIB * MIB
    assert free["second_bytes_from_disk"] == fits["second_bytes_from_disk"] == 0
    assert free["file_mib"] >= FILE_MIB
    # What did not fit must come from the disk again.
    assert tight["second_bytes_from_disk"] >= 0.3 * FILE_MIB * MIB
    assert tight["file_mib"] <= tight["limit_mib"] < FILE_MIB
    assert tight["limit_mib"] == pytest.approx(tight["base_mib"] + 0.6 * FILE_MIB, abs=0.1)
    assert fits["anonymous_mib"] >= FILE_MIB
    assert free["anonymous_mib"] < 8 > tight["anonymous_mib"]
    if psutil.swap_memory().total == 0:
        assert killed["status"] == "killed"
        assert "limit left it no memory" in killed["reason"]
        assert killed["max_usage_mib"] <= killed["limit_mib"]


def test_a_group_counts_limits_and_tells_of_the_killed(groups):
    with make_group() as group:
        group.limit(64 * MIB)
        process = put_in(group, [sys.executable, "-S", "-c", ALLOCATE, str(24 * MIB)])
        assert (group.folder / "cgroup.procs").read_text().split() == [str(process.pid)]
        assert 24 * MIB <= group.usage()["anonymous"] < 40 * MIB
        assert group.peak() is None or 24 * MIB <= group.peak() <= 64 * MIB
        assert group.n_killed() == 0
        end_by(process, signal.SIGKILL)
        assert group.n_killed() == 0  # by us, not for want of memory
        if psutil.swap_memory().total == 0:
            assert put_in(group, [sys.executable, "-S", "-c", ALLOCATE, str(96 * MIB)]).wait() == -signal.SIGKILL
            assert group.n_killed() == 1


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_group_is_removed_and_what_is_in_it_killed_after_an_error(groups, error):
    started = []

    def fail():
        with make_group() as group:
            started.append((group.folder, put_in(group, SLEEP)))
            raise error

    with pytest.raises(error):
        fail()
    [(folder, process)] = started
    assert not folder.exists()
    assert process.wait() == -signal.SIGKILL


def test_a_group_of_a_killed_run_is_swept_and_that_of_a_live_one_is_not(groups):
    code = (
        "import subprocess, sys, time\nfrom anchorage.loading.memorygroup import make_group\n"
        "with make_group() as group:\n"
        f"    child = subprocess.Popen({SLEEP!r}, stdout=subprocess.DEVNULL)\n"
        "    (group.folder / 'cgroup.procs').write_text(str(child.pid))\n"
        "    print(group.folder, child.pid, flush=True)\n    time.sleep(600)\n"
    )
    maker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    folder, child = maker.stdout.readline().split()
    sweep_groups(groups)
    assert Path(folder).exists()
    end_by(maker, signal.SIGKILL)
    assert psutil.pid_exists(int(child))
    assert Path(folder).exists()  # nobody has removed it yet
    with make_group():
        assert not Path(folder).exists()
    assert not psutil.pid_exists(int(child)) or psutil.Process(int(child)).status() == psutil.STATUS_ZOMBIE


@pytest.mark.skipif(os.geteuid() != 0, reason="not run: only root can become another user")
def test_another_user_is_told_why_no_group_can_be_made(groups):
    read_end, write_end = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.setgid(65534)
            os.setuid(65534)
            with make_group():
                os.write(write_end, b"made")
        except BaseException as error:
            os.write(write_end, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write_end)
    os.waitpid(pid, 0)
    with os.fdopen(read_end) as pipe:
        said = pipe.read()
    assert said == f"NoGroupError: this user may not make a control group in {groups}; root of the machine may"


@contextlib.contextmanager
def made(folder):
    """What looks like a group."""
    (folder / "memory.max").touch()
    yield MemoryGroup(folder, 2)


@pytest.mark.parametrize("missing", ["group", "disk", "entry", "size"])
def test_where_it_cannot_be_it_is_not_run_and_says_why(monkeypatch, tmp_path, missing):
    if missing == "group":
        monkeypatch.setattr(memorygroup, "find_parent", lambda: (tmp_path / "none", 1))
        reason = f"no control group can be made in {tmp_path / 'none'}: No such file or directory"
    else:
        found = {"refused": "it may not enter"} if missing == "entry" else {"max_usage": 0}
        too_small = "the file is too small: it takes 32 MiB to tell it from what loading itself needs"
        reason = {"disk": "tmpfs: never cold", "entry": "it may not enter", "size": too_small}[missing]
        monkeypatch.setattr(pressure, "_MIN_FILE_MIB", 32 if missing == "size" else 1)
        monkeypatch.setattr(pressure, "make_group", lambda: made(tmp_path))
        monkeypatch.setattr(pressure.FreshProcesses, "call", lambda self, function, **arguments: found)
        monkeypatch.setattr(pressure, "never_cold", lambda path: "tmpfs: never cold")
    table = measure_pressure("k", build_subject(tmp_path), quiet)
    assert set(table["status"]) == {"not run"}
    assert set(table["reason"]) == {reason}
    assert table["first_pass_s"].isna().all()


V1 = "32 31 0:29 / {top} rw shared:1 - cgroup cgroup rw,memory"
V2 = "41 31 0:38 / {top} rw - cgroup2 cgroup2 rw"
INSIDE = "41 31 0:38 /box/of/ours {top} rw - cgroup2 cgroup2 rw"


def build_proc(folder, mounts, own, folders, delegated=()):
    """/proc as a process sees it that is in some groups; the folders of the groups; those that hand memory down."""
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/mountinfo").write_text("".join(f"{line.format(top=folder / name)}\n" for name, line in mounts))
    (folder / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in own))
    for name in folders:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "cgroup.procs").touch()
        (folder / name / "cgroup.subtree_control").write_text("cpu memory\n" if name in delegated else "cpu\n")
    return folder / "proc"


@pytest.mark.parametrize(
    ("mounts", "own", "delegated", "expected"),
    [
        ([("v1", V1)], ["4:memory:/a/b"], [], ("v1/a/b", 1)),
        ([("v1", V1)], ["4:cpu,memory:/not/shown"], [], ("v1", 1)),
        ([("v2", V2)], ["0::/a/b"], ["v2", "v2/a"], ("v2/a", 2)),  # not b: it has processes, so it hands nothing down
        ([("v2", V2)], ["0::/a/b"], ["v2"], ("v2", 2)),
        ([("v2", INSIDE)], ["0::/box/of/ours/a/b"], ["v2/a"], ("v2/a", 2)),
        ([("v2", V2), ("v1", V1)], ["0::/", "4:memory:/a"], [], ("v1/a", 1)),
        ([("v2", V2), ("v1", V1)], ["0::/a", "4:memory:/a"], ["v2"], ("v2", 2)),
        ([("v2", V2)], ["0::/a/b"], [], None),
        ([], ["0::/"], [], None),
    ],
)
def test_groups_are_made_in_the_nearest_folder_that_can_limit_memory(tmp_path, mounts, own, delegated, expected):
    folders = [f"{top}{inner}" for top in ("v1", "v2") for inner in ("", "/a", "/a/b")]
    proc = build_proc(tmp_path, mounts, own, folders, delegated)
    if expected is None:
        with pytest.raises(NoGroupError, match="not mounted here, or not handed down"):
            find_parent(proc)
    else:
        assert find_parent(proc) == (tmp_path / expected[0], expected[1])
