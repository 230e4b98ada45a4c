"""The system calls of a save, as strace sees them: traced, parsed, cut into saves."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from anchorage.durability.recipes import Recipe, sweep_elsewhere
from anchorage.errors import MeasurementError

WRITES = frozenset({"write", "pwrite64", "writev", "pwritev", "pwritev2", "sendfile", "copy_file_range"}) | frozenset(
    {"ftruncate", "truncate", "fallocate"}
)
READS = frozenset(["read", "pread64", "readv", "preadv", "preadv2"])
SYNCS = frozenset(["fsync", "fdatasync"])
RENAMES = frozenset(["rename", "renameat", "renameat2"])
LINKS = frozenset(["link", "linkat"])
REMOVALS = frozenset(["unlink", "unlinkat", "rmdir"])
OPENS = frozenset(["open", "openat", "creat"])
FOLDERS = frozenset(["mkdir", "mkdirat"])
TRACED = WRITES | READS | SYNCS | RENAMES | LINKS | REMOVALS | OPENS | FOLDERS | {"close", "sync_file_range", "syncfs"}

SAVER = (sys.executable, "-m", "anchorage.durability.saver")
_PROCESS = re.compile(r"\d+")
_CALL = re.compile(r"(?P<pid>\d+) +(?P<name>\w+)\((?P<rest>.*)")
_RESUMED = re.compile(r"(?P<pid>\d+) +<\.\.\. (?P<name>\w+) resumed>(?P<rest>.*)")
_UNFINISHED = re.compile(r"(?P<text>.*?) *<unfinished \.\.\.>")
_RESULT = re.compile(r".*\) += (?P<value>-?\d+|\?)(?:<[^>]*>)?(?: (?P<error>E[A-Z0-9]+))?.*")
_DESCRIPTOR = re.compile(r"(?:\d+|AT_FDCWD)<(?P<path>[^>]*?)(?: ?\(deleted\))?>")
# A place in the file tree: a path, or one relative to the folder given before it.
_PATH = re.compile(r'(?:AT_FDCWD<(?P<base>[^>]*)>|\d+<(?P<folder>[^>]*)>)?(?:, )?"(?P<name>(?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Event:
    """A system call that ended, or (``issued``) an fsync that began: what a thread writes meanwhile is not covered.

    Attributes:
        call: its name; of a forced write ``fsync`` or ``fdatasync``.
        path: of the file, as it was named when the call was made.
        target: the new name that a rename or a link gives.
        flags: of an open.
        value: what it returned.
        error: its error's name, or empty.
        issued: the call has only begun.
    """

    call: str
    path: str
    target: str = ""
    flags: str = ""
    value: int = 0
    error: str = ""
    issued: bool = False


@dataclass
class SaveTrace:
    """The events of one save, between the saver's lines; without an acknowledgement it did not end."""

    recipe: str
    version: int
    events: list[Event] = field(default_factory=list)
    acknowledged: bool = False


def strace_refusal() -> str:
    """Why strace cannot be used here; empty where it can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    tried = subprocess.run(["strace", "-f", "-o", os.devnull, sys.executable, "-c", ""], capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"strace may not trace here: {tried.stderr.strip().splitlines()[-1]}"


def trace_saves(
    saves: Sequence[tuple[Recipe, Path, int]], log: Path, *, command: Sequence[str] = SAVER
) -> list[SaveTrace]:
    """Trace saves, made one after the other by one process.

    Args:
        saves: recipe, folder (made where missing) and version of each.
        log: where strace writes.
        command: the saver, without its arguments.

    Raises:
        MeasurementError: the saver failed, or a save is missing in the trace.
    """
    words = []
    for recipe, folder, version in saves:
        folder.mkdir(parents=True, exist_ok=True)
        words += [recipe.key, str(folder.resolve()), str(version)]
    # A filter in the kernel (seccomp) stops the process at traced calls alone.
    strace = ["strace", "-f", "-y", "-s", "100", "--seccomp-bpf", "-e", f"trace={_traced()}", "-o", str(log)]
    try:
        ended = subprocess.run([*strace, *command, *words], capture_output=True, text=True)
    finally:
        _sweep(log, {folder for _, folder, _ in saves})
    if ended.returncode:
        raise MeasurementError(f"a traced saver failed with {ended.returncode}:\n{ended.stderr[-2000:]}")
    traces = list(cut_saves(parse_trace(log.read_text(errors="replace").splitlines())))
    found = [(trace.recipe, trace.version) for trace in traces if trace.acknowledged]
    if found != [(recipe.key, version) for recipe, _, version in saves]:
        raise MeasurementError(
            f"{log}: the trace has the saves {found}, not those asked for. Keep it and file an issue"
        )
    return traces


def _sweep(log: Path, folders: Iterable[Path]) -> None:
    processes = {int(found[0]) for line in log.open(errors="replace") if (found := _PROCESS.match(line))}
    for folder in folders:
        for process in processes:
            sweep_elsewhere(folder, process)


def _traced() -> str:
    # The question mark: a call that this processor's kernel does not have is left out.
    return ",".join(f"?{name}" for name in sorted(TRACED))


def parse_trace(lines: Iterable[str]) -> Iterator[Event]:
    """Read the output of ``strace -f -y``; calls of other threads in between are put together again."""
    unfinished: dict[str, str] = {}
    for line in lines:
        if match := _RESUMED.match(line):
            text, name, begun = unfinished.pop(match["pid"], "") + match["rest"], match["name"], True
        elif match := _CALL.match(line):
            text, name, begun = match["rest"], match["name"], False
        else:
            continue  # signals and exits
        if name not in TRACED:
            continue
        if cut := _UNFINISHED.fullmatch(text):
            unfinished[match["pid"]] = cut["text"]
            if name in SYNCS:
                yield Event(name, _paths(name, cut["text"])[0], issued=True)
            continue
        event = _event(name, text)
        if name in SYNCS and not begun:
            yield Event(name, event.path, issued=True)
        yield event


def _event(name: str, text: str) -> Event:
    result = _RESULT.match(text)
    value, error = (result["value"], result["error"] or "") if result else ("?", "")
    paths = _paths(name, text)
    flags = text.partition('", ')[2].partition(")")[0].partition(",")[0] if name in OPENS else ""
    if name == "write" and paths[0] and _descriptor_number(text) == 1:
        return Event("say", text.partition('"')[2].rpartition('"')[0])
    return Event(name, paths[0], paths[1], flags, int(value) if value != "?" else 0, error)


def _descriptor_number(text: str) -> int:
    return int(text.partition("<")[0])


def _paths(name: str, text: str) -> tuple[str, str]:
    if name in OPENS | RENAMES | LINKS | REMOVALS | FOLDERS | {"truncate"}:
        names = [
            os.path.normpath(os.path.join(found["base"] or found["folder"] or "", found["name"]))
            for found in _PATH.finditer(text)
        ]
        return names[0], names[1] if len(names) > 1 else ""
    found = _DESCRIPTOR.match(text)
    return found["path"] if found else "", ""


def cut_saves(events: Iterable[Event]) -> Iterator[SaveTrace]:
    """Cut a saver's events into its saves."""
    current: SaveTrace | None = None
    for event in events:
        words = event.path.removesuffix("\\n").split(" ") if event.call == "say" else [""]
        if words[0] == "saving":
            current = SaveTrace(" ".join(words[1:-1]), int(words[-1]))
        elif words[0] == "saved" and current is not None:
            current.acknowledged = True
            yield current
            current = None
        elif current is not None:
            current.events.append(event)
    if current is not None:
        yield current
