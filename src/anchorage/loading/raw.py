"""Tensors of a safetensors file by plain reads and maps, without the safetensors library."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from anchorage.errors import MeasurementError
from anchorage.processors import available_processors
from anchorage.tensorfile import TensorEntry, TensorFile

# torch's dtypes by their names in a safetensors header.
TORCH_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "I64": torch.int64,
}
PIECE_BYTES = 8 << 20
# What Linux reads ahead where a device does not say.
_READ_AHEAD_BYTES = 128 << 10


def read_tensors(path: str, names: Sequence[str]) -> dict[str, Tensor]:
    """Copies of the named tensors: their bytes alone are read, without read-ahead."""
    with TensorFile(Path(path)) as file:
        return {name: _as_tensor(file.read(name), file.entries[name]) for name in names}


def read_buffer(path: str) -> dict[str, Tensor]:
    """All tensors, as views of one buffer that unbuffered reads of 8 MiB fill."""
    entries, start, stop = _places(path)
    buffer = np.empty(stop - start, np.uint8).data
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        for first, piece in _pieces(buffer):
            _check_length(path, start + first, piece, file.readinto(piece))
    return _views(buffer, entries, start)


def read_parallel(path: str) -> dict[str, Tensor]:
    """All tensors, as views of one buffer that threads fill, each a range of its own.

    There is a thread for each available processor, and two at least. Each opens the file for itself: the kernel keeps
    one state of read-ahead an open file, and the threads' places would confuse it.
    """
    entries, start, stop = _places(path)
    buffer, n_threads = np.empty(stop - start, np.uint8).data, max(2, available_processors())
    share_bytes = max(1, -(-len(buffer) // n_threads))

    def fill(first: int) -> None:
        with open(path, "rb", buffering=0) as file:
            for offset, piece in _pieces(buffer[first : first + share_bytes]):
                place = start + first + offset
                _check_length(path, place, piece, os.preadv(file.fileno(), [piece], place))

    with ThreadPoolExecutor(n_threads) as pool:
        list(pool.map(fill, range(0, len(buffer), share_bytes)))
    return _views(buffer, entries, start)


def map_file(path: str) -> mmap.mmap:
    """Map a whole file, as a private one: a write to it would be to a copy of the page.

    torch.load and safetensors map so too. Torch warns of memory that cannot be written.
    """
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def mapped_tensors(path: str, mapping: mmap.mmap, names: Sequence[str]) -> dict[str, Tensor]:
    """The named tensors as views of the file's mapping, which they keep; nothing is read yet but the header."""
    entries, _, _ = _places(path)
    view = memoryview(mapping)
    return {name: _as_tensor(view[entries[name].start : entries[name].stop], entries[name]) for name in names}


def read_ahead_bytes(path: str) -> int:
    """How far the kernel reads ahead on the device that holds a file (``read_ahead_kb``); at least a page.

    Where the device does not say (macOS, some network filesystems) it is Linux's default, 128 KiB.
    """
    device = os.stat(path).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    # A partition has no queue of its own, its disk has; some filesystems have neither, and a bdi.
    for folder in (f"/sys/class/bdi/{name}", f"/sys/dev/block/{name}/queue", f"/sys/dev/block/{name}/../queue"):
        if (place := Path(folder) / "read_ahead_kb").exists():
            return max(mmap.PAGESIZE, int(place.read_text()) << 10)
    return _READ_AHEAD_BYTES


def _places(path: str) -> tuple[Mapping[str, TensorEntry], int, int]:
    """A file's tensors by name, and where the bytes of the first start and of the last stop."""
    with TensorFile(Path(path)) as file:
        return file.entries, min((entry.start for entry in file.entries.values()), default=file.n_bytes), file.n_bytes


def _pieces(buffer: memoryview) -> Iterator[tuple[int, memoryview]]:
    return ((first, buffer[first : first + PIECE_BYTES]) for first in range(0, len(buffer), PIECE_BYTES))


def _check_length(path: str, place: int, piece: memoryview, n_read: int | None) -> None:
    if n_read != len(piece):
        raise MeasurementError(
            f"{path}: expected {len(piece)} bytes from byte {place} on, found {n_read}. The file was changed while it "
            "was read; run the plain command again"
        )


def _views(buffer: memoryview, entries: Mapping[str, TensorEntry], start: int) -> dict[str, Tensor]:
    return {name: _as_tensor(buffer[e.start - start : e.stop - start], e) for name, e in entries.items()}


def _as_tensor(data: memoryview, entry: TensorEntry) -> Tensor:
    """View bytes as a tensor, which keeps them."""
    dtype = TORCH_DTYPES[entry.spec.dtype]
    if not len(data):  # torch makes no tensor of an empty buffer
        return torch.empty(entry.spec.shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(entry.spec.shape)
