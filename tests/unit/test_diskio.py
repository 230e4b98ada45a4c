"""A probe reads its own site's bytes and no others, by the kernel's count.

Goal: bytes from disk within 5 % of the site's size when nothing is in the page cache. Method: a store of large rows,
its files dropped from the cache; count what reading one site's tokens takes. Control: reading it again takes nothing,
another site as much again.
"""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest

from anchorage.diskio import bytes_from_disk
from anchorage.probe.design import Side
from anchorage.probe.fullbatch import read_tokens
from anchorage.store.reader import open_cache
from stores import build_store


def drop_from_page_cache(folder) -> None:
    for path in folder.rglob("*.safetensors"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="not run: /proc/self/io is Linux's")
def test_a_cold_probe_reads_its_own_sites_bytes(tmp_path):
    store = build_store(tmp_path, n_rows=32, seq_len=64, width=512)
    rows, positions = np.divmod(np.arange(32 * 64), 64)
    side = Side(rows, positions, np.zeros(len(rows), int), np.zeros(len(rows), int))
    taken = []
    with open_cache(store.cache) as cache:
        read_tokens(
            cache, "few", site="embed", side=Side(*(part[:64] for part in vars(side).values()))
        )  # loads the code
        drop_from_page_cache(store.cache)
        for site in ("attn.0", "attn.0", "block.0"):
            before = bytes_from_disk()
            values = read_tokens(cache, "tokens", site=site, side=side)
            taken.append(bytes_from_disk() - before)
            assert values.shape == (32 * 64, 512)
    size = 32 * 64 * 512 * 2
    if not taken[0]:
        pytest.skip("not run: this filesystem lies in memory, nothing on it is ever cold")
    assert size <= taken[0] <= 1.05 * size
    assert taken[1] == 0
    assert 0.95 * size <= taken[2] <= 1.05 * size
