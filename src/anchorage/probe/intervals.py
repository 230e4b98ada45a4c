"""Confidence intervals of accuracies: bootstrap over rows, simultaneous over sites.

Tokens of one row are not independent, so whole rows are drawn. All sites are scored on the same draws, and the interval
of each is its standard error times one factor: the 95 % quantile of the largest standardised deviation among the sites
(the max-t bootstrap; Romano and Wolf, "Exact and approximate stepdown methods for multiple hypothesis testing", 2005;
Montiel Olea and Plagborg-Møller, "Simultaneous confidence bands", 2019). So with 95 % confidence *all* intervals of a
table hold their true values at once.
"""

from __future__ import annotations

import numpy as np

COVERAGE = 0.95
N_DRAWS = 2000
_CHUNK_DRAWS = 100


def row_intervals(correct: np.ndarray, counts: np.ndarray, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Simultaneous intervals of the accuracies of several sites.

    Args:
        correct: ``[rows, sites]``; right answers.
        counts: ``[rows]``; tokens that were asked, at least 1 a row.
        seed: of the draws.

    Returns:
        Lower and upper ends ``[sites]``, within 0 and 1. Of one site alone it is an ordinary interval. A site
        whose draws all agree (all answers right) gets one of no width: the bootstrap cannot see beyond its rows.
    """
    random, n_rows = np.random.default_rng(seed), len(counts)
    draws = []
    for start in range(0, N_DRAWS, _CHUNK_DRAWS):  # a draw is how often each row was taken
        times = random.multinomial(n_rows, np.full(n_rows, 1 / n_rows), size=min(_CHUNK_DRAWS, N_DRAWS - start))
        draws.append((times @ correct) / (times @ counts)[:, None])
    drawn = np.concatenate(draws)
    accuracies = correct.sum(0) / counts.sum()
    errors = drawn.std(0)
    spread = errors > 0
    deviations = np.abs(drawn - accuracies)[:, spread] / errors[spread]
    factor = np.quantile(deviations.max(1), COVERAGE) if spread.any() else 0.0
    return np.clip(accuracies - factor * errors, 0, 1), np.clip(accuracies + factor * errors, 0, 1)
