"""What each recipe does when the system says no: every call of a save fails once, and the save is then tried again.

A fault is *injected* where strace answers the call in the kernel's place, so that the call is not made; or *real*: a
filesystem that is full, a folder that may not be written to. A failed fsync must be raised and nothing renamed after
it, for the pages that did not reach the disk may be marked clean (Rebello et al., "Can Applications Recover from fsync
Failures?", ATC'20). Where only the fsync of the *folder* fails the new version is there and whole, and may yet be lost
by a power cut: a third outcome.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from anchorage.durability.attempt import TABLE, attempt_on_full, attempt_save, find_recipe, judge_folder
from anchorage.durability.recipes import Recipe
from anchorage.durability.syscalls import LINKS, OPENS, RENAMES, SYNCS, Event, parse_trace, strace_refusal
from anchorage.errors import MeasurementError
from anchorage.loading.fresh import FreshProcesses

COLUMNS = {
    "recipe": "name of the recipe",
    "case": "overwrite: every version under the same name; new name: each under its own",
    "ours": "one of this package's writers",
    "call": "what fails: write, fsync, folder fsync, rename, link, close (of a written file); save: what comes first",
    "error": "how: EIO, ENOSPC, EXDEV, EACCES",
    "how": "injected: by strace, in the kernel's place; real: a full filesystem of 1 MiB, a folder closed to writing",
    "place": "which such call of the save of version 1, from 1; 0: not told",
    "n_places": "such calls of the save",
    "status": "measured; no such call: the save makes none; not run",
    "reason": "why not run",
    "raised": "the error that the save raised; empty: none",
    "acknowledged": "whether the save returned as if all were well",
    "outcome": "what the reader then finds: old, new, torn, gone; unconfirmed: the new version, though the save raised",
    "renamed_after_failed_fsync": "whether a file got its name after its fsync had failed; empty: no fsync failed",
    "retry_ok": "whether the same save, tried again without a fault, returns, and its version is found",
    "retry_writes": "whether the second try wrote and synced anything; no: it took what it found for saved; empty: "
    "not traced",
}
# Errors by the kind of call that they are injected into.
_INJECTED = {
    "write": ["EIO", "ENOSPC"],
    "fsync": ["EIO"],
    "folder fsync": ["EIO"],
    "rename": ["EIO", "EXDEV"],
    "link": ["EXDEV"],
    "close": ["EIO"],
}
_WRITES = {"write", "pwrite64", "writev", "sendfile", "copy_file_range"}
_TEMP_MARK = re.compile(r"\.tmp-\d+-[0-9a-f]{8}")  # another name each time
_ELSEWHERE = re.compile(r"[^' ]*/anchorage-\d+-")
_WARM = [
    "torch.distributed.checkpoint",
    "safetensors.torch",
    "anchorage.checkpoint",
    "anchorage.store.format",
    "anchorage.store.staging",
]


@dataclass(frozen=True)
class _Place:
    """A call of a save: its name, and which of that name it is, counted from the start of the trace."""

    call: str
    number: int


@dataclass
class _Bench:
    """What the trials of one recipe share."""

    processes: FreshProcesses
    table: str
    recipe: Recipe
    scratch: Path
    numbers: Iterator[int] = field(default_factory=lambda: iter(range(1_000_000)))

    def attempt(self, folder: Path, version: int, **options: Any) -> dict[str, Any]:
        words = {"table": self.table, "key": self.recipe.key, "folder": str(folder), "version": version}
        return self.processes.call(attempt_save, **words, **options)

    def judge(self, folder: Path, acknowledged: int) -> str:
        words = {"table": self.table, "key": self.recipe.key, "folder": str(folder)}
        return self.processes.call(judge_folder, **words, acknowledged=acknowledged, tried=1)

    def prepare(self, folder: Path, **options: Any) -> Path:
        """A folder with version 0 in it."""
        if (saved := self.attempt(folder, 0, **options))["raised"]:
            raise MeasurementError(f"{self.recipe.key} cannot save where nothing fails: {saved['raised']}")
        return folder

    def new_folder(self) -> Path:
        folder = self.scratch / f"trial-{next(self.numbers)}"
        folder.mkdir()
        return folder

    def row(self, call: str, error: str, how: str, **facts: Any) -> dict[str, Any]:
        head = {"recipe": self.recipe.name, "case": self.recipe.case, "ours": self.recipe.ours}
        return head | {"call": call, "error": error, "how": how, "place": 0, "n_places": 0, "reason": ""} | facts


def measure_faults(keys: Iterable[str], scratch: Path, *, max_places: int = 6, table: str = TABLE) -> pd.DataFrame:
    """Let every kind of call of a save fail: ``faults.csv``, see :data:`COLUMNS`.

    Args:
        keys: of the recipes.
        scratch: folder for their files; everything made there is removed.
        max_places: of more calls of a kind than that in one save, so many are tried, evenly spaced, the first and the
            last among them.
        table: module with ``ALL_RECIPES``.

    Raises:
        MeasurementError: a save fails without a fault, or a fault did not hit the call that it was meant for.
    """
    # As strace tells of them: without links, from the root.
    rows: list[dict[str, Any]] = []
    scratch = scratch.resolve()
    refusal = strace_refusal()
    with FreshProcesses(table, *_WARM) as processes:
        for key in keys:
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                bench = _Bench(processes, table, find_recipe(table, key), Path(folder))
                rows += _inject_all(bench, max_places, refusal)
                rows += [_fill_filesystem(bench), _close_folder(bench)]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _inject_all(bench: _Bench, max_places: int, refusal: str) -> Iterator[dict[str, Any]]:
    places: dict[str, list[_Place]] = {}
    if not refusal:
        places, refusal = _find_places(bench)
    for call, errors in _INJECTED.items():
        for error in errors:
            found = places.get(call, [])
            if refusal or not found:
                status = {"status": "not run", "reason": refusal} if refusal else {"status": "no such call"}
                yield bench.row(call, error, "injected", **status)
            for number in _spread(len(found), max_places):
                facts = _inject(bench, call, error, found[number])
                yield bench.row(call, error, "injected", **facts, place=number + 1, n_places=len(found))


def _spread(n: int, n_wanted: int) -> list[int]:
    """Up to ``n_wanted`` of 0 to n - 1, evenly spaced, with both ends."""
    if n <= n_wanted:
        return list(range(n))
    return sorted({round(number * (n - 1) / max(n_wanted - 1, 1)) for number in range(n_wanted)})


def _find_places(bench: _Bench) -> tuple[dict[str, list[_Place]], str]:
    """The calls of a save that may fail, by kind; and why there can be no trace, or an empty text."""
    folder, log = bench.prepare(bench.new_folder()), bench.scratch / "log"
    tried = bench.attempt(folder, 1, log=str(log))
    if tried["refused"]:
        return {}, tried["refused"]
    counts: Counter[str] = Counter()
    places: dict[str, list[_Place]] = {call: [] for call in _INJECTED}
    for event, kind in _classify(_read(log), folder):
        counts[event.call] += 1
        if kind and not event.error:
            places[kind].append(_Place(event.call, counts[event.call]))
    return places, ""


def _read(log: Path) -> list[Event]:
    events = parse_trace(log.read_text(errors="replace").splitlines())
    return [event for event in events if not event.issued]


def _classify(events: Iterable[Event], folder: Path) -> Iterator[tuple[Event, str]]:
    """Each event with the kind of call that it is, if it is one that concerns the folder's files."""
    written = set()
    for event in events:
        here = event.path if Path(event.path).is_relative_to(folder) else event.target
        kind = ""
        if not Path(here).is_relative_to(folder):
            pass
        elif event.call in OPENS and not event.error and ("O_WRONLY" in event.flags or "O_RDWR" in event.flags):
            written.add(here)
        elif event.call in _WRITES:
            kind = "write"
        elif event.call in SYNCS:
            kind = "folder fsync" if Path(here).is_dir() else "fsync"
        elif event.call in RENAMES | LINKS:
            kind = "rename" if event.call in RENAMES else "link"
        elif event.call == "close" and here in written:
            kind = "close"
        yield event, kind


