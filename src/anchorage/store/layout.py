"""Which rows lie in which batch, shard and part: arithmetic alone, no files.

Batches and shards are cut by global row number, so they do not depend on the number of parts, and a row's batch can be
rebuilt at any time. Parts divide the shards as evenly as whole shards allow, the larger parts first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from anchorage.settings import Settings


@dataclass(frozen=True)
class PartRule:
    """Parts whose shards form the same pattern of files, so that one workflow rule with a wildcard makes them."""

    name: str
    parts: tuple[int, ...]
    n_shards: Mapping[str, int]  # by tier


@dataclass(frozen=True)
class Layout:
    """The division of a run's rows.

    Attributes:
        n_rows: rows of the corpus.
        batch_rows: rows of one forward pass.
        shard_rows: rows of one shard, a multiple of ``batch_rows``.
        n_parts: jobs asked for; there are never more parts than shards.
        tier_rows: rows held by each tier, the first ones.
    """

    n_rows: int
    batch_rows: int
    shard_rows: int
    n_parts: int
    tier_rows: Mapping[str, int]

    @property
    def n_shards(self) -> int:
        return math.ceil(self.n_rows / self.shard_rows)

    @property
    def parts(self) -> range:
        return range(min(self.n_parts, self.n_shards))

    def shard_rows_range(self, shard: int) -> range:
        """Rows of a shard; the last shard may be short."""
        return range(shard * self.shard_rows, min((shard + 1) * self.shard_rows, self.n_rows))

    def tier_shard_rows(self, tier: str, shard: int) -> range:
        """Rows of a shard that a tier holds; empty past the tier's last row."""
        rows = self.shard_rows_range(shard)
        return range(rows.start, max(rows.start, min(rows.stop, self.tier_rows[tier])))

    def shard_tiers(self, shard: int) -> list[str]:
        """Tiers that hold rows of this shard."""
        return [tier for tier in self.tier_rows if self.tier_shard_rows(tier, shard)]

    def part_shards(self, part: int) -> range:
        """Shards of a part."""
        share, rest = divmod(self.n_shards, len(self.parts))
        start = part * share + min(part, rest)
        return range(start, start + share + (part < rest))

    def batches(self, rows: range) -> list[range]:
        """The batches that hold some rows, whole: a short one only at the end of the corpus."""
        first, last = rows.start // self.batch_rows, math.ceil(rows.stop / self.batch_rows)
        return [self.batch(index * self.batch_rows) for index in range(first, last)]

    def batch(self, row: int) -> range:
        """Rows of the batch that holds a row."""
        start = row // self.batch_rows * self.batch_rows
        return range(start, min(start + self.batch_rows, self.n_rows))

    def part_rules(self) -> list[PartRule]:
        """Group the parts by the files they make: ``capture_part``, then ``capture_tail_part``, and so on.

        There are few groups: two lengths of parts, and one more for each tier that ends inside the run.
        """
        groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for part in self.parts:
            shards = self.part_shards(part)
            counts = tuple((tier, sum(tier in self.shard_tiers(shard) for shard in shards)) for tier in self.tier_rows)
            groups.setdefault(counts, []).append(part)
        names = ["capture_part", "capture_tail_part"] + [f"capture_tail_part_{n}" for n in range(2, len(groups))]
        return [
            PartRule(name, tuple(parts), dict(counts))
            for name, (counts, parts) in zip(names, groups.items(), strict=False)
        ]


def layout_of(settings: Settings) -> Layout:
    """The layout that a configuration asks for."""
    return Layout(
        n_rows=settings.corpus.rows,
        batch_rows=settings.capture.batch_rows,
        shard_rows=settings.capture.shard_rows,
        n_parts=settings.capture.parts,
        tier_rows=settings.tier_rows(),
    )
