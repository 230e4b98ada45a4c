"""Every kill point of a save: at each system call, and at bytes of its files. What is left, and does saving again work?

A kill loses nothing that a write has handed to the kernel; a power cut does. So a recipe that is whole at every kill
point is not yet durable, and one that is torn at some is not even this.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd

from anchorage.durability.ourrecipes import ALL_RECIPES
from anchorage.durability.ptrace import Killed, kill_at_byte, kill_at_call, ptrace_refusal
from anchorage.durability.recipes import Recipe, judge, sweep_elsewhere
from anchorage.errors import MeasurementError
from anchorage.loading.fresh import FreshProcesses

COLUMNS = [
    "recipe",  # its name
    "case",  # overwrite: each version under one name; new name: each under its own
    "ours",  # whether it is a writer of this package
    "version",  # the save that was killed: 0, into an empty folder, or 1, over or beside version 0
    "how",  # syscall: on entry of a system call, which was not carried out; byte: at a byte of a file it was writing
    "status",  # measured, or not run
    "reason",  # why not run; else empty
    "point",  # number of the system call, from 1, or the byte
    "call",  # name of the system call
    "acknowledged",  # whether the save had returned
    "verdict",  # old, new, torn, gone: what a reader finds then (see durability.recipes.judge)
    "n_files",  # files left in the folder
    "file_bytes",  # their sizes together
    "sizes",  # size of each, "name size", "; " between; the random part of a temp's name left out
    "resaved",  # whether the same save, made again over what is left, ended well and a reader then finds it
    "n_temps",  # temp files that are left in the folder after that; they are under no final name
]
COUNTS = [
    *COLUMNS[:7],
    "n_points",  # kills
    "old",  # verdicts
    "new",
    "torn",
    "gone",
    "n_resave_failed",  # points after which saving again did not work
    "n_with_temps",  # points after which temp files stayed, even when it had been saved again
    "torn_or_gone_at",  # the points of these verdicts, "number call", "; " between
]
_HOWS = ("syscall", "byte")
_VERSIONS = (0, 1)
_NO_LIMIT = 1 << 40  # bytes, more than any save here writes


def kill_saves(
    recipes: Sequence[Recipe],
    work: Path,
    *,
    log: Callable[[str], object],
    every_call: int = 1,
    n_bytes: int = 40,
    n_processes: int = 1,
) -> pd.DataFrame:
    """Kill the first and the second save of each recipe at its points.

    Args:
        recipes: whose saves to kill; those of :data:`ALL_RECIPES`.
        work: an empty folder, on the filesystem that is meant.
        log: gets a line a recipe.
        every_call: kill at each so many-th system call; 1 is all.
        n_bytes: kill at so many bytes, evenly spread over the largest file that the save writes, ends included.
        n_processes: recipes worked on at once.

    Returns:
        A row a kill, of :data:`COLUMNS`; for what cannot be run here, a row that says why.

    Raises:
        MeasurementError: a save failed without being killed.
    """
    modules = [__name__, *{module for recipe in recipes for module in recipe.modules}]
    if any(recipe.ours for recipe in recipes):
        modules += ["anchorage.store.staging", "anchorage.checkpoint"]
    tasks = [(recipe, version, how) for recipe in recipes for version in _VERSIONS for how in _HOWS]

    def share(number: int) -> list[dict[str, Any]]:
        rows = []
        with FreshProcesses(*modules) as processes:
            for index in range(number, len(tasks), n_processes):
                recipe, version, how = tasks[index]
                folder = work / f"kills-{index}"
                found = processes.call(
                    kill_save,
                    key=recipe.key,
                    version=version,
                    how=how,
                    folder=str(folder),
                    step=every_call if how == "syscall" else n_bytes,
                )
                log(f"{recipe.key}, version {version}: killed at {len(found)} points ({how})")
                rows += [{"index": index} | row for row in found]
        return rows

    with ThreadPoolExecutor(n_processes) as pool:
        rows = [row for rows in pool.map(share, range(n_processes)) for row in rows]
    return pd.DataFrame(sorted(rows, key=lambda row: row["index"]), columns=COLUMNS)


def kill_save(key: str, version: int, how: str, folder: str, step: int) -> list[dict[str, Any]]:
    """Kill one save at its points: what :func:`kill_saves` has done in a fresh process. Returns rows as JSON values."""
    recipe, root = ALL_RECIPES[key], Path(folder)
    facts = {"recipe": recipe.name, "case": recipe.case, "ours": recipe.ours, "version": version, "how": how}
    if how == "syscall" and (reason := ptrace_refusal()):
        return [facts | {"status": "not run", "reason": reason}]
    gc.collect()
    gc.freeze()  # a fork's collector would touch, and so copy, every page
    before = root / "before"
    before.mkdir(parents=True)
    if version:
        kill_at_byte(lambda: recipe.write(before, version - 1), _NO_LIMIT)  # in a fork: torch has threads afterwards
    kills = _kills_at_calls if how == "syscall" else _kills_at_bytes
    rows = [
        facts | {"status": "measured", "reason": ""} | row for row in kills(recipe, version, before, root / "now", step)
    ]
    shutil.rmtree(root)
    return rows


def _kills_at_calls(recipe: Recipe, version: int, before: Path, now: Path, step: int) -> Iterator[dict[str, Any]]:
    point = 1
    while True:
        _restore(before, now)
        killed = kill_at_call(lambda: recipe.write(now, version), point)
        if not killed.was_killed:
            return
        yield {"point": point, "call": killed.call} | _examine(recipe, version, now, killed)
        point += step


def _kills_at_bytes(recipe: Recipe, version: int, before: Path, now: Path, n_points: int) -> Iterator[dict[str, Any]]:
    _restore(before, now)
    kill_at_byte(lambda: recipe.write(now, version), _NO_LIMIT)
    largest = max(path.stat().st_size for path in now.rglob("*") if path.is_file())
    n_points = min(n_points, largest)
    # The last one is the file's last byte: a limit at the whole size kills nothing.
    for point in [index * (largest - 1) // max(n_points - 1, 1) for index in range(n_points)]:
        _restore(before, now)
        killed = kill_at_byte(lambda: recipe.write(now, version), point)
        if not killed.was_killed:
            raise MeasurementError(f"{recipe.key}: a limit of {point} bytes did not end a save of {largest} bytes")
        yield {"point": point, "call": ""} | _examine(recipe, version, now, killed)


def _restore(before: Path, now: Path) -> None:
    shutil.rmtree(now, ignore_errors=True)
    shutil.copytree(before, now)


def _examine(recipe: Recipe, version: int, folder: Path, killed: Killed) -> dict[str, Any]:
    last = version if killed.acknowledged else version - 1
    verdict = judge(recipe, folder, acknowledged=last if last >= 0 else None, tried=version)
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in _files(folder)}
    sweep_elsewhere(folder, killed.process)
    try:
        resaved = not kill_at_byte(lambda: recipe.write(folder, version), _NO_LIMIT).was_killed
        resaved = resaved and judge(recipe, folder, acknowledged=version, tried=version) == "new"
    except MeasurementError:
        resaved = False
    return {
        "acknowledged": killed.acknowledged,
        "verdict": verdict,
        "n_files": len(sizes),
        "file_bytes": sum(sizes.values()),
        "sizes": "; ".join(f"{_plain(name)} {size}" for name, size in sizes.items()),
        "resaved": resaved,
        "n_temps": sum(".tmp" in path.name for path in _files(folder)),
    }


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _plain(name: str) -> str:
    return name.partition(".tmp")[0] + ".tmp" * (".tmp" in name)


def count_kills(kills: pd.DataFrame) -> pd.DataFrame:
    """Count verdicts.

    Args:
        kills: from :func:`kill_saves`.

    Returns:
        A row a recipe, case, version and way of killing, of :data:`COUNTS`.
    """
    groups = kills.groupby(COUNTS[:7], sort=False, dropna=False)
    rows = [dict(zip(COUNTS[:7], names, strict=True)) | _counts(group) for names, group in groups]
    return pd.DataFrame(rows, columns=COUNTS)


def _counts(kills: pd.DataFrame) -> dict[str, Any]:
    measured = kills[kills.status == "measured"]
    bad = measured[measured.verdict.isin(["torn", "gone"])]
    return {verdict: int((measured.verdict == verdict).sum()) for verdict in ("old", "new", "torn", "gone")} | {
        "n_points": len(measured),
        "n_resave_failed": int((~measured.resaved.astype(bool)).sum()),
        "n_with_temps": int((measured.n_temps > 0).sum()),
        "torn_or_gone_at": "; ".join(f"{int(row.point)} {row.call}".strip() for row in bad.itertuples()),
    }
