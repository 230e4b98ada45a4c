"""Files that lie: pickles that would run code, and shards changed into what no writer makes. All are small.

A payload only makes an empty file, so that its run shows.
"""

from __future__ import annotations

import copy
import json
import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from anchorage.digest import digest_bytes
from anchorage.store.format import ShardBuffer, TierShape, shard_metadata

SITES = ("embed", "block.0")
_N_ROWS, _SEQ_LEN, _WIDTH = 4, 8, 16
Header = dict[str, Any]


class _Call:
    """Pickled, it says: to make this object again, call that function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def write_pickles(folder: Path) -> dict[str, tuple[str, Path]]:
    """Write malicious .pt files, in the old format and hidden in the zip archive that ``torch.save`` makes.

    Returns:
        By the file's name: a sentence of what it would do, and the path of the file that its payload makes.
    """
    made = {}
    for name, what in {
        "open.pt": "opens a file for writing as its object is built",
        "system.pt": "calls os.system",
        "exec.pt": "calls builtins.exec on source text",
        "hidden.pt": "hides the call beside real tensors in a zip archive",
    }.items():
        ran = folder / f"{name}.ran"
        payload = {
            "open.pt": _Call(open, str(ran), "w"),
            "system.pt": _Call(os.system, f": > {shlex.quote(str(ran))}"),
        }.get(name, _Call(exec, f"open({str(ran)!r}, 'w').close()"))
        content = {"weight": torch.ones(4, 4), "bias": payload} if name == "hidden.pt" else payload
        torch.save(content, folder / name, _use_new_zipfile_serialization=name == "hidden.pt")
        made[name] = what, ran
    return made


def build_shard(path: Path, key: str) -> None:
    """Write a small shard by the store's own writer: two sites of four rows of eight tokens."""
    shape = TierShape("residual", dict.fromkeys(SITES, _WIDTH), "none", _SEQ_LEN, "float16", "uint16")
    tokens = np.arange(_N_ROWS * _SEQ_LEN, dtype=np.uint16).reshape(_N_ROWS, _SEQ_LEN)
    buffer, rows = ShardBuffer(shape, _N_ROWS), slice(0, _N_ROWS)
    buffer.put_tokens(tokens, 0)
    for number, site in enumerate(SITES):
        values = torch.arange(_N_ROWS * _SEQ_LEN * _WIDTH).reshape(_N_ROWS, _SEQ_LEN, _WIDTH) + number
        buffer.rows_of(site, rows).copy_(values)
        buffer.seal(site, rows)
    digest = digest_bytes(tokens.tobytes())
    metadata = shard_metadata(shape, key=key, shard=0, rows=range(_N_ROWS), tokens_digest=digest)
    with open(path, "wb") as file:
        buffer.write(file, _N_ROWS, metadata)


def split_shard(shard: bytes) -> tuple[Header, bytes]:
    """A shard's header and the bytes of its tensors."""
    stop = 8 + int.from_bytes(shard[:8], "little")
    return json.loads(shard[8:stop]), shard[stop:]


