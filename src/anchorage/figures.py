"""Figures, from the tables alone. Readable in black and white: shape and fill carry the meaning, colour only helps."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

_BLUE, _ORANGE = "#0072b2", "#d55e00"  # of Okabe and Ito's palette, told apart by colour-blind people
_GREY = "#767676"
_FLOAT16_MAX = 65_504
_MAX_LABELS = 40  # more site names than that cannot be read side by side
_UNLIKE_CHANCE = 0.005  # a look-up nearer to chance says nothing, and would hide chance's line
_MAX_NAMED = 2


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


def plot_sweep(table: pd.DataFrame, paths: Sequence[Path]) -> None:
    """Draw each task's test accuracy by site, with its controls, a panel a task.

    Args:
        table: ``sweep.csv``: task, site, site_index, accuracy, low, high, shuffled_accuracy, shuffled_low,
            shuffled_high, chance, position_only_accuracy, token_only_accuracy, n_train, n_test, and perhaps warning;
            a line a task and site. What is empty is not drawn.
        paths: files to write; the suffix chooses the format.
    """
    sites = list(table.sort_values("site_index", kind="stable")["site"].unique())
    tasks = list(table["task"].unique())
    figure, panels = _site_panels(sites, 1.7 + 2.5 * len(tasks), [1] * len(tasks))
    for axis, task in zip(panels, tasks, strict=True):
        lines = table[table["task"] == task].sort_values("site_index")
        _draw_task(axis, lines, sites)
        title = _task_title(task, lines, line_chars=int(figure.get_figwidth() * 11))
        axis.set_title(title, loc="left", fontsize="medium", parse_math=False)
    _legend(figure, panels)
    _save(figure, paths)


def _draw_task(axis: Axes, table: pd.DataFrame, sites: Sequence[str]) -> None:
    """Draw a task's lines of the sweep."""
    places = np.array([sites.index(site) for site in table["site"]])
    style: dict[str, Any] = {"elinewidth": 1.2, "capsize": 2, "markersize": 5, "zorder": 3}
    if len(sites) > _MAX_LABELS:
        style |= {"elinewidth": 0.8, "capsize": 0, "markersize": 3}
    probe = {"color": _BLUE, "fmt": "o-", "linewidth": 1.0, "label": "probe, simultaneous interval"}
    _draw_intervals(axis, places, table, "", style | probe)
    shuffled = {"color": _GREY, "fmt": "s", "markerfacecolor": "white", "label": "probe on shuffled labels, interval"}
    # Beside its site's mark, not on it: where nothing is to be found, the two are equal.
    _draw_intervals(axis, places + 0.25, table, "shuffled_", style | shuffled)
    chance = table["chance"].astype(float)
    _draw_level(axis, places, chance, "--", color="black", linewidth=1.2, label="chance")
    for column, what, line in (("token", "token id", ":"), ("position", "position", "-.")):
        values = table[f"{column}_only_accuracy"].astype(float)
        # Always right, it is the label itself, and would press all else to the floor.
        if ((values - chance).abs() > _UNLIKE_CHANCE).any() and (values < 1).any():
            label = f"best lookup by {what} alone"
            _draw_level(axis, places, values, line, color=_ORANGE, linewidth=1.4, label=label)
    axis.margins(y=0.12)
    axis.set_ylabel("test accuracy")


def _draw_intervals(axis: Axes, places: np.ndarray, table: pd.DataFrame, prefix: str, style: dict[str, Any]) -> None:
    middle, low, high = (table[f"{prefix}{name}"].astype(float) for name in ("accuracy", "low", "high"))
    errors = np.array([(middle - low).clip(lower=0), (high - middle).clip(lower=0)])
    axis.errorbar(places, middle, yerr=errors, **style)


def _draw_level(axis: Axes, places: np.ndarray, values: pd.Series, line: str, **style: Any) -> None:
    """Draw a line as long as the panel, so that it is seen where there is one site."""
    known = values.notna().to_numpy()
    if known.any():
        y = values[known].to_numpy()
        left, right = axis.get_xlim()
        axis.plot([left, *places[known], right], [y[0], *y, y[-1]], line, **style)


def _task_title(task: str, table: pd.DataFrame, *, line_chars: int) -> str:
    """A panel's title: the task, how many tokens there were at its sites, and what the sweep warns of."""
    counts = []
    for name in ("n_train", "n_test"):
        known = table[name].dropna().astype(int)
        counts.append(" to ".join(f"{count:,}" for count in sorted({known.min(), known.max()})) if len(known) else "?")
    lines = [f"{task}: {counts[0]} training, {counts[1]} test tokens"]
    if "warning" in table:
        warnings = table["warning"].dropna().astype(str).str.strip()
        lines += [f"Warning: {text}" for text in warnings.unique() if text]
    return "\n".join(textwrap.fill(line, line_chars) for line in lines)


