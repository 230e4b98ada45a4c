"""Capture: rows of token ids -> activations of the wanted sites -> durable shards.

One job captures one part. It takes over every shard that an earlier, killed job made durable, captures the others in
order and publishes when the part is whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from anchorage.errors import CaptureError
from anchorage.memory import measure_memory, process_name
from anchorage.model import describe_environment, load_trunk
from anchorage.plan import Plan, check_space
from anchorage.reduction import reduce_rows
from anchorage.store.format import ShardBuffer, TierShape, shard_metadata
from anchorage.store.manifest import ShardRecord, write_manifest
from anchorage.store.prune import superseded_keys
from anchorage.store.staging import Staging
from anchorage.trunk import Site, SiteReader, Trunk, find_sites, probe_sites, trimmed

Log = Callable[[str], None]


class Capturer:
    """A loaded model and the sites to be read from it; fills buffers, one forward pass a batch.

    Args:
        trunk: the model without its head.
        names: site names of all tiers.
        device: where the model lies.
    """

    def __init__(self, trunk: Trunk, names: Sequence[str], device: str) -> None:
        self.trunk, self.device = trunk, device
        self.sites, self.widths = probe_sites(trunk, find_sites(trunk, names), device)
        self._readers: dict[frozenset[str], SiteReader] = {}

    def fill(self, tokens: np.ndarray, targets: Mapping[str, tuple[ShardBuffer, slice]], first_row: int) -> None:
        """Run one batch and put what each tier keeps of it into the tiers' buffers.

        Args:
            tokens: token ids ``[rows, seq_len]``.
            targets: by tier, its buffer and the buffer's rows to fill: the first ones of the batch.
            first_row: global number of the batch's first row, for messages.

        Raises:
            CaptureError: a value does not fit the storage dtype, or the model itself gives inf or NaN.
        """

        def take(site: Site, value: torch.Tensor) -> None:
            for buffer, rows in targets.values():
                if site.name in buffer.shape.widths:
                    kept = reduce_rows(value[: rows.stop - rows.start], buffer.shape.reduce)
                    stored = buffer.rows_of(site.name, rows)
                    stored.copy_(kept)
                    _check_fits(kept, stored, site.name, first_row)

        wanted = frozenset(site for buffer, _ in targets.values() for site in buffer.shape.widths)
        ids = torch.from_numpy(tokens.astype(np.int64)).to(self.device)
        sites = [site for site in self.sites if site.name in wanted]
        # Nothing past the deepest wanted site is computed; the values of the others do not change by a bit.
        with trimmed(self.trunk, max(site.depth for site in sites)):
            if wanted not in self._readers:
                self._readers[wanted] = SiteReader(self.trunk, sites)
            self._readers[wanted].read(ids, take)


def capture_part(plan: Plan, part: int, *, part_path: Path, log: Log) -> None:
    """Capture one part and publish it.

    Args:
        plan: what to capture.
        part: number of the part.
        part_path: the part's list of shards, in the cache folder; written last.
        log: gets a line a step and a shard.

    Raises:
        AnchorageError: bad input, found before any forward pass; or a capture that cannot go on. Shards already durable
            stay, and the same command takes them over.
    """
    plan.check()
    staging = Staging(plan.staging, plan.key, layout=plan.layout, part=part, log=log)
    try:
        records = staging.accept(plan.tokens_digest)
        missing = [shard for shard in staging.shards if shard not in records]
        log(f"part {part}: reused {len(records)}, to capture {len(missing)} of {len(staging.shards)} shards")
        if missing:
            capturer = _load_capturer(plan)
            records |= capture_shards(plan, staging, shards=missing, capturer=capturer, log=log)
        published = staging.publish(records, part_path.parent)
        write_manifest(part_path, plan.identity, published)
        log(f"part {part}: reused {len(staging.shards) - len(missing)}, captured {len(missing)} shards")
        if held := superseded_keys(plan.settings.staging, plan.key):
            gib = sum(held.values()) / 2**30
            log(f"{len(held)} earlier configuration(s) hold {gib:.2f} GiB of staged shards; `make prune` removes them")
    finally:
        staging.close()


def _load_capturer(plan: Plan) -> Capturer:
    """Load the model, if there is room for what it will give."""
    check_space(plan, dict.fromkeys(plan.sites, plan.facts["architecture"]["width"]))
    capturer = Capturer(load_trunk(plan.facts, plan.settings.model), plan.sites, plan.facts["device"])
    check_space(plan, capturer.widths)  # again: a raw module path may have a width of its own
    return capturer


def capture_shards(
    plan: Plan, staging: Staging, *, shards: Sequence[int], capturer: Capturer, log: Log
) -> dict[int, ShardRecord]:
    """Capture shards in order. While one is being made durable, the next is being computed, and no further one.

    Args:
        plan: what to capture.
        staging: where the shards go.
        shards: their numbers.
        capturer: the loaded model.
        log: gets a line a shard.

    Returns:
        The shards' records.
    """
    shapes, max_rows = plan.shapes(capturer.widths), min(plan.layout.shard_rows, plan.layout.n_rows)
    # Two sets of buffers, in turn: the only memory that shards take, however many there are.
    buffers = [{tier: ShardBuffer(shape, max_rows) for tier, shape in shapes.items()} for _ in shards[:2]]
    n_tokens = sum(len(plan.layout.shard_rows_range(shard)) for shard in shards) * plan.corpus.seq_len
    committer, records = _Committer(plan, staging, n_tokens=n_tokens, log=log), {}
    pending: Future[ShardRecord] | None = None
    with (
        tqdm(total=n_tokens, unit="token", unit_scale=True, desc=f"part {staging.part}", disable=None) as bar,
        ThreadPoolExecutor(1, "writer") as writer,
    ):
        for index, shard in enumerate(shards):
            times = fill_shard(plan, capturer, buffers=buffers[index % 2], shard=shard, bar=bar)
            started = time.perf_counter()
            if pending is not None:
                records[shards[index - 1]] = pending.result()  # a failed write ends the capture here
            times["wait_s"] = time.perf_counter() - started
            pending = writer.submit(committer.commit, shard, buffers[index % 2], times)
        if pending is not None:
            records[shards[-1]] = pending.result()
    return records


class _Committer:
    """Makes filled shards durable, one after the other, and logs each; runs in the writer's thread."""

    def __init__(self, plan: Plan, staging: Staging, *, n_tokens: int, log: Log) -> None:
        self._plan, self._staging, self._log = plan, staging, log
        self._environment = describe_environment(plan.facts)
        self._n_tokens, self._n_done, self._begun = n_tokens, 0, time.perf_counter()

    def commit(self, shard: int, buffers: Mapping[str, ShardBuffer], times: dict[str, float]) -> ShardRecord:
        started = time.perf_counter()
        tiers = self._plan.layout.shard_tiers(shard)
        metadata = {tier: self._metadata(tier, shard, buffers[tier].shape) for tier in tiers}
        files = self._staging.write_files(shard, buffers, metadata)
        times["write_s"] = time.perf_counter() - started
        # Before the journal line: killed in between, the shard is made and logged again, never kept without its line.
        self._staging.log_memory(_memory_line(self._plan, self._staging.part, shard=shard, times=times))
        record = self._staging.commit(shard, files, environment=self._environment)
        rows = self._plan.layout.shard_rows_range(shard)
        self._n_done += len(rows) * self._plan.corpus.seq_len
        rate = self._n_done / (time.perf_counter() - self._begun)
        self._log(
            f"shard {shard} is durable: rows {rows.start}-{rows.stop - 1}, forward {times['forward_s']:.2f} s, hash "
            f"{times['hash_s']:.2f} s, write {times['write_s']:.2f} s; {self._n_done} of {self._n_tokens} tokens, "
            f"{rate:.0f} tokens/s, {(self._n_tokens - self._n_done) / rate:.0f} s to go"
        )
        return record

    def _metadata(self, tier: str, shard: int, shape: TierShape) -> dict[str, Any]:
        rows = self._plan.layout.tier_shard_rows(tier, shard)
        digest = self._plan.tokens_digest(rows)
        return shard_metadata(shape, key=self._plan.key, shard=shard, rows=rows, tokens_digest=digest)


