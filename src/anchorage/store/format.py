"""The format of a shard: every tensor's name, dtype and place, and every field of its metadata.

Writer, reader and verification import it; nothing else knows it. docs/format.md says the same in words and is
normative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import torch
import xxhash

from anchorage.digest import digest_row
from anchorage.store.names import SHARD_FORMAT
from anchorage.tensorfile import ITEM_BYTES, TensorSpec, encode_header

TOKENS = "tokens"
ROW_DIGESTS = "row_digests"
OFFSETS = "offsets"

STORAGE_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
FILE_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_WRITE_BYTES = 64 << 20


def shard_metadata(shape: TierShape, *, key: str, shard: int, rows: range, tokens_digest: str) -> dict[str, Any]:
    """The facts kept inside a shard file. No time, host or part: the same capture gives the same bytes."""
    facts = {
        "format": SHARD_FORMAT,
        "key": key,
        "tier": shape.tier,
        "shard": shard,
        "rows": [rows.start, rows.stop],
        "sites": list(shape.widths),
        "reduce": shape.reduce,
        "tokens_digest": tokens_digest,
    }
    return facts | {"layout": "padded"} if shape.padded else facts


@dataclass(frozen=True)
class TierShape:
    """What one tier stores of every row.

    Attributes:
        tier: the tier's name.
        widths: width by site name, in running order.
        reduce: ``none`` keeps ``[rows, seq_len, width]``; ``mean`` and ``last`` keep ``[rows, width]``.
        seq_len: tokens a row, at most so many where rows are padded.
        storage_dtype: float16, bfloat16 or float32.
        token_dtype: numpy name of the token ids' dtype, uint16 or uint32.
        padded: rows have lengths of their own, and no pad is stored: ``none`` then keeps ``[tokens, width]``, row after
            row.
    """

    tier: str
    widths: Mapping[str, int]
    reduce: str
    seq_len: int
    storage_dtype: str
    token_dtype: str
    padded: bool = False

    @property
    def ragged(self) -> bool:
        """Whether a site's rows differ in length."""
        return self.padded and self.reduce == "none"

    def site_shape(self, site: str, n_rows: int, n_tokens: int) -> tuple[int, ...]:
        """Shape of a site's tensor."""
        if self.reduce != "none":
            return (n_rows, self.widths[site])
        return (n_tokens, self.widths[site]) if self.padded else (n_rows, self.seq_len, self.widths[site])

    def specs(self, n_rows: int, n_tokens: int) -> list[TensorSpec]:
        """The tensors of a shard in the order of their bytes: wider elements first, then sites in running order.

        Args:
            n_rows: of the shard.
            n_tokens: real tokens of these rows; packed, ``n_rows * seq_len``.
        """
        sites = [
            TensorSpec(site, FILE_DTYPES[self.storage_dtype], self.site_shape(site, n_rows, n_tokens))
            for site in self.widths
        ]
        token_dtype = {"uint16": "U16", "uint32": "U32"}[self.token_dtype]
        tokens = TensorSpec(TOKENS, token_dtype, (n_tokens,) if self.padded else (n_rows, self.seq_len))
        digests = [TensorSpec(ROW_DIGESTS, "U64", (len(self.widths) + 1, n_rows))]
        if self.padded:
            digests.append(TensorSpec(OFFSETS, "U64", (n_rows + 1,)))
        return sorted([*digests, tokens, *sites], key=lambda spec: -ITEM_BYTES[spec.dtype])

    def n_bytes(self, n_rows: int, n_tokens: int) -> int:
        """Bytes of a shard's tensors."""
        return sum(spec.n_bytes for spec in self.specs(n_rows, n_tokens))


