"""Memory of a process as the kernel counts it, and the tables of the capture's logs.

Peaks are VmHWM of the process itself: ``ru_maxrss`` starts at the parent's value.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from anchorage.durable import read_lines, write_bytes
from anchorage.store.manifest import read_manifest

MIB = 2**20
COLUMNS = [
    "key", "part", "process", "shard", "rows", "rows_total", "tokens",
    "rss_mib", "uss_mib", "anonymous_mib", "peak_mib", "cuda_allocated_mib", "cuda_reserved_mib", "cuda_peak_mib",
    "forward_s", "hash_s", "wait_s", "write_s", "memory_log_s", "shard_s", "tokens_per_s",
]  # fmt: skip
BATCH_COLUMNS = [
    "key", "part", "process", "shard", "batch", "rows", "rows_total", "process_rows", "tokens",
    "rss_mib", "anonymous_mib", "peak_mib", "cuda_allocated_mib", "cuda_reserved_mib", "cuda_peak_mib",
    "forward_s", "hash_s",
]  # fmt: skip


def measure_memory(device: str) -> dict[str, float | None]:
    """Memory of this process now, in MiB; the CUDA fields are None without a GPU.

    ``rss`` resident, ``uss`` private to this process, ``anonymous`` not backed by a file, ``peak`` the highest ``rss``
    since the process began. Where the kernel has no ``smaps_rollup`` (macOS) anonymous is None.
    """
    status = kernel_fields(Path("/proc/self/status"))
    if rollup := kernel_fields(Path("/proc/self/smaps_rollup")):  # once: the kernel walks all pages for it
        private = sum(value for name, value in rollup.items() if name.startswith("Private_"))
        rss, uss, anonymous = rollup["Rss"], private, rollup["Anonymous"] / MIB
    else:
        info = psutil.Process().memory_full_info()
        rss, uss, anonymous = info.rss, info.uss, None
    memory: dict[str, float | None] = {
        "rss_mib": rss / MIB,
        "uss_mib": uss / MIB,
        "anonymous_mib": anonymous,
        # The kernel keeps the two in batches of their own, so the peak may lag behind by a few pages.
        "peak_mib": max(status.get("VmHWM", 0), rss) / MIB,
    }
    return _rounded(memory | _cuda(device))


def measure_batch(device: str) -> dict[str, float | None]:
    """The fields of :func:`measure_memory` that one read of ``/proc/self/status`` gives: cheap enough for every batch.

    The kernel sums these counters up late: each may be behind by some pages a processor. Without ``/proc`` (macOS)
    ``peak`` and ``anonymous`` are None.
    """
    status = kernel_fields(Path("/proc/self/status"))
    bytes_of = {"rss_mib": status.get("VmRSS"), "anonymous_mib": status.get("RssAnon"), "peak_mib": status.get("VmHWM")}
    if not status:
        bytes_of["rss_mib"] = psutil.Process().memory_info().rss
    memory = {name: None if value is None else value / MIB for name, value in bytes_of.items()}
    return _rounded(memory | _cuda(device))


def write_memory_table(table: Path, manifest: Path, logs: Sequence[Path]) -> None:
    """Write ``memory.csv``: the newest log line of each shard of the manifest.

    Args:
        table: the CSV to write; a column that a device does not have is empty.
        manifest: says which shards there are.
        logs: memory logs of all parts, also of earlier divisions into parts.
    """
    newest = {line["shard"]: line for line in _in_time(logs)}
    _write_table(table, manifest, COLUMNS, {shard: [line] for shard, line in newest.items()})


def write_batch_table(table: Path, manifest: Path, logs: Sequence[Path]) -> None:
    """Write ``memory_batches.csv``: of each shard of the manifest the batches of the process that captured it last.

    Args:
        table: the CSV to write; a column that a device does not have is empty.
        manifest: says which shards there are.
        logs: batch logs of all parts, also of earlier divisions into parts.
    """
    newest: dict[int, list[dict[str, Any]]] = {}
    done: Counter[str] = Counter()  # rows by process, those of shards that were captured again included
    for line in _in_time(logs):
        shared = {name: line[name] for name in ("part", "process", "shard")}
        newest[line["shard"]] = []
        for batch in line["batches"]:
            done[line["process"]] += batch["rows"]
            newest[line["shard"]].append(shared | batch | {"process_rows": done[line["process"]]})
    _write_table(table, manifest, BATCH_COLUMNS, newest)


def _write_table(
    table: Path, manifest: Path, columns: Sequence[str], lines: Mapping[int, Sequence[Mapping[str, Any]]]
) -> None:
    known, text = read_manifest(manifest), io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for shard in known.shards:
        writer.writerows({"key": known.key, **line} for line in lines.get(shard.shard, []))
    write_bytes(table, text.getvalue().encode())


def _in_time(logs: Sequence[Path]) -> list[dict[str, Any]]:
    return sorted((line for log in logs for line in _readable(log)), key=lambda line: line["time"])


def _readable(log: Path) -> Iterator[dict[str, Any]]:
    for line in read_lines(log):
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def kernel_fields(path: Path) -> dict[str, int]:
    """Fields of a /proc file in bytes; empty where there is none."""
    if not path.exists():
        return {}
    fields = (line.split() for line in path.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in fields if len(words) == 3 and words[2] == "kB"}


def _rounded(memory: Mapping[str, float | None]) -> dict[str, float | None]:
    return {name: None if value is None else round(value, 2) for name, value in memory.items()}


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
