"""Files changed at random, given to the readers.

Goal: whatever a file holds, reading it gives the values that went in or an IntegrityError: no other error, no hang, no
memory beyond the file's size and what a header may take. Method: Hypothesis changes a good shard's header as JSON, its
metadata, its bytes, and a manifest whose digests are made right again; the cache was opened before, so that a change
of size reaches the shard's reader too. Oracle: the values that went in. Controls: the unchanged file is read; the
changes do reach every tensor and fact; one that leads to other values would be seen.

The examples are the same every time; CONTRIBUTING.md says how to look for new ones.
"""

from __future__ import annotations

import copy
import json
import signal
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import anchorage
from anchorage.digest import canonical_json, digest_bytes
from anchorage.errors import AnchorageError, IntegrityError
from anchorage.store import names
from anchorage.store.format import ShardBuffer, TierShape, shard_metadata
from anchorage.store.manifest import read_manifest, read_records
from anchorage.store.shardfile import ShardFile, check_rows
from stores import SITES, build_store

MANY = settings(max_examples=3 * settings().max_examples)
# Of parsing the largest header; a file takes its own size on top.
HEADER_MEMORY_BYTES = 64 << 20


def check_message(error):
    """Any terminal and log takes it, and it says file and remedy."""
    assert str(error).isprintable()
    assert str(error.file) in str(error)
    assert error.remedy in str(error)


class Target:
    """A cache of two tiers in one shard each, opened; its files are replaced and read."""

    def __init__(self, root):
        self.store = build_store(root, n_rows=6, tier_rows={"tokens": 6, "pooled": 6})
        self.cache = anchorage.open_cache(self.store.cache)
        self.path = self.store.cache / names.published_shard("tokens", 0, 0)
        self.good = self.path.read_bytes()
        self.path.unlink()  # staging keeps its own bytes
        self.manifest = self.store.cache / names.MANIFEST
        self.stated = self.manifest.read_bytes()

    def read(self, data):
        """Put bytes in the shard's place and read all of it: None where it is refused, else whether all is right."""
        self.cache.close()
        self.path.write_bytes(data)
        tracemalloc.start()
        try:
            return [self.is_right(site) for site in SITES] + [self.are_right_tokens()]
        except IntegrityError as error:
            check_message(error)
            return None
        finally:
            peak_bytes = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak_bytes < HEADER_MEMORY_BYTES + 4 * len(data)

    def is_right(self, site):
        return torch.equal(self.cache.read(site, tier="tokens"), self.store.values["tokens", site])

    def are_right_tokens(self):
        return np.array_equal(self.cache.tokens().numpy(), self.store.token_ids)

    def check(self, data):
        found = self.read(data)
        assert found is None or all(found), found
        try:  # and with nothing expected of it
            shard = ShardFile(self.path, {})
        except IntegrityError:
            return
        with shard.file:
            rows = range(*shard.metadata["rows"])
            for name in [*shard.metadata["sites"], "tokens"]:
                try:
                    check_rows(self.path, name, *shard.read(name, 0, len(rows)))
                except IntegrityError:
                    continue


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    def stop(*_):
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, stop)
    yield Target(tmp_path_factory.mktemp("fuzz"))
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def end_if_it_hangs(target):
    signal.alarm(1800 if settings().max_examples > 1000 else 300)
    yield
    signal.alarm(0)


def split(shard):
    stop = 8 + int.from_bytes(shard[:8], "little")
    header = json.loads(shard[8:stop])
    return header | {"__metadata__": json.loads(header["__metadata__"]["anchorage"])}, shard[stop:]


