"""Why the same file loads in milliseconds today and in seconds on Monday, and what a first forward pass adds."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from anchorage.loading.claims import MAPPING
from anchorage.loading.subject import NOT_RUN
from anchorage.loading.summary import LoadingTable, Spread, apart, format_number, format_ratio, select

NEXT_TO_NOTHING = 0.1  # of the file in the page cache when a cold load has returned
_STATES = ("cold", "warm")
_PARTS = ("load_s", "first_forward_s", "total_s")


def explain_puzzle(table: LoadingTable) -> Iterator[str]:
    """Sentences on the lazy load against the touch, and cold against warm, of the largest subject measured in both."""
    if (case := _find_case(table)) is None:
        yield f"{NOT_RUN.capitalize()}: no method that maps a whole file was measured both cold and warm."
        return
    subject, method = case
    for state in _STATES:
        yield _explain_middle(table, subject, method, state)
    cold, warm = (table.spread(subject, method, state) for state in _STATES)
    assert cold
    assert warm
    told = f"Of all repeats it takes {cold} s cold and {warm} s warm"
    if apart(cold, warm) and cold.middle > warm.middle:
        yield (
            f"{told}, {format_ratio(cold.middle, warm.middle)} as long: today the file lies in the page cache, on "
            "Monday "
            "the machine has been restarted, or its memory been used for something else, and every byte comes from the "
            "disk."
        )
    else:
        yield f"{told}: no loss to a cold file was shown here."
    if len(lines := select(table.measured, subject, "torch.load", "cold")):
        line = _middle(lines)
        share = format_number(100 * line["load_s"] / line["total_s"])
        yield f"`torch.load` pays {share} % of its {format_number(line['total_s'])} s cold while it loads."
    yield from _explain_forward(table, method)
    yield "So of any loading time ask two things: cold or warm, and was every byte touched?"


def tabulate_forwards(table: LoadingTable) -> list[str]:
    """Lines of Markdown: the measurements in which a model ran."""
    if table.forwards.empty:
        return [f"{NOT_RUN.capitalize()}."]
    heads = [f"{state}: {part}, s" for state in _STATES for part in ("load", "first forward", "both")]
    lines = [
        "Loading, and the first forward pass of a model (64 tokens) instead of the touch. Most of the pass is "
        "arithmetic, "
        "which the way of loading does not change: nothing above rests on these times.",
        "",
        "| method | " + " | ".join(heads) + " |",
        "|---" * (1 + len(heads)) + "|",
    ]
    for subject in table.forwards["subject"].unique():
        names = set(table.forwards.loc[table.forwards["subject"] == subject, "method"])
        for method in [name for name in table.asked_for(subject) if name in names]:
            found = [table.forward(subject, method, state, part) for state in _STATES for part in _PARTS]
            lines.append(f"| `{method}` | " + " | ".join(str(time or NOT_RUN) for time in found) + " |")
    return lines


def _find_case(table: LoadingTable) -> tuple[str, str] | None:
    """The largest whole subject, and the first mapping method, of which both states were measured."""
    cases = [
        (subject, method)
        for subject in table.whole_subjects()
        for method in MAPPING
        if all(table.spread(subject, method, state) for state in _STATES)
    ]
    return max(cases, key=lambda case: table.any_state(case[0], case[1], "touched_bytes"), default=None)


def _middle(lines: pd.DataFrame) -> pd.Series:
    """The repeat in the middle by its whole time: its parts add up, which medians of parts do not."""
    return lines.sort_values("total_s", kind="stable").iloc[(len(lines) - 1) // 2]


def _explain_middle(table: LoadingTable, subject: str, method: str, state: str) -> str:
    line = _middle(lines := select(table.measured, subject, method, state))
    load, touch, total = (format_number(line[name]) for name in ("load_s", "touch_s", "total_s"))
    return (
        f"{state.capitalize()}, in the middle one of {len(lines)} repeats, `{method}` of {subject} returns after "
        f"{load} s: "
        f"{_explain_residency(line['resident_loaded'], state)}. Touching every byte then takes {touch} s, {total} s in "
        "all."
    )


def _explain_residency(share: float, state: str) -> str:
    if state == "warm":
        return "every byte was in the page cache before"
    if pd.isna(share):
        return "how much of the file was read by then is unknown"
    found = f"{format_number(100 * share)} % of the file is in the page cache by then"
    return f"it has read next to nothing, {found}" if share <= NEXT_TO_NOTHING else found


def _explain_forward(table: LoadingTable, method: str) -> Iterator[str]:
    """A sentence on the same method with a first forward pass instead of the touch."""
    for subject in table.forwards["subject"].unique():
        cold, warm = (table.forward(subject, method, state) for state in _STATES)
        if cold and warm:
            yield f"With a first forward pass of {subject} instead of the touch it takes {_compare(cold, warm)}."


def _compare(cold: Spread, warm: Spread) -> str:
    text = f"{cold} s cold and {warm} s warm"
    if not apart(cold, warm):
        return f"{text}: no difference was shown"
    return f"{text}, {format_ratio(cold.middle, warm.middle)} as long"
