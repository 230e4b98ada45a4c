"""A shard opened for reading: first checked against what a writer of its own facts would have written."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from anchorage.digest import canonical_json, digest_row
from anchorage.errors import IntegrityError
from anchorage.store.format import FILE_DTYPES, OFFSETS, ROW_DIGESTS, TOKENS, TierShape, shard_metadata
from anchorage.store.names import SHARD_FORMAT
from anchorage.tensorfile import TensorFile, TensorSpec

_STORAGE_DTYPES = {file_dtype: name for name, file_dtype in FILE_DTYPES.items()}
_TOKEN_DTYPES = {"U16": "uint16", "U32": "uint32"}
_FACTS = {"key": str, "tier": str, "shard": int, "rows": list, "sites": list, "reduce": str, "tokens_digest": str}


class ShardFile:
    """A shard opened for reading rows.

    The row digests do not cover the header: nothing in it, changed or made up, may lead to other bytes or to a crash.
    So every fact and tensor is compared with what a writer would have put there.

    Args:
        path: the file.
        expected: metadata fields that must be as given (key, tier, rows, ...).
        shape: fields of :class:`TierShape` that the tensors must have (storage_dtype, seq_len).

    Raises:
        IntegrityError: not a shard of ours, or not the one expected.
        OSError: the file cannot be opened; the error names it.
    """

    def __init__(self, path: Path, expected: Mapping[str, Any], shape: Mapping[str, Any] | None = None) -> None:
        self.file = TensorFile(path)
        try:
            self.metadata = self.file.metadata
            self._require_fields(self.metadata, {"format": SHARD_FORMAT, **expected})
            self._check_facts()
            self.shape = self._find_shape()
            self._require_fields(vars(self.shape), shape or {})
            self._check_tensors()
            self._lines = [*self.shape.widths, TOKENS]
        except BaseException:
            self.file.close()
            raise

    def ragged(self, name: str) -> bool:
        """Whether rows of a site, or of the tokens, differ in length."""
        return self.shape.padded and (name == TOKENS or self.shape.ragged)

    def read(self, name: str, start: int, stop: int) -> tuple[np.ndarray | list[np.ndarray], np.ndarray]:
        """Read the shard's rows ``[start, stop)`` of a site, or of the tokens.

        Returns:
            The rows' bytes, uint8 ``[rows, bytes a row]`` (a list of them where rows differ in length), and their
            stored digests, uint64 ``[rows]``.

        Raises:
            IntegrityError: the offsets of rows that differ in length are not what a writer writes.
        """
        entry = self.file.entries[ROW_DIGESTS]
        first = entry.start + self._lines.index(name) * entry.row_bytes
        digests = np.frombuffer(self.file.read_range(first + 8 * start, first + 8 * stop), "<u8")
        if not self.ragged(name):
            return np.frombuffer(self.file.read_rows(name, start, stop), np.uint8).reshape(stop - start, -1), digests
        offsets = self._read_offsets(name, start, stop)
        data = np.frombuffer(self.file.read_rows(name, offsets[0], offsets[-1]), np.uint8)
        item = self.file.entries[name].row_bytes
        return np.split(data, [(offset - offsets[0]) * item for offset in offsets[1:-1]]), digests

    def _require_fields(self, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
        for field, value in expected.items():
            # As text: to Python true equals 1, and 8.0 equals 8.
            same = canonical_json(found.get(field)) == canonical_json(value)
            self._require(same, f"{field} {value}", found.get(field))

    def _require(self, holds: bool, expected: str, found: object) -> None:
        if not holds:
            raise self._damaged(expected, found)

    def _damaged(self, expected: str, found: object) -> IntegrityError:
        remedy = "The file is damaged or of another capture; `make verify`, then the plain command, repairs it."
        return IntegrityError(self.file.path, expected=expected, found=found, remedy=remedy)

    def _check_facts(self) -> None:
        """Each fact of the metadata is there and of its kind; what they say of tensors is checked afterwards."""
        facts = self.metadata
        wrong = sorted(name for name, kind in _FACTS.items() if type(facts.get(name)) is not kind)
        self._require(not wrong, "facts " + ", ".join(_FACTS), {name: facts.get(name) for name in wrong})
        self._require(facts["reduce"] in ("none", "mean", "last"), "a reduction", facts["reduce"])
        rows = facts["rows"]
        whole = len(rows) == 2 and all(type(row) is int for row in rows)
        self._require(whole and 0 <= rows[0] < rows[1], "rows [start, stop)", rows)
        sites, tensors = facts["sites"], self.file.entries.keys()
        others = {ROW_DIGESTS, TOKENS, OFFSETS} if facts.get("layout") == "padded" else {ROW_DIGESTS, TOKENS}
        named = bool(sites) and all(isinstance(site, str) for site in sites)
        # Sorted, not as sets: a site named twice has no tensor of its own.
        named = named and sorted([*sites, *others]) == sorted(tensors)
        self._require(named, f"sites {sorted(tensors - others)} beside {sorted(others)}", sites)

    def _find_shape(self) -> TierShape:
        """The shape that the tensors suggest."""
        facts, specs = self.metadata, {name: entry.spec for name, entry in self.file.entries.items()}
        padded, tokens, first = facts.get("layout") == "padded", specs[TOKENS], specs[facts["sites"][0]]
        for name, spec in specs.items():
            self._require(bool(spec.shape) and 0 not in spec.shape, f"rows in tensor {name!r}", spec.shape)
        self._require(tokens.dtype in _TOKEN_DTYPES, f"tokens of {', '.join(_TOKEN_DTYPES)}", tokens.dtype)
        self._require(first.dtype in _STORAGE_DTYPES, f"sites of {', '.join(_STORAGE_DTYPES)}", first.dtype)
        return TierShape(
            tier=facts["tier"],
            widths={site: specs[site].shape[-1] for site in facts["sites"]},
            reduce=facts["reduce"],
            seq_len=tokens.shape[0] if padded else tokens.shape[-1],
            storage_dtype=_STORAGE_DTYPES[first.dtype],
            token_dtype=_TOKEN_DTYPES[tokens.dtype],
            padded=padded,
        )

    def _check_tensors(self) -> None:
        """Metadata and tensors are those that a writer of the suggested shape makes."""
        facts, shape, rows = self.metadata, self.shape, range(*self.metadata["rows"])
        n_tokens = shape.seq_len if shape.padded else len(rows) * shape.seq_len
        entries = sorted(self.file.entries.values(), key=lambda entry: entry.start)
        for entry, spec in zip(entries, shape.specs(len(rows), n_tokens), strict=True):
            self._require(entry.spec == spec, _describe(spec), _describe(entry.spec))
        given = {name: facts[name] for name in ("key", "shard", "tokens_digest")}
        written = shard_metadata(shape, rows=rows, **given)
        self._require(canonical_json(facts) == canonical_json(written), f"metadata {written}", facts)

    def _read_offsets(self, name: str, start: int, stop: int) -> list[int]:
        """Where rows ``[start, stop)`` begin, and the last one ends, in tokens."""
        offsets = np.frombuffer(self.file.read_rows(OFFSETS, start, stop + 1), "<u8").tolist()
        n_tokens = self.file.entries[name].spec.shape[0]
        if offsets[-1] > n_tokens or any(a >= b for a, b in itertools.pairwise(offsets)):
            raise self._damaged(f"offsets that rise to at most {n_tokens}", offsets[:4])
        return offsets


def check_rows(
    path: Path, name: str, data: np.ndarray | Sequence[np.ndarray], digests: Sequence[int] | np.ndarray
) -> None:
    """Compare rows' bytes, uint8 ``[bytes]`` each, with their digests; IntegrityError names the first bad one."""
    for index, (row, expected) in enumerate(zip(data, digests, strict=True)):
        found = digest_row(row)
        if found != int(expected):
            raise IntegrityError(
                path,
                expected=f"digest {int(expected):016x} of {name}, row {index} of those read",
                found=f"{found:016x}",
                remedy="The bytes have changed on disk: `make verify`, then the plain command, repairs them.",
            )


def _describe(spec: TensorSpec) -> str:
    return f"tensor {spec.name!r} of {spec.dtype} {list(spec.shape)}"
