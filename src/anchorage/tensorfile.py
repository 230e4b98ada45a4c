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

from anchorage.digest import canonical_json, parse_json
from anchorage.durable import open_file
from anchorage.errors import IntegrityError

# safetensors names of the dtypes used here, with their bytes an element.
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1, "U16": 2, "U32": 4, "U64": 8, "I64": 8}
METADATA_KEY = "anchorage"
# A tensor takes some 100 bytes; parsed, a header of many small values takes 30 times its bytes in memory.
_MAX_HEADER_BYTES = 1 << 20
_MAX_DIMENSIONS = 8
_MAX_NUMBER = (1 << 63) - 1
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
    header, text = _lay_out(specs, metadata)
    assert len(text) <= _MAX_HEADER_BYTES, f"a header of {len(text)} bytes would be refused when read"
    data = len(text).to_bytes(8, "little") + text
    entries = {spec.name: TensorEntry(spec, len(data) + header[spec.name]["data_offsets"][0]) for spec in specs}
    return data, entries


def fits_header(specs: Sequence[TensorSpec], metadata: Mapping[str, Any]) -> bool:
    """Whether :func:`encode_header` can be asked: a longer header would be refused when read."""
    return len(_lay_out(specs, metadata)[1]) <= _MAX_HEADER_BYTES


def _lay_out(specs: Sequence[TensorSpec], metadata: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
    """The header's entries, and its text."""
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
    return header, text + b" " * (-len(text) % _ALIGN_BYTES)


class TensorFile:
    """A safetensors file opened for reading byte ranges; nothing is read beyond its header until asked for.

    Raises:
        IntegrityError: it is no regular file; or the header is torn, lies about offsets, or is not one that
            :func:`encode_header` makes. When reading: the file has become shorter, or the device cannot read it.
        FileNotFoundError: there is no such file.
        OSError: it cannot be opened; the error names the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_file(path)
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
            try:
                n_read = os.preadv(self._file.fileno(), [view[done:]], start + done)
            except OSError as error:
                raise self._damaged(f"bytes {start} to {stop}", error) from error
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
            limit = f"a safetensors header of at most {_MAX_HEADER_BYTES} bytes"
            raise self._damaged(limit, f"{self.n_bytes} bytes, header length {length}")
        return first[8 : 8 + length] + bytes(
            self.read_range(len(first), 8 + length) if 8 + length > len(first) else b""
        )

    def _parse(self, text: bytes) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
        try:
            header = parse_json(text)
            metadata = _parse_metadata(header)
            entries = {name: _parse_entry(name, value, 8 + len(text)) for name, value in header.items()}
        except ValueError as error:
            raise self._damaged("a header written by anchorage", error) from None
        position = 8 + len(text)
        for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.stop)):
            if entry.start != position:
                raise self._damaged(f"tensor {entry.spec.name!r} at byte {position}", f"byte {entry.start}")
            position = entry.stop
        if position != self.n_bytes:
            raise self._damaged(f"{position} bytes by its header", f"{self.n_bytes} bytes")
        return metadata, entries

    def _damaged(self, expected: str, found: object) -> IntegrityError:
        return IntegrityError(
            self.path, expected=expected, found=found, remedy="Run `make verify`, then the plain command, to repair it."
        )


def _parse_metadata(header: Any) -> dict[str, Any]:
    """Take the metadata out of a header; ValueError where they are not as :func:`encode_header` puts them there."""
    fields = header.pop("__metadata__", None) if isinstance(header, dict) else None
    if not isinstance(fields, dict) or set(fields) != {METADATA_KEY} or not isinstance(fields[METADATA_KEY], str):
        raise ValueError(f"no __metadata__ whose one key is {METADATA_KEY!r}, but {fields}")
    metadata = parse_json(fields[METADATA_KEY].encode())
    if not isinstance(metadata, dict):
        raise ValueError(f"metadata {metadata}")
    return metadata


def _parse_entry(name: str, value: Any, data_start: int) -> TensorEntry:
    """A tensor's line of the header; ValueError where it does not agree with itself."""
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name!r} has {value}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(f"tensor {name!r} has dtype {dtype!r}, none of {', '.join(ITEM_BYTES)}")
    if not (_are_sizes(shape) and len(shape) <= _MAX_DIMENSIONS and _are_sizes(offsets) and len(offsets) == 2):
        raise ValueError(f"tensor {name!r} has shape {shape}, offsets {offsets}")
    spec = TensorSpec(name, dtype, tuple(shape))
    if offsets[1] - offsets[0] != spec.n_bytes:
        raise ValueError(f"tensor {name!r} of {spec.n_bytes} bytes has offsets {offsets}")
    return TensorEntry(spec, data_start + offsets[0])


def _are_sizes(value: Any) -> bool:
    # JSON's true is an int to Python, and 8.0 equals 8.
    return isinstance(value, list) and all(type(number) is int and 0 <= number <= _MAX_NUMBER for number in value)
