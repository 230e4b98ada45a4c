"""What an SSD does with writes: a small model of its pages, blocks, mapping table and garbage collection.

A page, once programmed, cannot be programmed again before its whole block is erased. So a write goes to the next empty
page, the mapping table follows it, and the page of the old version is stale. Where the last empty block is reached, the
closed block with the fewest valid pages is chosen (greedy), its valid pages are copied into the empty block, and it is
erased. Write amplification is pages programmed by pages the computer wrote.

Every drive here has been written full once, in order. Then files are deleted until ``fill`` of its logical pages hold
live data; what was deleted are large files, that fill whole blocks. With TRIM the drive is told, without it keeps
their pages as if they mattered. Then comes the load, first until the drive is in its steady state, then counted.

Not modelled: caches, parallel dies, separation of hot from cold data, wear levelling, compression. A real drive's
figures differ; which load costs more than which does not.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

PAGE_BYTES = 4096
BLOCK_PAGES = 128
N_BLOCKS = 256
FILE_PAGES = 16
LOADS = ["sequential", "random", "delete-then-write"]
FILLS = [0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0]
SPARE_FACTORS = [0.07, 0.25]
_WARM_UP, _COUNTED = 3, 3  # pages written before and while counting, by pages of the drive
_CHUNK_PAGES = 4096

COLUMNS = {
    "load": "sequential: live data overwritten in order, again and again; random: 4 KiB pages of it, each as likely; "
    "delete-then-write: any file of 64 KiB deleted, then one written where the filesystem has space, at random",
    "trim": "whether the drive is told of every deletion; else of none",
    "fill": "live data by logical size of the drive, a fraction",
    "spare_factor": "flash beyond the logical size, by all flash, a fraction",
    "block_pages": "pages of 4 KiB in a block",
    "n_blocks": "blocks of the drive",
    "host_pages": "pages that the computer wrote while counting",
    "flash_pages": "pages that the drive programmed for them",
    "erases": "blocks that the drive erased for them",
    "write_amplification": "flash_pages by host_pages",
    "analytic": "the same for a drive of endlessly many blocks, by calculation; empty where none is known",
}


@dataclass
class Geometry:
    """Sizes of a drive.

    Attributes:
        n_blocks: blocks of flash.
        block_pages: pages in a block.
        n_logical_blocks: the size that the computer sees, in blocks; at least two fewer than ``n_blocks``.
    """

    n_blocks: int
    block_pages: int
    n_logical_blocks: int

    @classmethod
    def with_spare(cls, spare_factor: float, *, n_blocks: int = N_BLOCKS, block_pages: int = BLOCK_PAGES) -> Geometry:
        """The drive whose flash beyond its logical size is nearest to ``spare_factor`` of all its flash."""
        return cls(n_blocks, block_pages, min(round(n_blocks * (1 - spare_factor)), n_blocks - 2))

    @property
    def n_logical_pages(self) -> int:
        return self.n_logical_blocks * self.block_pages

    @property
    def spare_factor(self) -> float:
        return 1 - self.n_logical_blocks / self.n_blocks


class Drive:
    """A page-mapped drive with greedy garbage collection.

    Attributes:
        host_pages: pages written by the computer so far.
        flash_pages: pages programmed so far, copies made by garbage collection included.
        erases: blocks erased so far.
        place: int64 [logical pages], the physical page of each logical page, -1: none.
        owner: int64 [physical pages], the logical page whose data lies there, -1: none, stale or empty.
        valid: int64 [blocks], pages of each block that hold data.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.block_pages, self.n_blocks = geometry.block_pages, geometry.n_blocks
        self.host_pages = self.flash_pages = self.erases = 0
        self.place = np.full(geometry.n_logical_pages, -1)
        self.owner = np.full(self.n_blocks * self.block_pages, -1)
        self.valid = np.zeros(self.n_blocks, dtype=np.int64)
        self._empty = list(range(self.n_blocks))
        self._open, self._next = self._empty.pop(), 0

    def write(self, pages: np.ndarray) -> None:
        """Write logical pages (int64 [n]), one after the other; the same may come more than once."""
        self.host_pages += len(pages)
        while len(pages):
            if self._next == self.block_pages:
                self._open_block()
            room = self.block_pages - self._next
            self._program(pages[:room])
            pages = pages[room:]

    def trim(self, pages: np.ndarray) -> None:
        """Forget logical pages (int64 [n], each once): their data need not be kept."""
        self._invalidate(self.place[pages])
        self.place[pages] = -1

    def _program(self, pages: np.ndarray) -> None:
        """Fill the open block's next pages; no more than it has room for."""
        slots = self._open * self.block_pages + self._next + np.arange(len(pages))
        before = self.place[pages]
        self.place[pages] = slots
        # Of a page that comes twice in one go one version stays, the other is stale at once.
        stays = self.place[pages] == slots
        self._invalidate(before[stays])
        self.owner[slots] = np.where(stays, pages, -1)
        self.valid[self._open] += np.count_nonzero(stays)
        self._next += len(pages)
        self.flash_pages += len(pages)

    def _invalidate(self, slots: np.ndarray) -> None:
        slots = slots[slots >= 0]
        self.owner[slots] = -1
        self.valid -= np.bincount(slots // self.block_pages, minlength=self.n_blocks)

    def _open_block(self) -> None:
        """Open an empty block; the last one only for the valid pages of a block that is erased then."""
        victim = None
        if len(self._empty) == 1:
            closed = self.valid.copy()
            closed[self._empty] = self.block_pages + 1
            victim = int(closed.argmin())
        self._open, self._next = self._empty.pop(), 0
        if victim is not None:
            kept = self.owner[victim * self.block_pages : (victim + 1) * self.block_pages]
            assert (kept < 0).any(), "no block has a stale page: the drive has no spare"
            self._program(kept[kept >= 0])
            self._empty.append(victim)
            self.erases += 1


def greedy_amplification(valid_fraction: float, block_units: int) -> float:
    """Write amplification of uniformly random overwrites under greedy collection, for endlessly many blocks.

    The steady state of the mean-field model (Van Houdt, "A mean field model for a class of garbage collection
    algorithms in flash-based solid state drives", SIGMETRICS 2013; Bux and Iliadis, "Performance of greedy garbage
    collection in flash-based solid-state drives", Performance Evaluation 67, 2010), solved here in closed form. Let
    x_j be the fraction of blocks with j valid of b units, and m the fewest that a block ever keeps. Each valid unit is
    as likely to be overwritten next, so blocks go from j to j - 1 in proportion to j x_j. None is collected above m:
    j x_j is the same number c for all j > m, and what arrives at m leaves by m x_m <= c, or is collected. With the
    sums over x_j (1) and j x_j (b times the valid fraction) this gives c, and the amplification is c by the valid
    fraction. For large blocks it tends to 1 / (1 - v), v = exp(-a (1 - v)), a = 1 / valid fraction, that is
    a / (a + W(-a exp(-a))) (Luojie and Kurkoski, "An improved analytic expression for write amplification in NAND
    flash", ICNC 2012; Desnoyers, "Analytic modeling of SSD write performance", SYSTOR 2012).

    Args:
        valid_fraction: valid units by all units of the closed blocks, above 0 and below 1.
        block_units: units written and overwritten as one, in a block.
    """
    b, above = block_units, 0.0  # above: the sum of 1 / j over m < j <= b
    for m in range(b - 1, -1, -1):
        above += 1 / (m + 1)
        c = (b * valid_fraction - m) / (b - m - m * above)
        at_m = 1 - c * above
        if c >= 0 and at_m >= 0 and m * at_m <= c:
            return c / valid_fraction
    raise AssertionError("some m fits every valid fraction")


def measure_amplification(
    load: str, *, trim: bool, fill: float, geometry: Geometry, seed: int
) -> dict[str, str | float]:
    """Run a load on one drive.

    Args:
        load: of :data:`LOADS`.
        trim: whether the drive is told of deletions.
        fill: live data by logical size; the nearest number of whole blocks is taken.
        geometry: the drive.
        seed: of the random choices.

    Returns:
        A row of ``flash.csv``, see :data:`COLUMNS`.
    """
    drive, n_pages = Drive(geometry), geometry.n_logical_pages
    n_live_blocks = max(round(fill * geometry.n_logical_blocks), 1)
    n_live = n_live_blocks * geometry.block_pages
    drive.write(np.arange(n_pages))
    if trim:
        drive.trim(np.arange(n_live, n_pages))
    steps = _LOADS[load](drive, n_live, trim, seed)
    n_drive = geometry.n_blocks * geometry.block_pages
    _run(drive, steps, _WARM_UP * n_drive)
    host, flash, erases = drive.host_pages, drive.flash_pages, drive.erases
    _run(drive, steps, _COUNTED * n_drive)
    host, flash, erases = drive.host_pages - host, drive.flash_pages - flash, drive.erases - erases
    return {
        "load": load,
        "trim": trim,
        "fill": n_live_blocks / geometry.n_logical_blocks,
        "spare_factor": geometry.spare_factor,
        "block_pages": geometry.block_pages,
        "n_blocks": geometry.n_blocks,
        "host_pages": host,
        "flash_pages": flash,
        "erases": erases,
        "write_amplification": flash / host,
        "analytic": _calculate(load, trim, n_live_blocks, geometry),
    }


def sweep_flash(*, seed: int, n_blocks: int = N_BLOCKS) -> pd.DataFrame:
    """Every load, with and without TRIM, at every fill and spare: ``flash.csv``, see :data:`COLUMNS`."""
    rows = [
        measure_amplification(load, trim=trim, fill=fill, geometry=geometry, seed=seed)
        for geometry in (Geometry.with_spare(spare, n_blocks=n_blocks) for spare in SPARE_FACTORS)
        for load in LOADS
        for trim in (True, False)
        for fill in FILLS
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _run(drive: Drive, steps: Iterator[None], n_pages: int) -> None:
    stop = drive.host_pages + n_pages
    while drive.host_pages < stop:
        next(steps)


def _overwrite_in_order(drive: Drive, n_live: int, trim: bool, seed: int) -> Iterator[None]:
    while True:
        drive.write(np.arange(n_live))
        yield


def _overwrite_at_random(drive: Drive, n_live: int, trim: bool, seed: int) -> Iterator[None]:
    generator = np.random.default_rng(seed)
    while True:
        drive.write(generator.integers(0, n_live, _CHUNK_PAGES))
        yield


def _delete_then_write(drive: Drive, n_live: int, trim: bool, seed: int) -> Iterator[None]:
    generator = random.Random(seed)
    extents = np.arange(len(drive.place)).reshape(-1, FILE_PAGES)
    live, free = list(range(n_live // FILE_PAGES)), list(range(n_live // FILE_PAGES, len(extents)))
    while True:
        file = generator.randrange(len(live))
        free.append(live[file])
        if trim:
            drive.trim(extents[live[file]])
        place = generator.randrange(len(free))
        free[place], free[-1] = free[-1], free[place]
        live[file] = free.pop()
        drive.write(extents[live[file]])
        yield


_LOADS = {"sequential": _overwrite_in_order, "random": _overwrite_at_random, "delete-then-write": _delete_then_write}


def _calculate(load: str, trim: bool, n_live_blocks: int, geometry: Geometry) -> float:
    """The amplification of an endless drive; NaN where an extent's lives are not alike, and no formula is known."""
    closed = geometry.n_blocks - 1  # one is always empty
    n_dead = geometry.n_logical_blocks - n_live_blocks
    if load == "sequential":
        return 1.0
    if load == "random":  # untrimmed dead files fill their blocks, and these are never collected
        return greedy_amplification(n_live_blocks / (closed if trim else closed - n_dead), geometry.block_pages)
    if trim or n_dead == 0:
        return greedy_amplification(n_live_blocks / closed, geometry.block_pages // FILE_PAGES)
    return float("nan")
