"""Records of shards: the lines of journals, part lists and the manifest.

The journal says what is durable in staging, a part list what one job has published, the manifest alone says which
shards exist. The manifest's first line carries the number and the digest of the lines below, so that a torn or edited
manifest is noticed without any other file.
"""

from __future__ import annotations

import itertools
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anchorage.digest import canonical_json, digest_bytes, parse_json
from anchorage.durable import kind_name, open_file, read_lines, remove_file, write_bytes
from anchorage.errors import IntegrityError
from anchorage.store.identity import capture_key
from anchorage.store.names import MANIFEST, MANIFEST_FORMAT

_REMEDY = "Run the plain command: it makes the list anew from what is staged."
_FILE_FIELDS = {"file": str, "bytes": int, "xxh3_128": str, "n_rows": int, "tokens_digest": str}
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class FileRecord:
    """A shard file of one tier: its path below the folder of its journal or manifest, size, digest, rows, and the
    digest of the token ids of these rows."""

    file: str
    bytes: int
    xxh3_128: str
    n_rows: int
    tokens_digest: str

    @classmethod
    def from_json(cls, value: Any) -> FileRecord:
        """Read a record back; ValueError when it is not one."""
        if not isinstance(value, dict) or {name: type(field) for name, field in value.items()} != _FILE_FIELDS:
            raise ValueError(f"no record of a file: {value}")
        return cls(**value)

    def misfit(self, folder: Path) -> str | None:
        """What is in the file's place that is no regular file of the recorded size; None where it is one.

        A symbolic link is none: published shards are hard links or copies, and what a link names can change by itself.
        """
        try:
            found = (folder / self.file).lstat()
        except FileNotFoundError:
            return "no file"
        if not stat.S_ISREG(found.st_mode):
            return f"a {kind_name(stat.filemode(found.st_mode)[0])}"
        return None if found.st_size == self.bytes else f"{found.st_size} bytes"


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
        """Read a line back; ValueError when it is not one."""
        value = parse_json(line.encode())
        fields = {"shard": int, "rows": list, "environment": dict, "tiers": dict}
        if not isinstance(value, dict) or {name: type(field) for name, field in value.items()} != fields:
            raise ValueError(f"no line of a shard: {value}")
        rows = value["rows"]
        if len(rows) != 2 or not all(type(row) is int for row in rows) or not 0 <= rows[0] < rows[1]:
            raise ValueError(f"shard {value['shard']} has rows {rows}")
        tiers = {tier: FileRecord.from_json(record) for tier, record in value["tiers"].items()}
        return cls(value["shard"], (rows[0], rows[1]), value["environment"], tiers)


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
        except ValueError:
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
        IntegrityError: missing, torn, changed since it was written, or naming what no writer names.
    """
    try:
        with open_file(path) as file:
            head_line, _, body = file.readall().partition(b"\n")
        head = parse_json(head_line)
        if not isinstance(head, dict) or not isinstance(head.get("identity"), dict):
            raise ValueError("no identity")
        shards = [ShardRecord.from_line(line) for line in body.decode().split("\n")[:-1]]
    except FileNotFoundError:
        raise _damaged(path, "a manifest", "no file") from None
    except (ValueError, OSError) as error:
        raise _damaged(path, "a manifest", f"{type(error).__name__}: {error}") from None
    identity = head["identity"]
    expected = {
        "format": MANIFEST_FORMAT,
        "key": capture_key(identity),
        "n_shards": len(shards),
        "shards_xxh3_128": digest_bytes(body),
    }
    for field, value in expected.items():
        if head.get(field) != value:
            raise _damaged(path, f"{field} {value}", head.get(field))
    _check_shards(path, shards)
    return Manifest(head["key"], identity, shards)


def read_cache_manifest(path: Path) -> Manifest:
    """Read the manifest of a cache that is to be opened.

    Raises:
        IntegrityError: as :func:`read_manifest`; or it does not describe a whole cache: all rows from 0 on, of each
            tier of the identity the first ones.
    """
    manifest = read_manifest(path)
    _check_identity(path, manifest.identity)
    if not manifest.shards or manifest.shards[0].rows[0] != 0:
        raise _damaged(path, "shards from row 0 on", [shard.rows for shard in manifest.shards[:1]])
    for tier in manifest.identity["tiers"]:
        held = [shard.tiers[tier].n_rows if tier in shard.tiers else 0 for shard in manifest.shards]
        first = [max(0, min(shard.rows[1], sum(held)) - shard.rows[0]) for shard in manifest.shards]
        if held != first or not sum(held):
            raise _damaged(path, f"the first rows in tier {tier!r}, {first} by shard", held)
    for shard in manifest.shards:
        if unknown := sorted(shard.tiers.keys() - manifest.identity["tiers"].keys()):
            raise _damaged(path, f"tiers {list(manifest.identity['tiers'])}", unknown)
    return manifest


def _check_identity(path: Path, identity: Mapping[str, Any]) -> None:
    """Refuse an identity that lacks what reading needs."""
    tiers, seq_len = identity.get("tiers"), identity.get("seq_len")
    if identity.get("storage_dtype") not in ("float16", "bfloat16", "float32"):
        raise _damaged(path, "a storage_dtype", identity.get("storage_dtype"))
    if type(seq_len) is not int or seq_len < 1:
        raise _damaged(path, "a seq_len of at least 1", seq_len)
    if not isinstance(tiers, dict) or not tiers:
        raise _damaged(path, "tiers", tiers)
    for name, tier in tiers.items():
        sites = tier.get("sites") if isinstance(tier, dict) else None
        if not isinstance(sites, list) or not all(isinstance(site, str) for site in sites) or "reduce" not in tier:
            raise _damaged(path, f"sites and reduce of tier {name!r}", tier)


def _check_shards(path: Path, shards: Sequence[ShardRecord]) -> None:
    """Refuse shards out of order, or twice, and files that no writer puts into a cache folder.

    Verification removes damaged files by these names, so that a name must not lead out of the folder.
    """
    for before, shard in itertools.pairwise(shards):
        if (shard.shard, shard.rows[0]) != (before.shard + 1, before.rows[1]):
            expected = f"shard {before.shard + 1} from row {before.rows[1]}"
            raise _damaged(path, expected, f"shard {shard.shard} from row {shard.rows[0]}")
    seen: set[str] = set()
    for shard in shards:
        for tier, record in shard.tiers.items():
            folder, _, name = record.file.partition("/")
            if folder != tier or not (_PLAIN_NAME.fullmatch(tier) and _PLAIN_NAME.fullmatch(name)):
                raise _damaged(path, f"a file in the folder of tier {tier!r}", repr(record.file))
            if record.file in seen:
                raise _damaged(path, "each file once", f"{record.file!r} twice")
            if not 1 <= record.n_rows <= shard.rows[1] - shard.rows[0]:
                raise _damaged(path, f"at most rows {shard.rows} in {record.file!r}", f"{record.n_rows} rows")
            seen.add(record.file)


def _damaged(path: Path, expected: str, found: object) -> IntegrityError:
    return IntegrityError(path, expected=expected, found=found, remedy=_REMEDY)


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