def join_shard(header: Header | bytes, data: bytes) -> bytes:
    """The opposite of :func:`split_shard`, whatever the header says."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def _edit(name: str, **fields: Any) -> Callable[[bytes], bytes]:
    """Change fields of a tensor in the header; a function is given the present value."""

    def make(shard: bytes) -> bytes:
        header, data = split_shard(shard)
        for field, value in fields.items():
            header[name][field] = value(header[name][field]) if callable(value) else value
        return join_shard(header, data)

    return make


def _edit_header(change: Callable[[Header], object]) -> Callable[[bytes], bytes]:
    """Change the header as a whole, in place."""

    def make(shard: bytes) -> bytes:
        header, data = split_shard(shard)
        header = copy.deepcopy(header)
        change(header)
        return join_shard(header, data)

    return make


def _edit_metadata(**fields: Any) -> Callable[[bytes], bytes]:
    """Change facts in the metadata."""

    def change(header: Header) -> None:
        facts = json.loads(header["__metadata__"]["anchorage"])
        header["__metadata__"]["anchorage"] = json.dumps(facts | fields)

    return _edit_header(change)


def _edit_text(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    """Change the header's text, where JSON's own writer would not write it so."""

    def make(shard: bytes) -> bytes:
        header, data = split_shard(shard)
        text = json.dumps(header).encode()
        assert old in text
        return join_shard(text.replace(old, new, 1), data)

    return make


def _set_length(length: int) -> Callable[[bytes], bytes]:
    return lambda shard: length.to_bytes(8, "little") + shard[8:]


def _exchange(header: Header) -> None:
    header["embed"], header["block.0"] = header["block.0"], header["embed"]


def _open_gap(shard: bytes) -> bytes:
    header, data = split_shard(shard)
    header["block.0"]["data_offsets"] = [offset + 8 for offset in header["block.0"]["data_offsets"]]
    start = header["block.0"]["data_offsets"][0]
    return join_shard(header, data[: start - 8] + b"hidden!!" + data[start - 8 :])


def _flip_last_bit(shard: bytes) -> bytes:
    return shard[:-1] + bytes([shard[-1] ^ 1])


_SHAPE = f'"shape": [{_N_ROWS}, {_SEQ_LEN}, {_WIDTH}]'.encode()

# What a lie says, and the function that tells it of a shard's bytes. Those of the header, then whole files.
HEADER_LIES: Mapping[str, tuple[str, Callable[[bytes], bytes]]] = {
    "past-end": ("offsets past the end of the file", _edit("block.0", data_offsets=lambda at: [at[0], at[1] + 2])),
    "overlap": ("two tensors share their bytes", _edit_header(lambda h: h["block.0"].update(h["embed"]))),
    "gap": ("bytes that belong to no tensor lie between two", _open_gap),
    "backwards": ("offsets that end before they begin", _edit("embed", data_offsets=lambda at: at[::-1])),
    "length-huge": ("a header of 2^63 bytes", _set_length(1 << 63)),
    "length-past-end": ("a header longer than the file", _set_length(100_000)),
    "length-zero": ("a header of no bytes", _set_length(0)),
    "dtype-wider": ("a dtype of more bytes than the tensor has", _edit("embed", dtype="F32")),
    "dtype-as-wide": ("another dtype of as many bytes", _edit("embed", dtype="BF16")),
    "dtype-unknown": ("a dtype that does not exist", _edit("embed", dtype="PICKLE")),
    "dtype-list": ("a list as dtype", _edit("embed", dtype=["F16"])),
    "shape-negative": ("a negative shape", _edit("embed", shape=[-_N_ROWS, -_SEQ_LEN, _WIDTH])),
    "shape-fraction": ("a shape of fractions", _edit_text(_SHAPE, b'"shape": [0.5, 64, 16]')),
    "shape-float": ("a shape of whole floats", _edit_text(_SHAPE, b'"shape": [4.0, 8.0, 16.0]')),
    "shape-bool": ("true as a size", _edit("embed", shape=[True, _N_ROWS * _SEQ_LEN, _WIDTH])),
    "shape-larger": ("a shape that does not fit the offsets", _edit("embed", shape=[_N_ROWS + 1, _SEQ_LEN, _WIDTH])),
    "shape-fewer-rows": ("a shape of fewer rows and as many bytes", _edit("embed", shape=[2, 2 * _SEQ_LEN, _WIDTH])),
    "shape-flat": ("a shape of no dimension", _edit("embed", shape=[])),
    "shape-huge": ("sizes whose product no integer register holds", _edit("embed", shape=[1 << 62, 1 << 62, 1 << 62])),
    "integer-huge": ("an integer of 5,000 digits", _edit_text(_SHAPE, b'"shape": [%s]' % (b"9" * 5000))),
    "not-a-number": ("NaN as a size", _edit_text(_SHAPE, b'"shape": [NaN, 8, 16]')),
    "names-twice": ("two tensors of one name", _edit_text(b'"block.0": {"dtype"', b'"embed": {"dtype"')),
    "names-exchanged": ("two sites' names exchanged", _edit_header(_exchange)),
    "not-json": ("a header that is not JSON", lambda shard: join_shard(b"import os", split_shard(shard)[1])),
    "not-utf8": ("a header that is not UTF-8", _edit_text(b'"embed": {', b'"\xff\xfe": {')),
    "nested": ("JSON nested 100,000 deep", lambda shard: join_shard(b'{"a":' + b"[" * 100_000, b"")),
    "metadata-missing": ("no metadata", _edit_header(lambda h: h.pop("__metadata__"))),
    "metadata-key": ("a second key in the metadata", _edit_header(lambda h: h["__metadata__"].update(format="pt"))),
    "metadata-format": ("metadata of another format", _edit_metadata(format="anchorage-shard-0")),
    "metadata-capture": ("metadata of another capture key", _edit_metadata(key="0" * 32)),
    "metadata-rows": ("more rows in the metadata than in the tensors", _edit_metadata(rows=[0, _N_ROWS + 1])),
    "metadata-sites": ("a site in the metadata that has no tensor", _edit_metadata(sites=[*SITES, "block.1"])),
    "tensor-missing": ("no row digests", _edit_header(lambda h: h.pop("row_digests"))),
}
FILE_LIES: Mapping[str, tuple[str, Callable[[bytes], bytes]]] = {
    "empty": ("an empty file", lambda shard: b""),
    "seven-bytes": ("a file too short for a header's length", lambda shard: shard[:7]),
    "truncated": ("a shard that lacks its last byte", lambda shard: shard[:-1]),
    "half": ("the first half of a shard", lambda shard: shard[: len(shard) // 2]),
    "longer": ("a shard and one byte more", lambda shard: shard + b"\0"),
    "bit-flipped": ("a shard with one bit of one value flipped", _flip_last_bit),
    "zeros": ("zeros as long as a shard", lambda shard: bytes(len(shard))),
    "weights": ("an ordinary safetensors file of weights", lambda shard: save({"weight": torch.ones(4, 4)})),
}
