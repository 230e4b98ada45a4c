"""The configuration as typed, checked values.

Every fault is found before any work starts, and all of them are reported at once, each with its dotted path. Unknown
keys are faults: a misspelt key that is silently ignored costs a whole run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from anchorage.errors import SettingsError, did_you_mean

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

Dtype = Literal["float32", "bfloat16", "float16"]
Reduction = Literal["none", "mean", "last"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ModelSettings(_Section):
    source: str = Field(min_length=1, description="Hub id, or a local folder written by save_pretrained.")
    revision: str | None = Field(None, description="Branch, tag or commit on the Hub; null is the default branch.")
    dtype: Dtype = Field("float32", description="What the model computes in.")
    device: str = Field(
        "auto", pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$", description="auto takes a GPU if there is one."
    )
    attention: str | None = Field(None, description="eager, sdpa, ...; null is the model's own choice.")


class CorpusSettings(_Section):
    source: str = Field(min_length=1, description="Hub id, or a local .parquet / .jsonl / .txt file or saved folder.")
    name: str | None = Field(None, description="Configuration name of a Hub dataset.")
    revision: str | None = Field(None, description="Branch, tag or commit on the Hub.")
    split: str = Field("train", min_length=1)
    text_column: str = Field("text", min_length=1)
    min_chars: int = Field(40, ge=0, description="Texts with fewer characters are skipped.")
    layout: Literal["packed", "padded"] = Field(
        "packed", description="packed: rows are windows cut from one token stream; padded: a row is a document."
    )
    seq_len: int = Field(64, ge=1, description="Tokens a row; padded, at most so many: longer documents are cut.")
    rows: int = Field(1024, ge=1)
    bos: bool = Field(False, description="Start each row with the tokenizer's BOS token.")
    document_separator: bool = Field(False, description="Put the end-of-text token between documents.")

    @field_validator("document_separator")
    @classmethod
    def _rows_hold_several(cls, separator: bool, info: ValidationInfo) -> bool:
        if separator and info.data.get("layout") == "padded":
            raise ValueError("must be false where layout is padded: a row then holds one document")
        return separator


class TierSettings(_Section):
    sites: list[str] = Field(min_length=1, description="Site names, globs (block.*) or raw module paths.")
    rows: Literal["all"] | int = Field("all", description="all, or the first n rows.")
    reduce: Reduction = Field("none", description="Over the tokens of a row: none keeps them all, mean, last.")

    @field_validator("rows")
    @classmethod
    def _at_least_one(cls, rows: str | int) -> str | int:
        if isinstance(rows, int) and rows < 1:
            raise ValueError("must be 'all' or a count of at least 1")
        return rows


class CaptureSettings(_Section):
    batch_rows: int = Field(16, ge=1, description="Rows of one forward pass; part of the identity.")
    shard_rows: int = Field(128, ge=1, description="Rows of one shard file; a multiple of batch_rows.")
    parts: int = Field(1, ge=1, description="Jobs that share the capture; the stored bytes do not depend on it.")
    threads: Literal["auto"] | int = Field("auto", description="CPU threads of the forward pass.")
    storage_dtype: Dtype = "float16"
    staging_dir: str | None = Field(
        None, min_length=1, description="Runs keep shards below it; null is results/{run}/staging."
    )
    overlap_copies: bool = Field(False, description="On a GPU, copy to the host beside the forward pass.")
    tiers: dict[str, TierSettings] = Field(min_length=1)

    @field_validator("threads")
    @classmethod
    def _at_least_one(cls, threads: str | int) -> str | int:
        if isinstance(threads, int) and threads < 1:
            raise ValueError("must be 'auto' or a count of at least 1")
        return threads

    @field_validator("tiers")
    @classmethod
    def _names_fit_files(cls, tiers: dict[str, TierSettings]) -> dict[str, TierSettings]:
        for name in tiers:
            if not _NAME.fullmatch(name):
                raise ValueError(f"tier name {name!r} must be made of letters, digits, '.', '_' and '-'")
        return tiers

    @field_validator("shard_rows")
    @classmethod
    def _whole_batches(cls, shard_rows: int, info: ValidationInfo) -> int:
        batch_rows = info.data.get("batch_rows")
        if batch_rows and shard_rows % batch_rows:
            nearest = max(batch_rows, round(shard_rows / batch_rows) * batch_rows)
            raise ValueError(f"must be a multiple of batch_rows ({batch_rows}); {nearest} would do")
        return shard_rows


class AnchorSettings(_Section):
    rows: int = Field(32, ge=1, description="Rows drawn at random, beside the first and the last.")
    tolerance: float = Field(1e-2, gt=0, description="Absolute and relative, an element; used across environments.")


class VerifySettings(_Section):
    depth: Literal["size", "full"] = Field("full", description="size: names and sizes; full: every byte's digest.")


class MemorySettings(_Section):
    on_leak: Literal["warn", "stop"] = Field("warn", description="What the workflow does when the memory log grows.")


class ProbeSettings(_Section):
    tier: str = Field("sweep", description="The tier whose sites are probed; it must keep all tokens.")
    tasks: list[str] = Field(["duplicate-token", "previous-token", "position"], min_length=1)
    test_fraction: float = Field(0.25, gt=0, lt=1, description="Share of the rows, the last ones, kept for testing.")
    max_tokens: int | None = Field(8192, ge=2, description="Training tokens of a probe; null takes all there are.")
    solver: Literal["full-batch", "adam"] = Field(
        "full-batch", description="full-batch: all tokens in memory; adam: streams rows from disk, with checkpoints."
    )


class LoadingSettings(_Section):
    big_mib: int = Field(256, ge=1, description="Size of the synthetic file of 64 equal tensors.")
    repeats: int = Field(
        3, ge=1, description="Measurements of each subject, method and state; of forward passes a third."
    )
    methods: list[str] = Field(
        ["torch.load", "torch.load-mmap", "load_file", "one-tensor", "ours"],
        min_length=1,
        description="Ways of loading; config/loading-full.yaml has them all.",
    )
    drop_caches: bool = Field(False, description="As root, drop the whole machine's page cache for cold measurements.")


class DurabilitySettings(_Section):
    profile: Literal["full", "small"] = Field("full", description="How much the durability lab tries; small: a sample.")


class Settings(_Section):
    """The whole configuration of one run."""

    run: str
    seed: int = Field(0, ge=0)
    model: ModelSettings
    corpus: CorpusSettings
    capture: CaptureSettings
    verify: VerifySettings = VerifySettings()
    anchor: AnchorSettings = AnchorSettings()
    memory: MemorySettings = MemorySettings()
    forecast_rows: int = Field(50_000, ge=1, description="Rows that time, bytes and memory are extrapolated to.")
    probe: ProbeSettings | None = Field(None, description="Probes on the cache; null makes none.")

    loading: LoadingSettings | None = Field(None, description="The loading lab; null measures nothing.")
    durability: DurabilitySettings = DurabilitySettings()

    @field_validator("capture")
    @classmethod
    def _every_row_is_kept(cls, capture: CaptureSettings, info: ValidationInfo) -> CaptureSettings:
        corpus, kept = info.data.get("corpus"), [tier.rows for tier in capture.tiers.values()]
        if corpus and "all" not in kept and (most := max(rows for rows in kept if rows != "all")) < corpus.rows:
            raise ValueError(
                f"no tier keeps more than the first {most} of the {corpus.rows} rows; set corpus.rows to {most}, or "
                "the rows of a tier to all"
            )
        return capture

    @field_validator("run")
    @classmethod
    def _is_folder_name(cls, run: str) -> str:
        if not _NAME.fullmatch(run):
            raise ValueError("must be a folder name: letters, digits, '.', '_' and '-'")
        return run

    @property
    def results(self) -> Path:
        """Folder of the run's results."""
        return Path("results") / self.run

    @property
    def staging(self) -> Path:
        """Folder of the shards not yet published, one folder a capture key below it."""
        return Path(self.capture.staging_dir) / self.run if self.capture.staging_dir else self.results / "staging"

    def with_rows(self, rows: int) -> Settings:
        """The same configuration for a corpus of another number of rows."""
        return self.model_copy(update={"corpus": self.corpus.model_copy(update={"rows": rows})})

    def tier_rows(self) -> dict[str, int]:
        """Rows that each tier holds."""
        n_rows = self.corpus.rows
        return {
            name: n_rows if tier.rows == "all" else min(tier.rows, n_rows) for name, tier in self.capture.tiers.items()
        }


