"""What a save asks of the filesystem, seen from inside the process: on any system, without a tracer.

While a save runs, the functions of Python through which files are opened, named and synced are watched. Before and
after each such call the folder is read, as the kernel shows it: what has changed was written in between. Bytes that
still wait in the process are not there, so an fsync that comes before a flush is seen to cover nothing.
"""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import io
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal["create", "truncate", "append", "fsync", "rename", "link", "unlink", "mkdir", "fsync folder"]
_WRITING = set("wax+")


@dataclass(frozen=True)
class Operation:
    """One step of a save.

    Attributes:
        kind: what is done. ``truncate`` is any cut, ``append`` any bytes at the end.
        name: of the file or folder, below the watched folder ("." is itself).
        file: number of the file, whatever its names; -1 of a folder.
        target: the new name that a rename or a link gives.
        data: appended bytes.
        size: bytes left by a truncation.
    """

    kind: Kind
    name: str
    file: int = -1
    target: str = ""
    data: bytes = b""
    size: int = 0


class Watch:
    """A folder under watch.

    Attributes:
        operations: what was seen, in order.
        names: number of the file under each name, now.
        folders: folders below, now.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.operations: list[Operation] = []
        self.names: dict[str, int] = {}
        self.folders: set[str] = set()
        self._inodes: dict[str, int] = {}
        self._contents: list[bytes] = []
        self.look()
        self.operations.clear()

    def contents(self) -> dict[str, bytes]:
        """Bytes under each name, as last seen."""
        return {name: self._contents[file] for name, file in self.names.items()}

    def look(self) -> None:
        """Read the folder, and note what was made and written since the last time."""
        found, folders = {}, set()
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder).as_posix()
            if path.is_dir():
                folders.add(name)
            else:
                found[name] = path
        for name in sorted(folders - self.folders):
            self._note(Operation("mkdir", name))
        self.folders = folders
        for name in sorted(self.names.keys() - found.keys()):
            self._note(Operation("unlink", name, self.names.pop(name)))
        for name, path in found.items():
            self._look_at(name, path)

    def _look_at(self, name: str, path: Path) -> None:
        if name not in self.names:
            self.names[name] = len(self._contents)
            self._contents.append(b"")
            self._note(Operation("create", name, self.names[name]))
        self._inodes[name] = path.stat().st_ino
        file, data = self.names[name], path.read_bytes()
        before = self._contents[file]
        kept = next((len(part) for part in (before, data) if before.startswith(part) and data.startswith(part)), 0)
        if kept < len(before):
            self._note(Operation("truncate", name, file, size=kept))
        if kept < len(data):
            self._note(Operation("append", name, file, data=data[kept:]))
        self._contents[file] = data

    def rename(self, name: str | None, target: str | None) -> None:
        """Note a rename that was done."""
        if name is None or target is None or self.names[name] == self.names.get(target):
            return  # POSIX: of two names of one file, neither is removed
        self._note(Operation("rename", name, self.names[name], target))
        self.names[target] = self.names.pop(name)

    def link(self, name: str | None, target: str | None) -> None:
        """Note a link that was made."""
        if name is not None and target is not None:
            self._note(Operation("link", name, self.names[name], target))
            self.names[target] = self.names[name]

    def sync(self, descriptor: int) -> None:
        """Note an fsync that was done: of a file or a folder here."""
        inode = os.fstat(descriptor).st_ino
        for folder in (".", *sorted(self.folders)):
            if (self.folder / folder).stat().st_ino == inode:
                self._note(Operation("fsync folder", folder))
        for name, found in self._inodes.items():
            if found == inode and name in self.names:
                self._note(Operation("fsync", name, self.names[name]))
                return

    def name_of(self, path: Any) -> str | None:
        """A path's name below the folder; None of one that lies elsewhere."""
        path = Path(os.path.abspath(os.fspath(path)))
        path = path.parent.resolve() / path.name
        return path.relative_to(self.folder).as_posix() if path.is_relative_to(self.folder) else None

    def _note(self, operation: Operation) -> None:
        self.operations.append(operation)


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[Watch]:
    """Watch a folder: what this process, by one thread, does there in the ``with`` block."""
    watch, originals = Watch(folder), []
    try:
        for module, name, wrap in _WRAPPERS:
            original = getattr(module, name)
            originals.append((module, name, original))
            setattr(module, name, wrap(watch, original))
        yield watch
    finally:
        for module, name, original in originals:
            setattr(module, name, original)
    watch.look()


def _wrap_open(watch: Watch, original: Callable[..., Any]) -> Callable[..., Any]:
    def opened(file: Any, mode: Any = "r", *words: Any, **named: Any) -> Any:
        result = original(file, mode, *words, **named)
        if mode & (os.O_WRONLY | os.O_RDWR) if isinstance(mode, int) else _WRITING & set(mode):
            watch.look()
        return result

    return opened


def _wrap_naming(note: str) -> Callable[[Watch, Callable[..., Any]], Callable[..., Any]]:
    def wrap(watch: Watch, original: Callable[..., Any]) -> Callable[..., Any]:
        def called(*words: Any, **named: Any) -> Any:
            watch.look()
            result = original(*words, **named)
            if note:
                getattr(watch, note)(*map(watch.name_of, words[:2]))
            watch.look()
            return result

        return called

    return wrap


def _wrap_sync(watch: Watch, original: Callable[..., Any]) -> Callable[..., Any]:
    def called(descriptor: int, *words: Any) -> Any:
        watch.look()
        result = original(descriptor, *words)
        if original is not _FCNTL or words[0] == getattr(fcntl, "F_FULLFSYNC", None):
            watch.sync(descriptor)
        return result

    return called


_FCNTL = fcntl.fcntl
_WRAPPERS: list[tuple[Any, str, Callable[[Watch, Callable[..., Any]], Callable[..., Any]]]] = [
    (builtins, "open", _wrap_open),
    (io, "open", _wrap_open),
    (os, "open", _wrap_open),
    (os, "rename", _wrap_naming("rename")),
    (os, "replace", _wrap_naming("rename")),
    (os, "link", _wrap_naming("link")),
    *((os, name, _wrap_naming("")) for name in ("unlink", "remove", "mkdir")),
    (os, "fsync", _wrap_sync),
    *([(os, "fdatasync", _wrap_sync)] if sys.platform != "darwin" else []),
    (fcntl, "fcntl", _wrap_sync),
]
