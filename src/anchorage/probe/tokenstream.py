"""The chosen tokens of one side at one site, read from the cache in blocks of rows."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from anchorage.errors import AnchorageError
from anchorage.probe.design import Side
from anchorage.store.reader import Cache


class TokenStream:
    """Reads the rows that hold chosen tokens, and no others.

    Args:
        cache, tier, site: what to read.
        side: which tokens.
        block_rows: rows of one block, the most that is in memory at once.
    """

    def __init__(self, cache: Cache, tier: str, *, site: str, side: Side, block_rows: int) -> None:
        self._cache, self._tier, self._site, self._side = cache, tier, site, side
        self._rows, self._index = np.unique(side.rows, return_inverse=True)
        self._block_rows = block_rows
        self.n_blocks = math.ceil(len(self._rows) / block_rows)

    def block(self, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A block's values float32 ``[tokens, width]``, labels and shuffled labels int64 ``[tokens]``.

        Raises:
            AnchorageError: a value is not finite.
        """
        start, side = number * self._block_rows, self._side
        chosen = slice(*np.searchsorted(self._index, (start, start + self._block_rows)))
        read = self._cache.read(self._site, self._rows[start : start + self._block_rows], tier=self._tier)
        values = read[self._index[chosen] - start, side.positions[chosen]].float()
        self._check_finite(values, side.rows[chosen])
        return values, torch.from_numpy(side.labels[chosen]), torch.from_numpy(side.shuffled[chosen])

    def blocks(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """All blocks in order."""
        return (self.block(number) for number in range(self.n_blocks))

    def _check_finite(self, values: torch.Tensor, rows: np.ndarray) -> None:
        finite = torch.isfinite(values).all(1)
        if not finite.all():
            row = rows[int(finite.int().argmin())]
            raise AnchorageError(
                f"{self._cache.folder}: site {self._site!r}, tier {self._tier!r}: row {row} holds a value that is not "
                "finite (NaN or infinite). A capture stores none; was this cache written by something else? Capture it "
                "anew (make clean), or leave the site out"
            )
