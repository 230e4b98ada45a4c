"""Does memory grow with the rows? The verdict on the capture's batch log.

The slope is that of Theil and Sen: the median slope over all pairs of readings, which single outliers do not move. Only
pairs within one process are taken, since each process begins at a level of its own: with processes for seasons this is
the seasonal Kendall slope of Hirsch, Slack and Smith, "Techniques of trend analysis for monthly water quality data"
(1982). Its interval comes from the variance of Kendall's S (Sen 1968, for seasons: Gilbert, "Statistical methods for
environmental pollution monitoring", 1987).

An allocator goes in steps and stays, so that a reading says little that the one before did not say. Kendall's variance
is therefore raised by what the residuals' lag-1 correlation r takes from the number of readings, (1 + r) / (1 - r): Yue
and Wang, "The Mann-Kendall test modified by effective sample size" (2004). Not guaranteed: that the growth goes on as
it was. A slope above zero is no leak until it adds up.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd

# Growth that matters. It is what a machine that holds a model at all can spare; and over the thousand rows of a short
# run it is 5 MiB of a forecast for 50,000, about what allocators gain and lose by themselves.
MATTERS_MIB = 256
# Both sets of shard buffers are first touched in the first two shards, and the libraries' pools fill in these batches.
WARMUP_SHARDS, WARMUP_BATCHES = 2, 16
MIN_BATCHES = 8  # fewer readings say nothing of a trend
_MAX_POINTS = 1000  # of one series; of several so many that pairs are as many
_MAX_CORRELATION = 0.99
_Z95 = NormalDist().inv_cdf(0.975)

REMEDY = """What helps:
  - look at memory.svg: a leak climbs steadily, an allocator in a few steps;
  - look for hooks, lists or autograd graphs that outlive a batch;
  - more capture.parts: each is a job that begins with fresh memory. So does a run stopped and started again;
  - memory.on_leak: stop fails the run, warn says this."""

Series = tuple[np.ndarray, np.ndarray]


def sen_slope(series: Sequence[Series], inflation: float = 1.0) -> tuple[float, float, float]:
    """Median slope over all pairs within each series, and its 95 % interval.

    Args:
        series: x, strictly increasing, and y of each; at least one of two points.
        inflation: of Kendall's variance, for readings that depend on one another.

    Returns:
        slope, low, high; of one series, those of ``scipy.stats.theilslopes``.
    """
    slopes = np.sort(np.concatenate([_pair_slopes(x, y) for x, y in series]))
    half_width = _Z95 * math.sqrt(inflation * sum(_kendall_variance(y) for _, y in series))
    low = max(round((len(slopes) - half_width) / 2) - 1, 0)
    high = min(round((len(slopes) + half_width) / 2), len(slopes) - 1)
    return float(np.median(slopes)), float(slopes[low]), float(slopes[high])


def _pair_slopes(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    first, second = np.triu_indices(len(x), k=1)
    return (y[second] - y[first]) / (x[second] - x[first])


def _kendall_variance(y: np.ndarray) -> float:
    ties = np.unique(y, return_counts=True)[1]
    n = len(y)
    return (n * (n - 1) * (2 * n + 5) - np.sum(ties * (ties - 1) * (2 * ties + 5))) / 18


def variance_inflation(series: Sequence[Series], slope: float) -> float:
    """How many readings say as much as one independent one, by the lag-1 correlation of what the slope leaves."""
    residuals = [(y - slope * x) - np.median(y - slope * x) for x, y in series]
    total = sum(float(rest @ rest) for rest in residuals)
    correlation = sum(float(rest[1:] @ rest[:-1]) for rest in residuals) / total if total else 0.0
    correlation = min(max(correlation, 0.0), _MAX_CORRELATION)
    return (1 + correlation) / (1 - correlation)


def judge_memory(
    batches: pd.DataFrame, shards: pd.DataFrame, *, key: str, forecast_rows: int, on_leak: str
) -> dict[str, Any]:
    """Judge whether memory grows enough to matter.

    Args:
        batches: ``memory_batches.csv``.
        shards: ``memory.csv``: memory_log_s, shard_s.
        key: the capture key.
        forecast_rows: rows to which the growth is carried on, as if one process captured them all.
        on_leak: ``warn`` or ``stop``.

    Returns:
        The fields of ``memory.json``. ``leak`` is None if no process has enough batches to be judged.
    """
    settled = [_settled(lines) for _, lines in batches.groupby("process", sort=False)]
    judged = [lines for lines in settled if len(lines) >= MIN_BATCHES]
    measures = {name: _judge(name, judged, forecast_rows) for name in _measures(batches)} if judged else {}
    worst = max(measures, key=lambda name: measures[name]["growth_mib_at_forecast_low"], default=None)
    figures = measures[worst] if worst else dict.fromkeys(_FIGURES)
    leak, reason = figures["leak"], _reason(worst, figures, forecast_rows)
    told = textwrap.fill(reason, 100, initial_indent="  ", subsequent_indent="  ")
    logged = shards.dropna(subset=["memory_log_s"])
    return {
        "key": key,
        "ok": not (leak and on_leak == "stop"),
        "measure": worst,
        **{name: figures[name] for name in _FIGURES},
        "forecast_rows": forecast_rows,
        "matters_mib": MATTERS_MIB,
        "n_series": len(judged),
        "n_batches": sum(map(len, judged)),
        "n_warmup": len(batches) - sum(map(len, settled)),
        "on_leak": on_leak,
        "memory_log_share": float(logged["memory_log_s"].sum() / logged["shard_s"].sum()) if len(logged) else None,
        "reason": reason,
        "warning": f"WARNING: MEMORY LEAK\n{told}\n{REMEDY}" if leak else None,
        "faults": [reason] if leak and on_leak == "stop" else [],
        "measures": measures,
    }


_FIGURES = (
    "leak", "slope_mib_per_1000_rows", "slope_low", "slope_high",
    "growth_mib_at_forecast", "growth_mib_at_forecast_low", "growth_mib_at_forecast_high",
)  # fmt: skip
_NAMES = {
    "anonymous_mib": "anonymous memory",
    "rss_mib": "resident memory",
    "cuda_allocated_mib": "allocated GPU memory",
}


def _settled(lines: pd.DataFrame) -> pd.DataFrame:
    """A process's readings after its warm-up, in the order in which they were made."""
    lines = lines.sort_values("process_rows")
    in_first_shards = lines["shard"].isin(lines["shard"].unique()[:WARMUP_SHARDS]).sum()
    return lines[max(in_first_shards, WARMUP_BATCHES) :]


