"""What forcing bytes to the disk costs, call by call, on the filesystem at hand.

Every mode of a question is measured in turn, round after round, so that a disk that gets slower or busier favours none.
Each mode has a file of its own in a folder that is removed afterwards.
"""

from __future__ import annotations

import fcntl
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from anchorage.diskio import bytes_from_disk
from anchorage.errors import MeasurementError

BLOCK_BYTES = 4096
_BYTES_A_CALL = 1000  # single bytes are written by as many calls, and a call's share is told
_ROUND = 20  # calls of a mode, before the next mode has its turn
_BIG_CALL_BYTES = 16 << 20
_COLD_SHARE = 0.98  # of the bytes asked for that must come from the disk

COLUMNS = {
    "what": "the question: write 4 KiB; write 1 byte; big write; rename; overwrite 4 KiB; read 4 KiB",
    "mode": "how it is done, see MODES",
    "n": "calls measured",
    "p10_us": "a tenth of the calls took less, microseconds",
    "p50_us": "half of them took less",
    "p90_us": "nine in ten took less",
    "p99_us": "99 in 100 took less",
    "mean_us": "mean time of a call",
    "bytes": "bytes that a call moves; 0: none, or not the point",
    "status": "measured, or not run",
    "reason": "why not run",
}
MODES = {
    "write 4 KiB": {
        "none": "append 4 KiB: they wait in the kernel",
        "fsync": "append, fsync: data and all metadata; on Linux the drive is told to flush its cache",
        "fdatasync": "append, fdatasync: the metadata that reading back needs alone; not on macOS",
        "O_DSYNC": "append to a file opened so: each write as if followed by fdatasync",
        "O_SYNC": "append to a file opened so: each write as if followed by fsync",
        "F_FULLFSYNC": "append, fcntl(F_FULLFSYNC): macOS alone, whose fsync leaves bytes in the drive's cache",
    },
    "write 1 byte": {
        "buffered": "through Python's buffer: a copy in the process",
        "unbuffered": "without it: a system call each; mean of a thousand calls",
    },
    "big write": {
        "write": "all bytes of a new file, in calls of 16 MiB; the kernel may make the writer wait",
        "fsync": "the fsync after it",
    },
    "rename": {
        "rename": "replace a name by another",
        "folder fsync": "the fsync of the folder after it",
    },
    "overwrite 4 KiB": {
        "sequential": "in place, side by side; a twentieth of twenty, with the fsync after them",
        "scattered": "in place, anywhere in a file that is large against them; likewise",
    },
    "read 4 KiB": {
        "sequential": "side by side, of a file of which nothing is in memory at first; the kernel reads ahead",
        "scattered": "anywhere in it, likewise; the kernel is told (POSIX_FADV_RANDOM), and reads nothing more",
    },
}


@dataclass
class _Costs:
    """Times in seconds by question and mode, bytes a call, and why a mode was not run."""

    times: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    n_bytes: dict[tuple[str, str], int] = field(default_factory=dict)
    refused: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, what: str, mode: str, seconds: float, n_bytes: int) -> None:
        self.times.setdefault((what, mode), []).append(seconds)
        self.n_bytes[what, mode] = n_bytes

    def refuse(self, what: str, mode: str, reason: str) -> None:
        """Do not report a mode of a question."""
        self.times.pop((what, mode), None)
        self.refused[what, mode] = reason


def measure_costs(
    folder: Path, *, n_calls: int = 200, big_mib: int = 256, big_repeats: int = 3, file_mib: int = 64, seed: int = 0
) -> pd.DataFrame:
    """Measure the costs in a folder: ``fsync_cost.csv``, see :data:`COLUMNS`.

    Args:
        folder: on the filesystem to be measured; what is made there is removed.
        n_calls: calls of each mode.
        big_mib: size of the big write, MiB.
        big_repeats: how often it is made.
        file_mib: size of each of the four files that are overwritten and read in places, MiB.
        seed: of the scattered places.

    Raises:
        MeasurementError: there is no room.
    """
    stats, needed_mib = os.statvfs(folder), 2 * big_mib + 4 * file_mib
    if stats.f_bavail * stats.f_frsize < needed_mib << 20:
        raise MeasurementError(f"{folder}: no room for {needed_mib} MiB. Free some, or lower big_mib and file_mib")
    costs, n_blocks = _Costs(), (file_mib << 20) // BLOCK_BYTES
    scattered = random.Random(seed).sample(range(n_blocks), n_calls)
    with tempfile.TemporaryDirectory(dir=folder, prefix="fsync-cost-") as scratch:
        place = Path(scratch)
        _append_blocks(costs, place, n_calls)
        _write_bytes(costs, place, n_calls)
        _rename(costs, place, n_calls)
        _overwrite(costs, place, n_blocks, scattered)
        _read(costs, place, n_blocks, scattered)
        for _ in range(big_repeats):
            _write_big(costs, place, big_mib << 20)
    return _tabulate(costs)


def _append_blocks(costs: _Costs, folder: Path, n: int) -> None:
    what, block = "write 4 KiB", os.urandom(BLOCK_BYTES)
    force = _forces()
    for mode in MODES[what].keys() - force.keys():
        costs.refused[what, mode] = "this system does not have it"
    flags = {mode: getattr(os, mode) for mode in ("O_DSYNC", "O_SYNC")}
    files = {mode: os.open(folder / mode, os.O_WRONLY | os.O_CREAT | flags.get(mode, 0), 0o600) for mode in force}
    for turn in _rounds(n):
        for mode, file in files.items():
            for _ in turn:
                started = time.perf_counter()
                os.write(file, block)
                force[mode](file)
                costs.add(what, mode, time.perf_counter() - started, BLOCK_BYTES)
    for file in files.values():
        os.close(file)


