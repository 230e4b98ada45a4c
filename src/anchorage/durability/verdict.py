"""What the durability lab's tables add up to: the verdict that a gate reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from anchorage.durability.kills import count_kills
from anchorage.durability.powercut import FAILING, LYING, RETRYING

BAD = ("torn", "gone", "unmountable")
# Recipes that must be found bad somewhere, or the lab is blind there. A remove leaves nothing to find between two
# system calls only; the model of legal states is of one filesystem, in which no temp file lies elsewhere.
MUST_FAIL = {
    "power_cuts": (
        "naive", "rename only", "fsync, rename", "fsync before flush", "temp elsewhere, move", "remove, rename"
    ),
    "kill_points": ("naive", "temp elsewhere, move", "remove, rename"),
    "legal_states": ("naive", "rename only", "fsync, rename", "fsync before flush", "remove, rename"),
}  # fmt: skip
Tables = Mapping[str, pd.DataFrame]


def read_tables(paths: Mapping[str, Path]) -> dict[str, pd.DataFrame]:
    """The lab's tables by name, the kills counted by recipe, case, version and way of killing."""
    tables = {name: pd.read_csv(path, keep_default_na=False, na_values=[""]) for name, path in paths.items()}
    return tables | {"kill_points": count_kills(tables["kill_points"])}


def measured(table: pd.DataFrame) -> pd.DataFrame:
    """The lines that were run."""
    return table[table["status"].isin(["measured", "run"])] if "status" in table else table


def not_run(table: pd.DataFrame) -> list[str]:
    """Why lines were not run, each reason once."""
    return sorted(table.loc[table["status"] == "not run", "reason"].unique()) if "status" in table else []


def n_bad(rows: pd.DataFrame) -> pd.Series:
    """Judged points of each line at which something was lost or torn."""
    return rows[[column for column in BAD if column in rows]].sum(axis=1).astype(int)


def n_judged(rows: pd.DataFrame) -> pd.Series:
    """Judged points of each line."""
    return rows[["old", "new"]].sum(axis=1).astype(int) + n_bad(rows)


def judge_tables(tables: Tables, *, key: str) -> dict[str, Any]:
    """The verdict.

    Args:
        tables: see :func:`read_tables`.
        key: digest of the code that was judged.

    Returns:
        ``ok``; ``faults``, a sentence each: a writer of this package found bad anywhere, a control found good where it
        must not be; ``judged``: points of our own writers and of the others, by table; ``not_run``: reasons by table.
    """
    faults = [fault for name in MUST_FAIL for fault in _count_faults(name, measured(tables[name]))]
    faults += _drive_faults(measured(tables["power_cuts"])) + _workflow_faults(measured(tables["workflow_cuts"]))
    faults += _kill_faults(measured(tables["kill_points"])) + _error_faults(measured(tables["faults"]))
    faults += _order_faults(measured(tables["syscalls"]))
    judged = {}
    for name in MUST_FAIL:
        rows = measured(tables[name])
        ours = rows["ours"].astype(bool)
        judged[name] = {"ours": int(n_judged(rows[ours]).sum()), "others": int(n_judged(rows[~ours]).sum())}
    return {
        "key": key,
        "ok": not faults,
        "faults": faults,
        "judged": judged,
        "not_run": {name: reasons for name, table in tables.items() if (reasons := not_run(table))},
    }


def _count_faults(name: str, rows: pd.DataFrame) -> list[str]:
    bad = n_bad(rows)
    faults = [
        f"{name}: {row.recipe}, {row.case}{_where(row)}: {count} of {judged} points bad"
        for row, count, judged in zip(rows.itertuples(), bad, n_judged(rows), strict=True)
        if row.ours and count
    ]
    ran = set(rows["recipe"])
    for recipe in MUST_FAIL[name]:
        if recipe in ran and not bad[rows["recipe"] == recipe].sum():
            faults.append(f"{name}: the control {recipe!r} was found good everywhere: the lab is blind there")
    return faults


def _where(row: Any) -> str:
    parts = [getattr(row, name, None) for name in ("filesystem", "options", "schedule", "how", "moment")]
    return "".join(f", {part}" for part in parts if isinstance(part, str))


def _drive_faults(rows: pd.DataFrame) -> list[str]:
    """A drive that breaks its promise must be seen to: so the lab sees what flushes and retries do."""
    shown = {LYING: {"full"}, FAILING: {recipe.name for recipe in RETRYING.values()}}
    return [
        f"power_cuts: with a {schedule} nothing was lost: the lab is blind there"
        for schedule, recipes in shown.items()
        if len(some := rows[(rows["schedule"] == schedule) & rows["recipe"].isin(recipes)]) and not n_bad(some).sum()
    ]


def _workflow_faults(rows: pd.DataFrame) -> list[str]:
    faults = []
    for row, bad in zip(rows.itertuples(), n_bad(rows), strict=True):
        if row.drive == "honest" and bad:
            faults.append(f"workflow_cuts: a whole run: {bad} of {row.points} cuts bad")
        if row.reruns_identical != row.reruns:
            faults.append(f"workflow_cuts: {row.reruns - row.reruns_identical} of {row.reruns} runs resumed differ")
        if row.drive != "honest" and not bad:
            faults.append("workflow_cuts: a drive that lies lost nothing: the lab is blind there")
    return faults


def _kill_faults(rows: pd.DataFrame) -> list[str]:
    return [
        f"kill_points: {row.recipe}, {row.case}, {row.how}: saving again failed after {row.n_resave_failed} kills"
        for row in rows.itertuples()
        if row.ours and row.n_resave_failed
    ]


def _error_faults(rows: pd.DataFrame) -> list[str]:
    return [
        f"faults: {row.recipe}, {row.case}, {row.error} at {row.call} {row.place}: {what}"
        for row in rows.itertuples()
        if row.ours
        for what, is_bad in (
            ("acknowledged in spite of it", row.acknowledged and row.outcome != "new"),
            (f"the reader then found it {row.outcome}", row.outcome in BAD),
            ("a file got its name after its fsync had failed", row.renamed_after_failed_fsync is True),
            ("the save, tried again, failed", not row.retry_ok),
        )
        if is_bad
    ]


def _order_faults(rows: pd.DataFrame) -> list[str]:
    return [
        f"syscalls: {row.recipe}, {row.case}, version {row.version}: {row.faults}"
        for row in rows.itertuples()
        if row.ours and isinstance(row.faults, str)
    ]
