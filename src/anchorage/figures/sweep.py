"""The figure of the layer sweep."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from anchorage.figures.style import BLUE, GREY, MAX_LABELS, ORANGE, legend_above, save_figure, site_panels

_UNLIKE_CHANCE = 0.005  # a look-up nearer to chance says nothing, and would hide chance's line


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
    figure, panels = site_panels(sites, 1.7 + 2.5 * len(tasks), [1] * len(tasks))
    for axis, task in zip(panels, tasks, strict=True):
        lines = table[table["task"] == task].sort_values("site_index")
        _draw_task(axis, lines, sites)
        title = _task_title(task, lines, line_chars=int(figure.get_figwidth() * 11))
        axis.set_title(title, loc="left", fontsize="medium", parse_math=False)
    legend_above(figure, panels)
    save_figure(figure, paths)


def _draw_task(axis: Axes, table: pd.DataFrame, sites: Sequence[str]) -> None:
    """Draw a task's lines of the sweep."""
    places = np.array([sites.index(site) for site in table["site"]])
    style: dict[str, Any] = {"elinewidth": 1.2, "capsize": 2, "markersize": 5, "zorder": 3}
    if len(sites) > MAX_LABELS:
        style |= {"elinewidth": 0.8, "capsize": 0, "markersize": 3}
    probe = {"color": BLUE, "fmt": "o-", "linewidth": 1.0, "label": "probe, simultaneous interval"}
    _draw_intervals(axis, places, table, "", style | probe)
    shuffled = {"color": GREY, "fmt": "s", "markerfacecolor": "white", "label": "probe on shuffled labels, interval"}
    # Beside its site's mark, not on it: where nothing is to be found, the two are equal.
    _draw_intervals(axis, places + 0.25, table, "shuffled_", style | shuffled)
    chance = table["chance"].astype(float)
    _draw_level(axis, places, chance, "--", color="black", linewidth=1.2, label="chance")
    for column, what, line in (("token", "token id", ":"), ("position", "position", "-.")):
        values = table[f"{column}_only_accuracy"].astype(float)
        # Always right, it is the label itself, and would press all else to the floor.
        if ((values - chance).abs() > _UNLIKE_CHANCE).any() and (values < 1).any():
            label = f"best lookup by {what} alone"
            _draw_level(axis, places, values, line, color=ORANGE, linewidth=1.4, label=label)
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
