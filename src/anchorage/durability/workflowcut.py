"""The power cut of a whole run: the workflow captures on a logging drive, and each image is read as a resume reads it.

What the workflow itself would take over, the staged shards that :meth:`Staging.accept` accepts and the files that a
manifest or part list names, must be byte for byte what the uninterrupted run made. On some images the plain command is
run to its end.
"""

from __future__ import annotations

import random
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from anchorage.durability.command import run_command
from anchorage.durability.logdisk import LoggingDisk
from anchorage.durability.mounts import FILESYSTEMS, mount_places, run_privately, why_not
from anchorage.durability.recording import Bench, Recording, force_out, median_ms, mounted_drive
from anchorage.durability.replay import Cut, Replay, draw_cuts
from anchorage.errors import IntegrityError, MeasurementError
from anchorage.settings import Settings
from anchorage.store.layout import layout_of
from anchorage.store.manifest import Manifest, read_manifest
from anchorage.store.names import MANIFEST, published_part, staged_shard
from anchorage.store.staging import Staging

COLUMNS = {
    "filesystem": "ext4",
    "drive": "honest: what a flush covers is safe; lying: nothing ever is (the control: it must lose shards)",
    "points": "power cuts judged",
    "distinct": "distinct images among them",
    "mounted": "distinct images that could be mounted, and were",
    "old": "points at which all that is accepted is whole, and the run is not done",
    "new": "points at which the manifest is there and all it names is whole",
    "torn": "points at which something that is accepted differs from the uninterrupted run's",
    "gone": "points at which a shard, or a manifest, that a log had called durable is not accepted",
    "unmountable": "points at which the filesystem could not be mounted",
    "shards_accepted": "shards accepted, over all points",
    "capped": "whether the log had more prefixes than the cap allowed",
    "operations": "length of the log",
    "reruns": "images on which the plain command was run to its end",
    "reruns_identical": "of these, those whose shards and manifest are byte for byte the uninterrupted run's",
    "ms_per_image": "milliseconds to set, mount, read and unmount an image: the median",
    "status": "run, not run",
    "reason": "why not run",
}
_VERDICTS = ["old", "new", "torn", "gone", "unmountable"]
_DRIVES = ["honest", "lying"]
_DURABLE = re.compile(r"shard (\d+) is durable")
_IMAGE_BYTES = 1 << 30


@dataclass
class _Run:
    """The uninterrupted run: its bytes, and when its logs called what durable."""

    settings: Settings
    files: dict[str, bytes] = field(default_factory=dict)
    staged: dict[str, bytes] = field(default_factory=dict)
    manifest: Manifest | None = None
    shard_marks: dict[int, int] = field(default_factory=dict)
    end_mark: int = 0

    def read(self, root: Path) -> None:
        """Keep what the finished run has published and staged."""
        cache = root / self.settings.results / "cache"
        self.manifest = read_manifest(cache / MANIFEST)
        self.files = published_files(cache)
        for name, (shard, tier, _) in self.manifest.files.items():
            self.staged[staged_shard(tier, shard.shard)] = self.files[name]

    def tokens_digest(self, rows: range) -> str:
        """The digest of some rows' token ids, as the uninterrupted run stored it."""
        assert self.manifest
        for shard, tier, record in self.manifest.files.values():
            if layout_of(self.settings).tier_shard_rows(tier, shard.shard) == rows:
                return record.tokens_digest
        raise MeasurementError(f"the run has no shard of rows {rows}")


def published_files(cache: Path) -> dict[str, bytes]:
    """Shards and manifest of a cache by name."""
    found = {str(path.relative_to(cache)): path.read_bytes() for path in sorted(cache.rglob("*.safetensors"))}
    return found | {MANIFEST: (cache / MANIFEST).read_bytes()}


