"""The figures.

Goal: each is drawn from its tables alone, also from those with one site, very many, nothing but zeros, or empty cells,
and says what it must. Method: made-up tables; the text in the SVG is the oracle of what is said.
"""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest

from anchorage.figures.loading import plot_loading
from anchorage.figures.memory import plot_memory
from anchorage.figures.outliers import plot_outliers
from anchorage.figures.sweep import plot_sweep
from anchorage.outliers import OUTLIER_FACTOR
from anchorage.sites import stable_names
from loading_tables import ALL, DEFAULT, loading_table, not_run

DEFAULT_SITES = ["embed", "attn.0", "mlp.0", *(f"block.{i}" for i in range(30))]
HARD_SITES = [["block.8"], DEFAULT_SITES, stable_names(43)]
LOOKUP = "best lookup by token id alone"


def sweep_table(sites, tasks=("duplicate_token",), **columns) -> pd.DataFrame:
    """A table of a sweep whose lines are not in running order."""
    n = len(sites)
    accuracy = np.linspace(0.5, 0.8, n)
    middle = {"accuracy": accuracy, "low": accuracy - 0.03, "high": accuracy + 0.03}
    shuffled = {"shuffled_accuracy": 0.5, "shuffled_low": 0.47, "shuffled_high": 0.53}
    others = {
        "chance": 0.5,
        "position_only_accuracy": 0.5,
        "token_only_accuracy": 0.5,
        "n_train": 10_254,
        "n_test": 2_606,
    }
    one = pd.DataFrame({"site": sites, "site_index": range(n)} | middle | shuffled | others | columns)
    return pd.concat([one.assign(task=task) for task in tasks], ignore_index=True)[::-1]


def outlier_tables(sites, **columns) -> tuple[pd.DataFrame, pd.DataFrame]:
    sizes = {"rms": 10.0, "median_max_abs": 50.0, "max_abs": 29_296.0, "max_dimension": 507, "n_outliers": 2}
    table = pd.DataFrame({"site": sites, "reduce": "none"} | sizes | columns, index=range(len(sites)))
    rows = [{"site": site, "dimension": 507, "max_abs": 29_296.0, "outlier": True} for site in sites]
    rows += [{"site": site, "dimension": 14, "max_abs": 1000.0 + i, "outlier": True} for i, site in enumerate(sites)]
    return table, pd.DataFrame(rows)


def draw(folder, plot, *tables) -> list[str]:
    """Draw twice, compare the files' bytes, and return the texts in the SVG."""
    files = []
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        paths = [folder / name / "figure.png", folder / name / "figure.svg"]
        plot(*tables, paths)
        files.append([path.read_bytes() for path in paths])
    assert files[0] == files[1]
    png, svg = files[0]
    assert png.startswith(b"\x89PNG")
    assert len(png) > 10_000
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg.decode())


def site_labels(texts, sites) -> list[str]:
    return [text for text in texts if text in set(sites)]


@pytest.mark.parametrize("sites", HARD_SITES, ids=len)
def test_sweep_of_few_and_many_sites(tmp_path, sites):
    texts = draw(tmp_path, plot_sweep, sweep_table(sites, ("duplicate_token", "topic")))
    assert {"chance", "probe, simultaneous interval", "probe on shuffled labels, interval"} <= set(texts)
    assert "duplicate_token: 10,254 training, 2,606 test tokens" in texts
    assert sum(text.startswith("topic: ") for text in texts) == 1
    if len(sites) <= 40:
        assert site_labels(texts, sites) == sites  # every one, once, in running order
    else:
        assert 15 < len(site_labels(texts, sites)) <= 40
        assert {label.split(".")[0] for label in site_labels(texts, sites)} == {"embed", "block"}


