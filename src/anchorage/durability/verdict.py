"""What the durability lab's tables add up to: a verdict, and durability.md. Every sentence follows from the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

BAD = ("torn", "gone", "unmountable")
# In which judged column an unsafe recipe must be found bad, or the lab is blind: of power cuts in any filesystem and
# schedule, of kills, of the legal states.
MUST_FAIL = {
    "power_cuts": (
        "naive", "rename only", "fsync, rename", "fsync before flush", "temp elsewhere, move", "remove, rename"
    ),
    "kill_points": ("naive", "temp elsewhere, move", "remove, rename"),
    "legal_states": ("naive", "rename only", "fsync, rename", "fsync before flush", "remove, rename"),
}  # fmt: skip
Tables = Mapping[str, pd.DataFrame]


def judge_tables(tables: Tables, *, key: str) -> dict[str, Any]:
    """The verdict that the gate reads.

    Args:
        tables: power_cuts, kill_points, legal_states, faults, syscalls, by name.
        key: digest of the code that was judged.

    Returns:
        ``ok``; ``faults``, a sentence each: a writer of this package found bad anywhere, a control found good where it
        must not be; ``judged``: points judged of our own writers and of the others, by table; ``not_run``: reasons.
    """
    faults = [fault for name in MUST_FAIL for fault in _count_faults(name, tables[name])]
    faults += _fault_faults(measured(tables["faults"])) + _order_faults(measured(tables["syscalls"]))
    judged = {
        name: {
            whose: int(n_judged(rows[rows["ours"] == ours]).sum())
            for whose, ours in (("ours", True), ("others", False))
        }
        for name in MUST_FAIL
        if len(rows := measured(tables[name]))
    }
    return {
        "key": key,
        "ok": not faults,
        "faults": faults,
        "judged": judged,
        "not_run": {name: reasons for name, table in tables.items() if (reasons := not_run(table))},
    }


def measured(table: pd.DataFrame) -> pd.DataFrame:
    """The lines that were run."""
    return table[table["status"] == "measured"] if "status" in table else table


def not_run(table: pd.DataFrame) -> list[str]:
    """Why lines were not run, each reason once."""
    return list(table.loc[table["status"] != "measured", "reason"].unique()) if "status" in table else []


def n_bad(rows: pd.DataFrame) -> pd.Series:
    """Judged points of each line at which something was lost or torn."""
    return rows[[column for column in BAD if column in rows]].sum(axis=1)


def n_judged(rows: pd.DataFrame) -> pd.Series:
    """Judged points of each line."""
    return rows[["old", "new"]].sum(axis=1) + n_bad(rows)


def _count_faults(name: str, table: pd.DataFrame) -> list[str]:
    rows = measured(table)
    bad = n_bad(rows)
    faults = [
        f"{name}: {row.recipe}, {row.case}{_where(row)}: {count} of {judged} points bad"
        for row, count, judged in zip(rows.itertuples(), bad, n_judged(rows), strict=True)
        if row.ours and not _is_shown(row) and count
    ]
    for recipe in MUST_FAIL[name] if len(rows) else ():
        if not bad[rows["recipe"] == recipe].sum():
            faults.append(f"{name}: the control {recipe} was found good everywhere: the lab is blind there")
    return faults


def _is_shown(row: Any) -> bool:
    """Whether a line shows what no writer survives: a drive that lies, an fsync error that is ignored."""
    return getattr(row, "shown", False) is True


def _where(row: Any) -> str:
    parts = [str(getattr(row, name)) for name in ("filesystem", "options", "schedule", "how") if hasattr(row, name)]
    return "".join(f", {part}" for part in parts if part and part != "nan")


def _fault_faults(rows: pd.DataFrame) -> list[str]:
    ours = rows[rows["ours"]]
    return [
        f"faults: {row.recipe}, {row.case}, {row.fault}: {what}"
        for row in ours.itertuples()
        for what, is_bad in (
            ("acknowledged in spite of it", row.acknowledged),
            (f"the reader then found it {row.verdict}", row.verdict in BAD),
            ("renamed after a failed fsync", row.renamed_after_failed_fsync),
            ("a retry failed", not row.retry_ok),
        )
        if is_bad
    ]


def _order_faults(rows: pd.DataFrame) -> list[str]:
    return [
        f"syscalls: {row.recipe}, {row.case}: {row.broken}"
        for row in rows[rows["ours"]].itertuples()
        if isinstance(row.broken, str) and row.broken
    ]


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def names_of(rows: pd.DataFrame) -> Sequence[str]:
    """Recipes in the order of the table, each once."""
    return list(dict.fromkeys(rows["recipe"]))
