"""Mounts and loop devices by their system calls, in a mount namespace of one thread.

What is mounted there nobody else sees, and the kernel unmounts it when the thread ends, however it ends: after an
exception, Ctrl-C, SIGTERM or SIGKILL nothing is left to be swept. Images are files in memory without a name, and loop
devices detach themselves with their last user, so they go the same way. A machine-wide lock keeps two labs apart.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import os
import shutil
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from anchorage.errors import MeasurementError

T = TypeVar("T")

_CLONE_NEWNS = 0x00020000
_MS_REC, _MS_PRIVATE = 1 << 14, 1 << 18
_LOOP_CONFIGURE, _LOOP_CLEAR, _LOOP_GET_FREE = 0x4C0A, 0x4C01, 0x4C82
_AUTOCLEAR, _DIRECT_IO = 4, 16
_FLUSH_BUFFERS = 0x1261
_PLACES = "power-cuts-"
# Of the machine: devices and filesystem identities are, whatever folder a lab works in.
_LOCK = Path("/run/anchorage-power-cuts.lock")
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Filesystem:
    """A filesystem as the lab makes and mounts it.

    Attributes:
        name: as tables name it.
        kind: as mount(2) names it; mkfs.KIND makes it.
        options: mount options under test; the tables have them.
        image_bytes: size of the image.
        mkfs: arguments that keep it small; nothing that changes what a crash leaves.
        quiet: mount options that only spare work.
    """

    name: str
    kind: str
    options: str
    image_bytes: int
    mkfs: tuple[str, ...]
    quiet: str = ""

    def make(self, image: int) -> None:
        """Make the filesystem on a file.

        Raises:
            MeasurementError: mkfs failed; the message has what it said.
        """
        command = [f"mkfs.{self.kind}", *self.mkfs, f"/proc/self/fd/{image}"]
        done = subprocess.run(command, pass_fds=(image,), capture_output=True, text=True)
        if done.returncode:
            raise MeasurementError(f"{' '.join(command)} failed: {done.stderr.strip()}")

    def mount(self, device: str, target: Path) -> None:
        """Mount it read-write, so that it recovers as after a real power cut."""
        mount(device, target, self.kind, options=",".join(filter(None, (self.options, self.quiet))))


_MIB = 1 << 20
# -O and -b settle what mkfs.ext4 would choose by size: the features and the block size of a large drive.
_EXT4 = ("-q", "-F", "-b", "4096", "-J", "size=4", "-E", "lazy_itable_init=0,nodiscard")
FILESYSTEMS = {
    filesystem.name: filesystem
    for filesystem in (
        Filesystem("ext4", "ext4", "", 24 * _MIB, _EXT4, "noinit_itable"),
        Filesystem("ext4-noauto", "ext4", "noauto_da_alloc", 24 * _MIB, _EXT4, "noinit_itable"),
        Filesystem("xfs", "xfs", "", 32 * _MIB, ("-q", "-f", "--unsupported", "-K")),
        Filesystem("btrfs", "btrfs", "", 128 * _MIB, ("-q", "-f", "-K"), "nodiscard"),
    )
}


def why_not(filesystem: Filesystem | None = None) -> str:
    """Why the lab cannot run here: no root, no /dev/fuse, no loop devices, no mkfs. Empty when it can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "needs root"
    for device in ("/dev/fuse", "/dev/loop-control"):
        try:
            os.close(os.open(device, os.O_RDWR))
        except OSError as error:
            return f"{device}: {error.strerror}"
    if filesystem is None:
        return ""
    if shutil.which(f"mkfs.{filesystem.kind}") is None:
        return f"mkfs.{filesystem.kind} is not installed"
    known = Path("/proc/filesystems").read_text().split()
    return "" if filesystem.kind in known else _why_unknown(filesystem.kind)


def _why_unknown(kind: str) -> str:
    """Ask for the module, as mount(8) would make the kernel do."""
    if modprobe := shutil.which("modprobe"):
        subprocess.run([modprobe, kind], capture_output=True)
    return "" if kind in Path("/proc/filesystems").read_text().split() else f"this kernel has no {kind}"


