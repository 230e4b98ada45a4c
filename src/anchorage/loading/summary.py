"""What the table of loading shows: medians with their ranges, and which of two is faster, if the ranges say so."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pandas as pd

from anchorage.loading.methods import METHODS
from anchorage.loading.subject import MEASURED, NOT_RUN
from anchorage.loading.trial import FORWARD, TOUCH

MIN_REPEATS = 3  # of fewer, ranges that lie apart say next to nothing
MIB = 2**20
WHOLE = 0.99  # of the bytes that the method touching most of a subject touches


@dataclass(frozen=True)
class Spread:
    """Lowest, median and highest of some repeats."""

    low: float
    middle: float
    high: float
    n_repeats: int

    def __str__(self) -> str:
        low, middle, high = (format_number(value) for value in (self.low, self.middle, self.high))
        return middle if low == high else f"{middle} ({low} to {high})"


def spread_of(values: Iterable[float]) -> Spread | None:
    """The spread of the values that are numbers; None where there is none."""
    found = pd.Series(list(values), dtype=float).dropna()
    return Spread(float(found.min()), float(found.median()), float(found.max()), len(found)) if len(found) else None


class LoadingTable:
    """``loading.csv``, asked by subject, method and state.

    Args:
        table: the columns of ``loading.csv``; lines that were not run have no numbers.

    Attributes:
        lines: all of them.
        measured: those in which the tensors were touched. Every method below asks these alone: a forward pass computes,
            and what that takes has nothing to do with how the tensors were loaded.
        forwards: those in which the model ran.
    """

    def __init__(self, table: pd.DataFrame) -> None:
        self.lines = table
        measured = table[table["status"] == MEASURED]
        self.measured = measured[measured["use"] == TOUCH]
        self.forwards = measured[measured["use"] == FORWARD]
        self.subjects = list(table["subject"].unique())
        # Asked many times for each sentence.
        medians = self.measured.groupby(["subject", "method"]).median(numeric_only=True)
        self._medians = {names: dict(line) for names, line in medians.iterrows()}
        self._asked_for = {name: self._in_order(name) for name in self.subjects}

    def asked_for(self, subject: str) -> list[str]:
        """Methods of a subject, run or not, in the order of METHODS; others follow."""
        return self._asked_for.get(subject, [])

    def methods(self, subject: str) -> list[str]:
        """Those of them with a measurement."""
        return [name for name in self.asked_for(subject) if (subject, name) in self._medians]

    def whole(self, subject: str) -> list[str]:
        """Those that touch all that is wanted of a subject, not its first tensor only."""
        touched = {method: self.any_state(subject, method, "touched_bytes") for method in self.methods(subject)}
        return [method for method, n_bytes in touched.items() if n_bytes >= WHOLE * max(touched.values())]

    def in_part(self, subject: str) -> list[str]:
        """Those that touch less than half of their file."""
        return [
            method
            for method in self.methods(subject)
            if self.any_state(subject, method, "touched_bytes") < self.any_state(subject, method, "file_bytes") / 2
        ]

    def whole_subjects(self) -> list[str]:
        """Subjects of which some method touches most of the file."""
        return [name for name in self.subjects if set(self.methods(name)) - set(self.in_part(name))]

    def spread(self, subject: str, method: str, state: str, column: str = "total_s") -> Spread | None:
        """Of a column over the repeats; None where nothing was measured."""
        return spread_of(select(self.measured, subject, method, state)[column])

    def forward(self, subject: str, method: str, state: str, column: str = "total_s") -> Spread | None:
        """The same of those in which the model ran."""
        return spread_of(select(self.forwards, subject, method, state)[column])

    def title(self, subject: str) -> str:
        """A subject's name, with what is wanted of a file of which size."""
        lines = self.measured[self.measured["subject"] == subject]
        if lines.empty:
            return f"{subject}: {NOT_RUN}"
        file = " or ".join(dict.fromkeys(mib(size) for size in sorted(lines["file_bytes"].unique())))
        return f"{subject}: {mib(lines['touched_bytes'].max())} wanted of a file of {file}"

    def any_state(self, subject: str, method: str, column: str) -> float:
        """Median over all states, of a column that does not depend on them."""
        return float(self._medians.get((subject, method), {}).get(column, math.nan))

    def _in_order(self, subject: str) -> list[str]:
        names = list(self.lines.loc[self.lines["subject"] == subject, "method"].unique())
        places = {name: place for place, name in enumerate(METHODS)}
        return sorted(names, key=lambda name: places.get(name, len(places)))

    def ranked(self, subject: str, state: str, methods: Sequence[str]) -> list[tuple[str, Spread]]:
        """Methods by the median of their whole time, fastest first; those not measured left out."""
        found = [(method, self.spread(subject, method, state)) for method in methods]
        return sorted([(method, time) for method, time in found if time], key=lambda pair: pair[1].middle)


def select(lines: pd.DataFrame, subject: str, method: str, state: str) -> pd.DataFrame:
    """The lines of a subject, method and state."""
    return lines[(lines["subject"] == subject) & (lines["method"] == method) & (lines["state"] == state)]


def apart(first: Spread, second: Spread) -> bool:
    """Whether the ranges of two do not touch, with repeats enough."""
    return min(first.n_repeats, second.n_repeats) >= MIN_REPEATS and (
        first.high < second.low or second.high < first.low
    )


def lower(first: Spread, second: Spread, factor: float = 1) -> bool | None:
    """Whether the first is below ``factor`` times the second; None where the ranges do not say."""
    scaled = Spread(factor * second.low, factor * second.middle, factor * second.high, second.n_repeats)
    return first.middle < scaled.middle if apart(first, scaled) else None


def chance_apart(n_repeats: int) -> float:
    """How often two sets of repeats of the same thing lie apart by chance: all of one below all of the other."""
    return 2 / math.comb(2 * n_repeats, n_repeats)


def format_number(value: float) -> str:
    """Three digits that matter, never an exponent; of what no kernel told, ``unknown``."""
    if math.isnan(value):
        return "unknown"
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 6)}f}"


def format_ratio(value: float, other: float) -> str:
    """A ratio as a number; what is divided by nothing has none."""
    return f"{format_number(value / other)} times" if other else "more than any number of times"


def mib(n_bytes: float) -> str:
    """Bytes as MiB."""
    return f"{format_number(n_bytes / MIB)} MiB"


def joined(words: Sequence[str]) -> str:
    """Words as a list in a sentence."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else list(words))