def join(header, data):
    """A shard of a header; where its metadata is an object, it becomes the text that the format wants."""
    if isinstance(header, dict) and "__metadata__" in header:
        header = header | {"__metadata__": {"anchorage": json.dumps(header["__metadata__"])}}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def places(value, above=()):
    """Paths of all nodes below a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, node in inner:
        yield (*above, key)
        yield from places(node, (*above, key))


def node_at(value, place):
    for key in place:
        value = value[key]
    return value


NUMBERS = st.integers(-3, 100) | st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63), 10**400])
WORDS = st.sampled_from(
    [*SITES, "tokens", "row_digests", "offsets", "F16", "BF16", "F32", "U64", "U8", "mean", "padded"]
)
LEAVES = st.none() | st.booleans() | NUMBERS | st.floats() | WORDS | st.text(st.characters(), max_size=5)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=3))


@st.composite
def changes(draw, kinds=("replace", "copy", "remove", "rename", "swap", "add", "nudge", "nest")):
    """A few changes of a JSON value: each a kind, two places (as fractions of all) and a value to put there."""
    fraction = st.floats(0, 1, exclude_max=True)
    change = st.tuples(st.sampled_from(kinds), fraction, fraction, VALUES)
    return draw(st.lists(change, min_size=1, max_size=3))


def apply(value, edits):
    value = copy.deepcopy(value)
    for kind, first, second, new in edits:
        known = list(places(value))
        if not known:
            break
        *above, key = known[int(first * len(known))]
        other = known[int(second * len(known))]
        parent = node_at(value, above)
        if kind == "replace":
            parent[key] = new
        elif kind == "copy":
            parent[key] = copy.deepcopy(node_at(value, other))
        elif kind == "remove":
            del parent[key]
        elif kind == "rename" and isinstance(parent, dict):
            parent[str(other[-1])] = parent.pop(key)
        elif (
            kind == "swap"
            and other[: len(above) + 1] != (*above, key) != other
            and (*above, key)[: len(other)] != other
        ):
            there = node_at(value, other[:-1])
            parent[key], there[other[-1]] = there[other[-1]], parent[key]
        elif kind == "add" and isinstance(parent, dict):
            parent[str(new)[:20]] = copy.deepcopy(parent[key])
        elif kind == "add":
            parent.insert(key, new)
        elif kind == "nudge" and type(parent[key]) is int:
            parent[key] += 1 if second < 0.5 else -1
        elif kind == "nest":
            depth = int(second * 1100)
            parent[key] = json.loads("[" * depth + "]" * depth) if 0 < depth < 500 else [parent[key]]
    return value


@MANY
@given(changes())
def test_a_header_changed_as_json(target, edits):
    header, data = split(target.good)
    target.check(join(apply(header, edits), data))


@MANY
@given(changes())
def test_metadata_changed_as_json(target, edits):
    header, data = split(target.good)
    changed = apply(header["__metadata__"], edits)
    target.check(join(header | {"__metadata__": changed}, data))


@MANY
@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 7)), min_size=1, max_size=6))
def test_flipped_bits(target, flips):
    data = bytearray(target.good)
    for offset, bit in flips:
        data[offset % len(data)] ^= 1 << bit
    target.check(bytes(data))


@MANY
@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**9), st.binary(max_size=40), st.integers(0, 5))
@example(0, 0, 0, b"", 4)
@example(7, 7, 0, b"", 4)
def test_cut_spliced_and_lengthened_files(target, start, stop, to, extra, kind):
    good = target.good
    start, stop = sorted((start % (len(good) + 1), stop % (len(good) + 1)))
    to %= len(good) + 1
    piece = good[start:stop]
    data = (
        good[:start] + good[stop:],
        good[:start] + extra + good[stop:],
        good[:to] + piece + good[to:],
        good[:to] + piece + good[to + len(piece) :],
        good[:start],
        good + extra,
    )[kind]
    target.check(data)


@given(st.binary(max_size=300))
@example(b"")
@example(b"{}")
@example(b'{"__metadata__":{"anchorage":"' + b"[" * 50_000 + b'"}}')
def test_random_headers_and_files(target, text):
    target.check(text)
    target.check(len(text).to_bytes(8, "little") + text + b"\0" * 64)


@MANY
@given(changes(), st.booleans())
def test_a_manifest_changed_as_json_with_its_digests_made_right(target, edits, keep_identity):
    """Questions about sites that a changed identity does not name are answered by an AnchorageError."""
    target.path.write_bytes(target.good)
    head, *lines = (json.loads(line) for line in target.stated.splitlines())
    changed = apply([{} if keep_identity else head["identity"], *lines], edits)
    identity, *lines = [head["identity"], *changed[1:]] if keep_identity else changed or [{}]
    body = "".join(json.dumps(line) + "\n" for line in lines).encode()
    try:
        key = digest_bytes(canonical_json(identity).encode())
    except (ValueError, RecursionError):
        key = head["key"]
    head |= {"identity": identity, "key": key, "n_shards": len(lines), "shards_xxh3_128": digest_bytes(body)}
    target.manifest.write_bytes(json.dumps(head).encode() + b"\n" + body)
    try:
        with anchorage.open_cache(target.store.cache) as cache:
            for site in SITES:
                value = cache.read(site, tier="tokens")
                assert torch.equal(value, target.store.values["tokens", site][: len(value)])
    except IntegrityError as error:
        check_message(error)
    except AnchorageError as error:
        assert "tier" in str(error)  # noqa: PT017
    (target.store.root / "journal").write_bytes(body)
    assert len(read_records(target.store.root / "journal")) <= len(lines)


@given(st.binary(max_size=200))
def test_random_manifests(target, text):
    path = target.store.root / "random"
    path.write_bytes(text)
    with pytest.raises(IntegrityError):
        read_manifest(path)
    assert read_records(path) == []


@given(changes())
def test_a_padded_shard_changed_as_json(target, edits):
    path = target.store.root / "padded"
    values = build_padded(path)
    header, data = split(path.read_bytes())
    for changed in (header, apply(header, edits)):  # the first is the control
        path.write_bytes(join(changed, data))
        try:
            shard = ShardFile(path, {"key": "k", "rows": [0, 3], "sites": ["embed"], "layout": "padded"})
            with shard.file:
                found, digests = shard.read("embed", 0, 3)
                check_rows(path, "embed", found, digests)
        except IntegrityError:
            assert changed is not header
            continue
        assert [bytes(row) for row in found] == [value.numpy().tobytes() for value in values]


def build_padded(path):
    shape = TierShape("all", {"embed": 2}, "none", 4, "float32", "uint16", padded=True)
    buffer, lengths = ShardBuffer(shape, 3), [2, 4, 1]
    values = [torch.arange(length * 2, dtype=torch.float32).reshape(length, 2) + length for length in lengths]
    buffer.put_tokens(np.arange(12, dtype=np.uint16).reshape(3, 4), 0, lengths)
    buffer.rows_of("embed", slice(0, 3)).copy_(torch.cat(values))
    buffer.seal("embed", slice(0, 3))
    with open(path, "wb") as file:
        buffer.write(file, 3, shard_metadata(shape, key="k", shard=0, rows=range(3), tokens_digest="d"))
    return values


def test_the_unchanged_shard_is_read_and_other_values_would_be_seen(target):
    assert target.read(target.good) == [True] * 4
    header, data = split(target.good)
    assert target.read(join(header, data)) == [True] * 4  # as the changed ones are written
    assert target.read(target.good[:-1]) is None
    target.store.token_ids += 1
    assert target.read(target.good) == [True] * 3 + [False]
    target.store.token_ids -= 1


def test_the_changes_reach_all_of_a_header(target):
    header, _ = split(target.good)
    known = list(places(header))
    assert {("embed", "shape", 0), ("tokens", "dtype"), ("__metadata__", "rows", 1)} <= set(known)
    for number, place in enumerate(known):
        changed = apply(header, [("replace", (number + 0.5) / len(known), 0.0, "changed")])
        assert node_at(changed, place) == "changed"
