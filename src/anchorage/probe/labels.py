"""What a task is: labels of tokens, from the token ids alone.

A task is a module of :mod:`anchorage.probe.tasks` with one function, ``label(tokens, train_rows) -> Labels``. Its name
in the configuration is the module's, with dashes: ``duplicate-token`` is ``tasks/duplicate_token.py``. To add a task,
add such a file.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from anchorage.digest import code_digest
from anchorage.errors import SettingsError, did_you_mean

_FOLDER = Path(__file__).parent
_TASK_FOLDER = _FOLDER / "tasks"
# Modules of the package that decide nothing of a probe: which there are, and their table.
_BESIDE = {"__init__", "targets", "sweep"}


@dataclass(frozen=True)
class Labels:
    """The labels that a task gives to tokens.

    Attributes:
        values: int ``[rows, seq_len]``, a class number each; -1 where the task says nothing about a token.
        classes: names of the classes.
        cells: int64 ``[rows, seq_len]``, or None. Tokens of one cell look alike to a probe that is to learn nothing:
            within each cell every class will be given the same number of tokens.
    """

    values: np.ndarray
    classes: Sequence[str]
    cells: np.ndarray | None = None


def known_tasks() -> list[str]:
    """Names of all tasks there are."""
    return sorted(path.stem.replace("_", "-") for path in _TASK_FOLDER.glob("*.py") if path.stem != "__init__")


def check_tasks(tasks: Sequence[str]) -> None:
    """Refuse names of tasks that do not exist, or that occur twice.

    Raises:
        SettingsError: names them all.
    """
    known = known_tasks()
    faults = [f"unknown task {name!r}{did_you_mean(name, known)}" for name in tasks if name not in known]
    faults += [f"task {name!r} is given twice" for name in dict.fromkeys(tasks) if list(tasks).count(name) > 1]
    if faults:
        raise SettingsError(f"probe.tasks: {'; '.join(faults)} (tasks are {', '.join(known)})")


def count_test_rows(n_rows: int, test_fraction: float) -> int:
    """How many of a tier's rows, the last ones, are for testing: one at least, and not all."""
    return min(max(1, round(n_rows * test_fraction)), n_rows - 1)


def label_tokens(task: str, tokens: np.ndarray, train_rows: np.ndarray) -> Labels:
    """Give every token its label.

    Args:
        task: a name of :func:`known_tasks`.
        tokens: int64 ``[rows, seq_len]``.
        train_rows: bool ``[rows]``; what a task learns from the text, such as which ids are frequent, it may learn
            from these rows only.
    """
    module = importlib.import_module(f"anchorage.probe.tasks.{task.replace('-', '_')}")
    labels: Labels = module.label(tokens, train_rows)
    assert labels.values.shape == tokens.shape, task
    assert labels.values.max(initial=-1) < len(labels.classes), task
    return labels


def task_digest(task: str) -> str:
    """Digest of the modules that decide a task's probes: an edit of them makes just these probes anew."""
    shared = [f"probe.{path.stem}" for path in _FOLDER.glob("*.py") if path.stem not in _BESIDE]
    return code_digest(f"probe.tasks.{task.replace('-', '_')}", *shared)
