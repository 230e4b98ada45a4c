"""The Snakemake glue: what a script does first, what a driver does first.

Only scripts and this module see Snakemake's objects; the rest of the library takes plain typed arguments.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import shutil
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from anchorage.driver import die_with_driver
from anchorage.durable import FILE_MODE, is_temp
from anchorage.errors import AnchorageError
from anchorage.processors import available_processors
from anchorage.settings import Settings, load_settings
from anchorage.store.layout import Layout
from anchorage.store.manifest import read_manifest
from anchorage.store.names import MANIFEST

_MANY_FILES = 4000


class Job:
    """A running job: its settings and its log."""

    def __init__(self, snakemake: Any) -> None:
        self.name = snakemake.rule
        self._file = open(snakemake.log[0], "a", buffering=1)  # noqa: SIM115 (open for the job's life)
        sys.excepthook = self._end_on_error
        self.settings: Settings = load_settings(snakemake.config)

    def log(self, line: str) -> None:
        """Write a line to the job's log, and to the terminal, above a progress bar if there is one."""
        text = f"[{self.name}] {line}"
        self._file.write(f"{time.strftime('%H:%M:%S')} {line}\n")
        if "tqdm" in sys.modules:
            from tqdm import tqdm

            tqdm.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def _end_on_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # A fault of the user's needs the message alone, one of ours the traceback. Snakemake, told to be quiet about
        # rules, shows no logs of failed jobs, so it is told here.
        if isinstance(error, AnchorageError):
            self.log(f"ERROR: {error}")
        else:
            self.log("".join(traceback.format_exception(kind, error, trace)))


def start_job(snakemake: Any) -> Job:
    """Begin a script: die with the driver, open the log, check the configuration."""
    die_with_driver()
    return Job(snakemake)


@contextlib.contextmanager
def work_folder(path: Path) -> Iterator[Path]:
    """An empty folder beside a result, on the same filesystem; gone afterwards, and swept first if a kill left it."""
    folder = path.absolute().with_name(f"{path.name}.work")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def rule_threads(threads: Literal["auto"] | int, cores: int) -> int:
    """Threads that a rule must claim so that such jobs side by side fill the machine just once.

    ``--cores 4`` on two processors leaves half of the cores Snakemake counts without a processor, so a job that keeps
    one processor busy claims two of them.
    """
    if threads == "auto":
        return cores
    return min(cores, math.ceil(threads * cores / min(cores, available_processors())))


def check_folders(settings: Settings) -> None:
    """Find out at once whether results can be written; makes nothing, so that a dry run leaves no trace.

    Raises:
        AnchorageError: names the folder, or the file that stands where it should be.
    """
    for place in (settings.results, settings.staging):
        there = next(path for path in (place, *place.absolute().parents) if path.exists())
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            why = f"{there} is not writable" if there.is_dir() else f"{there} is a file"
            raise AnchorageError(f"{place} cannot be written: {why}. Mend that, or set another run: or staging_dir:")


def warn_of_slow_start(layout: Layout) -> str | None:
    """Say so if the workflow's graph will take long: Snakemake tries each wanted file on each pattern of its rule."""
    n_files = max(sum(rule.n_shards.values()) for rule in layout.part_rules())
    if n_files <= _MANY_FILES:
        return None
    return (
        f"a part makes {n_files} files, and the start of the workflow takes time with their square. "
        "Larger capture.shard_rows or more capture.parts make it quick."
    )


def leak_warning(settings: Settings) -> str | None:
    """What the verdict on memory warns of, to be said once more at the end of a run; nothing of another cache's."""
    verdict, manifest = settings.results / "memory.json", settings.results / "cache" / MANIFEST
    if not (verdict.exists() and manifest.exists()):
        return None
    found = json.loads(verdict.read_text())
    return found["warning"] if found["key"] == read_manifest(manifest).key else None


def hold_run(settings: Settings, folder: Path = Path(".snakemake")) -> int:
    """Keep other drivers out of a run for as long as this process lives.

    Args:
        settings: the configuration.
        folder: where the lock lies.

    Returns:
        The lock's file descriptor, to be kept open.

    Raises:
        AnchorageError: another driver is at work on the run.
    """
    folder.mkdir(exist_ok=True)
    descriptor = os.open(folder / f"anchorage-{settings.run}.lock", os.O_RDWR | os.O_CREAT, FILE_MODE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        other = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        raise AnchorageError(
            f"another snakemake (process {other}) is at work on run {settings.run!r} here; wait for it, or end it first"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    _sweep_temps(settings)
    return descriptor


def _sweep_temps(settings: Settings) -> None:
    """Remove what killed jobs left unfinished among the results. Staged shards are swept by the job that holds them."""
    staging = settings.staging.absolute()
    for path in settings.results.absolute().rglob("*"):
        if is_temp(path) and staging not in path.parents and path.is_file():
            path.unlink(missing_ok=True)
