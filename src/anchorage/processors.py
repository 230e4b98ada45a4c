"""How many processors this process may use."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path


def available_processors() -> int:
    """Processors that this process may use: those it is bound to, or fewer where a container's quota is smaller."""
    n_bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min(n_bound, _cgroup_quota(Path("/sys/fs/cgroup")))))


def _cgroup_quota(root: Path) -> float:
    """Processors that a Linux control group grants (its version 2, then 1); infinity where it sets no limit."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError):
            quota, period = " ".join((root / name).read_text() for name in names).split()
            if quota not in {"max", "-1"}:
                return int(quota) / int(period)
    return math.inf
