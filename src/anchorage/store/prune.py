"""Staged shards of earlier configurations: reported, and removed on request. A changed configuration touches none."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

_KEY = re.compile(r"[0-9a-f]{32}")


def superseded_keys(staging: Path, key: str) -> dict[str, int]:
    """Bytes held by each capture key in a staging folder, other than the present one.

    Published shards share their bytes with staged ones, so the sum is not always free to be had.
    """
    if not staging.is_dir():
        return {}
    folders = [path for path in staging.iterdir() if path.is_dir() and _KEY.fullmatch(path.name) and path.name != key]
    return {path.name: sum(map(_size, path.iterdir())) for path in sorted(folders)}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # a temp that its writer has just renamed
        return 0


def prune_staging(staging: Path, key: str, log: Callable[[str], None]) -> None:
    """Remove the folders of all keys but the present one."""
    held = superseded_keys(staging, key)
    for name, n_bytes in held.items():
        shutil.rmtree(staging / name)
        log(f"removed {staging / name}: {n_bytes / 2**30:.2f} GiB")
    if not held:
        log(f"nothing to remove: {staging} holds only the present capture key {key}")
