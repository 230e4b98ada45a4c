"""The anchor: does what is stored still equal what the model computes?

Sampled rows are computed again, each in its original batch, and compared bit for bit with every stored site of every
tier. Exactness is demanded where the recorded environment is the present one; elsewhere the stated tolerance is. Then the
same rows are run in other batch sizes: which of them stay exact is a fact of the machine's kernels, measured and printed.
The original-batch rule and the batch table follow NDIF's tutorial "Caching Activations Over a Dataset".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from anchorage.capture import Capturer
from anchorage.model import describe_environment, load_trunk
from anchorage.plan import Plan
from anchorage.store.format import STORAGE_DTYPES, ShardBuffer, TierShape
from anchorage.store.identity import check_key
from anchorage.store.reader import Cache
from anchorage.trunk import SiteReader

BATCH_SIZES = (1, 2, 4, 8, 16, 32)
_MAX_LISTED = 20


@dataclass
class Difference:
    """What comparisons have found so far."""

    n_compared: int = 0
    mismatched: int = 0
    max_abs_diff: float = 0.0
    beyond_tolerance: int = 0
    relative: list[float] = field(default_factory=list)

    def add(self, stored: torch.Tensor, fresh: torch.Tensor, tolerance: float) -> bool:
        """Compare one row of one site; returns whether the bytes are equal."""
        self.n_compared += 1
        if torch.equal(stored.view(torch.uint8), fresh.view(torch.uint8)):
            self.relative.append(0.0)
            return True
        self.mismatched += 1
        diff = (stored.double() - fresh.double()).abs()
        self.max_abs_diff = max(self.max_abs_diff, diff.max().item())
        self.relative.append((diff.mean() / stored.double().abs().mean().clamp_min(1e-300)).item())
        within = diff <= tolerance + tolerance * stored.double().abs()
        self.beyond_tolerance += not bool(within.all())
        return False


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
    capturer = Capturer(load_trunk(dict(plan.facts), plan.settings.model), plan.sites, plan.facts["device"])
    shapes = plan.shapes(capturer.widths)
    rows, present = sample_rows(plan), describe_environment(dict(plan.facts))
    tolerance = plan.settings.anchor.tolerance
    exact, mismatches, foreign = Difference(), [], set()
    for batch in tqdm(_batches_of(plan, rows), "anchor", unit="batch", disable=None):
        tokens = plan.corpus.rows(batch.start, batch.stop)
        fresh = _run(capturer, shapes, tokens, batch.start)
        for row in (row for row in rows if row in batch):
            matches = cache.environment(row) == present
            foreign |= set() if matches else {row}
            for tier, site, stored in _stored(plan, cache, row):
                before = exact.beyond_tolerance
                if not exact.add(stored, fresh[tier][site][row - batch.start], tolerance) and (
                    matches or exact.beyond_tolerance > before
                ):
                    mismatches.append({"row": row, "tier": tier, "site": site, "tolerated": False})
                    log(f"anchor: row {row}, {tier} {site}: differs, by at most {exact.max_abs_diff:.6g} so far")
    log(f"anchor: {len(rows)} rows, {exact.n_compared} comparisons, {exact.mismatched} not bit-equal")
    table = _batch_table(plan, capturer, shapes, cache)
    for line in table:
        log(f"anchor: batches of {line['batch_rows']}: {line['rows_exact']} of {line['rows']} rows exact")
    report = {
        "key": plan.key,
        "ok": not mismatches,
        "exact": {
            "n_rows": len(rows),
            "n_sites": len(plan.sites),
            "n_comparisons": exact.n_compared,
            "mismatched": exact.mismatched,
            "max_abs_diff": exact.max_abs_diff,
        },
        "rows": rows,
        "environment_match": not foreign,
        "demanded": "bit-equal" if not foreign else f"bit-equal, but within tolerance for {len(foreign)} rows",
        "tolerance": tolerance,
        "environment": present,
        "mismatches": mismatches[:_MAX_LISTED],
        "cast": _compare_casts(plan, capturer),
    }
    return report, [{"key": plan.key} | line for line in table]


def _batches_of(plan: Plan, rows: Sequence[int]) -> list[range]:
    return list(dict.fromkeys(plan.layout.batch(row) for row in rows))


def _run(
    capturer: Capturer, shapes: Mapping[str, TierShape], tokens: np.ndarray, first_row: int
) -> dict[str, dict[str, torch.Tensor]]:
    """All tiers' values of one batch, by tier and site, as they would be stored."""
    rows = slice(0, len(tokens))
    buffers = {tier: ShardBuffer(shape, len(tokens)) for tier, shape in shapes.items()}
    capturer.fill(tokens, {tier: (buffer, rows) for tier, buffer in buffers.items()}, first_row)
    return {
        tier: {site: buffer.rows_of(site, rows) for site in buffer.shape.widths} for tier, buffer in buffers.items()
    }


