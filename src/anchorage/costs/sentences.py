"""costs.md: what the table of costs shows, in sentences. Each follows from the numbers, and says nothing where they do
not."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from anchorage.costs.comparison import KEPT, MODULES, PEAK, SECONDS, Comparison, Pair

MIN_ROUNDS = 5  # of fewer, all lie on one side of 1 by chance too often
MARGIN = 0.02  # a smaller difference changes nobody's choice
_WHAT = {SECONDS: "time", PEAK: "peak memory", MODULES: "number of modules kept", KEPT: "bytes kept of a batch"}
_MORE = {SECONDS: "slower", PEAK: "more memory", MODULES: "more modules", KEPT: "more bytes"}
_LESS = {SECONDS: "faster", PEAK: "less memory", MODULES: "fewer modules", KEPT: "fewer bytes"}


def describe_costs(table: pd.DataFrame, comparisons: Mapping[str, Comparison]) -> str:
    """All comparisons as Markdown: a table of medians and spreads each, and the sentences that it supports.

    Args:
        table: ``costs.csv``.
        comparisons: by name, as in the table.
    """
    table = device_peaks(table)
    n_rounds = table["round"].nunique()
    n_pairs = sum(len(comparison.pairs) for comparison in comparisons.values())
    kind = "GPU memory allocated" if table.attrs["peak_of"] == "cuda" else "resident memory"
    lines = [
        "# What the choices of a capture cost",
        "",
        f"Each case ran in a fresh process, {n_rounds} round(s), in an order that rotates. Medians, in brackets lowest "
        f"to highest; ratios are of the two cases of a round. Peak is how far {kind} rose over the measured batches. "
        "A difference is stated where all rounds agree on its side and the median is at least "
        f"{100 * MARGIN:.0f} % off 1. Where there is none, so many rounds agree by chance in "
        f"{100 * 2 ** (1 - n_rounds):.2g} % of comparisons, of which there are {n_pairs} here.",
    ]
    for name, comparison in comparisons.items():
        lines += _section(name, comparison, table[table["comparison"] == name])
    return "\n".join(lines) + "\n"


def device_peaks(table: pd.DataFrame) -> pd.DataFrame:
    """The table with ``peak_mib`` of the device that the model was on: on a GPU the allocated memory there."""
    found = table.copy()
    on_gpu = bool(table["cuda_peak_mib"].notna().any())
    if on_gpu:
        found[PEAK] = table["cuda_peak_mib"]
    found.attrs["peak_of"] = "cuda" if on_gpu else "host"
    return found


def paired_ratios(table: pd.DataFrame, pair: Pair) -> pd.Series:
    """Ratio of a pair's cases in each round; NaN where either is not measured or is nothing."""
    values = table.pivot(index="round", columns="case", values=pair.column).astype(float)
    values = values.where(values > 0)
    return values[pair.case] / values[pair.against]


def pair_outcome(ratios: pd.Series) -> str:
    """``more`` or ``less`` where every round says so and the median by :data:`MARGIN`, else ``unclear``; of fewer than
    :data:`MIN_ROUNDS` always."""
    if len(ratios) < MIN_ROUNDS or ratios.isna().any() or ratios.min() <= 1 <= ratios.max():
        return "unclear"
    if abs(ratios.median() - 1) < MARGIN:
        return "unclear"
    return "more" if ratios.min() > 1 else "less"


def _section(name: str, comparison: Comparison, table: pd.DataFrame) -> list[str]:
    lines = ["", f"## {name}: {comparison.title}", ""]
    lines += [
        "| case | s a batch | tokens/s | peak, MiB | things kept of a batch | MiB kept |",
        "|---|---|---|---|---|---|",
    ]
    for case in comparison.cases:
        rows = table[table["case"] == case]
        cells = [_spread(rows[column]) for column in (SECONDS, "tokens_per_s", PEAK, MODULES, KEPT)]
        lines.append(" | ".join([f"| {case}", *cells]) + " |")
    lines.append("")
    lines += [f"- {_pair_sentence(comparison, table, pair)}" for pair in comparison.pairs]
    if comparison.same_values:
        lines += [f"- {sentence}" for sentence in _equal_sentences(comparison, table)]
    return lines


def _pair_sentence(comparison: Comparison, table: pd.DataFrame, pair: Pair) -> str:
    ratios = paired_ratios(table, pair)
    case, against = (comparison.cases[name].label for name in (pair.case, pair.against))
    head = f"{case[0].upper()}{case[1:]}"
    if ratios.isna().any():
        return f"{head} against {against}: the {_WHAT[pair.column]} could not be compared in every round."
    outcome = pair_outcome(ratios)
    verdict = {"more": _MORE, "less": _LESS}.get(outcome, {}).get(pair.column, "no difference was shown")
    if len(ratios) < MIN_ROUNDS:
        verdict = f"{len(ratios)} round(s) are too few to show a difference"
    meaning = f"; {pair.meaning[outcome]}" if outcome in pair.meaning else ""
    return f"{head}: {_spread(ratios)} times the {_WHAT[pair.column]} of {against}: {verdict}{meaning}."


def _equal_sentences(comparison: Comparison, table: pd.DataFrame) -> list[str]:
    first, *others = comparison.cases
    against = comparison.cases[first].label
    sentences = []
    for case in others:
        rows, label = table[table["case"] == case], comparison.cases[case].label
        n_compared, n_equal = int(rows["n_compared"].max()), int(rows["n_equal"].min())
        if n_compared and (rows["n_equal"] == rows["n_compared"]).all():
            found = f"bit-equal at all {n_compared} sites in every round"
        else:
            found = f"not bit-equal: in the worst round {n_equal} of {n_compared} sites were"
        sentences.append(f"Values of {label} and of {against}: {found}.")
    return sentences


def _spread(values: pd.Series) -> str:
    """Median, and lowest to highest where they are not all the same."""
    if values.isna().all():
        return "-"
    low, middle, high = (_number(value) for value in (values.min(), values.median(), values.max()))
    return middle if low == high else f"{middle} ({low} to {high})"


def _number(value: float) -> str:
    """Four digits that matter, never an exponent."""
    digits = 3 if abs(value) < 10 else 2 if abs(value) < 100 else 1 if abs(value) < 1000 else 0
    return f"{value:,.{digits}f}" if value != int(value) else f"{value:,.0f}"
