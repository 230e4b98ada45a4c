"""Gates: fail the workflow on a report that says so.

A check writes its report whatever it finds; were it to fail itself, Snakemake would remove the report.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from anchorage.durable import write_bytes
from anchorage.errors import AnchorageError
from anchorage.leak import REMEDY
from anchorage.store.identity import check_key
from anchorage.store.manifest import read_manifest

_REMEDIES = {
    "verify": "Damaged files are removed: the next plain command captures just those again.",
    "anchor": "What is stored is not what this model computes here. Look for what changed (model, libraries, threads); "
    "to check again: snakemake --forcerun anchor_cache. To capture anew: make clean.",
    "controls": "The design of a matched task lets something but the hidden states tell the answer: its accuracies "
    "mean nothing. Look at the task's cells (src/anchorage/probe/tasks) and at the matching (probe/design.py).",
    "memory": REMEDY,
    "durability": "A writer of this package, or the lab itself, is not what it must be: look at the tables in "
    "results/durability and at durability.md, and file an issue with them.",
    "refusals": "A reader took a file that lies, or the control did not show that it would: look at refusals.csv, load "
    "no file of a stranger's, and file an issue.",
    "padding": "Masked reductions of padded rows are not those of the rows alone. If this model's hidden states depend "
    "on pads in spite of the mask, use corpus.layout packed for it.",
}


def pass_gate(report_path: Path, manifest_path: Path | None, gate_path: Path, log: Callable[[str], None]) -> None:
    """Write the gate's file if a report is good and belongs to the present cache.

    Args:
        report_path: what is looked at.
        manifest_path: of the cache that the report must be of; None where it is of no cache.
        gate_path: gets the capture key.
        log: is told that the check passed, and of what its report warns none the less.

    Raises:
        AnchorageError: the report lists faults, or belongs to another capture key.
    """
    report = json.loads(report_path.read_text())
    if not report["ok"]:
        faults, n_faults = "\n  ".join(report["faults"]), report.get("n_faults", len(report["faults"]))
        raise AnchorageError(f"{report_path}: {n_faults} fault(s):\n  {faults}\n{_REMEDIES[report_path.stem]}")
    if manifest_path is not None:
        check_key(str(report_path), report["key"], read_manifest(manifest_path).key)
    write_bytes(gate_path, f"{report['key']}\n".encode())
    log(f"{report_path.stem}: passed")
    if warning := report.get("warning"):
        log(warning)
