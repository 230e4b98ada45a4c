"""Control groups of the Linux kernel that limit memory: made, entered, read, and always removed.

Both versions are used: 2 where its memory controller is handed down to a folder that this user may write, else 1. A
group lies below the one that this process is in, so that limits set from outside hold. The kernel charges a page to the
group whose process asked for it first, and leaves it there; so what a process held before it entered does not count,
nor do pages of a file that lay in the page cache already. Version 2 was tried on made-up folders only. Source: the
kernel's documents "Memory Resource Controller" (cgroup-v1/memory) and "Control Group v2".
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from anchorage.errors import MeasurementError
from anchorage.memory import process_name

_PREFIX = "anchorage-memory-"
_PROC = Path("/proc")
_REMOVAL_S = 10.0


class NoGroupError(MeasurementError):
    """No memory can be limited here; the message says why."""


@dataclass(frozen=True)
class _Names:
    """What the two versions call the same thing, and how they write it."""

    limit: str
    peak: str
    events: str
    no_limit: str
    anonymous: str
    file: str
    swap: str


_VERSIONS = {
    1: _Names("memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control", "-1", "rss", "cache", "swap"),
    2: _Names("memory.max", "memory.peak", "memory.events", "max", "anon", "file", "swap"),
}


@dataclass(frozen=True)
class MemoryGroup:
    """A control group.

    Attributes:
        folder: where the kernel shows it.
        version: of control groups, 1 or 2.
    """

    folder: Path
    version: int

    def enter(self) -> None:
        """Move this process into it; NoGroupError where the kernel refuses."""
        try:
            (self.folder / "cgroup.procs").write_text(str(os.getpid()))
        except OSError as error:
            raise NoGroupError(f"no process can be moved into {self.folder}: {error.strerror}") from error

    def limit(self, n_bytes: int | None) -> None:
        """Set the limit; None is none. Swap is not limited: where there is some, it is used."""
        names = _VERSIONS[self.version]
        (self.folder / names.limit).write_text(names.no_limit if n_bytes is None else str(n_bytes))

    def usage(self) -> dict[str, int | None]:
        """``anonymous``, ``file`` and ``swap``: bytes charged to it now, of memory that no file backs, of the page
        cache, and swapped out (None where the kernel does not count that here)."""
        names = _VERSIONS[self.version]
        fields = _fields(self.folder / "memory.stat")
        swap = fields.get(names.swap)
        with contextlib.suppress(OSError):
            swap = int((self.folder / "memory.swap.current").read_text())  # version 2 has it in a file of its own
        return {"anonymous": fields[names.anonymous], "file": fields[names.file], "swap": swap}

    def peak(self) -> int | None:
        """The most bytes that were charged to it at once; None where the kernel does not tell (before 5.19)."""
        with contextlib.suppress(OSError):
            return int((self.folder / _VERSIONS[self.version].peak).read_text())
        return None

    def n_killed(self) -> int:
        """Processes that the kernel ended because the limit left them no memory."""
        return _fields(self.folder / _VERSIONS[self.version].events)["oom_kill"]


@contextlib.contextmanager
def make_group() -> Iterator[MemoryGroup]:
    """Make a group; at the end, however it comes, what is in it is killed and it is removed.

    Groups of ours whose maker was killed are removed first.

    Raises:
        NoGroupError: none can be made here.
    """
    parent, version = find_parent()
    sweep_groups(parent)
    group = MemoryGroup(parent / f"{_PREFIX}{process_name()}-{secrets.token_hex(4)}", version)
    try:
        group.folder.mkdir()
    except OSError as error:
        raise NoGroupError(f"no control group can be made in {parent}: {error.strerror}") from error
    try:
        yield group
    finally:
        remove_group(group.folder)


def find_parent(proc: Path = _PROC) -> tuple[Path, int]:
    """The folder where groups can be made, and their version.

    Args:
        proc: where the kernel tells of processes.

    Raises:
        NoGroupError: says what is missing.
    """
    if sys.platform != "linux":
        raise NoGroupError("control groups are of Linux alone")
    mounts, own = _mounts(proc), _own_groups(proc)
    for version, name in ((2, ""), (1, "memory")):
        if version not in mounts or name not in own:
            continue
        top, inside = mounts[version]
        candidates = [folder for folder in _upwards(top, inside, own[name]) if _limits_below(folder, version)]
        if not candidates:
            continue
        writable = [folder for folder in candidates if _is_writable(folder)]
        if not writable:
            raise NoGroupError(f"this user may not make a control group in {candidates[0]}; root of the machine may")
        return writable[0], version
    raise NoGroupError("the memory controller of control groups is not mounted here, or not handed down to this place")


def sweep_groups(parent: Path) -> None:
    """Remove the groups of ours whose maker no longer lives, and kill what is still in them."""
    for folder in parent.glob(f"{_PREFIX}*"):
        if not _maker_lives(folder.name):
            remove_group(folder)


def remove_group(folder: Path) -> None:
    """Kill what is in a group, then remove it.

    Raises:
        MeasurementError: it could not be removed in time.
    """
    give_up = time.monotonic() + _REMOVAL_S
    while folder.exists():
        with contextlib.suppress(FileNotFoundError):
            for pid in (folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:  # busy until the last process is gone
            if time.monotonic() > give_up:
                raise MeasurementError(f"{folder} cannot be removed: {error.strerror}; rmdir it by hand") from error
            time.sleep(0.02)


def _mounts(proc: Path) -> dict[int, tuple[Path, str]]:
    """By version the mount of the memory controller: its folder, and the group that it shows as the topmost."""
    found: dict[int, tuple[Path, str]] = {}
    for line in (proc / "self/mountinfo").read_text().splitlines():
        mount, _, source = line.partition(" - ")
        kind, _, options = source.split(maxsplit=2)
        top, inside = Path(mount.split()[4]), mount.split()[3]
        if kind == "cgroup2":
            found[2] = top, inside
        elif kind == "cgroup" and "memory" in options.split(","):
            found[1] = top, inside
    return found


def _own_groups(proc: Path) -> dict[str, str]:
    """This process's group by controller; that of version 2 under the empty name."""
    groups: dict[str, str] = {}
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        groups |= dict.fromkeys(controllers.split(","), path)
    return groups


def _upwards(top: Path, inside: str, own: str) -> list[Path]:
    """Folders from a process's own group up to the mount's topmost; only that where the mount does not show the own."""
    relative = os.path.relpath(own, inside)
    start = top if relative.startswith("..") else top / relative
    return [folder for folder in (start, *start.parents) if folder == top or top in folder.parents]


def _limits_below(folder: Path, version: int) -> bool:
    """Whether memory can be limited in groups below a folder."""
    if version == 1:
        return folder.exists()
    with contextlib.suppress(OSError):
        return "memory" in (folder / "cgroup.subtree_control").read_text().split()
    return False


def _is_writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK) and os.access(folder / "cgroup.procs", os.W_OK)


def _maker_lives(name: str) -> bool:
    pid, created, _ = name.removeprefix(_PREFIX).split("-")
    try:
        process = psutil.Process(int(pid))
        return int(process.create_time()) == int(created) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _fields(path: Path) -> dict[str, int]:
    return {name: int(value) for name, value in (line.split() for line in path.read_text().splitlines())}
