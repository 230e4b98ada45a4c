"""Did this token id occur earlier in the row?

Repeats are more frequent late in a row and among frequent ids, so position and id alone would give the answer away.
Each (position, id) is a cell of its own: a probe that sees nothing else is left with chance. Task and matching follow
NDIF's tutorial "Caching Activations Over a Dataset".
"""

from __future__ import annotations

import numpy as np

from anchorage.probe.labels import Labels


def label(tokens: np.ndarray, train_rows: np.ndarray) -> Labels:
    """Class 1 for a token whose id stands earlier in its row."""
    # A stable sort puts equal ids side by side in the order of their positions: all but the first are repeats.
    order = np.argsort(tokens, axis=1, kind="stable")
    ordered = np.take_along_axis(tokens, order, axis=1)
    repeats = np.zeros(tokens.shape, np.int64)
    np.put_along_axis(repeats, order[:, 1:], (ordered[:, 1:] == ordered[:, :-1]).astype(np.int64), axis=1)
    positions = np.arange(tokens.shape[1])
    return Labels(repeats, ("first", "repeat"), cells=positions * (tokens.max() + 1) + tokens)
