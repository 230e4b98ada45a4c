"""Text becomes token rows: tokenise a stream of texts once, cut it into rows, keep them in one file.

Packed rows are windows of one long token stream, all texts one after the other, so that no row holds padding. Padded
rows are documents, each cut at its row's end and filled up with zeros: how many of its tokens are real is kept. Memory
grows neither with the source nor with the rows: a batch of texts is held at once, and rows go to the file in pieces. A
row knows the text it starts in, and the place in that text.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from anchorage import durable
from anchorage.corpusfile import Corpus, RowWriter, open_corpus
from anchorage.errors import CorpusError
from anchorage.packing import Document, Packer, Padder
from anchorage.settings import CorpusSettings
from anchorage.textsource import read_texts

__all__ = ["Corpus", "build_corpus", "open_corpus"]

# A batch of texts for the tokenizer ends at the first of these.
_BATCH_TEXTS = 64
_BATCH_CHARS = 1 << 18


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
        packer: Packer | Padder = Packer(writer, bos=bos, separator=separator)
        if settings.layout == "padded":
            packer = Padder(writer, bos=bos)
        _pack(documents, packer, settings.rows)
        if not packer.is_full:
            raise _too_little(settings, documents, packer)
        digests = writer.finish()
    counts = {"n_documents": packer.n_documents, "n_skipped": packer.last_number + 1 - packer.n_documents}
    if isinstance(packer, Padder):
        counts["n_truncated"] = packer.n_truncated
    log(
        f"{counts['n_documents']} documents used, {counts['n_skipped']} skipped: {settings.rows} rows, "
        f"{packer.n_tokens} tokens in {time.perf_counter() - started:.1f} s"
    )
    return {
        **settings.model_dump(),
        "n_tokens": packer.n_tokens,
        "dtype": dtype,
        "vocab_size": vocab_size,
        **counts,
        "text_digest": packer.text_digest.hexdigest(),
        "tokens_digest": digests["tokens"],
    }


class _Documents:
    """The texts worth using, tokenised in batches. A batch is tokenised only when its first document is asked for.

    Attributes:
        n_read: texts read from the source so far.
    """

    def __init__(self, texts: Iterable[str | None], tokenizer: Any, *, min_chars: int, vocab_size: int) -> None:
        self._texts, self._tokenizer = texts, tokenizer
        self._min_chars, self._vocab_size = min_chars, vocab_size
        self.n_read = 0

    def __iter__(self) -> Iterator[Document]:
        for batch in self._batches():
            options = {"add_special_tokens": False, "truncation": False, "padding": False, "verbose": False}
            encoded = self._tokenizer([text for _, text in batch], return_attention_mask=False, **options)
            for (index, text), ids in zip(batch, encoded["input_ids"], strict=True):
                if ids:
                    self._check(max(ids), index)
                    yield Document(index, text, np.asarray(ids, np.int64))

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


def _pack(documents: _Documents, packer: Packer | Padder, n_rows: int) -> None:
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


def _too_little(settings: CorpusSettings, documents: _Documents, packer: Packer | Padder) -> CorpusError:
    if not packer.n_documents:
        return CorpusError(
            f"corpus.source: {settings.source!r} holds no text: of {documents.n_read} texts none has as many as "
            f"{settings.min_chars} characters and a token. Lower corpus.min_chars, or name another source or column."
        )
    row = "one document each" if settings.layout == "padded" else f"{settings.seq_len} tokens"
    return CorpusError(
        f"corpus.rows: {settings.source!r} fills {packer.n_rows} rows of {row}, and "
        f"{settings.rows} are asked for ({packer.n_documents} documents of {settings.min_chars} characters or more in "
        f"{documents.n_read} texts). Lower corpus.rows or corpus.seq_len, or take more text."
    )