def test_sweep_draws_a_lookup_only_where_it_differs_from_chance(tmp_path):
    def texts(name, **columns):
        return draw(tmp_path / name, plot_sweep, sweep_table(DEFAULT_SITES, **columns))

    assert not any("best lookup" in text for text in texts("equal", token_only_accuracy=0.504))
    assert not any("best lookup" in text for text in texts("empty", token_only_accuracy=np.nan))
    assert not any("best lookup" in text for text in texts("label", position_only_accuracy=1.0))
    assert LOOKUP in texts("token", token_only_accuracy=0.42)
    assert "best lookup by position alone" in texts("position", position_only_accuracy=0.55)


def test_sweep_with_empty_cells(tmp_path):
    table = sweep_table(DEFAULT_SITES, ("a", "b"), token_only_accuracy=0.6)
    numbers = table.columns.drop(["site", "site_index", "task"])
    table.loc[table["task"] == "b", numbers] = np.nan
    table.loc[table["site"] == "block.3", ["low", "high", "shuffled_accuracy", "token_only_accuracy"]] = np.nan
    texts = draw(tmp_path, plot_sweep, table)
    assert "b: ? training, ? test tokens" in texts
    assert LOOKUP in texts


def test_sweep_says_what_it_was_warned_of(tmp_path):
    table = sweep_table(["embed", "block.0"], ("a", "b"))
    table["warning"] = np.where(table["task"] == "a", "only 9 test tokens, costs $1 or $2", None)
    table["n_train"] = np.where(table["site"] == "embed", 900, 1_000)
    texts = draw(tmp_path, plot_sweep, table)
    assert [text for text in texts if "Warning" in text] == ["Warning: only 9 test tokens, costs $1 or $2"]
    assert "a: 900 to 1,000 training, 2,606 test tokens" in texts


@pytest.mark.parametrize("sites", HARD_SITES, ids=len)
def test_outliers_of_few_and_many_sites(tmp_path, sites):
    texts = draw(tmp_path, plot_outliers, *outlier_tables(sites))
    assert {"float16's limit, 65,504", "largest |x|", "root mean square", "median dimension's largest |x|"} <= set(
        texts
    )
    assert [text for text in texts if text.startswith("dimension ")] == ["dimension 507", "dimension 14"]
    assert f"outlier dimensions: largest |x| over {OUTLIER_FACTOR} times the median dimension's" in texts
    if len(sites) <= 40:
        assert site_labels(texts, sites) == sites


def test_outliers_of_zeros(tmp_path):
    nothing = dict.fromkeys(["rms", "median_max_abs", "max_abs", "n_outliers"], 0)
    table, dimensions = outlier_tables(DEFAULT_SITES, **nothing)
    all_zero = draw(tmp_path / "all", plot_outliers, table, dimensions.assign(max_abs=0.0, outlier=False))
    assert not any(text.startswith("dimension ") for text in all_zero)
    some = table.assign(max_abs=np.where(table["site"] == "block.3", 0.0, 5.0), rms=1e-9, median_max_abs=1.0)
    assert draw(tmp_path / "some", plot_outliers, some, dimensions[:0])


def test_outliers_mark_a_site_that_is_stored_reduced(tmp_path):
    table, dimensions = outlier_tables(["embed", "block.0"], reduce=["none", "mean"])
    texts = draw(tmp_path, plot_outliers, table, dimensions)
    assert {"embed", "block.0 (mean)"} <= set(texts)


