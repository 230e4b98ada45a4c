"""A drive whose every write and flush is logged: the server of `durability.fuseserver` with a loop device on top."""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from anchorage.durability import fuseserver
from anchorage.durability.mounts import Loop, mount, unmount

Kind = Literal["write", "flush", "failed"]
_KINDS: dict[bytes, Kind] = {fuseserver.WRITE: "write", fuseserver.FLUSH: "flush", fuseserver.FAILED: "failed"}


@dataclass(frozen=True)
class Operation:
    """One thing the drive was asked to do.

    Attributes:
        kind: ``write``, ``flush``, or ``failed``: a write that the drive refused.
        done: how many operations had been issued when this one had completed. A write is covered by a flush only if
            this is not above the flush's own number.
        offset: where the write goes, in bytes.
        data: what it writes.
    """

    kind: Kind
    done: int
    offset: int = 0
    data: bytes = b""


class LoggingDisk:
    """A block device over an image. Its path is ``device``; what it was asked to do is in :meth:`operations`.

    Args:
        image: descriptor of the image; it is written to.
        target: an empty file to mount the drive's one file on.
    """

    def __init__(self, image: int, target: Path) -> None:
        self._log = os.memfd_create("log")
        os.ftruncate(self._log, fuseserver.HEADER_BYTES)
        self._shared = mmap.mmap(self._log, fuseserver.HEADER_BYTES)
        self._undo = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self._log)
            fuse = os.open("/dev/fuse", os.O_RDWR)
            undo.enter_context(_server(fuse, image, self._log))
            options = f"fd={fuse},rootmode=100600,user_id=0,group_id=0"
            try:
                mount("anchorage-drive", target, "fuse", options=options)
            finally:
                os.close(fuse)
            undo.callback(unmount, target)
            file = os.open(target, os.O_RDWR | os.O_DIRECT)
            try:
                loop = Loop(file, direct=True)
            finally:
                os.close(file)
            undo.callback(loop.close)
            self.device = loop.path
            self._undo = undo.pop_all()

    @property
    def n_operations(self) -> int:
        """Operations logged so far. One that has been answered is among them."""
        return fuseserver.COUNTERS.unpack_from(self._shared)[0]

    def fail_writes(self, n: int) -> None:
        """Answer the next ``n`` writes with EIO."""
        n_operations, end, _ = fuseserver.COUNTERS.unpack_from(self._shared)
        fuseserver.COUNTERS.pack_into(self._shared, 0, n_operations, end, n)

    def operations(self) -> list[Operation]:
        """The log so far."""
        n_operations, end, _ = fuseserver.COUNTERS.unpack_from(self._shared)
        text = os.pread(self._log, end, 0)
        found, place = [], fuseserver.HEADER_BYTES
        for _ in range(n_operations):
            kind, done, offset, size = fuseserver.RECORD.unpack_from(text, place)
            place += fuseserver.RECORD.size
            found.append(Operation(_KINDS[kind], done, offset, text[place : place + size]))
            place += size
        return found

    def close(self) -> None:
        """Detach the drive. Nothing on it may be mounted."""
        self._undo.close()

    def __enter__(self) -> LoggingDisk:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def _server(fuse: int, image: int, log: int) -> Iterator[None]:
    read_end, write_end = os.pipe()
    numbers = (fuse, image, log, read_end)
    command = [sys.executable, "-I", "-S", fuseserver.__file__, *map(str, numbers)]
    try:
        # A group of its own: a terminal's Ctrl-C would end it while the drive is still mounted.
        process = subprocess.Popen(command, pass_fds=numbers, process_group=0)
    finally:
        os.close(read_end)
    try:
        yield
    finally:
        os.close(write_end)
        process.wait()
