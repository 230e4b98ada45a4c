"""How much of the power cuts is tried: a CI profile of a minute, and the whole matrix."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from anchorage.durability.ourrecipes import OURS
from anchorage.durability.powercut import FAILING, LYING, RETRYING, Caps, cut_power
from anchorage.durability.recipes import RECIPES, Recipe
from anchorage.durability.schedules import SCHEDULES


@dataclass(frozen=True)
class Profile:
    """What is tried.

    Attributes:
        filesystems: names in :data:`durability.mounts.FILESYSTEMS`.
        schedules: names in :data:`SCHEDULES`.
        ours: caps of this package's own writers.
        controls: caps of the textbook's recipes.
    """

    filesystems: tuple[str, ...]
    schedules: tuple[str, ...]
    ours: Caps
    controls: Caps

    def caps(self, recipe: Recipe) -> Caps:
        return self.ours if recipe.ours else self.controls


PROFILES = {
    "ci": Profile(("ext4", "xfs", "btrfs"), ("neighbour",), Caps(10, 15, versions=2), Caps(10, 15, versions=2)),
    "full": Profile(("ext4", "ext4-noauto", "xfs", "btrfs"), tuple(SCHEDULES), Caps(400, 250), Caps(200, 150)),
}


def cut_all(profile: Profile, *, folder: Path, seed: int, log: Callable[[str], object] = print) -> pd.DataFrame:
    """Every recipe on every filesystem in every schedule of a profile, and the drives that break their promise.

    Args:
        profile: of :data:`PROFILES`.
        folder: for mount points, which only this call sees.
        seed: of all choices.
        log: gets a line a row, and one for its first bad state.

    Returns:
        ``power_cuts.csv``, with the columns of :func:`cut_power`.
    """
    recipes = [*RECIPES.values(), *OURS.values()]
    broken = [RECIPES["full/overwrite"], RECIPES["full/new name"]]
    cut = functools.partial(cut_power, folder=folder, caps=profile.caps, seed=seed, log=log)
    tables = [
        cut(recipes, profile.filesystems, profile.schedules),
        cut(broken, profile.filesystems, [LYING]),
        cut([*RETRYING.values(), *broken, *OURS.values()], profile.filesystems, [FAILING]),
    ]
    return pd.concat(tables, ignore_index=True)
