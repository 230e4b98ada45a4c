"""Build small stores of known values without a model, and damage them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from anchorage.digest import digest_bytes, digest_value
from anchorage.store.format import ShardBuffer, TierShape, shard_metadata
from anchorage.store.layout import Layout
from anchorage.store.manifest import ShardRecord, gather_parts, write_manifest
from anchorage.store.names import MANIFEST, published_part
from anchorage.store.staging import Staging

SEQ_LEN, WIDTH = 4, 6
MAX_ID = {"uint16": 60_000, "uint32": 250_000}
SITES = ["embed", "attn.0", "block.0"]


@dataclass
class Store:
    """A store under construction: what went in is kept as plain arrays, the oracle of every read."""

    root: Path
    n_rows: int = 22  # a short last batch and a short last shard
    n_parts: int = 1
    storage_dtype: str = "float16"
    token_dtype: str = "uint16"
    key_note: str = "a"  # another note is another key
    tier_rows: dict[str, int] = field(default_factory=dict)
    seq_len: int = SEQ_LEN
    width: int = WIDTH
    n_ids: int | None = None  # None is nearly all the token dtype can hold
    sites: list[str] = field(default_factory=lambda: list(SITES))
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tier_rows = self.tier_rows or {"tokens": self.n_rows, "pooled": self.n_rows, "few": min(13, self.n_rows)}
        self.layout = Layout(
            n_rows=self.n_rows, batch_rows=4, shard_rows=8, n_parts=self.n_parts, tier_rows=self.tier_rows
        )
        random = np.random.default_rng(7)
        shape = self.n_rows, self.seq_len
        self.token_ids = random.integers(0, self.n_ids or MAX_ID[self.token_dtype], shape).astype(self.token_dtype)
        dtype = getattr(torch, self.storage_dtype)
        self.values = {
            (tier, site): torch.from_numpy(random.normal(size=(self.n_rows, *self._row_shape(tier)))).to(dtype)
            for tier in self.tier_rows
            for site in self.sites
        }
        tiers = {tier: {"sites": self.sites, "reduce": self._reduce(tier)} for tier in self.tier_rows}
        self.identity = {
            "note": self.key_note,
            "seq_len": self.seq_len,
            "storage_dtype": self.storage_dtype,
            "tiers": tiers,
        }
        self.key = digest_value(self.identity)

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    @property
    def staging(self) -> Path:
        return self.root / "staging" / self.key

    @property
    def part_lists(self) -> list[Path]:
        return [self.cache / published_part(part) for part in self.layout.parts]

    def _reduce(self, tier: str) -> str:
        return "mean" if tier == "pooled" else "none"

    def _row_shape(self, tier: str) -> tuple[int, ...]:
        return (self.width,) if tier == "pooled" else (self.seq_len, self.width)

    def shape(self, tier: str) -> TierShape:
        return TierShape(
            tier,
            dict.fromkeys(self.sites, self.width),
            self._reduce(tier),
            self.seq_len,
            self.storage_dtype,
            self.token_dtype,
        )

    def digest(self, rows: range) -> str:
        return digest_bytes(self.token_ids[rows.start : rows.stop].tobytes())

    def open_part(self, part: int) -> Staging:
        return Staging(self.staging, self.key, layout=self.layout, part=part, log=self.lines.append)

    def commit(self, staging: Staging, shard: int) -> ShardRecord:
        buffers, metadata = {}, {}
        for tier in self.layout.shard_tiers(shard):
            rows = self.layout.tier_shard_rows(tier, shard)
            here = slice(0, len(rows))
            buffers[tier] = buffer = ShardBuffer(self.shape(tier), self.layout.shard_rows)
            buffer.put_tokens(self.token_ids[rows.start : rows.stop], 0)
            for site in self.sites:
                buffer.rows_of(site, here).copy_(self.values[tier, site][rows.start : rows.stop])
                buffer.seal(site, here)
            metadata[tier] = shard_metadata(
                self.shape(tier), key=self.key, shard=shard, rows=rows, tokens_digest=self.digest(rows)
            )
        files = staging.write_files(shard, buffers, metadata)
        return staging.commit(shard, files, environment={"device": "none"})

    def build_part(self, part: int) -> tuple[int, int]:
        """Take over what is there, commit the rest, publish. Returns counts of reused and written shards."""
        staging = self.open_part(part)
        try:
            records = staging.accept(self.digest)
            reused = len(records)
            for shard in staging.shards:
                if shard not in records:
                    records[shard] = self.commit(staging, shard)
            write_manifest(self.part_lists[part], self.identity, staging.publish(records, self.cache))
            return reused, len(records) - reused
        finally:
            staging.close()

    def build(self) -> Store:
        """Build all parts and the manifest."""
        for part in self.layout.parts:
            self.build_part(part)
        self.gather()
        return self

    def gather(self) -> list[str]:
        return gather_parts(self.part_lists, self.cache, self.cache / MANIFEST)


def build_store(root: Path, **fields: object) -> Store:
    return Store(root, **fields).build()  # type: ignore[arg-type]


def flip_bit(path: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit, keeping the file's times: bit rot tells no clock."""
    import os

    stat = path.stat()
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ (1 << bit)]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def truncate(path: Path, n_bytes: int = 1) -> None:
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - n_bytes)


def tree(folder: Path) -> dict[str, bytes]:
    """Every file's content by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
