"""What all figures share. Readable in black and white: shape and fill carry the meaning, colour only helps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, ORANGE = "#0072b2", "#d55e00"  # of Okabe and Ito's palette, told apart by colour-blind people
GREY = "#767676"
MAX_LABELS = 40  # more site names than that cannot be read side by side


def site_panels(sites: Sequence[str], height: float, ratios: Sequence[int]) -> tuple[Figure, list[Axes]]:
    """Panels above one another that share an axis of sites; of very many sites, evenly spaced ones are named."""
    width = min(13.0, max(6.4, 1.5 + 0.27 * len(sites)))
    figure, panels = plt.subplots(
        len(ratios), 1, figsize=(width, height), height_ratios=ratios, sharex=True, squeeze=False, layout="constrained"
    )
    # In steps of three: where attn, mlp and block follow in turn, those named are all of one kind.
    named = range(0, len(sites), 1 if len(sites) <= MAX_LABELS else 3 * math.ceil(len(sites) / MAX_LABELS / 3))
    panels[-1, 0].set_xticks(named, [sites[place] for place in named], rotation=90)
    middle, half = (len(sites) - 1) / 2, max(len(sites) / 2 + 0.2, 4)
    panels[-1, 0].set_xlim(middle - half, middle + half)
    panels[-1, 0].set_xlabel("site, in running order")
    for axis in panels[:, 0]:
        axis.grid(axis="x", color="0.9", linewidth=0.6)
        axis.set_axisbelow(True)
    return figure, list(panels[:, 0])


def legend_above(figure: Figure, panels: Sequence[Axes]) -> None:
    """One legend for all panels, outside of them."""
    found: dict[str, Any] = {}
    for axis in panels:
        handles, labels = axis.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    n_columns = 3 if figure.get_figwidth() > 9 else 2
    figure.legend(list(found.values()), list(found), loc="outside upper center", ncols=n_columns, frameon=False)


def save_figure(figure: Figure, paths: Sequence[Path]) -> None:
    for path in paths:
        # No dates, and stable element names: the same table gives the same file. Text stays text: it can be searched.
        with plt.rc_context({"svg.hashsalt": "anchorage", "svg.fonttype": "none"}):
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
