"""The figure of loading: time cold and warm, and memory beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from anchorage.figures.style import BLUE, GREY, ORANGE, plt, save_figure
from anchorage.loading.summary import LoadingTable, Spread

# Cold stands above warm on every line, so that the two are told apart where they meet.
_STATES: dict[str, dict[str, Any]] = {
    "cold": {"place": -0.17, "color": BLUE, "marker": "o", "markerfacecolor": BLUE},
    "warm": {"place": 0.17, "color": ORANGE, "marker": "s", "markerfacecolor": "white"},
}
_MEMORY: dict[str, tuple[str, dict[str, Any]]] = {
    "peak_mib": (
        "peak of resident memory, the process's own included",
        {"color": "black", "marker": "|", "markersize": 11, "markeredgewidth": 2},
    ),
    "anonymous_mib": ("anonymous (private) while held", {"color": "black", "marker": "D", "markersize": 5}),
    "file_mib": ("mapped from the file", {"color": GREY, "marker": "^", "markerfacecolor": "white", "markersize": 7}),
}


def plot_loading(table: pd.DataFrame, paths: Sequence[Path]) -> None:
    """Draw, a row of panels a subject, each method's time cold and warm on a log scale, and its memory.

    Args:
        table: ``loading.csv``: subject, method, state, use (touch alone is drawn), status, total_s, touched_bytes,
            file_bytes, peak_mib, anonymous_mib, file_mib. Subjects and methods in the order in which they are drawn; a
            method without a measurement is named as not run.
        paths: files to write; the suffix chooses the format.
    """
    found = LoadingTable(table)
    methods = {name: found.asked_for(name) for name in found.subjects}
    ratios = [len(methods[name]) for name in found.subjects]
    height = 1.2 + 0.75 * len(ratios) + 0.34 * sum(ratios)
    figure, panels = plt.subplots(
        len(ratios), 2, figsize=(10.5, height), height_ratios=ratios, width_ratios=[3, 2], squeeze=False
    )
    # Laid out by hand: the constrained layout of so many panels comes out another in its last bits, run by run.
    space = 0.75 * len(ratios) / (0.34 * sum(ratios))
    figure.subplots_adjust(0.15, 0.5 / height, 0.985, 1 - 1.15 / height, wspace=0.05, hspace=space)
    for subject, (time, memory) in zip(found.subjects, panels, strict=True):
        _draw_times(time, found, subject, methods[subject])
        _draw_memory(memory, found, subject, methods[subject])
        time.set_title(found.title(subject), loc="left", fontsize="medium", fontweight="bold")
    panels[-1, 0].set_xlabel("load and touch of every byte, s (log scale)")
    panels[-1, 1].set_xlabel("MiB, median")
    handles = [handle for axis in panels[0] for handle in axis.get_legend_handles_labels()[0]]
    figure.legend(handles=handles, loc="upper center", ncols=2, frameon=False)
    save_figure(figure, paths)


def _draw_times(axis: Axes, table: LoadingTable, subject: str, methods: Sequence[str]) -> None:
    """Draw medians, and bars from lowest to highest."""
    for state, style in _STATES.items():
        mark = {name: value for name, value in style.items() if name != "place"}
        shown = []
        for place, method in enumerate(methods):
            place_of_state = place + style["place"]
            if time := table.spread(subject, method, state):
                axis.plot([time.low, time.high], [place_of_state] * 2, color=mark["color"], linewidth=2)
                shown.append((time.middle, place_of_state))
            else:
                _write_not_run(axis, place_of_state, state)
        label = f"{state}: median, lowest to highest"
        axis.plot(*zip(*shown, strict=True) if shown else ([], []), linestyle="none", markersize=6, label=label, **mark)
    axis.set_xscale("log")
    _tick_log(axis, _all_times(table, subject, methods))
    axis.set_yticks(range(len(methods)), methods)
    _rule(axis, len(methods))


def _write_not_run(axis: Axes, place: float, state: str) -> None:
    beside = axis.get_yaxis_transform()
    axis.text(0.5, place, f"{state}: not run", transform=beside, ha="center", va="center", fontsize=7, color="0.4")


def _all_times(table: LoadingTable, subject: str, methods: Sequence[str]) -> list[Spread]:
    found = [table.spread(subject, method, state) for method in methods for state in _STATES]
    return [time for time in found if time]


def _tick_log(axis: Axes, times: Sequence[Spread]) -> None:
    """Ticks at 1, 2 and 5 of every decade in plain numbers; room beside the marks."""
    low, high = min((time.low for time in times), default=0.1), max((time.high for time in times), default=1.0)
    axis.set_xlim(low / 1.3, high * 1.3)
    within_two_decades = high / low < 100
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if within_two_decades else (1,)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())


def _draw_memory(axis: Axes, table: LoadingTable, subject: str, methods: Sequence[str]) -> None:
    """Draw the kinds of memory of each method, states taken together: they do not depend on the page cache."""
    run = [(place, method) for place, method in enumerate(methods) if method in table.methods(subject)]
    for column, (label, style) in _MEMORY.items():
        values = [table.any_state(subject, method, column) for _, method in run]
        axis.plot(values, [place for place, _ in run], linestyle="none", label=label, **style)
    axis.set_yticks([])
    axis.margins(x=0.08)
    _rule(axis, len(methods))


def _rule(axis: Axes, n_methods: int) -> None:
    axis.set_ylim(n_methods - 0.5, -0.5)
    axis.grid(axis="x", color="0.9", linewidth=0.6)
    for place in range(n_methods - 1):
        axis.axhline(place + 0.5, color="0.9", linewidth=0.6)
    axis.set_axisbelow(True)
