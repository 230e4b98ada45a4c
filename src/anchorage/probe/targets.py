"""Which probes there will be, before anything has run: the workflow's targets. Light, for the Snakefile reads it."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from anchorage.errors import SettingsError, did_you_mean
from anchorage.probe.labels import check_tasks, count_test_rows
from anchorage.resources import DEFAULT_MODEL_BLOCKS, MADE_MODELS
from anchorage.settings import ModelSettings, Settings
from anchorage.sites import expand_sites, is_glob
from anchorage.sources import is_local

# A job's start costs some 4 s, a probe 0.4 to 3 s. Of 6, 12 and 33 sites a job, 6 took longer, 12 and 33 as long.
SITES_PER_JOB = 12
_BLOCK_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def check_probe(settings: Settings) -> None:
    """Refuse probes that cannot be: unknown tasks, a tier that is not there, keeps no tokens, or has too few rows.

    Raises:
        SettingsError: names the fault and what would do.
    """
    if settings.probe is None:
        return
    if settings.corpus.layout == "padded":
        raise SettingsError(
            "probe: corpus.layout is padded, and probes need rows of one length. Set probe: null, or layout: packed"
        )
    check_tasks(settings.probe.tasks)
    tiers, name = settings.capture.tiers, settings.probe.tier
    usable = [tier for tier, facts in tiers.items() if facts.reduce == "none"]
    fitting = f"tiers that keep all tokens: {', '.join(usable) or 'none; add one to capture.tiers'}"
    if name not in tiers:
        raise SettingsError(f"probe.tier: there is no tier {name!r}{did_you_mean(name, tiers)} ({fitting})")
    if name not in usable:
        raise SettingsError(
            f"probe.tier: tier {name!r} keeps only the {tiers[name].reduce} of each row's tokens, and probes need all "
            f"of them ({fitting})"
        )
    n_rows, fraction = settings.tier_rows()[name], settings.probe.test_fraction
    n_train_rows = n_rows - count_test_rows(n_rows, fraction)
    if n_train_rows < 2:
        raise SettingsError(
            f"probe.tier: tier {name!r} has {n_rows} row(s), of which {n_train_rows} would be for training at "
            f"probe.test_fraction {fraction:g}; two are needed, one of them to choose the penalty on, beside one for "
            "testing"
        )


def probed_sites(settings: Settings) -> list[str]:
    """The sites of the probed tier, in running order, raw module paths last.

    A glob needs the model's number of blocks: its ``config.json`` is read, from the Hub where it lies there. Names that
    are spelled out need no model, but misspelt ones are found; whether a block or module exists the capture will say.

    Raises:
        SettingsError: the number cannot be had; the remedy is to spell the sites out.
        SiteError: a name is unknown.
    """
    if settings.probe is None:
        return []
    patterns = settings.capture.tiers[settings.probe.tier].sites
    n_blocks = count_blocks(settings.model) if any(map(is_glob, patterns)) else None
    return expand_sites(patterns, n_blocks)


def group_sites(sites: list[str]) -> list[list[str]]:
    """Divide the sites evenly among jobs."""
    n_jobs = math.ceil(len(sites) / SITES_PER_JOB)
    return [sites[len(sites) * job // n_jobs : len(sites) * (job + 1) // n_jobs] for job in range(n_jobs)]


def count_blocks(model: ModelSettings) -> int:
    """A model's number of blocks, from its ``config.json`` alone.

    Raises:
        SettingsError: the file cannot be had, or does not say.
    """
    remedy = "Spell out the sites of the probed tier (block.0, block.1, ...) instead of globs, or set probe to null"
    folder = Path(model.source).expanduser()
    # A killed fetch leaves the folder, empty.
    if model.source.rstrip("/") in MADE_MODELS and not (folder / "config.json").exists():
        return DEFAULT_MODEL_BLOCKS
    try:
        path = folder / "config.json" if is_local(model.source) else _download_config(model)
        config = json.loads(path.read_text())
        if not isinstance(config, dict):
            raise TypeError(f"{path} holds a {type(config).__name__}, not an object")
    except Exception as error:  # the Hub's client, HTTP and cache raise some dozen kinds
        raise SettingsError(
            f"model.source: to know which sites a glob means, config.json of {model.source!r} is needed, and could not "
            f"be read ({type(error).__name__}: {(str(error).splitlines() or ['no reason given'])[0]}). Check the id "
            f"and the network (HF_HUB_OFFLINE is {os.environ.get('HF_HUB_OFFLINE', 'not set')}). {remedy}"
        ) from None
    text_config = config.get("text_config")
    for facts in (text_config if isinstance(text_config, dict) else {}, config):
        for key in _BLOCK_KEYS:
            if isinstance(facts.get(key), int):
                return int(facts[key])
    raise SettingsError(f"model.source: {path} does not say how many blocks the model has. {remedy}")


def _download_config(model: ModelSettings) -> Path:
    from huggingface_hub import hf_hub_download  # slow to import, and needed for models of the Hub only

    return Path(hf_hub_download(model.source, "config.json", revision=model.revision))
