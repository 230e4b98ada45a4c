"""All measurements of one subject and method, and the table of all of them."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from anchorage.errors import MeasurementError
from anchorage.loading.fresh import FreshProcesses
from anchorage.loading.methods import IMPORTS, METHODS
from anchorage.loading.pagecache import (
    cold_kind,
    filesystem,
    hold,
    kernel,
    make_cold,
    make_warm,
    mapped_files,
    never_cold,
)
from anchorage.loading.subject import Subject
from anchorage.loading.trial import AS_FOUND, COLD, WARM, measure
from anchorage.store.identity import check_key

MEASURED, NOT_RUN = "measured", "not run"

# A line is a measurement in a process of its own, or says why there is none.
COLUMNS = {
    "key": "key of the capture whose model and cache are loaded",
    "subject": "what is loaded: weights, big, shard",
    "method": "name in the table of methods",
    "state": "as-found (nothing set: it is the first), cold or warm (set and proved); empty: the method cannot run",
    "repeat": "number within the state, from 0",
    "position": "number in the order in which the job measured, drawn with the seed",
    "status": "measured, not run",
    "reason": "why not run",
    "load_s": "until the method returned the tensors",
    "first_forward_s": "the model's first forward pass after that; weights only",
    "touch_s": "every byte of the wanted tensors read, by the checksum that is compared with what was written",
    "total_s": "sum of the three",
    "file_bytes": "size of the file that the method reads",
    "touched_bytes": "size of the wanted tensors",
    "gb_s": "touched_bytes / 1e9 / total_s",
    "bytes_from_disk": "what the process made the kernel read from storage, load to touch, read-ahead included",
    "resident_before": "fraction of the file's pages in the page cache right before",
    "resident_after": "the same right after, with the tensors held",
    "residency_by": "the call that said so: cachestat, mincore",
    "cold_kind": "of cold ones: guest-cold where a hypervisor is seen, whose own cache is not, else cold",
    "peak_mib": "highest resident memory of the process (VmHWM), its libraries included",
    "base_mib": "resident memory before loading",
    "anonymous_mib": "rise of memory that no file backs, from before loading to after touching, with the tensors held",
    "file_mib": "the same of memory that maps files: the subject's, and some 10 MiB of libraries' code as it runs",
    "major_faults": "page faults that waited for the disk, load to touch",
    "minor_faults": "page faults that did not",
    "filesystem": "that the file lies on",
    "kernel": "name and release",
}
# Empty in lines that are not run, which would make them fractions.
_WHOLE = ["repeat", "position", "file_bytes", "touched_bytes", "bytes_from_disk", "major_faults", "minor_faults"]


def measure_method(
    subject: Subject,
    method: str,
    *,
    key: str,
    repeats: int,
    seed: int,
    drop_caches: bool,
    log: Callable[[str], None],
) -> pd.DataFrame:
    """Measure one subject by one method: as found, then cold and warm in an order drawn with the seed.

    Args:
        subject: what is loaded.
        method: its name in ``METHODS``.
        key: of the capture.
        repeats: measurements of cold and of warm.
        seed: of the order, with the subject's and the method's name.
        drop_caches: for cold ones, as root, drop the machine's page cache too.
        log: gets a line a measurement.

    Returns:
        The columns of :data:`COLUMNS` in the order in which they ran, then what is not run.

    Raises:
        MeasurementError: a state cannot be made or was not what it claims, a tensor is wrong, a process was ended.
    """
    path = subject.files[METHODS[method].suffix]
    about = {"key": key, "subject": subject.name, "method": method, "filesystem": filesystem(path), "kernel": kernel()}
    if missing := [name for name in METHODS[method].needs if importlib.util.find_spec(name) is None]:
        log(f"{method}: {', '.join(missing)} not installed")
        return _table([about | {"status": NOT_RUN, "reason": f"{', '.join(missing)} not installed"}])
    order, not_run = draw_states(f"{seed} {subject.name} {method}", repeats), []
    if reason := never_cold(path):
        log(reason)
        order = [(state, repeat) for state, repeat in order if state != COLD]
        not_run = [about | {"state": COLD, "status": NOT_RUN, "reason": reason}]
    lines = []
    bar = tqdm(order, desc=f"{subject.name} {method}", unit="measurement", disable=None)
    with FreshProcesses(*_preloaded(subject, method)) as fresh, bar:
        held: list[Any] = []
        for position, (state, repeat) in enumerate(bar):
            _set_state(fresh, subject, method, state, drop_caches)
            line = fresh.call(measure, subject=subject.to_json(), method=method, state=state)
            if drop_caches and not held:  # now that all code that a measurement runs has been read
                held = hold(fresh.call(mapped_files))
            lines.append(about | line | {"repeat": repeat, "position": position, "status": MEASURED})
            log(f"{state}: {line['total_s']:.3f} s, {line['bytes_from_disk']} bytes from disk")
    return _table([*lines, *not_run])


def draw_states(seed: str, repeats: int) -> list[tuple[str, int]]:
    """States and repeats in the order to measure in: as found first, for measuring changes what is found."""
    drawn = [(state, repeat) for state in (COLD, WARM) for repeat in range(repeats)]
    random.Random(seed).shuffle(drawn)
    return [(AS_FOUND, 0), *drawn]


def tabulate(
    paths: Sequence[Path], *, key: str, subjects: Sequence[str], methods: Sequence[str], repeats: int
) -> pd.DataFrame:
    """Bring the tables of all subjects and methods into one, in their order.

    Args:
        paths: of the tables.
        key: the capture key that the subjects carry.
        subjects, methods: each pair of which must be there once.
        repeats: measurements of cold and of warm that must be there, unless that is not run.

    Raises:
        AnchorageError: a table is of another key, or measurements are missing, too many or of something else.
    """
    tables = []
    for path in paths:
        tables.append(pd.read_csv(path))
        for found in tables[-1]["key"].unique():
            check_key(str(path), found, key)
    lines = pd.concat([table.astype(dict.fromkeys(_WHOLE, "Int64")) for table in tables])
    found = dict(iter(lines.groupby(["subject", "method"])))
    expected = [(subject, method) for subject in subjects for method in methods]
    faults = [f"{subject}/{method}" for subject, method in found if (subject, method) not in expected]
    faults += [f"{a}/{b}" for a, b in expected if (a, b) not in found or not is_whole(found[a, b], repeats)]
    if faults:
        raise MeasurementError(
            f"the tables of {', '.join(faults)} do not hold each wanted measurement once. Remove those among "
            f"{', '.join(map(str, paths))}, and run the command again"
        )
    return pd.concat([found[pair] for pair in expected])[list(COLUMNS)]


def is_whole(lines: pd.DataFrame, repeats: int) -> bool:
    """Whether the lines of a subject and method are all there: one that is not run, or every repeat of every state."""
    filled = lines[["status", "state", "repeat"]].fillna({"state": "", "repeat": -1})
    known = sorted(filled.itertuples(index=False, name=None))
    if known == [(NOT_RUN, "", -1)]:
        return True
    demanded = [(MEASURED, state, repeat) for state, repeat in draw_states("", repeats)]
    without_cold = [line for line in demanded if line[1] != COLD] + [(NOT_RUN, COLD, -1)]
    return known in (sorted(demanded), sorted(without_cold))


def _set_state(fresh: FreshProcesses, subject: Subject, method: str, state: str, drop_caches: bool) -> None:
    """Make a file cold or warm, from this process: what setting it reads is not the measurement's."""
    path = subject.files[METHODS[method].suffix]
    if state == COLD:
        make_cold(path, drop_caches=drop_caches)
    if state == WARM:
        if drop_caches:  # what else the method reads was dropped too: one load, not reported, brings it back
            fresh.call(measure, subject=subject.to_json(), method=method, state=AS_FOUND)
        make_warm(path)


def _preloaded(subject: Subject, method: str) -> list[str]:
    """Modules that a measurement would else import within its time."""
    modules = ["anchorage.loading.trial", *IMPORTS, "torch.utils.serialization.config", *METHODS[method].needs]
    return [*modules, "anchorage.loading.forward"] if subject.model else modules


def _table(lines: Sequence[dict[str, Any]]) -> pd.DataFrame:
    kinds = {"cold_kind": cold_kind()}
    rows = [line | kinds if line.get("state") == COLD else line for line in lines]
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype(dict.fromkeys(_WHOLE, "Int64"))
