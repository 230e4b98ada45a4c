"""The one module that makes bytes durable: temp name, write, flush, fsync, replace, fsync folder.

A file under its final name is always whole, and a call that returned has reached the device (as far as the device tells
the truth about flushing). An fsync error is raised and nothing is renamed: after a failed fsync the kernel may mark the
pages clean, so a second fsync proves nothing (Rebello et al., "Can applications recover from fsync failures?", ATC'20).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from anchorage.errors import IntegrityError

FILE_MODE = 0o644
_TEMP_MARK = ".tmp-"
_TEMP_NAME = re.compile(r".+\.tmp-\d+-[0-9a-f]{8}")
# A hard link is refused with one of these where the filesystem has none, or the folders lie on two filesystems.
_NO_LINK = {errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS}


def sync_descriptor(descriptor: int) -> None:
    """Force a file's bytes to the device. On macOS fsync stops at the drive's own cache, F_FULLFSYNC does not."""
    if sys.platform == "darwin":
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    else:
        os.fsync(descriptor)


def sync_folder(folder: Path) -> None:
    """Force a folder's entries (names made, replaced, removed) to the device."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync_descriptor(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, each one's entry forced to the device.

    An empty folder's entry is forced anew: a kill may have come between its making and the forcing. One that holds
    something was forced before that was put in.
    """
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    found = missing[-1].parent if missing else folder
    if not os.listdir(found) and os.access(found.parent, os.R_OK):  # whose parent is closed to us we have not made
        missing.append(found)
    for parent in reversed(missing):
        parent.mkdir(exist_ok=True)
        sync_folder(parent.parent)


def temp_path(path: Path) -> Path:
    """A unique temp name in the same folder, recognised by :func:`is_temp`."""
    return path.with_name(f"{path.name}{_TEMP_MARK}{os.getpid()}-{secrets.token_hex(4)}")


def is_temp(path: Path) -> bool:
    """Whether the name is one that :func:`temp_path` gives."""
    return _TEMP_NAME.fullmatch(path.name) is not None


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a temp file for writing; on a clean exit it is durable under ``path``, on an error it is gone.

    Args:
        path: final name. Its folder is made where missing. A file already there is replaced in one step.

    Raises:
        OSError: a write, fsync or rename failed; the file that was under ``path`` is untouched.
    """
    make_folder(path.parent)
    temp = temp_path(path)
    descriptor = os.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL, FILE_MODE)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            yield file
            file.flush()
            sync_descriptor(file.fileno())
        os.replace(temp, path)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a whole small file durably."""
    with atomic_file(path) as file:
        file.write(data)


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, durably. NaN and infinities are refused: they are not JSON."""
    write_bytes(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def append_line(path: Path, line: str) -> None:
    """Append one line and force it to the device; a torn last line, left by a kill, is cut off first.

    Args:
        path: a text file of lines; made where missing.
        line: the text, without a newline in it.

    Raises:
        OSError: a write or fsync failed. The line is cut off again: no reader may take for committed what nothing has
            confirmed, nor a second try leave it unwritten.
    """
    assert "\n" not in line
    with open(path, "a+b", buffering=0) as file:  # what a buffer still holds after an error, closing would write
        _cut_torn_line(file)
        size = file.seek(0, os.SEEK_END)
        if size == 0:  # before the line, so that a file with a line in it has a name that lasts, killed or not
            sync_folder(path.parent)
        data = line.encode() + b"\n"
        try:
            while data:
                data = data[file.write(data) :]
            sync_descriptor(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):  # the first error is the one to tell of
                file.truncate(size)
            raise


def _cut_torn_line(file: io.FileIO) -> None:
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        return
    file.seek(-1, os.SEEK_END)
    if file.read(1) != b"\n":
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
    file.seek(0, os.SEEK_END)


def open_file(path: Path) -> FileIO:
    """Open a file for reading, unbuffered; what is not a regular file is refused, and none holds us up.

    Raises:
        IntegrityError: a folder, named pipe or device stands there.
        OSError: it cannot be opened; the error names it.
    """
    # Without O_NONBLOCK a named pipe that nobody writes to would never open.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    kind = stat.filemode(os.fstat(descriptor).st_mode)[0]
    if kind != "-":
        os.close(descriptor)
        remedy = "Remove it, then run the plain command."
        raise IntegrityError(path, expected="a regular file", found=f"a {kind_name(kind)}", remedy=remedy)
    return FileIO(descriptor)


def kind_name(kind: str) -> str:
    """What the first letter of ``ls -l`` says of a file."""
    names = {"-": "regular file", "d": "folder", "l": "symbolic link", "p": "named pipe", "s": "socket"}
    return names.get(kind, "device")


def read_lines(path: Path) -> list[str]:
    """All whole lines of a file; a torn last line is no line, a missing file has none."""
    if not path.exists():
        return []
    text = path.read_bytes().decode(errors="replace")
    return text.split("\n")[:-1]


def link_file(source: Path, target: Path) -> None:
    """Give a durable file a second name, replacing what is there; a durable copy where links are impossible."""
    temp = temp_path(target)
    try:
        os.link(source, temp)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        with open(source, "rb") as read, atomic_file(target) as write:
            shutil.copyfileobj(read, write, 8 << 20)
        return
    os.replace(temp, target)
    # Replacing a name by another link of the same file does nothing at all, and leaves the temp name (POSIX rename).
    temp.unlink(missing_ok=True)


def publish_folder(temp: Path, target: Path) -> None:
    """Move every file of a finished temp folder to its place in ``target``, durably, and remove the temp folder."""
    make_folder(target)
    for file in sorted(temp.iterdir()):
        with open(file, "rb+") as opened:
            sync_descriptor(opened.fileno())
        os.chmod(file, FILE_MODE)
        os.replace(file, target / file.name)
    temp.rmdir()
    sync_folder(target)


def remove_file(path: Path) -> bool:
    """Remove a file where there is one; say whether there was. The caller syncs the folder when all are gone."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True
