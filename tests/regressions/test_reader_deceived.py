"""Files that got past the readers, or made them end in an error of Python's own, or not at all; each stays refused.

Goal: none comes back. Method: the file of each, as it was found by reading the readers or by fuzzing them
(tests/unit/test_header_fuzz.py). Controls: the same file without its lie is read.
"""

from __future__ import annotations

import json
import os
import signal
import tracemalloc

import numpy as np
import pytest
import torch

import anchorage
from anchorage.digest import canonical_json, digest_bytes
from anchorage.errors import IntegrityError
from anchorage.store import names
from anchorage.store.manifest import read_manifest, read_records
from anchorage.store.shardfile import ShardFile
from anchorage.store.verify import repair, verify_cache
from anchorage.tensorfile import TensorFile
from stores import SITES, build_store


@pytest.fixture(autouse=True)
def end_if_it_hangs():
    def stop(*_):
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def split(path):
    """A shard's header, its metadata and its tensor bytes."""
    data = path.read_bytes()
    stop = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:stop])
    return header, json.loads(header.pop("__metadata__")["anchorage"]), data[stop:]


def join(path, header, metadata, data):
    text = metadata if isinstance(metadata, str) else json.dumps(metadata)
    write(path, json.dumps({"__metadata__": {"anchorage": text}} | header).encode(), data)


def write(path, text, data):
    path.unlink(missing_ok=True)  # staging keeps its own bytes
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def sign(path, head, lines):
    """Write a manifest whose digests are right, whatever it says."""
    body = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines).encode()
    text = head["identity"] if isinstance(head["identity"], str) else canonical_json(head["identity"])
    signed = head | {"key": digest_bytes(text.encode("utf-8", "surrogatepass")), "n_shards": len(lines)}
    signed["shards_xxh3_128"] = digest_bytes(body)
    path.write_bytes(json.dumps(signed).encode() + b"\n" + body)


def read_signed(path):
    head, *lines = (json.loads(line) for line in path.read_text().splitlines())
    return head, lines


def build(tmp_path):
    store = build_store(tmp_path, n_rows=8, tier_rows={"tokens": 8})
    return store, store.cache / names.published_shard("tokens", 0, 0)


def read_all(store):
    with anchorage.open_cache(store.cache) as cache:
        return [cache.read(site) for site in SITES], cache.tokens()


def reread(store, change):
    """Open the cache, change the shard's header, metadata or bytes, read all."""
    path = store.cache / names.published_shard("tokens", 0, 0)
    with anchorage.open_cache(store.cache) as cache:
        header, metadata, data = split(path)
        join(path, header, metadata, data)
        _ = [cache.read(site) for site in SITES], cache.tokens()  # control: written anew without a lie
        cache.close()
        data = change(header, metadata, data) or data
        join(path, header, metadata, data)
        return [cache.read(site) for site in SITES], cache.tokens()


def rename_consistently(header, metadata, data):
    # The digests agree: only the manifest's order of sites tells. Another site's values were given.
    a, b = SITES[0], SITES[2]
    header[a], header[b] = header[b], header[a]
    metadata["sites"] = [b, SITES[1], a]