class ShardBuffer:
    """Memory for one shard of a tier, filled batch by batch and used again for the next shard.

    Rows come in order from 0, their tokens (:meth:`put_tokens`) before their activations: they tell how long padded
    rows are. Row digests are made as rows come in: xxh3_64 of each (site, row), and of each row of token ids in the
    last line.

    Args:
        shape: of the tier.
        max_rows: rows of a full shard.
        pinned: locked into memory, so that a GPU copies into it beside its other work.
    """

    def __init__(self, shape: TierShape, max_rows: int, *, pinned: bool = False) -> None:
        self.shape = shape
        dtype, max_tokens = STORAGE_DTYPES[shape.storage_dtype], max_rows * shape.seq_len
        self._sites = {
            site: torch.empty(shape.site_shape(site, max_rows, max_tokens), dtype=dtype, pin_memory=pinned)
            for site in shape.widths
        }
        # Touched now: memory taken page by page as rows come in, and padded rows grow longer, would look like a leak.
        for buffer in self._sites.values():
            buffer.zero_()
        self._tokens = np.empty(max_tokens, dtype=shape.token_dtype)
        self._offsets = np.arange(max_rows + 1) * shape.seq_len
        self._digests = np.empty((len(shape.widths) + 1, max_rows), dtype=np.uint64)
        self._line = {site: index for index, site in enumerate(shape.widths)}

    def put_tokens(self, tokens: np.ndarray, start: int, lengths: Sequence[int] | None = None) -> None:
        """Copy token ids ``[rows, seq_len]`` in, and digest them; of padded rows the first ``lengths`` of each."""
        for row, ids in enumerate(tokens, start):
            if lengths is not None:
                ids = ids[: lengths[row - start]]
                self._offsets[row + 1] = self._offsets[row] + len(ids)
            place = self._tokens_of(slice(row, row + 1))
            self._tokens[place] = ids
            self._digests[-1, row] = digest_row(self._tokens[place])

    def rows_of(self, site: str, rows: slice) -> torch.Tensor:
        """The buffer's rows of a site, to be filled in place: ``[rows, (seq_len,) width]``, or ``[tokens, width]``."""
        return self._sites[site][self._tokens_of(rows) if self.shape.ragged else rows]

    def row_of(self, site: str, row: int) -> torch.Tensor:
        """One row of a site: ``[tokens, width]``, or ``[width]`` in a tier that reduces."""
        value = self.rows_of(site, slice(row, row + 1))
        return value if self.shape.ragged else value[0]

    def seal(self, site: str, rows: slice) -> None:
        """Digest rows of a site that have been filled."""
        data = _bytes_of(self.rows_of(site, rows))
        if self.shape.ragged:
            item = len(data) // (self._offsets[rows.stop] - self._offsets[rows.start])
            pieces = np.split(data, (self._offsets[rows.start + 1 : rows.stop] - self._offsets[rows.start]) * item)
        else:
            pieces = list(data.reshape(rows.stop - rows.start, -1))
        for row, piece in enumerate(pieces, rows.start):
            self._digests[self._line[site], row] = digest_row(piece)

    def write(self, file: BinaryIO, n_rows: int, metadata: Mapping[str, Any]) -> tuple[int, str]:
        """Write the first ``n_rows`` rows as a shard file.

        Returns:
            Bytes written, and their xxh3_128.
        """
        header, entries = encode_header(self.shape.specs(n_rows, int(self._offsets[n_rows])), metadata)
        state, n_bytes = xxhash.xxh3_128(header), len(header)
        file.write(header)
        for name in entries:
            for piece in self._pieces(name, n_rows):
                state.update(piece)
                file.write(piece)
                n_bytes += len(piece)
        return n_bytes, state.hexdigest()

    def _tokens_of(self, rows: slice) -> slice:
        return slice(int(self._offsets[rows.start]), int(self._offsets[rows.stop]))

    def _pieces(self, name: str, n_rows: int) -> list[memoryview]:
        if name == ROW_DIGESTS:
            return [np.ascontiguousarray(self._digests[:, :n_rows]).data.cast("B")]
        if name == OFFSETS:
            return [self._offsets[: n_rows + 1].astype("<u8").data.cast("B")]
        rows = slice(0, n_rows)
        if name == TOKENS:
            return [self._tokens[self._tokens_of(rows)].data.cast("B")]
        data = _bytes_of(self.rows_of(name, rows)).data
        return [data[start : start + _WRITE_BYTES] for start in range(0, len(data), _WRITE_BYTES)]


def as_tensor(data: np.ndarray, storage_dtype: str, seq_len: int | None) -> torch.Tensor:
    """View bytes uint8 ``[rows, bytes a row]`` as ``[rows, seq_len, width]``, or ``[rows, width]`` where ``seq_len`` is
    None, without a copy."""
    dtype = STORAGE_DTYPES[storage_dtype]
    width = data.shape[1] // dtype.itemsize // (seq_len or 1)
    shape = (len(data), width) if seq_len is None else (len(data), seq_len, width)
    return torch.from_numpy(data.reshape(-1)).view(dtype).reshape(shape)


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """Bytes of a contiguous tensor, uint8 ``[bytes]``, without a copy. numpy has no bfloat16."""
    return tensor.view(torch.uint8).numpy().reshape(-1)
