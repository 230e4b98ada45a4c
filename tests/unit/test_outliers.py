"""The table of outlier dimensions.

Goal: its numbers are those of the stored values, whatever the blocks they are read in, and a dimension that stands out
is found. Method: stores of known values, some of them planted. Oracle: numpy on the plain arrays that went in.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import anchorage
from anchorage import outliers
from anchorage.errors import AnchorageError
from anchorage.outliers import COLUMNS, DIMENSION_COLUMNS, OUTLIER_FACTOR, measure_outliers
from stores import SEQ_LEN, SITES, WIDTH, Store

ONE_ROW = SEQ_LEN * WIDTH


def measure(store: Store):
    store.build()
    table, dimensions = measure_outliers(anchorage.open_cache(store.cache))
    assert all(list(row) == COLUMNS for row in table)
    assert all(list(row) == DIMENSION_COLUMNS for row in dimensions)
    assert {row["key"] for row in table + dimensions} == {store.key}
    assert [row["site"] for row in table] == SITES
    return {row["site"]: row for row in table}, dimensions


def plain_maxima(value: torch.Tensor) -> np.ndarray:
    return np.abs(value.double().numpy()).reshape(-1, WIDTH).max(axis=0)


@pytest.mark.parametrize("block_values", [1, 3 * ONE_ROW, 1 << 20], ids=["a row", "across shards", "all"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_numbers_are_those_of_the_values(tmp_path, monkeypatch, dtype, block_values):
    monkeypatch.setattr(outliers, "_BLOCK_VALUES", block_values)
    store = Store(tmp_path, storage_dtype=dtype)
    store.values["tokens", "attn.0"][
        21, -1, 2
    ] = -60_000.0  # the short last shard's end; float16 cannot hold its square
    table, dimensions = measure(store)
    for site in SITES:
        plain = store.values["tokens", site].double().numpy()
        maxima = plain_maxima(store.values["tokens", site])
        row = table[site]
        assert (row["tier"], row["reduce"], row["rows"]) == ("tokens", "none", 22)
        assert row["rms"] == pytest.approx(np.sqrt(np.mean(plain**2)), rel=1e-12)
        assert row["median_max_abs"] == np.median(maxima)
        assert (row["max_abs"], row["max_dimension"]) == (maxima.max(), maxima.argmax())
    first = next(row for row in dimensions if row["site"] == "attn.0")
    assert first["over_rms"] == pytest.approx(table["attn.0"]["max_abs"] / table["attn.0"]["rms"])
    assert first["over_median"] == pytest.approx(table["attn.0"]["max_abs"] / table["attn.0"]["median_max_abs"])


def test_planted_outliers_are_found_and_nothing_else(tmp_path):
    control, control_dimensions = measure(Store(tmp_path / "control"))
    assert [row["n_outliers"] for row in control.values()] == [0, 0, 0]
    assert [(row["site"], row["outlier"]) for row in control_dimensions] == [(site, False) for site in SITES]

    store = Store(tmp_path / "planted")
    store.values["tokens", "block.0"][17, 2, 3] = -500.0
    store.values["tokens", "block.0"][0, 0, 5] = 700.0
    table, dimensions = measure(store)
    assert [row["n_outliers"] for row in table.values()] == [0, 0, 2]
    found = [(row["dimension"], row["max_abs"], row["outlier"]) for row in dimensions if row["site"] == "block.0"]
    assert found == [(5, 700.0, True), (3, 500.0, True)]


def test_the_factor_itself_is_no_outlier(tmp_path):
    store = Store(tmp_path)
    for site, largest in (("embed", OUTLIER_FACTOR), ("attn.0", OUTLIER_FACTOR + 0.0078125)):
        store.values["tokens", site].fill_(1.0)[3, 1, 4] = largest
    table, _ = measure(store)
    assert (table["embed"]["n_outliers"], table["attn.0"]["n_outliers"]) == (0, 1)


def test_sites_of_zeros(tmp_path):
    store = Store(tmp_path)
    store.values["tokens", "embed"].zero_()
    store.values["tokens", "attn.0"].zero_()[4, 2, 1] = 3.0  # the median dimension is 0, this one is not
    table, dimensions = measure(store)
    assert (table["embed"]["rms"], table["embed"]["max_abs"], table["embed"]["n_outliers"]) == (0, 0, 0)
    assert (table["attn.0"]["median_max_abs"], table["attn.0"]["n_outliers"]) == (0, 1)
    of_zeros = {row["site"]: row for row in dimensions}
    assert (of_zeros["embed"]["over_median"], of_zeros["embed"]["over_rms"]) == (None, None)
    assert (of_zeros["attn.0"]["dimension"], of_zeros["attn.0"]["over_median"]) == (1, None)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("row", [0, 7, 8, 21])
def test_what_is_not_finite_is_refused(tmp_path, monkeypatch, bad, row):
    monkeypatch.setattr(outliers, "_BLOCK_VALUES", 3 * ONE_ROW)
    store = Store(tmp_path)
    store.values["tokens", "attn.0"][row, 1, 0] = bad
    with pytest.raises(AnchorageError, match=f"tier 'tokens' .* site 'attn.0', row {row}\\. "):
        measure(store)


def test_a_site_stored_only_reduced_is_marked(tmp_path):
    store = Store(tmp_path, tier_rows={"pooled": 22})
    table, _ = measure(store)
    for site in SITES:
        assert (table[site]["tier"], table[site]["reduce"]) == ("pooled", "mean")
        assert table[site]["max_abs"] == plain_maxima(store.values["pooled", site]).max()


def test_sites_come_in_running_order_whatever_the_tiers_say(tmp_path):
    cache = anchorage.open_cache(Store(tmp_path).build().cache)
    for tier, sites in zip(cache.identity["tiers"].values(), (["block.0"], ["attn.0", "block.0"], SITES), strict=True):
        tier["sites"] = sites
    assert cache.sites == ["block.0", "attn.0", "embed"]
    table, _ = measure_outliers(cache)
    assert [row["site"] for row in table] == SITES
