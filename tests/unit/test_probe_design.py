"""Tasks and designs: which tokens get which label, and which of them a probe is trained and tested on.

Goal: labels are right, no row is on both sides, and a matched design leaves nothing to position or token id. Method:
random tokens of few ids, so that repeats are frequent, and hand-made labels. Oracles: loops over sets, counters and
dictionaries. Controls: unmatched sides give the answer away, and ids frequent in the test rows only are no class.
"""

from __future__ import annotations

import shutil
from collections import Counter, defaultdict
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from anchorage import digest as digest_module
from anchorage.errors import AnchorageError, SettingsError
from anchorage.probe import design as design_module
from anchorage.probe import labels as labels_module
from anchorage.probe.design import (
    MIN_TEST_TOKENS,
    MIN_TRAIN_TOKENS,
    VALIDATION_FRACTION,
    Design,
    Side,
    lookup_accuracy,
    make_design,
)
from anchorage.probe.labels import Labels, check_tasks, known_tasks, label_tokens, task_digest

TASKS = ["duplicate-token", "position", "previous-token"]
quick = settings(max_examples=60, deadline=None, derandomize=True)
few_ids = arrays(np.int64, array_shapes(min_dims=2, max_dims=2, max_side=12), elements=st.integers(0, 6))


def draw_tokens(n_rows: int = 60, seq_len: int = 16, *, n_ids: int = 30, seed: int = 0) -> np.ndarray:
    """Token ids of which the low ones are frequent, as in text."""
    chances = 1 / np.arange(1, n_ids + 1)
    return np.random.default_rng(seed).choice(n_ids, (n_rows, seq_len), p=chances / chances.sum())


def make(task: str, tokens: np.ndarray, *, max_tokens: int | None = None, seed: int = 0, test_fraction: float = 0.25):
    return make_design(task, tokens, test_fraction=test_fraction, max_tokens=max_tokens, seed=seed)


def made_up(monkeypatch: pytest.MonkeyPatch, labels: Labels) -> None:
    """Let every task give these labels."""
    monkeypatch.setattr(design_module, "label_tokens", lambda task, tokens, train_rows: labels)


def places(side: Side) -> list[tuple[int, int]]:
    return list(zip(side.rows.tolist(), side.positions.tolist(), strict=True))


def naive_duplicates(tokens: np.ndarray) -> list[list[int]]:
    found = []
    for row in tokens.tolist():
        seen: set[int] = set()
        found.append([])
        for token in row:
            found[-1].append(int(token in seen))
            seen.add(token)
    return found


def naive_lookup(train: tuple[Sequence[int], Sequence[int]], test: tuple[Sequence[int], Sequence[int]]):
    """Accuracies of a table from a key to its most frequent label, of equals the lowest; arguments are keys, labels."""
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    for key, label in zip(*train, strict=True):
        counts[key][label] += 1

    def most_frequent(counter: Counter[int]) -> int:
        return min(counter, key=lambda label: (-counter[label], label))

    unseen = most_frequent(Counter(train[1]))
    found = {}
    for name, (keys, labels) in (("train", train), ("test", test)):
        hits = [
            label == (most_frequent(counts[key]) if key in counts else unseen)
            for key, label in zip(keys, labels, strict=True)
        ]
        found[name] = sum(hits) / len(hits)
    return found


def cell_counts(side: Side, tokens: np.ndarray) -> dict[tuple[int, int], Counter[int]]:
    """How many tokens of each class every (position, id) holds."""
    counts: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for (row, position), label in zip(places(side), side.labels.tolist(), strict=True):
        counts[position, int(tokens[row, position])][label] += 1
    return counts


def lookups(design: Design, tokens: np.ndarray, sides: tuple[Side, Side]) -> list[dict[str, float]]:
    """What position alone, and token id alone, give on two sides."""
    train, test = sides
    ids = tokens[train.rows, train.positions], tokens[test.rows, test.positions]
    return [lookup_accuracy(train, test, (train.positions, test.positions)), lookup_accuracy(train, test, ids)]


# Labels


