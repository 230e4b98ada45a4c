"""The full-batch solver, the figures of merit and the intervals.

Goal: probes are the optimum they are said to be, their merits are the usual ones, and intervals hold as often as they
claim. Method: random data, easy and awkward. Oracles: scikit-learn in float64, torch's autograd for the criterion, a
bootstrap written as a loop over draws, and simulated tables whose true accuracies are known. Controls: fits stopped
early, planted labels beside empty ones, intervals that forget the rows or the number of sites.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import sklearn.metrics
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.linear_model import LogisticRegression

from anchorage.probe import metrics
from anchorage.probe.intervals import row_intervals
from anchorage.probe.solver import TOLERANCE, Solution, decide, solve_path

PENALTIES = (0.1, 0.01, 0.001)
TIGHT = 1e-9
quick = settings(max_examples=80, deadline=None, derandomize=True)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def draw_data(kind: str, n_classes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, np.ndarray]:
    """Features of mean 0 and variance 1, and labels that they tell something about: to train on, and 1,000 to test."""
    random = np.random.default_rng(5)
    n_train, width = (60, 150) if kind == "wide" else (500, 8)
    features = random.normal(size=(n_train + 1000, width))
    if kind == "collinear":  # copies, sums, and a pair that differs by little
        features[:, 4:6] = features[:, :2]
        features[:, 6] = features[:, 0] + features[:, 1]
        features[:, 7] = features[:, 2] + 1e-5 * features[:, 7]
    if kind == "constant":
        features[:, 3] = 7.0
    deviation = features[:n_train].std(0)
    features = (features - features[:n_train].mean(0)) / np.where(deviation > 0, deviation, np.inf)
    signal = 1.5 * features[:, :4] @ random.normal(size=(4, n_classes)) + np.linspace(0, 1, n_classes)
    labels = (signal + (0 if kind == "separable" else random.gumbel(size=signal.shape))).argmax(1)
    train, test = torch.from_numpy(features).split([n_train, 1000])
    return train, torch.from_numpy(labels[:n_train]), test, labels[n_train:]


def reference(features: torch.Tensor, labels: torch.Tensor, penalty: float) -> LogisticRegression:
    fit = LogisticRegression(C=1 / (penalty * len(labels)), solver="newton-cholesky", tol=1e-12, max_iter=1000)
    return fit.fit(features.numpy(), labels.numpy())


def steepest(features: torch.Tensor, labels: torch.Tensor, solution: Solution) -> float:
    """The largest absolute gradient of the objective, by autograd in float64."""
    weights = solution.weights.double().requires_grad_()
    intercepts = solution.intercepts.double().requires_grad_()
    scores = features.double() @ weights.T + intercepts
    if len(intercepts) == 1:
        scores = torch.cat([torch.zeros_like(scores), scores], dim=1)
    loss = torch.nn.functional.cross_entropy(scores, labels) + solution.penalty / 2 * weights.square().sum()
    loss.backward()
    return max(weights.grad.abs().max().item(), intercepts.grad.abs().max().item())


# The solver


@pytest.mark.parametrize("kind", ["plain", "collinear", "constant", "separable", "wide"])
@pytest.mark.parametrize("n_classes", [2, 3, 5])
def test_the_path_is_that_of_scikit_learn(kind, n_classes):
    features, labels, test_features, test_labels = draw_data(kind, n_classes)
    solutions = solve_path(
        features, labels, n_classes=n_classes, penalties=PENALTIES, tolerance=TIGHT, max_iterations=20_000
    )
    assert [solution.penalty for solution in solutions] == list(PENALTIES)
    for solution in solutions:
        oracle = reference(features, labels, solution.penalty)
        assert solution.converged
        assert solution.weights.dtype == torch.float64
        assert solution.weights.numpy() == pytest.approx(oracle.coef_, abs=1e-5)
        # Those of a softmax are free up to a common term.
        mine, theirs = solution.intercepts.numpy(), oracle.intercept_
        if n_classes > 2:
            mine, theirs = mine - mine.mean(), theirs - theirs.mean()
        assert mine == pytest.approx(theirs, abs=1e-5)
        scores = solution.scores(test_features)
        assert scores.shape == (len(test_labels), 1 if n_classes == 2 else n_classes)
        assert np.mean(decide(scores).numpy() == test_labels) == pytest.approx(
            oracle.score(test_features.numpy(), test_labels), abs=1e-3
        )


@pytest.mark.parametrize("kind", ["plain", "collinear", "separable", "wide"])
@pytest.mark.parametrize("n_classes", [2, 4])
def test_the_default_tolerance_is_met_and_costs_no_accuracy(kind, n_classes):
    features, labels, test_features, test_labels = draw_data(kind, n_classes)
    for solution in solve_path(features, labels, n_classes=n_classes, penalties=(*PENALTIES, 1e-4)):
        assert solution.converged
        assert steepest(features, labels, solution) <= TOLERANCE * (1 + 1e-6)
        answers = decide(solution.scores(test_features)).numpy()
        oracle = reference(features, labels, solution.penalty).score(test_features.numpy(), test_labels)
        # With more dimensions than tokens the objective is flat along many: a small gradient is far from the end.
        assert np.mean(answers == test_labels) == pytest.approx(oracle, abs=0.03 if kind == "wide" else 4e-3)


@pytest.mark.parametrize("kind", ["plain", "collinear", "constant", "separable", "wide"])
@pytest.mark.parametrize("n_classes", [2, 3])
def test_float32_agrees_with_float64(kind, n_classes):
    features, labels, test_features, _ = draw_data(kind, n_classes)
    both = [
        solve_path(features.to(dtype), labels, n_classes=n_classes, penalties=PENALTIES, tolerance=1e-5)
        for dtype in (torch.float32, torch.float64)
    ]
    for single, double in zip(*both, strict=True):
        assert single.converged
        assert single.weights.dtype == torch.float32
        assert steepest(features, labels, single) <= 1.2e-5  # autograd's in float64; rounding is in the rest
        assert single.weights.double().numpy() == pytest.approx(double.weights.numpy(), abs=2e-5 / single.penalty)
        answers = [decide(solution.scores(test_features.to(solution.weights.dtype))) for solution in (single, double)]
        assert (answers[0] != answers[1]).double().mean() <= 4e-3


@pytest.mark.parametrize("n_classes", [2, 3])
def test_too_few_steps_are_said_to_be(n_classes):
    features, labels, *_ = draw_data("plain", n_classes)
    (early,) = solve_path(features, labels, n_classes=n_classes, penalties=[1e-3], max_iterations=3)
    assert (early.converged, early.n_iterations) == (False, 3)
    assert steepest(features, labels, early) > TOLERANCE
    (whole,) = solve_path(features, labels, n_classes=n_classes, penalties=[1e-3])
    assert whole.converged
    assert 3 < whole.n_iterations < 1000
    # The fewest that will do: it does not go on once the criterion is met.
    (before,) = solve_path(
        features, labels, n_classes=n_classes, penalties=[1e-3], max_iterations=whole.n_iterations - 1
    )
    assert steepest(features, labels, before) > TOLERANCE


@pytest.mark.parametrize("n_classes", [2, 3])
def test_where_a_fit_begins_does_not_change_where_it_ends(n_classes):
    features, labels, *_ = draw_data("plain", n_classes)

    def solve(penalty: float, start: Solution | None, **limits: float) -> Solution:
        (solution,) = solve_path(features, labels, n_classes=n_classes, penalties=[penalty], start=start, **limits)  # type: ignore
        return solution

    cold = solve(0.01, None, tolerance=TIGHT)
    warm = solve(0.01, solve(0.1, None), tolerance=TIGHT)
    assert warm.weights.numpy() == pytest.approx(cold.weights.numpy(), abs=1e-6)
    assert 0 < warm.n_iterations < cold.n_iterations + 50
    again = solve(0.01, cold, tolerance=TIGHT)
    assert again.n_iterations == 0
    assert torch.equal(again.weights, cold.weights)
    assert solve(0.01, cold, tolerance=TIGHT / 100).n_iterations > 0  # the control


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n_classes", [2, 4])
def test_the_same_fit_gives_the_same_bits(dtype, n_classes):
    features, labels, *_ = draw_data("plain", n_classes)
    one, two = (solve_path(features.to(dtype), labels, n_classes=n_classes, penalties=PENALTIES) for _ in range(2))
    for first, second in zip(one, two, strict=True):
        assert torch.equal(first.weights, second.weights)
        assert torch.equal(first.intercepts, second.intercepts)
        assert first.n_iterations == second.n_iterations


@pytest.mark.parametrize("n_classes", [3, 5])
def test_a_class_that_training_does_not_hold_is_never_answered(n_classes):
    missing = n_classes - 2  # neither the first nor the last
    features, labels, test_features, _ = draw_data("plain", n_classes)
    kept = labels != missing
    features, labels = features[kept], labels[kept]
    for solution in solve_path(features, labels, n_classes=n_classes, penalties=PENALTIES):
        assert solution.converged
        assert steepest(features, labels, solution) <= TOLERANCE * (1 + 1e-6)
        answers = decide(solution.scores(test_features)).numpy()
        assert missing not in answers
        # A softmax of two classes has two opposite vectors of weights, each half as long as that of a sigmoid.
        penalty = solution.penalty / (2 if n_classes == 3 else 1)
        oracle = reference(features, labels, penalty).predict(test_features.numpy())
        assert np.mean(answers != oracle) <= 4e-3


@pytest.mark.parametrize("n_classes", [2, 3])
def test_labels_that_tell_nothing_get_no_weights(n_classes):
    features, labels, *_ = draw_data("plain", n_classes)
    # Every token once with each class: the features tell nothing at all, and 0 is the optimum.
    every = torch.arange(n_classes).repeat_interleave(len(features))
    (none,) = solve_path(features.repeat(n_classes, 1), every, n_classes=n_classes, penalties=[1e-3])
    assert none.weights.abs().max() < 1e-6
    random = torch.from_numpy(np.random.default_rng(1).permutation(labels.numpy()))
    (shuffled,), (planted,) = (
        solve_path(features, answers, n_classes=n_classes, penalties=[0.1]) for answers in (random, labels)
    )
    assert shuffled.weights.norm() < 0.3 * planted.weights.norm()
    # The intercepts still hold the classes' shares.
    shares = torch.bincount(labels).double() / len(labels)
    (strong,) = solve_path(features, labels, n_classes=n_classes, penalties=[1e4], tolerance=TIGHT)
    found = strong.intercepts.sigmoid() if n_classes == 2 else strong.intercepts.softmax(0)
    assert found.numpy() == pytest.approx(shares[1:].numpy() if n_classes == 2 else shares.numpy(), abs=1e-3)


def test_one_token_a_class_and_one_dimension():
    features, labels = torch.tensor([[-1.0], [1.0]], dtype=torch.float64), torch.tensor([0, 1])
    (solution,) = solve_path(features, labels, n_classes=2, penalties=[0.5], tolerance=TIGHT)
    assert solution.weights.item() == pytest.approx(reference(features, labels, 0.5).coef_.item(), abs=1e-6)
    assert decide(solution.scores(features)).tolist() == [0, 1]


def test_a_tie_goes_to_the_lower_class():
    assert decide(torch.tensor([[-0.5], [0.0], [1e-9]])).tolist() == [0, 0, 1]
    assert decide(torch.tensor([[1.0, 1.0, 0.0], [0.0, 2.0, 2.0], [0.0, 0.0, 3.0]])).tolist() == [0, 1, 2]


# Figures of merit

answered = st.integers(1, 30).flatmap(
    lambda n: st.tuples(*(arrays(np.int64, n, elements=st.integers(0, 4)) for _ in range(2)))
)


@quick
@given(answered)
def test_merits_are_those_of_scikit_learn(pair):
    labels, answers = pair
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # classes that are answered but do not occur
        balanced = sklearn.metrics.balanced_accuracy_score(labels, answers)
        f1 = sklearn.metrics.f1_score(labels, answers, average="macro", zero_division=0)
    assert metrics.accuracy(labels, answers) == pytest.approx(sklearn.metrics.accuracy_score(labels, answers))
    assert metrics.balanced_accuracy(labels, answers) == pytest.approx(balanced)
    assert metrics.macro_f1(labels, answers) == pytest.approx(f1)


@quick
@given(
    st.integers(2, 40).flatmap(
        lambda n: st.tuples(
            arrays(np.int64, n, elements=st.integers(0, 1)),
            # Few values, so that there are ties, within a class and across.
            arrays(np.float64, n, elements=st.sampled_from([-1e30, -2.0, -1e-30, 0.0, 1e-30, 0.5, 3.0])),
        )
    )
)
def test_auc_is_that_of_scikit_learn_ties_included(pair):
    labels, scores = pair
    labels[:2] = 0, 1
    assert metrics.auc(labels, scores) == pytest.approx(sklearn.metrics.roc_auc_score(labels, scores))


def test_auc_at_its_ends():
    labels = np.array([0, 0, 1, 1])
    for scores, auc in (([1, 2, 3, 4], 1.0), ([4, 3, 2, 1], 0.0), ([5, 5, 5, 5], 0.5), ([1, 2, 2, 3], 0.875)):
        assert metrics.auc(labels, np.array(scores, np.float32)) == auc


# Intervals


def draw_table(
    seed: int, *, n_rows: int = 60, n_sites: int = 10, lean: float = 0.2, same_size: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A table of right answers ``[rows, sites]`` with rows that are easy or hard; its counts, its true accuracies."""
    random = np.random.default_rng([11, seed])
    truth = np.linspace(0.55, 0.75, n_sites)
    counts = np.full(n_rows, 24) if same_size else random.integers(8, 40, n_rows)
    shared = random.random(n_rows) < 0.5
    own = random.random((n_rows, n_sites)) < 0.5
    easy = np.where(random.random((n_rows, n_sites)) < 0.6, shared[:, None], own)  # sites agree, somewhat
    correct = random.binomial(counts[:, None], truth + lean * np.where(easy, 1, -1))
    return correct, counts, truth