def load_settings(config: Mapping[str, Any]) -> Settings:
    """Check a configuration and return it typed.

    Args:
        config: the parsed YAML, as Snakemake hands it over.

    Raises:
        SettingsError: lists all faults, one a line: dotted path, what is wrong, the value.
    """
    try:
        return Settings.model_validate(_plain(config))
    except ValidationError as error:
        # A union (all, or a count) gives a fault for each member: one line a path is enough.
        faults = list({fault.partition(":")[0]: fault for fault in map(_describe, error.errors())}.values())
        raise SettingsError(f"{len(faults)} fault(s) in the configuration:\n  " + "\n  ".join(faults)) from None


def _plain(value: Any) -> Any:
    """Copy Snakemake's own dictionary types into plain ones."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _describe(fault: Any) -> str:
    # pydantic puts the names of union members into the location; they are types, not keys.
    keys = [str(key) for key in fault["loc"] if not re.fullmatch(r"literal\[.*\]|int|str|float|bool", str(key))]
    path = ".".join(keys) or "(top)"
    if fault["type"] == "extra_forbidden":
        return f"{path}: unknown key{did_you_mean(keys[-1], _known_keys(keys[:-1]))}"
    if fault["type"] == "missing":
        return f"{path}: is missing"
    message = fault["msg"].removeprefix("Value error, ")
    value = "" if isinstance(fault["input"], dict | BaseModel) else f" (found {fault['input']!r})"
    return f"{path}: {message[0].lower()}{message[1:]}{value}"


def _known_keys(path: list[str]) -> list[str]:
    section: type[BaseModel] = Settings
    for key in path:
        if key == "tiers":
            return list(TierSettings.model_fields)
        annotation = section.model_fields[key].annotation
        # A section that may be null is a union of it and None.
        section = next(kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type))
    return list(section.model_fields)
