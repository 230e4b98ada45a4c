"""All probes of a run as one table, and the controls of their designs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from anchorage.errors import AnchorageError
from anchorage.probe.design import Design, Side, design_task, lookup_accuracy
from anchorage.probe.intervals import row_intervals
from anchorage.settings import ProbeSettings
from anchorage.store.identity import check_key
from anchorage.store.reader import Cache

COLUMNS = [
    "key", "task", "site", "site_index", "accuracy", "low", "high",
    "shuffled_accuracy", "shuffled_low", "shuffled_high", "shuffled_true_accuracy", "chance",
    "balanced_accuracy", "auc", "macro_f1", "penalty", "penalty_at_end", "n_iterations", "converged",
    "n_train", "n_test", "n_train_rows", "n_test_rows", "position_only_accuracy", "token_only_accuracy", "warning",
]  # fmt: skip


def tabulate_sweep(
    paths: Sequence[Path], controls: dict[str, Any], *, seed: int, log: Callable[[str], object]
) -> pd.DataFrame:
    """Bring the probes' files into one table, with intervals that hold for all sites of a task at once.

    Args:
        paths: the probes' files, tasks one after the other, sites in running order.
        controls: content of ``controls.json``.
        seed: of the bootstrap.
        log: gets a line a task: at how many of its sites the penalty lies at an end of the grid, and the
            fit did not converge.

    Returns:
        The columns of :data:`COLUMNS`.

    Raises:
        AnchorageError: a file belongs to another capture key than the controls, or was tested on other tokens than the
            first of its task.
    """
    probes = [json.loads(path.read_text()) for path in paths]
    first: dict[str, dict[str, Any]] = {}
    for path, probe in zip(paths, probes, strict=True):
        check_key(str(path), probe["key"], controls["key"])
        tested = {name: probe["by_test_row"][name] for name in ("row", "n")}
        if tested != first.setdefault(probe["task"], tested):
            raise AnchorageError(
                f"{path} was tested on other tokens than the first site of its task; their intervals need the same. "
                "Remove it, and run again"
            )
    tables = []
    for task, control in controls["tasks"].items():
        of_task = [probe for probe in probes if probe["task"] == task]
        warnings = [*control["warnings"], *_look_at_fits(task, of_task, log)]
        counts = np.array(of_task[0]["by_test_row"]["n"])
        table = pd.DataFrame(of_task).assign(
            site_index=range(len(of_task)),
            position_only_accuracy=control["position_only"]["test"],
            token_only_accuracy=control["token_only"]["test"],
            warning="; ".join(warnings),
        )
        for prefix in ("", "shuffled_"):
            correct = np.array([probe["by_test_row"][f"{prefix}correct"] for probe in of_task]).T
            table[f"{prefix}low"], table[f"{prefix}high"] = row_intervals(correct, counts, seed=seed)
        tables.append(table[COLUMNS])
    return pd.concat(tables, ignore_index=True)


def _look_at_fits(task: str, probes: Sequence[dict[str, Any]], log: Callable[[str], object]) -> list[str]:
    """Log what the fits of a task's sites ended with; a warning where some did not converge."""
    n_ends = sum(probe["penalty_at_end"] is True for probe in probes)  # of Adam's both are null
    n_open = sum(probe["converged"] is False for probe in probes)
    log(f"{task}: {len(probes)} sites, {n_ends} with a penalty at an end of the grid, {n_open} not converged")
    return [f"the fits of {n_open} of {len(probes)} sites ended before they had converged"] if n_open else []


def control_tasks(cache: Cache, settings: ProbeSettings, *, seed: int, log: Callable[[str], None]) -> dict[str, Any]:
    """What position alone, and the token id alone, can tell on each task's tokens; nothing, where it is matched.

    Args:
        cache: holds the probed tier; only token ids are read.
        settings: the tasks and how their tokens are chosen.
        seed: of the designs.
        log: gets a line a warning.

    Returns:
        The fields of ``controls.json``. ``ok`` is false where the cells promise chance and either of them is
        anything else, on training or test tokens.
    """
    tokens = cache.tokens(range(cache.tier_rows(settings.tier))).numpy()
    designs = [design_task(cache, task, settings=settings, seed=seed) for task in settings.tasks]
    for design in designs:
        for warning in design.warnings:
            log(f"WARNING: task {design.task}: {warning}")
    return control_designs(designs, tokens, cache.key)


def control_designs(designs: Sequence[Design], tokens: np.ndarray, key: str) -> dict[str, Any]:
    """The fields of ``controls.json`` for designs on token ids int64 ``[rows, seq_len]``."""
    tasks, faults = {}, []
    for design in designs:
        tasks[design.task] = task = _control_task(design, tokens)
        faults += [
            f"task {design.task}: a probe that sees {name} alone scores {task[name][side]} on {side} tokens, not 1/"
            f"{len(design.classes)}"
            for name in _told_by_cells(design, tokens)
            for side in ("train", "test")
            if task[name][side] != 1 / len(design.classes)
        ]
    return {"key": key, "ok": not faults, "faults": faults, "n_faults": len(faults), "tasks": tasks}


def _told_by_cells(design: Design, tokens: np.ndarray) -> list[str]:
    """Which of the controls the matching promises to be at chance: those whose thing is the same all over a cell."""
    if design.labelled.cells is None:
        return []
    rows, positions = (
        np.concatenate([getattr(side, name) for side in (design.train, design.test)]) for name in ("rows", "positions")
    )
    cells = design.labelled.cells[rows, positions]
    n_cells = len(np.unique(cells))
    seen = {"position_only": positions, "token_only": tokens[rows, positions]}
    return [name for name, keys in seen.items() if len(np.unique([cells, keys], axis=1).T) == n_cells]


def _control_task(design: Design, tokens: np.ndarray) -> dict[str, Any]:
    def lookup(train: Side, test: Side) -> dict[str, Any]:
        ids = (tokens[train.rows, train.positions], tokens[test.rows, test.positions])
        return {
            "position_only": lookup_accuracy(train, test, (train.positions, test.positions)),
            "token_only": lookup_accuracy(train, test, ids),
        }

    return {
        "matched": design.matched,
        "n_classes": len(design.classes),
        "n_train": len(design.train),
        "n_test": len(design.test),
        "n_token_ids": len(np.unique(tokens[design.train.rows, design.train.positions])),
        "chance": design.chance,
        **lookup(design.train, design.test),
        # The control of this control: without the design there is something to be had.
        "unmatched": lookup(*design.unmatched),
        "warnings": design.warnings,
    }
