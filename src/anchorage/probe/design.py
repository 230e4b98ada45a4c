"""Which tokens a probe is trained and tested on, so that its accuracy can be read.

Rows are split first, so that no row is on both sides; then, within each side, tokens are chosen. A task with cells is
*matched*: in every cell each class gets the same number of tokens, so whatever sees the cell alone scores exactly
chance. The design follows NDIF's tutorial "Caching Activations Over a Dataset".
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from anchorage.errors import AnchorageError, SettingsError
from anchorage.probe.labels import Labels, count_test_rows, label_tokens
from anchorage.settings import ProbeSettings
from anchorage.store.reader import Cache

# Of the training rows, to choose the penalty on.
VALIDATION_FRACTION = 0.25
# Below these an accuracy says little: its interval at chance is wider than 5 points to each side.
MIN_TRAIN_TOKENS, MIN_TEST_TOKENS = 1000, 400
# Below this a bootstrap over rows gives intervals that are too narrow, down to no width at all.
MIN_TEST_ROWS = 20


@dataclass(frozen=True)
class Side:
    """The chosen tokens of one side, train or test, in the order of row and position; arrays ``[tokens]``.

    Attributes:
        rows, positions: int64; where each token stands.
        labels: int64; its class.
        shuffled: int64; the same classes in a random order, for the control that has nothing to learn.
    """

    rows: np.ndarray
    positions: np.ndarray
    labels: np.ndarray
    shuffled: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Design:
    """A task's tokens on both sides.

    Attributes:
        task: its name.
        classes: names of the classes.
        n_rows, n_test_rows: rows of the tier; how many of them, the last ones, are for testing.
        train, test: the chosen tokens.
        n_found: tokens that the matching left on each side, before the limit on their number.
        n_found_rows: test rows that hold any of them.
        validation: bool ``[train tokens]``; those of the last training rows, to choose the penalty on.
        labelled: what the task says of all tokens.
    """

    task: str
    classes: Sequence[str]
    n_rows: int
    n_test_rows: int
    train: Side
    test: Side
    n_found: tuple[int, int]
    n_found_rows: int
    validation: np.ndarray
    labelled: Labels

    @property
    def matched(self) -> bool:
        """Whether every cell holds every class equally often."""
        return self.labelled.cells is not None

    @property
    def chance(self) -> float:
        """Test accuracy of always answering the class most frequent in training."""
        return float(np.mean(self.test.labels == np.bincount(self.train.labels).argmax()))

    @property
    def unmatched(self) -> tuple[Side, Side]:
        """Both sides without matching or limit: what the matching takes away shows there."""
        is_train = np.arange(self.n_rows) < self.n_rows - self.n_test_rows
        train, test = (_side(self.labelled, _labelled(self.labelled, rows)) for rows in (is_train, ~is_train))
        return train, test

    @property
    def warnings(self) -> list[str]:
        """Whether too few tokens or test rows are left, and how many rows, or what limit, would do."""
        found = []
        wanted = f"the {MIN_TRAIN_TOKENS} and {MIN_TEST_TOKENS} that are wanted at least"
        n_train, n_test = self.n_found
        if n_train < MIN_TRAIN_TOKENS or n_test < MIN_TEST_TOKENS:
            n_rows = max(_scale(self.n_rows, MIN_TRAIN_TOKENS, n_train), _scale(self.n_rows, MIN_TEST_TOKENS, n_test))
            found.append(
                f"only {n_train} training and {n_test} test tokens are left of {self.n_rows} rows; about {n_rows} rows "
                f"would give {wanted}"
            )
        if self.n_found_rows < MIN_TEST_ROWS:
            found.append(
                f"the test tokens stand in only {self.n_found_rows} rows, from which intervals come out too narrow; "
                f"about {_scale(self.n_rows, MIN_TEST_ROWS, self.n_found_rows)} rows would give the {MIN_TEST_ROWS} "
                "that are wanted at least"
            )
        kept_train, kept_test = len(self.train), len(self.test)
        if kept_train < min(MIN_TRAIN_TOKENS, n_train) or kept_test < min(MIN_TEST_TOKENS, n_test):
            limit = max(MIN_TRAIN_TOKENS, _scale(kept_train, MIN_TEST_TOKENS, kept_test))
            found.append(
                f"probe.max_tokens leaves only {kept_train} training and {kept_test} test tokens; about {limit} would "
                f"leave {wanted}, where there are so many"
            )
        return found


def make_design(task: str, tokens: np.ndarray, *, test_fraction: float, max_tokens: int | None, seed: int) -> Design:
    """Choose the tokens of a task.

    Args:
        task: its name.
        tokens: int64 ``[rows, seq_len]``, all rows of the probed tier.
        test_fraction: share of the rows, the last ones: neighbouring rows are of one text, and stay on one side.
        max_tokens: training tokens at most; None for no limit. Test tokens are limited in proportion, down to one of
            each class where the task is matched.
        seed: of every random choice.

    Raises:
        SettingsError: max_tokens is less than one token of each class.
        AnchorageError: fewer than two classes are left on a side, with how many tokens of each there were; or all
            training tokens stand in one row.
    """
    n_rows = len(tokens)
    n_test_rows = count_test_rows(n_rows, test_fraction)
    is_train = np.arange(n_rows) < n_rows - n_test_rows
    labels = label_tokens(task, tokens, is_train)
    if max_tokens is not None and max_tokens < len(labels.classes):
        raise SettingsError(
            f"{task}: probe.max_tokens is {max_tokens}, and the task has {len(labels.classes)} classes: it must be "
            f"that many at least ({MIN_TRAIN_TOKENS} or more are wanted), or null"
        )
    random = np.random.default_rng([seed, zlib.crc32(task.encode())])
    max_test = None if max_tokens is None else max(1, round(max_tokens * test_fraction / (1 - test_fraction)))
    train, found_train = _choose(labels, is_train, max_tokens, random)
    test, found_test = _choose(labels, ~is_train, max_test, random)
    for name, side in (("training", train), ("test", test)):
        _check_classes(task, labels, name, side)
    fit_rows = np.unique(train.rows)
    if len(fit_rows) < 2:
        raise AnchorageError(
            f"{task}: all training tokens stand in one row, and none is left to choose the penalty on. Give the tier "
            "more rows, lower probe.test_fraction, or raise probe.max_tokens"
        )
    first_validation_row = fit_rows[math.floor(len(fit_rows) * (1 - VALIDATION_FRACTION))]
    return Design(
        task=task,
        classes=labels.classes,
        n_rows=n_rows,
        n_test_rows=n_test_rows,
        train=train,
        test=test,
        n_found=(len(found_train), len(found_test)),
        n_found_rows=len(np.unique(found_test // tokens.shape[1])),
        validation=train.rows >= first_validation_row,
        labelled=labels,
    )


def design_task(cache: Cache, task: str, *, settings: ProbeSettings, seed: int) -> Design:
    """The design of a task on the probed tier of a cache; arguments and errors as of :func:`make_design`."""
    tokens = cache.tokens(range(cache.tier_rows(settings.tier))).numpy()
    fraction, limit = settings.test_fraction, settings.max_tokens
    return make_design(task, tokens, test_fraction=fraction, max_tokens=limit, seed=seed)


def lookup_accuracy(train: Side, test: Side, keys: tuple[np.ndarray, np.ndarray]) -> dict[str, float]:
    """Accuracy of the best probe that sees one discrete thing of a token: a table of the most frequent class for each.

    Any probe on a one-hot code of that thing, logistic regression among them, is such a table or a worse one.

    Args:
        train, test: the sides.
        keys: int64 ``[tokens]`` of each side; the thing that is seen.

    Returns:
        ``train`` and ``test`` accuracy. A key that training does not hold gets the class most frequent there.
    """
    n_classes = int(max(train.labels.max(), test.labels.max())) + 1
    seen, index = np.unique(keys[0], return_inverse=True)
    counts = np.bincount(index * n_classes + train.labels, minlength=len(seen) * n_classes)
    answers = counts.reshape(-1, n_classes).argmax(1)
    place = np.searchsorted(seen, keys[1]).clip(max=len(seen) - 1)
    unseen = np.bincount(train.labels).argmax()
    test_answers = np.where(seen[place] == keys[1], answers[place], unseen)
    return {
        "train": float(np.mean(answers[index] == train.labels)),
        "test": float(np.mean(test_answers == test.labels)),
    }


def _labelled(labels: Labels, rows: np.ndarray) -> np.ndarray:
    """Flat indices of the labelled tokens of some rows."""
    return np.flatnonzero((labels.values >= 0) & rows[:, None])


def _scale(n_now: int, wanted: int, found: int) -> int:
    """How many there must be, where so many give what was found, to give what is wanted."""
    return math.ceil(n_now * wanted / found)


def _choose(
    labels: Labels, rows: np.ndarray, limit: int | None, random: np.random.Generator
) -> tuple[Side, np.ndarray]:
    """The tokens of one side, matched where the task has cells; and the flat indices of those before the limit."""
    tokens = random.permutation(_labelled(labels, rows))
    sets = np.arange(len(tokens))
    if labels.cells is not None:
        tokens, sets = _match(labels.cells.ravel()[tokens], labels.values.ravel()[tokens], tokens, len(labels.classes))
    found, n_a_set = tokens, 1 if labels.cells is None else len(labels.classes)
    if limit is not None and len(found) > limit:
        kept = random.permutation(len(found) // n_a_set)[: max(1, limit // n_a_set)]
        tokens = tokens[np.isin(sets, kept)]
    side = _side(labels, np.sort(tokens))
    random.shuffle(side.shuffled)
    return side, found


def _match(cells: np.ndarray, values: np.ndarray, tokens: np.ndarray, n_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Keep, of every cell, the first n tokens of each class, n being the smallest class's count.

    Args:
        cells, values, tokens: ``[tokens]`` in random order: cell, class, and the token's index.
        n_classes: how many classes there are.

    Returns:
        The kept tokens, and for each the number of its set: a set is a token of each class of one cell.
    """
    known, cell = np.unique(cells, return_inverse=True)
    counts = np.bincount(cell * n_classes + values, minlength=len(known) * n_classes).reshape(-1, n_classes)
    n_sets = counts.min(1)
    # Sorted stably by cell and class, a token's rank within its group is its distance from the group's start.
    order = np.argsort(cell * n_classes + values, kind="stable")
    groups = (cell * n_classes + values)[order]
    ranks = np.arange(len(order)) - np.searchsorted(groups, groups)
    kept = ranks < n_sets[cell[order]]
    first_set = np.concatenate([[0], np.cumsum(n_sets)])[:-1]
    return tokens[order][kept], (first_set[cell[order]] + ranks)[kept]


def _side(labels: Labels, tokens: np.ndarray) -> Side:
    rows, positions = np.divmod(tokens, labels.values.shape[1])
    values = labels.values.ravel()[tokens].astype(np.int64)
    return Side(rows, positions, values, values.copy())


def _check_classes(task: str, labels: Labels, name: str, side: Side) -> None:
    if len(np.unique(side.labels)) < 2:
        total = {str(label): int(np.sum(labels.values == number)) for number, label in enumerate(labels.classes)}
        matched = " after matching" if labels.cells is not None else ""
        raise AnchorageError(
            f"{task}: the {name} rows hold {len(side)} tokens of {len(np.unique(side.labels))} class(es){matched}, "
            f"and two classes are needed. Tokens of all rows by class: {total}. Give the tier more rows, change "
            "probe.test_fraction, raise probe.max_tokens, or take the task out of probe.tasks"
        )
