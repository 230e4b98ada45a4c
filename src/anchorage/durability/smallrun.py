"""A run small enough to be made many times: the configured model, a few short rows, one site of its first block."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pandas as pd

from anchorage.durability.command import run_command
from anchorage.durability.mounts import FILESYSTEMS, why_not
from anchorage.durability.workflowcut import cut_workflow
from anchorage.settings import Settings, load_settings
from anchorage.sources import is_local

_FILES = ("Snakefile", "workflow", "profiles")
_ROWS, _SEQ_LEN, _BATCH_ROWS = 48, 16, 4


def cut_small_run(
    settings: Settings,
    root: Path,
    *,
    folder: Path,
    points: Mapping[str, int],
    seed: int,
    log: Callable[[str], object],
) -> pd.DataFrame:
    """Cut the power under a whole small run: ``workflow_cuts.csv``, see :func:`durability.workflowcut.cut_workflow`.

    Args:
        settings: whose model and corpus are taken.
        root: the folder of the workflow's Snakefile.
        folder: an empty folder.
        points: ``prefixes``, ``samples`` and ``reruns`` of that function.
        seed: of all choices.
        log: gets a line for what is found.
    """
    small, source = shrink_settings(settings), folder / "source"
    source.mkdir()
    command = [] if why_not(FILESYSTEMS["ext4"]) else prepare_run(small, root, source)
    return cut_workflow(source, command, small, folder=folder / "lab", **points, seed=seed, log=log)


def shrink_settings(settings: Settings) -> Settings:
    """The same model and corpus with so few rows that a capture takes seconds, in 12 shards of one tier.

    Paths become absolute: the run lies in another folder.
    """
    facts = settings.model_dump(mode="json")
    for section in ("model", "corpus"):
        source = facts[section]["source"]
        facts[section]["source"] = str(Path(source).absolute()) if is_local(source) else source
    facts["corpus"] |= {"rows": _ROWS, "seq_len": _SEQ_LEN, "layout": "packed"}
    facts["capture"] |= {"batch_rows": _BATCH_ROWS, "shard_rows": _BATCH_ROWS, "parts": 1, "staging_dir": None}
    facts["capture"]["tiers"] = {"residual": {"sites": ["block.0"], "rows": "all", "reduce": "none"}}
    return load_settings(facts | {"run": "power-cut", "probe": None, "loading": None})


def prepare_run(settings: Settings, root: Path, folder: Path) -> list[str]:
    """Lay out a run in a folder, up to its corpus.

    Args:
        settings: of the run.
        root: the folder of the workflow's Snakefile.
        folder: an empty folder.

    Returns:
        The command that makes its cache, and resumes; to be run in that folder or a copy of it.

    Raises:
        MeasurementError: the corpus cannot be built; says why.
    """
    for name in _FILES:
        os.symlink(root / name, folder / name)
    (folder / "run.yaml").write_text(json.dumps(settings.model_dump(mode="json")))
    command = [sys.executable, "-m", "snakemake", "--cores", "1", "--configfile", "run.yaml", "--"]
    run_command([*command, "corpus"], folder)
    return [*command, "cache"]
