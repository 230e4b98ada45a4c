"""The format of a shard: every tensor's name, dtype and place, and every field of its metadata.

Writer, reader and verification import it; nothing else knows it. docs/format.md says the same in words and is
normative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import xxhash

from anchorage.digest import digest_row
from anchorage.errors import IntegrityError
from anchorage.store.names import SHARD_FORMAT
from anchorage.tensorfile import ITEM_BYTES, TensorFile, TensorSpec, encode_header

TOKENS = "tokens"
ROW_DIGESTS = "row_digests"

STORAGE_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_FILE_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_WRITE_BYTES = 64 << 20


def shard_metadata(shape: TierShape, *, key: str, shard: int, rows: range, tokens_digest: str) -> dict[str, Any]:
    """The facts kept inside a shard file. No time, host or part: the same capture gives the same bytes."""
    return {
        "format": SHARD_FORMAT,
        "key": key,
        "tier": shape.tier,
        "shard": shard,
        "rows": [rows.start, rows.stop],
        "sites": list(shape.widths),
        "reduce": shape.reduce,
        "tokens_digest": tokens_digest,
    }


@dataclass(frozen=True)
class TierShape:
    """What one tier stores of every row.

    Attributes:
        tier: the tier's name.
        widths: width by site name, in running order.
        reduce: ``none`` keeps ``[rows, seq_len, width]``; ``mean`` and ``last`` keep ``[rows, width]``.
        seq_len: tokens a row.
        storage_dtype: float16, bfloat16 or float32.
        token_dtype: numpy name of the token ids' dtype, uint16 or uint32.
    """

    tier: str
    widths: Mapping[str, int]
    reduce: str
    seq_len: int
    storage_dtype: str
    token_dtype: str

    def row_shape(self, site: str) -> tuple[int, ...]:
        """Shape of one row of a site."""
        return (self.seq_len, self.widths[site]) if self.reduce == "none" else (self.widths[site],)

    def specs(self, n_rows: int) -> list[TensorSpec]:
        """The tensors of a shard in the order of their bytes: wider elements first, then sites in running order."""
        sites = [
            TensorSpec(site, _FILE_DTYPES[self.storage_dtype], (n_rows, *self.row_shape(site))) for site in self.widths
        ]
        token_dtype = {"uint16": "U16", "uint32": "U32"}[self.token_dtype]
        tokens = TensorSpec(TOKENS, token_dtype, (n_rows, self.seq_len))
        digests = TensorSpec(ROW_DIGESTS, "U64", (len(self.widths) + 1, n_rows))
        return sorted([digests, tokens, *sites], key=lambda spec: -ITEM_BYTES[spec.dtype])

    def row_bytes(self) -> int:
        """Bytes that one row adds to a shard."""
        return sum(spec.n_bytes for spec in self.specs(1))


class ShardBuffer:
    """Memory for one shard of a tier, filled batch by batch and used again for the next shard.

    Row digests are made as rows come in: xxh3_64 of each (site, row), and of each row of token ids in the last line.
    """

    def __init__(self, shape: TierShape, max_rows: int) -> None:
        self.shape = shape
        dtype = STORAGE_DTYPES[shape.storage_dtype]
        self._sites = {site: torch.empty((max_rows, *shape.row_shape(site)), dtype=dtype) for site in shape.widths}
        self._tokens = np.empty((max_rows, shape.seq_len), dtype=shape.token_dtype)
        self._digests = np.empty((len(shape.widths) + 1, max_rows), dtype=np.uint64)
        self._line = {site: index for index, site in enumerate(shape.widths)}

    def rows_of(self, site: str, rows: slice) -> torch.Tensor:
        """The buffer's rows of a site ``[rows, (seq_len,) width]``, to be filled in place."""
        return self._sites[site][rows]

    def seal(self, site: str, rows: slice) -> None:
        """Digest rows of a site that have been filled."""
        for row, data in zip(range(rows.start, rows.stop), _bytes_of(self._sites[site][rows]), strict=True):
            self._digests[self._line[site], row] = digest_row(data)

    def put_tokens(self, tokens: np.ndarray, start: int) -> None:
        """Copy token ids ``[rows, seq_len]`` in, and digest them."""
        self._tokens[start : start + len(tokens)] = tokens
        for row in range(start, start + len(tokens)):
            self._digests[-1, row] = digest_row(self._tokens[row])

    def write(self, file: BinaryIO, n_rows: int, metadata: Mapping[str, Any]) -> tuple[int, str]:
        """Write the first ``n_rows`` rows as a shard file.

        Returns:
            Bytes written, and their xxh3_128.
        """
        header, entries = encode_header(self.shape.specs(n_rows), metadata)
        state, n_bytes = xxhash.xxh3_128(header), len(header)
        file.write(header)
        for name in entries:
            for piece in self._pieces(name, n_rows):
                state.update(piece)
                file.write(piece)
                n_bytes += len(piece)
        return n_bytes, state.hexdigest()

    def _pieces(self, name: str, n_rows: int) -> list[memoryview]:
        if name == ROW_DIGESTS:
            return [np.ascontiguousarray(self._digests[:, :n_rows]).data.cast("B")]
        if name == TOKENS:
            return [self._tokens[:n_rows].data.cast("B")]
        data = _bytes_of(self._sites[name][:n_rows]).reshape(-1).data
        return [data[start : start + _WRITE_BYTES] for start in range(0, len(data), _WRITE_BYTES)]