@quick
@given(few_ids)
def test_a_duplicate_is_a_token_whose_id_was_seen_in_its_row(tokens):
    labels = label_tokens("duplicate-token", tokens, np.ones(len(tokens), bool))
    assert labels.values.tolist() == naive_duplicates(tokens)
    assert labels.classes == ("first", "repeat")
    # A cell is a position and an id: as many cells as pairs of them, and each pair in one cell only.
    pairs = {
        (position, token, cell)
        for row, cells in zip(tokens.tolist(), labels.cells.tolist(), strict=True)
        for position, (token, cell) in enumerate(zip(row, cells, strict=True))
    }
    assert len(pairs) == len({cell for *_, cell in pairs}) == len({(position, token) for position, token, _ in pairs})


@quick
@given(few_ids, st.data())
def test_previous_token_is_the_class_of_the_token_before(tokens, data):
    train = data.draw(arrays(bool, len(tokens)))
    before = Counter(token for row in tokens[train].tolist() for token in row[:-1])
    frequent = sorted(before, key=lambda token: (-before[token], token))[:16]
    naive = [
        [-1] + [frequent.index(token) if token in frequent else -1 for token in row[:-1]] for row in tokens.tolist()
    ]
    labels = label_tokens("previous-token", tokens, train)
    assert labels.values.tolist() == naive
    assert list(labels.classes) == [f"after {token}" for token in frequent]
    assert labels.cells is None


def test_previous_token_learns_its_classes_from_training_rows_only():
    tokens = draw_tokens(n_ids=40)
    tokens[45:, ::2] = 99  # in every test row, and in no other
    train = np.arange(60) < 45
    labels = label_tokens("previous-token", tokens, train)
    assert len(labels.classes) == 16
    assert "after 99" not in labels.classes
    assert label_tokens("previous-token", tokens, ~train).classes[0] == "after 99"  # the control


@pytest.mark.parametrize(
    ("seq_len", "classes"),
    [
        (8, [0, 1, 2, 3, 4, 5, 6, 7]),
        (64, sorted([*range(8)] * 8)),
        (10, [0, 0, 1, 2, 3, 4, 4, 5, 6, 7]),
        (5, [0, 1, 2, 3, 4]),
        (1, [0]),
    ],
)
def test_position_is_an_eighth_of_the_row(seq_len, classes):
    labels = label_tokens("position", np.zeros((3, seq_len), np.int64), np.ones(3, bool))
    assert labels.values.tolist() == [classes] * 3
    for position, number in enumerate(classes):
        eighth = int(labels.classes[number].removeprefix("eighth "))
        assert Fraction(eighth - 1, 8) <= Fraction(position, seq_len) < Fraction(eighth, 8)
    assert len(labels.classes) == len(set(classes))


def test_known_tasks_are_the_files_there_are(tmp_path, monkeypatch):
    assert known_tasks() == TASKS
    for name in ("__init__", "a_new_one", "position"):
        (tmp_path / f"{name}.py").touch()
    monkeypatch.setattr(labels_module, "_TASK_FOLDER", tmp_path)
    assert known_tasks() == ["a-new-one", "position"]


def test_wrong_tasks_are_named_all_at_once():
    check_tasks(TASKS)
    with pytest.raises(SettingsError) as caught:
        check_tasks(["duplicate-tokens", "position", "zzz", "position"])
    said = str(caught.value)
    assert said.startswith("probe.tasks: unknown task 'duplicate-tokens'; did you mean duplicate-token")
    assert (
        "unknown task 'zzz'; task 'position' is given twice (tasks are duplicate-token, position, previous-token)"
        in said
    )
    assert said.count("twice") == 1