def shorten_first_dimension(header, metadata, data):
    rows, seq_len, width = header["embed"]["shape"]
    header["embed"]["shape"] = [rows // 2, seq_len * 2, width]  # AssertionError


def flatten_shape(header, metadata, data):
    header["embed"]["shape"] = [int(np.prod(header["embed"]["shape"]))]


def make_tokens_wide(header, metadata, data):
    rows, seq_len = header["tokens"]["shape"]
    header["tokens"] |= {"dtype": "U64", "shape": [rows, seq_len // 4]}  # KeyError of a dtype of 8 bytes


def make_site_bfloat16(header, metadata, data):
    header["embed"]["dtype"] = "BF16"


def name_sites_by_number(header, metadata, data):
    header["7"] = header.pop("embed")
    metadata["sites"][0] = 7


def name_a_site_twice(header, metadata, data):
    metadata["sites"][1] = metadata["sites"][0]


def add_a_fact(header, metadata, data):
    metadata["host"] = "elsewhere"


def make_rows_floats(header, metadata, data):
    metadata["rows"] = [0.0, 8.0]


def make_shard_false(header, metadata, data):
    metadata["shard"] = False


def drop_a_site(header, metadata, data):
    # Whole in itself: a shard of fewer sites.
    del header["block.0"]
    metadata["sites"].remove("block.0")
    rows = header["row_digests"]["shape"][1]
    header["row_digests"] = {"dtype": "U64", "shape": [3, rows], "data_offsets": [0, 24 * rows]}
    stop = 24 * rows
    for name in ("tokens", "embed", "attn.0"):
        size = header[name]["data_offsets"][1] - header[name]["data_offsets"][0]
        header[name]["data_offsets"] = [stop, stop + size]
        stop += size
    return data[:stop]


CHANGES = [
    rename_consistently,
    shorten_first_dimension,
    flatten_shape,
    make_tokens_wide,
    make_site_bfloat16,
    name_sites_by_number,
    name_a_site_twice,
    add_a_fact,
    make_rows_floats,
    make_shard_false,
    drop_a_site,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_shard_whose_header_agrees_with_itself_but_not_with_the_capture(tmp_path, change):
    store, _ = build(tmp_path)
    with pytest.raises(IntegrityError, match="make verify"):
        reread(store, change)


DEEP = 100_000
METADATA = {
    "nested": "[" * DEEP + "]" * DEEP,
    "nested as far as Python bears": '{"format":' + "[" * 900 + "]" * 900 + "}",
    "pairs": '[["format","anchorage-shard-1"]]',
    "not a number": '{"format":NaN}',
    "infinite": '{"format":1e999}',
    "half a pair": '{"format":"\\ud800"}',
    "many digits": '{"format":' + "9" * 5000 + "}",
    "a line break and a bell": '{"format":"\\n\\u0007"}',
    "long": '{"format":"' + "x" * 100_000 + '"}',
}


@pytest.mark.parametrize("text", METADATA.values(), ids=METADATA.keys())
def test_metadata_that_python_reads_or_stumbles_over(tmp_path, text):
    _, path = build(tmp_path)
    header, _, data = split(path)
    join(path, header, text, data)
    with pytest.raises(IntegrityError) as caught:
        ShardFile(path, {})
    message = str(caught.value)
    assert message.isprintable()  # any log takes it
    assert len(message) < 1500


HEADERS = {
    "nested": b'{"a":' + b"[" * DEEP + b"]" * DEEP + b"}",
    "UTF-16": '{"__metadata__":{"anchorage":"{}"}}'.encode("utf-16"),
    "not UTF-8": b'{"\xff":1}',
    "shape an object": b'{"__metadata__":{"anchorage":"{}"},"a":{"dtype":"U8","shape":{},"data_offsets":[0,1]}}',
    "two metadata": b'{"__metadata__":{"anchorage":"{}","format":"pt"}}',
    "dtype a list": b'{"__metadata__":{"anchorage":"{}"},"a":{"dtype":[],"shape":[1],"data_offsets":[0,1]}}',
}


@pytest.mark.parametrize("text", HEADERS.values(), ids=HEADERS.keys())
def test_headers_that_python_reads_or_stumbles_over(tmp_path, text):
    write(tmp_path / "a", text, b"\0")
    with pytest.raises(IntegrityError):
        TensorFile(tmp_path / "a")


def test_huge_headers_take_bounded_time_and_memory(tmp_path):
    # Names that occur twice were counted one by one for each; a product of a million huge numbers took as long.
    tensor = b'{"__metadata__":{"anchorage":"{}"},"a":{"dtype":"U8","data_offsets":[0,1],"shape":[%s]}}'
    twice = b"{" + b",".join(b'"%d":0' % (i // 2) for i in range(90_000)) + b"}"
    for text in (twice, tensor % b",".join([b"9" * 4000] * 250), tensor % b",".join([b"9"] * 500_000)):
        write(tmp_path / "a", text, b"\0")
        with pytest.raises(IntegrityError):
            TensorFile(tmp_path / "a")
    write(tmp_path / "a", tensor % b"1" + b" " * (2 << 20), b"\0")
    with pytest.raises(IntegrityError, match="header length"):
        TensorFile(tmp_path / "a")
    one = b'{"__metadata__":{"anchorage":"{}"},"a":{"dtype":"U64","data_offsets":[0,%d],"shape":[%d]}}'
    write(tmp_path / "a", one % (8 << 40, 1 << 40), b"\0")
    tracemalloc.start()
    with pytest.raises(IntegrityError):
        TensorFile(tmp_path / "a")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_what_is_no_regular_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name, said in (("pipe", "a named pipe"), ("folder", "a folder"), ("/dev/zero", "a device")):
        for read in (TensorFile, read_manifest):
            with pytest.raises(IntegrityError, match=said):
                read(tmp_path / name)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="loop"):
        TensorFile(tmp_path / "loop")
    with pytest.raises(IntegrityError, match="loop"):
        read_manifest(tmp_path / "loop")


def test_a_device_that_cannot_read_is_named_with_the_file(tmp_path, monkeypatch):
    _, path = build(tmp_path)
    with ShardFile(path, {}).file as file:

        def fail(*_):
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(IntegrityError, match=r"shard-0\.safetensors.*Input/output error"):
            file.read("embed")


IDENTITIES = {
    "not a number": '{"a":NaN}',
    "half a pair": '{"a":"\\ud800"}',
    "nested": '{"a":' + "[" * 400 + "]" * 400 + "}",
    "nested deeper than Python bears": '{"a":' + "[" * DEEP + "]" * DEEP + "}",
    "a list": "[]",
}


@pytest.mark.parametrize("text", IDENTITIES.values(), ids=IDENTITIES.keys())
def test_a_manifest_of_no_identity(tmp_path, text):
    path = tmp_path / "manifest.jsonl"
    path.write_text(f'{{"format":"{names.MANIFEST_FORMAT}","key":"","identity":{text}}}\n')
    with pytest.raises(IntegrityError, match="plain command"):
        read_manifest(path)


def drop_all_lines(head, lines):
    lines.clear()  # IndexError


def drop_the_first(head, lines):
    del lines[0]


def repeat_a_line(head, lines):
    lines.insert(1, lines[0])


def turn_round(head, lines):
    lines.reverse()


def overlap(head, lines):
    lines[1]["rows"][0] -= 1


def repeat_a_shard_number(head, lines):
    lines[1]["shard"] = lines[0]["shard"]


def name_a_file_twice(head, lines):
    lines[1]["tiers"]["few"] = lines[0]["tiers"]["few"]


def point_outside(head, lines):
    lines[0]["tiers"]["few"]["file"] = "few/../../precious"


def point_far_outside(head, lines):
    lines[0]["tiers"]["few"]["file"] = "../../etc/passwd"


def point_absolutely(head, lines):
    lines[0]["tiers"]["few"]["file"] = "/etc/passwd"


def point_through_the_tier(head, lines):
    lines[0]["tiers"][".."] = lines[0]["tiers"]["few"] | {"file": "../precious"}


def point_at_a_zero(head, lines):
    lines[0]["tiers"]["few"]["file"] = "few/a\0b"


def leave_a_hole_in_a_tier(head, lines):
    del lines[0]["tiers"]["few"]  # KeyError


def hold_no_rows(head, lines):
    lines[0]["tiers"]["few"]["n_rows"] = 0


def hold_too_many_rows(head, lines):
    lines[0]["tiers"]["few"]["n_rows"] = 9


def hold_half_a_byte(head, lines):
    lines[0]["tiers"]["few"]["bytes"] += 0.5


def count_by_text(head, lines):
    lines[0]["shard"] = "0"


def count_by_truth(head, lines):
    lines[0]["shard"] = False


def leave_out_tiers(head, lines):
    del head["identity"]["tiers"]  # KeyError


def forget_a_tier(head, lines):
    del head["identity"]["tiers"]["few"]


def store_in_int8(head, lines):
    head["identity"]["storage_dtype"] = "int8"


def make_rows_of_no_token(head, lines):
    head["identity"]["seq_len"] = 0


DECEITS = [
    drop_all_lines,
    drop_the_first,
    repeat_a_line,
    turn_round,
    overlap,
    repeat_a_shard_number,
    name_a_file_twice,
    point_outside,
    point_far_outside,
    point_absolutely,
    point_through_the_tier,
    point_at_a_zero,
    leave_a_hole_in_a_tier,
    hold_no_rows,
    hold_too_many_rows,
    hold_half_a_byte,
    count_by_text,
    count_by_truth,
    leave_out_tiers,
    forget_a_tier,
    store_in_int8,
    make_rows_of_no_token,
]


@pytest.mark.parametrize("deceive", DECEITS, ids=lambda deceive: deceive.__name__)
def test_a_manifest_with_right_digests_that_describes_no_cache(tmp_path, deceive):
    store = build_store(tmp_path)
    path = store.cache / names.MANIFEST
    head, lines = read_signed(path)
    sign(path, head, lines)
    read_all(store)  # control: signed anew without a deceit
    deceive(head, lines)
    sign(path, head, lines)
    with pytest.raises(IntegrityError, match=r"manifest\.jsonl.*plain command"):
        anchorage.open_cache(store.cache)


def test_verification_removes_nothing_outside_the_cache(tmp_path):
    # A manifest with right digests named a file of another size by a path out of the folder: repair removed it.
    store = build_store(tmp_path)
    precious = tmp_path / "precious"
    precious.write_text("not ours")
    path = store.cache / names.MANIFEST
    head, lines = read_signed(path)
    lines[0]["tiers"]["few"]["file"] = "few/../../precious"
    sign(path, head, lines)
    report = verify_cache(store.cache, store.part_lists, depth="full", log=store.lines.append)
    assert report["corrupt"] == [names.MANIFEST]
    repair(store.cache, store.staging, report=report, log=store.lines.append)
    assert precious.read_text() == "not ours"
    assert not path.exists()


def test_a_symbolic_link_in_a_shards_place(tmp_path):
    store, path = build(tmp_path)
    moved = tmp_path / "moved"
    path.rename(moved)
    path.symlink_to(moved)
    with pytest.raises(IntegrityError, match="found a symbolic link"):
        anchorage.open_cache(store.cache)
    report = verify_cache(store.cache, store.part_lists, depth="size", log=store.lines.append)
    assert report["corrupt"] == ["tokens/part-0-shard-0.safetensors"]
    repair(store.cache, store.staging, report=report, log=store.lines.append)
    assert moved.exists()  # the link is gone, not what it names
    assert not path.is_symlink()


def test_an_environment_with_a_line_separator_does_not_break_the_manifest(tmp_path):
    # JSON keeps U+2028 as it is, and Python's splitlines breaks a line there.
    store = build_store(tmp_path)
    path = store.cache / names.MANIFEST
    head, lines = read_signed(path)
    for line in lines:
        line["environment"] = {"device": "a\u2028b"}
    sign(path, head, [canonical_json(line) for line in lines])
    with anchorage.open_cache(store.cache) as cache:
        assert cache.environment(0) == {"device": "a\u2028b"}
        assert torch.equal(cache.read("embed", tier="tokens"), store.values["tokens", "embed"])


@pytest.mark.parametrize("line", ['{"shard":1e999}', "[" * DEEP, "[]", "7", '{"shard":NaN}', '{"shard":"\\ud800"}'])
def test_a_journal_line_that_python_stumbles_over_is_no_line(tmp_path, line):
    store, _ = build(tmp_path)
    journal = store.staging / names.journal(0)
    good = journal.read_text()
    full = json.dumps(json.loads(good) | {"shard": "SHARD"}).replace('"SHARD"', "1e999")
    journal.write_text(good + line + "\n" + full + "\n")
    assert [record.shard for record in read_records(journal)] == [0]
    assert store.build_part(0) == (1, 0)
