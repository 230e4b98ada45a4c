"""The page cache: what of a file lies in it, how to empty and fill it, and how both are proved.

The kernel tells a file's residency to its owner and to those who may write it. Of another's file cachestat(2) says so
(EPERM); mincore(2) says "all resident" whatever is true, so it is not asked. What lies beneath is not seen: the cache
of a drive, or of a host under a virtual machine (:func:`cold_kind` says which). Tested on Linux; not on macOS.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from anchorage.durable import atomic_file, sync_descriptor
from anchorage.errors import MeasurementError

CACHESTAT, MINCORE = "cachestat", "mincore"
_CACHESTAT_CALL = 451  # on x86-64 and arm64, from Linux 6.5 on
_NOT_ANSWERED = {errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP}  # an old kernel; no right, or seccomp; hugetlbfs
_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}
_VIRTUAL = re.compile(r"QEMU|KVM|VMware|VirtualBox|Virtual Machine|Xen|Bochs|BHYVE|Parallels|Amazon EC2|Google Compute")
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_CHUNK_BYTES = 8 << 20
_ATTEMPTS, _WAIT_S = 5, 0.02


@dataclass(frozen=True)
class Residency:
    """What of a file lies in the page cache.

    Attributes:
        pages: of the file.
        resident: of them in the page cache.
        by: the call that said so, ``cachestat`` or ``mincore``.
    """

    pages: int
    resident: int
    by: str

    @property
    def fraction(self) -> float:
        """Resident share, exactly 0 or 1 only if none or every page is."""
        return self.resident / self.pages if self.pages else 1.0


class _Range(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("offset", "length")]


class _Statistics(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")]


def residency(path: Path | str) -> Residency:
    """Count a file's pages in the page cache; reads none of them.

    Raises:
        MeasurementError: the kernel does not tell this user.
    """
    try:
        return ask_cachestat(path)
    except OSError as error:
        if error.errno not in _NOT_ANSWERED:
            raise
    owner = os.stat(path).st_uid
    if owner != os.geteuid() and not os.access(path, os.W_OK):
        raise MeasurementError(
            f"{path}: what of it is in the page cache the kernel tells its owner (user {owner}) and those who may "
            f"write it, not user {os.geteuid()}. Measure as one of them, or on a copy of your own"
        )
    return ask_mincore(path)


def ask_cachestat(path: Path | str) -> Residency:
    """Residency by cachestat(2).

    Raises:
        OSError: ENOSYS where the kernel has no such call, EPERM on another user's file.
    """
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "cachestat is Linux's", str(path))
    libc, found = ctypes.CDLL(None, use_errno=True), _Statistics()
    with open(path, "rb") as file:
        n_bytes = os.fstat(file.fileno()).st_size
        if n_bytes == 0:  # a range of length 0 would reach to the end, and beyond
            return Residency(0, 0, CACHESTAT)
        asked = _Range(0, n_bytes)
        if libc.syscall(_CACHESTAT_CALL, file.fileno(), ctypes.byref(asked), ctypes.byref(found), 0) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))
    return Residency(-(-n_bytes // mmap.PAGESIZE), found.cached, CACHESTAT)


def ask_mincore(path: Path | str) -> Residency:
    """Residency by mincore(2) on an untouched mapping. Of another user's file it lies: ask :func:`residency`."""
    pages = resident_pages(path)
    return Residency(len(pages), pages.count(1), MINCORE)


