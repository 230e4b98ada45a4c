"""Which token stands before this one, among the most frequent ids? Other tokens are left out."""

from __future__ import annotations

import numpy as np

from anchorage.probe.labels import Labels

N_CLASSES = 16


def label(tokens: np.ndarray, train_rows: np.ndarray) -> Labels:
    """A class for each of the ids most frequent in the training rows, the most frequent first."""
    ids, counts = np.unique(tokens[train_rows, :-1], return_counts=True)
    frequent = ids[np.argsort(-counts, kind="stable")[:N_CLASSES]]
    values = np.full(tokens.shape, -1)
    for number, token_id in enumerate(frequent):
        values[:, 1:][tokens[:, :-1] == token_id] = number
    return Labels(values, tuple(f"after {token_id}" for token_id in frequent))
