"""Text becomes token rows: tokenise a stream of texts once, cut it into rows, keep them in one file.

Packed rows are windows of one long token stream, all texts one after the other, so that no row holds padding. Memory
grows neither with the source nor with the rows: a batch of texts is held at once, and rows go to the file in pieces.
A row knows the text it starts in, and the place in that text.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from anchorage import durable
from anchorage.corpusfile import Corpus, RowWriter, open_corpus
from anchorage.errors import CorpusError
from anchorage.settings import CorpusSettings
from anchorage.textsource import read_texts

__all__ = ["Corpus", "build_corpus", "open_corpus"]

# A batch of texts for the tokenizer ends at the first of these.
_BATCH_TEXTS = 64
_BATCH_CHARS = 1 << 18
# Rows are written when so many tokens wait.
_CHUNK_TOKENS = 1 << 18


def build_corpus(
    settings: CorpusSettings, tokenizer: Any, *, tokens_path: Path, vocab_size: int, log: Callable[[str], None]
) -> dict[str, Any]:
    """Tokenise a source and write its rows durably; an error leaves no file.

    Args:
        settings: which texts, and how they are cut.
        tokenizer: a tokenizer of transformers. No special tokens are added by it, and nothing is truncated.
        tokens_path: the file to write.
        vocab_size: ids that the model knows; up to 65,536 of them are stored as U16, else as U32.
        log: is handed a line at the start and at the end.

    Returns:
        The facts for corpus.json: the settings, dtype, counts, `text_digest` (xxh3_128 over the texts used) and
        `tokens_digest` (xxh3_128 of the bytes of `tokens`).

    Raises:
        CorpusError: the source cannot be read or holds too little; the tokenizer lacks the BOS or end-of-text token
            asked for, or gives ids that the model does not know.
    """
    bos = separator = None
    if settings.bos:
        bos = _special_id(tokenizer, "bos_token_id", key="bos", vocab_size=vocab_size)
    if settings.document_separator:
        separator = _special_id(tokenizer, "eos_token_id", key="document_separator", vocab_size=vocab_size)
    if settings.bos and settings.seq_len == 1:
        raise CorpusError("corpus.seq_len: 1 leaves no place for text beside the BOS token; take 2 or more.")
    started = time.perf_counter()
    log(f"reading texts from {settings.source}, split {settings.split}")
    dtype = "U16" if vocab_size <= 1 << 16 else "U32"
    with durable.atomic_file(tokens_path) as file, contextlib.closing(read_texts(settings)) as texts:
        documents = _Documents(texts, tokenizer, min_chars=settings.min_chars, vocab_size=vocab_size)
        writer = RowWriter(file, dtype, n_rows=settings.rows, seq_len=settings.seq_len)
        packer = _Packer(writer, bos=bos, separator=separator)
        _pack(documents, packer, settings.rows)
        if not packer.is_full:
            raise _too_little(settings, documents, packer)
        digests = writer.finish()
    counts = {"n_documents": packer.n_documents, "n_skipped": packer.last_number + 1 - packer.n_documents}
    log(
        f"{counts['n_documents']} documents used, {counts['n_skipped']} skipped: {settings.rows} rows of "
        f"{settings.seq_len} tokens in {time.perf_counter() - started:.1f} s"
    )
    return {
        **settings.model_dump(),
        "n_tokens": settings.rows * settings.seq_len,
        "dtype": dtype,
        "vocab_size": vocab_size,
        **counts,
        "text_digest": packer.text_digest.hexdigest(),
        "tokens_digest": digests["tokens"],
    }


class _Document(NamedTuple):
    """A text of the source: its number there (counting skipped ones), the text, its token ids [n], n at least 1."""

    number: int
    text: str
    ids: NDArray[np.int64]


class _Documents:
    """The texts worth using, tokenised in batches. A batch is tokenised only when its first document is asked for.

    Attributes:
        n_read: texts read from the source so far.
    """

    def __init__(self, texts: Iterable[str | None], tokenizer: Any, *, min_chars: int, vocab_size: int) -> None:
        self._texts, self._tokenizer = texts, tokenizer
        self._min_chars, self._vocab_size = min_chars, vocab_size
        self.n_read = 0

    def __iter__(self) -> Iterator[_Document]:
        for batch in self._batches():
            options = {"add_special_tokens": False, "truncation": False, "padding": False, "verbose": False}
            encoded = self._tokenizer([text for _, text in batch], return_attention_mask=False, **options)
            for (index, text), ids in zip(batch, encoded["input_ids"], strict=True):
                if ids:
                    self._check(max(ids), index)
                    yield _Document(index, text, np.asarray(ids, np.int64))

    def _batches(self) -> Iterator[list[tuple[int, str]]]:
        batch: list[tuple[int, str]] = []
        n_chars = 0
        for text in self._texts:
            self.n_read += 1
            if text is None or len(text) < self._min_chars:
                continue
            batch.append((self.n_read - 1, text))
            n_chars += len(text)
            if len(batch) == _BATCH_TEXTS or n_chars >= _BATCH_CHARS:
                yield batch
                batch, n_chars = [], 0
        if batch:
            yield batch

    def _check(self, highest_id: int, index: int) -> None:
        if highest_id >= self._vocab_size:
            raise CorpusError(
                f"text {index} gives the token id {highest_id}, but the model's vocabulary has {self._vocab_size} ids: "
                "tokenizer and model do not belong together. Correct model.source."
            )


class _Packer:
    """Cuts the token stream of all documents into rows and hands them to the writer.

    Each row takes `stride` tokens of the stream, after its BOS token where one is wanted.

    Args:
        bos: id put at the start of each row, or None.
        separator: id put into the stream between documents, or None.
    """

    def __init__(self, writer: RowWriter, *, bos: int | None, separator: int | None) -> None:
        self._writer, self._bos, self._separator = writer, bos, separator
        self._stride = writer.seq_len - (bos is not None)
        self._n_needed = writer.n_rows * self._stride
        self._n_taken = 0
        # Tokens of the stream, and origins of the rows that start in them, not yet written.
        self._tokens: list[NDArray[Any]] = []
        self._n_waiting = 0
        self._origins: list[NDArray[np.int64]] = []
        self.n_documents, self.last_number = 0, -1
        self.text_digest = xxhash.xxh3_128()

    @property
    def n_rows(self) -> int:
        """Whole rows taken so far."""
        return self._n_taken // self._stride

    @property
    def is_full(self) -> bool:
        return self._n_taken == self._n_needed

    def add(self, document: _Document) -> None:
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
        self.n_documents, self.last_number = self.n_documents + 1, document.number
        data = document.text.encode(errors="surrogatepass")
        self.text_digest.update(len(data).to_bytes(8, "little") + data)
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


def _pack(documents: _Documents, packer: _Packer, n_rows: int) -> None:
    """Fill the rows, with a progress bar, until they are full or the documents end."""
    from tqdm import tqdm

    with tqdm(total=n_rows, desc="corpus", unit=" rows", disable=None) as bar:
        for document in documents:
            packer.add(document)
            bar.update(packer.n_rows - bar.n)
            if packer.is_full:
                return


def _special_id(tokenizer: Any, name: str, *, key: str, vocab_size: int) -> int:
    """The id of a special token that a key of the configuration asks for."""
    special_id = getattr(tokenizer, name)
    if special_id is None:
        raise CorpusError(f"corpus.{key}: the model's tokenizer has no {name}. Set corpus.{key}: false.")
    if special_id >= vocab_size:
        raise CorpusError(f"corpus.{key}: {name} {special_id} is outside the model's vocabulary of {vocab_size} ids.")
    return int(special_id)


def _too_little(settings: CorpusSettings, documents: _Documents, packer: _Packer) -> CorpusError:
    if not packer.n_documents:
        return CorpusError(
            f"corpus.source: {settings.source!r} holds no text: of {documents.n_read} texts none has as many as "
            f"{settings.min_chars} characters and a token. Lower corpus.min_chars, or name another source or column."
        )
    return CorpusError(
        f"corpus.rows: {settings.source!r} fills {packer.n_rows} rows of {settings.seq_len} tokens, and "
        f"{settings.rows} are asked for ({packer.n_documents} documents of {settings.min_chars} characters or more in "
        f"{documents.n_read} texts). Lower corpus.rows or corpus.seq_len, or take more text."
    )
