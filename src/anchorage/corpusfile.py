"""The file of token rows: its layout, its writer, its reader.

A safetensors file of `documents` I64 [rows] and `offsets` I64 [rows] (where each row's first text token comes from),
`lengths` U32 [rows] (real tokens, the first ones; zeros follow), `tokens` U16 or U32 [rows, seq_len]. Its metadata
holds a digest of each tensor, and every byte is checked when the file is opened: a changed token would become a
changed activation that nothing later could find wrong.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from anchorage.digest import digest_bytes
from anchorage.errors import IntegrityError
from anchorage.tensorfile import TensorFile, TensorSpec, encode_header

_FORMAT = "anchorage-corpus-1"
_NUMPY: dict[str, np.dtype[Any]] = {"I64": np.dtype("<i8"), "U32": np.dtype("<u4"), "U16": np.dtype("<u2")}
_CHUNK_BYTES = 8 << 20


class RowWriter:
    """Writes rows into an open file as they come; how many there will be is known before.

    Args:
        file: an empty file, open for binary writing.
        dtype: of the tokens, U16 or U32.
    """

    def __init__(self, file: BinaryIO, dtype: str, *, n_rows: int, seq_len: int) -> None:
        self.n_rows, self.seq_len = n_rows, seq_len
        self.dtype = _NUMPY[dtype]
        self._file, self._specs, self._n_written = file, _specs(dtype, n_rows, seq_len), 0
        self._states = {spec.name: xxhash.xxh3_128() for spec in self._specs}
        # Digests are as long whatever they say, so the places of the tensors hold already.
        self._header, self._entries = self._encode()

    def write(
        self,
        tokens: NDArray[Any],
        documents: NDArray[np.int64],
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64] | None = None,
    ) -> None:
        """Append rows: ids [n, seq_len], the text each starts in [n], the place in that text [n], and how many of the
        ids are real [n], the first ones; None means all."""
        if lengths is None:
            lengths = np.full(len(tokens), self.seq_len)
        columns = {"documents": documents, "offsets": offsets, "lengths": lengths, "tokens": tokens}
        for name, column in columns.items():
            entry = self._entries[name]
            data = column.astype(_NUMPY[entry.spec.dtype]).tobytes()
            self._file.seek(entry.start + self._n_written * entry.row_bytes)
            self._file.write(data)
            self._states[name].update(data)
        self._n_written += len(tokens)

    def finish(self) -> dict[str, str]:
        """Write the header, which needs the digests of all rows, and return the digest of each tensor."""
        assert self._n_written == self.n_rows, (self._n_written, self.n_rows)
        header, _ = self._encode()
        assert len(header) == len(self._header)
        self._file.seek(0)
        self._file.write(header)
        return self._digests()

    def _encode(self) -> tuple[bytes, dict[str, Any]]:
        return encode_header(self._specs, {"format": _FORMAT, "digests": self._digests()})

    def _digests(self) -> dict[str, str]:
        return {name: state.hexdigest() for name, state in self._states.items()}


def open_corpus(tokens_path: Path) -> Corpus:
    """Open a corpus file, and check all of it against its digests.

    Raises:
        IntegrityError: the file is not one that `build_corpus` wrote, or was changed since.
        FileNotFoundError: there is no such file.
    """
    return Corpus(tokens_path)


class Corpus:
    """The rows of a corpus file, read from disk as they are asked for. See :func:`open_corpus`."""

    def __init__(self, tokens_path: Path) -> None:
        try:
            self._file = TensorFile(tokens_path)
        except IntegrityError as error:
            raise _damaged(tokens_path, error.expected, error.found) from None
        try:
            self._check()
        except BaseException:
            self.close()
            raise
        self.metadata: dict[str, Any] = self._file.metadata
        spec = self._file.entries["tokens"].spec
        self.dtype = _NUMPY[spec.dtype]
        self.n_rows, self.seq_len = spec.shape

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Token ids of rows [start, stop): [stop - start, seq_len], uint16 or uint32 as stored."""
        data = self._file.read_rows("tokens", start, stop)
        return np.frombuffer(data, self.dtype).reshape(stop - start, self.seq_len)

    def lengths(self, start: int, stop: int) -> NDArray[np.int64]:
        """Real tokens of rows [start, stop), the first ones of each: [stop - start], int64."""
        return np.frombuffer(self._file.read_rows("lengths", start, stop), "<u4").astype(np.int64)

    def origin(self, row: int) -> tuple[int, int]:
        """Where a row's first text token comes from: the text's number in the source, the token's place in it."""
        document, offset = (self._file.read_rows(name, row, row + 1) for name in ("documents", "offsets"))
        return int.from_bytes(document, "little"), int.from_bytes(offset, "little")

    def digest(self, start: int, stop: int) -> str:
        """xxh3_128 of the token bytes of rows [start, stop); where one is short, of their lengths (U32) before them."""
        short = (self.lengths(start, stop) < self.seq_len).any()
        lengths = self._file.read_rows("lengths", start, stop) if short else b""
        return digest_bytes(bytes(lengths) + bytes(self._file.read_rows("tokens", start, stop)))

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self) -> None:
        entries, metadata, path = self._file.entries, self._file.metadata, self._file.path
        shapes = {name: entry.spec.shape for name, entry in entries.items()}
        shape = shapes.get("tokens", ())
        dtype = entries["tokens"].spec.dtype if len(shape) == 2 else ""
        if dtype not in ("U16", "U32") or [entry.spec for entry in entries.values()] != _specs(dtype, *shape):
            raise _damaged(path, "the tensors of a corpus", shapes)
        digests = {name: self._digest(name) for name in entries}
        if metadata != {"format": _FORMAT, "digests": digests}:
            raise _damaged(path, metadata, {"format": _FORMAT, "digests": digests})

    def _digest(self, name: str) -> str:
        entry, state = self._file.entries[name], xxhash.xxh3_128()
        for start in range(entry.start, entry.stop, _CHUNK_BYTES):
            state.update(self._file.read_range(start, min(start + _CHUNK_BYTES, entry.stop)))
        return state.hexdigest()


def _specs(dtype: str, n_rows: int, seq_len: int) -> list[TensorSpec]:
    specs = [TensorSpec("documents", "I64", (n_rows,)), TensorSpec("offsets", "I64", (n_rows,))]
    specs += [TensorSpec("lengths", "U32", (n_rows,)), TensorSpec("tokens", dtype, (n_rows, seq_len))]
    return specs


def _damaged(path: Path, expected: object, found: object) -> IntegrityError:
    remedy = "Remove the file and its corpus.json; the plain command makes them anew."
    return IntegrityError(path, expected=expected, found=found, remedy=remedy)