def _stored(plan: Plan, cache: Cache, row: int) -> list[tuple[str, str, torch.Tensor]]:
    """Every stored site of a row: tier, site, value."""
    return [
        (tier, site, cache.read(site, row, tier=tier)[0])
        for tier, sites in cache.tiers.items()
        if row < plan.layout.tier_rows[tier]
        for site in sites
    ]


def _batch_table(plan: Plan, capturer: Capturer, shapes: Mapping[str, TierShape], cache: Cache) -> list[dict[str, Any]]:
    """The drawn rows in batches of other sizes, against what is stored."""
    n_rows = min(max(BATCH_SIZES), plan.layout.n_rows)
    rows = np.random.default_rng(plan.settings.seed).choice(plan.layout.n_rows, n_rows, replace=False)
    stored = {int(row): _stored(plan, cache, int(row)) for row in rows}
    table = []
    for size in tqdm(BATCH_SIZES, "batch sizes", unit="size", disable=None):
        found, rows_exact = Difference(), 0
        for start in range(0, n_rows, size):
            # A last batch that is short is filled up with rows from the start: its shape is what is being tried.
            batch = np.take(rows, range(start, start + size), mode="wrap")
            fresh = _run(capturer, shapes, np.concatenate([plan.corpus.rows(row, row + 1) for row in batch]), 0)
            for index, row in enumerate(batch[: n_rows - start]):
                equal = [
                    found.add(value, fresh[tier][site][index], plan.settings.anchor.tolerance)
                    for tier, site, value in stored[int(row)]
                ]
                rows_exact += all(equal)
        table.append(
            {
                "batch_rows": size,
                "rows_exact": rows_exact,
                "rows": n_rows,
                "max_abs_diff": found.max_abs_diff,
                "mean_rel_diff": float(np.mean(found.relative)),
                "beyond_tolerance": found.beyond_tolerance,
            }
        )
    return table


def _compare_casts(plan: Plan, capturer: Capturer) -> dict[str, Any]:
    """Compute, then cast, against letting nnsight cast as it captures: on the first batch, every site."""
    batch, dtype = plan.layout.batch(0), STORAGE_DTYPES[plan.settings.capture.storage_dtype]
    ids = torch.from_numpy(plan.corpus.rows(batch.start, batch.stop).astype(np.int64)).to(capturer.device)
    reader, cast_later = SiteReader(capturer.trunk, capturer.sites), {}
    reader.read(ids, lambda site, value: cast_later.__setitem__(site.name, value.cpu().clone()))
    cast_at_once = reader.cache(ids, dtype)
    equal = [
        torch.equal(value.to(dtype).view(torch.uint8), cast_at_once[name].view(torch.uint8))
        for name, value in cast_later.items()
    ]
    return {"storage_dtype": plan.settings.capture.storage_dtype, "n_sites": len(equal), "n_equal": sum(equal)}
