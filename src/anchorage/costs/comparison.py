"""What is compared with what, and the columns that a comparison fills. Nothing here runs a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

ROUNDS = 5
COLUMNS = [
    "key", "comparison", "case", "round", "position", "batches", "tokens", "seconds_per_batch", "tokens_per_s",
    "peak_mib", "cuda_peak_mib", "n_modules", "kept_mib", "n_compared", "n_equal",
]  # fmt: skip
SECONDS, PEAK, MODULES, KEPT = "seconds_per_batch", "peak_mib", "n_modules", "kept_mib"  # what is compared


@dataclass(frozen=True)
class Case:
    """A way of doing something.

    Args:
        label: what it is, to stand in a sentence.
        run: given the subject (``cases.Subject``) and batches as ranges of row numbers, runs them in order and returns
            what was kept of the last one, by name.
    """

    label: str
    run: Callable[[Any, Any], Mapping[str, Any]]


@dataclass(frozen=True)
class Pair:
    """A statement to be made: a column of one case against that of another.

    Args:
        case, against: names of cases; the ratio is that of the first to the second.
        column: :data:`SECONDS`, :data:`PEAK`, :data:`MODULES` or :data:`KEPT`.
        meaning: what it shows where the ratio lies above 1 in every round (``more``), or below (``less``).
    """

    case: str
    against: str
    column: str
    meaning: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """Cases that are run in turn and compared.

    Args:
        title: what is compared.
        cases: by name; the first is what the others are drawn against.
        pairs: the statements to be made.
        same_values: whether what the cases keep must be the same values under the same names.
        n_batches: measured batches of a case, after one that warms up.
    """

    title: str
    cases: Mapping[str, Case]
    pairs: tuple[Pair, ...]
    same_values: bool = False
    n_batches: int = 2
