"""Does a save force its bytes to the device in an order that no crash can break? Read off its system calls.

The rules are what POSIX leaves open, whatever one filesystem does on top: a write, a new name or a rename may reach the
device at any time and in any order, unless an fsync of the file, or of the folder for names, was issued after it and
came back before the next step. Method: Pillai et al., "All File Systems Are Not Created Equal", OSDI'14.

Not seen: writes through a memory mapping, and whether the device itself tells the truth about flushing.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from anchorage.durability.syscalls import (
    FOLDERS,
    LINKS,
    OPENS,
    READS,
    REMOVALS,
    RENAMES,
    SYNCS,
    WRITES,
    Event,
    SaveTrace,
)

# A commit record (left) states that files (right) are there: they must be durable before it, and untouched after it.
_COMMITS = {
    "journal-part-*.jsonl": ("*.shard-*.safetensors",),
    "part-*.jsonl": ("part-*-shard-*.safetensors",),
    "manifest.jsonl": ("part-*.jsonl", "part-*-shard-*.safetensors"),
    "step-*.json": ("step-*.safetensors",),
}
_UNIQUE = re.compile(r"\.tmp-\d+-[0-9a-f]{8}|-\d+(?=-state)")


@dataclass
class _File:
    """What is known of a file: counts, so that only what came before an fsync was issued is covered by it."""

    writes: int = 0
    issued: int = 0
    synced: int = 0
    n_fsyncs: int = 0
    read_whole: bool = False

    @property
    def is_durable(self) -> bool:
        return self.synced == self.writes


class _Checker:
    """Follows the files of one folder through saves; each save's faults are found in the order of its calls."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.files: dict[str, _File] = {}
        # Names made and not yet forced to the device, and those that an fsync of their folder, now running, covers.
        self.loose: set[str] = set()
        self.covered: dict[str, set[str]] = {}
        self._begin()

    def _begin(self) -> None:
        self.faults: list[str] = []
        self.before = set(self.files)
        self.removed: set[str] = set()
        self.opened: set[str] = set()
        self.changed: dict[str, int] = {}  # when a name last came to other bytes, in events
        for file in self.files.values():
            file.read_whole = False

    def check(self, events: Iterable[Event]) -> list[str]:
        """Follow one save from its first call to its acknowledgement; say what is wrong with it, each once."""
        self._begin()
        for self.now, event in enumerate(events):
            if event.error:
                self._fail(event)
            elif event.call in SYNCS:
                self._sync(event)
            elif event.path.startswith(self.folder) or event.target.startswith(self.folder):
                self._follow(event)
        self._acknowledge()
        return list(dict.fromkeys(self.faults))

    def _fault(self, text: str, *paths: str) -> None:
        self.faults.append(text.format(*(_short(path, self.folder) for path in paths)))

    def _fail(self, event: Event) -> None:
        if event.call in RENAMES and event.error == errno.errorcode[errno.EXDEV]:
            self._fault("the temp file of {} is on another filesystem: no rename can be", event.target)

    def _follow(self, event: Event) -> None:
        if event.call in OPENS:
            self._open(event)
        elif event.call in WRITES:
            self._write(event.path)
        elif event.call in READS and event.value == 0:
            self._file(event.path).read_whole = True
        elif event.call in FOLDERS:
            self.loose.add(event.path)
        elif event.call in RENAMES:
            self._rename(event.path, event.target)
        elif event.call in LINKS:
            self._link(event.path, event.target)
        elif event.call in REMOVALS:
            self.files.pop(event.path, None)
            self.loose.discard(event.path)
            self.removed.add(event.path)

    def _file(self, path: str) -> _File:
        return self.files.setdefault(path, _File())

    def _open(self, event: Event) -> None:
        if "O_CREAT" not in event.flags:
            return
        if event.path not in self.files:
            self.loose.add(event.path)
        self._file(event.path)
        if "O_TRUNC" in event.flags and event.path in self.before:
            self._file(event.path).writes += 1
            self._fault("truncates {} in place", event.path)
        if "O_APPEND" not in event.flags:
            self.opened.add(event.path)

    def _write(self, path: str) -> None:
        self._file(path).writes += 1
        self._change(path)

    def _sync(self, event: Event) -> None:
        if event.path not in self.files:
            inside = {name for name in self.loose if os.path.dirname(name) == event.path}
            if event.issued:
                self.covered[event.path] = inside
            else:
                self.loose -= self.covered.pop(event.path, set())
        elif event.issued:
            self.files[event.path].issued = self.files[event.path].writes
        else:
            self.files[event.path].synced = self.files[event.path].issued
            self.files[event.path].n_fsyncs += 1

    def _rename(self, path: str, target: str) -> None:
        file = self.files.pop(path, _File())
        if not file.is_durable:
            late = "its last bytes are written after its fsync" if file.n_fsyncs else "its bytes are not forced"
            self._fault("renames to {}, but " + late, target)
        if target in self.removed and target in self.before:
            self._fault("removes {} before its replacement has the name", target)
        self.files[target] = file
        self.loose.discard(path)
        self.opened.discard(path)
        self._name(target)

    def _link(self, path: str, target: str) -> None:
        file = self._file(path)
        if not file.is_durable:
            self._fault("links {} before its bytes are forced", path)
        if path in self.before and not file.read_whole:
            self._fault("publishes {} without having verified it", path)
        self.files[target] = file
        self._name(target)

    def _name(self, path: str) -> None:
        self.loose.add(path)
        self._change(path)

    def _change(self, path: str) -> None:
        """A name has come to other bytes; where it is a commit record, all that it states must be durable now."""
        for stated in self._stated(path):
            if not self.files[stated].is_durable or self.loose & {stated, os.path.dirname(stated)}:
                self._fault("writes {} before {} is durable", path, stated)
        self.changed[path] = self.now

    def _stated(self, path: str) -> list[str]:
        patterns = next((stated for commit, stated in _COMMITS.items() if _matches(path, commit)), ())
        return [name for name in self.files if any(_matches(name, pattern) for pattern in patterns)]

    def _acknowledge(self) -> None:
        for name in sorted(self.changed.keys() & self.files.keys()):
            file = self.files[name]
            if not file.is_durable:
                self._fault("ends before the bytes of {} are forced", name)
            if name in self.loose:  # an empty file, such as a lock, has not changed: it may be lost
                self._fault("ends before the name {} is forced: no fsync of its folder", name)
            if name in self.opened:
                self._fault("writes under the final name {}", name)
        for folder in sorted(self.loose - self.files.keys()):
            self._fault("ends before the folder {} is forced into its parent", folder)
        for commit in self.changed:
            for stated in self._stated(commit):
                if self.changed.get(stated, -1) > self.changed[commit]:
                    self._fault("changes {} after {}, which states it", stated, commit)


