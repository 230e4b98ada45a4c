"""How much the durability lab tries: all of it, or a sample that shows that it works here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from anchorage.durability.ourrecipes import OURS
from anchorage.durability.powercut import FAILING, LYING, RETRYING, Caps, cut_power
from anchorage.durability.recipes import RECIPES, Recipe
from anchorage.durability.schedules import SCHEDULES
from anchorage.durability.torchrecipes import TORCH


@dataclass(frozen=True)
class Profile:
    """What is tried.

    Attributes:
        schedules: names in :data:`SCHEDULES`.
        ours, controls: caps of the power cuts under this package's own writers, and under the textbook's recipes.
        workflow: arguments ``prefixes``, ``samples``, ``reruns`` of :func:`durability.workflowcut.cut_workflow`.
        kills: arguments ``every_call``, ``n_bytes`` of :func:`durability.kills.kill_saves`.
        costs: arguments ``n_calls``, ``big_mib``, ``file_mib`` of :func:`durability.fsynccost.measure_costs`.
        max_places: argument of :func:`durability.faults.measure_faults`.
        n_blocks: of the modelled drive, see :func:`durability.flash.sweep_flash`.
    """

    schedules: tuple[str, ...]
    ours: Caps
    controls: Caps
    workflow: dict[str, Any]
    kills: dict[str, int]
    costs: dict[str, int]
    max_places: int
    n_blocks: int

    def caps(self, recipe: Recipe) -> Caps:
        return self.ours if recipe.ours else self.controls


PROFILES = {
    "full": Profile(
        schedules=tuple(SCHEDULES),
        ours=Caps(400, 250),
        controls=Caps(200, 150),
        workflow={"prefixes": 160, "samples": 100, "reruns": 6},
        kills={"every_call": 1, "n_bytes": 40},
        costs={"n_calls": 200, "big_mib": 256, "file_mib": 64},
        max_places=6,
        n_blocks=256,
    ),
    "small": Profile(
        schedules=("quiet", "neighbour"),
        ours=Caps(12, 18, versions=2),
        controls=Caps(20, 25, versions=2),
        workflow={"prefixes": 20, "samples": 20, "reruns": 1},
        kills={"every_call": 1, "n_bytes": 2},
        costs={"n_calls": 20, "big_mib": 4, "file_mib": 2},
        max_places=1,
        n_blocks=64,
    ),
}


def cut_filesystem(
    filesystem: str, profile: Profile, *, folder: Path, seed: int, log: Callable[[str], object] = print
) -> pd.DataFrame:
    """Every recipe on a filesystem in every schedule of a profile, and the drives that break their promise.

    Args:
        filesystem: name in :data:`durability.mounts.FILESYSTEMS`.
        profile: of :data:`PROFILES`.
        folder: for mount points, which only this call sees.
        seed: of all choices.
        log: gets a line a row, and one for its first bad state.

    Returns:
        The columns of :func:`durability.powercut.cut_power`.
    """
    # Of PyTorch's own ways the plain one: a distributed checkpoint is slow to read, and each image is read.
    recipes = [*RECIPES.values(), TORCH["torch.save/overwrite"], TORCH["torch.save/new name"], *OURS.values()]
    broken = [RECIPES["full/overwrite"], RECIPES["full/new name"]]
    cut = functools.partial(cut_power, folder=folder, caps=profile.caps, seed=seed, log=log)
    tables = [
        cut(recipes, [filesystem], profile.schedules),
        cut(broken, [filesystem], [LYING]),
        cut([*RETRYING.values(), *broken, *OURS.values()], [filesystem], [FAILING]),
    ]
    return pd.concat(tables, ignore_index=True)
