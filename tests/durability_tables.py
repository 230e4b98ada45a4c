"""Tables of the durability lab as a good run would leave them, to be changed one cell at a time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from anchorage.durability import faults, flash, fsynccost, kills, legal, powercut, tracing, workflowcut
from anchorage.durability.ourrecipes import OURS
from anchorage.durability.powercut import FAILING, LYING
from anchorage.durability.recipes import RECIPES

MODULES = {
    "power_cuts": powercut,
    "kill_points": kills,
    "legal_states": legal,
    "workflow_cuts": workflowcut,
    "faults": faults,
    "syscalls": tracing,
    "fsync_cost": fsynccost,
    "flash": flash,
}
COUNTS = {"old": 5, "new": 5, "torn": 0, "gone": 0, "unmountable": 0}


def build_tables() -> dict[str, pd.DataFrame]:
    """Every recipe once in each table, each unsafe one bad, ours good."""
    recipes = [*RECIPES.values(), *OURS.values()]
    lines: dict[str, list[dict[str, Any]]] = {name: [] for name in MODULES}
    for recipe in recipes:
        facts = {"recipe": recipe.name, "case": recipe.case, "ours": recipe.ours, "reason": None}
        bad = {} if recipe.ours or recipe.name == "full" else {"torn": 2, "gone": 3}
        cut = {"filesystem": "ext4", "schedule": "quiet", "points": 10, "mounted": 8, "capped": False, "status": "run"}
        lines["power_cuts"].append(facts | cut | COUNTS | bad)
        lines["legal_states"].append(facts | {"moment": "after"} | COUNTS | bad)
        verdicts = ["old", "torn" if bad else "new", "gone" if bad else "new"]
        kill = {"version": 1, "how": "syscall", "status": "measured", "call": "write", "resaved": True, "n_temps": 0}
        lines["kill_points"] += [facts | kill | {"point": n, "verdict": verdict} for n, verdict in enumerate(verdicts)]
        error = {
            "how": "injected",
            "call": "fsync",
            "error": "EIO",
            "place": 1,
            "status": "measured",
            "raised": "OSError",
        }
        error |= {"acknowledged": False, "outcome": "old", "renamed_after_failed_fsync": False, "retry_ok": True}
        lines["faults"].append(facts | error)
        order = {"version": 1, "status": "measured", "faults": None if recipe.ours else "no fsync"}
        lines["syscalls"].append(facts | order)
    full = {
        "filesystem": "ext4",
        "recipe": "full",
        "case": "overwrite",
        "ours": False,
        "capped": False,
        "status": "run",
    }
    lines["power_cuts"].append(full | COUNTS | {"schedule": LYING, "gone": 4})
    lines["power_cuts"].append(full | COUNTS | {"schedule": FAILING, "recipe": "full, fsync tried again", "torn": 4})
    whole = {"filesystem": "ext4", "points": 10, "mounted": 8, "status": "run", "reruns": 0, "reruns_identical": 0}
    lines["workflow_cuts"].append(whole | COUNTS | {"drive": "honest", "reruns": 2, "reruns_identical": 2})
    lines["workflow_cuts"].append(whole | COUNTS | {"drive": "lying", "gone": 6})
    cost = {"what": "write 4 KiB", "n": 9, "bytes": 4096, "status": "measured"}
    for mode, time_us in (("none", 2.0), ("fsync", 80.0)):
        lines["fsync_cost"].append(cost | {"mode": mode, "p50_us": time_us, "p99_us": 2 * time_us})
    lines["flash"].append(
        {"load": "random", "trim": True, "fill": 1.0, "spare_factor": 0.07, "write_amplification": 7.5, "analytic": 7.6}
    )
    return {name: pd.DataFrame(lines[name], columns=list(module.COLUMNS)) for name, module in MODULES.items()}


def write_tables(tables: Mapping[str, pd.DataFrame], folder: Path) -> dict[str, Path]:
    """Write them as the rules do, and say where they are."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / f"{name}.csv" for name in tables}
    for name, path in paths.items():
        tables[name].to_csv(path, index=False)
    return paths