def _measures(batches: pd.DataFrame) -> list[str]:
    """The columns to judge: memory that no file can give back, and a GPU's."""
    host = "rss_mib" if batches["anonymous_mib"].isna().any() else "anonymous_mib"
    return [host, *(["cuda_allocated_mib"] if batches["cuda_allocated_mib"].notna().all() else [])]


def _judge(measure: str, judged: Sequence[pd.DataFrame], forecast_rows: int) -> dict[str, Any]:
    """One measure's figures, and the ends of a line through each series with the common slope, for the plot."""
    n_points = max(MIN_BATCHES, int(_MAX_POINTS / math.sqrt(len(judged))))
    thinned = [_thinned(lines["process_rows"], lines[measure], n_points) for lines in judged]
    slope, low, high = sen_slope(thinned, variance_inflation(thinned, sen_slope(thinned)[0]))
    growth = {
        f"growth_mib_at_forecast{end}": round(value * forecast_rows / 1000, 2)
        for end, value in (("", slope), ("_low", low), ("_high", high))
    }
    trend = []
    for lines, (x, y) in zip(judged, thinned, strict=True):
        level = np.median(y) - slope * np.median(x)
        rows = [int(lines["rows_total"].iloc[end]) for end in (0, -1)]
        trend.append({"rows_total": rows, "mib": [round(float(level + slope * x[end]), 2) for end in (0, -1)]})
    slopes = {"slope_mib_per_1000_rows": slope, "slope_low": low, "slope_high": high}
    leak = growth["growth_mib_at_forecast_low"] > MATTERS_MIB
    return {"leak": leak} | {name: round(value, 5) for name, value in slopes.items()} | growth | {"trend": trend}


def _thinned(rows: pd.Series, memory: pd.Series, n_points: int) -> Series:
    kept = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), n_points)).round().astype(int))
    return rows.to_numpy(float)[kept] / 1000, memory.to_numpy(float)[kept]


def _reason(measure: str | None, figures: dict[str, Any], forecast_rows: int) -> str:
    if measure is None:
        return (
            f"too short: no process captured {MIN_BATCHES} batches after its warm-up (its first "
            f"{WARMUP_SHARDS} shards, and at least {WARMUP_BATCHES} batches)"
        )
    slope, low, high, growth, growth_low, growth_high = (figures[name] for name in _FIGURES[1:])
    found = (
        f"{_NAMES[measure]} grows by {slope:.3g} MiB per 1,000 rows (95 % interval {low:.3g} to {high:.3g}), "
        f"which adds up to {growth:,.0f} MiB ({growth_low:,.0f} to {growth_high:,.0f}) at {forecast_rows:,} rows"
    )
    if figures["leak"]:
        return f"{found}: even the lower end is over the {MATTERS_MIB} MiB that matter"
    if growth_high > MATTERS_MIB:
        return f"{found}: a leak is not shown, nor is one of over {MATTERS_MIB} MiB excluded; more rows would tell"
    return f"{found}: even the upper end is not over the {MATTERS_MIB} MiB that matter"
