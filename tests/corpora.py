"""Texts, a tokenizer and every kind of corpus source, for tests of the corpus."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from anchorage.corpus import Corpus, build_corpus, open_corpus
from anchorage.settings import CorpusSettings

VOCAB_SIZE = 300
BOS, EOS = 1, 2


def make_tokenizer(vocab_size: int = VOCAB_SIZE, **special: str) -> PreTrainedTokenizerFast:
    """A word tokenizer (`w7` is id 7) that would add BOS by itself, and warns of more than 8 tokens."""
    vocab = {"<unk>": 0, "<s>": BOS, "</s>": EOS} | {f"w{i}": i for i in range(3, vocab_size)}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    special = special or {"bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", model_max_length=8, **special)


def make_texts(n_texts: int = 150, seed: int = 0) -> list[str]:
    """Texts of 1 to 40 words; some fall below 12 characters."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 40, n_texts)
    return [" ".join(f"w{i}" for i in random.integers(3, VOCAB_SIZE, length)) for length in lengths]


def settings_for(source: Path | str, **changes: Any) -> CorpusSettings:
    return CorpusSettings(**({"source": str(source), "min_chars": 12, "seq_len": 16, "rows": 100} | changes))


def build(tmp_path: Path, settings: CorpusSettings, **changes: Any) -> tuple[dict[str, Any], Corpus]:
    path = tmp_path / "out" / "tokens.safetensors"
    options: dict[str, Any] = {"tokenizer": make_tokenizer(), "vocab_size": VOCAB_SIZE, "log": lambda line: None}
    facts = build_corpus(settings, tokens_path=path, **(options | changes))
    return facts, open_corpus(path)


def write_jsonl(path: Path, texts: list[str | None]) -> Path:
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)))
    return path


def write_gzip(path: Path, texts: list[str]) -> Path:
    path.write_bytes(gzip.compress(write_jsonl(path.with_suffix(""), texts).read_bytes()))
    return path


def write_array(path: Path, texts: list[str]) -> Path:
    path.write_text(json.dumps([{"text": text} for text in texts]))
    return path


def write_parquet(path: Path, texts: list[str]) -> Path:
    pq.write_table(pa.table({"number": range(len(texts)), "text": texts}), path, row_group_size=37)
    return path


def write_text(path: Path, texts: list[str]) -> Path:
    path.write_text("\n".join(texts))
    return path


def save_dataset(path: Path, texts: list[str]) -> Path:
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(path)
    return path


def save_dict(path: Path, texts: list[str]) -> Path:
    splits = {"train": texts, "test": ["w9 " * 99]}
    datasets.DatasetDict({k: datasets.Dataset.from_dict({"text": v}) for k, v in splits.items()}).save_to_disk(path)
    return path


def fill_folder(path: Path, texts: list[str]) -> Path:
    path.mkdir()
    write_jsonl(path / "train.jsonl", texts)
    write_jsonl(path / "test.jsonl", ["w9 " * 99])
    return path