def test_the_task_digest_is_of_the_shared_modules_and_the_task_itself(tmp_path, monkeypatch):
    package = tmp_path / "package"
    shutil.copytree(Path(digest_module.__file__).parent, package)
    folder = package / "probe"
    genuine = {task: task_digest(task) for task in TASKS}
    assert len(set(genuine.values())) == 3
    monkeypatch.setattr(digest_module, "_PACKAGE", package)
    monkeypatch.setattr(labels_module, "_FOLDER", folder)
    assert {task: task_digest(task) for task in TASKS} == genuine  # of content, not of place

    def changed_by_an_edit_of(name: str) -> set[str]:
        before = {task: task_digest(task) for task in TASKS}
        with open(folder / name, "a") as file:
            file.write("# an edit\n")
        return {task for task in TASKS if task_digest(task) != before[task]}

    assert changed_by_an_edit_of("tasks/position.py") == {"position"}
    assert changed_by_an_edit_of("tasks/duplicate_token.py") == {"duplicate-token"}
    assert changed_by_an_edit_of("solver.py") == set(TASKS)
    assert changed_by_an_edit_of("sweep.py") == set()
    (folder / "tasks/another.py").touch()
    assert {task: task_digest(task) for task in TASKS} != genuine  # as the edits left it
    assert changed_by_an_edit_of("tasks/another.py") == set()


# Sides


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("test_fraction", "n_test_rows"), [(0.25, 15), (0.5, 30), (0.05, 3), (0.9, 54)])
def test_the_last_rows_are_for_testing_and_no_row_is_on_both_sides(task, test_fraction, n_test_rows):
    design = make(task, draw_tokens(seq_len=40, n_ids=20), test_fraction=test_fraction)
    assert (design.n_rows, design.n_test_rows) == (60, n_test_rows)
    for train, test in ((design.train, design.test), design.unmatched):
        assert train.rows.max() < 60 - n_test_rows <= test.rows.min()
        for side in (train, test):
            assert places(side) == sorted(set(places(side)))


@pytest.mark.parametrize("task", TASKS)
def test_a_token_on_a_side_has_the_label_of_its_place(task):
    tokens = draw_tokens()
    labels = label_tokens(task, tokens, np.arange(60) < 45)
    design = make(task, tokens, max_tokens=200)
    assert list(design.classes) == list(labels.classes)
    for side in (design.train, design.test, *design.unmatched):
        assert side.labels.tolist() == [labels.values[place] for place in places(side)]
        assert side.labels.dtype == side.shuffled.dtype == np.int64


@pytest.mark.parametrize("task", ["position", "previous-token"])
def test_without_matching_or_limit_all_labelled_tokens_are_kept(task):
    tokens = draw_tokens()
    labels = label_tokens(task, tokens, np.arange(60) < 45)
    labelled = [(row, position) for row in range(60) for position in range(16) if labels.values[row, position] >= 0]
    design = make(task, tokens)
    assert not design.matched
    assert places(design.train) + places(design.test) == labelled
    assert design.n_found == (len(design.train), len(design.test))
    assert [places(side) for side in design.unmatched] == [places(design.train), places(design.test)]


