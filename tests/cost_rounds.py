"""Made-up rounds of costs, every case of every comparison there."""

from __future__ import annotations

from typing import Any

import pandas as pd

from anchorage.costs.cases import COMPARISONS
from anchorage.costs.comparison import COLUMNS, ROUNDS


def cost_round(number: int, key: str = "k") -> pd.DataFrame:
    """A whole round in which every case does the same."""
    rows = [
        {"comparison": name, "case": case, "position": position}
        | ({"n_compared": 33, "n_equal": 33} if comparison.same_values else {})
        for name, comparison in COMPARISONS.items()
        for position, case in enumerate(comparison.cases)
    ]
    numbers = {"batches": 4, "tokens": 4096, "seconds_per_batch": 1.0, "tokens_per_s": 1024.0}
    memory = {"peak_mib": 100.0, "n_modules": 33, "kept_mib": 36.0}
    return pd.DataFrame(rows, columns=COLUMNS).assign(key=key, round=number, **numbers, **memory)


def cost_table(**changes: dict[str, Any]) -> pd.DataFrame:
    """All rounds, in order; changes are columns by case: a value for all rounds, or one for each."""
    table = pd.concat([cost_round(number) for number in range(ROUNDS)], ignore_index=True)
    for case, columns in changes.items():
        for column, values in columns.items():
            table[column] = table[column].astype(float)
            table.loc[table["case"] == case, column] = values
    return table