def memory_tables(*processes, batches=6, **columns) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Batches and shards of two batches; of each process its part."""
    table = pd.DataFrame({"part": np.repeat(processes, batches)})
    table["process"] = np.repeat(range(len(processes)), batches)
    table["rows_total"] = 16 * (table.index + 1)
    memory = {"anonymous_mib": 300.0, "rss_mib": 900.0, "peak_mib": 950.0}
    table = table.assign(**memory | {"cuda_allocated_mib": np.nan, "cuda_peak_mib": np.nan} | columns)
    return table, table[1::2]


def memory_verdict(leak=False, **measures):
    slopes = {"slope_mib_per_1000_rows": 1.25, "slope_low": 0.5, "slope_high": 2}
    trend = [{"rows_total": [32, 96], "mib": [300.0, 300.1]}, {"rows_total": [128, 192], "mib": [300.0, 300.1]}]
    return {"leak": leak, "reason": "it $grows$ so", "measures": dict.fromkeys(measures, slopes | {"trend": trend})}


SLOPE = "slope after warm-up: 1.25 MiB per 1,000 rows (0.5 to 2)"


def test_memory_marks_parts_and_where_a_process_went_on(tmp_path):
    verdict = memory_verdict(anonymous_mib=1)
    texts = draw(tmp_path / "both", plot_memory, *memory_tables(0, 1, 1), verdict)
    assert [text for text in texts if text in {"part 0", "part 1", "resumed"}] == ["part 0", "part 1", "resumed"]
    assert {"resident", "highest resident so far", "end of a shard", "0"} <= set(texts)
    assert texts.count(SLOPE) == 1
    assert "No leak shown: it $grows$ so" in texts
    assert not any("GPU" in text for text in texts)
    one = draw(tmp_path / "one", plot_memory, *memory_tables(0), memory_verdict(leak=None))
    assert "Not judged: it $grows$ so" in one
    assert not {"part 0", "resumed", SLOPE} & set(one)
    many = draw(tmp_path / "many", plot_memory, *memory_tables(*range(40)), verdict)
    assert 8 < sum(text.startswith("part ") for text in many) <= 12


def test_memory_of_a_gpu_has_a_panel(tmp_path):
    tables = memory_tables(0, 1, cuda_allocated_mib=480.0, cuda_peak_mib=1026.0)
    texts = draw(tmp_path, plot_memory, *tables, memory_verdict(True, anonymous_mib=1, cuda_allocated_mib=1))
    assert {"GPU, allocated", "GPU, highest allocated so far", "Memory leaks: it $grows$ so"} <= set(texts)
    assert texts.count(SLOPE) == 2


def test_memory_without_batches_shows_the_shards(tmp_path):
    batches, shards = memory_tables(0, 0, anonymous_mib=np.nan)
    shown = draw(tmp_path / "shards", plot_memory, batches[:0], shards, memory_verdict(leak=None))
    assert {"resident", "resumed"} <= set(shown)
    assert "anonymous (no file behind it)" not in shown
    draw(tmp_path / "nothing", plot_memory, batches[:0], shards[:0], memory_verdict(leak=None))


@pytest.mark.parametrize("methods", [DEFAULT, ALL], ids=len)
def test_loading_has_a_panel_a_subject_and_a_line_a_method(tmp_path, methods):
    texts = draw(tmp_path, plot_loading, loading_table(methods))
    assert [text for text in texts if text in set(methods)] == [
        name for _ in range(3) for name in sorted(methods, key=ALL.index)
    ]
    assert {"weights: 512 MiB wanted of a file of 512 MiB", "shard: 12.0 MiB wanted of a file of 192 MiB"} <= set(texts)
    assert {f"{state}: median, lowest to highest" for state in ("cold", "warm")} <= set(texts)
    assert "anonymous (private) while held" in texts
    assert not any("not run" in text for text in texts)


def test_loading_names_what_was_not_run(tmp_path):
    table = not_run(loading_table(ALL), "not installed", method="fastsafetensors")
    table = not_run(table, "tmpfs", subject="big", state="cold")
    texts = draw(tmp_path / "some", plot_loading, table)
    assert texts.count("fastsafetensors") == 3
    assert texts.count("warm: not run") == 3
    assert texts.count("cold: not run") == 2 + len(ALL)
    nothing = pd.concat([not_run(loading_table(["ours"]), "why", subject=name) for name in ("weights", "big", "shard")])
    texts = draw(tmp_path / "none", plot_loading, nothing[nothing["status"] == "not run"])
    assert {"weights: not run", "big: not run", "shard: not run"} <= set(texts)
