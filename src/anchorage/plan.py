"""What a run is to capture, and whether it can: configuration, resolved model and corpus, brought together."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from anchorage.corpusfile import Corpus, open_corpus
from anchorage.errors import CaptureError, CorpusError, SettingsError
from anchorage.settings import Settings
from anchorage.store.format import TierShape
from anchorage.store.identity import capture_identity, capture_key, tier_sites
from anchorage.store.layout import Layout, layout_of
from anchorage.store.names import staged_shard

# Room left on the disk for everything that is not a shard: journals, tables, logs.
_SPARE_BYTES = 256 << 20


@dataclass(frozen=True)
class Plan:
    """What is to be captured: the configuration, the resolved model, and the corpus.

    Attributes:
        settings: the configuration.
        facts: content of ``model.json``.
        tokens_path: the corpus as ``tokens.safetensors``.
    """

    settings: Settings
    facts: Mapping[str, Any]
    tokens_path: Path

    @cached_property
    def identity(self) -> dict[str, Any]:
        return capture_identity(self.settings, self.facts)

    @cached_property
    def key(self) -> str:
        return capture_key(self.identity)

    @cached_property
    def layout(self) -> Layout:
        return layout_of(self.settings)

    @cached_property
    def corpus(self) -> Corpus:
        return open_corpus(self.tokens_path)

    @property
    def padded(self) -> bool:
        """Whether rows have lengths of their own."""
        return self.settings.corpus.layout == "padded"

    def lengths(self, rows: range) -> list[int] | None:
        """Real tokens of rows, the first ones of each; None where rows are packed, so all are."""
        return self.corpus.lengths(rows.start, rows.stop).tolist() if self.padded else None

    def n_tokens(self, rows: range) -> int:
        """Real tokens of rows, in all; rows beyond the corpus, as forecasts have them, count as long as its mean."""
        if not self.padded:
            return len(rows) * self.corpus.seq_len
        n_rows = self.corpus.n_rows
        known = self.corpus.lengths(min(rows.start, n_rows), min(rows.stop, n_rows))
        mean = self.corpus.lengths(0, n_rows).mean() if len(known) < len(rows) else 0.0
        return int(known.sum() + round((len(rows) - len(known)) * mean))

    def batch_tokens(self, rows: range) -> np.ndarray:
        """Token ids of a batch ``[rows, seq_len]``; where rows are padded, only as far as its longest row goes."""
        tokens = self.corpus.rows(rows.start, rows.stop)
        return tokens[:, : max(self.corpus.lengths(rows.start, rows.stop))]

    @cached_property
    def tier_sites(self) -> dict[str, list[str]]:
        """Site names by tier."""
        return tier_sites(self.settings, self.facts)

    @property
    def sites(self) -> list[str]:
        """All site names, each once."""
        return list(dict.fromkeys(site for sites in self.tier_sites.values() for site in sites))

    @property
    def staging(self) -> Path:
        """The folder of this key's staged shards."""
        return self.settings.staging / self.key

    def with_rows(self, rows: int) -> Plan:
        """The same for another number of rows: for forecasts, since its corpus stays as it is."""
        return replace(self, settings=self.settings.with_rows(rows))

    def shapes(self, widths: Mapping[str, int]) -> dict[str, TierShape]:
        """Shape of each tier, given the width of each site."""
        capture = self.settings.capture
        return {
            name: TierShape(
                tier=name,
                widths={site: widths[site] for site in sites},
                reduce=capture.tiers[name].reduce,
                seq_len=self.corpus.seq_len,
                storage_dtype=capture.storage_dtype,
                token_dtype=self.corpus.dtype.name,
                padded=self.padded,
            )
            for name, sites in self.tier_sites.items()
        }

    def check(self) -> None:
        """Find what would make the capture fail later.

        Raises:
            SettingsError, SiteError, CorpusError: the configuration does not fit the model or the corpus.
        """
        limit = self.facts["architecture"]["max_positions"]
        if limit is not None and self.settings.corpus.seq_len > limit:
            raise SettingsError(
                f"corpus.seq_len is {self.settings.corpus.seq_len}, but {self.settings.model.source} takes at most "
                f"{limit} positions; set corpus.seq_len to {limit} or less"
            )
        _ = self.identity  # unknown sites are found here
        found = (self.corpus.n_rows, self.corpus.seq_len)
        if found != (self.settings.corpus.rows, self.settings.corpus.seq_len):
            raise CorpusError(
                f"{self.tokens_path} holds rows x seq_len {found}, the configuration asks for "
                f"{(self.settings.corpus.rows, self.settings.corpus.seq_len)}; run the plain command to build it anew"
            )

    def tokens_digest(self, rows: range) -> str:
        """Digest of the token ids of some rows."""
        return self.corpus.digest(rows.start, rows.stop)


def load_plan(settings: Settings, model_path: Path, tokens_path: Path) -> Plan:
    """The plan of a run whose model is resolved and whose corpus is built."""
    return Plan(settings, json.loads(model_path.read_text()), tokens_path)


@dataclass(frozen=True)
class Space:
    """Room on one disk.

    Attributes:
        folder: a folder there that exists.
        needed_bytes: what the run has yet to write there.
        free_bytes: what is free.
        remedy: what can be done where it does not fit.
    """

    folder: Path
    needed_bytes: int
    free_bytes: int
    remedy: str

    @property
    def short_bytes(self) -> int:
        """What is lacking, 0 where it fits. Some room is left for everything that is not a shard."""
        return max(0, self.needed_bytes + _SPARE_BYTES - self.free_bytes)


def measure_space(plan: Plan, widths: Mapping[str, int]) -> list[Space]:
    """What the run has yet to write, all its parts together, and the free space, disk by disk.

    Args:
        plan: the run.
        widths: width of each site.

    Returns:
        The disk of the staged shards; then that of the results, where it is another.
    """
    layout, shapes = plan.layout, plan.shapes(widths)
    sizes = {
        (tier, shard): shapes[tier].n_bytes(len(rows), plan.n_tokens(rows))
        for shard in range(layout.n_shards)
        for tier in layout.shard_tiers(shard)
        for rows in [layout.tier_shard_rows(tier, shard)]
    }
    unstaged = sum(size for place, size in sizes.items() if not (plan.staging / staged_shard(*place)).exists())
    staging, results = existing_folder(plan.staging), existing_folder(plan.settings.results)
    remedy = (
        "Free some (`make prune` removes staged shards of earlier configurations), store fewer rows or sites, or set "
        "capture.staging_dir to a larger disk."
    )
    spaces = [Space(staging, unstaged, shutil.disk_usage(staging).free, remedy)]
    if results.stat().st_dev != staging.stat().st_dev:
        # No hard links across filesystems: publication will copy.
        remedy = "Free some, store less, or put results and staging on one disk."
        spaces.append(Space(results, sum(sizes.values()), shutil.disk_usage(results).free, remedy))
    return spaces


def check_space(plan: Plan, widths: Mapping[str, int]) -> None:
    """Compare what the run has yet to write with the free space.

    Raises:
        CaptureError: it does not fit.
    """
    for space in measure_space(plan, widths):
        if space.short_bytes:
            raise CaptureError(
                f"{space.folder}: the run needs another {space.needed_bytes / 2**30:.2f} GiB there, "
                f"{space.free_bytes / 2**30:.2f} GiB are free. {space.remedy}"
            )


def existing_folder(path: Path) -> Path:
    """The folder itself, or its nearest parent that exists: what lies on the same disk."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())
