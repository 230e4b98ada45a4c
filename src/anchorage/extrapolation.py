"""Does a run extrapolate? Its first quarter predicts the whole, which was measured; then all of it a longer run.

Time is active time: that of the shards, as the memory log has it, and of the last writes. What a kill lost, and the
pause after it, are no part of it. The check follows NDIF's tutorial "Caching Activations Over a Dataset", which scales
its run to 50,000 rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anchorage.forecast import Rates, Sample, drop_warm_up, forecast, hours_text, shard_seconds
from anchorage.plan import Plan
from anchorage.store.identity import check_key
from anchorage.store.layout import Layout
from anchorage.store.manifest import Manifest, ShardRecord

METHOD = (
    "Active time: seconds of forward passes, digests and waits for the disk, summed over shards, and the last write of "
    "each part. Predicted: what the first quarter of the shards took, and for the others rows x seconds a row, bytes x "
    "seconds a byte of digests, and the wait where the shard before takes longer to write (bytes x seconds a byte); "
    "rates are sums over sums of the quarter, without a process's first shard where that took over 1.5 times as long a "
    "row as the median of the others. Bytes: the quarter's bytes a row of each tier. The forecast uses all shards; its "
    "interval is Student's t (95 %) on the spread of shard times, taken for independent."
)

Row = Mapping[str, str]


def extrapolate(plan: Plan, manifest: Manifest, table: Sequence[Row], log: Callable[[str], None]) -> dict[str, Any]:
    """Predict a finished run from its first quarter, compare, and forecast ``forecast_rows``.

    Args:
        plan: the run.
        manifest: of the cache.
        table: lines of ``memory.csv``. Where it lacks shards, the measured time is None.
        log: gets the findings as text.

    Returns:
        The fields of ``extrapolation.json``.

    Raises:
        AnchorageError: the manifest or a line of the table belongs to another capture key.
    """
    check_key("the manifest", manifest.key, plan.key)
    for row in table:
        check_key("memory.csv", row["key"], manifest.key)
    layout, lines = plan.layout, {int(row["shard"]): row for row in table}
    n_used = math.ceil(layout.n_shards / 4)
    quarter, logged = manifest.shards[:n_used], [shard for shard in manifest.shards if shard.shard in lines]
    active_s = _compare(_predict_s(layout, quarter, lines), _measure_s(layout, lines))
    predicted = _row_bytes(quarter)
    n_bytes = _compare(
        round(sum(rows * predicted[tier] for tier, rows in layout.tier_rows.items())),
        sum(file.bytes for _, _, file in manifest.files.values()),
    )
    longer = forecast(plan.with_rows(plan.settings.forecast_rows), _row_bytes(manifest.shards), _rates(logged, lines))
    log(f"{layout.n_shards} shards, {len(logged)} of them logged; predicted from the first {n_used}")
    log(f"active seconds: {_told(active_s, '.1f')}")
    log(f"bytes: {_told(n_bytes, ',d')}")
    tiers = ", ".join(f"{tier} {found['gib']:.2f}" for tier, found in longer["tiers"].items())
    log(
        f"{longer['rows']:,} rows: {hours_text(longer)}, {longer['gib']:.2f} GiB ({tiers}); "
        f"one layer only {longer['one_layer_gib']:.2f} GiB"
    )
    return {
        "key": manifest.key,
        "n_shards": layout.n_shards,
        "n_shards_logged": len(logged),
        "n_shards_used": n_used,
        "active_s": active_s,
        "bytes": n_bytes,
        "forecast": {"n_shards_used": len(logged)} | longer,
        "method": METHOD,
    }


def _samples(shards: Sequence[ShardRecord], lines: Mapping[int, Row]) -> list[Sample]:
    first: dict[str, int] = {}
    for number in sorted(lines):
        first.setdefault(lines[number]["process"], number)
    return [
        Sample(
            tiers=frozenset(shard.tiers),
            rows=shard.rows[1] - shard.rows[0],
            n_bytes=sum(file.bytes for file in shard.tiers.values()),
            forward_s=float(line["forward_s"]),
            hash_s=float(line["hash_s"]),
            total_s=float(line["shard_s"]),
            begins=first[line["process"]] == shard.shard,
        )
        for shard in shards
        if (line := lines.get(shard.shard))
    ]


def _rates(shards: Sequence[ShardRecord], lines: Mapping[int, Row]) -> Rates | None:
    samples = _samples(shards, lines)
    if not samples:
        return None
    write_s = sum(float(lines[shard.shard]["write_s"]) for shard in shards if shard.shard in lines)
    return Rates(drop_warm_up(samples), write_s / sum(sample.n_bytes for sample in samples))


def _predict_s(layout: Layout, quarter: Sequence[ShardRecord], lines: Mapping[int, Row]) -> float | None:
    rates = _rates(quarter, lines)
    if rates is None:
        return None
    seconds, last_write_s = shard_seconds(layout, _row_bytes(quarter), rates)
    known = {shard.shard: float(lines[shard.shard]["shard_s"]) for shard in quarter if shard.shard in lines}
    return sum(known.get(shard, predicted) for shard, predicted in enumerate(seconds)) + last_write_s


def _measure_s(layout: Layout, lines: Mapping[int, Row]) -> float | None:
    if len(lines) < layout.n_shards:
        return None
    last = [layout.part_shards(part)[-1] for part in layout.parts]
    return sum(float(line["shard_s"]) for line in lines.values()) + sum(float(lines[i]["write_s"]) for i in last)


def _row_bytes(shards: Sequence[ShardRecord]) -> dict[str, float]:
    """Bytes a row of each tier, headers and all."""
    files = [(tier, file) for shard in shards for tier, file in shard.tiers.items()]
    return {
        name: sum(file.bytes for tier, file in files if tier == name)
        / sum(file.n_rows for tier, file in files if tier == name)
        for name in dict.fromkeys(tier for tier, _ in files)
    }


def _compare(predicted: float | None, measured: float | None) -> dict[str, float | None]:
    error = None if predicted is None or measured is None else predicted / measured - 1
    return {"predicted": predicted, "measured": measured, "relative_error": error}


def _told(compared: Mapping[str, Any], form: str) -> str:
    predicted, measured = (
        "unknown" if compared[name] is None else format(compared[name], form) for name in ("predicted", "measured")
    )
    error = compared["relative_error"]
    return f"predicted {predicted}, measured {measured}" + ("" if error is None else f" ({100 * error:+.1f} %)")
