"""Outlier dimensions: the few dimensions whose values are far larger than all others, for every stored site.

They decide how a site must be scaled, which storage dtype holds it, and whether a distance says anything. One pass over
the cache, a block of rows at a time: memory does not grow with the rows. That such dimensions exist, and are the same
for nearly all tokens: Dettmers et al., "LLM.int8()" (2022). The streaming table and the factor follow NDIF's tutorial
"Caching Activations Over a Dataset".
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from anchorage.errors import AnchorageError
from anchorage.sites import expand_sites
from anchorage.store.reader import Cache

OUTLIER_FACTOR = 10  # times the median dimension's largest |x|, as in NDIF's tutorial
COLUMNS = [
    "key", "tier", "reduce", "site", "rows", "rms", "median_max_abs", "max_abs", "max_dimension", "n_outliers",
]  # fmt: skip
DIMENSION_COLUMNS = ["key", "site", "dimension", "max_abs", "over_median", "over_rms", "outlier"]
_BLOCK_VALUES = 1 << 20  # of a site at a time: 8 MiB in float64


def measure_outliers(cache: Cache) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Find the outlier dimensions of every site, in running order, each in the tier that reads take.

    A dimension is an outlier if its largest |x| over all rows and tokens exceeds :data:`OUTLIER_FACTOR` times the
    median of all dimensions' largest |x|. In a tier that reduces, x is a row's mean or last token: its outliers are
    *not* those of the tokens.

    Returns:
        Rows of ``outliers.csv`` (:data:`COLUMNS`), one a site, and of ``outlier_dimensions.csv``
        (:data:`DIMENSION_COLUMNS`), one a site and outlier dimension, largest first; a site without outliers has its
        largest dimension there. Ratios to a zero are None.

    Raises:
        AnchorageError: a stored value is NaN or infinite; names tier, site and row.
        IntegrityError: stored bytes do not match their digests.
    """
    table, dimensions = [], []
    for site in tqdm(expand_sites(cache.sites, None), "outliers", unit="site", disable=None):
        rms, max_abs = _measure_site(cache, site)
        found = _rank_dimensions(max_abs, rms)
        tier = cache.tier_of(site)
        table.append(
            {
                "key": cache.key,
                "tier": tier,
                "reduce": cache.identity["tiers"][tier]["reduce"],
                "site": site,
                "rows": cache.tier_rows(tier),
                "rms": rms,
                "median_max_abs": float(np.median(max_abs)),
                "max_abs": found[0]["max_abs"],
                "max_dimension": found[0]["dimension"],
                "n_outliers": sum(row["outlier"] for row in found),
            }
        )
        dimensions += [{"key": cache.key, "site": site} | row for row in found]
    return table, dimensions


def _measure_site(cache: Cache, site: str) -> tuple[float, np.ndarray]:
    """A site's root mean square, and the largest |x| of each dimension, float64 ``[width]``."""
    tier = cache.tier_of(site)
    n_rows = cache.tier_rows(tier)
    row_values = _read_rows(cache, tier, site, range(1))[0].shape[-1]
    if cache.identity["tiers"][tier]["reduce"] == "none":
        row_values *= cache.identity["seq_len"]  # the longest that a row may be
    block_rows = max(1, _BLOCK_VALUES // row_values)
    sum_squares, n_values, max_abs = 0.0, 0, np.zeros(())
    for start in range(0, n_rows, block_rows):
        rows = _read_rows(cache, tier, site, range(start, min(start + block_rows, n_rows)))
        block = torch.cat(rows)
        max_abs = np.maximum(max_abs, block.abs().amax(0).double().numpy())
        if not np.isfinite(max_abs).all():
            bad = next(index for index, row in enumerate(rows) if not row.isfinite().all())
            raise AnchorageError(
                f"tier {tier!r} holds NaN or infinity at site {site!r}, row {start + bad}. "
                "A capture refuses such values, so no capture wrote this cache: remove it and capture again."
            )
        values = block.double().flatten()  # a square of float16 or bfloat16 does not fit its dtype
        sum_squares, n_values = sum_squares + values.dot(values).item(), n_values + len(values)
    return math.sqrt(sum_squares / n_values), max_abs


def _read_rows(cache: Cache, tier: str, site: str, rows: range) -> list[torch.Tensor]:
    """Rows of a site, ``[tokens, width]`` each; a tier that reduces has one value a row, ``[1, width]``."""
    if cache.identity["tiers"][tier]["reduce"] == "none":
        return cache.read_list(site, rows, tier=tier)
    return list(cache.read(site, rows, tier=tier)[:, None])


def _rank_dimensions(max_abs: np.ndarray, rms: float) -> list[dict[str, Any]]:
    """The outlier dimensions, largest first, or the largest dimension where there is no outlier."""
    median = float(np.median(max_abs))
    outlier = max_abs > OUTLIER_FACTOR * median
    ranked = np.argsort(-max_abs, kind="stable")[: max(1, int(outlier.sum()))]
    return [
        {
            "dimension": int(dimension),
            "max_abs": float(max_abs[dimension]),
            "over_median": float(max_abs[dimension]) / median if median else None,
            "over_rms": float(max_abs[dimension]) / rms if rms else None,
            "outlier": bool(outlier[dimension]),
        }
        for dimension in ranked
    ]
