"""Several processes that hold the same tensors: private copies against shared maps.

Only PSS can be summed: it divides a page among the processes that map it. RSS counts a shared page once a process, and
neither counts pages of the page cache that nobody maps, which a copying method leaves there.
"""

from __future__ import annotations

import json
import os
import random
import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import psutil

from anchorage.driver import die_with_parent
from anchorage.errors import MeasurementError
from anchorage.loading.fresh import FreshProcesses
from anchorage.loading.methods import IMPORTS, METHODS
from anchorage.loading.pagecache import residency
from anchorage.loading.subject import MEASURED, NOT_RUN, Subject
from anchorage.loading.trial import check_tensors
from anchorage.memory import MIB, kernel_fields

if TYPE_CHECKING:
    from torch import Tensor

# A line is a method and a number of workers.
COLUMNS = {
    "key": "key of the capture whose model is loaded",
    "subject": "what is loaded: weights",
    "method": "name in the table of methods",
    "n_workers": "processes that hold the tensors at once, every byte touched",
    "position": "number in the order in which the job measured, drawn with the seed",
    "status": "measured, not run",
    "reason": "why not run",
    "pss_mib": "PSS of all workers together: a page that k processes map, their parent included, counts a k-th in each",
    "base_pss_mib": "the same of as many workers that hold nothing; loading adds the tensors and some MiB of code",
    "anonymous_mib": "of all workers together, memory that no file backs; what they share counts in each",
    "base_anonymous_mib": "the same of as many workers that hold nothing",
    "rss_mib": "resident memory of all workers together; what they share counts in each",
    "page_cache_mib": "of the file, while they hold the tensors, mapped or not",
    "file_bytes": "size of the file",
}
WORKERS = (1, 2, 3, 4)
# Of each format the first method that copies the whole file and the first that maps it.
COMPARED = tuple(
    {(method.suffix, method.maps): name for name, method in reversed(METHODS.items()) if not method.first_only}.values()
)[::-1]

_KILLED = "a worker was killed, most likely by the kernel because no memory was left"
_ROLLUP = Path("/proc/self/smaps_rollup")


def measure_workers(
    key: str, subject: Subject, *, methods: Sequence[str], seed: int, log: Callable[[str], None]
) -> pd.DataFrame:
    """Run each of the COMPARED methods with each number of WORKERS, in an order drawn with the seed.

    Args:
        key: of the capture.
        subject: what is held.
        methods: the configured ones.
        seed: of the order.
        log: is told each row.

    Returns:
        The columns of :data:`COLUMNS`, by method and number.

    Raises:
        MeasurementError: a worker could not load, or got other bytes than were written.
    """
    cases = [(method, n_workers) for method in COMPARED if method in methods for n_workers in WORKERS]
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    bases: dict[int, dict[str, Any]] = {}
    with FreshProcesses(*IMPORTS, "anchorage.loading.trial", __name__) as processes:
        for position, (method, n_workers) in enumerate(random.Random(seed).sample(cases, len(cases))):
            found = _measure(processes, subject, (method, n_workers), bases)
            outcome = found.get("reason") or f"PSS {found['pss_mib']} MiB"
            log(f"{method}, {n_workers} workers: {found['status']}, {outcome}")
            rows[method, n_workers] = {
                "key": key,
                "subject": subject.name,
                "method": method,
                "n_workers": n_workers,
                "position": position,
                "file_bytes": subject.file_bytes[METHODS[method].suffix],
                **found,
            }
    return pd.DataFrame([rows[case] for case in cases], columns=list(COLUMNS))


