"""Capture: rows of token ids -> activations of the wanted sites -> durable shards.

One job captures one part. It takes over every shard that an earlier, killed job made durable, captures the others in
order and publishes when the part is whole.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tqdm import tqdm

from anchorage.capturer import Capturer
from anchorage.memory import measure_batch, measure_memory, process_name
from anchorage.model import describe_environment, load_trunk
from anchorage.plan import Plan, check_space
from anchorage.store.format import ShardBuffer, TierShape, shard_metadata
from anchorage.store.manifest import ShardRecord, write_manifest
from anchorage.store.prune import superseded_keys
from anchorage.store.staging import Staging

Log = Callable[[str], None]


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
    trunk, overlap = load_trunk(plan.facts, plan.settings.model), plan.settings.capture.overlap_copies
    capturer = Capturer(trunk, plan.sites, plan.facts["device"], overlap=overlap)
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
    buffers = [
        {tier: ShardBuffer(shape, max_rows, pinned=capturer.overlaps) for tier, shape in shapes.items()}
        for _ in shards[:2]
    ]
    n_tokens = sum(plan.n_tokens(plan.layout.shard_rows_range(shard)) for shard in shards)
    committer, records = _Committer(plan, staging, n_tokens=n_tokens, log=log), {}
    pending: Future[ShardRecord] | None = None
    with (
        tqdm(total=n_tokens, unit="token", unit_scale=True, desc=f"part {staging.part}", disable=None) as bar,
        ThreadPoolExecutor(1, "writer") as writer,
    ):
        for index, shard in enumerate(shards):
            batches = fill_shard(plan, capturer, buffers=buffers[index % 2], shard=shard, bar=bar)
            started = time.perf_counter()
            if pending is not None:
                records[shards[index - 1]] = pending.result()  # a failed write ends the capture here
            wait_s = time.perf_counter() - started
            pending = writer.submit(committer.commit, shard, buffers[index % 2], batches, wait_s)
        if pending is not None:
            records[shards[-1]] = pending.result()
    return records


class _Committer:
    """Makes filled shards durable, one after the other, and logs each; runs in the writer's thread."""

    def __init__(self, plan: Plan, staging: Staging, *, n_tokens: int, log: Log) -> None:
        self._plan, self._staging, self._log = plan, staging, log
        self._environment = describe_environment(plan.facts)
        self._n_tokens, self._n_done, self._begun = n_tokens, 0, time.perf_counter()
        self._append_s = 0.0

    def commit(
        self, shard: int, buffers: Mapping[str, ShardBuffer], batches: Sequence[Mapping[str, Any]], wait_s: float
    ) -> ShardRecord:
        started = time.perf_counter()
        tiers = self._plan.layout.shard_tiers(shard)
        metadata = {tier: self._metadata(tier, shard, buffers[tier].shape) for tier in tiers}
        files = self._staging.write_files(shard, buffers, metadata)
        times = {name: sum(batch[name] for batch in batches) for name in ("forward_s", "hash_s", "memory_log_s")}
        times |= {"wait_s": wait_s, "write_s": time.perf_counter() - started}
        # Before the journal line: killed in between, the shard is made and logged again, never kept without its lines.
        self._log_memory(shard, times, batches)
        record = self._staging.commit(shard, files, environment=self._environment)
        rows = self._plan.layout.shard_rows_range(shard)
        self._n_done += self._plan.n_tokens(rows)
        rate = self._n_done / (time.perf_counter() - self._begun)
        self._log(
            f"shard {shard} is durable: rows {rows.start}-{rows.stop - 1}, forward {times['forward_s']:.2f} s, hash "
            f"{times['hash_s']:.2f} s, write {times['write_s']:.2f} s; {self._n_done} of {self._n_tokens} tokens, "
            f"{rate:.0f} tokens/s, {(self._n_tokens - self._n_done) / rate:.0f} s to go"
        )
        return record

    def _log_memory(self, shard: int, times: Mapping[str, float], batches: Sequence[Mapping[str, Any]]) -> None:
        started = time.perf_counter()
        line = _memory_line(self._plan, self._staging.part, shard=shard, times=times)
        shared = {name: line[name] for name in ("time", "part", "process", "shard")}
        self._staging.log_batches(shared | {"batches": batches})
        logged = time.perf_counter()
        # A line cannot hold the time of its own append: that is in the next shard's.
        line["memory_log_s"] = round(times["memory_log_s"] + self._append_s + logged - started, 4)
        self._staging.log_memory(line)
        self._append_s = time.perf_counter() - logged

    def _metadata(self, tier: str, shard: int, shape: TierShape) -> dict[str, Any]:
        rows = self._plan.layout.tier_shard_rows(tier, shard)
        digest = self._plan.tokens_digest(rows)
        return shard_metadata(shape, key=self._plan.key, shard=shard, rows=rows, tokens_digest=digest)


def fill_shard(
    plan: Plan, capturer: Capturer, *, buffers: Mapping[str, ShardBuffer], shard: int, bar: tqdm
) -> list[dict[str, Any]]:
    """Run a shard's batches. Returns an entry of the batch log for each: memory after it, and where its time went."""
    layout, shard_start = plan.layout, plan.layout.shard_rows_range(shard).start
    batches = []
    for batch in layout.batches(layout.shard_rows_range(shard)):
        targets = {}
        for tier in layout.shard_tiers(shard):
            stop = min(batch.stop, layout.tier_rows[tier])
            if stop > batch.start:
                targets[tier] = (buffers[tier], slice(batch.start - shard_start, stop - shard_start))
        started = time.perf_counter()
        capturer.fill(plan.batch_tokens(batch), targets, batch.start, plan.lengths(batch))
        filled = time.perf_counter()
        for buffer, rows in targets.values():
            for site in buffer.shape.widths:
                buffer.seal(site, rows)
        sealed = time.perf_counter()
        # Read here: the writer's thread is a shard behind.
        memory = measure_batch(capturer.device)
        ends = (started, filled, sealed, time.perf_counter())
        seconds = (round(stop - start, 6) for start, stop in itertools.pairwise(ends))
        times = dict(zip(("forward_s", "hash_s", "memory_log_s"), seconds, strict=True))
        n_tokens = plan.n_tokens(batch)
        place = {"batch": batch.start // layout.batch_rows, "rows": len(batch), "rows_total": batch.stop}
        batches.append({**place, "tokens": n_tokens, **memory, **times})
        bar.update(n_tokens)
    return batches


def _memory_line(plan: Plan, part: int, *, shard: int, times: Mapping[str, float]) -> dict[str, Any]:
    rows = plan.layout.shard_rows_range(shard)
    n_tokens, shard_s = plan.n_tokens(rows), times["forward_s"] + times["hash_s"] + times["wait_s"]
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
