"""durability.md: where bytes wait, which crash wipes them, which recipe survives what, from the lab's tables alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from anchorage.durability.powercut import LYING
from anchorage.durability.verdict import BAD, Tables, honest, measured, n_bad, n_judged

KEPT, WIPED, NOT_RUN = "kept", "wiped", "not run"
_KILL, _CUT = "kill -9", "power cut"
_WHAT = {
    "power_cuts": "power cuts (of a drive that logs, each image mounted)",
    "kill_points": "kills",
    "legal_states": "states that POSIX allows",
}
_STEPS = """1. Write to a temporary name in the same folder.
2. Flush the process's own buffer, then fsync the file. If the fsync fails, raise: never rename, never retry it.
3. Replace the final name by it (`os.replace`), in one step.
4. Fsync the folder. Only now is the save acknowledged."""


def layers(tables: Tables) -> pd.DataFrame:
    """Which crash wipes which of the places where bytes wait; each cell follows from what recipes lost.

    Returns:
        A line a place, columns ``kill -9`` and ``power cut``; cells ``kept``, ``wiped``, ``not run``.
    """
    kills, cuts = measured(tables["kill_points"]), measured(tables["power_cuts"])
    kept, lying = honest(cuts), cuts[cuts["schedule"] == LYING]
    in_place, renamed, full = "naive", "rename only", "full"
    places = {
        # What a save in place had not yet handed to the kernel is missing after the kill.
        "buffer in the process": (_state(kills, in_place), _state(kept, in_place)),
        # What was renamed without any fsync is whole after a kill, and is not after a power cut.
        "page cache": (_state(kills, renamed), _state(kept, renamed)),
        # What was fsynced is whole, unless the drive says so of what is in its own cache.
        "drive's own cache": (_state(kills, full), _state(lying, full)),
        "flash": (_state(kills, full), _state(kept, full)),
    }
    return pd.DataFrame.from_dict(places, orient="index", columns=[_KILL, _CUT])


def _state(rows: pd.DataFrame, recipe: str) -> str:
    rows = rows[rows["recipe"] == recipe]
    if rows.empty:
        return NOT_RUN
    return WIPED if n_bad(rows).sum() else KEPT


def survival(tables: Tables) -> pd.DataFrame:
    """(bad, judged) points of each recipe: by kill, by power cut on each filesystem and case, by the legal states.

    Returns:
        A line a recipe, the textbook's first; ``not run``, or None where the recipe has no such case.
    """
    cuts = honest(tables["power_cuts"])
    places = cuts["filesystem"].str.cat(cuts["options"].fillna(""), sep=" ").str.strip()
    columns: dict[str, pd.DataFrame] = {_KILL: tables["kill_points"]}
    for place in dict.fromkeys(places):
        for case in dict.fromkeys(cuts["case"]):
            columns["\n".join([*place.split(), case])] = cuts[(places == place) & (cuts["case"] == case)]
    columns["legal states\n(model)"] = tables["legal_states"]
    everything = pd.concat([table[["recipe", "ours"]] for table in columns.values()]).drop_duplicates()
    recipes = everything.sort_values("ours", kind="stable")
    return pd.DataFrame(
        {name: [_points(table, recipe) for recipe in recipes["recipe"]] for name, table in columns.items()},
        index=[f"{line.recipe} (ours)" if line.ours else line.recipe for line in recipes.itertuples()],
    )


def _points(table: pd.DataFrame, recipe: str) -> tuple[int, int] | str | None:
    table = table[table["recipe"] == recipe]
    if table.empty:
        return None
    rows = measured(table)
    return (int(n_bad(rows).sum()), int(n_judged(rows).sum())) if len(rows) else NOT_RUN


def describe_durability(tables: Tables, verdict: Mapping[str, Any], disk: Mapping[str, Any]) -> str:
    """All findings as Markdown.

    Args:
        tables: power_cuts, kill_points, legal_states, faults, syscalls, fsync_cost, flash, by name.
        verdict: of :func:`anchorage.durability.verdict.judge_tables`.
        disk: of :func:`anchorage.durability.disk.describe_disk`.
    """
    parts = [
        "# Can this lose what was saved?",
        _answer(tables, verdict),
        "## The places where bytes wait\n\nWhat a crash leaves in each, as the recipes' losses show it.",
        _markdown(layers(tables).reset_index(names="place")),
        "## Which recipe survives what\n\nPoints at which something was torn or lost, of those judged. Torn: under its "
        "final name lies what was never saved. Lost: a save had returned, and its version is gone. The drive does "
        "what it says.",
        _markdown(_survival_text(survival(tables))),
        f"The recipe that survives:\n\n{_STEPS}",
        "## Faults\n\nAn error injected into one call of a save.",
        _faults(measured(tables["faults"])),
        f"## What it costs\n\n{_disk(disk)}",
        _costs(measured(tables["fsync_cost"])),
        "## What the drive does with it",
        _flash(measured(tables["flash"])),
    ]
    if verdict["not_run"]:
        reasons = [f"- {name}: {reason}" for name, reasons in verdict["not_run"].items() for reason in reasons]
        parts += ["## Not run", "\n".join(reasons)]
    return "\n\n".join(parts) + "\n"


def _answer(tables: Tables, verdict: Mapping[str, Any]) -> str:
    counts = {_WHAT[name]: judged["ours"] for name, judged in verdict["judged"].items()}
    lines = []
    if ran := [f"{count:,} {what}" for what, count in counts.items() if count]:
        lines.append(
            "Of this package's own writers (single files, journal, shards, publication, manifest, checkpoints) were "
            f"judged: {', '.join(ran)}."
        )
    for row in measured(tables["workflow_cuts"]).itertuples():
        if row.drive == "honest":
            lines.append(
                f"Of a whole run {row.points:,} power cuts ({row.mounted:,} images mounted); after {row.reruns} of "
                "them the plain command was run to its end, and "
                f"{row.reruns_identical} times gave the uninterrupted run's bytes."
            )
    if missing := [what for what, count in counts.items() if not count]:
        lines.append(f"Not judged here: {', '.join(missing)}.")
    if not verdict["ok"]:
        lines.append("**The lab found faults:**\n\n" + "\n".join(f"- {fault}" for fault in verdict["faults"]))
    elif ran:
        lines.append(
            "Nothing of it was torn, or lost after it was acknowledged. That is no proof: it is what was tried. The "
            "unsafe recipes, judged in the same way, were found bad where they must be."
        )
    cuts, kills = measured(tables["power_cuts"]), measured(tables["kill_points"])
    if n_capped := int(cuts["capped"].eq(True).sum()):
        lines.append(f"In {n_capped} of the {len(cuts)} lines of power_cuts.csv a sample of the moments was tried.")
    if n_temps := int(kills.loc[kills["ours"], "n_with_temps"].sum()):
        lines.append(
            f"After {n_temps} kills of our own writers a temporary file stayed although the save was made again; it is "
            "under no final name, and is swept when the folder is next used."
        )
    return " ".join(lines)


def _disk(disk: Mapping[str, Any]) -> str:
    known = {"filesystem": disk["filesystem"], "options": disk["mount_options"], "device": disk["device"]}
    known |= {"write cache": disk["write_cache"], "kernel": f"{disk['system']} {disk['kernel']}"}
    return "On this disk: " + "; ".join(f"{name} {value}" for name, value in known.items() if value) + "."


def cell_text(cell: tuple[int, int] | str | None) -> str:
    """A cell of :func:`survival` in words."""
    if isinstance(cell, tuple):
        return f"{cell[0]:,} of {cell[1]:,}"
    return cell or "-"


def _survival_text(table: pd.DataFrame) -> pd.DataFrame:
    text = table.map(cell_text)
    return text.rename(columns=lambda name: name.replace("\n", " ")).reset_index(names="recipe")


def _faults(rows: pd.DataFrame) -> str:
    if rows.empty:
        return "Not run."
    lines = []
    for ours, whose in ((True, "This package's writers"), (False, "The textbook's recipes")):
        some = rows[rows["ours"] == ours]
        bad, unconfirmed = int(some["outcome"].isin(BAD).sum()), int((some["outcome"] == "unconfirmed").sum())
        renamed = int(some["renamed_after_failed_fsync"].eq(True).sum())
        lines.append(
            f"- {whose}: {len(some)} saves with a fault; {int(some['acknowledged'].sum())} returned as if all were "
            f"well, {bad} left something torn or lost, {unconfirmed} the new version unconfirmed; {renamed} times a "
            f"file got its name after its fsync had failed; tried again, {int(some['retry_ok'].sum())} succeeded."
        )
    return "\n".join(lines)


def _costs(rows: pd.DataFrame) -> str:
    if rows.empty:
        return "Not run."
    return _markdown(rows[["what", "mode", "n", "p50_us", "p99_us"]].round(1))


def _flash(rows: pd.DataFrame) -> str:
    fullest = rows[rows["fill"] == rows["fill"].max()]
    table = fullest[["load", "trim", "spare_factor", "write_amplification"]].round(2)
    return (
        "A model of a drive, not a measurement of one. Pages programmed for each page written, on a full drive:\n\n"
        + _markdown(table)
    )


def _markdown(table: pd.DataFrame) -> str:
    rows: Sequence[Sequence[object]] = [list(table.columns), ["---"] * len(table.columns), *table.to_numpy().tolist()]
    return "\n".join(f"| {' | '.join(str(cell) for cell in row)} |" for row in rows)
