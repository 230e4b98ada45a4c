"""In which eighth of its row does a token stand?"""

from __future__ import annotations

import numpy as np

from anchorage.probe.labels import Labels

N_CLASSES = 8


def label(tokens: np.ndarray, train_rows: np.ndarray) -> Labels:
    """Class 0 for the first eighth of the positions, and so on."""
    n_rows, seq_len = tokens.shape
    eighths = np.arange(seq_len) * N_CLASSES // seq_len
    # A row of fewer than eight tokens has fewer classes.
    _, classes = np.unique(eighths, return_inverse=True)
    return Labels(np.tile(classes, (n_rows, 1)), tuple(f"eighth {n + 1}" for n in np.unique(eighths)))
