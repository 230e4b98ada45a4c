"""The pilot: a few batches and one durable write, before the run, to say how long it takes and whether it fits.

It leaves no trace but its report: what it writes lies in a folder of its own, on the disk of the staged shards, and is
removed. A pilot that was killed leaves that folder to the next one.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from anchorage.capture import fill_shard
from anchorage.capturer import Capturer
from anchorage.durable import atomic_file
from anchorage.forecast import GIB, Rates, Sample, forecast, hours_text
from anchorage.memory import MIB, measure_memory
from anchorage.model import load_trunk
from anchorage.plan import Plan, existing_folder, measure_space
from anchorage.store.format import ShardBuffer, shard_metadata
from anchorage.store.names import staged_shard

METHOD = (
    "A pilot before the run: for each set of tiers that shards hold, one batch to warm up, then batches until 8 of "
    "them and 5 s have passed or the corpus ends, with all casts, reductions and digests; then one shard's file of "
    "each tier, written durably. Hours are active ones (forward passes, digests, waits for the disk), without loading "
    "the model; their interval is Student's t (95 %) on the spread of the batches, taken for independent: it does not "
    "cover slow drift, nor a disk whose cache is full. Bytes are exact but for file headers of some kB; where rows are "
    "padded, rows beyond the corpus count as long as its mean, and hours as if all rows were like the pilot's."
)
_MIN_BATCHES = 8
_MIN_S = 5.0

Buffers = dict[str, ShardBuffer]


def forecast_run(plan: Plan, log: Callable[[str], None]) -> dict[str, Any]:
    """Run the pilot, forecast the run and ``forecast_rows``, and compare with the free space.

    Args:
        plan: the run; nothing of it need be captured.
        log: gets the table, and a loud line for what does not fit.

    Returns:
        The fields of ``plan.json``.

    Raises:
        AnchorageError: the configuration does not fit model or corpus, or a value does not fit the storage dtype.
    """
    plan.check()
    plans = {"run": plan, "forecast": plan.with_rows(plan.settings.forecast_rows)}
    capturer = Capturer(load_trunk(plan.facts, plan.settings.model), plan.sites, plan.facts["device"])
    shapes = plan.shapes(capturer.widths)
    max_rows = min(plan.layout.shard_rows, plan.layout.n_rows)
    buffers = {tier: ShardBuffer(shape, max_rows) for tier, shape in shapes.items()}
    samples = [
        sample for tiers in _tier_sets(plans.values()) for sample in _time_batches(plan, capturer, buffers, tiers)
    ]
    written = _time_writes(plan, buffers)
    # Not even a shard fits: the forecast says so, and its hours are those of a disk that nothing waits for.
    rates = Rates(samples, written[1] / written[0] if written else 0.0)
    kept = plan.layout.tier_rows
    row_bytes = {
        tier: shape.n_bytes(kept[tier], plan.n_tokens(range(kept[tier]))) / kept[tier] for tier, shape in shapes.items()
    }
    report: dict[str, Any] = {"key": plan.key}
    for name, planned in plans.items():
        report[name] = forecast(planned, row_bytes, rates) | _room(planned, capturer.widths)
    memory = measure_memory(plan.facts["device"])
    report["pilot"] = {
        "n_batches": len(samples),
        "batches_s": sum(sample.total_s for sample in samples),
        "write_mib_s": written[0] / written[1] / MIB if written else None,
        "peak_mib": memory["peak_mib"],
        "cuda_peak_mib": memory["cuda_peak_mib"],
        "buffers_mib": sum(max_rows * size for size in row_bytes.values()) / MIB,
    }
    report["method"] = METHOD
    for line in _table(report):
        log(line)
    return report


def _tier_sets(plans: Iterable[Plan]) -> list[list[str]]:
    """The sets of tiers that shards of these runs hold, each once."""
    layouts = [plan.layout for plan in plans]
    found = (tuple(layout.shard_tiers(shard)) for layout in layouts for shard in range(layout.n_shards))
    return [list(tiers) for tiers in dict.fromkeys(found) if tiers]


def _time_batches(plan: Plan, capturer: Capturer, buffers: Buffers, tiers: Sequence[str]) -> list[Sample]:
    """Fill the buffers' first rows with batch after batch of the corpus, as a capture does whose shards are a batch."""
    capture = plan.settings.capture
    stored = {tier: capture.tiers[tier].model_copy(update={"rows": "all"}) for tier in tiers}
    changed = capture.model_copy(update={"shard_rows": capture.batch_rows, "tiers": stored})
    pilot = replace(plan, settings=plan.settings.model_copy(update={"capture": changed}))
    samples: list[Sample] = []
    with tqdm(unit="token", unit_scale=True, desc=f"pilot, {', '.join(tiers)}", disable=None) as bar:
        fill_shard(pilot, capturer, buffers=buffers, shard=0, bar=bar)
        for batch in range(pilot.layout.n_shards):
            [times] = fill_shard(pilot, capturer, buffers=buffers, shard=batch, bar=bar)
            n_rows, n_tokens, forward_s, hash_s = (times[name] for name in ("rows", "tokens", "forward_s", "hash_s"))
            n_bytes = sum(buffers[tier].shape.n_bytes(n_rows, n_tokens) for tier in tiers)
            samples.append(Sample(frozenset(tiers), n_rows, n_bytes, forward_s, hash_s, total_s=forward_s + hash_s))
            if len(samples) >= _MIN_BATCHES and sum(sample.total_s for sample in samples) >= _MIN_S:
                break
    return samples


