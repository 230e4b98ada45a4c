"""Goal: token rows are exactly what the texts say, and a changed corpus file is never accepted.

Method: a tokenizer of words is made here; rows, origins and counts are compared with an oracle of plain Python loops
over the raw tokenizer, and files are read back by safetensors' own reader. Controls: one row more than the texts fill
fails, other texts give other digests, the unchanged file opens.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from safetensors import safe_open
from transformers import PreTrainedTokenizerFast

from anchorage import corpus as corpus_module
from anchorage import packing
from anchorage.corpus import build_corpus, open_corpus
from anchorage.errors import CorpusError, IntegrityError
from anchorage.settings import CorpusSettings
from corpora import BOS, EOS, VOCAB_SIZE, build, make_texts, make_tokenizer, settings_for, write_jsonl


def expect_rows(
    texts: list[str | None], settings: CorpusSettings, tokenizer: PreTrainedTokenizerFast
) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """The oracle: every row that the texts fill, and where its first text token comes from."""
    stream: list[tuple[int, int, int]] = []
    for number, text in enumerate(texts):
        if text is None or len(text) < settings.min_chars:
            continue
        ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        if settings.document_separator and stream and ids:
            stream.append((EOS, number, 0))
        stream += [(token, number, offset) for offset, token in enumerate(ids)]
    stride = settings.seq_len - settings.bos
    windows = [stream[start : start + stride] for start in range(0, len(stream) - stride + 1, stride)]
    rows = [[BOS] * settings.bos + [token for token, _, _ in window] for window in windows]
    return rows, [window[0][1:] for window in windows]


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("document_separator", [False, True])
@pytest.mark.parametrize("seq_len", [1, 2, 7, 64])
def test_bos_and_separators(tmp_path: Path, bos: bool, document_separator: bool, seq_len: int) -> None:
    # A text of no token at all is no document and gets no separator.
    texts = ["w5 w6", " " * 40, None, *make_texts(60)]
    write_jsonl(tmp_path / "texts.jsonl", texts)
    options = {"bos": bos, "document_separator": document_separator, "seq_len": seq_len, "min_chars": 0}
    settings = settings_for(tmp_path / "texts.jsonl", **options)
    if bos and seq_len == 1:
        with pytest.raises(CorpusError, match=r"corpus\.seq_len"):
            build(tmp_path, settings)
        return
    rows, origins = expect_rows(texts, settings, make_tokenizer())
    settings = settings.model_copy(update={"rows": len(rows)})
    _, built = build(tmp_path, settings)
    assert built.rows(0, len(rows)).tolist() == rows
    assert [built.origin(row) for row in range(len(rows))] == origins
    with pytest.raises(CorpusError, match=rf"fills {len(rows)} rows of {seq_len} tokens"):
        build(tmp_path, settings.model_copy(update={"rows": len(rows) + 1}))


def test_pieces_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_for(write_jsonl(tmp_path / "texts.jsonl", make_texts()), bos=True, document_separator=True)
    facts, built = build(tmp_path, settings)
    whole = (tmp_path / "out" / "tokens.safetensors").read_bytes()
    monkeypatch.setattr(packing, "_CHUNK_TOKENS", 40)
    monkeypatch.setattr(corpus_module, "_BATCH_CHARS", 100)
    assert build(tmp_path, settings)[0] == facts
    assert (tmp_path / "out" / "tokens.safetensors").read_bytes() == whole
    write_jsonl(tmp_path / "texts.jsonl", make_texts(seed=1))
    other = build(tmp_path, settings)[0]
    assert other["text_digest"] != facts["text_digest"]
    assert other["tokens_digest"] != facts["tokens_digest"]
    built.close()


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, "uint16"), (65_537, "uint32"), (70_000, "uint32")])
def test_large_vocabularies_keep_their_ids(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    ids = np.random.default_rng(0).integers(65_000, vocab_size, 64)
    ids[-1] = vocab_size - 1
    write_jsonl(tmp_path / "texts.jsonl", [" ".join(f"w{i}" for i in ids)])
    settings = settings_for(tmp_path / "texts.jsonl", rows=4)
    facts, built = build(tmp_path, settings, tokenizer=make_tokenizer(vocab_size), vocab_size=vocab_size)
    assert built.rows(0, 4).dtype == dtype
    assert built.rows(0, 4).ravel().tolist() == ids.tolist()
    assert facts["dtype"] == {"uint16": "U16", "uint32": "U32"}[dtype]
    with pytest.raises(CorpusError, match=f"token id {vocab_size - 1}"):
        build(tmp_path, settings, tokenizer=make_tokenizer(vocab_size), vocab_size=vocab_size - 1)


def test_file_opens_with_safetensors(tmp_path: Path) -> None:
    facts, built = build(tmp_path, settings_for(write_jsonl(tmp_path / "texts.jsonl", make_texts())))
    with safe_open(tmp_path / "out" / "tokens.safetensors", "np") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert {name: (str(t.dtype), t.shape) for name, t in tensors.items()} == {
        "documents": ("int64", (100,)),
        "offsets": ("int64", (100,)),
        "lengths": ("uint32", (100,)),
        "tokens": ("uint16", (100, 16)),
    }
    assert (tensors["lengths"] == 16).all()
    for start, stop in [(0, 0), (0, 1), (99, 100), (7, 31), (0, 100)]:
        part = tensors["tokens"][start:stop]
        assert (built.rows(start, stop) == part).all()
        assert built.digest(start, stop) == xxhash.xxh3_128_hexdigest(part.tobytes())
    assert built.digest(0, 100) == facts["tokens_digest"]
    with pytest.raises(AssertionError):
        built.rows(100, 101)


def test_any_flipped_bit_is_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "texts.jsonl", make_texts())
    build(tmp_path, settings_for(tmp_path / "texts.jsonl", rows=5))[1].close()
    path = tmp_path / "out" / "tokens.safetensors"
    good = path.read_bytes()
    for place in range(len(good)):
        bad = bytearray(good)
        bad[place] ^= 1 << (place % 8)
        path.write_bytes(bad)
        with pytest.raises(IntegrityError, match="makes them anew"):
            open_corpus(path)
    for bad in (b"", good[:-1], good[:100], good + b"\0"):
        path.write_bytes(bad)
        with pytest.raises(IntegrityError):
            open_corpus(path)
    path.write_bytes(good)
    open_corpus(path).close()


@pytest.mark.parametrize(("key", "token"), [("bos", "bos_token_id"), ("document_separator", "eos_token_id")])
def test_special_tokens_must_exist(tmp_path: Path, key: str, token: str) -> None:
    settings = settings_for(write_jsonl(tmp_path / "texts.jsonl", make_texts()), **{key: True})
    with pytest.raises(CorpusError, match=f"{key}.*no {token}"):
        build(tmp_path, settings, tokenizer=make_tokenizer(pad_token="<unk>"))
    with pytest.raises(CorpusError, match="outside the model's vocabulary"):
        build(tmp_path, settings, vocab_size=1)


def test_an_error_keeps_the_old_file(tmp_path: Path) -> None:
    settings = settings_for(write_jsonl(tmp_path / "texts.jsonl", make_texts()))
    build(tmp_path, settings)[1].close()
    before = (tmp_path / "out" / "tokens.safetensors").read_bytes()
    with pytest.raises(CorpusError):
        build(tmp_path, settings.model_copy(update={"rows": 10_000}))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["tokens.safetensors"]
    assert (tmp_path / "out" / "tokens.safetensors").read_bytes() == before


def test_reading_stops_when_rows_are_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    def read(settings: CorpusSettings) -> Iterator[str]:
        try:
            # 100 rows of 16 take 160 texts of ten words; the tokenizer's batch of 64 may read a little further.
            for _ in range(64 * 3):
                yield "w4 " * 10
            raise AssertionError("read past the end of the batch that filled the rows")
        finally:
            closed.append(True)

    monkeypatch.setattr(corpus_module, "read_texts", read)
    facts, _ = build(tmp_path, settings_for("texts.jsonl"))
    assert facts["n_documents"] == 160
    assert closed == [True]
    with pytest.raises(AssertionError, match="read past"):
        build(tmp_path, settings_for("texts.jsonl", rows=121))


def test_memory_does_not_grow_with_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_CHUNK_TOKENS", 1 << 12)
    monkeypatch.setattr(corpus_module, "read_texts", lambda settings: (f"w{i % 250 + 3} " * 100 for i in range(10**9)))
    options: dict[str, Any] = {"tokens_path": tmp_path / "tokens", "vocab_size": VOCAB_SIZE, "log": print}
    tokenizer, peaks = make_tokenizer(), []
    for rows in (50, 500, 5000):
        tracemalloc.start()
        build_corpus(settings_for("texts.jsonl", rows=rows, seq_len=64), tokenizer, **options)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # Ten times the rows are 576 kB of tokens more.
    assert peaks[2] - peaks[1] < 100_000, peaks
