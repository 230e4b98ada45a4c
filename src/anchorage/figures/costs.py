"""The figure of the costs: time and peak memory of the cases of each comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from anchorage.costs.comparison import PEAK, SECONDS
from anchorage.costs.sentences import device_peaks
from anchorage.figures.style import BLUE, ORANGE, plt, save_figure


def plot_costs(table: pd.DataFrame, paths: Sequence[Path]) -> None:
    """Draw, a row a comparison, each case's time over the first case's of the same round, and its peak memory.

    Args:
        table: ``costs.csv``: comparison, case, round, seconds_per_batch, peak_mib, cuda_peak_mib. Comparisons, and the
            cases of each, in the order in which they are drawn.
        paths: files to write; the suffix chooses the format.
    """
    table = device_peaks(table)
    names = list(table["comparison"].unique())
    n_cases = [table.loc[table["comparison"] == name, "case"].nunique() for name in names]
    height = 0.6 + 0.6 * len(names) + 0.36 * sum(n_cases)
    figure, panels = plt.subplots(len(names), 2, figsize=(9.5, height), height_ratios=n_cases, squeeze=False)
    # Laid out by hand: of so many panels the constrained layout comes out another in its last bits, run by run.
    space = 0.6 * len(names) / (0.36 * sum(n_cases))
    figure.subplots_adjust(0.17, 0.55 / height, 0.98, 1 - 0.65 / height, wspace=0.06, hspace=space)
    for name, (time, memory) in zip(names, panels, strict=True):
        rows = table[table["comparison"] == name]
        cases = list(rows["case"].unique())
        seconds = rows.pivot(index="round", columns="case", values=SECONDS)
        _draw_cases(time, seconds.div(seconds[cases[0]], axis=0), cases)
        time.axvline(1, color="black", linestyle="--", linewidth=1, zorder=1)
        _draw_cases(memory, rows.pivot(index="round", columns="case", values=PEAK), cases)
        memory.tick_params(labelleft=False)
        time.set_title(name, loc="left", fontsize="medium", fontweight="bold")
    where = "GPU" if table.attrs["peak_of"] == "cuda" else "resident"
    panels[-1, 0].set_xlabel("time of a batch, over the first case's of the same round")
    panels[-1, 1].set_xlabel(f"peak {where} memory of the batches, MiB")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="upper center", ncols=2, frameon=False)
    save_figure(figure, paths)


def _draw_cases(axis: Axes, values: pd.DataFrame, cases: Sequence[str]) -> None:
    """Draw every round of each case, and the median, on an axis that begins at zero."""
    for place, case in enumerate(cases):
        rounds = values[case].dropna().to_numpy(dtype=float)
        # Side by side from the first round to the last: equal values stay apart, and a drift is seen.
        heights = place + np.linspace(-0.14, 0.14, len(rounds)) if len(rounds) > 1 else np.full(len(rounds), place)
        label = None if place else "a round"
        axis.plot(rounds, heights, "o", color=BLUE, markerfacecolor="white", markersize=4, label=label, zorder=3)
        if len(rounds):
            label = None if place else "median"
            axis.plot(np.median(rounds), place, "|", color=ORANGE, markersize=20, markeredgewidth=2.5, label=label)
    axis.set_yticks(range(len(cases)), cases)
    axis.set_ylim(len(cases) - 0.5, -0.5)
    axis.set_xlim(0, max(1.0, float(np.nan_to_num(values.max(axis=None)))) * 1.08)
    axis.grid(axis="x", color="0.9", linewidth=0.6)
    axis.set_axisbelow(True)