class ShardFile:
    """A shard opened for reading rows.

    Args:
        path: the file.
        expected: metadata fields that must be as given (key, tier, rows, ...).

    Raises:
        IntegrityError: not a shard of ours, or not the one expected.
    """

    def __init__(self, path: Path, expected: Mapping[str, Any]) -> None:
        self.file = TensorFile(path)
        self.metadata = self.file.metadata
        for field, value in {"format": SHARD_FORMAT, **expected}.items():
            self._require(self.metadata.get(field) == value, f"{field} {value}", self.metadata.get(field))
        # The row digests do not cover the header: a changed bit in it must not lead to other bytes, or to a crash.
        sites = self.metadata.get("sites", [])
        names = sorted(map(str, sites)) if isinstance(sites, list) else []
        stored = sorted(self.file.entries.keys() - {ROW_DIGESTS, TOKENS})
        self._require(names == stored and len(self.file.entries) == len(stored) + 2, f"sites {stored}", sites)
        self._lines = [*sites, TOKENS]

    def _require(self, holds: bool, expected: str, found: object) -> None:
        if not holds:
            self.file.close()
            remedy = "The file is damaged or of another capture; `make verify`, then the plain command, repairs it."
            raise IntegrityError(self.file.path, expected=expected, found=found, remedy=remedy)

    def read(self, name: str, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Read the shard's rows ``[start, stop)`` of a site, or of the tokens.

        Returns:
            The rows' bytes, uint8 ``[rows, bytes a row]``, and their stored digests, uint64 ``[rows]``.
        """
        data = self.file.read_rows(name, start, stop)
        entry = self.file.entries[ROW_DIGESTS]
        first = entry.start + self._lines.index(name) * entry.row_bytes
        digests = self.file.read_range(first + 8 * start, first + 8 * stop)
        return np.frombuffer(data, np.uint8).reshape(stop - start, -1), np.frombuffer(digests, "<u8")


def check_rows(path: Path, name: str, data: np.ndarray, digests: Sequence[int] | np.ndarray) -> None:
    """Compare rows' bytes uint8 ``[rows, bytes a row]`` with their digests; IntegrityError names the first bad one."""
    for index, (row, expected) in enumerate(zip(data, digests, strict=True)):
        found = digest_row(row)
        if found != int(expected):
            raise IntegrityError(
                path,
                expected=f"digest {int(expected):016x} of {name}, row {index} of those read",
                found=f"{found:016x}",
                remedy="The bytes have changed on disk: `make verify`, then the plain command, repairs them.",
            )


def as_tensor(data: np.ndarray, storage_dtype: str, seq_len: int | None) -> torch.Tensor:
    """View bytes uint8 ``[rows, bytes a row]`` as ``[rows, seq_len, width]``, or ``[rows, width]`` where ``seq_len`` is
    None, without a copy."""
    dtype = STORAGE_DTYPES[storage_dtype]
    width = data.shape[1] // dtype.itemsize // (seq_len or 1)
    shape = (len(data), width) if seq_len is None else (len(data), seq_len, width)
    return torch.from_numpy(data.reshape(-1)).view(dtype).reshape(shape)


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """Bytes of a contiguous tensor, uint8 ``[rows, bytes a row]``, without a copy. numpy has no bfloat16."""
    return tensor.view(torch.uint8).numpy().reshape(len(tensor), -1)
