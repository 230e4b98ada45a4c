"""The disk below a folder: filesystem, device, what it says of its cache, and when the kernel writes by itself."""

from __future__ import annotations

import io
import os
import platform
import stat
from pathlib import Path
from typing import Any

import psutil


def describe_disk(folder: Path) -> dict[str, Any]:
    """What the costs depend on: ``fsync_cost.json``.

    Args:
        folder: on the filesystem that was measured.

    Returns:
        ``filesystem``, ``mount_options``, ``source`` (as mounted) and ``mount_point``; ``device`` (the block device's
        name), ``write_cache`` (``write back``: the drive may keep bytes in its own memory and is told to flush;
        ``write through``: it says that it does not), ``scheduler``, ``rotational``, ``model``;
        ``dirty_expire_centisecs``, ``dirty_writeback_centisecs`` (when the kernel writes by itself); ``system``,
        ``kernel``, ``python``, ``buffer_bytes`` (Python's). None where the system does not say.
    """
    mount, queue = _find_mount(folder), _find_queue(folder)
    facts: dict[str, Any] = {
        "filesystem": mount.fstype,
        "mount_options": mount.opts,
        "source": mount.device,
        "mount_point": mount.mountpoint,
        "device": queue.parent.name if queue else None,
        "model": _read(queue.parent / "device/model") if queue else None,
    }
    for name in ("write_cache", "scheduler", "rotational"):
        facts[name] = _read(queue / name) if queue else None
    for name in ("dirty_expire_centisecs", "dirty_writeback_centisecs"):
        value = _read(Path("/proc/sys/vm") / name)
        facts[name] = int(value) if value else None
    system = {"system": platform.system(), "kernel": platform.release(), "python": platform.python_version()}
    return facts | system | {"buffer_bytes": io.DEFAULT_BUFFER_SIZE}


def _find_mount(folder: Path) -> Any:
    """The mount that the folder lies in: the deepest, and of several at one place the last."""
    place = folder.resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if place.is_relative_to(mount.mountpoint)]
    return max(reversed(mounts), key=lambda mount: len(Path(mount.mountpoint).parts))


def _find_queue(folder: Path) -> Path | None:
    """The folder in which Linux describes the block device's queue; a partition has its disk's."""
    number, source = folder.stat().st_dev, Path(_find_mount(folder).device)
    if source.exists() and stat.S_ISBLK(source.stat().st_mode):
        number = source.stat().st_rdev  # btrfs gives its files the number of no device
    entry = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not entry.exists():
        return None
    queues = (place / "queue" for place in (entry.resolve(), entry.resolve().parent))
    return next((queue for queue in queues if queue.is_dir()), None)


def _read(path: Path) -> str | None:
    """A short file's text; None where there is none."""
    return path.read_text().strip() if path.is_file() else None
