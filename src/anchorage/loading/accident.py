"""The page cache measured by accident: what a benchmark that drops nothing really measures.

A "cold" measurement is made four times of one file. Twice nothing was dropped before it: once the file had just been
measured, once it is a fresh copy. The proof that every measurement of this lab must pass is asked what it says of each.
Source: "What happens when you save a file?", Break It 4.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from anchorage.durable import temp_path
from anchorage.errors import MeasurementError
from anchorage.loading.fresh import FreshProcesses
from anchorage.loading.methods import IMPORTS, METHODS
from anchorage.loading.pagecache import make_cold, never_cold
from anchorage.loading.subject import MEASURED, NOT_RUN, Subject
from anchorage.loading.trial import AS_FOUND, COLD, measure, prove

METHOD, PROVED = "load_file", "cold, proved"

# A line is a step, in their order.
COLUMNS = {
    "key": "key of the capture",
    "subject": "what is loaded: big",
    "method": "name in the table of methods: load_file",
    "step": "dropped, again, copied, dropped-again",
    "what": "what was done before and measured, a sentence",
    "status": "measured, not run",
    "reason": "why not run",
    "claimed": "the state that such a benchmark would report: cold",
    "resident_before": "fraction of the file's pages in the page cache right before",
    "bytes_from_disk": "what the process made the kernel read from storage, load to touch, read-ahead included",
    "file_bytes": "size of the file",
    "total_s": "to load the tensors and to read every byte of them",
    "of_cold_time": "total_s / total_s of the step dropped",
    "verdict": "cold, proved; or refused, and the words of the refusal",
}
# Empty in lines that are not run, which would make them fractions.
_WHOLE = ["bytes_from_disk", "file_bytes"]
STEPS = {
    "dropped": "The file's pages were dropped, and the file was measured.",
    "again": "It was measured again, and nothing was dropped.",
    "copied": "Its pages were dropped, it was copied with shutil.copy, and the copy was measured.",
    "dropped-again": "Its pages were dropped once more, and it was measured.",
}


def show_accident(key: str, subject: Subject, log: Callable[[str], None]) -> pd.DataFrame:
    """Measure all steps.

    Args:
        key: of the capture.
        subject: what is loaded.
        log: is told each step's verdict.

    Returns:
        The columns of :data:`COLUMNS`.

    Raises:
        MeasurementError: a file whose pages were dropped was not measured cold.
        OSError: the copy does not fit on the disk.
    """
    suffix = METHODS[METHOD].suffix
    path = subject.files[suffix]
    shared = {"key": key, "subject": subject.name, "method": METHOD, "claimed": COLD}
    if reason := never_cold(path):
        log(f"not run: {reason}")
        not_run = shared | {"status": NOT_RUN, "reason": reason, "file_bytes": subject.file_bytes[suffix]}
        return _table([not_run | {"step": step, "what": what} for step, what in STEPS.items()])
    with FreshProcesses(*IMPORTS, "anchorage.loading.trial") as fresh:
        rows = _run_steps(fresh, subject)
    for row in rows:
        verdict = _judge(row, subject)
        row |= shared | {"status": MEASURED, "what": STEPS[row["step"]], "verdict": verdict}
        row["of_cold_time"] = round(row["total_s"] / rows[0]["total_s"], 4)
        log(f"{row['step']}: {row['total_s']:.3f} s; {verdict}")
        if row["step"].startswith("dropped") and verdict != PROVED:
            raise MeasurementError(verdict)
    return _table(rows)


def _run_steps(fresh: FreshProcesses, subject: Subject) -> list[dict[str, Any]]:
    def look(step: str, measured: Subject) -> dict[str, Any]:
        """Measure what there is; no state is claimed yet, so that nothing is refused."""
        row = fresh.call(measure, subject=measured.to_json(), method=METHOD, state=AS_FOUND)
        return row | {"step": step, "file": measured.files[METHODS[METHOD].suffix]}

    path = subject.files[METHODS[METHOD].suffix]
    make_cold(path)
    rows = [look("dropped", subject), look("again", subject)]
    make_cold(path)
    with _copied(subject) as copy:
        rows.append(look("copied", copy))
    make_cold(path)
    return [*rows, look("dropped-again", subject)]


@contextmanager
def _copied(subject: Subject) -> Iterator[Subject]:
    """A plain copy of the measured file beside it. Should this process be killed, the next driver sweeps it."""
    path = Path(subject.files[METHODS[METHOD].suffix])
    copy = temp_path(path)
    try:
        shutil.copy(path, copy)
        yield replace(subject, files={**subject.files, path.suffix: str(copy)})
    finally:
        copy.unlink(missing_ok=True)


def _judge(row: dict[str, Any], subject: Subject) -> str:
    """What the proof says if a step's measurement is reported as cold."""
    reads_all = METHODS[METHOD].reads_all(subject)
    try:
        prove(row | {"state": COLD}, file=row["file"], reads_all=reads_all)
    except MeasurementError as error:
        return f"refused: {error}"
    return PROVED


def _table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype(dict.fromkeys(_WHOLE, "Int64"))
