"""Ways of saving a state, as plug-ins: here the textbook's, safe and unsafe; `durability.ourrecipes` has our writers.

The unsafe ones are the controls of the lab: a harness in which one of them never fails is blind. They are those of the
tutorial on saving and loading files and of Pillai et al., "All File Systems Are Not Created Equal", OSDI'14.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from anchorage.errors import IntegrityError

Case = Literal["overwrite", "new name"]
Verdict = Literal["old", "new", "torn", "gone"]

# More than Python's buffer (8 KiB; 128 KiB from 3.14 on, hence it is passed), so that writes precede the flush; and a
# last chunk smaller than it, so that a flush that comes too late has something left to write.
_BODY_BYTES, _TAIL_BYTES, _BUFFER_BYTES = 64 * 1024 + 100, 3000, 8192
_DIGEST_BYTES = hashlib.sha256().digest_size
_NAME = re.compile(r"state-(\d{6})")


@dataclass(frozen=True)
class Recipe:
    """A way of saving.

    Attributes:
        name: as tables and command lines name it.
        case: every version under the same name, or each under a name of its own.
        write: saves a version, 0, 1, 2, ..., of the state in a folder. Once it has returned the version is
            acknowledged. (Not ``save``: nnsight gives every object a method of that name, a default for a dataclass.)
        load: what a reader finds there: the newest version that is whole, with all before it where each has its own
            name; None where there is nothing. Raises where something under its final name is no version. Writes
            nothing.
        ours: one of this package's writers.
        modules: what it imports when it is used; a process that is forked to save imports them before.
    """

    name: str
    case: Case
    write: Callable[[Path, int], None]
    load: Callable[[Path], int | None]
    ours: bool = False
    modules: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Name and case: what tells one recipe from all others."""
        return f"{self.name}/{self.case}"


def judge(recipe: Recipe, folder: Path, *, acknowledged: int | None, tried: int) -> Verdict:
    """Say what a crash has left.

    Args:
        acknowledged: newest version whose save had returned before the crash; None: none had.
        tried: newest version whose save had begun.

    Returns:
        ``torn``: something is no version that was ever saved. ``gone``: an acknowledged version is lost. ``new``: the
        newest is there. ``old``: the one before it.
    """
    try:
        found = recipe.load(folder)
    except Exception:  # a reader may stumble over torn bytes in any way
        return "torn"
    if (-1 if found is None else found) < (-1 if acknowledged is None else acknowledged):
        return "gone"
    return "new" if found == tried else "old"


def content(version: int) -> bytes:
    """A version's bytes: its number, seeded random bytes (how many differs from version to version), their sha256."""
    data = version.to_bytes(8, "little") + random.Random(version).randbytes(_BODY_BYTES + 1000 * (version % 3))
    return data + hashlib.sha256(data).digest()


def check_content(path: Path) -> int:
    """The version that a file holds.

    Raises:
        IntegrityError: it holds none: bytes are missing or differ.
    """
    data = path.read_bytes()
    expected = hashlib.sha256(data[:-_DIGEST_BYTES]).digest()
    if len(data) < _BODY_BYTES or data[-_DIGEST_BYTES:] != expected:
        remedy = "The recipe that saved it is not safe."
        raise IntegrityError(path, expected="a whole version", found=f"{len(data)} bytes that are none", remedy=remedy)
    return int.from_bytes(data[:8], "little")


def load_overwritten(folder: Path) -> int | None:
    """The version under the one name."""
    path = folder / "state"
    return check_content(path) if path.exists() else None


def load_named(folder: Path) -> int | None:
    """The newest version with all before it; each file under a version's name must hold that version."""
    return check_named(folder, check_content)