def naive_intervals(correct: np.ndarray, counts: np.ndarray, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The same definition as a loop over draws of row numbers."""
    random, n_rows = np.random.default_rng(seed), len(counts)
    drawn = []
    for _ in range(3000):
        rows = random.integers(0, n_rows, n_rows)
        drawn.append([sum(correct[rows, site]) / sum(counts[rows]) for site in range(correct.shape[1])])
    errors = np.std(drawn, axis=0)
    centre = correct.sum(0) / counts.sum()
    largest = sorted(max(abs(np.array(line) - centre) / errors) for line in drawn)
    reach = largest[int(0.95 * len(largest))] * errors
    return centre - reach, centre + reach


@pytest.mark.parametrize("n_sites", [1, 4])
def test_intervals_are_those_of_a_bootstrap_by_loops(n_sites):
    correct, counts, _ = draw_table(0, n_rows=30, n_sites=n_sites)
    low, high = row_intervals(correct, counts, seed=0)
    naive_low, naive_high = naive_intervals(correct, counts, seed=1)
    assert high - low == pytest.approx(naive_high - naive_low, rel=0.06)
    assert (high + low) / 2 == pytest.approx((naive_high + naive_low) / 2)  # the accuracy is the middle


def test_all_intervals_hold_at_once_as_often_as_they_claim():
    held, forgetful = [], {"of one site": [], "of tokens": []}
    for seed in range(200):
        correct, counts, truth = draw_table(seed)
        low, high = row_intervals(correct, counts, seed=seed)
        held.append(np.all((low <= truth) & (truth <= high)))
        # The controls: intervals for one site alone, and of independent tokens (with the factor for ten sites).
        found = correct.sum(0) / counts.sum()
        by_row = np.sqrt(((correct - found * counts[:, None]) ** 2).sum(0)) / counts.sum()
        by_token = np.sqrt(found * (1 - found) / counts.sum())
        for name, reach in (("of one site", 1.96 * by_row), ("of tokens", 2.8 * by_token)):
            forgetful[name].append(np.all(np.abs(found - truth) <= reach))
    assert 0.90 <= np.mean(held) <= 0.99
    assert np.mean(forgetful["of one site"]) < 0.80
    assert np.mean(forgetful["of tokens"]) < 0.80


def test_the_interval_of_one_site_is_the_ordinary_one():
    correct, counts, _ = draw_table(3, n_rows=200, n_sites=1, same_size=True)
    low, high = row_intervals(correct, counts, seed=0)
    by_row = (correct[:, 0] / counts).std() / np.sqrt(200)  # of the mean over rows of one size
    assert (high - low).item() / 2 == pytest.approx(1.96 * by_row, rel=0.06)


def test_an_interval_of_many_sites_is_wider_than_of_one():
    correct, counts, _ = draw_table(4)
    low, high = row_intervals(correct, counts, seed=0)
    alone = [row_intervals(correct[:, [site]], counts, seed=0) for site in range(10)]
    assert all(high - low > np.array([one_high - one_low for one_low, one_high in alone]).ravel() * 1.2)
    # Ten times the same site are one site.
    same = row_intervals(np.repeat(correct[:, :1], 10, axis=1), counts, seed=0)
    assert np.ravel(same)[[0, 10]] == pytest.approx(np.ravel(alone[0]))


def test_the_seed_decides_the_draws():
    correct, counts, _ = draw_table(5)
    one, again, other = (row_intervals(correct, counts, seed=seed) for seed in (0, 0, 1))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)
    assert np.array(one) == pytest.approx(np.array(other), abs=0.01)


def test_degenerate_tables():
    counts = np.array([3, 5, 2, 7])
    right, wrong = counts, np.zeros(4, np.int64)
    assert np.array_equal(row_intervals(np.stack([right, wrong], 1), counts, seed=0), [[1, 0], [1, 0]])
    # A site that does not vary takes no part; the others get what they get without it.
    some = np.array([1, 3, 2, 6])
    low, high = row_intervals(np.stack([right, some], 1), counts, seed=0)
    assert (low[0], high[0]) == (1, 1)
    assert np.array_equal([low[1:], high[1:]], row_intervals(some[:, None], counts, seed=0))
    # One row: no draw differs from another.
    assert np.array_equal(row_intervals(np.array([[2, 3]]), np.array([4]), seed=0), [[0.5, 0.75], [0.5, 0.75]])
    # A third of each row: the draws agree, but for rounding.
    low, high = row_intervals(np.array([[1], [2], [3]]), np.array([3, 6, 9]), seed=0)
    assert (low.item(), high.item()) == (pytest.approx(1 / 3), pytest.approx(1 / 3))


@quick
@given(st.integers(1, 8), st.integers(1, 4), st.data())
def test_intervals_lie_within_0_and_1_and_hold_the_accuracy(n_rows, n_sites, data):
    counts = data.draw(arrays(np.int64, n_rows, elements=st.integers(1, 5)))
    correct = (data.draw(arrays(np.float64, (n_rows, n_sites), elements=st.floats(0, 1))) * counts[:, None]).round()
    correct = correct.astype(np.int64)
    low, high = row_intervals(correct, counts, seed=0)
    found = correct.sum(0) / counts.sum()
    assert low.shape == high.shape == (n_sites,)
    assert np.all((low >= 0) & (low <= found) & (found <= high) & (high <= 1))
