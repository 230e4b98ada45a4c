"""The figure of memory over the rows: does it grow?"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.markers import TICKUP

from anchorage.figures.style import BLUE, ORANGE, plt, save_figure

_PANELS = [
    {
        "peak_mib": ("highest resident so far", {"color": "black", "linestyle": ":"}),
        "rss_mib": ("resident", {"color": ORANGE, "linestyle": "--"}),
        "anonymous_mib": ("anonymous (no file behind it)", {"color": BLUE, "linestyle": "-"}),
    },
    {
        "cuda_peak_mib": ("GPU, highest allocated so far", {"color": "black", "linestyle": ":"}),
        "cuda_allocated_mib": ("GPU, allocated", {"color": BLUE, "linestyle": "-"}),
    },
]
_TREND = ("rows_total", "mib")
_MAX_LABELS = 12
_FEW = 60  # points that can be told apart


def plot_memory(batches: pd.DataFrame, shards: pd.DataFrame, verdict: Mapping[str, Any], paths: Sequence[Path]) -> None:
    """Draw memory after each batch from zero up, a line broken where another process went on, and the slope judged.

    Args:
        batches: ``memory_batches.csv``: part, process, rows_total, rss_mib, anonymous_mib, peak_mib,
            cuda_allocated_mib, cuda_peak_mib; in the order of the rows. What is empty is not drawn.
        shards: ``memory.csv``: the same columns; drawn where there are no batches.
        verdict: ``memory.json``: leak, reason, and of each of its measures the slope and the ends of its trends.
        paths: files to write; the suffix chooses the format.
    """
    lines = batches if len(batches) else shards
    n_panels = 2 if lines["cuda_allocated_mib"].notna().any() else 1
    figure, grid = plt.subplots(
        n_panels, 1, figsize=(8.0, 1.8 + 3.2 * n_panels), sharex=True, squeeze=False, layout="constrained"
    )
    panels = list(grid[:, 0])
    for axis, columns in zip(panels, _PANELS[:n_panels], strict=True):
        _draw_lines(axis, lines, columns)
        _draw_trends(axis, {name: verdict["measures"][name] for name in columns if name in verdict["measures"]})
        highest = lines[list(columns)].max(axis=None)
        axis.set_ylim(0, 1.15 * highest if highest > 0 else 1)
        axis.set_ylabel("MiB")
        _mark_shards(axis, shards, lines)
        axis.legend(loc="lower center", ncols=2, fontsize="small", framealpha=0.9)
    panels[-1].set_xlim(0, max(1, lines["rows_total"].max()) if len(lines) else 1)
    panels[-1].set_xlabel("rows of the run")
    found = {True: "Memory leaks", False: "No leak shown", None: "Not judged"}[verdict["leak"]]
    title = textwrap.fill(f"{found}: {verdict['reason']}", 105)
    panels[0].set_title(title, loc="left", fontsize="small", parse_math=False)
    save_figure(figure, paths)


def _draw_lines(axis: Axes, lines: pd.DataFrame, columns: Mapping[str, tuple[str, dict[str, Any]]]) -> None:
    """A line a column; a gap before each reading of another process than the one before."""
    breaks = np.flatnonzero(_changes(lines["process"]))
    rows = np.insert(lines["rows_total"].to_numpy(float), breaks, np.nan)
    marker = "." if len(lines) < _FEW else None
    for name, (label, style) in columns.items():
        if lines[name].notna().any():
            values = np.insert(lines[name].to_numpy(float), breaks, np.nan)
            axis.plot(rows, values, label=label, linewidth=1.4, marker=marker, markersize=4, **style)


def _draw_trends(axis: Axes, measures: Mapping[str, Mapping[str, Any]]) -> None:
    for measure in measures.values():
        slope, low, high = (measure[name] for name in ("slope_mib_per_1000_rows", "slope_low", "slope_high"))
        label = f"slope after warm-up: {slope:.3g} MiB per 1,000 rows ({low:.3g} to {high:.3g})"
        # One line with a gap after each series, so that the legend has it once.
        rows, mib = ([value for trend in measure["trend"] for value in (*trend[name], np.nan)] for name in _TREND)
        axis.plot(rows, mib, "k", linewidth=4, alpha=0.35, solid_capstyle="butt", label=label)


def _mark_shards(axis: Axes, shards: pd.DataFrame, lines: pd.DataFrame) -> None:
    """Small marks on the axis where shards end, lines where parts begin, and where a process went on in one."""
    ends = shards["rows_total"]
    axis.plot(
        ends, np.zeros(len(ends)), linestyle="", marker=TICKUP, color="black", markersize=6, label="end of a shard"
    )
    # A reading is of its batch's end; what comes after a boundary begins where the reading before it ended.
    begins = lines["rows_total"].shift(fill_value=0)
    new_part = _changes(lines["part"])
    resumed = _changes(lines["process"]) & ~new_part
    for where, line in ((new_part, "-"), (resumed, "-.")):
        for row in begins[where]:
            axis.axvline(row, color="black", linestyle=line, linewidth=0.9)
    texts = [(row, f"part {part}") for row, part in zip(begins[new_part], lines["part"][new_part], strict=True)]
    texts += [(0, f"part {lines['part'].iloc[0]}")] if texts else []
    texts += [(row, "resumed") for row in begins[resumed]]
    style: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "va": "top"}
    style["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    for row, text in sorted(texts)[:: max(1, math.ceil(len(texts) / _MAX_LABELS))]:
        axis.annotate(text, (row, 0.97), (4, 0), **style)


def _changes(values: pd.Series) -> pd.Series:
    """Where a value is another than the one before it."""
    changes = values != values.shift()
    changes.iloc[:1] = False
    return changes