def _inject(bench: _Bench, call: str, error: str, place: _Place) -> dict[str, Any]:
    folder, log = bench.prepare(bench.new_folder()), bench.scratch / "log"
    tried = bench.attempt(folder, 1, log=str(log), inject=f"{place.call}:error={error}:when={place.number}")
    events = list(_classify(_read(log), folder))
    hit = [kind for event, kind in events if event.call == place.call][place.number - 1 : place.number]
    if hit != [call] or log.read_text().count("(INJECTED)") != 1:
        raise MeasurementError(f"{bench.recipe.key}: {error} was meant for {call} ({place}), and hit {hit}")
    renamed = _renamed_after_failed_fsync([event for event, _ in events])
    return _follow_up(bench, folder, tried, retry_log=log) | {"renamed_after_failed_fsync": renamed}


def _renamed_after_failed_fsync(events: list[Event]) -> bool | None:
    failed: set[str] = set()
    answer = None
    for event in events:
        if event.call in SYNCS and event.error:
            failed.add(event.path)
            answer = answer or False
        if event.call in RENAMES | LINKS and not event.error and event.path in failed:
            answer = True
    return answer


def _follow_up(
    bench: _Bench, folder: Path, tried: dict[str, Any], *, retry_log: Path | None = None, **options: Any
) -> dict[str, Any]:
    """Judge what a fault has left, then save again."""
    outcome = bench.judge(folder, 1 if tried["acknowledged"] else 0)
    retried = bench.attempt(folder, 1, log=str(retry_log) if retry_log else "", **options)
    writes = None
    if retry_log:
        kinds = {kind for _, kind in _classify(_read(retry_log), folder)}
        writes = {"write", "fsync"} <= kinds
    retry_ok = retried["acknowledged"] and bench.judge(folder, 1) == "new"
    return _facts(tried, folder, outcome) | {"retry_ok": retry_ok, "retry_writes": writes}


