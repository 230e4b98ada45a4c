"""What a power cut may leave, worked out from a log, without root.

Goal: every image that a cut gives is one that the drive's promises allow, and every one they allow can be given.
Method: tiny random logs. Oracle: brute force, written without the code: go through all subsets of the writes that no
flush covers, byte by byte. Control: a drive that lies allows more, and a flush that waited beside a write does not
cover it.
"""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from anchorage.durability.logdisk import Operation
from anchorage.durability.replay import PAGE_BYTES, Cut, Replay, draw_cuts, pending_writes, pieces_of

N_PAGES = 4


def make_log(seed, n=7):
    """Writes of up to two pages at any offset of 512 bytes, flushes, some of them issued in one go."""
    draw, log = random.Random(seed), []
    while len(log) < n:
        together = draw.choice([1, 1, 1, 2, 3])
        done = len(log) + together
        for _ in range(together):
            if draw.random() < 0.3:
                log.append(Operation("flush", done))
            else:
                size = draw.choice([512, 4096, 8192])
                offset = draw.randrange(0, N_PAGES * PAGE_BYTES - size + 1, 512)
                log.append(Operation("write", done, offset, bytes([len(log) + 1]) * size))
    return log


def all_images(log, after, lies=False):
    """Every image that may be there: all subsets of what is not known to be flushed, in pieces within pages."""
    flushed = set()
    for at, flush in enumerate(log[:after]):
        if flush.kind == "flush" and flush.done <= after and not lies:
            flushed |= {i for i in range(at) if log[i].done <= at}
    pieces = []
    for i, write in enumerate(log[:after]):
        if write.kind == "write":
            for start in range(0, N_PAGES * PAGE_BYTES, PAGE_BYTES):
                low, high = max(start, write.offset), min(start + PAGE_BYTES, write.offset + len(write.data))
                if low < high:
                    pieces.append((i in flushed, low, high, write.data[0]))
    found = set()
    for kept in itertools.product([False, True], repeat=len(pieces)):
        if all(keep or not safe for keep, (safe, *_) in zip(kept, pieces, strict=True)):
            image = bytearray(N_PAGES * PAGE_BYTES)
            for keep, (_, low, high, value) in zip(kept, pieces, strict=True):
                if keep:
                    image[low:high] = bytes([value]) * (high - low)
            found.add(bytes(image))
    return found


def replayed(log, cuts):
    base = np.zeros(N_PAGES * PAGE_BYTES, np.uint8)
    for cut, digest, pages in Replay(base, log).images(cuts):
        image = bytearray(base.tobytes())
        for page, data in pages.items():
            image[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = data
        yield cut, digest, bytes(image)


@pytest.mark.parametrize("seed", range(30))
def test_every_image_drawn_is_allowed_and_equal_digests_mean_equal_images(seed):
    log = make_log(seed)
    cuts, capped = draw_cuts(log, 0, prefixes=100, samples=60, seed=seed)
    assert not capped
    assert {cut.after for cut in cuts if not cut.lost} == set(range(len(log) + 1))
    by_digest, allowed = {}, {after: all_images(log, after) for after in range(len(log) + 1)}
    for cut, digest, image in replayed(log, cuts):
        assert image in allowed[cut.after]
        assert by_digest.setdefault(digest, image) == image
    assert len(set(by_digest.values())) == len(by_digest)


@pytest.mark.parametrize("seed", range(10))
def test_every_image_allowed_can_be_given(seed):
    log = make_log(seed, n=5)
    for after in range(len(log) + 1):
        pieces = [piece for number in pending_writes(log, after) for piece in pieces_of(log, number)]
        subsets = itertools.chain.from_iterable(itertools.combinations(pieces, n) for n in range(len(pieces) + 1))
        cuts = [Cut(after, frozenset(lost)) for lost in subsets]
        assert {image for _, _, image in replayed(log, cuts)} == all_images(log, after)


def test_enough_samples_find_every_image_of_a_small_log():
    log = [Operation("write", i + 1, i * PAGE_BYTES, bytes([i + 1]) * PAGE_BYTES) for i in range(3)]
    cuts, _ = draw_cuts(log, 0, prefixes=9, samples=200, seed=1)
    assert {image for _, _, image in replayed(log, cuts)} == all_images(log, 3)


def test_a_flush_covers_only_what_had_completed_before_it_was_issued():
    apart = [Operation("write", 1, 0, b"a"), Operation("flush", 2)]
    together = [Operation("write", 2, 0, b"a"), Operation("flush", 2)]
    assert pending_writes(apart, 2) == []
    assert pending_writes(together, 2) == [0]
    assert pending_writes(apart, 1) == [0]


def test_a_flush_that_has_not_completed_covers_nothing():
    log = [Operation("write", 1, 0, b"a"), Operation("flush", 3), Operation("write", 3, 4096, b"b")]
    assert pending_writes(log, 2) == [0]
    assert pending_writes(log, 3) == [2]


@pytest.mark.parametrize("seed", range(10))
def test_a_lying_drive_allows_more(seed):
    log = [*make_log(seed, n=4), Operation("write", 9, 0, b"z" * 512), Operation("flush", 10)]
    log = [Operation(operation.kind, i + 1, operation.offset, operation.data) for i, operation in enumerate(log)]
    assert len(all_images(log, len(log))) == 1
    assert len(all_images(log, len(log), lies=True)) > 1
    assert pending_writes(log, len(log)) == []
    assert pending_writes(log, len(log), lies=True)
    cuts, _ = draw_cuts(log, 0, prefixes=100, samples=50, seed=seed, lies=True)
    allowed = {after: all_images(log, after, lies=True) for after in range(len(log) + 1)}
    assert all(image in allowed[cut.after] for cut, _, image in replayed(log, cuts))


def test_too_many_prefixes_are_capped_and_said_to_be():
    log = [Operation("write", i + 1, 0, bytes([i])) for i in range(50)]
    cuts, capped = draw_cuts(log, 10, prefixes=12, samples=0, seed=0)
    assert capped
    assert len(cuts) == 12
    assert (cuts[0].after, cuts[-1].after) == (10, 50)
    assert draw_cuts(log, 10, prefixes=12, samples=5, seed=3) == draw_cuts(log, 10, prefixes=12, samples=5, seed=3)
