"""What a process has taken from the disk, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path


def bytes_from_disk() -> int | None:
    """Bytes that this process has made the kernel read from storage so far, read-ahead included; what the page cache
    held is not in it. None where the kernel does not say (other than Linux)."""
    counters = Path("/proc/self/io")
    if not counters.exists():
        return None
    return next(int(line.split()[1]) for line in counters.read_text().splitlines() if line.startswith("read_bytes"))