def resident_pages(path: Path | str) -> bytes:
    """For each page of a file 1 if mincore(2) calls it resident, else 0."""
    with open(path, "rb") as file:
        n_bytes = os.fstat(file.fileno()).st_size
        if n_bytes == 0:
            return b""
        # Private and writable, because ctypes gives addresses of writable buffers only. Nothing is written.
        with mmap.mmap(file.fileno(), n_bytes, access=mmap.ACCESS_COPY) as mapped:
            first = ctypes.c_char.from_buffer(mapped)
            answer = ctypes.create_string_buffer(-(-n_bytes // mmap.PAGESIZE))
            libc = ctypes.CDLL(None, use_errno=True)
            failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(n_bytes), answer)
            del first  # it holds the mapping open
            if failed:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    return bytes(answer.raw).translate(bytes(byte & 1 for byte in range(256)))  # the other bits mean nothing, or more


def make_cold(path: Path | str, *, drop_caches: bool = False) -> None:
    """Take a file out of the page cache.

    Args:
        path: a file of one's own. On macOS a copy that no cache saw takes its place, in one step (not tested there).
        drop_caches: drop the whole machine's page cache too, and what it knows of folders and files; as root, on Linux.

    Raises:
        MeasurementError: the file lies in memory, pages stay, or nothing else may be dropped.
    """
    if reason := never_cold(path):
        raise MeasurementError(
            f"{path} cannot be made cold: {reason}. Put the results on a disk, or set loading: null to measure no "
            "loading"
        )
    if sys.platform == "darwin":
        _copy_uncached(Path(path))
        return
    _evict(path)
    if drop_caches:
        _drop_all()


def make_warm(path: Path | str) -> None:
    """Read every byte of a file."""
    buffer = bytearray(_CHUNK_BYTES)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def hold(paths: Iterable[Path | str]) -> list[mmap.mmap]:
    """Keep what of some files is resident where it is: no drop takes pages that a process has mapped and touched.

    Args:
        paths: files of one's own, such as libraries whose code would else be read from the disk in a measurement.

    Returns:
        The mappings; the pages stay for as long as these live.
    """
    held = []
    for path in paths:
        if not (resident := resident_pages(path)):
            continue
        with open(path, "rb") as file:
            held.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        for page, is_resident in enumerate(resident):
            if is_resident:
                held[-1][page * mmap.PAGESIZE]  # touched
    return held


def mapped_files() -> list[str]:
    """Files that this process has mapped: its libraries, as long as it has loaded nothing else. Empty without /proc."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    words = (line.split(None, 5) for line in lines)
    return sorted({parts[5] for parts in words if len(parts) == 6 and os.path.isfile(parts[5])})


def never_cold(path: Path | str) -> str | None:
    """Why a file can never be cold, or None: what lies on some filesystems is in memory and nowhere else."""
    name = filesystem(path)
    return f"{name}: never cold" if name in _IN_MEMORY else None


def filesystem(path: Path | str) -> str:
    """Name of the filesystem that a path lies on, such as ``ext4``. What lies beneath an ``overlay`` is not told."""
    real = Path(path).resolve()
    over = [part for part in psutil.disk_partitions(all=True) if real.is_relative_to(part.mountpoint)]
    # Of two on the same place the later one covers the earlier.
    return max(enumerate(over), key=lambda item: (len(item[1].mountpoint), item[0]))[1].fstype if over else "unknown"


def cold_kind(root: Path = Path("/")) -> str:
    """``guest-cold`` where a hypervisor is seen, whose own cache may hold what the guest's does not, else ``cold``.

    Seen by the processor's flag (x86), Xen's folder, or the name of the machine (DMI; firmware's tree on arm64).

    Args:
        root: of the file system that /proc and /sys lie in.
    """
    sought = {
        "proc/cpuinfo": re.compile(r"^flags\s*:.*\bhypervisor\b", re.MULTILINE),
        "sys/hypervisor/type": re.compile("."),
        "sys/class/dmi/id/sys_vendor": _VIRTUAL,
        "sys/class/dmi/id/product_name": _VIRTUAL,
        "proc/device-tree/compatible": re.compile("virt"),
    }
    texts = ((root / name, pattern) for name, pattern in sought.items())
    seen = any(path.is_file() and pattern.search(path.read_text(errors="replace")) for path, pattern in texts)
    return "guest-cold" if seen else "cold"


def kernel() -> str:
    """Name and release of the kernel."""
    return f"{platform.system()} {platform.release()}"


def _evict(path: Path | str) -> None:
    """Write what is dirty, then let go of every page. Pages that are just being written or read stay: tried again."""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_WAIT_S)
        with open(path, "rb") as file:
            sync_descriptor(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if not (left := residency(path)).resident:
            return
    users = _mapping_processes(path)
    raise MeasurementError(
        f"{path} cannot be made cold: {left.resident} of {left.pages} pages stay in the page cache. "
        + (f"Pages in use by a mapping do: end {', '.join(users)}" if users else "Something reads, maps or locks it")
        + ". Or set loading: null to measure no loading"
    )


def _mapping_processes(path: Path | str) -> list[str]:
    """Processes that have a file mapped, as far as this user may see."""
    real, found = str(Path(path).resolve()), []
    for process in psutil.process_iter(["name"]):
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text(errors="replace")
        except OSError:
            continue
        if any(line.endswith(f" {real}") for line in maps.splitlines()):
            found.append(f"process {process.pid} ({process.info['name']})")
    return found


def _drop_all() -> None:
    os.sync()  # dirty pages would stay
    try:
        _DROP_CACHES.write_text("3")
    except OSError as error:
        raise MeasurementError(
            f"{_DROP_CACHES} cannot be written ({error.strerror}): only root may drop the machine's page cache, and in "
            "many containers nobody. Set loading.drop_caches: false, then each file alone is taken out of it"
        ) from None


def _copy_uncached(path: Path) -> None:
    if sys.platform == "darwin":  # the names below are macOS's
        with open(path, "rb", buffering=0) as source, atomic_file(path) as copy:
            for file in (source, copy):
                fcntl.fcntl(file.fileno(), fcntl.F_NOCACHE, 1)
            shutil.copyfileobj(source, copy, _CHUNK_BYTES)
