"""Logistic regression on data in memory: full batch, deterministic.

Minimises ``mean cross-entropy + penalty / 2 * |weights|^2`` (the intercept is free), which is scikit-learn's
``LogisticRegression(C=1 / (penalty * n_tokens))``. Each step multiplies the gradient with the inverse of a fixed bound
of the Hessian (Böhning, "Multinomial logistic regression algorithm", 1992), so correlated features cost nothing and no
line search is needed. Nesterov's acceleration with restarts (O'Donoghue and Candès, 2015) makes it fast where classes
are nearly separable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch

# Largest absolute gradient of the objective at which a fit ends: the criterion, and the value, of scikit-learn's `tol`.
TOLERANCE = 1e-4
MAX_ITERATIONS = 1000
_GRAM_PIECES = 4


@dataclass(frozen=True)
class Solution:
    """A fitted probe.

    Attributes:
        penalty: strength of its L2 penalty.
        weights: ``[outputs, width]``; one output for two classes, else one a class.
        intercepts: ``[outputs]``.
        n_iterations: steps it took.
        converged: whether it met the criterion within the limit.
    """

    penalty: float
    weights: torch.Tensor
    intercepts: torch.Tensor
    n_iterations: int
    converged: bool

    def scores(self, features: torch.Tensor) -> torch.Tensor:
        """Log-odds ``[tokens, outputs]`` of features ``[tokens, width]``."""
        return features @ self.weights.T + self.intercepts


def decide(scores: torch.Tensor) -> torch.Tensor:
    """Class numbers ``[tokens]`` of scores ``[tokens, outputs]``; a tie goes to the lower number."""
    return (scores[:, 0] > 0).long() if scores.shape[1] == 1 else scores.argmax(1)


class Tokens:
    """Features, with what all fits on them share.

    Args:
        features: float32 or float64 ``[tokens, width]``, of like size in every dimension (standardised).
    """

    def __init__(self, features: torch.Tensor) -> None:
        self.features = features

    @cached_property
    def gram(self) -> torch.Tensor:
        """Sums over the tokens of all products of two dimensions, the last one being 1, ``[width + 1, width + 1]``."""
        width = self.features.shape[1]
        gram = self.features.new_empty(width + 1, width + 1)
        cuts = [width * piece // _GRAM_PIECES for piece in range(_GRAM_PIECES + 1)]
        for start, stop in pairwise(cuts):  # a symmetric matrix: what lies above the diagonal is not computed
            gram[start:stop, :stop] = self.features[:, start:stop].T @ self.features[:, :stop]
        gram[-1, :-1], gram[-1, -1] = self.features.sum(0), len(self.features)
        return gram.tril() + gram.tril(-1).T

    def split(self, mask: torch.Tensor) -> tuple[Tokens, Tokens]:
        """The tokens where a mask ``[tokens]`` is false, and where it is true. Their Gram matrices make the whole's."""
        rest, chosen = Tokens(self.features[~mask]), Tokens(self.features[mask])
        self.gram = rest.gram + chosen.gram
        return rest, chosen


def solve_path(
    features: Tokens | torch.Tensor,
    labels: torch.Tensor,
    *,
    n_classes: int,
    penalties: Sequence[float],
    tolerance: float = TOLERANCE,
    max_iterations: int = MAX_ITERATIONS,
    start: Solution | None = None,
) -> list[Solution]:
    """Fit a logistic regression for each penalty, each beginning where the one before ended.

    Args:
        features: float32 or float64 ``[tokens, width]``, standardised; or :class:`Tokens`, to share work between calls.
        labels: int64 ``[tokens]``, class numbers.
        n_classes: how many classes there are; 2 is the binary case.
        penalties: strength of the L2 penalty on the weights, each above 0; from strong to weak is fastest.
        tolerance: end a fit when no element of its gradient is larger.
        max_iterations: end a fit after so many steps.
        start: where the first fit begins; None is at 0.

    Returns:
        A solution for each penalty. Bit-equal between runs on one machine with one number of threads, not beyond.
    """
    tokens = features if isinstance(features, Tokens) else Tokens(features)
    # Outputs by tokens, not tokens by outputs: a softmax over few and distant numbers is several times as fast.
    target = labels[None] if n_classes == 2 else torch.nn.functional.one_hot(labels, n_classes).T
    target = target.to(tokens.features.dtype).contiguous()
    weights = target.new_zeros(len(target), len(tokens.gram))
    if start is not None:
        weights = torch.cat([start.weights, start.intercepts[:, None]], dim=1)
    solutions = []
    for penalty in penalties:
        weights, n_iterations, converged = _Fit(tokens, target, penalty).run(weights, tolerance, max_iterations)
        solutions.append(Solution(penalty, weights[:, :-1], weights[:, -1], n_iterations, converged))
    return solutions


class _Fit:
    """One penalty's objective, and the inverse of its Hessian's bound.

    Args:
        tokens: features.
        target: ``[outputs, tokens]``, 1 for a token's class, else 0.
        penalty: strength of the L2 penalty.
    """

    def __init__(self, tokens: Tokens, target: torch.Tensor, penalty: float) -> None:
        self.features, self.target = tokens.features, target
        self.penalties = torch.full((len(tokens.gram),), penalty, dtype=target.dtype)
        self.penalties[-1] = 0  # the intercept is free
        # p(1 - p) is at most 1/4; of a softmax the matrix diag(p) - pp' is at most half the identity.
        bound = 0.25 if len(target) == 1 else 0.5
        # Rounding may leave the Gram matrix of collinear features indefinite by so much; a larger bound is one as well.
        slack = torch.finfo(target.dtype).eps * len(tokens.gram)
        mean_gram = tokens.gram / len(tokens.features)
        factor = torch.linalg.cholesky(bound * mean_gram + torch.diag(self.penalties + slack))
        self.inverse = torch.cholesky_inverse(factor)

    def gradient(self, weights: torch.Tensor) -> torch.Tensor:
        """Of the objective at weights ``[outputs, width + 1]``."""
        scores = torch.addmm(weights[:, -1:], weights[:, :-1], self.features.T)
        errors = (scores.sigmoid_() if len(scores) == 1 else scores.softmax(0)).sub_(self.target)
        slope = torch.cat([errors @ self.features, errors.sum(1, keepdim=True)], dim=1)
        return slope / len(self.features) + self.penalties * weights

    def run(self, weights: torch.Tensor, tolerance: float, max_iterations: int) -> tuple[torch.Tensor, int, bool]:
        """Descend from a point; returns weights, the steps taken, whether the criterion is met."""
        old, momentum = weights, 1.0
        for iteration in range(max_iterations):
            gradient = self.gradient(weights)
            if gradient.abs().max().item() <= tolerance:
                return weights, iteration, True
            new = weights - gradient @ self.inverse
            step = new - old
            uphill = torch.sum(gradient * step).item() > 0
            next_momentum = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
            push = 0.0 if uphill else (momentum - 1) / next_momentum
            momentum = 1.0 if uphill else next_momentum
            weights, old = new + push * step, new
        return weights, max_iterations, False
