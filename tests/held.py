"""Small subjects of the loading lab, and what tests run in its fresh processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import torch

from anchorage.loading import workers
from anchorage.loading.methods import METHODS, Method
from anchorage.loading.subject import Subject
from loads import write_pair

TESTS = Path(__file__).parent


def build_subject(folder: Path, mib: int = 1, n_tensors: int = 4) -> Subject:
    """Equal tensors t0, t1, ... of so many MiB together, all of them wanted."""
    return write_pair(folder, n_tensors, mib * 2**20 // n_tensors, wanted=[f"t{i}" for i in range(n_tensors)])


def hold_and_look(**arguments: Any) -> dict[str, Any]:
    """hold_together; ``seen`` tells of each worker what psutil and its mappings, summed one by one, say, in bytes."""
    seen, measured = [], workers.kernel_fields

    def look(rollup: Path) -> dict[str, int]:
        lines = (rollup.parent / "smaps").read_text().splitlines()
        by_hand = sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
        info = psutil.Process(int(rollup.parent.name)).memory_full_info()
        seen.append({"by_hand": by_hand, "pss": info.pss, "rss": info.rss})
        return measured(rollup)

    workers.kernel_fields = look
    return workers.hold_together(**arguments) | {"seen": seen}


def hold_with_a_killed_worker(**arguments: Any) -> dict[str, Any]:
    """hold_together, of which the last worker is ended while it loads; ``left`` counts processes that it left."""
    started = []

    def load(path: str, subject: Subject, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        if len(started) == arguments["n_workers"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return METHODS["torch.load"].load(path, subject, names)

    start, METHODS["dies"] = workers._start_worker, Method(load, ".pt")

    def count(subject: Subject, method: str | None) -> Any:
        started.append(method)
        return start(subject, method)

    workers._start_worker = count
    found = workers.hold_together(**arguments | {"method": "dies"})
    return found | {"left": len(psutil.Process().children())}