def _matches(path: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(os.path.basename(path), pattern)


def check_order(traces: Sequence[SaveTrace], folder: Path) -> list[list[str]]:
    """Find where saves break the order.

    Args:
        traces: all saves into the folder, in order: the first meets an empty folder.
        folder: where they saved.

    Returns:
        The faults of each save, in words; none is right.
    """
    checker = _Checker(str(folder.resolve()))
    return [checker.check(trace.events) for trace in traces]


def own_events(trace: SaveTrace, folder: Path) -> Iterator[Event]:
    """The save's calls on its own files: those below its folder, and its temp files elsewhere."""
    inside = str(folder.resolve())
    for event in trace.events:
        if any(path.startswith(inside) or "/anchorage-" in path for path in (event.path, event.target)):
            yield event


def describe_order(events: Iterable[Event], folder: Path) -> str:
    """The calls that matter, in order, in a line: ``write a.tmp x2 > fsync a.tmp > rename a.tmp -> a > fsync .``"""
    steps: list[str] = []
    counts: Counter[int] = Counter()
    for event in events:
        if event.issued or event.call in READS | {"close"} or (event.call in OPENS and "O_CREAT" not in event.flags):
            continue
        step = " ".join([_word(event), _short(event.path, str(folder.resolve()))])
        step += f" -> {_short(event.target, str(folder.resolve()))}" * bool(event.target)
        step += f" ({event.error})" * bool(event.error)
        if not steps or steps[-1] != step:
            steps.append(step)
        counts[len(steps)] += 1
    return " > ".join(step + f" x{counts[n]}" * (counts[n] > 1) for n, step in enumerate(steps, 1))


def _word(event: Event) -> str:
    if event.call in OPENS:
        return "truncate" if "O_TRUNC" in event.flags else "create" if "O_EXCL" in event.flags else "open"
    families = {"rename": RENAMES, "link": LINKS, "remove": REMOVALS, "make folder": FOLDERS}
    return next((word for word, calls in families.items() if event.call in calls), event.call)


def _short(path: str, folder: str) -> str:
    path = _UNIQUE.sub(lambda match: ".tmp" if match[0].startswith(".tmp") else "", path)
    return os.path.relpath(path, folder) if path.startswith(folder) else path
