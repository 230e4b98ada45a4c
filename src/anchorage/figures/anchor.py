"""The figure of the anchor: which batch sizes stay exact."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from anchorage.figures.style import BLUE, ORANGE, plt, save_figure


def plot_anchor_batches(table: pd.DataFrame, paths: Sequence[Path]) -> None:
    """Draw how many rows stay bit-exact, and by how much the others differ, at each batch size.

    Args:
        table: ``anchor_batches.csv``: batch_rows, rows_exact, rows, max_abs_diff, mean_rel_diff.
        paths: files to write; the suffix chooses the format.
    """
    figure, (exact, differ) = plt.subplots(2, 1, figsize=(6.4, 5.2), sharex=True, layout="constrained")
    places = range(len(table))
    exact.bar(places, table["rows"], color="white", edgecolor="black", label="rows tried")
    exact.bar(places, table["rows_exact"], color=BLUE, edgecolor="black", hatch="//", label="rows bit-exact")
    for place, row in zip(places, table.itertuples(), strict=True):
        exact.annotate(f"{row.rows_exact}/{row.rows}", (place, row.rows), ha="center", va="bottom")
    exact.set_ylabel("rows")
    exact.set_ylim(0, table["rows"].max() * 1.45)
    exact.legend(loc="upper left", ncols=2, frameon=False)
    exact.set_title("Stored rows, computed again in batches of another size")

    differ.plot(places, table["max_abs_diff"], "o-", color=ORANGE, label="largest absolute difference")
    differ.plot(places, table["mean_rel_diff"], "s--", color=BLUE, label="mean relative difference")
    # Zero is the point of the figure, so it must have a place on the axis: linear below the smallest difference.
    differences = pd.concat([table["max_abs_diff"], table["mean_rel_diff"]])
    smallest = differences[differences > 0].min()
    if differences.max() > 0:
        differ.set_yscale("symlog", linthresh=smallest, linscale=0.6)
        differ.set_yticks([0, *(10.0**power for power in range(math.ceil(math.log10(smallest)), 2))])
    differ.set_ylim(0, differences.max() * 3 or 1)
    differ.set_xticks(places, [str(size) for size in table["batch_rows"]])
    differ.set_xlabel("rows of a batch")
    differ.set_ylabel("difference (0 is bit-exact)")
    differ.legend(loc="best", frameon=False)
    save_figure(figure, paths)
