"""Forecasts of a capture's time and bytes from a measured part of it: arithmetic alone.

The model is that of the capture: a job fills a shard (forward passes, their seconds in proportion to rows; digests, to
bytes) while the one before is being written (to bytes), so a shard takes the longer of the two, and a job ends with its
last shard's write. Forward passes have a rate for each set of tiers: where a tier ends, less is copied, and with its
deepest sites the blocks that only they needed are no longer run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist, median
from typing import Any

from anchorage.plan import Plan
from anchorage.store.layout import Layout

GIB = 2**30
_WARM_UP_FACTOR = 1.5
# Two-sided 95 %, for 1 to 10 degrees of freedom; above, an expansion is right to a thousandth.
_STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)

Tiers = frozenset[str]


@dataclass(frozen=True)
class Sample:
    """Rows that were captured together and timed: a shard of a run, a batch of a pilot.

    Attributes:
        tiers: the tiers that hold rows of it.
        rows: their number.
        n_bytes: stored of them, in all tiers.
        forward_s, hash_s: of forward passes, of digests.
        total_s: these and the wait for the disk.
        begins: whether it is the first of its process.
    """

    tiers: Tiers
    rows: int
    n_bytes: int
    forward_s: float
    hash_s: float
    total_s: float
    begins: bool = False


def drop_warm_up(samples: Sequence[Sample]) -> list[Sample]:
    """Leave out a process's first sample where it took over 1.5 times as long a row as the median of the others with
    the same tiers. It is left out only so: where nothing warms up, a quarter of a run has no sample to spare."""
    return [sample for sample in samples if not (sample.begins and _is_slow(sample, samples))]


def _is_slow(sample: Sample, samples: Sequence[Sample]) -> bool:
    others = [other for other in samples if other.tiers == sample.tiers and other is not sample]
    row_s = [other.forward_s / other.rows for other in others]
    return bool(row_s) and sample.forward_s / sample.rows > _WARM_UP_FACTOR * median(row_s)


@dataclass(frozen=True)
class Rates:
    """What rows and bytes cost, estimated as sums over sums (every row counts the same).

    Attributes:
        samples: at least one, without warm-up.
        write_byte_s: seconds to make a byte durable.
    """

    samples: Sequence[Sample]
    write_byte_s: float

    @cached_property
    def _by_tiers(self) -> dict[Tiers, list[Sample]]:
        tiers = dict.fromkeys(sample.tiers for sample in self.samples)
        return {key: [sample for sample in self.samples if sample.tiers == key] for key in tiers}

    @cached_property
    def _forward_row_s(self) -> dict[Tiers, float]:
        return {tiers: _ratio(like, "forward_s", "rows") for tiers, like in self._by_tiers.items()}

    @cached_property
    def _mean_row_s(self) -> float:
        return _ratio(self.samples, "forward_s", "rows")

    @cached_property
    def _hash_byte_s(self) -> float:
        return _ratio(self.samples, "hash_s", "n_bytes")

    def fill_s(self, tiers: Tiers, rows: int, n_bytes: float) -> float:
        """Seconds of forward passes and digests: forward passes at the rate of samples with the same tiers, at that of
        all samples where there are none; rows that no tier holds take no time."""
        if not tiers:
            return 0.0
        return rows * self._forward_row_s.get(tiers, self._mean_row_s) + n_bytes * self._hash_byte_s

    def half_width_s(self, layout: Layout) -> float | None:
        """Half of the 95 % prediction interval of a whole run's seconds; None where the samples show no spread.

        Student's t, on the samples' seconds about their mean a row (for each set of tiers, one variance for all): the
        mean is uncertain, and the run's own samples will scatter too. They are taken for independent, so that slow
        drift, a throttled or a shared machine, is *not* covered.
        """
        dof = len(self.samples) - len(self._by_tiers)
        if dof < 1:
            return None
        squares = 0.0
        for like in self._by_tiers.values():
            row_s = _ratio(like, "total_s", "rows")
            squares += sum((sample.total_s - row_s * sample.rows) ** 2 for sample in like)
        rows: Counter[Tiers] = Counter()
        for shard in range(layout.n_shards):
            if tiers := frozenset(layout.shard_tiers(shard)):
                rows[tiers] += len(layout.shard_rows_range(shard))
        sample_rows = sum(sample.rows for sample in self.samples) / len(self.samples)
        variance = 0.0  # of the sum, in units of one sample's
        for tiers, n_rows in rows.items():
            n_samples = n_rows / sample_rows
            variance += n_samples + n_samples**2 / len(self._by_tiers.get(tiers, self.samples))
        return student_t(dof) * math.sqrt(squares / dof * variance)


def _ratio(samples: Sequence[Sample], numerator: str, denominator: str) -> float:
    return sum(getattr(sample, numerator) for sample in samples) / sum(
        getattr(sample, denominator) for sample in samples
    )


def shard_seconds(layout: Layout, row_bytes: Mapping[str, float], rates: Rates) -> tuple[list[float], float]:
    """Active seconds of each shard, and those of the last writes, one a part, that nothing hides.

    Args:
        layout: of the run to be forecast.
        row_bytes: stored bytes a row by tier.
        rates: what was measured.
    """
    seconds, last_write_s = [], 0.0
    for part in layout.parts:
        write_s = 0.0
        for shard in layout.part_shards(part):
            tiers = frozenset(layout.shard_tiers(shard))
            n_bytes = sum(len(layout.tier_shard_rows(tier, shard)) * row_bytes[tier] for tier in tiers)
            seconds.append(max(rates.fill_s(tiers, len(layout.shard_rows_range(shard)), n_bytes), write_s))
            write_s = n_bytes * rates.write_byte_s
        last_write_s += write_s
    return seconds, last_write_s


def forecast(plan: Plan, row_bytes: Mapping[str, float], rates: Rates | None) -> dict[str, Any]:
    """Forecast a run.

    Args:
        plan: the run, or what it would be with other rows.
        row_bytes: stored bytes a row by tier.
        rates: what was measured; None gives no hours.

    Returns:
        Plain JSON: ``rows``, ``n_shards``, ``n_files``; ``hours`` with ``hours_low`` and ``hours_high`` (95 %);
        ``gib``, the same by tier, and ``one_layer_gib``: of a single site, all rows, all tokens.
    """
    layout = plan.layout
    hours = half = None
    if rates is not None:
        seconds, last_write_s = shard_seconds(layout, row_bytes, rates)
        hours, half_s = (sum(seconds) + last_write_s) / 3600, rates.half_width_s(layout)
        half = None if half_s is None else half_s / 3600
    tier_bytes = {tier: rows * row_bytes[tier] for tier, rows in layout.tier_rows.items()}
    return {
        "rows": layout.n_rows,
        "n_shards": layout.n_shards,
        "n_files": sum(len(layout.shard_tiers(shard)) for shard in range(layout.n_shards)),
        "hours": hours,
        "hours_low": None if hours is None or half is None else max(0.0, hours - half),
        "hours_high": None if hours is None or half is None else hours + half,
        "gib": sum(tier_bytes.values()) / GIB,
        "tiers": {tier: {"rows": layout.tier_rows[tier], "gib": n_bytes / GIB} for tier, n_bytes in tier_bytes.items()},
        "one_layer_gib": _one_layer_bytes(plan) / GIB,
    }


def _one_layer_bytes(plan: Plan) -> int:
    width = plan.facts["architecture"]["width"]
    shape, n_rows = next(iter(plan.shapes(dict.fromkeys(plan.sites, width)).values())), plan.layout.n_rows
    return replace(shape, widths={"block.0": width}, reduce="none").n_bytes(n_rows, plan.n_tokens(range(n_rows)))


def student_t(dof: int) -> float:
    """The 97.5 % quantile of Student's t; above ten degrees of freedom by Cornish and Fisher's expansion."""
    if dof <= len(_STUDENT_T):
        return _STUDENT_T[dof - 1]
    z = NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * dof) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * dof**2)


def hours_text(found: Mapping[str, Any]) -> str:
    """The hours of a forecast with their interval, as text: minutes or seconds where they are few."""
    hours, low, high = (found[name] for name in ("hours", "hours_low", "hours_high"))
    if hours is None:
        return "unknown"
    unit, factor = ("h", 1) if hours >= 1 else ("min", 60) if hours >= 1 / 60 else ("s", 3600)
    told = f"{hours * factor:.1f} {unit}"
    return told if low is None else f"{told} ({low * factor:.1f} to {high * factor:.1f})"
