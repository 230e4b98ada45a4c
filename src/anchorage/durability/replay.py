"""What a power cut can leave on a drive: from a log of writes and flushes to images. Pure: nothing is mounted here.

A cut comes after some number of operations were issued. Of the writes among them, those that a completed flush covers
are on the drive; of the others any may be, whole or in part: a drive promises no more than 4096 bytes at a time (many
promise 512, yet journals are written for drives that do better; Mohan et al., "CrashMonkey and ACE", OSDI'18, tear no
block either). A cut is thus a number of operations and a set of lost pieces. Where pieces overlap the later one wins.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from xxhash import xxh3_128_intdigest

from anchorage.durability.logdisk import Operation

PAGE_BYTES = 4096
Piece = tuple[int, int]  # number of the write, page of the drive


@dataclass(frozen=True)
class Cut:
    """A power cut: after ``after`` operations had been issued, with some pieces of them lost."""

    after: int
    lost: frozenset[Piece] = frozenset()


def pending_writes(operations: Sequence[Operation], after: int, *, lies: bool = False) -> list[int]:
    """Numbers of the writes that a cut may lose.

    Args:
        operations: the log.
        after: operations issued before the cut.
        lies: the drive ignores flushes: nothing is ever safe.
    """
    issued = range(min(after, len(operations)))
    # A flush counts once it has completed, and covers what had completed before it was issued.
    flushes = [i for i in issued if operations[i].kind == "flush" and operations[i].done <= after]
    last = -1 if lies or not flushes else flushes[-1]
    return [i for i in issued if operations[i].kind == "write" and operations[i].done > last]


def pieces_of(operations: Sequence[Operation], number: int) -> list[Piece]:
    """A write's pieces: one for each page it touches."""
    write = operations[number]
    first, last = write.offset // PAGE_BYTES, (write.offset + len(write.data) - 1) // PAGE_BYTES
    return [(number, page) for page in range(first, last + 1)]


def draw_cuts(
    operations: Sequence[Operation], start: int, *, prefixes: int, samples: int, seed: int, lies: bool = False
) -> tuple[list[Cut], bool]:
    """Choose cuts to look at: every prefix of the log, and seeded samples of what else it allows.

    Args:
        operations: the log.
        start: no cut comes before so many operations.
        prefixes: at most so many prefixes; where there are more, a seeded choice with the first and the last.
        samples: at most so many cuts that lose something.
        seed: of the choice.
        lies: the drive ignores flushes.

    Returns:
        Distinct cuts in the order of the log, and whether there were more prefixes than wanted.
    """
    draw = random.Random(seed)
    ends = list(range(start, len(operations) + 1))
    capped = len(ends) > prefixes
    kept = sorted({ends[0], ends[-1], *draw.sample(ends, prefixes - 2)}) if capped else ends
    cuts = {Cut(after) for after in kept}
    # Just before a flush is issued the most is at stake.
    fullest = [end for end in ends if end == len(operations) or operations[end].kind == "flush"]
    wanted = len(cuts) + samples
    for attempt in range(6 * samples):
        if len(cuts) >= wanted:
            break
        after = draw.choice(fullest if attempt % 2 else ends)
        if pending := pending_writes(operations, after, lies=lies):
            lose = draw.choice(_WAYS_OF_A_LIE if lies else _WAYS)
            cuts.add(Cut(after, frozenset(lose(draw, [pieces_of(operations, number) for number in pending]))))
    return sorted(cuts, key=lambda cut: (cut.after, sorted(cut.lost))), capped


_Lose = Callable[[random.Random, list[list[Piece]]], Iterable[Piece]]


def _flat(writes: Iterable[list[Piece]]) -> list[Piece]:
    return [piece for write in writes for piece in write]


def _lose_some(draw: random.Random, writes: list[list[Piece]]) -> Iterable[Piece]:
    return _flat(write for write in writes if draw.random() < 0.5)


def _lose_pieces(draw: random.Random, writes: list[list[Piece]]) -> Iterable[Piece]:
    return (piece for piece in _flat(writes) if draw.random() < 0.5)


