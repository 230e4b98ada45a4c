"""Which method for which use, with the ratios and how sure they are."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from anchorage.loading.claims import Tables, measured
from anchorage.loading.subject import MEASURED, NOT_RUN
from anchorage.loading.summary import (
    MIB,
    LoadingTable,
    Spread,
    apart,
    format_number,
    format_ratio,
    joined,
    mib,
    spread_of,
)

_NO_DIFFERENCE = "no difference was shown"


def describe_uses(tables: Tables) -> Iterator[str]:
    """A line a use; where nothing was measured it says so."""
    table = tables.loading
    for use, state in (("A server that starts on a machine where the file is cold", "cold"),
                       ("A server that starts again, the file warm", "warm")):  # fmt: skip
        for subject in table.whole_subjects():
            yield f"**{use}** ({subject}): {_best(table, subject, state, table.whole(subject))}"
    yield from _part_uses(table)
    yield f"**Many workers on one machine**: {_best_workers(tables.workers)}"
    yield f"**Under memory pressure**: {_under_pressure(tables.pressure)}"
    yield f"**To a GPU**: {_best_device(tables.device_copy)}"


def headline(table: LoadingTable) -> str:
    """The lab in a line: what a cold file costs, and what reading one site alone saves; both against torch.load."""
    found = {
        (subject, method, state): table.spread(subject, method, state)
        for subject, method in (("weights", "torch.load"), ("shard", "torch.load"), ("shard", "ours"))
        for state in ("cold", "warm")
    }
    said = []
    cold, warm = (found["weights", "torch.load", state] for state in ("cold", "warm"))
    if cold and warm:
        ratio = f"{format_ratio(cold.middle, warm.middle)} as long" if apart(cold, warm) else _NO_DIFFERENCE
        said.append(f"torch.load of the weights takes {cold} s cold and {warm} s warm, {ratio}")
    for state in ("cold", "warm"):
        ours, other = (found["shard", method, state] for method in ("ours", "torch.load"))
        if ours and other:
            ratio = f"{format_ratio(other.middle, ours.middle)} as fast as" if apart(ours, other) else _NO_DIFFERENCE
            against = "torch.load of all" if apart(ours, other) else "against torch.load of all"
            said.append(f"one site of a shard by our reader, {state}: {ratio} {against}")
    return f"{'; '.join(said)}. Which method for which use: loading.md." if said else "See loading.md."


def _part_uses(table: LoadingTable) -> Iterator[str]:
    for subject in table.subjects:
        parts = table.in_part(subject)
        for state in ("cold", "warm"):
            if not parts or not table.ranked(subject, state, parts):
                continue
            if subject in table.whole_subjects():
                yield f"**One layer of {subject}**, {state}: {_one_against_all(table, subject, state)}"
            else:
                yield f"**One site of a {subject}**, {state}: {_best(table, subject, state, parts)}"


def _best(table: LoadingTable, subject: str, state: str, methods: list[str]) -> str:
    """The fastest, those not shown to differ from it, and the slowest."""
    ranked = table.ranked(subject, state, methods)
    if not ranked:
        return "not run."
    (first, time), others = ranked[0], ranked[1:]
    if not others:
        return f"`{first}`, {time} s, is the only one measured."
    alike = [name for name, other in others if not apart(time, other)]
    slowest, slow = others[-1]
    text = f"`{first}`, {time} s."
    if slowest not in alike:
        text += f" It is {format_ratio(slow.middle, time.middle)} as fast as `{slowest}`, the slowest."
    if not alike:
        return text + " Every other one is slower."
    text += f" No difference from it was shown for {joined([f'`{name}`' for name in alike])}."
    least = min([first, *alike], key=lambda name: table.any_state(subject, name, "anonymous_mib"))
    held = table.any_state(subject, least, "anonymous_mib")
    return f"{text} Of these `{least}` holds the least anonymous memory, {format_number(held)} MiB."


def _one_against_all(table: LoadingTable, subject: str, state: str) -> str:
    one, time = table.ranked(subject, state, table.in_part(subject))[0]
    text = f"`{one}` takes {time} s."
    whole = table.ranked(subject, state, table.whole(subject))
    if not whole:
        return text
    name, other = whole[0]
    if not apart(time, other):
        return f"{text} No difference was shown from the whole file by `{name}`, {other} s."
    faster = "as fast as" if time.middle < other.middle else "the speed of"
    return f"{text} That is {format_ratio(other.middle, time.middle)} {faster} the whole file by `{name}`, {other} s."


def _best_workers(workers: pd.DataFrame) -> str:
    lines = measured(workers)
    if lines.empty:
        return _reason(workers)
    most = lines["n_workers"].max()
    sums = lines[lines["n_workers"] == most].set_index("method")["pss_mib"].sort_values(kind="stable")
    least, greatest = sums.index[0], sums.index[-1]
    if len(sums) == 1:
        return f"{most} by `{least}` hold {format_number(sums.iloc[0])} MiB together, the only method measured."
    return (
        f"{most} by `{least}` hold {format_number(sums.iloc[0])} MiB together (sum of PSS), by `{greatest}` "
        f"{format_number(sums.iloc[-1])} MiB, {format_ratio(sums.iloc[-1], sums.iloc[0])} as much. One measurement "
        "each."
    )


def _under_pressure(pressure: pd.DataFrame) -> str:
    lines = pressure[pressure["status"] != NOT_RUN]
    if lines.empty:
        return _reason(pressure)
    tight = lines[lines["limit_mib"] - lines["base_mib"] < lines["file_bytes"] / MIB]
    went_on = list(dict.fromkeys(tight.loc[tight["status"] == MEASURED, "method"]))
    killed = list(dict.fromkeys(tight.loc[tight["status"] == "killed", "method"]))
    parts = []
    if went_on:
        again = tight.loc[tight["status"] == MEASURED, "second_bytes_from_disk"].max()
        parts.append(
            f"{_names(went_on)} went on with less memory than the tensors take, and read up to {mib(again)} again "
            "for a second pass"
        )
    if killed:
        parts.append(f"killed: {_names(killed)}")
    return f"{'; '.join(parts)}." if parts else "no limit was tight enough to show a difference."


def _best_device(copies: pd.DataFrame) -> str:
    lines = measured(copies)
    if lines.empty:
        return _reason(copies)
    found = {way: spread_of(rows["total_s"]) for way, rows in lines.groupby("way", sort=False)}
    ranked: list[tuple[str, Spread]] = sorted(
        ((str(way), time) for way, time in found.items() if time), key=lambda pair: pair[1].middle
    )
    (first, time), others = ranked[0], ranked[1:]
    text = f"`{first}`, {time} s from a warm file."
    if alike := [way for way, other in others if not apart(time, other)]:
        text += f" No difference from it was shown for {_names(alike)}."
    slower = [(way, other) for way, other in others if apart(time, other)]
    if slower:
        way, other = slower[-1]
        text += f" It is {format_ratio(other.middle, time.middle)} as fast as `{way}`, the slowest."
    return text


def _reason(table: pd.DataFrame) -> str:
    reasons = list(dict.fromkeys(str(reason) for reason in table["reason"].dropna()))
    return f"not run: {joined(reasons)}." if reasons else "not run."


def _names(methods: list[str]) -> str:
    return joined([f"`{name}`" for name in methods])