def check_named(folder: Path, check: Callable[[Path], int | None]) -> int | None:
    """The newest version with all before it.

    Args:
        folder: of files, or folders, under versions' names.
        check: the version that one holds; None: it is not yet one.

    Raises:
        IntegrityError: one holds another version than its name says.
    """
    matches = [match for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    found = {int(match[1]): check(folder / match[0]) for match in matches}
    for version, other in found.items():
        if other not in (version, None):
            name = f"state-{version:06d}"
            raise IntegrityError(folder / name, expected=f"version {version}", found=other, remedy="None.")
    return last_of_run(version for version in found.values() if version is not None)


def last_of_run(versions: Iterable[int]) -> int | None:
    """The last of 0, 1, 2, ... before the first that is missing; None where 0 is."""
    found = set(versions)
    return next(version for version in range(len(found) + 1) if version not in found) - 1 if 0 in found else None


def elsewhere(folder: Path) -> Path:
    """A folder for temp files on another filesystem than ``folder``; where there is none, the system's own for them."""
    system = Path(tempfile.gettempdir())
    others = (path for path in (Path("/dev/shm"), system) if path.is_dir() and _device(path) != _device(folder))
    return next(others, system)


def elsewhere_temp(path: Path, process: int) -> Path:
    """Name of the temp file of a file under :func:`elsewhere`; a kill leaves it there: :func:`sweep_elsewhere`."""
    return elsewhere(path.parent) / f"anchorage-{process}-{path.name}.tmp"


def sweep_elsewhere(folder: Path, process: int) -> None:
    """Remove the temp files that a process, ended now, has left elsewhere as it saved into ``folder``."""
    for temp in elsewhere(folder).glob(f"anchorage-{process}-*.tmp"):
        temp.unlink()


def _naive(path: Path, data: bytes) -> None:
    with open(path, "wb", _BUFFER_BYTES) as file:
        _write(file.write, data)


def _rename_only(path: Path, data: bytes) -> None:
    _naive(_temp(path), data)
    os.replace(_temp(path), path)


def _fsync_rename(path: Path, data: bytes) -> None:
    _write_synced(_temp(path), data)
    os.replace(_temp(path), path)


def _fsync_before_flush(path: Path, data: bytes) -> None:
    with open(_temp(path), "wb", _BUFFER_BYTES) as file:
        _write(file.write, data)
        os.fsync(file.fileno())
        file.flush()
    os.replace(_temp(path), path)
    _sync_folder(path.parent)


def _temp_elsewhere(path: Path, data: bytes) -> None:
    temp = elsewhere_temp(path, os.getpid())
    try:
        _write_synced(temp, data)
        if _device(temp.parent) != _device(path.parent):
            shutil.move(temp, path)
        else:  # what shutil.move does across filesystems
            shutil.copy2(temp, path)
            os.unlink(temp)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _remove_then_rename(path: Path, data: bytes) -> None:
    _write_synced(_temp(path), data)
    path.unlink(missing_ok=True)
    os.rename(_temp(path), path)
    _sync_folder(path.parent)


def _full(path: Path, data: bytes) -> None:
    _write_synced(_temp(path), data)
    os.replace(_temp(path), path)
    _sync_folder(path.parent)


def _write_synced(path: Path, data: bytes) -> None:
    with open(path, "wb", _BUFFER_BYTES) as file:
        _write(file.write, data)
        file.flush()
        os.fsync(file.fileno())


def _write(write: Callable[[bytes], object], data: bytes) -> None:
    write(data[:-_TAIL_BYTES])
    write(data[-_TAIL_BYTES:])


def _temp(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _device(folder: Path) -> int:
    return folder.stat().st_dev


def by_case(name: str, write: Callable[[Path, bytes], object], *, ours: bool = False) -> dict[str, Recipe]:
    """Both cases of a recipe that writes one file."""

    def overwrite(folder: Path, version: int) -> None:
        write(folder / "state", content(version))

    def make(folder: Path, version: int) -> None:
        write(folder / f"state-{version:06d}", content(version))

    recipes = [
        Recipe(name, "overwrite", overwrite, load_overwritten, ours),
        Recipe(name, "new name", make, load_named, ours),
    ]
    return {recipe.key: recipe for recipe in recipes}


RECIPES: dict[str, Recipe] = (
    by_case("naive", _naive)
    | by_case("rename only", _rename_only)
    | by_case("fsync, rename", _fsync_rename)
    | by_case("fsync before flush", _fsync_before_flush)
    | by_case("temp elsewhere, move", _temp_elsewhere)
    | by_case("remove, rename", _remove_then_rename)
    | by_case("full", _full)
)
