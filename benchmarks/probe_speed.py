"""The probes' solver against scikit-learn's LogisticRegression, on the sites of a finished run.

    python benchmarks/probe_speed.py --cache results/smollm2-wikipedia/cache --rounds 5

In one process, in an order that rotates, with the same standardised float32 tokens and number of threads: *one fit*
under the penalty that the probe chose, and *a probe's fits*: all penalties on a part of the training tokens, the best
on all of them, and that on shuffled labels. On both sides the fits of the search end at a gradient of 1e-3, the others
at 1e-4. Ours start where the one before ended, that on all tokens from the best; scikit-learn's start from 0 (*cold*,
as they do unless told otherwise) or as ours (*warm*). It has ``max_iter=100`` and ``C = 1 / (penalty * tokens)``.

One fit alone is not 3 times as fast as scikit-learn's: half of our time is the Gram matrix, by which each step is
multiplied. The fits of a probe share it; one fit cannot.

Needs scikit-learn (``requirements-dev.lock``); writes a CSV, and prints for each task medians of seconds over the sites
with their spread over the rounds, accuracies, and ratios.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_info, threadpool_limits

import anchorage
from anchorage.probe.design import Design, design_task
from anchorage.probe.fullbatch import PENALTIES, SEARCH_TOLERANCE, choose_penalty, read_tokens, standardise
from anchorage.probe.labels import known_tasks
from anchorage.probe.solver import TOLERANCE, Tokens, decide, solve_path
from anchorage.settings import ProbeSettings

Fit = Callable[[], tuple[float, int]]  # returns test accuracy and iterations


def site_methods(cache: anchorage.Cache, site: str, *, tier: str, design: Design) -> dict[str, Fit]:
    """Each method as a function."""
    train, test = standardise(*(read_tokens(cache, tier, site=site, side=side) for side in (design.train, design.test)))
    labels, shuffled = torch.from_numpy(design.train.labels), torch.from_numpy(design.train.shuffled)
    asked, held_out = torch.from_numpy(design.test.labels), torch.from_numpy(design.validation)
    n_classes = len(design.classes)
    best, _ = choose_penalty(Tokens(train), labels, held_out=held_out, n_classes=n_classes)

    def ours() -> tuple[float, int]:
        (fitted,) = solve_path(train, labels, n_classes=n_classes, penalties=[best.penalty])
        return (decide(fitted.scores(test)) == asked).float().mean().item(), fitted.n_iterations

    def ours_all() -> tuple[float, int]:
        tokens = Tokens(train)
        found, _ = choose_penalty(tokens, labels, held_out=held_out, n_classes=n_classes)
        (fitted,) = solve_path(tokens, labels, n_classes=n_classes, penalties=[found.penalty], start=found)
        solve_path(tokens, shuffled, n_classes=n_classes, penalties=[found.penalty])
        return (decide(fitted.scores(test)) == asked).float().mean().item(), fitted.n_iterations

    def theirs() -> tuple[float, int]:
        fitted = fit_sklearn(LogisticRegression(), train, labels, penalty=best.penalty, tolerance=TOLERANCE)
        return float(fitted.score(test.numpy(), asked.numpy())), int(fitted.n_iter_.max())

    def theirs_all(warm: bool) -> tuple[float, int]:
        part, answers = train[~held_out], labels[~held_out]
        held = (train[held_out].numpy(), labels[held_out].numpy())
        model, found = LogisticRegression(warm_start=warm), []
        for penalty in PENALTIES:
            fit_sklearn(model, part, answers, penalty=penalty, tolerance=SEARCH_TOLERANCE)
            found.append((model.score(*held), penalty, copy.deepcopy(model)))
        _, penalty, start = max(found, key=lambda line: line[0])
        fitted = fit_sklearn(start, train, labels, penalty=penalty, tolerance=TOLERANCE)
        fit_sklearn(LogisticRegression(), train, shuffled, penalty=penalty, tolerance=TOLERANCE)
        return float(fitted.score(test.numpy(), asked.numpy())), int(fitted.n_iter_.max())

    return {
        "one fit, ours": ours,
        "one fit, sklearn": theirs,
        "probe, ours": ours_all,
        "probe, sklearn cold": partial(theirs_all, warm=False),
        "probe, sklearn warm": partial(theirs_all, warm=True),
    }


def fit_sklearn(
    model: LogisticRegression, values: torch.Tensor, classes: torch.Tensor, *, penalty: float, tolerance: float
) -> LogisticRegression:
    """Fit a model of scikit-learn's under our penalty; one with ``warm_start`` begins where it is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.set_params(C=1 / (penalty * len(classes)), tol=tolerance, max_iter=100)
        return model.fit(values.numpy(), classes.numpy())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path("results/smollm2-wikipedia/cache"))
    parser.add_argument("--tier", default="sweep")
    parser.add_argument("--tasks", nargs="+", default=known_tasks(), help="default: all")
    parser.add_argument("--sites", nargs="+", help="default: all sites of the tier")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("results/benchmarks/probe_speed.csv"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    lines = []
    with threadpool_limits(arguments.threads), anchorage.open_cache(arguments.cache) as cache:
        for pool in threadpool_info():
            print({name: pool.get(name) for name in ("internal_api", "architecture", "num_threads")})
        for task in arguments.tasks:
            design = design_task(cache, task, settings=ProbeSettings(tier=arguments.tier), seed=0)
            for site in arguments.sites or cache.tiers[arguments.tier]:
                methods = list(site_methods(cache, site, tier=arguments.tier, design=design).items())
                for round_ in range(arguments.rounds):
                    turn = round_ % len(methods)
                    for method, fit in methods[turn:] + methods[:turn]:
                        start = time.perf_counter()
                        accuracy, n_iterations = fit()
                        seconds = time.perf_counter() - start
                        lines.append((task, site, round_, method, seconds, accuracy, n_iterations))
                print(task, site, flush=True)
    columns = ["task", "site", "round", "method", "fit_s", "accuracy", "n_iterations"]
    table = pd.DataFrame(lines, columns=columns)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(arguments.output, index=False)
    for task, of_task in table.groupby("task"):
        seconds = of_task.groupby(["round", "method"])["fit_s"].sum().unstack()
        print(f"\n{task}: seconds over all sites, median of rounds (least to most); mean accuracy; mean iterations")
        for method in seconds:
            of_method, spread = of_task[of_task["method"] == method], seconds[method]
            print(
                f"  {method:20s} {spread.median():8.2f} ({spread.min():.2f}-{spread.max():.2f})"
                f"  {of_method['accuracy'].mean():.4f}  {of_method['n_iterations'].mean():.0f}"
            )
        for theirs in seconds.filter(like="sklearn"):
            ratio = seconds[theirs] / seconds[f"{theirs.partition(',')[0]}, ours"]
            print(f"  {theirs} / ours: {ratio.median():.1f} ({ratio.min():.1f}-{ratio.max():.1f})")


if __name__ == "__main__":
    main()