def cut_workflow(
    source: Path,
    command: Sequence[str],
    settings: Settings,
    *,
    folder: Path,
    prefixes: int,
    samples: int,
    reruns: int,
    seed: int,
    log: Callable[[str], object] = print,
) -> pd.DataFrame:
    """Cut the power under a run of the workflow on ext4.

    Args:
        source: a folder with the workflow, a model, and the corpus built.
        command: makes the target ``cache``, run in a copy of that folder; the same resumes.
        settings: the run's. The staging folder lies in the results.
        folder: for mount points, which only this call sees.
        prefixes: at most so many prefixes of the log.
        samples: at most so many cuts that lose writes.
        reruns: images on which the plain command is run to its end.
        seed: of all choices.
        log: gets a line for what is found.

    Returns:
        A table of two rows, an honest and a lying drive's, with the columns :data:`COLUMNS`.

    Raises:
        MeasurementError: the uninterrupted run failed.
    """
    if reason := why_not(FILESYSTEMS["ext4"]):
        row = {"filesystem": "ext4", "status": "not run", "reason": reason}
        return pd.DataFrame([row | {"drive": drive} for drive in _DRIVES], columns=list(COLUMNS))

    def work(stop: threading.Event) -> list[dict[str, Any]]:
        with mount_places(folder) as places:
            lab = _Lab(source, command, settings, places=places, log=log)
            lab.record(stop)
            honest = lab.judge_all(stop, prefixes=prefixes, samples=samples, reruns=reruns, seed=seed)
            return [honest, lab.judge_all(stop, prefixes=2, samples=samples, reruns=0, seed=seed, lies=True)]

    return pd.DataFrame(run_privately(work), columns=list(COLUMNS))


