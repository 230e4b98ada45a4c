"""Memory of a process as the kernel counts it, and the table of the capture's log.

Peaks are VmHWM of the process itself: ``ru_maxrss`` starts at the parent's value.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from anchorage.durable import read_lines, write_bytes
from anchorage.store.manifest import read_manifest

MIB = 2**20
COLUMNS = [
    "key", "part", "process", "shard", "rows", "rows_total", "tokens",
    "rss_mib", "uss_mib", "anonymous_mib", "peak_mib", "cuda_allocated_mib", "cuda_reserved_mib", "cuda_peak_mib",
    "forward_s", "hash_s", "wait_s", "write_s", "shard_s", "tokens_per_s",
]  # fmt: skip


def measure_memory(device: str) -> dict[str, float | None]:
    """Memory of this process now, in MiB; the CUDA fields are None without a GPU.

    ``rss`` resident, ``uss`` private to this process, ``anonymous`` not backed by a file, ``peak`` the highest ``rss``
    since the process began. Where the kernel has no ``smaps_rollup`` (macOS) anonymous is None.
    """
    process = psutil.Process()
    info = process.memory_full_info()
    status = _kernel_fields(Path("/proc/self/status"))
    rollup = _kernel_fields(Path("/proc/self/smaps_rollup"))
    # The kernel keeps the two in batches of their own, so the peak may lag behind by a few pages.
    peak_bytes = max(status.get("VmHWM", 0), info.rss)
    memory: dict[str, float | None] = {
        "rss_mib": info.rss / MIB,
        "uss_mib": info.uss / MIB,
        "anonymous_mib": rollup["Anonymous"] / MIB if "Anonymous" in rollup else None,
        "peak_mib": peak_bytes / MIB,
    }
    return {name: None if value is None else round(value, 2) for name, value in (memory | _cuda(device)).items()}


def write_memory_table(table: Path, manifest: Path, logs: Sequence[Path]) -> None:
    """Write ``memory.csv``: the newest log line of each shard of the manifest.

    Args:
        table: the CSV to write; a column that a device does not have is empty.
        manifest: says which shards there are.
        logs: memory logs of all parts, also of earlier divisions into parts.
    """
    known = read_manifest(manifest)
    newest: dict[int, dict[str, Any]] = {}
    for log in logs:
        for line in _readable(log):
            if line["time"] >= newest.get(line["shard"], line)["time"]:
                newest[line["shard"]] = line
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for shard in known.shards:
        if shard.shard in newest:
            writer.writerow({"key": known.key} | newest[shard.shard])
    write_bytes(table, text.getvalue().encode())


def _readable(log: Path) -> Iterator[dict[str, Any]]:
    for line in read_lines(log):
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def _kernel_fields(path: Path) -> dict[str, int]:
    """Fields of a /proc file in bytes; empty where there is none."""
    if not path.exists():
        return {}
    fields = (line.split() for line in path.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in fields if len(words) == 3 and words[2] == "kB"}


def _cuda(device: str) -> dict[str, float | None]:
    names = ("cuda_allocated_mib", "cuda_reserved_mib", "cuda_peak_mib")
    if not device.startswith("cuda"):
        return dict.fromkeys(names)
    import torch

    readings = (torch.cuda.memory_allocated, torch.cuda.memory_reserved, torch.cuda.max_memory_allocated)
    return {name: reading(device) / MIB for name, reading in zip(names, readings, strict=True)}


def process_name() -> str:
    """A name for this process: a series of the memory log begins anew where it changes."""
    return f"{os.getpid()}-{int(psutil.Process().create_time())}"
