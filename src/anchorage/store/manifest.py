"""Records of shards: the lines of journals, part lists and the manifest.

The journal says what is durable in staging, a part list what one job has published, the manifest alone says which
shards exist. The manifest's first line carries the number and the digest of the lines below, so that a torn or edited
manifest is noticed without any other file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anchorage.digest import canonical_json, digest_bytes
from anchorage.durable import read_lines, remove_file, write_bytes
from anchorage.errors import IntegrityError
from anchorage.store.identity import capture_key
from anchorage.store.names import MANIFEST, MANIFEST_FORMAT

_REMEDY = "Run the plain command: it makes the list anew from what is staged."


@dataclass(frozen=True)
class FileRecord:
    """A shard file of one tier: its path below the folder of its journal or manifest, size, digest, rows, and the
    digest of the token ids of these rows."""

    file: str
    bytes: int
    xxh3_128: str
    n_rows: int
    tokens_digest: str


@dataclass(frozen=True)
class ShardRecord:
    """A shard: its rows ``[start, stop)``, where it was computed, and its file in each tier."""

    shard: int
    rows: tuple[int, int]
    environment: Mapping[str, Any]
    tiers: Mapping[str, FileRecord]

    def to_line(self) -> str:
        tiers = {tier: vars(record) for tier, record in self.tiers.items()}
        return canonical_json(
            {"shard": self.shard, "rows": list(self.rows), "environment": self.environment, "tiers": tiers}
        )

    @classmethod
    def from_line(cls, line: str) -> ShardRecord:
        """Read a line back; ValueError, KeyError or TypeError when it is not one."""
        value = json.loads(line)
        start, stop = value["rows"]
        tiers = {tier: FileRecord(**record) for tier, record in value["tiers"].items()}
        return cls(int(value["shard"]), (int(start), int(stop)), value["environment"], tiers)


@dataclass(frozen=True)
class Manifest:
    """All shards of a cache, in order, and the identity of the capture they belong to."""

    key: str
    identity: Mapping[str, Any]
    shards: Sequence[ShardRecord]

    @property
    def n_rows(self) -> int:
        return self.shards[-1].rows[1]

    @property
    def files(self) -> dict[str, tuple[ShardRecord, str, FileRecord]]:
        """Every shard file's shard, tier and record by its path below the cache folder."""
        return {record.file: (shard, tier, record) for shard in self.shards for tier, record in shard.tiers.items()}


def read_records(path: Path) -> list[ShardRecord]:
    """The whole, readable shard lines of a journal; others are no lines."""
    records = []
    for line in read_lines(path):
        try:
            records.append(ShardRecord.from_line(line))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return records


def write_manifest(path: Path, identity: Mapping[str, Any], shards: Sequence[ShardRecord]) -> None:
    """Write a manifest, or the same for one part, durably; equal content gives equal bytes."""
    body = "".join(shard.to_line() + "\n" for shard in shards).encode()
    head = {
        "format": MANIFEST_FORMAT,
        "key": capture_key(identity),
        "identity": identity,
        "n_shards": len(shards),
        "shards_xxh3_128": digest_bytes(body),
    }
    write_bytes(path, canonical_json(head).encode() + b"\n" + body)


def read_manifest(path: Path) -> Manifest:
    """Read a manifest or part list and check it whole.

    Raises:
        IntegrityError: missing, torn, or changed since it was written.
    """
    try:
        head_line, _, body = path.read_bytes().partition(b"\n")
        head = json.loads(head_line)
        identity, key = head["identity"], head["key"]
        shards = [ShardRecord.from_line(line) for line in body.decode().splitlines()]
    except FileNotFoundError:
        raise IntegrityError(path, expected="a manifest", found="no file", remedy=_REMEDY) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(
            path, expected="a manifest", found=f"{type(error).__name__}: {error}", remedy=_REMEDY
        ) from None
    expected = {
        "format": MANIFEST_FORMAT,
        "key": capture_key(identity),
        "n_shards": len(shards),
        "shards_xxh3_128": digest_bytes(body),
    }
    for field, value in expected.items():
        if head.get(field) != value:
            raise IntegrityError(path, expected=f"{field} {value}", found=head.get(field), remedy=_REMEDY)
    return Manifest(key, identity, shards)


def gather_parts(parts: Sequence[Path], cache: Path, manifest: Path) -> list[str]:
    """Write the manifest from the part lists, then remove published files that it does not name.

    The removed ones were superseded by a changed number of parts, rows or tiers; staging still has them.

    Args:
        parts: the part lists, in order.
        cache: the cache folder.
        manifest: where the manifest goes.

    Returns:
        Names removed, relative to the cache folder.

    Raises:
        IntegrityError: a part list is damaged, or the parts do not fit together.
    """
    lists = [_read_part(path) for path in parts]
    shards = [shard for part in lists for shard in part.shards]
    for path, part in zip(parts, lists, strict=True):
        if part.key != lists[0].key:
            raise IntegrityError(path, expected=f"key {lists[0].key}", found=part.key, remedy=_REMEDY)
    stops = [0, *(shard.rows[1] for shard in shards)]
    for shard, stop in zip(shards, stops, strict=False):
        if shard.rows[0] != stop:
            raise IntegrityError(manifest, expected=f"a shard from row {stop}", found=shard.rows, remedy=_REMEDY)
    write_manifest(manifest, lists[0].identity, shards)
    orphans = find_orphans(cache, read_manifest(manifest), parts)
    for orphan in orphans:
        remove_file(cache / orphan)
    return orphans


def _read_part(path: Path) -> Manifest:
    """Read a part list; one that is damaged is removed, so that the next plain command publishes its part again."""
    try:
        return read_manifest(path)
    except IntegrityError:
        remove_file(path)
        raise


def find_orphans(cache: Path, manifest: Manifest, parts: Sequence[Path]) -> list[str]:
    """Files in a cache folder that neither the manifest nor the list of parts names, relative to the folder."""
    named = {cache / MANIFEST, *parts, *(cache / file for file in manifest.files)}
    present = (path for path in cache.rglob("*") if not path.is_dir())
    return sorted(path.relative_to(cache).as_posix() for path in present if path not in named)
