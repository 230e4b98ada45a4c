"""The figure of the durability lab: where bytes wait and which crash wipes them, and which recipe survives what."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from anchorage.durability.findings import cell_text
from anchorage.figures.style import GREY, ORANGE, plt, save_figure


def plot_durability(layers: pd.DataFrame, survival: pd.DataFrame, paths: Sequence[Path]) -> None:
    """Draw both tables as fields: white where nothing was lost, hatched where something was, grey where it was not run.

    Args:
        layers: a line a place in which bytes wait, a column a crash; a cell is ``kept``, ``wiped`` or ``not run``.
        survival: a line a recipe, a column a crash; a cell is (bad, judged), counts of points, or ``not run``, or
            None where there is no such case.
        paths: files to write; the suffix chooses the format.
    """
    height = 1.9 + 0.34 * (len(layers) + len(survival))
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(2.1 + 1.15 * len(survival.columns), height), height_ratios=[len(layers) + 1, len(survival) + 1]
    )
    figure.subplots_adjust(1.9 / figure.get_figwidth(), 0.02, 0.985, 1 - 0.55 / height, hspace=2.4 / height)
    _draw_fields(above, layers.map(lambda cell: (cell, cell == "wiped", cell == "not run")))
    _draw_fields(below, survival.map(lambda cell: (cell_text(cell), _lost(cell), not isinstance(cell, tuple))))
    above.set_title("Where bytes wait, and what a crash leaves there", loc="left", fontsize="medium", fontweight="bold")
    below.set_title(
        "Points at which something was torn or lost, of those judged", loc="left", fontsize="medium", fontweight="bold"
    )
    save_figure(figure, paths)


def _lost(cell: tuple[int, int] | str | None) -> bool:
    return isinstance(cell, tuple) and cell[0] > 0


def _draw_fields(axis: Axes, cells: pd.DataFrame) -> None:
    """Draw cells of (text, is bad, is missing)."""
    for row, (_, line) in enumerate(cells.iterrows()):
        for column, (text, is_bad, is_missing) in enumerate(line):
            axis.add_patch(
                Rectangle(
                    (column, row),
                    1,
                    1,
                    facecolor="0.9" if is_missing else "white",
                    edgecolor=ORANGE if is_bad else GREY,
                    hatch="////" if is_bad else None,
                    linewidth=0.8,
                    alpha=0.55 if is_bad else 1,
                )
            )
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1} if is_bad else None
            axis.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize="small", bbox=box)
    axis.set_xlim(0, len(cells.columns))
    axis.set_ylim(len(cells), 0)
    axis.set_xticks([place + 0.5 for place in range(len(cells.columns))], cells.columns, fontsize="small")
    axis.set_yticks([place + 0.5 for place in range(len(cells))], cells.index, fontsize="small")
    axis.xaxis.tick_top()
    axis.tick_params(length=0)
    for spine in axis.spines.values():
        spine.set_visible(False)
