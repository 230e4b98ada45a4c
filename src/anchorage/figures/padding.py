"""The figure of what pads do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from anchorage.figures.style import BLUE, GREY, ORANGE, plt, save_figure

_MAX_SITES = 3
_MARKS = {("no", "left"): "<", ("no", "right"): ">", ("yes", "left"): "o", ("yes", "right"): "s"}
_FLOOR = 1e-9  # smaller errors have their place between this and 0
_TICKS = [0, 1e-8, 1e-6, 1e-4, 1e-2, 1, 1e2]


def plot_padding(table: pd.DataFrame, norms: pd.DataFrame, report: Mapping[str, Any], paths: Sequence[Path]) -> None:
    """Draw each prompt's error by its number of pads, unmasked and masked, and the norms of pads and real tokens.

    Args:
        table: ``padding.csv``: site, side, position_ids, n_pads, reduction, masked, relative_error; sites in running
            order. Of more than three, the first, the middle and the last one are drawn.
        norms: ``padding_norms.csv``: site, side, position_ids, prompt, n_pads, pad_norm, real_norm. With explicit
            position ids are drawn, if there are such.
        report: ``padding.json``: ok, tolerance, n_faults.
        paths: files to write; the suffix chooses the format.
    """
    sites, reductions = list(table["site"].unique()), list(table["reduction"].unique())
    if len(sites) > _MAX_SITES:
        sites = [sites[0], sites[len(sites) // 2], sites[-1]]
    size = (11.5, 2.2 + 2.1 * len(sites))
    figure, panels = plt.subplots(len(sites), 4, figsize=size, sharex=True, squeeze=False, layout="constrained")
    errors = table["relative_error"].max()
    largest_norm, smallest_norm = norms[["pad_norm", "real_norm"]].stack().agg(["max", "min"])
    for site, axes in zip(sites, panels, strict=True):
        of_site = table[table["site"] == site]
        for reduction, axis in zip(reductions, axes[:-1], strict=True):
            _draw_errors(axis, of_site[of_site["reduction"] == reduction], report["tolerance"])
            axis.set_ylim(-_FLOOR / 3, max(errors, 1) * 10)
            axis.set_title(f"{site}, {reduction}", loc="left", fontsize="medium")
        axes[0].set_ylabel("relative error")
        _draw_norms(axes[-1], norms[norms["site"] == site])
        axes[-1].set_ylim(smallest_norm / 2, largest_norm * 2)
        axes[-1].set_title(f"{site}, mean norm", loc="left", fontsize="medium")
    for axis in panels[-1]:
        axis.set_xlabel("pads of the prompt")
    verdict = "within tolerance" if report["ok"] else f"BEYOND TOLERANCE: {report['n_faults']} fault(s)"
    figure.suptitle(f"Padded prompts against the same prompts alone; over real tokens only: {verdict}")
    handles = [handle for axis in (panels[0, 0], panels[0, -1]) for handle in axis.get_legend_handles_labels()[0]]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    save_figure(figure, paths)


def _draw_errors(axis: Axes, table: pd.DataFrame, tolerance: float) -> None:
    """Draw one site's errors of one reduction."""
    axis.set_yscale("symlog", linthresh=_FLOOR, linscale=0.5)
    for (masked, side), mark in _MARKS.items():
        colour, what = (ORANGE, "all positions") if masked == "no" else (BLUE, "real tokens")
        for given, fill, markersize in (("explicit", colour, 4), ("none", "none", 7)):
            lines = table[(table["masked"] == masked) & (table["side"] == side) & (table["position_ids"] == given)]
            label = f"{what}, pads {side}, {'no ' if given == 'none' else ''}position ids"
            style: dict[str, Any] = {"color": colour, "markerfacecolor": fill}
            if len(lines):
                axis.plot(lines["n_pads"], lines["relative_error"], mark, markersize=markersize, label=label, **style)
    stored = table[table["masked"] == "store"]
    axis.plot(
        stored["n_pads"], stored["relative_error"], "x", color="black", markersize=4, label="the store's reduction"
    )
    axis.axhline(tolerance, color="black", linestyle="--", linewidth=1.2, label=f"tolerance, {tolerance:.2g}")
    axis.set_yticks(_TICKS)
    axis.grid(axis="y", color="0.9", linewidth=0.6)
    axis.set_axisbelow(True)


def _draw_norms(axis: Axes, norms: pd.DataFrame) -> None:
    """Draw one site's norms."""
    axis.set_yscale("log")
    shown = norms.sort_values("position_ids", kind="stable").drop_duplicates(["side", "prompt"])
    for side in ("left", "right"):
        lines, mark = shown[shown["side"] == side], _MARKS["no", side]
        axis.plot(lines["n_pads"], lines["pad_norm"], mark, color="black", markersize=5, label=f"norm of pads, {side}")
    real = shown[shown["side"] == "right"]
    axis.plot(real["n_pads"], real["real_norm"], "+", color=GREY, markersize=7, label="norm of real tokens, pads right")
    axis.grid(axis="y", color="0.9", linewidth=0.6)
    axis.set_axisbelow(True)
