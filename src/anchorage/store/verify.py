"""Verification: does every shard that the manifest names still hold the bytes that were captured, and nothing else?

A verification that fails repairs by removing: damaged files lose both their names (published and staged, which share
their bytes), orphans are removed, and the manifest is withdrawn, since what it states is not so. The next plain command
captures what is missing and states the manifest anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tqdm import tqdm

from anchorage.digest import digest_file
from anchorage.durable import remove_file, sync_folder
from anchorage.errors import IntegrityError
from anchorage.store.manifest import FileRecord, Manifest, find_orphans, read_manifest
from anchorage.store.names import MANIFEST, staged_shard


def verify_cache(
    cache: Path, parts: Sequence[Path], *, depth: str, threads: int = 1, log: Callable[[str], None] = print
) -> dict[str, Any]:
    """Check a cache; see :func:`repair` for what follows.

    Args:
        cache: the cache folder.
        parts: part lists that belong there.
        depth: ``size`` checks presence and size of every file, ``full`` also every byte's digest.
        threads: files read at once.
        log: gets a line for each fault.

    Returns:
        The fields of ``verify.json``. ``missing``, ``corrupt`` and ``orphans`` are paths below the cache folder;
        ``faults`` says of each what was expected and found.
    """
    report: dict[str, Any] = {"key": None, "ok": False, "depth": depth, "n_shards": 0, "n_files": 0, "n_bytes": 0}
    faults: dict[str, str] = {}
    missing: list[str] = []
    corrupt: list[str] = []
    orphans: list[str] = []
    manifest: Manifest | None = None
    try:
        manifest = read_manifest(cache / MANIFEST)
    except IntegrityError as error:
        (corrupt if (cache / MANIFEST).exists() else missing).append(MANIFEST)
        faults[MANIFEST] = str(error)
    for part in parts:
        try:
            read_manifest(part)
        except IntegrityError as error:
            (corrupt if part.exists() else missing).append(part.name)
            faults[part.name] = str(error)
    if manifest is not None:
        files = manifest.files
        report |= {"key": manifest.key, "n_shards": len(manifest.shards), "n_files": len(files)}
        report["n_bytes"] = sum(record.bytes for _, _, record in files.values())
        with ThreadPoolExecutor(max_workers=threads) as pool:
            found = pool.map(lambda item: _fault_of(cache, item[2], depth), files.values())
            for name, fault in tqdm(zip(files, found, strict=True), "verify", len(files), unit="file", disable=None):
                if fault:
                    (corrupt if (cache / name).exists() else missing).append(name)
                    faults[name] = fault
        orphans = find_orphans(cache, manifest, parts)
        faults |= dict.fromkeys(orphans, "no manifest names it")
    for name, fault in faults.items():
        log(f"verify: {name}: {fault}")
    return report | {
        "ok": not faults,
        "missing": sorted(missing),
        "corrupt": sorted(corrupt),
        "orphans": orphans,
        "faults": [f"{name}: {fault}" for name, fault in faults.items()],
    }


def repair(cache: Path, staging: Path, *, report: dict[str, Any], log: Callable[[str], None] = print) -> None:
    """Remove what a failed verification found, so that the next plain command makes it anew.

    Args:
        cache: the cache folder.
        staging: the staging folder of the cache's key.
        report: from :func:`verify_cache`.
        log: gets a line for what was removed.
    """
    if report["ok"]:
        return
    removed: list[Path] = []
    if MANIFEST not in report["corrupt"] + report["missing"]:
        manifest = read_manifest(cache / MANIFEST)
        for name in [*report["missing"], *report["corrupt"]]:
            removed.append(cache / name)
            if name in manifest.files:  # else a part list
                shard, tier, _ = manifest.files[name]
                removed.append(staging / staged_shard(tier, shard.shard))
    else:
        removed += [cache / name for name in report["corrupt"]]
    removed += [cache / name for name in report["orphans"]]
    # The manifest goes last: until then it still tells which staged files the damaged names share their bytes with.
    removed.append(cache / MANIFEST)
    gone = [path for path in removed if remove_file(path)]
    for folder in {path.parent for path in gone}:
        sync_folder(folder)
    for path in gone:
        log(f"verify: removed {path}")


def _fault_of(cache: Path, record: FileRecord, depth: str) -> str | None:
    path = cache / record.file
    try:
        if found := record.misfit(cache):
            return f"expected {record.bytes} bytes, found {found}"
        if depth == "full" and (found := digest_file(path)) != record.xxh3_128:
            return f"expected xxh3_128 {record.xxh3_128}, found {found}"
    except OSError as error:
        return f"cannot be read: {error}"
    return None
