"""The figure of the outlier dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from anchorage.figures.style import BLUE, GREY, ORANGE, legend_above, save_figure, site_panels

_FLOAT16_MAX = 65_504
_MAX_NAMED = 2


def plot_outliers(table: pd.DataFrame, dimensions: pd.DataFrame, paths: Sequence[Path]) -> None:
    """Draw how large each site's values are, and how many dimensions stand out. What is 0 is written at the bottom.

    Args:
        table: ``outliers.csv``: site, reduce, rms, median_max_abs, max_abs, max_dimension, n_outliers; a line a site,
            in running order.
        dimensions: ``outlier_dimensions.csv``: site, dimension, max_abs, outlier.
        paths: files to write; the suffix chooses the format.
    """
    names = table["site"] + np.where(table["reduce"] == "none", "", " (" + table["reduce"] + ")")
    figure, (sizes, counts) = site_panels(list(names), 6.4, [3, 1])
    _draw_sizes(sizes, table, dimensions[dimensions["outlier"].astype(bool)])
    counts.bar(np.arange(len(table)), table["n_outliers"], color="white", edgecolor="black", linewidth=0.8, hatch="///")
    title = "outlier dimensions: largest |x| over 10 times the median dimension's"
    counts.set_title(title, loc="left", fontsize="medium")
    counts.set_ylabel("dimensions")
    counts.set_ylim(0, max(1, table["n_outliers"].max()) * 1.15)
    counts.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    legend_above(figure, [sizes])
    save_figure(figure, paths)


def _draw_sizes(axis: Axes, table: pd.DataFrame, outliers: pd.DataFrame) -> None:
    """Draw the sites' sizes on a logarithmic axis, and name the largest few outlier dimensions."""
    places = np.arange(len(table))
    sizes = table[["max_abs", "median_max_abs", "rms"]].astype(float)
    shown = sizes.where(sizes > 0)  # a logarithmic axis has no place for 0
    for place in np.flatnonzero(shown.isna().any(axis=1)):
        axis.annotate("0", (place, 0.01), xycoords=("data", "axes fraction"), ha="center", va="bottom")
    axis.set_yscale("log")
    axis.set_ylim(shown.fillna(_FLOAT16_MAX).min(axis=None) / 3, max(_FLOAT16_MAX, sizes.max(axis=None)) * 4)
    axis.set_ylabel("size of the values x")

    axis.axhline(_FLOAT16_MAX, color="black", linestyle="--", linewidth=1.2, label="float16's limit, 65,504")
    axis.plot(places, shown["max_abs"], "^-", color=ORANGE, markersize=6, label="largest |x|")
    outliers = outliers.merge(table[["site", "max_dimension"]].assign(place=places), on="site")
    further = outliers[outliers["dimension"] != outliers["max_dimension"]]
    if len(further):
        label = "further outlier dimensions' largest |x|"
        axis.plot(further["place"], further["max_abs"], "_", color="black", markersize=7, label=label)
    label = "median dimension's largest |x|"
    axis.plot(places, shown["median_max_abs"], "s-", color=BLUE, markerfacecolor="white", markersize=4, label=label)
    axis.plot(places, shown["rms"], "x:", color=GREY, markersize=5, label="root mean square")

    largest = outliers.sort_values(["max_abs", "place"], ascending=[False, True], kind="stable")
    for row in largest.drop_duplicates("dimension")[:_MAX_NAMED].itertuples():
        side = "left" if row.place < len(table) / 2 else "right"
        text = f"dimension {row.dimension}"
        axis.annotate(text, (row.place, row.max_abs), (0, 4), textcoords="offset points", ha=side, fontsize="small")
