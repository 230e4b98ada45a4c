"""The safetensors container: encode a header, check a header, read byte ranges.

A file is ``<u64 header length><JSON header><tensor bytes>`` (https://huggingface.co/docs/safetensors). The library's
own writer needs all tensors in memory, puts metadata keys in random order and never calls fsync; so headers are made
here, the caller writes the tensor bytes as they come, and the same tensors always give the same bytes. Any
safetensors reader opens the result.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from anchorage.digest import canonical_json
from anchorage.errors import IntegrityError

# safetensors names of the dtypes used here, with their bytes an element.
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1, "U16": 2, "U32": 4, "U64": 8, "I64": 8}
METADATA_KEY = "anchorage"
_MAX_HEADER_BYTES = 100_000_000
_ALIGN_BYTES = 8


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's name, safetensors dtype (``F16``) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class TensorEntry:
    """A tensor inside a file: its spec, and where its bytes start, counted from the start of the file."""

    spec: TensorSpec
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.spec.n_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the first dimension."""
        return math.prod(self.spec.shape[1:]) * ITEM_BYTES[self.spec.dtype]


def encode_header(specs: Sequence[TensorSpec], metadata: Mapping[str, Any]) -> tuple[bytes, dict[str, TensorEntry]]:
    """Make a file's first bytes, and say where each tensor goes.

    Args:
        specs: the tensors in the order of their bytes. Wider elements must come first, so that all are aligned.
        metadata: facts, kept as canonical JSON under one key: with more keys, writers disagree on their order.

    Returns:
        The header bytes, a multiple of 8 long, and the tensors' entries by name.
    """
    header: dict[str, Any] = {"__metadata__": {METADATA_KEY: canonical_json(metadata)}}
    offset = 0
    for spec in specs:
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.n_bytes],
        }
        offset += spec.n_bytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGN_BYTES)
    data = len(text).to_bytes(8, "little") + text
    entries = {spec.name: TensorEntry(spec, len(data) + header[spec.name]["data_offsets"][0]) for spec in specs}
    return data, entries


class TensorFile:
    """A safetensors file opened for reading byte ranges; nothing is read beyond its header until asked for.

    Raises:
        IntegrityError: the header is torn, lies about offsets, or is not one that :func:`encode_header` makes.
        FileNotFoundError: there is no such file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (open for the object's life)
        try:
            # Without this the kernel reads far ahead of each small range, and a row costs a hundred kilobytes.
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            self.n_bytes = os.fstat(self._file.fileno()).st_size
            self.metadata, self.entries = self._parse(self._read_header())
        except BaseException:
            self.close()
            raise

    def read(self, name: str) -> memoryview:
        """All bytes of one tensor."""
        entry = self.entries[name]
        return self.read_range(entry.start, entry.stop)

    def read_rows(self, name: str, start: int, stop: int) -> memoryview:
        """The bytes of indices ``[start, stop)`` of a tensor's first dimension."""
        entry = self.entries[name]
        assert 0 <= start <= stop <= entry.spec.shape[0], (name, start, stop)
        return self.read_range(entry.start + start * entry.row_bytes, entry.start + stop * entry.row_bytes)

    def read_range(self, start: int, stop: int) -> memoryview:
        """The file's bytes ``[start, stop)``, writable; a file that ends before is an IntegrityError."""
        # numpy does not fill it with zeros first, and asks for huge pages: a third less time than a bytearray, warm.
        view, done = np.empty(stop - start, np.uint8).data, 0
        while done < len(view):
            n_read = os.preadv(self._file.fileno(), [view[done:]], start + done)
            if n_read == 0:
                raise self._damaged(f"bytes {start} to {stop}", f"the file's end at {start + done}")
            done += n_read
        return view

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_header(self) -> bytes:
        # One page holds most headers: asking for it at once saves a call.
        first = bytes(self.read_range(0, min(4096, self.n_bytes)))
        length = int.from_bytes(first[:8], "little")
        if len(first) < 8 or length > min(_MAX_HEADER_BYTES, self.n_bytes - 8):
            raise self._damaged("a safetensors header", f"{self.n_bytes} bytes, header length {length}")
        return first[8 : 8 + length] + bytes(
            self.read_range(len(first), 8 + length) if 8 + length > len(first) else b""
        )

    def _parse(self, text: bytes) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
        try:
            header = json.loads(text, object_pairs_hook=_no_duplicates)
            metadata = dict(json.loads(header.pop("__metadata__")[METADATA_KEY]))
            entries = {name: self._parse_entry(name, value, 8 + len(text)) for name, value in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._damaged("a header written by anchorage", f"{type(error).__name__}: {error}") from None
        position = 8 + len(text)
        for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.stop)):
            if entry.start != position:
                raise self._damaged(f"tensor {entry.spec.name!r} at byte {position}", f"byte {entry.start}")
            position = entry.stop
        if position != self.n_bytes:
            raise self._damaged(f"{position} bytes by its header", f"{self.n_bytes} bytes")
        return metadata, entries

    @staticmethod
    def _parse_entry(name: str, value: dict[str, Any], data_start: int) -> TensorEntry:
        if set(value) != {"dtype", "shape", "data_offsets"} or value["dtype"] not in ITEM_BYTES:
            raise ValueError(f"tensor {name!r} has {value}")
        shape, (start, stop) = tuple(value["shape"]), value["data_offsets"]
        if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
            raise ValueError(f"tensor {name!r} has shape {shape}, offsets {start} to {stop}")
        spec = TensorSpec(name, value["dtype"], shape)
        if stop - start != spec.n_bytes:
            raise ValueError(f"tensor {name!r} of {spec.n_bytes} bytes has offsets {start} to {stop}")
        return TensorEntry(spec, data_start + start)

    def _damaged(self, expected: str, found: str) -> IntegrityError:
        return IntegrityError(
            self.path, expected=expected, found=found, remedy="Run `make verify`, then the plain command, to repair it."
        )


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names):
        raise ValueError(f"names occur twice: {sorted({name for name in names if names.count(name) > 1})}")
    return dict(pairs)
