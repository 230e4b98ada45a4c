"""What pads do: prompts of uneven length, run in one padded batch and each alone.

A reduction over all positions of a padded row is off by what the pads hold. One over the real tokens alone equals the
row alone, if the model was told their positions: some models count pads in front of them too. Measured is how far off,
on both sides, with and without explicit position ids, and whether the store's own reductions are right. The lesson and
its measures follow NDIF's tutorial "Caching Activations Over a Dataset", which pads on the left only.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from anchorage.model import load_trunk
from anchorage.plan import Plan
from anchorage.prompts import PAD_ID, Batch, Prompt, draw_prompts, pad_prompts
from anchorage.reduction import reduce_rows
from anchorage.trunk import Site, SiteReader, find_sites, probe_sites, trimmed

REDUCTIONS = ("mean", "last", "max")
# Relative. Another batch shape means other kernels, which add up in another order. In float32 what that changes grows
# with a model's width and depth (25 eps were found at width 576, 30 blocks; this is 840); in the half precisions, whose
# sums run in float32, it is the rounding of each value (4 eps were found; this is 20). A mask shifted by one changed
# the same prompts by 0.9 % at least, and up to 180-fold.
TOLERANCES = {"float32": 1e-4, "float16": 20 * 2.0**-10, "bfloat16": 20 * 2.0**-7}
COLUMNS = [
    "key", "site", "side", "position_ids", "prompt", "length", "n_pads", "reduction", "masked", "relative_error",
]  # fmt: skip
NORM_COLUMNS = ["key", "site", "side", "position_ids", "prompt", "length", "n_pads", "pad_norm", "real_norm"]
_STORED = ("mean", "last")
_MAX_LISTED = 50

Line = dict[str, Any]
Alone = dict[str, dict[str, Tensor]]  # by site and reduction, float64 [width]


def choose_sites(plan: Plan, passing: Sequence[Site]) -> list[Site]:
    """The sites of the tier that keeps all tokens of most rows, and a middle and the deepest one of all sites.

    Args:
        plan: the run.
        passing: all its sites, in the order in which they pass.
    """
    tiers, rows = plan.settings.capture.tiers, plan.layout.tier_rows
    whole = [name for name in tiers if tiers[name].reduce == "none"]
    wanted = {passing[len(passing) // 2].name, passing[-1].name}
    if whole:
        wanted |= set(plan.tier_sites[max(whole, key=lambda name: rows[name])])
    return [site for site in passing if site.name in wanted]


def measure_padding(plan: Plan, log: Callable[[str], None]) -> tuple[dict[str, Any], list[Line], list[Line]]:
    """Run prompts padded and alone, and compare.

    Args:
        plan: the run; no cache is needed.
        log: gets what was found, a line each.

    Returns:
        The fields of ``padding.json``, the rows of ``padding.csv`` (:data:`COLUMNS`) and of ``padding_norms.csv``
        (:data:`NORM_COLUMNS`).

    Raises:
        AnchorageError: model or corpus cannot be used; also a model that takes no attention mask.
    """
    plan.check()
    trunk, device = load_trunk(plan.facts, plan.settings.model), plan.facts["device"]
    sites = choose_sites(plan, probe_sites(trunk, find_sites(trunk, plan.sites), device)[0])
    prompts = draw_prompts(plan)
    with trimmed(trunk, max(site.depth for site in sites)):
        reader = SiteReader(trunk, sites)
        kinds = [True, False] if "position_ids" in reader.inputs else [False]
        batches = [pad_prompts(prompts, side, explicit=explicit) for side in ("left", "right") for explicit in kinds]
        table, norms = _compare(reader, batches, device)
    report = {"key": plan.key} | judge_errors(table, plan.facts["dtype"])
    report |= {"pad_id": PAD_ID, "sites": [site.name for site in sites], "lengths": [len(some.ids) for some in prompts]}
    _tell(report, log)
    return report, [{"key": plan.key} | line for line in table], [{"key": plan.key} | line for line in norms]


def _compare(reader: SiteReader, batches: Sequence[Batch], device: str) -> tuple[list[Line], list[Line]]:
    """The lines of both tables, without the key."""
    prompts = batches[0].prompts
    table: list[Line] = []
    norms: list[Line] = []
    with tqdm(total=len(prompts) + len(batches), desc="padding", unit="pass", disable=None) as bar:
        alone = []
        for prompt in prompts:
            alone.append(_run_alone(reader, prompt, device))
            bar.update()
        for batch in batches:
            _run_batch(reader, batch, device, alone=alone, table=table, norms=norms)
            bar.update()
    return table, norms


def _run_alone(reader: SiteReader, prompt: Prompt, device: str) -> Alone:
    found: Alone = {}

    def take(site: Site, value: Tensor) -> None:
        found[site.name] = {name: _reduce(_exact(value[0]), name) for name in REDUCTIONS}

    reader.read(prompt.ids[None].to(device), take)
    return found


def _run_batch(
    reader: SiteReader, batch: Batch, device: str, *, alone: Sequence[Alone], table: list[Line], norms: list[Line]
) -> None:
    """Run a padded batch and append its lines to both tables."""
    lengths = [len(prompt.ids) for prompt in batch.prompts]

    def take(site: Site, value: Tensor) -> None:
        # The store pads on the right.
        stored = {name: reduce_rows(value, name, lengths) for name in _STORED if batch.side == "right"}
        for index, (prompt, real) in enumerate(zip(batch.prompts, batch.real, strict=True)):
            tokens, expected = _exact(value[index]), alone[index][site.name]
            place = {"site": site.name, "side": batch.side, "position_ids": batch.given, "prompt": prompt.row}
            place |= {"length": lengths[index], "n_pads": len(tokens) - lengths[index]}
            norms.append(place | _mean_norms(tokens, real))
            found = [("no", name, _reduce(tokens, name)) for name in REDUCTIONS]
            found += [("yes", name, _reduce(tokens[real], name)) for name in REDUCTIONS]
            found += [("store", name, _exact(values[index])) for name, values in stored.items()]
            for masked, name, value_found in found:
                error = _relative_error(value_found, expected[name])
                table.append(place | {"reduction": name, "masked": masked, "relative_error": error})

    mask, positions = batch.attention_mask, batch.position_ids
    reader.read(
        batch.ids.to(device),
        take,
        attention_mask=mask.to(device),
        position_ids=None if positions is None else positions.to(device),
    )


def _exact(value: Tensor) -> Tensor:
    return value.cpu().double()  # in this order: not every device knows float64


def _reduce(tokens: Tensor, reduction: str) -> Tensor:
    """Reduce ``[tokens, width]``: the mean, the last token, or each dimension's largest value."""
    if reduction == "mean":
        return tokens.mean(dim=0)
    return tokens[-1] if reduction == "last" else tokens.amax(dim=0)


