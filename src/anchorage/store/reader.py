"""The reader: rows of a site from disk, reading no more than it returns, each row verified by its digest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch

from anchorage.errors import AnchorageError, IntegrityError, did_you_mean
from anchorage.store.format import TOKENS, as_tensor
from anchorage.store.manifest import Manifest, ShardRecord, read_cache_manifest
from anchorage.store.names import MANIFEST
from anchorage.store.shardfile import ShardFile, check_rows

Rows = int | slice | range | Sequence[int] | np.ndarray | torch.Tensor | None
_MAX_OPEN_FILES = 64


def open_cache(path: Path | str) -> Cache:
    """Open a cache folder.

    Presence and size of every shard are checked here; the bytes are checked as they are read.

    Args:
        path: the folder that holds ``manifest.jsonl``, such as ``results/<run>/cache``.

    Raises:
        IntegrityError: the manifest is missing, damaged or not that of a whole cache, or a shard is missing, no
            regular file or has another size.
    """
    folder = Path(path)
    manifest = read_cache_manifest(folder / MANIFEST)
    for name, (_, _, record) in manifest.files.items():
        if found := record.misfit(folder):
            remedy = "Run `make verify`, then the plain command: it recaptures just this shard."
            raise IntegrityError(folder / name, expected=f"{record.bytes} bytes", found=found, remedy=remedy)
    return Cache(folder, manifest)


class Cache:
    """Stored activations, read by site and row.

    Attributes:
        key: the capture key.
        n_rows: rows of the corpus that was captured; a tier may hold only the first of them.
        identity: what decided the bytes: model digests, dtypes, batch, sites.
        padded: rows have lengths of their own; no pad is stored.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.key = manifest.key
        self.identity = manifest.identity
        self.n_rows = manifest.n_rows
        self.padded = manifest.identity.get("layout") == "padded"
        self._starts = np.array([shard.rows[0] for shard in manifest.shards])
        self._open: OrderedDict[str, ShardFile] = OrderedDict()

    @property
    def tiers(self) -> dict[str, list[str]]:
        """Site names by tier."""
        return {name: list(tier["sites"]) for name, tier in self.identity["tiers"].items()}

    @property
    def sites(self) -> list[str]:
        """All site names, each once."""
        return list(dict.fromkeys(site for sites in self.tiers.values() for site in sites))

    def tier_rows(self, tier: str) -> int:
        """Rows that a tier holds: the first ones of the corpus."""
        return sum(shard.tiers[tier].n_rows for shard in self.manifest.shards if tier in shard.tiers)

    def tier_of(self, site: str) -> str:
        """The tier that :meth:`read` takes when none is given: of those with all tokens the one with most rows."""
        holding = [tier for tier, sites in self.tiers.items() if site in sites]
        if not holding:
            raise AnchorageError(f"site {site!r} is not in this cache{did_you_mean(site, self.sites)}")
        return max(holding, key=lambda tier: (self.identity["tiers"][tier]["reduce"] == "none", self.tier_rows(tier)))

    def read(self, site: str, rows: Rows = None, *, tier: str | None = None) -> torch.Tensor:
        """Read a site's rows.

        Args:
            site: a name of :attr:`sites`.
            rows: a row, slice, range, sequence or boolean mask of global row numbers; None is all the tier's rows.
            tier: a name of :attr:`tiers`; None picks :meth:`tier_of`.

        Returns:
            ``[rows, seq_len, width]`` in the storage dtype, ``[rows, width]`` from a tier that reduces, in the order
            asked for. A single row number keeps its dimension.

        Raises:
            AnchorageError: no such site, tier or row; or the rows differ in length (layout padded): then
                :meth:`read_list` and :meth:`read_padded` read them.
            IntegrityError: stored bytes do not match their digests.
        """
        tier, indices = self._choose(site, rows, tier)
        reduced = self.identity["tiers"][tier]["reduce"] != "none"
        if self.padded and not reduced:
            raise AnchorageError(f"tier {tier!r} holds rows of different lengths: use read_list or read_padded")
        data = self._gather(tier, site, indices)
        return as_tensor(data, self.identity["storage_dtype"], None if reduced else self.identity["seq_len"])

    def read_list(self, site: str, rows: Rows = None, *, tier: str | None = None) -> list[torch.Tensor]:
        """Read a site's rows, each as long as it is: as :meth:`read`, but a list of ``[tokens, width]``.

        Raises:
            AnchorageError: as :meth:`read`; or the tier reduces, and so holds no tokens.
        """
        tier, indices = self._choose(site, rows, tier)
        if self.identity["tiers"][tier]["reduce"] != "none":
            raise AnchorageError(f"tier {tier!r} keeps one value a row, not its tokens: use read")
        if not self.padded:
            return list(self.read(site, indices, tier=tier))
        data, token_bytes = self._gather_list(tier, indices, site)
        return [as_tensor(row.reshape(-1, token_bytes), self.identity["storage_dtype"], None) for row in data]

    def read_padded(
        self, site: str, rows: Rows = None, *, tier: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read a site's rows, put side by side with zeros after their ends.

        Returns:
            ``[rows, longest, width]`` in the storage dtype, and a mask, bool ``[rows, longest]``, true at real tokens.
            A reduction must leave out what is false in it.

        Raises:
            AnchorageError: as :meth:`read_list`.
        """
        values = self.read_list(site, rows, tier=tier)
        if not values:
            raise AnchorageError(f"no rows of site {site!r} were asked for, so there is no longest one to pad to")
        lengths = torch.tensor([len(value) for value in values])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        return torch.nn.utils.rnn.pad_sequence(values, batch_first=True), mask

    def tokens(self, rows: Rows = None) -> torch.Tensor:
        """Token ids of rows, int64 ``[rows, seq_len]``, from the tier that holds most rows.

        Raises:
            AnchorageError: no such row; or the rows differ in length: then :meth:`token_list` reads them.
        """
        if self.padded:
            raise AnchorageError("the cache holds rows of different lengths: use token_list")
        tier, indices = self._longest_tier(rows)
        data = self._gather(tier, TOKENS, indices)
        return _as_ids(data, data.shape[1] // self.identity["seq_len"])

    def token_list(self, rows: Rows = None) -> list[torch.Tensor]:
        """Token ids of rows, each as long as it is: a list of int64 ``[tokens]``."""
        if not self.padded:
            return list(self.tokens(rows))
        data, token_bytes = self._gather_list(*self._longest_tier(rows), TOKENS)
        return [_as_ids(row, token_bytes) for row in data]

    def close(self) -> None:
        """Close the shard files that reads have opened; a later read opens them again."""
        for file in self._open.values():
            file.file.close()
        self._open.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def environment(self, row: int) -> dict[str, object]:
        """Where a row was computed: device, threads, versions."""
        return dict(self._shard_of(row).environment)

    def _choose(self, site: str, rows: Rows, tier: str | None) -> tuple[str, np.ndarray]:
        tier = tier or self.tier_of(site)
        if site not in self.tiers.get(tier, []):
            raise AnchorageError(f"tier {tier!r} holds no site {site!r}; tiers with it: {self._tiers_with(site)}")
        return tier, self._indices(rows, self.tier_rows(tier), f"tier {tier!r}")

    def _longest_tier(self, rows: Rows) -> tuple[str, np.ndarray]:
        tier = max(self.tiers, key=self.tier_rows)
        return tier, self._indices(rows, self.tier_rows(tier), f"tier {tier!r}")

    def _tiers_with(self, site: str) -> list[str]:
        return [tier for tier, sites in self.tiers.items() if site in sites]

    def _shard_of(self, row: int) -> ShardRecord:
        return self.manifest.shards[int(np.searchsorted(self._starts, row, side="right")) - 1]

    def _indices(self, rows: Rows, n_rows: int, what: str) -> np.ndarray:
        if rows is None:
            return np.arange(n_rows)
        if isinstance(rows, slice):
            return np.arange(n_rows)[rows]
        indices = np.atleast_1d(np.asarray(rows))
        if indices.dtype == bool:
            if len(indices) != n_rows:
                raise AnchorageError(f"a mask of {len(indices)} rows does not fit {what} of {n_rows} rows")
            return np.flatnonzero(indices)
        if len(indices) and not np.issubdtype(indices.dtype, np.integer):
            raise AnchorageError(f"rows are whole numbers, a slice or a mask; found {indices.dtype}")
        indices = indices.astype(np.int64)
        outside = indices[(indices < 0) | (indices >= n_rows)]
        if len(outside):
            raise AnchorageError(f"row {outside[0]} is not in {what}, which holds rows 0 to {n_rows - 1}")
        return indices

    def _gather(self, tier: str, name: str, indices: np.ndarray) -> np.ndarray:
        """Bytes of rows of one length, uint8 ``[rows, bytes a row]``."""
        unique, inverse = np.unique(indices, return_inverse=True)
        if not len(unique):
            shard = self._file(self.manifest.shards[0], tier)
            return np.empty((0, shard.file.entries[name].row_bytes), np.uint8)
        runs = [self._read_run(tier, name, run) for run in self._runs(unique)]
        data = np.asarray(runs[0]) if len(runs) == 1 else np.concatenate(runs)
        return data if np.array_equal(inverse, np.arange(len(data))) else data[inverse]

    def _gather_list(self, tier: str, indices: np.ndarray, name: str) -> tuple[list[np.ndarray], int]:
        """Bytes of rows that differ in length, uint8 ``[bytes]`` each, and the bytes of a token."""
        unique, inverse = np.unique(indices, return_inverse=True)
        data = [row for run in self._runs(unique) if len(run) for row in self._read_run(tier, name, run)]
        token_bytes = self._file(self.manifest.shards[0], tier).file.entries[name].row_bytes
        return [data[index] for index in inverse], token_bytes

    def _runs(self, unique: np.ndarray) -> list[np.ndarray]:
        """Rows in runs of neighbours within a shard: each is read in file order, at once."""
        shards = np.searchsorted(self._starts, unique, side="right")
        return np.split(unique, np.flatnonzero((np.diff(unique) != 1) | (np.diff(shards) != 0)) + 1)

    def _read_run(self, tier: str, name: str, run: np.ndarray) -> np.ndarray | list[np.ndarray]:
        shard = self._shard_of(int(run[0]))
        file = self._file(shard, tier)
        start = int(run[0]) - shard.rows[0]
        data, digests = file.read(name, start, start + len(run))
        check_rows(file.file.path, name, data, digests)
        return data

    def _file(self, shard: ShardRecord, tier: str) -> ShardFile:
        record = shard.tiers[tier]
        if record.file in self._open:
            self._open.move_to_end(record.file)
            return self._open[record.file]
        expected = {
            "key": self.key,
            "tier": tier,
            "shard": shard.shard,
            "rows": [shard.rows[0], shard.rows[0] + record.n_rows],
            "sites": self.tiers[tier],
            "reduce": self.identity["tiers"][tier]["reduce"],
            "tokens_digest": record.tokens_digest,
            "layout": "padded" if self.padded else None,
        }
        shape = {"storage_dtype": self.identity["storage_dtype"]}
        if not self.padded:  # else the rows' lengths say it
            shape["seq_len"] = self.identity["seq_len"]
        self._open[record.file] = file = ShardFile(self.folder / record.file, expected, shape)
        if len(self._open) > _MAX_OPEN_FILES:
            _, oldest = self._open.popitem(last=False)
            oldest.file.close()
        return file


def _as_ids(data: np.ndarray, token_bytes: int) -> torch.Tensor:
    """Bytes of token ids of so many bytes each, as int64."""
    return torch.from_numpy(data.view({2: np.uint16, 4: np.uint32}[token_bytes]).astype(np.int64))