def _facts(tried: dict[str, Any], folder: Path, outcome: str) -> dict[str, Any]:
    acknowledged = tried["acknowledged"]
    raised = _ELSEWHERE.sub("ELSEWHERE/anchorage-", tried["raised"].replace(str(folder), "FOLDER"))
    return {
        "status": "measured",
        "raised": _TEMP_MARK.sub(".tmp", raised),  # what differs from run to run is left out
        "acknowledged": acknowledged,
        "outcome": "unconfirmed" if outcome == "new" and not acknowledged else outcome,
    }


def _fill_filesystem(bench: _Bench) -> dict[str, Any]:
    """A real filesystem with no block free."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return bench.row("write", "ENOSPC", "real", status="not run", reason="mounting needs root and Linux")
    folder = bench.new_folder()
    words = {"table": bench.table, "key": bench.recipe.key, "folder": str(folder)}
    tried = bench.processes.call(attempt_on_full, **words)
    if tried["refused"]:
        return bench.row("write", "ENOSPC", "real", status="not run", reason=tried["refused"])
    return bench.row("write", "ENOSPC", "real", **_facts(tried, folder, tried["outcome"]), retry_ok=tried["retry_ok"])


def _close_folder(bench: _Bench) -> dict[str, Any]:
    """A folder, with all below it, that its owner may not write to."""
    folder = bench.new_folder()
    if os.geteuid() == 0:
        shutil.chown(folder, 65534, 65534)
    bench.prepare(folder, powerless=True)
    _change_modes(folder, 0o555, 0o444)
    tried = bench.attempt(folder, 1, powerless=True)
    _change_modes(folder, 0o755, 0o644)
    return bench.row("save", "EACCES", "real", **_follow_up(bench, folder, tried, powerless=True))


def _change_modes(folder: Path, folder_mode: int, file_mode: int) -> None:
    for path in [folder, *folder.rglob("*")]:
        path.chmod(folder_mode if path.is_dir() else file_mode)