def run_privately(function: Callable[[threading.Event], T]) -> T:
    """Run a function in a thread with a mount namespace of its own, one such thread on the machine at a time.

    Args:
        function: takes an event; once it is set (Ctrl-C) the function should return soon.

    Returns:
        What it returned.

    Raises:
        Whatever it raised; KeyboardInterrupt as soon as it has come to an end.
    """
    outcome: list[T] = []
    errors: list[BaseException] = []
    # Not Thread.join: interrupted, it takes the thread for ended from then on (Python 3.11, issue 90882 of CPython).
    stop, ended = threading.Event(), threading.Event()

    def work() -> None:
        try:
            with _machine_lock(stop):
                leave_mounts()
                outcome.append(function(stop))
        except BaseException as error:  # it is raised again in the thread that waits
            errors.append(error)
        finally:
            ended.set()

    threading.Thread(target=work, name="power cuts", daemon=True).start()
    try:
        while not ended.wait(0.2):
            pass
    except BaseException:
        stop.set()
        ended.wait(30)
        raise
    if errors:
        raise errors[0]
    return outcome[0]


@contextlib.contextmanager
def _machine_lock(stop: threading.Event) -> Iterator[None]:
    with open(_LOCK, "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if stop.wait(0.1):
                    raise KeyboardInterrupt from None
        yield


@contextlib.contextmanager
def mount_places(folder: Path) -> Iterator[Path]:
    """An empty folder for mount points, gone afterwards. What a killed lab left is swept: the lock says it is dead."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{_PLACES}*"):
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=_PLACES, dir=folder) as places:
        yield Path(places)


def mount(source: str, target: Path, kind: str, *, options: str = "", flags: int = 0) -> None:
    """mount(2); raises OSError."""
    done = _libc.mount(source.encode(), bytes(target), kind.encode(), flags, options.encode())
    _check(done, f"mount of {kind or 'namespace'}")


def leave_mounts() -> None:
    """Give this thread a mount namespace of its own; what it mounts is gone when it ends. Raises OSError."""
    _check(_libc.unshare(_CLONE_NEWNS), "unshare")
    mount("none", Path("/"), "", flags=_MS_REC | _MS_PRIVATE)


def unmount(target: Path) -> None:
    """umount2(2). What still holds a file there is collected first; OSError if something does all the same."""
    for attempt in range(50):
        if _libc.umount2(bytes(target), 0) == 0:
            return
        if ctypes.get_errno() != errno.EBUSY:
            break
        gc.collect()
        time.sleep(0.002 * attempt)
    _check(-1, f"unmount of {target}")


def _check(returned: int, what: str) -> None:
    if returned != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def sync_filesystem(folder: int) -> None:
    """syncfs(2) of the filesystem that an open folder lies on."""
    _check(_libc.syncfs(folder), "syncfs")


def start_writeback(descriptor: int) -> None:
    """Have the kernel write a file's dirty pages now, and wait for them: no commit, no flush (sync_file_range(2))."""
    _check(_libc.sync_file_range(descriptor, ctypes.c_int64(0), ctypes.c_int64(0), 1 | 2 | 4), "sync_file_range")


class Loop:
    """A loop device over a file. It detaches when closed, and by itself when this process is gone.

    Args:
        image: descriptor of the file.
        direct: go past the page cache to the file.
    """

    def __init__(self, image: int, *, direct: bool = False) -> None:
        information = bytearray(232)
        struct.pack_into("<I", information, 52, _AUTOCLEAR | (_DIRECT_IO if direct else 0))
        config = struct.pack("<II", image, 512) + bytes(information) + bytes(64)
        with open("/dev/loop-control", "rb") as control:
            for _ in range(20):  # another program may take the free one first
                number = fcntl.ioctl(control, _LOOP_GET_FREE)
                self.path = f"/dev/loop{number}"
                self._descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    fcntl.ioctl(self._descriptor, _LOOP_CONFIGURE, config)
                    return
                except OSError as error:
                    os.close(self._descriptor)
                    if error.errno != errno.EBUSY:
                        raise
        raise MeasurementError("no free loop device: something takes them all; `losetup -a` lists them")

    def forget(self) -> None:
        """Drop what the device keeps in the page cache: the file under it has changed."""
        fcntl.ioctl(self._descriptor, _FLUSH_BUFFERS)

    def close(self) -> None:
        os.close(self._descriptor)