@pytest.mark.parametrize("max_tokens", [None, 300, 51, 2])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_matched_cells_hold_every_class_equally_often(max_tokens, seed):
    tokens = draw_tokens(n_rows=120, seed=seed)
    design = make("duplicate-token", tokens, max_tokens=max_tokens, seed=seed)
    assert design.matched
    for side, found, whole in zip((design.train, design.test), design.n_found, design.unmatched, strict=True):
        assert all(counts[0] == counts[1] for counts in cell_counts(side, tokens).values())
        as_many_as_can_be = sum(2 * min(counts[0], counts[1]) for counts in cell_counts(whole, tokens).values())
        assert found == as_many_as_can_be > 50
        if max_tokens is None:
            assert len(side) == found
    if max_tokens is not None:
        assert len(design.train) == max_tokens // 2 * 2
        assert len(design.test) == max(2, round(max_tokens / 3) // 2 * 2)
    if max_tokens == 51:
        assert design.train.positions.max() >= 12  # drawn from all cells, not the first ones
    # The control: before the matching the cells were uneven.
    assert any(counts[0] != counts[1] for counts in cell_counts(design.unmatched[0], tokens).values())


@pytest.mark.parametrize("n_classes", [2, 3, 5])
def test_any_number_of_classes_can_be_matched(monkeypatch, n_classes):
    random = np.random.default_rng(n_classes)
    values = random.integers(-1, n_classes, (80, 12))
    cells = random.integers(0, 7, (80, 12)) * 10**12  # far apart
    made_up(monkeypatch, Labels(values, [f"c{n}" for n in range(n_classes)], cells))
    for max_tokens in (None, 90):
        design = make("made-up", values, max_tokens=max_tokens)
        for side, found, rows in zip((design.train, design.test), design.n_found, (slice(60), slice(60, 80)), strict=1):
            here = Counter(zip(cells[side.rows, side.positions].tolist(), side.labels.tolist(), strict=True))
            all_there = Counter(zip(cells[rows].ravel().tolist(), values[rows].ravel().tolist(), strict=True))
            known = {cell for cell, _ in all_there}
            for cell in known:
                assert len({here[cell, label] for label in range(n_classes)}) == 1
            assert found == sum(n_classes * min(all_there[cell, label] for label in range(n_classes)) for cell in known)
            limit = {None: found, 90: 90 if side is design.train else 30}[max_tokens]
            assert len(side) == min(found, limit) // n_classes * n_classes > 0
        keys = cells[design.train.rows, design.train.positions], cells[design.test.rows, design.test.positions]
        assert lookup_accuracy(design.train, design.test, keys) == dict.fromkeys(("train", "test"), 1 / n_classes)


@pytest.mark.parametrize("task", ["position", "previous-token"])
def test_the_limit_is_of_training_tokens_and_in_proportion_of_test_tokens(task):
    whole = make(task, draw_tokens())
    design = make(task, draw_tokens(), max_tokens=120)
    assert (len(design.train), len(design.test)) == (120, 40)
    assert design.n_found == whole.n_found
    assert set(places(design.train)) < set(places(whole.train))
    assert len(set(design.train.rows.tolist())) > 20  # drawn from all over, not the first ones
    generous = make(task, draw_tokens(), max_tokens=10**6)
    assert places(generous.train) == places(whole.train)


@pytest.mark.parametrize("task", TASKS)
def test_the_seed_decides_the_tokens(task):
    tokens = draw_tokens()
    one, again, other = (make(task, tokens, max_tokens=150, seed=seed) for seed in (3, 3, 4))
    for name in ("rows", "positions", "labels", "shuffled"):
        assert np.array_equal(getattr(one.train, name), getattr(again.train, name))
        assert np.array_equal(getattr(one.test, name), getattr(again.test, name))
    assert places(one.train) != places(other.train)
    assert places(one.test) != places(other.test)


@pytest.mark.parametrize("task", TASKS)
def test_shuffled_labels_are_a_permutation_that_knows_nothing(task):
    design = make(task, draw_tokens(n_rows=400))
    for side in (design.train, design.test):
        assert Counter(side.shuffled.tolist()) == Counter(side.labels.tolist())
        by_chance = np.sum((np.bincount(side.labels) / len(side)) ** 2)
        assert np.mean(side.shuffled == side.labels) == pytest.approx(by_chance, abs=4 * np.sqrt(0.25 / len(side)))


@pytest.mark.parametrize("n_rows", [8, 9, 40, 61])
@pytest.mark.parametrize("task", TASKS)
def test_the_last_training_rows_are_for_validation(task, n_rows):
    design = make(task, draw_tokens(n_rows, 64, n_ids=40), test_fraction=0.5)
    rows = sorted(set(design.train.rows.tolist()))
    fitted = set(design.train.rows[~design.validation].tolist())
    validation = set(design.train.rows[design.validation].tolist())
    assert design.validation.shape == design.train.rows.shape
    assert max(fitted) < min(validation)
    assert len(validation) == len(rows) - int(len(rows) * (1 - VALIDATION_FRACTION))
    assert not validation & set(design.test.rows.tolist())


# What the design leaves to a probe that sees the position or the id alone


@quick
@given(st.data())
def test_lookup_accuracy_is_that_of_a_table(data):
    def side(n: int) -> tuple[list[int], list[int]]:
        return tuple(data.draw(st.lists(st.integers(0, high), min_size=n, max_size=n)) for high in (5, 3))  # type: ignore

    (train_keys, train_labels), (test_keys, test_labels) = (side(data.draw(st.integers(1, 25))) for _ in range(2))
    sides = [
        Side(np.zeros(len(labels), np.int64), np.arange(len(labels)), np.array(labels), np.array(labels))
        for labels in (train_labels, test_labels)
    ]
    keys = np.array(train_keys), np.array(test_keys) * 2 - 3  # keys below, between, above those of training
    found = lookup_accuracy(*sides, keys)
    assert found == naive_lookup((train_keys, train_labels), ((np.array(test_keys) * 2 - 3).tolist(), test_labels))


@pytest.mark.parametrize("max_tokens", [None, 200])
@pytest.mark.parametrize("seed", range(3))
def test_a_matched_design_leaves_exactly_chance_and_an_unmatched_one_does_not(max_tokens, seed):
    tokens = draw_tokens(n_rows=120, seed=seed)
    design = make("duplicate-token", tokens, max_tokens=max_tokens, seed=seed)
    matched = lookups(design, tokens, (design.train, design.test))
    assert matched == [{"train": 0.5, "test": 0.5}] * 2
    assert design.chance == 0.5
    for accuracies in lookups(design, tokens, design.unmatched):
        assert min(accuracies.values()) > 0.6


def test_chance_is_the_test_share_of_the_class_most_frequent_in_training(monkeypatch):
    values = np.array([[0, 1, 1, 1], [0, 0, 1, 2], [2, 2, 1, -1], [2, 2, 1, 0]])
    made_up(monkeypatch, Labels(values, ("a", "b", "c")))
    assert make("made-up", values, test_fraction=0.5).chance == 2 / 7  # class 1, not the 2 that tests hold most of


# Too little


@pytest.mark.parametrize(
    ("n_rows", "n_train", "n_test", "wanted"),
    [
        (100, MIN_TRAIN_TOKENS, MIN_TEST_TOKENS, None),
        (100, MIN_TRAIN_TOKENS - 2, MIN_TEST_TOKENS, 101),
        (100, MIN_TRAIN_TOKENS, MIN_TEST_TOKENS - 2, 101),
        (100, 500, 100, 400),
        (60, 100, 300, 600),
    ],
)
def test_too_few_tokens_give_a_warning_with_the_rows_needed(monkeypatch, n_rows, n_train, n_test, wanted):
    values = np.full((n_rows, 40), -1)
    for start, n in ((0, n_train), (n_rows // 2, n_test)):
        half = values[
            start : start + n_rows // 2
        ].T  # all rows' first tokens first: they stand in as many rows as can be
        half.flat[:n] = np.arange(n) % 2
    made_up(monkeypatch, Labels(values, ("a", "b")))
    warnings = make("made-up", values, test_fraction=0.5).warnings
    if wanted is None:
        assert warnings == []
    else:
        (warning,) = warnings
        assert f"only {n_train} training and {n_test} test tokens are left of {n_rows} rows" in warning
        assert f"about {wanted} rows would give the 1000 and 400" in warning
        limited = make("made-up", values, test_fraction=0.5, max_tokens=50).warnings
        assert limited[0] == warning  # of what was found


@pytest.mark.parametrize(
    ("max_tokens", "test_fraction", "left", "wanted"),
    [
        (1000, 0.5, None, None),
        (999, 0.5, "999 training and 999 test", "1000"),
        (1199, 0.25, "1199 training and 400 test", None),
        (1000, 0.25, "1000 training and 333 test", "1202"),
        (500, 0.25, "500 training and 167 test", "1198"),
        (None, 0.25, None, None),
    ],
)
def test_a_limit_that_leaves_too_few_tokens_gives_a_warning_with_one_that_would_do(
    max_tokens, test_fraction, left, wanted
):
    tokens = draw_tokens(n_rows=400)
    warnings = make("position", tokens, max_tokens=max_tokens, test_fraction=test_fraction).warnings
    if wanted is None:
        assert warnings == []
    else:
        (warning,) = warnings
        assert f"probe.max_tokens leaves only {left} tokens; about {wanted} would leave the 1000 and 400" in warning


@pytest.mark.parametrize(("n_rows", "found", "wanted"), [(80, 20, None), (76, 19, 80), (53, 13, 82), (10, 2, 100)])
def test_too_few_test_rows_give_a_warning_with_the_rows_needed(n_rows, found, wanted):
    tokens = draw_tokens(n_rows=n_rows, seq_len=500)  # of tokens there are enough
    for max_tokens in (None, 1600):
        warnings = make("position", tokens, max_tokens=max_tokens).warnings
        if wanted is None:
            assert warnings == []
        else:
            (warning,) = warnings
            assert (
                f"stand in only {found} rows, from which intervals come out too narrow; about {wanted} rows" in warning
            )


def test_rows_without_a_test_token_do_not_count(monkeypatch):
    values = np.arange(80 * 200).reshape(80, 200) % 2
    values[65:] = -1
    made_up(monkeypatch, Labels(values, ("a", "b")))
    assert "stand in only 5 rows" in make("made-up", values).warnings[0]


@pytest.mark.parametrize(("task", "n_classes"), [("duplicate-token", 2), ("previous-token", 16), ("position", 8)])
def test_a_limit_below_one_token_a_class_is_refused(task, n_classes):
    tokens = draw_tokens(n_rows=400)
    with pytest.raises(SettingsError, match=f"max_tokens is {n_classes - 1}, and the task has {n_classes} classes"):
        make(task, tokens, max_tokens=n_classes - 1)
    assert len(make(task, tokens, max_tokens=n_classes).train) == n_classes


@pytest.mark.parametrize(
    ("task", "tokens", "said"),
    [
        ("duplicate-token", np.arange(32).reshape(4, 8), r"0 tokens of 0 class.*matching.*{'first': 32, 'repeat': 0}"),
        ("previous-token", np.full((4, 3), 7), r"6 tokens of 1 class.*{'after 7': 8}"),
        ("previous-token", np.zeros((4, 1), np.int64), r"0 tokens of 0 class.*{}"),
        ("position", np.zeros((4, 1), np.int64), r"3 tokens of 1 class.*{'eighth 1': 4}"),
        ("position", np.zeros((1, 8), np.int64), r"test rows hold 0 tokens of 0 class"),
    ],
)
def test_fewer_than_two_classes_are_refused_with_the_counts(task, tokens, said):
    with pytest.raises(AnchorageError, match=rf"^{task}: the \w+ rows hold {said}" if "rows" not in said else said):
        make(task, tokens)


def test_a_class_missing_on_the_test_side_alone_is_refused():
    tokens = np.tile([[1, 2, 3, 4], [2, 2, 3, 4]], (4, 1))
    assert len(make("duplicate-token", tokens).test) > 0  # the control
    tokens[6:] = [1, 2, 3, 4]
    with pytest.raises(AnchorageError, match="duplicate-token: the test rows hold 0 tokens"):
        make("duplicate-token", tokens)


def test_training_tokens_of_one_row_are_refused_for_none_is_left_to_choose_the_penalty_on():
    with pytest.raises(AnchorageError, match="position: all training tokens stand in one row"):
        make("position", draw_tokens(2))
    assert len(make("position", draw_tokens(3)).train) == 32  # the control: three rows will do


@quick
@given(arrays(np.int64, st.tuples(st.integers(1, 5), st.integers(1, 6)), elements=st.integers(0, 2)), st.data())
def test_tiny_inputs_give_a_design_or_a_clear_error(tokens, data):
    task = data.draw(st.sampled_from(TASKS))
    limit = data.draw(st.sampled_from([None, 1, 2, 5]))
    said = []
    try:
        design = make(task, tokens, max_tokens=limit, test_fraction=data.draw(st.sampled_from([0.01, 0.5, 0.99])))
    except AnchorageError as error:
        said.append(str(error))
    if said:
        assert said[0].startswith(f"{task}: ")
        return
    for side in (design.train, design.test):
        assert len(set(side.labels.tolist())) >= 2
    assert 0 < design.validation.sum() < len(design.train)