def _measure(
    processes: FreshProcesses, subject: Subject, case: tuple[str, int], bases: dict[int, dict[str, Any]]
) -> dict[str, Any]:
    """A method and number of workers; ``bases`` keeps what as many workers take that hold nothing."""
    method, n_workers = case
    if reason := _why_not(subject, method, n_workers):
        return {"status": NOT_RUN, "reason": reason}
    arguments = {"subject": subject.to_json(), "n_workers": n_workers}
    if n_workers not in bases:
        base = processes.call(hold_together, **arguments, method=None)
        bases[n_workers] = {f"base_{name}": base[name] for name in ("pss_mib", "anonymous_mib")}
    held = processes.call(hold_together, **arguments, method=method)
    if "killed" in held:
        return {"status": NOT_RUN, "reason": held["killed"]}
    return {"status": MEASURED, **held, **bases[n_workers]}


def _why_not(subject: Subject, method: str, n_workers: int) -> str | None:
    if not _ROLLUP.exists():
        return "the kernel has no /proc/PID/smaps_rollup: it does not tell what processes share"
    # A mapping takes the page cache, which can be dropped, once; the copies are private.
    n_copies = 1 if METHODS[method].maps else n_workers
    needed = n_copies * sum(subject.tensor_bytes.values()) / MIB
    available = psutil.virtual_memory().available / MIB
    if needed > available:
        return f"it would take {needed:.0f} MiB of memory, and {available:.0f} MiB are available"
    return None


@dataclass(frozen=True)
class _Worker:
    pid: int
    answers: int  # descriptor of the pipe that says how loading went


def hold_together(*, subject: dict[str, Any], method: str | None, n_workers: int) -> dict[str, Any]:
    """In a fresh process: have workers load and touch the tensors one after another, and measure while all hold them.

    Args:
        subject: as JSON.
        method: how to load; None holds nothing.
        n_workers: how many.

    Returns:
        The measured columns; ``killed`` where a worker was ended by SIGKILL.

    Raises:
        MeasurementError: a worker ended otherwise.
    """
    facts, workers = Subject.from_json(subject), []
    try:
        for _ in range(n_workers):
            workers.append(_start_worker(facts, method))
            if not _has_loaded(workers[-1]):
                return {"killed": _KILLED}
        try:
            fields = [kernel_fields(Path(f"/proc/{worker.pid}/smaps_rollup")) for worker in workers]
        except ProcessLookupError:
            return {"killed": _KILLED}
        sums = {name: round(sum(field[name] for field in fields) / MIB, 2) for name in ("Pss", "Anonymous", "Rss")}
        found = {f"{name.lower()}_mib": value for name, value in sums.items()}
        if method is not None:
            path = Path(facts.files[METHODS[method].suffix])
            found["page_cache_mib"] = round(residency(path).fraction * path.stat().st_size / MIB, 2)
        return found
    finally:
        for worker in workers:
            os.kill(worker.pid, signal.SIGKILL)
            os.waitpid(worker.pid, 0)
            os.close(worker.answers)


def _start_worker(subject: Subject, method: str | None) -> _Worker:
    answers, write_end = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            die_with_parent()
            _hold(subject, method, write_end)
        finally:
            os._exit(0)
    os.close(write_end)
    return _Worker(pid, answers)


def _hold(subject: Subject, method: str | None, write_end: int) -> None:
    """Load, say how that went, hold what was loaded until this process is killed."""
    try:
        held, problem = _load(subject, method) if method else {}, ""
    except BaseException:
        held, problem = {}, traceback.format_exc()[-2000:]
    os.write(write_end, json.dumps(problem).encode() + b"\n")
    while held is not None:
        signal.pause()


def _load(subject: Subject, method: str) -> Mapping[str, Tensor]:
    path = subject.files[METHODS[method].suffix]
    tensors = METHODS[method].load(path, subject, tuple(subject.digests))
    check_tensors(path, subject, {name: tensors[name] for name in subject.digests})
    return tensors


def _has_loaded(worker: _Worker) -> bool:
    """Wait until a worker holds its tensors; False if it was killed instead. MeasurementError says why it failed."""
    with os.fdopen(os.dup(worker.answers)) as pipe:
        line = pipe.readline()
    if line and (problem := json.loads(line)):
        raise MeasurementError(f"a worker could not load: {problem}")
    return bool(line)
