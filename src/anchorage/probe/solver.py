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

import torch

# Largest absolute gradient of the objective at which a fit ends: the criterion, and the value, of scikit-learn's `tol`.
TOLERANCE = 1e-4
MAX_ITERATIONS = 1000


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


def solve_path(
    features: torch.Tensor,
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
        features: float32 or float64 ``[tokens, width]``, each dimension of mean 0 and variance 1.
        labels: int64 ``[tokens]``, class numbers.
        n_classes: how many classes there are; 2 is the binary case.
        penalties: strength of the L2 penalty on the weights, each above 0; from strong to weak is fastest.
        tolerance: end a fit when no element of its gradient is larger.
        max_iterations: end a fit after so many steps.
        start: where the first fit begins; None is at 0.

    Returns:
        A solution for each penalty. Bit-equal between runs on one machine with one number of threads, not beyond.
    """
    n_tokens, width = features.shape
    # Tokens along the rows of memory: both products of a step take half the time, the softmax a tenth.
    columns = features.T.contiguous()
    gram = columns @ columns.T / n_tokens
    target = labels[None] if n_classes == 2 else torch.nn.functional.one_hot(labels, n_classes).T
    target = target.to(features.dtype).contiguous()
    weights = features.new_zeros(len(target), width) if start is None else start.weights
    intercepts = features.new_zeros(len(target)) if start is None else start.intercepts
    solutions = []
    for penalty in penalties:
        fit = _Fit(columns, target, gram, penalty)
        weights, intercepts, n_iterations, converged = fit.run(weights, intercepts, tolerance, max_iterations)
        solutions.append(Solution(penalty, weights, intercepts, n_iterations, converged))
    return solutions


class _Fit:
    """One penalty's objective, and the bound of its Hessian.

    Args:
        columns: features ``[width, tokens]``.
        target: ``[outputs, tokens]``, 1 for a token's class, else 0.
        gram: ``[width, width]``.
        penalty: strength of the L2 penalty.
    """

    def __init__(self, columns: torch.Tensor, target: torch.Tensor, gram: torch.Tensor, penalty: float) -> None:
        self.columns, self.target, self.penalty = columns, target, penalty
        # p(1 - p) is at most 1/4; of a softmax the matrix diag(p) - pp' is at most half the identity.
        self.bound = 0.25 if len(target) == 1 else 0.5
        # Rounding may leave the Gram matrix of collinear features indefinite by so much; a larger bound is one as well.
        ridge = penalty + torch.finfo(gram.dtype).eps * len(gram)
        factor = torch.linalg.cholesky(self.bound * gram + ridge * torch.eye(len(gram), dtype=gram.dtype))
        self.inverse = torch.cholesky_inverse(factor)

    def gradient(self, weights: torch.Tensor, intercepts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.addmm(intercepts[:, None], weights, self.columns)
        errors = (scores.sigmoid_() if len(scores) == 1 else scores.softmax(0)).sub_(self.target)
        errors.div_(self.columns.shape[1])
        return errors @ self.columns.T + self.penalty * weights, errors.sum(1)

    def run(
        self, weights: torch.Tensor, intercepts: torch.Tensor, tolerance: float, max_iterations: int
    ) -> tuple[torch.Tensor, torch.Tensor, int, bool]:
        """Descend from a point; returns weights, intercepts, the steps taken, whether the criterion is met."""
        old, old_intercepts, momentum = weights, intercepts, 1.0
        for iteration in range(max_iterations):
            slope, intercept_slope = self.gradient(weights, intercepts)
            if max(slope.abs().max().item(), intercept_slope.abs().max().item()) <= tolerance:
                return weights, intercepts, iteration, True
            new, new_intercepts = weights - slope @ self.inverse, intercepts - intercept_slope / self.bound
            step, intercept_step = new - old, new_intercepts - old_intercepts
            uphill = torch.sum(slope * step) + torch.sum(intercept_slope * intercept_step) > 0
            next_momentum = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
            push = 0.0 if uphill else (momentum - 1) / next_momentum
            momentum = 1.0 if uphill else next_momentum
            weights, intercepts = new + push * step, new_intercepts + push * intercept_step
            old, old_intercepts = new, new_intercepts
        return weights, intercepts, max_iterations, False
