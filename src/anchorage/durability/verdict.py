"""What the durability lab's tables add up to: the verdict that a gate reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from anchorage.durability.kills import count_kills
from anchorage.durability.powercut import FAILING, LYING, RETRYING

BAD = ("torn", "gone", "unmountable")
_CASES = ("overwrite", "new name")
# Where an unsafe recipe must be found bad, or the lab is blind there. Power cuts, on each filesystem that ran: recipe,
# cases, column. A naive save on btrfs is not torn: its size comes with its bytes, so the file is as before, or empty.
CUT_CONTROLS = (
    ("naive", _CASES, {"ext4": "torn", "xfs": "torn", "btrfs": "gone"}),
    ("rename only", _CASES, {"ext4": "gone", "xfs": "gone", "btrfs": "gone"}),
    ("fsync, rename", _CASES, {"ext4": "gone", "xfs": "gone", "btrfs": "gone"}),
    ("fsync before flush", _CASES, {"ext4": "torn", "xfs": "torn", "btrfs": "torn"}),
    ("temp elsewhere, move", ("new name",), {"ext4": "torn", "xfs": "torn", "btrfs": "torn"}),
    ("remove, rename", ("overwrite",), {"ext4": "gone", "xfs": "gone", "btrfs": "gone"}),
)
# Of kills and of the legal states: recipe, cases, column.
KILL_CONTROLS = (
    ("naive", _CASES, "torn"),
    ("temp elsewhere, move", _CASES, "torn"),
    ("remove, rename", ("overwrite",), "gone"),
)
STATE_CONTROLS = (
    ("naive", _CASES, "torn"),
    ("rename only", _CASES, "torn"),
    ("fsync, rename", _CASES, "gone"),
    ("fsync before flush", _CASES, "torn"),
    ("temp elsewhere, move", _CASES, "torn"),
    ("remove, rename", ("overwrite",), "gone"),
)
JUDGED = ("power_cuts", "kill_points", "legal_states")
Tables = Mapping[str, pd.DataFrame]


def read_tables(paths: Mapping[str, Path]) -> dict[str, pd.DataFrame]:
    """The lab's tables by name, the kills counted by recipe, case, version and way of killing."""
    tables = {name: pd.read_csv(path, keep_default_na=False, na_values=[""]) for name, path in paths.items()}
    return tables | {"kill_points": count_kills(tables["kill_points"])}


def measured(table: pd.DataFrame) -> pd.DataFrame:
    """The lines that were run."""
    return table[table["status"].isin(["measured", "run"])] if "status" in table else table


def honest(cuts: pd.DataFrame) -> pd.DataFrame:
    """Power cuts of a drive that does what it says."""
    return cuts[~cuts["schedule"].isin([LYING, FAILING])]


def not_run(table: pd.DataFrame) -> list[str]:
    """Why lines were not run, each reason once; of a way of doing something also which."""
    if "status" not in table:
        return []
    lines = table[table["status"] == "not run"].itertuples()
    return sorted({f"{line.mode}: {line.reason}" if "mode" in table else str(line.reason) for line in lines})


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
    cuts, kills, states = (measured(tables[name]) for name in ("power_cuts", "kill_points", "legal_states"))
    faults = [fault for name in JUDGED for fault in _writer_faults(name, measured(tables[name]))]
    faults += _cut_control_faults(cuts) + _drive_faults(cuts) + _workflow_faults(measured(tables["workflow_cuts"]))
    faults += _control_faults("kill_points", kills, KILL_CONTROLS) + _kill_faults(kills)
    faults += _control_faults("legal_states", states, STATE_CONTROLS)
    faults += _error_faults(measured(tables["faults"])) + _order_faults(measured(tables["syscalls"]))
    judged = {}
    for name, rows in {"power_cuts": honest(cuts), "kill_points": kills, "legal_states": states}.items():
        ours = rows["ours"].astype(bool)
        judged[name] = {"ours": int(n_judged(rows[ours]).sum()), "others": int(n_judged(rows[~ours]).sum())}
    return {
        "key": key,
        "ok": not faults,
        "faults": faults,
        "judged": judged,
        "not_run": {name: reasons for name, table in tables.items() if (reasons := not_run(table))},
    }


def _writer_faults(name: str, rows: pd.DataFrame) -> list[str]:
    return [
        f"{name}: {row.recipe}, {row.case}{_where(row)}: {count} of {judged} points bad"
        for row, count, judged in zip(rows.itertuples(), n_bad(rows), n_judged(rows), strict=True)
        if row.ours and count
    ]


def _control_faults(name: str, rows: pd.DataFrame, controls: Iterable[tuple[str, Iterable[str], str]]) -> list[str]:
    """Each control must be bad in its column, or the table is blind there; one that is not in it was not run."""
    return [
        f"{name}: the control {recipe!r}, {case}, is never {column}: the lab is blind there"
        for recipe, cases, column in controls
        for case in cases
        if len(some := rows[(rows["recipe"] == recipe) & (rows["case"] == case)]) and not some[column].sum()
    ]


def _cut_control_faults(rows: pd.DataFrame) -> list[str]:
    faults = []
    named = honest(rows).assign(options=honest(rows)["options"].fillna(""))
    for (filesystem, options), some in named.groupby(["filesystem", "options"]):
        where = f"power_cuts, {filesystem} {options}".rstrip()
        faults += _control_faults(where, some, [(name, cases, on[filesystem]) for name, cases, on in CUT_CONTROLS])
        if not some["mounted"].min():
            faults.append(f"{where}: a line was run without mounting an image: the lab is blind there")
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
    # Every writer of ours forces its bytes, so an fsync must have been made to fail wherever any call was.
    injected = rows[(rows["how"] == "injected") & rows["ours"].astype(bool)]
    unhit = set(injected["recipe"]) - set(injected.loc[injected["call"] == "fsync", "recipe"])
    faults = [f"faults: no fsync of {recipe} was made to fail: the lab is blind there" for recipe in sorted(unhit)]
    return faults + [
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
