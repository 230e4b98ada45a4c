"""What else goes on while a program saves: each schedule lets other faults of a save show.

Quiet: nothing; what a save does not force to the drive stays in memory, so its mistakes show as losses. Neighbour:
after each step another program writes an unrelated file and forces it out; most filesystems then commit the saver's
names too, but not its bytes. Writeback: after each step the kernel writes the saver's bytes early, in any order, and
now and then commits. A step is a return from a call that does file operations, as Python's profiler sees it.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from anchorage.durability.mounts import start_writeback

# Names of the built-in functions after which a step has ended.
_STEPS = {"write", "flush", "close", "open", "fsync", "replace", "rename", "link", "unlink", "mkdir", "truncate"}
_STEPS |= {"ftruncate", "sendfile", "__exit__"}
_Step = Callable[[], object]


@contextlib.contextmanager
def neighbour(root: Path, folder: Path, seed: int) -> Iterator[_Step]:
    """Another program that appends to a file and forces it out."""
    descriptor = os.open(root / "neighbour", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_SYNC, 0o600)
    try:
        yield lambda: os.write(descriptor, b"a line of an unrelated log\n")
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def writeback(root: Path, folder: Path, seed: int) -> Iterator[_Step]:
    """A kernel that writes dirty pages early, in a seeded order, and commits after every second step or so."""
    draw = random.Random(seed)

    def step() -> None:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        for path in draw.sample(files, len(files)):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                start_writeback(descriptor)
            finally:
                os.close(descriptor)
        if draw.random() < 0.5:
            commit()

    with neighbour(root, folder, seed) as commit:
        yield step


@contextlib.contextmanager
def quiet(root: Path, folder: Path, seed: int) -> Iterator[_Step | None]:
    """Nothing else goes on."""
    yield None


SCHEDULES: dict[str, Callable[[Path, Path, int], contextlib.AbstractContextManager[_Step | None]]] = {
    "quiet": quiet,
    "neighbour": neighbour,
    "writeback": writeback,
}


@contextlib.contextmanager
def after_each_step(step: _Step | None) -> Iterator[None]:
    """Call ``step`` after each step of what this thread does. It may not have a profiler of its own."""
    if step is None:
        yield
        return

    def watch(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_return" and getattr(function, "__name__", "") in _STEPS:
            step()

    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(None)
