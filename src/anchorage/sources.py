"""Where a model or corpus comes from: a local path or a Hub id. Light, for the Snakefile reads it too."""

from __future__ import annotations

from pathlib import Path

from anchorage.errors import SettingsError, did_you_mean
from anchorage.resources import DEFAULT_CORPUS, MADE_MODELS, MODEL_FILES
from anchorage.settings import Settings

# Kinds of local text files, with the `datasets` builder that reads them, and what they may be compressed with.
TEXT_FORMATS = {".parquet": "parquet", ".jsonl": "json", ".ndjson": "json", ".json": "json", ".txt": "text"}
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")


def is_local(source: str) -> bool:
    """Whether a source is meant as a path: it exists, or is not of the form ``name`` or ``owner/name``."""
    looks_local = (
        source.startswith(("/", ".", "~")) or source.count("/") > 1 or source.endswith((*TEXT_FORMATS, *COMPRESSIONS))
    )
    return looks_local or Path(source).expanduser().exists()


def local_inputs(source: str) -> list[str]:
    """The files that a workflow rule must wait for, or see change, before it can read a source; none for a Hub id."""
    if not is_local(source):
        return []
    path = Path(source).expanduser()
    if source.rstrip("/") in MADE_MODELS:
        return [f"{source.rstrip('/')}/{name}" for name in MODEL_FILES]
    if path.is_dir():
        files = (file for file in path.rglob("*") if file.is_file())
        return sorted(str(file) for file in files if not any(part.startswith(".") for part in file.parts))
    return [str(path)]


def check_sources(settings: Settings) -> None:
    """Find out at once whether local sources are there; the embedded defaults are made when they are missing.

    Raises:
        SettingsError: names each missing path and what lies near it.
    """
    faults = []
    for key, source, made in (
        ("model.source", settings.model.source, MADE_MODELS),
        ("corpus.source", settings.corpus.source, (DEFAULT_CORPUS,)),
    ):
        path = Path(source).expanduser()
        if is_local(source) and source.rstrip("/") not in made and not path.exists():
            beside = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
            faults.append(f"{key}: there is no {source}{did_you_mean(path.name, beside)}")
    if faults:
        raise SettingsError("; ".join(faults) + ". Give a path that exists, or a Hub id such as owner/name.")
