"""Documents become rows: packed, windows of one token stream; or padded, each document a row of its own.

Both hand their rows to the writer in pieces, so that memory grows with neither.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from anchorage.corpusfile import RowWriter

# Rows are written when so many tokens wait.
_CHUNK_TOKENS = 1 << 18


class Document(NamedTuple):
    """A text of the source: its number there (counting skipped ones), the text, its token ids [n], n at least 1."""

    number: int
    text: str
    ids: NDArray[np.int64]


class _RowMaker:
    """What both ways of making rows count: the documents used so far, and the digest of their texts."""

    def __init__(self) -> None:
        self.n_documents, self.last_number = 0, -1
        self.text_digest = xxhash.xxh3_128()

    def count(self, document: Document) -> None:
        self.n_documents, self.last_number = self.n_documents + 1, document.number
        data = document.text.encode(errors="surrogatepass")
        self.text_digest.update(len(data).to_bytes(8, "little") + data)


class Packer(_RowMaker):
    """Cuts the token stream of all documents into rows and hands them to the writer.

    Each row takes `stride` tokens of the stream, after its BOS token where one is wanted.

    Args:
        bos: id put at the start of each row, or None.
        separator: id put into the stream between documents, or None.
    """

    def __init__(self, writer: RowWriter, *, bos: int | None, separator: int | None) -> None:
        super().__init__()
        self._writer, self._bos, self._separator = writer, bos, separator
        self._stride = writer.seq_len - (bos is not None)
        self._n_needed = writer.n_rows * self._stride
        self._n_taken = 0
        # Tokens of the stream, and origins of the rows that start in them, not yet written.
        self._tokens: list[NDArray[Any]] = []
        self._n_waiting = 0
        self._origins: list[NDArray[np.int64]] = []

    @property
    def n_rows(self) -> int:
        """Whole rows taken so far."""
        return self._n_taken // self._stride

    @property
    def n_tokens(self) -> int:
        return self.n_rows * self._writer.seq_len

    @property
    def is_full(self) -> bool:
        return self._n_taken == self._n_needed

    def add(self, document: Document) -> None:
        """Append a document to the stream, or as much of it as is still needed."""
        separators = [self._separator] if self._separator is not None and self.n_documents else []
        piece = np.concatenate([np.asarray(separators, np.int64), document.ids])[: self._n_needed - self._n_taken]
        first_row, stop_row = -(-self._n_taken // self._stride), -(-(self._n_taken + len(piece)) // self._stride)
        places = np.arange(first_row, stop_row, dtype=np.int64) * self._stride - self._n_taken - len(separators)
        # A row that starts at a separator has its first text token, the next, at place 0.
        self._origins.append(np.stack([np.full_like(places, document.number), np.maximum(places, 0)]))
        self._tokens.append(piece.astype(self._writer.dtype))
        self._n_taken += len(piece)
        self._n_waiting += len(piece)
        self.count(document)
        if self.is_full or self._n_waiting >= _CHUNK_TOKENS:
            self._write()

    def _write(self) -> None:
        tokens, origins = np.concatenate(self._tokens), np.concatenate(self._origins, axis=1)
        n_rows = len(tokens) // self._stride
        rows = tokens[: n_rows * self._stride].reshape(n_rows, self._stride)
        if self._bos is not None:
            rows = np.concatenate([np.full((n_rows, 1), self._bos, rows.dtype), rows], axis=1)
        self._writer.write(rows, origins[0, :n_rows], origins[1, :n_rows])
        self._tokens, self._origins = [tokens[n_rows * self._stride :]], [origins[:, n_rows:]]
        self._n_waiting = len(self._tokens[0])


class Padder(_RowMaker):
    """Makes each document a row, after its BOS token where one is wanted, and hands the rows to the writer.

    Args:
        bos: id put at the start of each row, or None.
    """

    def __init__(self, writer: RowWriter, *, bos: int | None) -> None:
        super().__init__()
        self._writer, self._bos = writer, [] if bos is None else [bos]
        self._waiting: list[tuple[int, NDArray[np.int64]]] = []
        self.n_tokens = self.n_truncated = 0

    @property
    def n_rows(self) -> int:
        return self.n_documents

    @property
    def is_full(self) -> bool:
        return self.n_rows == self._writer.n_rows

    def add(self, document: Document) -> None:
        """Make a document a row; what does not fit into it is left out."""
        ids = np.concatenate([np.asarray(self._bos, np.int64), document.ids])
        self.n_truncated += len(ids) > self._writer.seq_len
        self._waiting.append((document.number, ids[: self._writer.seq_len]))
        self.n_tokens += len(self._waiting[-1][1])
        self.count(document)
        if self.is_full or len(self._waiting) * self._writer.seq_len >= _CHUNK_TOKENS:
            self._write()

    def _write(self) -> None:
        numbers = np.array([number for number, _ in self._waiting])
        lengths = np.array([len(ids) for _, ids in self._waiting])
        tokens = np.zeros((len(lengths), self._writer.seq_len), self._writer.dtype)
        for row, (_, ids) in zip(tokens, self._waiting, strict=True):
            row[: len(ids)] = ids
        self._writer.write(tokens, numbers, np.zeros_like(numbers), lengths)
        self._waiting = []