def _relative_error(found: Tensor, expected: Tensor) -> float:
    return (found - expected).norm().item() / max(expected.norm().item(), sys.float_info.min)


def _mean_norms(tokens: Tensor, real: slice) -> dict[str, float | None]:
    sizes = tokens.norm(dim=-1)
    is_pad = torch.ones(len(tokens), dtype=torch.bool)
    is_pad[real] = False
    return {
        "pad_norm": sizes[is_pad].mean().item() if is_pad.any() else None,
        "real_norm": sizes[real].mean().item(),
    }


def judge_errors(table: Sequence[Mapping[str, Any]], dtype: str) -> dict[str, Any]:
    """The verdict on the errors of a table: masked reductions must equal the row alone, and the unmasked must not.

    Demanded are the rows with explicit position ids; of a model that takes none, those with pads on the right, which
    move no token. The others are reported only.

    Args:
        table: rows of ``padding.csv``.
        dtype: what the model computes in.
    """
    tolerance = TOLERANCES[dtype]
    demanded, where = [line for line in table if line["position_ids"] == "explicit"], "explicit position ids"
    if not demanded:
        demanded, where = [line for line in table if line["side"] == "right"], "pads on the right"
    faults = [
        f"prompt {line['prompt']} ({line['length']} tokens, {line['n_pads']} pads on the {line['side']}), site "
        f"{line['site']}: {line['reduction']} ({'of the store' if line['masked'] == 'store' else 'masked'}) differs "
        f"from the row alone by {line['relative_error']:.3g}, beyond the tolerance of {tolerance:.3g}"
        for line in demanded
        if line["masked"] != "no" and not line["relative_error"] <= tolerance  # NaN is no less a fault
    ]
    control = [line for line in demanded if (line["masked"], line["reduction"]) == ("no", "mean") and line["n_pads"]]
    n_beyond = sum(not line["relative_error"] <= tolerance for line in control)
    if control and not n_beyond:
        faults.append("no unmasked mean of a padded prompt is beyond the tolerance: it is too wide to find anything")
    return {
        "ok": not faults,
        "dtype": dtype,
        "tolerance": tolerance,
        "demanded": f"masked within tolerance, {where}",
        "largest_masked_error": _largest(table, "yes"),
        "largest_store_error": _largest(table, "store"),
        "control": {"n_unmasked_means": len(control), "n_beyond_tolerance": n_beyond},
        "faults": faults[:_MAX_LISTED],
        "n_faults": len(faults),
    }


def _largest(table: Sequence[Mapping[str, Any]], masked: str) -> dict[str, dict[str, float | None]]:
    """The largest error by side and position ids; None where one is not a number."""
    errors: dict[str, dict[str, list[float]]] = {}
    for line in table:
        if line["masked"] == masked:
            errors.setdefault(line["side"], {}).setdefault(line["position_ids"], []).append(line["relative_error"])
    return {
        side: {given: max(some) if all(map(math.isfinite, some)) else None for given, some in kinds.items()}
        for side, kinds in errors.items()
    }


def _tell(report: Mapping[str, Any], log: Callable[[str], None]) -> None:
    for side, kinds in report["largest_masked_error"].items():
        for given, error in kinds.items():
            size = "not a number" if error is None else f"{error:.2g}"
            log(f"pads on the {side}, {given} position ids: masked error at most {size}")
    if not report["ok"]:
        log(f"WARNING: PADDED ROWS ARE NOT THE ROWS ALONE: {report['n_faults']} fault(s)")
        for fault in report["faults"]:
            log(f"WARNING: {fault}")
