"""Figures, from the tables alone. Readable in black and white: shape and fill carry the meaning, colour only helps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import pandas as pd

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

_BLUE, _ORANGE = "#0072b2", "#d55e00"  # of Okabe and Ito's palette, told apart by colour-blind people


def plot_anchor_batches(table: pd.DataFrame, paths: Sequence[Path]) -> None:
    """Draw how many rows stay bit-exact, and by how much the others differ, at each batch size.

    Args:
        table: ``anchor_batches.csv``: batch_rows, rows_exact, rows, max_abs_diff, mean_rel_diff.
        paths: files to write; the suffix chooses the format.
    """
    figure, (exact, differ) = plt.subplots(2, 1, figsize=(6.4, 5.2), sharex=True, layout="constrained")
    places = range(len(table))
    exact.bar(places, table["rows"], color="white", edgecolor="black", label="rows tried")
    exact.bar(places, table["rows_exact"], color=_BLUE, edgecolor="black", hatch="//", label="rows bit-exact")
    for place, row in zip(places, table.itertuples(), strict=True):
        exact.annotate(f"{row.rows_exact}/{row.rows}", (place, row.rows), ha="center", va="bottom")
    exact.set_ylabel("rows")
    exact.set_ylim(0, table["rows"].max() * 1.45)
    exact.legend(loc="upper left", ncols=2, frameon=False)
    exact.set_title("Stored rows, computed again in batches of another size")

    differ.plot(places, table["max_abs_diff"], "o-", color=_ORANGE, label="largest absolute difference")
    differ.plot(places, table["mean_rel_diff"], "s--", color=_BLUE, label="mean relative difference")
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
    _save(figure, paths)


def _save(figure: Figure, paths: Sequence[Path]) -> None:
    for path in paths:
        # No dates, and stable element names: the same table gives the same file.
        with plt.rc_context({"svg.hashsalt": "anchorage"}):
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