class _Lab:
    def __init__(
        self,
        source: Path,
        command: Sequence[str],
        settings: Settings,
        *,
        places: Path,
        log: Callable[[str], object],
    ) -> None:
        self._source, self._command, self._places, self._log = source, command, places, log
        self._filesystem = replace(FILESYSTEMS["ext4"], image_bytes=_IMAGE_BYTES)
        self._run = _Run(settings)
        self._times: list[float] = []

    def record(self, stop: threading.Event) -> None:
        """Run the workflow on a logging drive, noting when its logs call a shard durable."""

        def copy(root: Path) -> None:
            shutil.copytree(self._source, root / "run", symlinks=True)

        with mounted_drive(self._filesystem, self._places, copy) as (disk, root, recording):
            recording.start = disk.n_operations
            ended = threading.Event()
            watcher = threading.Thread(target=self._watch, args=(disk, root / "run", ended))
            watcher.start()
            try:
                run_command(self._command, root / "run", stop=stop)
            finally:
                ended.set()
                watcher.join()
            self._run.end_mark = disk.n_operations
            self._run.read(root / "run")
            force_out(root)
        self._recording: Recording = recording

    def _watch(self, disk: LoggingDisk, run: Path, ended: threading.Event) -> None:
        """A shard is acknowledged by its line in the job's log. Seen late it is demanded late, never early."""
        logs = run / self._run.settings.results / "logs"
        while not ended.wait(0.005):
            text = "".join(path.read_text(errors="replace") for path in logs.glob("capture_part_*.log"))
            mark = disk.n_operations
            for shard in map(int, _DURABLE.findall(text)):
                self._run.shard_marks.setdefault(shard, mark)

    def judge_all(
        self, stop: threading.Event, *, prefixes: int, samples: int, reruns: int, seed: int, lies: bool = False
    ) -> dict[str, Any]:
        operations = self._recording.operations
        start = self._recording.start
        cuts, capped = draw_cuts(operations, start, prefixes=prefixes, samples=samples, seed=seed, lies=lies)
        again = set(random.Random(seed).sample(range(len(cuts)), min(reruns, len(cuts))))
        states: dict[int, tuple[str, set[int], bool]] = {}
        verdicts: Counter[str] = Counter()
        n_accepted = identical = 0
        self._times = []
        with Bench(self._filesystem, self._recording.base, self._places) as bench:
            for number, (cut, digest, pages) in enumerate(Replay(self._recording.base, operations).images(cuts)):
                if stop.is_set():
                    raise KeyboardInterrupt
                if digest not in states:
                    states[digest] = self._read(bench, pages)
                verdicts[self._judge(cut, *states[digest])] += 1
                n_accepted += len(states[digest][1])
                if number in again:
                    identical += self._rerun(bench, pages, cut, stop)
        row = {"filesystem": "ext4", "drive": _DRIVES[lies], "points": len(cuts), "distinct": len(states)}
        row |= {"capped": capped}
        row |= {"mounted": sum(state[0] != "unmountable" for state in states.values())}
        row |= {name: verdicts[name] for name in _VERDICTS} | {"shards_accepted": n_accepted}
        row |= {"operations": len(operations), "reruns": len(again), "reruns_identical": identical}
        return row | {"ms_per_image": median_ms(self._times), "status": "run", "reason": ""}

    def _read(self, bench: Bench, pages: dict[int, bytes]) -> tuple[str, set[int], bool]:
        """What an image is: a fault or nothing, the accepted shards, and whether a whole manifest is there."""
        started = time.perf_counter()
        with bench.mounted(pages) as root:
            if root is None:
                return "unmountable", set(), False
            results = root / "run" / self._run.settings.results
            try:
                state = "", self._accepted(root / "run"), self._check_lists(results / "cache")
            except Exception as error:  # a reader may stumble over torn bytes in any way
                self._log(f"torn: {type(error).__name__}: {error}")
                state = "torn", set(), False
        self._times.append(time.perf_counter() - started)
        return state

    def _accepted(self, run: Path) -> set[int]:
        """The shards that a resume would take over; each file must be the uninterrupted run's."""
        settings, accepted = self._run.settings, set()
        assert self._run.manifest
        key, layout = self._run.manifest.key, layout_of(settings)
        folder = run / settings.staging / key
        if not folder.exists():
            return set()
        for part in layout.parts:
            staging = Staging(folder, key, layout=layout, part=part, log=lambda line: None)
            try:
                records = staging.accept(self._run.tokens_digest)
            finally:
                staging.close()
            for record in records.values():
                for tier in record.tiers:
                    name = staged_shard(tier, record.shard)
                    _check(folder / name, self._run.staged[name])
            accepted |= set(records)
        return accepted

    def _check_lists(self, cache: Path) -> bool:
        """Check what part lists and manifest name. Says whether there is a manifest."""
        for part in layout_of(self._run.settings).parts:
            if (cache / published_part(part)).exists():
                self._check_list(cache / published_part(part))
        if not (cache / MANIFEST).exists():
            return False
        self._check_list(cache / MANIFEST)
        _check(cache / MANIFEST, self._run.files[MANIFEST])
        return True

    def _check_list(self, path: Path) -> None:
        for name in read_manifest(path).files:
            _check(path.parent / name, self._run.files[name])

    def _judge(self, cut: Cut, fault: str, accepted: set[int], done: bool) -> str:
        if fault:
            return fault
        lost = {shard for shard, mark in self._run.shard_marks.items() if mark <= cut.after} - accepted
        if lost or (self._run.end_mark <= cut.after and not done):
            self._log(f"gone after {cut.after} operations: {sorted(lost) or 'the manifest'}")
            return "gone"
        return "new" if done else "old"

    def _rerun(self, bench: Bench, pages: dict[int, bytes], cut: Cut, stop: threading.Event) -> bool:
        """Run the plain command to its end on an image; says whether all is as if there had been no cut."""
        with bench.mounted(pages) as root:
            if root is None:
                return False
            try:
                run_command(self._command, root / "run", stop=stop)
                same = published_files(root / "run" / self._run.settings.results / "cache") == self._run.files
            except (MeasurementError, OSError) as error:
                self._log(f"run again after a cut at {cut.after}: {error}")
                return False
        self._log(f"run again after a cut at {cut.after}: {'identical' if same else 'different'}")
        return same


def _check(path: Path, expected: bytes) -> None:
    found = path.read_bytes()
    if found != expected:
        at = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), "its end")
        remedy = "It is accepted and should not be."
        raise IntegrityError(
            path, expected=f"{len(expected)} bytes as made", found=f"a difference at {at}", remedy=remedy
        )
