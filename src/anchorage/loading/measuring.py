"""All measurements of one subject and method, and the table of all of them."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Mapping, Sequence
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
from anchorage.loading.subject import MEASURED, NOT_RUN, Subject
from anchorage.loading.trial import AS_FOUND, COLD, FORWARD, TOUCH, WARM, measure
from anchorage.store.identity import check_key

# A line is a measurement in a process of its own, or says why there is none.
COLUMNS = {
    "key": "key of the capture whose model and cache are loaded",
    "subject": "what is loaded: weights, big, shard",
    "method": "name in the table of methods",
    "state": "as-found (nothing set: it is the first), cold or warm (set and proved); empty: the method cannot run",
    "use": "what is done with the tensors: touch (every byte read), or forward (a whole model run once)",
    "repeat": "number within the state and use, from 0",
    "position": "number in the order in which the job measured, drawn with the seed",
    "status": "measured, not run",
    "reason": "why not run",
    "load_s": "until the method returned the tensors",
    "first_forward_s": "the model's first forward pass after that, without building the model; of forward lines only",
    "touch_s": "after that every byte of the wanted tensors read, by the checksum compared with what was written",
    "total_s": "load_s and, of touch lines, touch_s; of forward lines first_forward_s",
    "wait_s": "of total_s, what threads that were ready to run waited for a processor, added up; ended threads left "
    "out",
    "file_bytes": "size of the file that the method reads",
    "touched_bytes": "size of the wanted tensors",
    "gb_s": "touched_bytes / 1e9 / total_s",
    "bytes_from_disk": "what the process made the kernel read from storage, load to touch, read-ahead included",
    "resident_before": "fraction of the file's pages in the page cache right before",
    "resident_loaded": "the same when the method had returned, nothing used yet",
    "resident_after": "the same right after touching, with the tensors held",
    "residency_by": "the call that said so: cachestat, mincore",
    "cold_kind": "of cold ones: guest-cold where a hypervisor is seen, whose own cache is not, else cold",
    "peak_mib": "highest resident memory of the process (VmHWM), its libraries included",
    "base_mib": "resident memory before loading",
    # Of forward lines these three hold the model's own memory too: its buffers, activations and code.
    "anonymous_mib": "rise of memory that no file backs, from before loading to after touching, with the tensors held",
    "file_mib": "the same of memory that maps files: the subject's, and some 10 MiB of libraries' code",
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
    """Measure one subject by one method: as found, then cold and warm, by each use, in an order drawn with the seed.

    Args:
        subject: what is loaded.
        method: its name in ``METHODS``.
        key: of the capture.
        repeats: measurements of each state; forward passes a third of them.
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
    uses = uses_of(subject, method)
    order, not_run = draw_states(f"{seed} {subject.name} {method}", repeats, uses), []
    if reason := never_cold(path):
        log(reason)
        order = [line for line in order if line[0] != COLD]
        not_run = [about | {"state": COLD, "status": NOT_RUN, "reason": reason}]
    lines = []
    bar = tqdm(order, desc=f"{subject.name} {method}", unit="measurement", disable=None)
    with FreshProcesses(*_preloaded(subject, method)) as fresh, bar:
        held: list[Any] = []
        for position, (state, use, repeat) in enumerate(bar):
            _set_state(fresh, subject, method, state, drop_caches)
            line = fresh.call(measure, subject=subject.to_json(), method=method, state=state, use=use)
            if state == AS_FOUND and FORWARD in uses:  # not reported: it reads the code that such passes run
                fresh.call(measure, subject=subject.to_json(), method=method, state=AS_FOUND, use=FORWARD)
            if drop_caches and not held:  # now that all code that a measurement runs has been read
                held = hold(fresh.call(mapped_files))
            lines.append(about | line | {"repeat": repeat, "position": position, "status": MEASURED})
            log(f"{state}, {use}: {line['total_s']:.3f} s, {line['bytes_from_disk']} bytes from disk")
    return _table([*lines, *not_run])


def uses_of(subject: Subject, method: str) -> tuple[str, ...]:
    """What is done with the tensors: they are touched, and a whole model runs too, each in measurements of its own."""
    return (TOUCH, FORWARD) if METHODS[method].gives_model(subject) else (TOUCH,)


def draw_states(seed: str, repeats: int, uses: Sequence[str]) -> list[tuple[str, str, int]]:
    """States, uses and repeats in the order to measure in: as found first, for measuring changes what is found.

    A forward pass, which ranks no method and takes seconds, is made a third as often.
    """
    often = {TOUCH: repeats, FORWARD: -(-repeats // 3)}
    drawn = [(state, use, repeat) for state in (COLD, WARM) for use in uses for repeat in range(often[use])]
    random.Random(seed).shuffle(drawn)
    return [(AS_FOUND, TOUCH, 0), *drawn]


def tabulate(
    paths: Sequence[Path], *, key: str, subjects: Mapping[str, Subject], methods: Sequence[str], repeats: int
) -> pd.DataFrame:
    """Bring the tables of all subjects and methods into one, in their order.

    Args:
        paths: of the tables.
        key: the capture key that the subjects carry.
        subjects, methods: each pair of which must be there once; subjects by name.
        repeats: measurements of each state that must be there, unless that is not run.

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
    faults += [
        f"{name}/{method}"
        for name, method in expected
        if (name, method) not in found or not is_whole(found[name, method], repeats, uses_of(subjects[name], method))
    ]
    if faults:
        raise MeasurementError(
            f"the tables of {', '.join(faults)} do not hold each wanted measurement once. Remove those among "
            f"{', '.join(map(str, paths))}, and run the command again"
        )
    return pd.concat([found[pair] for pair in expected])[list(COLUMNS)]


def is_whole(lines: pd.DataFrame, repeats: int, uses: Sequence[str]) -> bool:
    """Whether a subject's and method's lines are all there: one that is not run, or every repeat of each state and "
    "use."""
    filled = lines[["status", "state", "use", "repeat"]].fillna({"state": "", "use": "", "repeat": -1})
    known = sorted(filled.itertuples(index=False, name=None))
    if known == [(NOT_RUN, "", "", -1)]:
        return True
    demanded = [(MEASURED, *line) for line in draw_states("", repeats, uses)]
    without_cold = [line for line in demanded if line[1] != COLD] + [(NOT_RUN, COLD, "", -1)]
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
    if not METHODS[method].gives_model(subject):
        return modules
    from anchorage.loading.forward import find_model_module

    assert subject.model
    return [*modules, "anchorage.loading.forward", find_model_module(subject.model)]


def _table(lines: Sequence[dict[str, Any]]) -> pd.DataFrame:
    kinds = {"cold_kind": cold_kind()}
    rows = [line | kinds if line.get("state") == COLD else line for line in lines]
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype(dict.fromkeys(_WHOLE, "Int64"))
