"""Figures of merit of a classifier. Small enough to be written here; the tests hold them against scikit-learn's."""

from __future__ import annotations

import numpy as np
import pandas as pd


def accuracy(labels: np.ndarray, answers: np.ndarray) -> float:
    """Share of right answers."""
    return float(np.mean(labels == answers))


def balanced_accuracy(labels: np.ndarray, answers: np.ndarray) -> float:
    """Mean over the classes that occur of the share of their tokens that is answered rightly."""
    return float(np.mean([np.mean(answers[labels == label] == label) for label in np.unique(labels)]))


def macro_f1(labels: np.ndarray, answers: np.ndarray) -> float:
    """Mean over the classes that occur, as label or answer, of F1, the harmonic mean of precision and recall."""
    classes = np.union1d(labels, answers)
    hits = [np.sum((labels == label) & (answers == label)) for label in classes]
    sizes = [np.sum(labels == label) + np.sum(answers == label) for label in classes]
    return float(np.mean(2 * np.array(hits) / np.array(sizes)))


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Area under the ROC curve: how often a token of class 1 scores above one of class 0, ties counting half.

    Args:
        labels: 0 or 1, both occurring.
        scores: any real numbers.
    """
    ranks = pd.Series(scores).rank().to_numpy()
    n_high = int(labels.sum())
    return float((ranks[labels == 1].sum() - n_high * (n_high + 1) / 2) / (n_high * (len(labels) - n_high)))
