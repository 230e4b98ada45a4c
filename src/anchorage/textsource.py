"""Where texts come from: anything `datasets` reads, as one stream of texts that holds a few of them at a time.

A local parquet file is read by pyarrow itself. Streamed by datasets 5.2, a file of one row group is read ahead whole (a
file of 200 MB took 870 MB of memory; read this way, 23 MB), and its reader threads can abort the process at its end.
"""

from __future__ import annotations

import contextlib
import gc
import glob
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from anchorage.errors import AnchorageError, CorpusError, did_you_mean
from anchorage.settings import CorpusSettings
from anchorage.sources import COMPRESSIONS, TEXT_FORMATS, is_local

_BATCH_TEXTS = 64
# Arrow's threads that read parquet ahead outlive their iterator a little; a process that ends meanwhile is aborted
# (https://github.com/apache/arrow/issues/45214; seen in 9 of 20 runs).
_SETTLE_S = 0.3
_HUB_REMEDY = (
    "Check the id, corpus.name, corpus.revision and the network, or set corpus.source to a local .parquet, .jsonl or "
    ".txt file or to a folder saved by datasets. (A local path is known by its suffix, or by starting with / . or ~.)"
)


def read_texts(settings: CorpusSettings) -> Generator[str | None]:
    """Yield every text of a source in its order, one a row; None where a row has none.

    Memory holds 64 rows; of a stream from the Hub or a folder also what `datasets` reads ahead (parquet: a row group),
    and of a .json file that is one array, all of it. Close the iterator when no more is wanted.

    Raises:
        CorpusError: the source is missing, cannot be reached or read, has no such split or column, or the column holds
            something else than text. Nothing is opened before the first text is asked for.
    """
    n_read = 0
    with _explained(settings.source):
        for texts in _open_batches(settings):
            for text in texts:
                if text is not None and not isinstance(text, str):
                    kind = type(text).__name__
                    raise CorpusError(
                        f"corpus.text_column: row {n_read} of {settings.source!r} has a value of type {kind} in column "
                        f"{settings.text_column!r}, not text. Name a column of texts."
                    )
                n_read += 1
                yield text


def _open_batches(settings: CorpusSettings) -> Iterator[list[Any]]:
    if not is_local(settings.source):
        return _read_dataset(_open_on_hub(settings), settings, settle_s=_SETTLE_S)
    path = Path(settings.source).expanduser()
    if not path.exists():
        raise CorpusError(
            f"corpus.source: there is no file or folder {settings.source!r} (taken for a local path, seen from "
            f"{Path.cwd()}). Correct the path, or give the id of a dataset on the Hub."
        )
    if path.is_dir():
        return _read_dataset(_open_folder(path, settings), settings, settle_s=_SETTLE_S)
    file_format = _format_of(path)
    if not file_format:
        known = ", ".join(TEXT_FORMATS)
        raise CorpusError(
            f"corpus.source: {settings.source!r} is of no known kind. Known: {known}, and these compressed."
        )
    _pick_split({"train": None}, settings)
    if path.stat().st_size == 0:
        return iter(())
    return _read_parquet(path, settings) if file_format == "parquet" else _read_dataset(_open_file(path), settings)


def _format_of(path: Path) -> str:
    """The `datasets` builder for a file of this name, or an empty string."""
    inner = path.with_suffix("") if path.suffix in COMPRESSIONS else path
    file_format = TEXT_FORMATS.get(inner.suffix, "")
    return "" if file_format == "parquet" and inner != path else file_format


def _open_file(path: Path) -> Any:
    import datasets

    options = {"sample_by": "line"} if _format_of(path) == "text" else {}
    # datasets takes the name for a pattern.
    name = glob.escape(str(path.absolute()))
    return datasets.load_dataset(_format_of(path), data_files=name, streaming=True, split="train", **options)


def _open_folder(path: Path, settings: CorpusSettings) -> Any:
    """A folder saved by datasets (one dataset, or one for each split), or one with data files in it."""
    import datasets

    saved = any((path / name).exists() for name in ("state.json", "dataset_dict.json"))
    if not saved:
        return _pick_split(datasets.load_dataset(str(path), settings.name, streaming=True), settings)
    found = datasets.load_from_disk(path)
    return _pick_split(found if isinstance(found, Mapping) else {str(found.split or "train"): found}, settings)


def _open_on_hub(settings: CorpusSettings) -> Any:
    import datasets

    splits = datasets.load_dataset(settings.source, settings.name, revision=settings.revision, streaming=True)
    return _pick_split(splits, settings)


def _pick_split(splits: Mapping[str, Any], settings: CorpusSettings) -> Any:
    names = [str(name) for name in splits]
    if settings.split not in names:
        raise CorpusError(
            f"corpus.split: {settings.source!r} has no split {settings.split!r}, only "
            f"{', '.join(names)}{did_you_mean(settings.split, names)}"
        )
    return splits[settings.split]


def _check_column(names: Iterable[str], settings: CorpusSettings) -> None:
    names, column = list(names), settings.text_column
    if column not in names:
        raise CorpusError(
            f"corpus.text_column: {settings.source!r} has no column {column!r}, only "
            f"{', '.join(names)}{did_you_mean(column, names)}"
        )


def _read_parquet(path: Path, settings: CorpusSettings) -> Iterator[list[Any]]:
    import pyarrow.parquet

    # pre_buffer would read a whole row group; without a buffer size, whole column chunks are.
    with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
        _check_column(file.schema_arrow.names, settings)
        columns = [settings.text_column]
        for batch in file.iter_batches(_BATCH_TEXTS, columns=columns, use_threads=False):
            yield batch.column(0).to_pylist()


def _read_dataset(dataset: Any, settings: CorpusSettings, *, settle_s: float = 0) -> Iterator[list[Any]]:
    """The text column of a `Dataset` or `IterableDataset`; a stream may not know its columns before the first batch.

    Args:
        settle_s: how long to wait for reader threads when the reading stops early.
    """
    if dataset.column_names:
        _check_column(dataset.column_names, settings)
        dataset = dataset.select_columns([settings.text_column])
    batches = dataset.iter(batch_size=_BATCH_TEXTS)
    is_whole = False
    try:
        for batch in batches:
            _check_column(batch, settings)
            yield batch[settings.text_column]
        is_whole = True
    finally:
        batches.close()
        if settle_s and not is_whole:
            gc.collect()
            time.sleep(settle_s)


@contextlib.contextmanager
def _explained(source: str) -> Iterator[None]:
    """Turn any error of the reading libraries into one that names the source and the remedy."""
    try:
        yield
    except AnchorageError:
        raise
    except Exception as error:
        cause = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        remedy = "Is it damaged, or of another kind than its name says?" if is_local(source) else _HUB_REMEDY
        raise CorpusError(f"corpus.source: {source!r} cannot be read ({cause}). {remedy}") from None