def _forces() -> dict[str, Callable[[int], object]]:
    """What follows a write, by mode; what this system lacks is left out."""
    forces: dict[str, Callable[[int], object]] = {"none": int, "fsync": os.fsync, "O_DSYNC": int, "O_SYNC": int}
    if sys.platform == "darwin":
        forces["F_FULLFSYNC"] = lambda file: fcntl.fcntl(file, fcntl.F_FULLFSYNC)
    else:
        forces["fdatasync"] = os.fdatasync
    return forces


def _rounds(n: int) -> Iterator[range]:
    for start in range(0, n, _ROUND):
        yield range(start, min(start + _ROUND, n))


def _write_bytes(costs: _Costs, folder: Path, n: int) -> None:
    """A call is too short to be timed alone."""
    with open(folder / "buffered", "wb") as buffered, open(folder / "unbuffered", "wb", 0) as unbuffered:
        writes: dict[str, Callable[[bytes], object]] = {"buffered": buffered.write, "unbuffered": unbuffered.write}
        for _ in range(n):
            for mode, write in writes.items():
                started = time.perf_counter()
                for _ in range(_BYTES_A_CALL):
                    write(b"x")
                costs.add("write 1 byte", mode, (time.perf_counter() - started) / _BYTES_A_CALL, 1)


def _rename(costs: _Costs, folder: Path, n: int) -> None:
    parent = os.open(folder, os.O_RDONLY)
    for _ in range(n):
        with open(folder / "renamed.tmp", "wb") as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())  # else ext4 writes a file's bytes out as it replaces another's name
        os.fsync(parent)  # so that the name made here is in neither time
        started = time.perf_counter()
        os.replace(folder / "renamed.tmp", folder / "renamed")
        renamed = time.perf_counter()
        os.fsync(parent)
        costs.add("rename", "rename", renamed - started, 0)
        costs.add("rename", "folder fsync", time.perf_counter() - renamed, 0)
    os.close(parent)


def _prepare(path: Path, n_blocks: int) -> int:
    """A file that is on the disk, and not in memory as far as the kernel heeds the advice."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    block = os.urandom(BLOCK_BYTES)
    for _ in range(n_blocks):
        os.write(file, block)
    os.fsync(file)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    return file


def _overwrite(costs: _Costs, folder: Path, n_blocks: int, scattered: Sequence[int]) -> None:
    block, places = os.urandom(BLOCK_BYTES), {"sequential": range(len(scattered)), "scattered": scattered}
    files = {mode: _prepare(folder / f"overwritten-{mode}", n_blocks) for mode in places}
    for turn in _rounds(len(scattered)):
        for mode, file in files.items():
            started = time.perf_counter()
            for call in turn:
                os.pwrite(file, block, places[mode][call] * BLOCK_BYTES)
            os.fsync(file)
            costs.add("overwrite 4 KiB", mode, (time.perf_counter() - started) / len(turn), BLOCK_BYTES)
    for file in files.values():
        os.close(file)


def _read(costs: _Costs, folder: Path, n_blocks: int, scattered: Sequence[int]) -> None:
    what, places = "read 4 KiB", {"sequential": range(len(scattered)), "scattered": scattered}
    if not hasattr(os, "posix_fadvise"):
        for mode in places:
            costs.refuse(what, mode, "this system cannot be asked to drop a file from memory")
        return
    files = {mode: _prepare(folder / f"read-{mode}", n_blocks) for mode in places}
    os.posix_fadvise(files["scattered"], 0, 0, os.POSIX_FADV_RANDOM)
    came = dict.fromkeys(files, 0)
    for turn in _rounds(len(scattered)):
        for mode, file in files.items():
            before = bytes_from_disk() or 0
            for call in turn:
                started = time.perf_counter()
                os.pread(file, BLOCK_BYTES, places[mode][call] * BLOCK_BYTES)
                costs.add(what, mode, time.perf_counter() - started, BLOCK_BYTES)
            came[mode] += (bytes_from_disk() or 0) - before
    for file in files.values():
        os.close(file)
    asked = len(scattered) * BLOCK_BYTES
    for mode, n_bytes in came.items():  # apart: what one reads ahead is no proof for the other
        if n_bytes < _COLD_SHARE * asked:
            costs.refuse(what, mode, f"not cold: of {asked} bytes only {n_bytes} came from the disk")


def _write_big(costs: _Costs, folder: Path, n_bytes: int) -> None:
    path, block, left = folder / "big", memoryview(os.urandom(min(_BIG_CALL_BYTES, n_bytes))), n_bytes
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    started = time.perf_counter()
    while left:
        left -= os.write(file, block[:left])
    written = time.perf_counter()
    os.fsync(file)
    costs.add("big write", "write", written - started, n_bytes)
    costs.add("big write", "fsync", time.perf_counter() - written, n_bytes)
    os.close(file)
    path.unlink()


def _tabulate(costs: _Costs) -> pd.DataFrame:
    rows = []
    for what, modes in MODES.items():
        for mode in modes:
            row: dict[str, Any] = {"what": what, "mode": mode, "n": 0, "bytes": 0, "status": "not run"}
            row["reason"] = costs.refused.get((what, mode), "")
            if times := costs.times.get((what, mode)):
                micros = np.array(times) * 1e6
                row |= {f"p{p}_us": float(np.percentile(micros, p)) for p in (10, 50, 90, 99)}
                row |= {"n": len(times), "mean_us": float(micros.mean()), "bytes": costs.n_bytes[what, mode]}
                row |= {"status": "measured"}
            rows.append(row)
    return pd.DataFrame(rows, columns=list(COLUMNS))