def fill_shard(
    plan: Plan, capturer: Capturer, *, buffers: Mapping[str, ShardBuffer], shard: int, bar: tqdm
) -> dict[str, float]:
    """Run a shard's batches. Returns the seconds spent in forward passes and in digests."""
    layout, shard_start = plan.layout, plan.layout.shard_rows_range(shard).start
    forward_s = hash_s = 0.0
    for batch in layout.batches(layout.shard_rows_range(shard)):
        tokens = plan.corpus.rows(batch.start, batch.stop)
        targets = {}
        for tier in layout.shard_tiers(shard):
            stop = min(batch.stop, layout.tier_rows[tier])
            if stop > batch.start:
                targets[tier] = (buffers[tier], slice(batch.start - shard_start, stop - shard_start))
        started = time.perf_counter()
        capturer.fill(tokens, targets, batch.start)
        filled = time.perf_counter()
        for buffer, rows in targets.values():
            for site in buffer.shape.widths:
                buffer.seal(site, rows)
            buffer.put_tokens(tokens[: rows.stop - rows.start], rows.start)
        forward_s, hash_s = forward_s + filled - started, hash_s + time.perf_counter() - filled
        bar.update(tokens.size)
    return {"forward_s": forward_s, "hash_s": hash_s}


def _memory_line(plan: Plan, part: int, *, shard: int, times: Mapping[str, float]) -> dict[str, Any]:
    rows = plan.layout.shard_rows_range(shard)
    n_tokens, shard_s = len(rows) * plan.corpus.seq_len, times["forward_s"] + times["hash_s"] + times["wait_s"]
    line = {
        "time": round(time.time(), 3),
        "part": part,
        "process": process_name(),
        "shard": shard,
        "rows": len(rows),
        "rows_total": rows.stop,
        "tokens": n_tokens,
        "shard_s": round(shard_s, 4),
        "tokens_per_s": round(n_tokens / shard_s, 1),
    }
    return line | measure_memory(plan.facts["device"]) | {name: round(value, 4) for name, value in times.items()}


def _check_fits(value: torch.Tensor, stored: torch.Tensor, site: str, first_row: int) -> None:
    """Refuse a value that is not finite, or that the storage dtype turned into infinity."""
    low, high = torch.aminmax(value)
    limit = torch.finfo(stored.dtype).max
    if -low.item() <= limit and high.item() <= limit:  # false for NaN too
        return
    bad = ~torch.isfinite(stored).flatten(1).all(dim=1)
    if not bad.any():  # rounded down to the largest finite value: within half a unit in the last place
        return
    index = int(bad.nonzero()[0])
    row, dtype = value[index].float(), str(stored.dtype).removeprefix("torch.")
    where = f"site {site}, row {first_row + index}"
    if not torch.isfinite(row).all():
        raise CaptureError(
            f"{where}: the model itself gives inf or NaN; nothing of this shard is stored. Check the model."
        )
    raise CaptureError(
        f"{where}: maximum {row.abs().max().item():.6g} is beyond {dtype}'s {limit:.6g}; none of this shard is stored. "
        "Set capture.storage_dtype to bfloat16 or float32."
    )
