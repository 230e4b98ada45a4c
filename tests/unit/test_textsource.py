"""Goal: every kind of source gives the same texts, and what cannot be read is told by name, with the remedy.

Method: the same texts go into every kind of source, and the rows built from it are compared with the texts' own words
(each word is its id). Reading ahead is measured by Arrow's own count of its memory; the reader of `datasets`, not used
for parquet, is the control that exceeds the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anchorage import textsource
from anchorage.errors import CorpusError
from anchorage.sources import is_local
from corpora import (
    build,
    fill_folder,
    make_texts,
    save_dataset,
    save_dict,
    settings_for,
    write_array,
    write_gzip,
    write_jsonl,
    write_parquet,
    write_text,
)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(textsource, "_SETTLE_S", 0)
    datasets.disable_progress_bars()


SOURCES: dict[str, Callable[[Path, list[str]], Path]] = {
    "texts.jsonl": write_jsonl,
    "texts.jsonl.gz": write_gzip,
    "texts.json": write_array,
    "texts.parquet": write_parquet,
    "texts.txt": write_text,
    "with [pattern] characters.jsonl": write_jsonl,
    "saved": save_dataset,
    "saved-splits": save_dict,
    "folder": fill_folder,
}


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    texts = make_texts()
    facts, built = build(tmp_path, settings_for(SOURCES[name](tmp_path / name, texts)))
    words = [int(word[1:]) for text in texts if len(text) >= 12 for word in text.split()]
    assert built.rows(0, 100).ravel().tolist() == words[:1600]
    used = texts[: facts["n_documents"] + facts["n_skipped"]]
    assert facts["n_skipped"] == sum(len(text) < 12 for text in used) > 0


BAD_SOURCES: dict[str, tuple[dict[str, Any], str]] = {
    "missing file": ({"source": "nowhere/of/texts.parquet"}, "no file or folder 'nowhere/of/texts.parquet'"),
    "unknown kind": ({"source": "texts.docx"}, "of no known kind"),
    "Hub id": ({"source": "someone/something"}, "'someone/something' cannot be read.*network"),
    "empty file": ({"source": "empty.jsonl"}, "holds no text: of 0 texts"),
    "short texts only": ({"min_chars": 10_000}, "holds no text: of 150 texts.*min_chars"),
    "missing column": ({"text_column": "txt"}, r"no column 'txt', only id, text; did you mean text\?"),
    "missing column, parquet": ({"source": "texts.parquet", "text_column": "Text"}, "only number, text"),
    "missing column, stream": ({"source": "texts.txt", "text_column": "texts"}, "no column 'texts', only text"),
    "numbers": ({"text_column": "id"}, "row 0 .* type int in column 'id', not text"),
    "missing split": ({"split": "tain"}, r"no split 'tain', only train; did you mean train\?"),
    "missing split, saved": ({"source": "./saved", "split": "valid"}, "no split 'valid', only train, test"),
    "folder of nothing": ({"source": "./hollow"}, "'./hollow' cannot be read"),
    "torn parquet": ({"source": "torn.parquet"}, "'torn.parquet' cannot be read.*damaged"),
    "bad JSON": ({"source": "bad.jsonl"}, "'bad.jsonl' cannot be read.*damaged"),
    "too short": ({"rows": 10_000}, r"fills \d+ rows of 16 tokens, and 10000 are asked for.*corpus\.rows"),
}


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_bad_input_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("texts.jsonl"), make_texts())
    write_text(Path("texts.txt"), make_texts())
    save_dict(Path("saved"), make_texts())
    whole = write_parquet(Path("texts.parquet"), make_texts()).read_bytes()
    for name, data in {
        "torn.parquet": whole[:-9],
        "bad.jsonl": b'{"text": oops}\n',
        "empty.jsonl": b"",
        "texts.docx": b"x",
    }.items():
        Path(name).write_bytes(data)
    Path("hollow").mkdir()
    changes, message = BAD_SOURCES[case]
    with pytest.raises(CorpusError, match=message) as caught:
        build(tmp_path, settings_for(**({"source": "texts.jsonl"} | changes)))
    assert caught.value.__cause__ is None
    assert list(Path("out").iterdir()) == []


def test_parquet_is_not_read_ahead(tmp_path: Path) -> None:
    """One row group of 16 MB: the reader holds little of it; that of datasets, the control, holds more than all."""
    texts = [f"{i} " + "w5 " * 400 for i in range(13_000)]
    path = tmp_path / "texts.parquet"
    pq.write_table(pa.table({"text": texts}), path, compression=None, use_dictionary=False)

    def peak_bytes(source: Iterator[Any]) -> int:
        start = pa.total_allocated_bytes()
        return max(pa.total_allocated_bytes() - start for _ in source)

    assert peak_bytes(textsource.read_texts(settings_for(path))) < 4_000_000
    stream = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True, batch_size=64)
    assert peak_bytes(iter(stream)) > 12_000_000


@pytest.mark.parametrize("source", ["gpt2", "Salesforce/wikitext", "user/data.v2"])
def test_hub_ids_are_known(source: str) -> None:
    assert not is_local(source)


@pytest.mark.parametrize("source", ["a.txt", "a/b/c", "./a", "~/a", "/a", "user/data.jsonl.gz", "user/data.parquet"])
def test_local_sources_are_known(source: str) -> None:
    assert is_local(source)
