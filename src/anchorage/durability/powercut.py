"""Power cuts: every recipe on every filesystem, cut at many points, each image mounted and judged by the real reader.

A table of cuts says "no bad state in so many tested", never "proved". The controls, recipes known to be unsafe, show
that the lab sees what there is to see. What a drive may lose is said in `durability.replay`. No recipe is safer than
its drive: two schedules, a drive that ignores flushes and one that fails a write, show that.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from anchorage import durable
from anchorage.durability.mounts import FILESYSTEMS, Filesystem, mount_places, run_privately, why_not
from anchorage.durability.recipes import Recipe, by_case, judge
from anchorage.durability.recording import Bench, Recording, median_ms, record_saves
from anchorage.durability.replay import Replay, draw_cuts

COLUMNS = {
    "filesystem": "ext4, xfs, btrfs",
    "options": "mount options under test; empty: the defaults",
    "recipe": "way of saving",
    "case": "overwrite: each version under the same name; new name: each under its own",
    "schedule": "what else went on: quiet, neighbour, writeback; or what the drive did: lying drive, failing write",
    "ours": "whether the recipe is one of this package's own writers",
    "points": "power cuts judged: a moment, and a set of writes lost there",
    "distinct": "distinct images among them",
    "mounted": "distinct images that could be mounted, and were",
    "old": "points at which the reader found the newest acknowledged version, or a later one, but not the one at work",
    "new": "points at which the reader found the version that was being saved, or had been saved last",
    "torn": "points at which something under its final name was no version ever saved",
    "gone": "points at which an acknowledged version was lost",
    "unmountable": "points at which the filesystem could not be mounted",
    "capped": "whether the log had more prefixes than the cap allowed; subsets of lost writes are always a sample",
    "operations": "length of the log between the first and the last cut",
    "refused": "saves that raised an error and were made anew (failing write)",
    "ms_per_image": "milliseconds to set, mount, read and unmount an image: the median",
    "status": "run, not run",
    "reason": "why not run",
}
VERDICTS = ["old", "new", "torn", "gone", "unmountable"]
LYING, FAILING = "lying drive", "failing write"


@dataclass(frozen=True)
class Caps:
    """How much is looked at in a row of the table.

    Attributes:
        prefixes: at most so many prefixes of the log.
        samples: at most so many cuts that lose writes.
        versions: versions saved after the first.
    """

    prefixes: int
    samples: int
    versions: int = 3


def cut_power(
    recipes: Iterable[Recipe],
    filesystems: Iterable[str],
    schedules: Iterable[str],
    *,
    folder: Path,
    caps: Callable[[Recipe], Caps],
    seed: int,
    log: Callable[[str], object] = print,
) -> pd.DataFrame:
    """Cut the power under recipes; a row for each, on each filesystem, in each schedule.

    Args:
        recipes: ways of saving.
        filesystems: names in :data:`FILESYSTEMS`.
        schedules: names in :data:`SCHEDULES`, or :data:`LYING` or :data:`FAILING`.
        folder: for mount points, which only this call sees.
        caps: how much to look at, by recipe.
        seed: of all choices.
        log: gets a line a row, and one for the first bad state of it.

    Returns:
        The table, with the columns :data:`COLUMNS`. Where something is missing the row says "not run" and why.
    """
    wanted = [
        (FILESYSTEMS[filesystem], recipe, schedule)
        for filesystem in filesystems
        for recipe in recipes
        for schedule in schedules
    ]
    missing = {filesystem.name: why_not(filesystem) for filesystem, _, _ in wanted}
    if all(missing.values()):
        return _table([_empty_row(*row, missing[row[0].name]) for row in wanted])

    def work(stop: threading.Event) -> list[dict[str, Any]]:
        rows = []
        for filesystem, recipe, schedule in wanted:
            if missing[filesystem.name]:
                rows.append(_empty_row(filesystem, recipe, schedule, missing[filesystem.name]))
                continue
            with mount_places(folder) as places:
                lab = _Lab(filesystem, recipe, schedule, caps(recipe), seed=seed, places=places, log=log)
                rows.append(lab.run(stop))
        return rows

    return _table(run_privately(work))


def _table(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _empty_row(filesystem: Filesystem, recipe: Recipe, schedule: str, reason: str) -> dict[str, Any]:
    names = {"filesystem": filesystem.kind, "options": filesystem.options, "recipe": recipe.name, "case": recipe.case}
    counts = dict.fromkeys(["points", "distinct", "mounted", *VERDICTS], 0)
    status = {"status": "not run" if reason else "run", "reason": reason}
    return names | {"schedule": schedule, "ours": recipe.ours} | counts | status


class _Lab:
    """One row: records the saves, then judges what each cut leaves."""

    def __init__(
        self,
        filesystem: Filesystem,
        recipe: Recipe,
        schedule: str,
        caps: Caps,
        *,
        seed: int,
        places: Path,
        log: Callable[[str], object],
    ) -> None:
        self._filesystem, self._recipe, self._schedule, self._caps = filesystem, recipe, schedule, caps
        self._places, self._log = places, log
        # Rows differ in what they lose, and each can be run alone with the same result.
        self._seed = seed + zlib.crc32(f"{filesystem.name}/{recipe.key}/{schedule}".encode())
        self._name = f"{filesystem.name}, {recipe.key}, {schedule}"
        self._times: list[float] = []
        self._told = False

    def run(self, stop: threading.Event) -> dict[str, Any]:
        recording = self._record()
        cuts, capped = draw_cuts(
            recording.operations,
            recording.start,
            prefixes=self._caps.prefixes,
            samples=self._caps.samples,
            seed=self._seed,
            lies=self._schedule == LYING,
        )
        found: dict[int, Callable[[Path], int | None] | None] = {}
        verdicts: Counter[str] = Counter()
        with Bench(self._filesystem, recording.base, self._places) as bench:
            for cut, digest, pages in Replay(recording.base, recording.operations).images(cuts):
                if stop.is_set():
                    raise KeyboardInterrupt
                if digest not in found:
                    found[digest] = self._read(bench, pages)
                verdicts[self._judge(found[digest], recording, cut.after)] += 1
        row = _empty_row(self._filesystem, self._recipe, self._schedule, "") | {
            name: verdicts[name] for name in VERDICTS
        }
        mounted = sum(load is not None for load in found.values())
        row |= {"points": len(cuts), "distinct": len(found), "mounted": mounted, "capped": capped}
        row |= {"operations": len(recording.operations) - recording.start, "refused": len(recording.refused)}
        row["ms_per_image"] = median_ms(self._times)
        self._log(f"{self._name}: {row['points']} cuts, {mounted} images, {dict(verdicts)}")
        return row

    def _record(self) -> Recording:
        return record_saves(
            self._recipe,
            self._filesystem,
            "quiet" if self._schedule in (LYING, FAILING) else self._schedule,
            n_versions=self._caps.versions,
            places=self._places,
            seed=self._seed,
            failing=2 if self._schedule == FAILING else None,
        )

    def _read(self, bench: Bench, pages: dict[int, bytes]) -> Callable[[Path], int | None] | None:
        """Have the recipe's reader look at an image. Returns what gives its finding again; None: unmountable."""
        started = time.perf_counter()
        with bench.mounted(pages) as root:
            load = None if root is None else _remember(self._recipe, root / "saved")
        self._times.append(time.perf_counter() - started)
        return load

    def _judge(self, load: Callable[[Path], int | None] | None, recording: Recording, after: int) -> str:
        if load is None:
            return "unmountable"
        acknowledged, tried = recording.versions_at(after)
        verdict = judge(replace(self._recipe, load=load), Path(), acknowledged=acknowledged, tried=tried)
        if verdict in ("torn", "gone") and not self._told:
            self._told = True
            self._log(
                f"{self._name}: {verdict} after {after} operations, {_finding(load)}, acknowledged {acknowledged}"
            )
        return verdict


def _remember(recipe: Recipe, folder: Path) -> Callable[[Path], int | None]:
    """Load once; returns a loader that gives the same again, or raises the same."""
    try:
        found = recipe.load(folder)
    except Exception as error:  # a reader may stumble over torn bytes in any way
        text = f"{type(error).__name__}: {error}"

        def fail(folder: Path) -> int | None:
            raise ValueError(text)

        return fail
    return lambda folder: found


def _finding(load: Callable[[Path], int | None]) -> str:
    try:
        return f"found {load(Path())}"
    except ValueError as error:
        return str(error)


def _write_with_retry(path: Path, data: bytes) -> None:
    """Save as one should, but take a second fsync for a cure of the first one's error."""
    temp = path.with_name("state.tmp")
    with open(temp, "wb", 0) as file:
        file.write(data)
        try:
            durable.sync_descriptor(file.fileno())
        except OSError:
            durable.sync_descriptor(file.fileno())
    temp.replace(path)
    durable.sync_folder(path.parent)


# fsyncgate (Rebello et al., "Can applications recover from fsync failures?", ATC'20): to be run with a failing write.
RETRYING: dict[str, Recipe] = by_case("full, fsync tried again", _write_with_retry)