def _lose_one(draw: random.Random, writes: list[list[Piece]]) -> Iterable[Piece]:
    return draw.choice(writes)


def _lose_one_piece(draw: random.Random, writes: list[list[Piece]]) -> Iterable[Piece]:
    return [draw.choice(_flat(writes))]


def _keep_one(draw: random.Random, writes: list[list[Piece]]) -> Iterable[Piece]:
    kept = draw.randrange(len(writes))
    return _flat(write for i, write in enumerate(writes) if i != kept)


def _lose_last(draw: random.Random, writes: list[list[Piece]]) -> Iterable[Piece]:
    return _flat(writes[draw.randrange(len(writes)) :])


_WAYS: list[_Lose] = [_lose_some, _lose_pieces, _lose_one, _lose_one_piece, _keep_one, _lose_last]
# A drive that lies for long and then loses a random half leaves nothing to mount; its cache mostly drains in order.
_WAYS_OF_A_LIE: list[_Lose] = [_lose_last, _lose_last, _lose_one, _lose_one_piece]


class Replay:
    """Gives the image that each cut leaves, as the pages that differ from the image the log began with.

    Args:
        base: the image before the first operation, as bytes, [image size].
        operations: the log.
    """

    def __init__(self, base: np.ndarray, operations: Sequence[Operation]) -> None:
        self._base, self._operations = base, operations
        self._writes: dict[int, list[int]] = {}
        for number, operation in enumerate(operations):
            if operation.kind == "write":
                for _, page in pieces_of(operations, number):
                    self._writes.setdefault(page, []).append(number)

    def images(self, cuts: Iterable[Cut]) -> Iterator[tuple[Cut, int, dict[int, bytes]]]:
        """Go through cuts in the order of the log.

        Args:
            cuts: as :func:`draw_cuts` orders them.

        Returns:
            For each: the cut, the image's digest, and its pages by number, as far as something was ever written there.
        """
        pages: dict[int, bytes] = {}
        digest = done = 0
        for cut in cuts:
            assert cut.after >= done
            touched = {
                page
                for number in range(done, cut.after)
                if self._operations[number].kind == "write"
                for _, page in pieces_of(self._operations, number)
            }
            done = cut.after
            digest ^= self._change(pages, {page: self._page(page, Cut(done)) for page in touched})
            if not cut.lost:
                yield cut, digest, dict(pages)
                continue
            changed = dict(pages)
            lost = {page: self._page(page, cut) for page in {page for _, page in cut.lost}}
            yield cut, digest ^ self._change(changed, lost), changed

    def _change(self, pages: dict[int, bytes], new: dict[int, bytes]) -> int:
        """Put new pages in; returns what the digest of all pages, an exclusive or of theirs, changes by."""
        change = 0
        for page, data in new.items():
            change ^= _digest(page, pages[page] if page in pages else self._before(page)) ^ _digest(page, data)
            pages[page] = data
        return change

    def _before(self, page: int) -> bytes:
        return self._base[page * PAGE_BYTES : (page + 1) * PAGE_BYTES].tobytes()

    def _page(self, page: int, cut: Cut) -> bytes:
        """A page after a cut: the newest write that fills it, and what came later on top."""
        numbers: list[int] = []
        for number in reversed(self._writes[page]):
            if number >= cut.after or (number, page) in cut.lost:
                continue
            numbers.append(number)
            start = page * PAGE_BYTES - self._operations[number].offset
            if start >= 0 and start + PAGE_BYTES <= len(self._operations[number].data):
                break
        data = bytearray(self._before(page))
        for number in reversed(numbers):
            write = self._operations[number]
            start = page * PAGE_BYTES - write.offset
            part = write.data[max(start, 0) : start + PAGE_BYTES]
            data[max(-start, 0) : max(-start, 0) + len(part)] = part
        return bytes(data)


def _digest(page: int, data: bytes) -> int:
    return xxh3_128_intdigest(data, seed=page)
