"""The capture key: one digest of everything that decides the stored bytes, except which rows there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anchorage.digest import digest_value
from anchorage.errors import AnchorageError
from anchorage.settings import Settings
from anchorage.sites import expand_sites
from anchorage.store.names import SHARD_FORMAT


def tier_sites(settings: Settings, facts: Mapping[str, Any]) -> dict[str, list[str]]:
    """Site names of each tier, globs expanded, in running order; unknown names of all tiers are reported at once."""
    n_layers = facts["architecture"]["n_layers"]
    patterns = {name: tier.sites for name, tier in settings.capture.tiers.items()}
    expand_sites(list(dict.fromkeys(pattern for sites in patterns.values() for pattern in sites)), n_layers)
    return {name: expand_sites(sites, n_layers) for name, sites in patterns.items()}


def capture_identity(settings: Settings, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that decide the stored bytes.

    Args:
        settings: the configuration.
        facts: content of ``model.json``: what the model and tokenizer turned out to be.
    """
    capture, corpus = settings.capture, settings.corpus
    sites = tier_sites(settings, facts)
    return {
        "format": SHARD_FORMAT,
        "model": {name: facts[name] for name in ("weights_digest", "config_digest", "tokenizer_digest")},
        "dtype": facts["dtype"],
        "attention": facts["architecture"]["attention"],
        # Kernels, and so the last bits, differ with the kind of device, and on a CPU with the number of threads.
        "device": facts["device"].split(":")[0],
        "threads": facts["threads"],
        "layout": corpus.layout,
        "seq_len": corpus.seq_len,
        "batch_rows": capture.batch_rows,
        "shard_rows": capture.shard_rows,
        "storage_dtype": capture.storage_dtype,
        "tiers": {name: {"sites": sites[name], "reduce": tier.reduce} for name, tier in capture.tiers.items()},
    }


def capture_key(identity: Mapping[str, Any]) -> str:
    """xxh3_128 of the identity, 32 hexadecimal digits."""
    return digest_value(identity)


def key_of(settings: Settings, facts: Mapping[str, Any]) -> str:
    """The capture key that a configuration and a resolved model give."""
    return capture_key(capture_identity(settings, facts))


def check_key(what: str, found: object, expected: str) -> None:
    """Refuse a result that another configuration made.

    Raises:
        AnchorageError: the keys differ.
    """
    if found != expected:
        raise AnchorageError(
            f"{what} belongs to capture key {found}, the present configuration and model give {expected}. "
            "Run the plain command: it brings every result up to date."
        )
