"""A workload on a logging drive, and a bench that mounts what power cuts leave of it, one image after another."""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from anchorage.durability.logdisk import LoggingDisk, Operation
from anchorage.durability.mounts import Filesystem, Loop, sync_filesystem, unmount
from anchorage.durability.recipes import Recipe
from anchorage.durability.replay import PAGE_BYTES
from anchorage.durability.schedules import SCHEDULES, after_each_step

# What mount(2) says of an image that is damaged; anything else is a fault of the lab. EUCLEAN is XFS's "corrupted".
_UNMOUNTABLE = {errno.EUCLEAN, errno.EINVAL, errno.EIO, errno.EBADMSG, errno.ENODATA}


@dataclass
class Recording:
    """What a drive was asked to do by a workload.

    Attributes:
        base: the image before the first operation.
        operations: the log.
        start: operations issued when the state that the workload builds on had been forced out.
        begun: operations issued as version ``i + 1`` began to be saved.
        acknowledged: operations issued when that save had returned.
        refused: errors that a save raised; it was then made anew, once.
    """

    base: np.ndarray
    operations: list[Operation] = field(default_factory=list)
    start: int = 0
    begun: list[int] = field(default_factory=list)
    acknowledged: list[int] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def versions_at(self, after: int) -> tuple[int, int]:
        """The newest version acknowledged and the newest tried by a cut after so many operations."""
        return sum(mark <= after for mark in self.acknowledged), sum(mark <= after for mark in self.begun)


def memory_file(n_bytes: int) -> int:
    """Descriptor of an empty file in memory, without a name: it is gone with its last user."""
    descriptor = os.memfd_create(f"anchorage-{os.getpid()}")
    os.ftruncate(descriptor, n_bytes)
    return descriptor


@contextlib.contextmanager
def mounted_drive(
    filesystem: Filesystem, places: Path, prepare: Callable[[Path], object] | None = None
) -> Iterator[tuple[LoggingDisk, Path, Recording]]:
    """A new filesystem on a logging drive, mounted; its log is in the recording once the block has ended.

    Args:
        filesystem: which.
        places: an empty folder for mount points.
        prepare: puts into the mounted filesystem what is to be there before the log begins.

    Returns:
        The drive, the folder it is mounted on, and the recording, of which the base is known.
    """
    target, root = places / "drive", places / "mounted"
    target.touch()
    root.mkdir(exist_ok=True)
    image = memory_file(filesystem.image_bytes)
    try:
        filesystem.make(image)
        if prepare:
            _prepare(filesystem, image, root, prepare)
        recording = Recording(read_image(image))
        with LoggingDisk(image, target) as disk:
            filesystem.mount(disk.device, root)
            try:
                yield disk, root, recording
            finally:
                unmount(root)
            recording.operations = disk.operations()
    finally:
        os.close(image)


def _prepare(filesystem: Filesystem, image: int, root: Path, prepare: Callable[[Path], object]) -> None:
    with contextlib.closing(Loop(image)) as loop:
        filesystem.mount(loop.path, root)
        try:
            prepare(root)
        finally:
            unmount(root)


def read_image(image: int) -> np.ndarray:
    """An image's bytes. What is a hole in the file takes no memory."""
    found = np.zeros(os.fstat(image).st_size, np.uint8)
    for start, stop in _extents(image):
        found[start:stop] = np.frombuffer(os.pread(image, stop - start, start), np.uint8)
    return found


def record_saves(
    recipe: Recipe,
    filesystem: Filesystem,
    schedule: str,
    *,
    n_versions: int,
    places: Path,
    seed: int,
    failing: int | None = None,
) -> Recording:
    """Save versions one after the other on a logging drive.

    Args:
        recipe: how to save. Version 0 is saved and forced out first.
        filesystem: where.
        schedule: what else goes on, of :data:`SCHEDULES`.
        n_versions: versions to save after version 0.
        places: an empty folder for mount points.
        seed: of the schedule.
        failing: the drive fails one write of the save of this version. A save that raises is made once more.
    """
    with mounted_drive(filesystem, places) as (disk, root, recording):
        folder = root / "saved"
        folder.mkdir()
        recipe.write(folder, 0)
        force_out(root)
        recording.start = disk.n_operations
        with SCHEDULES[schedule](root, folder, seed) as step:
            for version in range(1, n_versions + 1):
                recording.begun.append(disk.n_operations)
                if version == failing:
                    disk.fail_writes(1)
                with after_each_step(step):
                    if not _save(recipe, folder, version, recording.refused):
                        break
                recording.acknowledged.append(disk.n_operations)
        # Of the write that failed syncfs tells too, once: that is known here.
        with contextlib.suppress(OSError) if failing else contextlib.nullcontext():
            force_out(root)
    return recording


def _save(recipe: Recipe, folder: Path, version: int, refused: list[str]) -> bool:
    """Save, and once more where that raises. False if both did: after a failed write of its own ext4 takes no other."""
    for _ in range(2):
        try:
            recipe.write(folder, version)
            return True
        except OSError as error:
            refused.append(str(error))
    return False


def median_ms(times: Sequence[float]) -> float:
    """The median of times in seconds, in milliseconds; NaN where there is none."""
    return round(1000 * float(np.median(times)), 2) if times else math.nan


def force_out(folder: Path) -> None:
    """Force a whole filesystem to its drive."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        sync_filesystem(descriptor)
    finally:
        os.close(descriptor)


class Bench:
    """Mounts images one at a time, each as a power cut leaves it.

    Args:
        filesystem: of the images.
        base: the image that they differ from.
        places: an empty folder for mount points.
    """

    def __init__(self, filesystem: Filesystem, base: np.ndarray, places: Path) -> None:
        self._filesystem, self._base, self._root = filesystem, base, places / "mounted"
        self._root.mkdir(exist_ok=True)
        self._image = memory_file(len(base))
        self._live = mmap.mmap(self._image, len(base))
        self._loop = Loop(self._image)
        for start, stop in _written(base):
            self._live[start:stop] = base[start:stop].tobytes()

    def close(self) -> None:
        self._loop.close()
        self._live.close()
        os.close(self._image)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def mounted(self, pages: dict[int, bytes]) -> Iterator[Path | None]:
        """Mount an image, read-write: the filesystem recovers. None where it cannot be mounted.

        Args:
            pages: what differs from the base, by number of the page.
        """
        self._restore(pages)
        self._loop.forget()
        try:
            self._filesystem.mount(self._loop.path, self._root)
        except OSError as error:
            if error.errno not in _UNMOUNTABLE:
                raise
            yield None
            return
        try:
            yield self._root
        finally:
            unmount(self._root)

    def _restore(self, pages: dict[int, bytes]) -> None:
        """Undo what the last mount wrote, wherever that was, and put the pages in."""
        for start, stop in _extents(self._image):
            self._live[start:stop] = self._base[start:stop].tobytes()
        for page, data in pages.items():
            self._live[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = data


def _written(base: np.ndarray) -> Iterator[tuple[int, int]]:
    pages = base.reshape(-1, PAGE_BYTES)
    for page in np.flatnonzero(pages.any(axis=1)):
        yield int(page) * PAGE_BYTES, int(page + 1) * PAGE_BYTES


def _extents(image: int) -> Iterator[tuple[int, int]]:
    """Ranges of a file that are no holes."""
    size, place = os.fstat(image).st_size, 0
    while place < size:
        try:
            start = os.lseek(image, place, os.SEEK_DATA)
        except OSError:  # only a hole is left
            return
        place = os.lseek(image, start, os.SEEK_HOLE)
        yield start, place
