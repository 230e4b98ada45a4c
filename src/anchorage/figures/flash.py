"""The figure of what an SSD does with writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes

from anchorage.figures.style import BLUE, GREY, ORANGE, plt, save_figure

_LOADS = {"random": (ORANGE, "o"), "delete-then-write": (BLUE, "s"), "sequential": (GREY, "^")}
_TRIMS = {False: "--", True: "-"}


def plot_flash(table: pd.DataFrame, paths: Sequence[Path]) -> None:
    """Draw write amplification against how full the drive is: a panel a spare factor, a line a load.

    Args:
        table: ``flash.csv``: load, trim, fill, spare_factor, write_amplification, analytic.
        paths: files to write; the suffix chooses the format.
    """
    spares = sorted(table["spare_factor"].unique())
    figure, panels = plt.subplots(1, len(spares), figsize=(9, 4.8), sharey=True, squeeze=False, layout="constrained")
    for spare, axis in zip(spares, panels[0], strict=True):
        _draw_loads(axis, table[table["spare_factor"] == spare])
        axis.set_title(f"{spare:.0%} of the flash is spare", loc="left", fontsize="medium")
        axis.set_xlabel("live data by size of the drive")
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axis.set_ylim(bottom=0)
        axis.grid(color="0.9", linewidth=0.6)
        axis.set_axisbelow(True)
    panels[0, 0].set_ylabel("write amplification")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False, fontsize="small")
    save_figure(figure, paths)


def _draw_loads(axis: Axes, table: pd.DataFrame) -> None:
    for load, (colour, mark) in _LOADS.items():
        for trim, line in _TRIMS.items():
            rows = table[(table["load"] == load) & (table["trim"] == trim)].sort_values("fill")
            fill = "white" if not trim else colour
            label = f"{load}, {'TRIM' if trim else 'no TRIM'}"
            axis.plot(
                rows["fill"],
                rows["write_amplification"],
                linestyle=line,
                marker=mark,
                color=colour,
                markerfacecolor=fill,
                markersize=4 if trim else 7,
                label=label,
            )
    calculated = table[table["load"] != "sequential"].dropna(subset="analytic")
    for n, (_, rows) in enumerate(calculated.groupby(["load", "trim"])):
        rows = rows.sort_values("fill")
        label = "" if n else "endless drive, by calculation"
        axis.plot(rows["fill"], rows["analytic"], color="black", linewidth=0.7, zorder=3, label=label)
