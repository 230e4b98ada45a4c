"""The safetensors container against the library's own reader, and against headers that lie.

Goal: what we write any reader opens; what is not whole, or says what cannot be, is refused. Method: build a file,
change its header, reopen. Oracle: the safetensors library.
"""

from __future__ import annotations

import contextlib
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from anchorage.errors import IntegrityError
from anchorage.tensorfile import TensorFile, TensorSpec, encode_header

SPECS = [TensorSpec("a", "U64", (2, 3)), TensorSpec("b", "F32", (3, 4)), TensorSpec("c", "U16", (5,))]


def build_file(path):
    header, entries = encode_header(SPECS, {"z": 1, "a": [2]})
    arrays = {"a": np.arange(6, dtype="<u8"), "b": np.arange(12, dtype="<f4"), "c": np.arange(5, dtype="<u2")}
    path.write_bytes(header + b"".join(arrays[spec.name].tobytes() for spec in SPECS))
    return arrays, entries


def header_of(path):
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_header(path, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_safetensors_opens_it_and_we_read_the_same(tmp_path):
    path = tmp_path / "a.safetensors"
    arrays, entries = build_file(path)
    loaded = load_file(path)
    with TensorFile(path) as file:
        assert file.metadata == {"z": 1, "a": [2]}
        for spec in SPECS:
            assert np.array_equal(loaded[spec.name].reshape(-1), arrays[spec.name])
            assert bytes(file.read(spec.name)) == arrays[spec.name].tobytes()
            assert entries[spec.name].start % 2 == 0
        assert bytes(file.read_rows("b", 1, 3)) == arrays["b"][4:12].tobytes()
        assert bytes(file.read_rows("b", 3, 3)) == b""


def test_the_same_tensors_give_the_same_bytes():
    assert encode_header(SPECS, {"z": 1, "a": 2})[0] == encode_header(SPECS, {"a": 2, "z": 1})[0]


@pytest.mark.parametrize("keep", [0, 7, 8, 40, -1])
def test_a_torn_file_is_refused(tmp_path, keep):
    path = tmp_path / "a.safetensors"
    build_file(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(IntegrityError):
        TensorFile(path)


def lie_past_end(h):
    h["c"]["data_offsets"][1] += 2


def lie_overlap(h):
    h["c"]["data_offsets"] = [0, 10]


def lie_gap(h):
    for name in ("b", "c"):
        h[name]["data_offsets"] = [offset + 8 for offset in h[name]["data_offsets"]]


def lie_dtype(h):
    h["b"]["dtype"] = "F16"


def lie_unknown_dtype(h):
    h["b"]["dtype"] = "PICKLE"


def lie_shape(h):
    h["b"]["shape"] = [4, 4]


def lie_negative(h):
    h["b"]["shape"] = [-3, -4]


def lie_text(h):
    h["b"]["data_offsets"] = ["0", "48"]


def lie_no_metadata(h):
    del h["__metadata__"]


def lie_missing_tensor(h):
    del h["b"]


LIES = [value for name, value in sorted(globals().items()) if name.startswith("lie_")]


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_a_header_that_lies_is_refused(tmp_path, lie):
    path = tmp_path / "a.safetensors"
    build_file(path)
    header, data = header_of(path)
    write_header(path, header, data)
    TensorFile(path).close()  # control: rewritten without a lie it opens
    lie(header)
    write_header(path, header, data)
    with pytest.raises(IntegrityError):
        TensorFile(path)


def test_duplicate_names_and_huge_headers_are_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    build_file(path)
    header, data = header_of(path)
    text = json.dumps(header)
    write_header(path, (text[:-1] + ', "a": ' + json.dumps(header["a"]) + "}").encode(), data)
    with pytest.raises(IntegrityError, match="twice"):
        TensorFile(path)
    path.write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    with pytest.raises(IntegrityError, match="header length"):
        TensorFile(path)


@given(st.binary(max_size=200))
def test_arbitrary_headers_raise_nothing_but_integrity_errors(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("fuzz") / "a"
    write_header(path, text, b"\0" * 16)
    with contextlib.suppress(IntegrityError):
        TensorFile(path).close()


def test_reading_past_a_file_cut_after_opening(tmp_path):
    path = tmp_path / "a.safetensors"
    build_file(path)
    file = TensorFile(path)
    with open(path, "r+b") as cut:
        cut.truncate(path.stat().st_size - 4)
    with pytest.raises(IntegrityError, match="end"):
        file.read("c")
