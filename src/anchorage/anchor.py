"""The anchor: does what is stored still equal what the model computes?

Sampled rows are computed again, each in its original batch, and compared bit for bit with every stored site of every
tier. Exactness is demanded where the recorded environment is the present one; elsewhere the stated tolerance is. Then
the same rows are run in other batch sizes: which of them stay exact is a fact of the machine's kernels, measured and
printed. The original-batch rule and the batch table follow NDIF's tutorial "Caching Activations Over a Dataset".
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from anchorage.capturer import Capturer
from anchorage.model import describe_environment, load_trunk
from anchorage.plan import Plan
from anchorage.store.format import STORAGE_DTYPES, ShardBuffer, TierShape
from anchorage.store.identity import check_key
from anchorage.store.reader import Cache
from anchorage.trunk import SiteReader

BATCH_SIZES = (1, 2, 4, 8, 16, 32)
_MAX_LISTED = 50


@dataclass(frozen=True)
class Difference:
    """How one row of one site differs: both absolute and relative, and whether every element is within tolerance."""

    max_abs: float
    mean_relative: float
    within: bool

    @property
    def equal(self) -> bool:
        """Whether the bytes are the same."""
        return self.max_abs == 0 and self.within


def compare(stored: torch.Tensor, fresh: torch.Tensor, tolerance: float) -> Difference:
    """Compare a row's values bit for bit; where they differ, measure it in float64.

    Args:
        stored, fresh: of one shape and dtype.
        tolerance: absolute and relative, an element.
    """
    if torch.equal(stored.view(torch.uint8), fresh.view(torch.uint8)):
        return Difference(0.0, 0.0, True)
    a, b = stored.double(), fresh.double()
    diff = (a - b).abs()
    # Zeros of unlike sign differ in a bit and in no amount: the smallest number keeps them from counting as equal.
    max_abs = max(diff.max().item(), sys.float_info.min)
    relative = (diff.mean() / a.abs().mean().clamp_min(sys.float_info.min)).item()
    return Difference(max_abs, relative, bool((diff <= tolerance + tolerance * a.abs()).all()))


def sample_rows(plan: Plan) -> list[int]:
    """The rows to re-check, sorted: a seeded sample, the first and last row of the run, the first row of a short last
    batch, and the last row of each tier that ends before the run."""
    n_rows = plan.layout.n_rows
    ends = {0, n_rows - 1, plan.layout.batch(n_rows - 1).start, *(stop - 1 for stop in plan.layout.tier_rows.values())}
    others = np.setdiff1d(np.arange(n_rows), sorted(ends))
    n_drawn = min(plan.settings.anchor.rows, len(others))
    drawn = np.random.default_rng(plan.settings.seed).choice(others, n_drawn, replace=False)
    return sorted(ends | {int(row) for row in drawn})


def anchor_cache(plan: Plan, cache: Cache, log: Callable[[str], None]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Re-check a cache against the model.

    Args:
        plan: the run.
        cache: the stored activations.
        log: gets a line a step.

    Returns:
        The fields of ``anchor.json``, and the rows of ``anchor_batches.csv``.

    Raises:
        AnchorageError: the cache belongs to another configuration, or cannot be read.
    """
    check_key(str(cache.folder), cache.key, plan.key)
    capturer = Capturer(load_trunk(plan.facts, plan.settings.model), plan.sites, plan.facts["device"])
    rows, present = sample_rows(plan), describe_environment(plan.facts)
    foreign = [row for row in rows if cache.environment(row) != present]
    found = _recheck(plan, cache, capturer=capturer, rows=rows)
    unequal = {where: difference for where, difference in found.items() if not difference.equal}
    faults = [
        f"row {row}, tier {tier}, site {site}: differs by at most {difference.max_abs:.6g}, "
        + (
            f"beyond the tolerance of {plan.settings.anchor.tolerance}"
            if row in foreign
            else "where bits must be equal"
        )
        for (row, tier, site), difference in unequal.items()
        if row not in foreign or not difference.within
    ]
    cast = _compare_casts(plan, capturer)
    if cast["n_equal"] < cast["n_sites"]:
        faults.append(f"batch 0: casting as it captures gives other bits at {cast['n_sites'] - cast['n_equal']} sites")
    log(f"{len(rows)} rows, {len(found)} comparisons, {len(unequal)} not bit-equal, {len(faults)} fault(s)")
    for fault in faults[:_MAX_LISTED]:
        log(fault)
    table = _batch_table(plan, cache, capturer=capturer, rows=rows)
    for line in table:
        log(f"batches of {line['batch_rows']}: {line['rows_exact']} of {line['rows']} rows exact")
    report = {
        "key": plan.key,
        "ok": not faults,
        "exact": {
            "n_rows": len(rows),
            "n_sites": len(plan.sites),
            "n_comparisons": len(found),
            "mismatched": len(unequal),
            "max_abs_diff": max((difference.max_abs for difference in unequal.values()), default=0.0),
        },
        "rows": rows,
        "environment_match": not foreign,
        "demanded": f"bit-equal for {len(rows) - len(foreign)} rows, within tolerance for {len(foreign)}",
        "tolerance": plan.settings.anchor.tolerance,
        "environment": present,
        "faults": faults[:_MAX_LISTED],
        "n_faults": len(faults),
        "cast": cast,
    }
    return report, [{"key": plan.key} | line for line in table]


