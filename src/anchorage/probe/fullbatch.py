"""The probe of one site with all its tokens in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import psutil
import torch

from anchorage.errors import AnchorageError
from anchorage.probe.design import Design, Side
from anchorage.probe.metrics import accuracy
from anchorage.probe.solver import Solution, Tokens, decide, solve_path
from anchorage.probe.tokenstream import TokenStream
from anchorage.store.reader import Cache

PENALTIES = (0.1, 0.01, 0.001, 0.0001, 0.00001)  # from strong to weak
# Of the gradient, while penalties are compared; the probe itself is fitted to the solver's own.
SEARCH_TOLERANCE = 1e-3
_BLOCK_ROWS = 128
# Values, their standardised copy, and a part of them for choosing the penalty.
_COPIES = 3


def fit_full_batch(
    cache: Cache, tier: str, *, site: str, design: Design
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Fit the probe of a site and its control on shuffled labels.

    Args:
        cache, tier, site: what to read.
        design: the task's tokens.

    Returns:
        Test scores ``[test tokens, outputs]`` of both, and facts: penalty, penalty_at_end (as of :func:`at_end`),
        n_iterations, converged, tried.

    Raises:
        AnchorageError: a value is not finite, or the tokens do not fit in memory.
    """
    train, test = standardise(
        read_tokens(cache, tier, site=site, side=design.train), read_tokens(cache, tier, site=site, side=design.test)
    )
    tokens, labels, n_classes = Tokens(train), torch.from_numpy(design.train.labels), len(design.classes)
    best, tried = choose_penalty(tokens, labels, held_out=torch.from_numpy(design.validation), n_classes=n_classes)
    (probe,) = solve_path(tokens, labels, n_classes=n_classes, penalties=[best.penalty], start=best)
    # The control has the probe's penalty, and with it the same capacity.
    shuffled = torch.from_numpy(design.train.shuffled)
    (control,) = solve_path(tokens, shuffled, n_classes=n_classes, penalties=[best.penalty])
    facts = {
        "penalty": best.penalty,
        "penalty_at_end": at_end(best.penalty, tried),
        "n_iterations": probe.n_iterations,
        "converged": probe.converged,
        "tried": tried,
    }
    return probe.scores(test), control.scores(test), facts


def read_tokens(cache: Cache, tier: str, *, site: str, side: Side) -> torch.Tensor:
    """Read the hidden states of a side's tokens, and of no rows that hold none of them.

    Returns:
        float32 ``[tokens, width]``.

    Raises:
        AnchorageError: a value is not finite, or all of them would not fit in memory.
    """
    width = cache.read(site, [], tier=tier).shape[-1]
    _check_memory(len(side) * width * 4 * _COPIES)
    stream = TokenStream(cache, tier, site=site, side=side, block_rows=_BLOCK_ROWS)
    return torch.cat([values for values, _, _ in stream.blocks()])


def standardise(train: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
    """Bring every dimension to mean 0 and variance 1 of the training tokens; a constant one to 0."""
    mean, deviation = train.mean(0), train.std(0, correction=0)
    scale = torch.where(deviation > 0, deviation, torch.inf)
    return [(values - mean) / scale for values in (train, *others)]


def choose_penalty(
    tokens: Tokens, labels: torch.Tensor, *, held_out: torch.Tensor, n_classes: int
) -> tuple[Solution, list[dict[str, Any]]]:
    """Fit on a part of the training tokens under every penalty, score on the rest, and take the best.

    Args:
        tokens: of all training rows, standardised.
        labels: int64 ``[tokens]``.
        held_out: bool ``[tokens]``; the part to score on.
        n_classes: how many classes there are.

    Returns:
        The solution with the highest accuracy, of equals that with the strongest penalty; and a line for each penalty:
        penalty, validation_accuracy, n_iterations, converged.
    """
    fit, validation = tokens.split(held_out)
    solutions = solve_path(fit, labels[~held_out], n_classes=n_classes, penalties=PENALTIES, tolerance=SEARCH_TOLERANCE)
    answers = labels[held_out].numpy()
    accuracies = [accuracy(answers, decide(solution.scores(validation.features)).numpy()) for solution in solutions]
    tried = [
        {
            "penalty": solution.penalty,
            "validation_accuracy": found,
            "n_iterations": solution.n_iterations,
            "converged": solution.converged,
        }
        for solution, found in zip(solutions, accuracies, strict=True)
    ]
    return solutions[int(np.argmax(accuracies))], tried


def at_end(penalty: float, tried: Sequence[Mapping[str, Any]]) -> bool:
    """Whether nothing stronger, or nothing weaker, was tried than the chosen penalty: one beyond might do better.

    A weaker penalty under which the search took no step gave the fit of the one before: it was not really tried.
    """
    place = [line["penalty"] for line in tried].index(penalty)
    return place == 0 or not any(line["n_iterations"] for line in tried[place + 1 :])


def _check_memory(n_bytes: int) -> None:
    free = psutil.virtual_memory().available
    if n_bytes > free:
        raise AnchorageError(
            f"the tokens of a probe need {n_bytes / 2**30:.1f} GiB of memory, {free / 2**30:.1f} are free. Lower "
            "probe.max_tokens, or set probe.solver to adam, which streams them from disk"
        )
