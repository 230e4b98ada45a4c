"""Under a memory limit mapped pages are dropped and read again; private copies are not.

A process enters a control group with a limit, loads a cold file, touches every byte, and touches every byte once more.
What of a mapping does not fit is dropped, and read from the disk again. A private copy cannot be dropped: without swap
the kernel ends the process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import pandas as pd

from anchorage.diskio import bytes_from_disk
from anchorage.loading.fresh import FreshProcesses, KilledError
from anchorage.loading.memorygroup import MemoryGroup, NoGroupError, make_group
from anchorage.loading.methods import IMPORTS, METHODS
from anchorage.loading.pagecache import make_cold, never_cold, residency
from anchorage.loading.subject import MEASURED, NOT_RUN, Subject
from anchorage.loading.trial import COLD, check_tensors, prove
from anchorage.memory import MIB

# A line is a case.
COLUMNS = {
    "key": "key of the capture",
    "subject": "what is loaded: big",
    "method": "name in the table of methods: load_file maps, torch.load copies",
    "limit_of": "what the limit leaves beside base_mib, as a part of the file's size; none: there is no limit",
    "limit_mib": "of the control group",
    "base_mib": "the most that was charged to a group whose process loaded nothing",
    "status": "measured, killed (by the kernel: the limit left no memory), not run",
    "reason": "why killed or not run",
    "resident_before": "fraction of the file's pages in the page cache right before",
    "first_pass_s": "to load the cold file and to read every byte of its tensors",
    "second_pass_s": "to read every byte of the tensors again",
    "first_bytes_from_disk": "what the process made the kernel read from storage in the first pass, with read-ahead",
    "second_bytes_from_disk": "the same in the second pass",
    "file_bytes": "size of the file",
    "anonymous_mib": "charged to the group after the second pass: memory that no file backs",
    "file_mib": "the same: pages of the page cache",
    "swap_mib": "the same: swapped out; empty where the kernel does not count it",
    "max_usage_mib": "the most that was charged to the group at once; empty where the kernel does not tell",
}
# Empty in lines that are not run, which would make them fractions.
_WHOLE = ["first_bytes_from_disk", "second_bytes_from_disk", "file_bytes"]


# Of a smaller file, what loading itself allocates, and what the kernel reads ahead, would decide instead of its size.
_MIN_FILE_MIB = 32


@dataclass(frozen=True)
class Case:
    """A method under a limit: ``share`` of the file's size beside what the process itself needs, or None."""

    method: str
    share: float | None

    @property
    def limit_of(self) -> str:
        return "none" if self.share is None else f"{self.share:.0%} of the file"


# The copy that fits needs its own bytes, and some pages of the page cache to read through.
CASES = (Case("load_file", None), Case("load_file", 0.6), Case("torch.load", 0.6), Case("torch.load", 1.5))


def measure_pressure(key: str, subject: Subject, log: Callable[[str], None]) -> pd.DataFrame:
    """Run all cases.

    Args:
        key: of the capture.
        subject: what is loaded.
        log: is told each row.

    Returns:
        The columns of :data:`COLUMNS`.

    Raises:
        MeasurementError: a case could not be measured although memory can be limited here.
    """
    rows = []
    with FreshProcesses(*IMPORTS, "anchorage.loading.trial", __name__) as processes:
        base, missing = _measure_base(processes, subject)
        for case in CASES:
            suffix = METHODS[case.method].suffix
            reason = missing or _why_not(subject, suffix)
            found = {"status": NOT_RUN, "reason": reason} if reason else _measure(processes, subject, case, base)
            rows.append(
                {"key": key, "subject": subject.name, "method": case.method, "limit_of": case.limit_of}
                | {"file_bytes": subject.file_bytes[suffix], **found}
            )
            log(f"{case.method}, limit {case.limit_of}: {found['status']} {found.get('reason') or ''}".rstrip())
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype(dict.fromkeys(_WHOLE, "Int64"))


def _why_not(subject: Subject, suffix: str) -> str | None:
    if subject.file_bytes[suffix] < _MIN_FILE_MIB * MIB:
        return f"the file is too small: it takes {_MIN_FILE_MIB} MiB to tell it from what loading itself needs"
    return never_cold(subject.files[suffix])


def _measure_base(processes: FreshProcesses, subject: Subject) -> tuple[int, str | None]:
    """Bytes charged for a process that loads nothing, or why no memory can be limited here."""
    try:
        return _run(processes, subject, None, None)["max_usage"] or 0, None
    except NoGroupError as error:
        return 0, str(error)


def _measure(processes: FreshProcesses, subject: Subject, case: Case, base: int) -> dict[str, Any]:
    suffix = METHODS[case.method].suffix
    limit = None if case.share is None else base + int(case.share * subject.file_bytes[suffix])
    make_cold(subject.files[suffix])
    found = _run(processes, subject, case.method, limit)
    mib = {
        f"{name}_mib": None if found.get(name) is None else round(found.pop(name) / MIB, 2)
        for name in ("anonymous", "file", "swap", "max_usage")
    }
    limits = {"base_mib": round(base / MIB, 2), "limit_mib": limit and round(limit / MIB, 2)}
    return limits | mib | found


def _run(processes: FreshProcesses, subject: Subject, method: str | None, limit: int | None) -> dict[str, Any]:
    """One process in a group of its own; ``max_usage`` is in bytes."""
    with make_group() as group:
        group.limit(limit)
        place = {"folder": str(group.folder), "version": group.version}
        try:
            found = processes.call(touch_twice, **place, subject=subject.to_json(), method=method)
        except KilledError:
            if not group.n_killed():
                raise
            found = {"status": "killed", "reason": "the kernel ended it: the limit left it no memory"}
        if "refused" in found:
            raise NoGroupError(found["refused"])
        return found | {"max_usage": group.peak()}


def touch_twice(*, folder: str, version: int, subject: dict[str, Any], method: str | None) -> dict[str, Any]:
    """In a fresh process: enter a group, load, touch every byte, and again. Without a method: enter only.

    Returns:
        The measured columns, those in MiB as bytes and without their unit; ``refused`` where it may not enter.
    """
    group = MemoryGroup(Path(folder), version)
    try:
        group.enter()
    except NoGroupError as error:
        return {"refused": str(error)}
    if method is None:
        return {}
    facts = Subject.from_json(subject)
    path, resident = facts.files[METHODS[method].suffix], residency(facts.files[METHODS[method].suffix]).fraction
    marks = [(perf_counter(), bytes_from_disk() or 0)]
    tensors = METHODS[method].load(path, facts, tuple(facts.digests))
    for _ in ("first", "second"):
        check_tensors(path, facts, {name: tensors[name] for name in facts.digests})
        marks.append((perf_counter(), bytes_from_disk() or 0))
    (start, none), (middle, some), (end, all_of_it) = marks
    # What is dropped before it was used is read twice, so the first pass may read more than the file.
    cold = {"state": COLD, "resident_before": resident, "bytes_from_disk": some - none}
    prove(cold | {"touched_bytes": sum(facts.tensor_bytes.values())}, file=path, reads_all=False)
    return {
        "status": MEASURED,
        "resident_before": resident,
        "first_pass_s": round(middle - start, 6),
        "second_pass_s": round(end - middle, 6),
        "first_bytes_from_disk": some - none,
        "second_bytes_from_disk": all_of_it - some,
        **group.usage(),
    }
