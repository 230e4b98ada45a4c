"""The probe of one task at one site: fit, control, figures of merit, and what an interval needs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from anchorage.diskio import bytes_from_disk
from anchorage.durable import write_json
from anchorage.probe import metrics
from anchorage.probe.adam import fit_adam
from anchorage.probe.design import Design
from anchorage.probe.fullbatch import fit_full_batch
from anchorage.probe.intervals import row_intervals
from anchorage.probe.solver import decide
from anchorage.settings import ProbeSettings
from anchorage.store.reader import Cache


def fit_sites(
    cache: Cache,
    paths: Sequence[Path],
    *,
    design: Design,
    settings: ProbeSettings,
    seed: int,
    log: Callable[[str], None],
) -> None:
    """Fit and test the probes of several sites on one task, and write a file each.

    Args:
        cache: what to read; the tier is the settings'.
        paths: ``probe/{task}/{site}.json`` of each site; each is written as soon as it is known.
        design: the task's tokens.
        settings: tier and solver.
        seed: of the bootstrap, and of the order in which Adam sees the rows.
        log: gets a line a site.

    Raises:
        AnchorageError: a value is not finite, or the tokens do not fit in memory.
    """
    # The bits of a sum depend on how many threads share it: one, so that they are the same on every number of cores.
    torch.set_num_threads(1)
    for path in tqdm(paths, design.task, unit="site", disable=None):
        start, before = time.perf_counter(), bytes_from_disk()
        folder = path.parents[2] / "checkpoints" / design.task / path.stem
        report = fit_site(cache, path.stem, design=design, settings=settings, seed=seed, folder=folder, log=log)
        write_json(path, report)
        from_disk = "unknown" if before is None else (bytes_from_disk() or 0) - before
        log(
            f"{design.task} {path.stem}: accuracy {report['accuracy']:.4f}, shuffled "
            f"{report['shuffled_accuracy']:.4f}, chance {report['chance']:.4f}, penalty {report['penalty']:g}; "
            f"bytes from disk {from_disk}; {time.perf_counter() - start:.2f} s"
        )


def fit_site(
    cache: Cache,
    site: str,
    *,
    design: Design,
    settings: ProbeSettings,
    seed: int,
    folder: Path,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Fit and test the probe of a site; as :func:`fit_sites`.

    Args:
        site: a site of the settings' tier.
        folder: for Adam's training state.

    Returns:
        The fields of ``probe/{task}/{site}.json``. Its intervals are those of this site alone.
    """
    if settings.solver == "adam":
        scores, control, facts = fit_adam(
            cache, settings.tier, site=site, design=design, seed=seed, folder=folder, log=log
        )
    else:
        scores, control, facts = fit_full_batch(cache, settings.tier, site=site, design=design)
    answers, shuffled = decide(scores).numpy(), decide(control).numpy()
    labels, test = design.test.labels, design.test
    rows, index = np.unique(test.rows, return_inverse=True)
    counts = np.bincount(index)
    correct = np.bincount(index, answers == labels).astype(int)
    # About guessing by construction, since the control's test labels are shuffled too: what an interval holds.
    shuffled_correct = np.bincount(index, shuffled == test.shuffled).astype(int)
    (low,), (high,) = row_intervals(correct[:, None], counts, seed=seed)
    (shuffled_low,), (shuffled_high,) = row_intervals(shuffled_correct[:, None], counts, seed=seed)
    return {
        "key": cache.key,
        "task": design.task,
        "site": site,
        "tier": settings.tier,
        "solver": settings.solver,
        "accuracy": metrics.accuracy(labels, answers),
        "low": low,
        "high": high,
        "shuffled_accuracy": metrics.accuracy(test.shuffled, shuffled),
        "shuffled_low": shuffled_low,
        "shuffled_high": shuffled_high,
        # By the true labels it is about guessing only if none of them reached the control.
        "shuffled_true_accuracy": metrics.accuracy(labels, shuffled),
        "chance": design.chance,
        **_merits(labels, answers, scores),
        **facts,
        "classes": list(design.classes),
        "n_train": len(design.train),
        "n_test": len(test),
        "n_train_rows": len(np.unique(design.train.rows)),
        "n_test_rows": len(rows),
        "by_test_row": {
            "row": rows.tolist(),
            "n": counts.tolist(),
            "correct": correct.tolist(),
            "shuffled_correct": shuffled_correct.tolist(),
        },
    }


def _merits(labels: np.ndarray, answers: np.ndarray, scores: torch.Tensor) -> dict[str, float | None]:
    """Balanced accuracy and AUC of a task of two classes, macro-F1 of others."""
    if scores.shape[1] == 1:
        return {
            "balanced_accuracy": metrics.balanced_accuracy(labels, answers),
            "auc": metrics.auc(labels, scores[:, 0].numpy()),
            "macro_f1": None,
        }
    return {"balanced_accuracy": None, "auc": None, "macro_f1": metrics.macro_f1(labels, answers)}
