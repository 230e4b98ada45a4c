"""Staging: shards made durable one by one, accepted again after a kill, published when their part is whole.

The folder ``staging/{key}/`` is flat, so that another number of parts finds the same shards. A shard is committed by
its journal line, written last; it is accepted only if the key, the digest of its token rows, its size and its xxh3
all agree.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from anchorage import durable
from anchorage.digest import canonical_json, digest_file
from anchorage.errors import CaptureError, IntegrityError
from anchorage.store import names
from anchorage.store.format import ShardBuffer
from anchorage.store.layout import Layout
from anchorage.store.manifest import FileRecord, ShardRecord, read_records
from anchorage.store.shardfile import ShardFile

_LOCK_WAIT_S = 60.0


class Staging:
    """One part's view of the staging folder, locked against other processes for its shards.

    Args:
        folder: ``staging/{key}``.
        key: the capture key.
        layout: the run's division into shards.
        part: the part whose shards are locked.
        log: gets a line for everything found wrong.

    Raises:
        CaptureError: another live process holds some of the shards and does not end in a minute.
    """

    def __init__(self, folder: Path, key: str, *, layout: Layout, part: int, log: Callable[[str], None]) -> None:
        self.folder, self.key, self.layout, self.part, self.log = folder, key, layout, part, log
        self.shards = layout.part_shards(part)
        durable.make_folder(folder)
        self._lock = self._lock_shards()
        self._sweep_temps()

    def close(self) -> None:
        """Release the shards."""
        os.close(self._lock)

    def accept(self, tokens_digest: Callable[[range], str]) -> dict[int, ShardRecord]:
        """Find the part's shards that are whole.

        Args:
            tokens_digest: gives the digest of the token ids of some rows, as the corpus now has them.

        Returns:
            Records of the accepted shards. Others are logged with the reason, if there was a trace of them.
        """
        candidates: dict[int, list[ShardRecord]] = {}
        for path in sorted(self.folder.glob(names.journal("*"))):
            for record in read_records(path):
                candidates.setdefault(record.shard, []).append(record)
        accepted = {}
        for shard in self.shards:
            reasons = []
            for record in reversed(candidates.get(shard, [])):
                try:
                    accepted[shard] = self._check(record, tokens_digest)
                    break
                except IntegrityError as error:
                    reasons.append(str(error))
            else:
                self._report_rejected(shard, reasons)
        return accepted

    def write_files(
        self, shard: int, buffers: Mapping[str, ShardBuffer], metadata: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, FileRecord]:
        """Make a shard's file of each tier durable. It does not count before :meth:`commit`.

        Args:
            shard: number of the shard.
            buffers: filled buffers by tier.
            metadata: by tier, the facts kept inside the file.
        """
        tiers = {}
        for tier in self.layout.shard_tiers(shard):
            rows = self.layout.tier_shard_rows(tier, shard)
            path = self.folder / names.staged_shard(tier, shard)
            with durable.atomic_file(path) as file:
                n_bytes, xxh3 = buffers[tier].write(file, len(rows), metadata[tier])
            tiers[tier] = FileRecord(path.name, n_bytes, xxh3, len(rows), metadata[tier]["tokens_digest"])
        return tiers

    def commit(self, shard: int, tiers: Mapping[str, FileRecord], *, environment: Mapping[str, Any]) -> ShardRecord:
        """Make a shard count: its journal line.

        Args:
            shard: number of the shard.
            tiers: from :meth:`write_files`.
            environment: where it was computed; kept in the journal, not in the file.
        """
        rows = self.layout.shard_rows_range(shard)
        record = ShardRecord(shard, (rows.start, rows.stop), environment, tiers)
        durable.append_line(self.folder / names.journal(self.part), record.to_line())
        return record

    def log_memory(self, line: Mapping[str, Any]) -> None:
        """Keep a line of the memory log."""
        durable.append_line(self.folder / names.memory_log(self.part), canonical_json(line))

    def log_batches(self, line: Mapping[str, Any]) -> None:
        """Keep a line of the batch log: all batches of a shard."""
        durable.append_line(self.folder / names.batch_log(self.part), canonical_json(line))

    def publish(self, records: Mapping[int, ShardRecord], cache: Path) -> list[ShardRecord]:
        """Hard-link the part's shards into the cache folder. The manifest there is withdrawn first: from here on it
        names files that may be replaced.

        Returns:
            The shards' records with their published names, in order.
        """
        if durable.remove_file(cache / names.MANIFEST):
            durable.sync_folder(cache)
        published, counts = [], dict.fromkeys(self.layout.tier_rows, 0)
        for shard in self.shards:
            tiers = {}
            for tier in self.layout.shard_tiers(shard):
                staged = records[shard].tiers[tier]
                name = names.published_shard(tier, self.part, counts[tier])
                counts[tier] += 1
                durable.make_folder((cache / name).parent)
                durable.link_file(self.folder / staged.file, cache / name)
                tiers[tier] = replace(staged, file=name)
            record = records[shard]
            published.append(ShardRecord(shard, record.rows, record.environment, tiers))
        for tier in self.layout.tier_rows:
            if (cache / tier).exists():
                durable.sync_folder(cache / tier)
        return published

    def _check(self, record: ShardRecord, tokens_digest: Callable[[range], str]) -> ShardRecord:
        for tier in self.layout.shard_tiers(record.shard):
            rows = self.layout.tier_shard_rows(tier, record.shard)
            self._check_file(record, tier, rows, tokens_digest(rows))
        rows = self.layout.shard_rows_range(record.shard)
        return ShardRecord(record.shard, (rows.start, rows.stop), record.environment, record.tiers)

    def _check_file(self, record: ShardRecord, tier: str, rows: range, tokens_digest: str) -> None:
        path = self.folder / names.staged_shard(tier, record.shard)
        listed = record.tiers.get(tier)
        remedy = "It is captured again."
        if listed is None:
            raise IntegrityError(path, expected=f"tier {tier} in the journal", found="none", remedy=remedy)
        if not path.exists():
            raise IntegrityError(path, expected="a file", found="none", remedy=remedy)
        if (n_bytes := path.stat().st_size) != listed.bytes:
            raise IntegrityError(path, expected=f"{listed.bytes} bytes", found=n_bytes, remedy=remedy)
        metadata = {"key": self.key, "tier": tier, "rows": [rows.start, rows.stop], "tokens_digest": tokens_digest}
        ShardFile(path, metadata).file.close()
        if (xxh3 := digest_file(path)) != listed.xxh3_128:
            raise IntegrityError(path, expected=f"xxh3_128 {listed.xxh3_128}", found=xxh3, remedy=remedy)

    def _report_rejected(self, shard: int, reasons: list[str]) -> None:
        if reasons:
            self.log(f"shard {shard} is not accepted: {reasons[0]}")
            return
        for tier in self.layout.shard_tiers(shard):
            if (path := self.folder / names.staged_shard(tier, shard)).exists():
                self.log(f"shard {shard} is not accepted: {path} has no line in a journal. It is captured again.")

    def _lock_shards(self) -> int:
        """Lock the part's shards as a byte range of one file: a lock that ends with the process, and, where the
        filesystem carries POSIX locks, holds across machines. Parts of another division overlap as they should."""
        descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, durable.FILE_MODE)
        deadline, told = time.monotonic() + _LOCK_WAIT_S, False
        while True:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, len(self.shards), self.shards.start)
                return descriptor
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(descriptor)
                    raise CaptureError(
                        f"{self.folder}: another process still captures shards of part {self.part}. "
                        "Wait for it or end it, then run the plain command."
                    ) from None
                if not told:
                    self.log("another process still holds these shards; waiting for it to end")
                    told = True
                time.sleep(0.1)

    def _sweep_temps(self) -> None:
        """Remove temps left by killed writers: those of the part's own shards, and past the run's end for the last."""
        past_end = self.shards.stop == self.layout.n_shards
        for path in filter(durable.is_temp, self.folder.iterdir()):
            index = names.staged_shard_index(path)
            if index is not None and (index in self.shards or (past_end and index >= self.shards.stop)):
                path.unlink()
                self.log(f"removed {path}, left by a killed writer")