def _recheck(
    plan: Plan, cache: Cache, *, capturer: Capturer, rows: Sequence[int]
) -> dict[tuple[int, str, str], Difference]:
    """Compute rows again, each in its original batch, and compare every stored (row, tier, site)."""
    found, shapes = {}, plan.shapes(capturer.widths)
    for batch in tqdm(_batches_of(plan, rows), "anchor", unit="batch", disable=None):
        fresh = _run(plan, capturer, shapes, rows=batch)
        for row in (row for row in rows if row in batch):
            for tier, site, stored in _stored(plan, cache, row):
                value = fresh[tier].row_of(site, row - batch.start)
                found[row, tier, site] = compare(stored, value, plan.settings.anchor.tolerance)
    return found


def _batches_of(plan: Plan, rows: Sequence[int]) -> list[range]:
    return list(dict.fromkeys(plan.layout.batch(row) for row in rows))


def _run(
    plan: Plan, capturer: Capturer, shapes: Mapping[str, TierShape], *, rows: Sequence[int]
) -> dict[str, ShardBuffer]:
    """All tiers' values of one batch, as they would be stored."""
    tokens = np.concatenate([plan.corpus.rows(row, row + 1) for row in rows])
    lengths = [length for row in rows for length in plan.lengths(range(row, row + 1)) or []] or None
    buffers = {tier: ShardBuffer(shape, len(rows)) for tier, shape in shapes.items()}
    targets = {tier: (buffer, slice(0, len(rows))) for tier, buffer in buffers.items()}
    capturer.fill(tokens[:, : max(lengths)] if lengths else tokens, targets, rows[0], lengths)
    return buffers


def _stored(plan: Plan, cache: Cache, row: int) -> list[tuple[str, str, torch.Tensor]]:
    """Every stored site of a row: tier, site, value."""
    return [
        (tier, site, _read_row(cache, tier, site, row))
        for tier, sites in cache.tiers.items()
        if row < plan.layout.tier_rows[tier]
        for site in sites
    ]


def _read_row(cache: Cache, tier: str, site: str, row: int) -> torch.Tensor:
    if cache.identity["tiers"][tier]["reduce"] == "none":
        return cache.read_list(site, row, tier=tier)[0]
    return cache.read(site, row, tier=tier)[0]


def _batch_table(plan: Plan, cache: Cache, *, capturer: Capturer, rows: Sequence[int]) -> list[dict[str, Any]]:
    """The same rows in batches of other sizes, against what is stored."""
    shapes, n_rows = plan.shapes(capturer.widths), len(rows)
    stored = {row: _stored(plan, cache, row) for row in rows}
    table = []
    for size in tqdm(BATCH_SIZES, "batch sizes", unit="size", disable=None):
        found: list[Difference] = []
        rows_exact = 0
        for start in range(0, n_rows, size):
            # A last batch that is short is filled up with rows from the start: its shape is what is being tried.
            batch = np.take(rows, range(start, start + size), mode="wrap")
            fresh = _run(plan, capturer, shapes, rows=batch.tolist())
            for index, row in enumerate(batch[: n_rows - start]):
                differences = [
                    compare(value, fresh[tier].row_of(site, index), plan.settings.anchor.tolerance)
                    for tier, site, value in stored[int(row)]
                ]
                rows_exact += all(difference.equal for difference in differences)
                found += differences
        table.append(
            {
                "batch_rows": size,
                "rows_exact": rows_exact,
                "rows": n_rows,
                "max_abs_diff": max(difference.max_abs for difference in found),
                "mean_rel_diff": float(np.mean([difference.mean_relative for difference in found])),
                "beyond_tolerance": sum(not difference.within for difference in found),
            }
        )
    return table


def _compare_casts(plan: Plan, capturer: Capturer) -> dict[str, Any]:
    """Compute, then cast, against letting nnsight cast as it captures: on the first batch, every site."""
    batch, dtype = plan.layout.batch(0), STORAGE_DTYPES[plan.settings.capture.storage_dtype]
    ids = torch.from_numpy(plan.batch_tokens(batch).astype(np.int64)).to(capturer.device)
    reader = SiteReader(capturer.trunk, capturer.sites)
    cast_later: dict[str, torch.Tensor] = {}
    reader.read(ids, lambda site, value: cast_later.__setitem__(site.name, value.cpu().clone()))
    cast_at_once = reader.cache(ids, dtype)
    equal = [
        torch.equal(value.to(dtype).view(torch.uint8), cast_at_once[name].view(torch.uint8))
        for name, value in cast_later.items()
    ]
    return {"storage_dtype": plan.settings.capture.storage_dtype, "n_sites": len(equal), "n_equal": sum(equal)}
