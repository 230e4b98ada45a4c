"""Names of all files of a cache and of its staging folder, and the versions of their formats."""

from __future__ import annotations

import re
from pathlib import Path

SHARD_FORMAT = "anchorage-shard-1"
MANIFEST_FORMAT = "anchorage-manifest-1"
MANIFEST = "manifest.jsonl"

_STAGED_SHARD = re.compile(r".+\.shard-(\d{6,})\.safetensors")


def published_shard(tier: str, part: int | str, index: int) -> str:
    """A shard in the cache folder; ``index`` counts within the part, so that one pattern serves all parts."""
    return f"{tier}/part-{part}-shard-{index}.safetensors"


def published_part(part: int | str) -> str:
    """The list of a part's published shards."""
    return f"part-{part}.jsonl"


def staged_shard(tier: str, shard: int) -> str:
    """A shard in the staging folder; ``shard`` counts over the run: another number of parts finds it again."""
    return f"{tier}.shard-{shard:06d}.safetensors"


def staged_shard_index(path: Path) -> int | None:
    """The shard a staged file, or a temp of one, belongs to; None for other files."""
    match = _STAGED_SHARD.match(path.name)
    return int(match[1]) if match else None


def journal(part: int | str) -> str:
    """A part's record of the shards it has made durable."""
    return f"journal-part-{part}.jsonl"


def memory_log(part: int | str) -> str:
    """A part's record of memory and times, a line a shard."""
    return f"memory-part-{part}.jsonl"


def batch_log(part: int | str) -> str:
    """A part's record of memory and times of every batch, a line a shard."""
    return f"memory-batches-part-{part}.jsonl"