def plot_outliers(table: pd.DataFrame, dimensions: pd.DataFrame, paths: Sequence[Path]) -> None:
    """Draw how large each site's values are, and how many dimensions stand out. What is 0 is written at the bottom.

    Args:
        table: ``outliers.csv``: site, reduce, rms, median_max_abs, max_abs, max_dimension, n_outliers; a line a site,
            in running order.
        dimensions: ``outlier_dimensions.csv``: site, dimension, max_abs, outlier.
        paths: files to write; the suffix chooses the format.
    """
    names = table["site"] + np.where(table["reduce"] == "none", "", " (" + table["reduce"] + ")")
    figure, (sizes, counts) = _site_panels(list(names), 6.4, [3, 1])
    _draw_sizes(sizes, table, dimensions[dimensions["outlier"].astype(bool)])
    counts.bar(np.arange(len(table)), table["n_outliers"], color="white", edgecolor="black", linewidth=0.8, hatch="///")
    title = "outlier dimensions: largest |x| over 10 times the median dimension's"
    counts.set_title(title, loc="left", fontsize="medium")
    counts.set_ylabel("dimensions")
    counts.set_ylim(0, max(1, table["n_outliers"].max()) * 1.15)
    counts.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    _legend(figure, [sizes])
    _save(figure, paths)


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
    axis.plot(places, shown["max_abs"], "^-", color=_ORANGE, markersize=6, label="largest |x|")
    outliers = outliers.merge(table[["site", "max_dimension"]].assign(place=places), on="site")
    further = outliers[outliers["dimension"] != outliers["max_dimension"]]
    if len(further):
        label = "further outlier dimensions' largest |x|"
        axis.plot(further["place"], further["max_abs"], "_", color="black", markersize=7, label=label)
    label = "median dimension's largest |x|"
    axis.plot(places, shown["median_max_abs"], "s-", color=_BLUE, markerfacecolor="white", markersize=4, label=label)
    axis.plot(places, shown["rms"], "x:", color=_GREY, markersize=5, label="root mean square")

    largest = outliers.sort_values(["max_abs", "place"], ascending=[False, True], kind="stable")
    for row in largest.drop_duplicates("dimension")[:_MAX_NAMED].itertuples():
        side = "left" if row.place < len(table) / 2 else "right"
        text = f"dimension {row.dimension}"
        axis.annotate(text, (row.place, row.max_abs), (0, 4), textcoords="offset points", ha=side, fontsize="small")


def _site_panels(sites: Sequence[str], height: float, ratios: Sequence[int]) -> tuple[Figure, list[Axes]]:
    """Panels above one another that share an axis of sites; of very many sites, evenly spaced ones are named."""
    width = min(13.0, max(6.4, 1.5 + 0.27 * len(sites)))
    figure, panels = plt.subplots(
        len(ratios), 1, figsize=(width, height), height_ratios=ratios, sharex=True, squeeze=False, layout="constrained"
    )
    # In steps of three: where attn, mlp and block follow in turn, those named are all of one kind.
    named = range(0, len(sites), 1 if len(sites) <= _MAX_LABELS else 3 * math.ceil(len(sites) / _MAX_LABELS / 3))
    panels[-1, 0].set_xticks(named, [sites[place] for place in named], rotation=90)
    middle, half = (len(sites) - 1) / 2, max(len(sites) / 2 + 0.2, 4)
    panels[-1, 0].set_xlim(middle - half, middle + half)
    panels[-1, 0].set_xlabel("site, in running order")
    for axis in panels[:, 0]:
        axis.grid(axis="x", color="0.9", linewidth=0.6)
        axis.set_axisbelow(True)
    return figure, list(panels[:, 0])


def _legend(figure: Figure, panels: Sequence[Axes]) -> None:
    """One legend for all panels, outside of them."""
    found: dict[str, Any] = {}
    for axis in panels:
        handles, labels = axis.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    n_columns = 3 if figure.get_figwidth() > 9 else 2
    figure.legend(list(found.values()), list(found), loc="outside upper center", ncols=n_columns, frameon=False)


def _save(figure: Figure, paths: Sequence[Path]) -> None:
    for path in paths:
        # No dates, and stable element names: the same table gives the same file. Text stays text: it can be searched.
        with plt.rc_context({"svg.hashsalt": "anchorage", "svg.fonttype": "none"}):
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
