"""Rounds of measurements: every case once, each in a fresh process, none beside another."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from anchorage.costs.comparison import COLUMNS, Comparison
from anchorage.errors import MeasurementError
from anchorage.settings import Settings
from anchorage.store.identity import check_key, key_of

_STDERR_LINES = 30


def measure_round(
    settings: Settings,
    model_path: Path,
    tokens_path: Path,
    *,
    number: int,
    comparisons: Mapping[str, Comparison],
    log: Callable[[str], None],
) -> pd.DataFrame:
    """Measure every case once.

    Args:
        settings: the configuration.
        model_path, tokens_path: the resolved model, and the corpus.
        number: of the round, which rotates the order of a comparison's cases.
        comparisons: by name, from ``cases.COMPARISONS``, where a fresh process looks them up.
        log: gets a line a case.

    Returns:
        The columns of :data:`COLUMNS`, a line a case in the order in which they ran.

    Raises:
        MeasurementError: a case fails; names it, and shows what its process said.
    """
    key = key_of(settings, json.loads(model_path.read_text()))
    request = {"settings": settings.model_dump(mode="json"), "model": str(model_path), "tokens": str(tokens_path)}
    lines: list[dict[str, Any]] = []
    with tqdm(
        total=sum(len(comparison.cases) for comparison in comparisons.values()),
        desc=f"round {number}",
        unit="case",
        disable=None,
    ) as bar:
        for name, comparison in comparisons.items():
            answers = {}
            for position, case in enumerate(rotate(list(comparison.cases), number)):
                answers[case] = answer = _ask(request | {"comparison": name, "case": case}) | {"position": position}
                seconds, peak = answer["seconds"] / answer["batches"], answer["peak_mib"]
                log(f"round {number}, {name}, {case}: {seconds:.3f} s a batch, peak {peak} MiB")
                bar.update()
            lines += [{"key": key, "comparison": name, "round": number} | line for line in _lines(comparison, answers)]
    return pd.DataFrame(lines, columns=COLUMNS)


def rotate(cases: Sequence[str], number: int) -> list[str]:
    """The order of a round: each goes first in turn, so that a drift of the machine favours none."""
    start = number % len(cases)
    return [*cases[start:], *cases[:start]]


def _ask(request: Mapping[str, Any]) -> dict[str, Any]:
    """Run a case in a fresh process, which ends when this one does."""
    done = subprocess.run(
        [sys.executable, "-m", "anchorage.costs.process"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    how = f"ended with {done.returncode}"
    if done.returncode < 0:
        how = f"was ended by {signal.Signals(-done.returncode).name}; by SIGKILL often means: no memory left"
    said = "\n".join(done.stderr.splitlines()[-_STDERR_LINES:])
    raise MeasurementError(f"case {request['case']} of comparison {request['comparison']} {how}:\n{said}")


def _lines(comparison: Comparison, answers: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Lines of the table from what the processes answered, in the order in which they ran."""
    first = answers[next(iter(comparison.cases))]["digests"]
    lines = []
    for case, answer in answers.items():
        line = dict(answer) | {"case": case}
        line["seconds_per_batch"] = round(answer["seconds"] / answer["batches"], 5)
        line["tokens_per_s"] = round(answer["tokens"] / answer["seconds"], 2)
        line["kept_mib"] = round(answer["kept_mib"], 3)
        if comparison.same_values:
            names = first.keys() | answer["digests"].keys()
            line["n_compared"] = len(names)
            line["n_equal"] = sum(first.get(name) == answer["digests"].get(name) for name in names)
        lines.append(line)
    return lines


def tabulate_rounds(paths: Sequence[Path], *, key: str, comparisons: Mapping[str, Comparison]) -> pd.DataFrame:
    """Bring all rounds into one table, comparisons and cases in their own order.

    Args:
        paths: of the rounds' tables.
        key: the capture key that the present configuration and model give.
        comparisons: what must be there.

    Raises:
        AnchorageError: a round is of another key, or lacks a case.
    """
    cases = pd.DataFrame(
        [(name, case) for name, comparison in comparisons.items() for case in comparison.cases],
        columns=["comparison", "case"],
    )
    tables = []
    for path in paths:
        table = pd.read_csv(path)
        for found in table["key"].unique():
            check_key(str(path), found, key)
        if len(table) != len(cases) or len(cases.merge(table)) != len(cases):
            raise MeasurementError(f"{path} does not hold each case once. Remove it, and run the command again")
        tables.append(table)
    return cases.merge(pd.concat(tables))[COLUMNS]