def _time_writes(plan: Plan, buffers: Buffers) -> tuple[int, float] | None:
    """Write the first shard's file of each tier durably. Returns bytes and seconds; None where they do not fit."""
    rows = {tier: plan.layout.tier_shard_rows(tier, 0) for tier in buffers}
    place = existing_folder(plan.settings.staging)
    sizes = [buffer.shape.n_bytes(len(rows[tier]), plan.n_tokens(rows[tier])) for tier, buffer in buffers.items()]
    if shutil.disk_usage(place).free < sum(sizes):
        return None
    for tier, buffer in buffers.items():
        _repeat_batch(plan, buffer, rows[tier])
    folder, n_bytes = place / f"pilot-{plan.settings.run}", 0
    try:
        started = time.perf_counter()
        for tier, buffer in buffers.items():
            digest = plan.tokens_digest(rows[tier])
            metadata = shard_metadata(buffer.shape, key=plan.key, shard=0, rows=rows[tier], tokens_digest=digest)
            with atomic_file(folder / staged_shard(tier, 0)) as file:
                n_bytes += buffer.write(file, len(rows[tier]), metadata)[0]
        return n_bytes, time.perf_counter() - started
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _repeat_batch(plan: Plan, buffer: ShardBuffer, rows: range) -> None:
    """Fill a buffer with its first batch, over and over: memory never touched takes no room, and disks may compress."""
    batch = plan.layout.batch(0)
    tokens, lengths = plan.batch_tokens(batch), plan.lengths(batch)
    buffer.put_tokens(tokens, 0, lengths)  # another batch may be there, of rows of other lengths
    for start in range(batch.stop, rows.stop, batch.stop):
        stop = min(start + batch.stop, rows.stop)
        buffer.put_tokens(tokens[: stop - start], start, lengths)
        for site in buffer.shape.widths:
            buffer.rows_of(site, slice(start, stop)).copy_(buffer.rows_of(site, slice(0, stop - start)))


def _room(plan: Plan, widths: Mapping[str, int]) -> dict[str, Any]:
    """What is staged already, what the rest needs, and the verdict."""
    layout, spaces = plan.layout, measure_space(plan, widths)
    staged = [
        all((plan.staging / staged_shard(tier, shard)).exists() for tier in tiers)
        for shard in range(layout.n_shards)
        if (tiers := layout.shard_tiers(shard))
    ]
    lacks = [f"{space.short_bytes / GIB:.2f} GiB more in {space.folder}" for space in spaces if space.short_bytes]
    return {
        "n_shards_staged": sum(staged),
        "disks": [
            {"folder": str(space.folder), "needed_gib": space.needed_bytes / GIB, "free_gib": space.free_bytes / GIB}
            for space in spaces
        ],
        "fits": not lacks,
        "verdict": f"does not fit: needs {' and '.join(lacks)}" if lacks else "fits",
    }


def _table(report: Mapping[str, Any]) -> list[str]:
    found = [report["run"], report["forecast"]]
    lines = [
        ["", "this run", "forecast"],
        ["rows", *(f"{each['rows']:,}" for each in found)],
        ["time", *map(hours_text, found)],
        *([f"{tier}, GiB", *(f"{each['tiers'][tier]['gib']:.2f}" for each in found)] for tier in found[0]["tiers"]),
        ["all tiers, GiB", *(f"{each['gib']:.2f}" for each in found)],
        ["one layer only, GiB", *(f"{each['one_layer_gib']:.2f}" for each in found)],
        ["files", *(f"{each['n_files']:,}" for each in found)],
        ["shards staged already", *(f"{each['n_shards_staged']:,} of {each['n_shards']:,}" for each in found)],
    ]
    for disks in zip(*(each["disks"] for each in found), strict=True):
        lines.append([f"to write in {disks[0]['folder']}, GiB", *(f"{disk['needed_gib']:.2f}" for disk in disks)])
        lines.append([f"free in {disks[0]['folder']}, GiB", *(f"{disk['free_gib']:.2f}" for disk in disks)])
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    text = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}" for a, b, c in lines]
    pilot = report["pilot"]
    text.append(
        f"pilot: {pilot['n_batches']} batches in {pilot['batches_s']:.1f} s; peak memory {pilot['peak_mib']:,.0f} MiB, "
        f"where a capture holds a second set of shard buffers, {pilot['buffers_mib']:,.0f} MiB; "
        + (
            f"{pilot['write_mib_s']:,.0f} MiB/s to disk"
            if pilot["write_mib_s"]
            else "not even one shard fits on the disk"
        )
    )
    return text + [f"{'' if each['fits'] else 'WARNING: '}{each['rows']:,} rows: {each['verdict']}" for each in found]
