"""The table of system calls: each recipe's saves traced, and what is wrong with their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from anchorage.durability.order import check_order, describe_order, own_events
from anchorage.durability.recipes import Recipe
from anchorage.durability.syscalls import (
    LINKS,
    REMOVALS,
    RENAMES,
    SAVER,
    SYNCS,
    WRITES,
    SaveTrace,
    strace_refusal,
    trace_saves,
)

COLUMNS = [
    "recipe",  # its name
    "case",  # overwrite: each version under one name; new name: each under its own
    "ours",  # whether it is a writer of this package
    "version",  # which save: 0, into an empty folder, or 1, the next
    "status",  # measured, or not run
    "reason",  # why not run; else empty
    "n_calls",  # traced calls on the save's own files
    "n_writes",  # of these, those that write or cut a file
    "n_fsyncs",  # fsync or fdatasync of a file
    "n_folder_fsyncs",  # fsync of a folder
    "n_renames",
    "n_links",
    "n_removals",
    "faults",  # where the order is broken, "; " between; empty: nowhere
    "order",  # the calls that matter, in order, in words
]
_VERSIONS = (0, 1)


def trace_recipes(
    recipes: Sequence[Recipe], work: Path, *, log: Callable[[str], object], command: Sequence[str] = SAVER
) -> pd.DataFrame:
    """Trace two saves of each recipe and check their order.

    Args:
        recipes: what to trace.
        work: an empty folder, on the filesystem that is meant.
        log: gets a line a fault.
        command: the saver; another one is given to see that a broken writer is caught.

    Returns:
        A row a save, of :data:`COLUMNS`.
    """
    if reason := strace_refusal():
        log(f"system calls are not traced: {reason}")
        rows = [_facts(recipe, version) | {"reason": reason} for recipe in recipes for version in _VERSIONS]
        return pd.DataFrame(rows, columns=COLUMNS)
    folders = [work / f"recipe-{index}" for index in range(len(recipes))]
    pairs = [*zip(recipes, folders, strict=True)]
    saves = [(recipe, folder, version) for recipe, folder in pairs for version in _VERSIONS]
    traces = iter(trace_saves(saves, work / "strace.log", command=command))
    rows = []
    for recipe, folder in pairs:
        own = [next(traces) for _ in _VERSIONS]
        for trace, faults in zip(own, check_order(own, folder), strict=True):
            for fault in faults:
                log(f"{recipe.key}, version {trace.version}: {fault}")
            rows.append(_facts(recipe, trace.version) | _row(trace, folder, faults))
    return pd.DataFrame(rows, columns=COLUMNS)


def _facts(recipe: Recipe, version: int) -> dict[str, Any]:
    facts = {"recipe": recipe.name, "case": recipe.case, "ours": recipe.ours, "version": version}
    return facts | {"status": "not run", "faults": "", "order": "", "reason": ""}


def _row(trace: SaveTrace, folder: Path, faults: Sequence[str]) -> dict[str, Any]:
    events = [event for event in own_events(trace, folder) if not event.issued]
    synced = [Path(event.path).is_dir() for event in events if event.call in SYNCS]

    def count(calls: frozenset[str]) -> int:
        return sum(event.call in calls and not event.error for event in events)

    return {
        "status": "measured",
        "n_calls": len(events),
        "n_writes": count(WRITES),
        "n_fsyncs": synced.count(False),
        "n_folder_fsyncs": synced.count(True),
        "n_renames": count(RENAMES),
        "n_links": count(LINKS),
        "n_removals": count(REMOVALS),
        "faults": "; ".join(faults),
        "order": describe_order(events, folder),
    }
