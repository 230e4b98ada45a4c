"""Bugs found by reading the store after it was first built; each stays found.

Goal: none comes back. Method: the scenario of each, as it was reproduced.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys

import numpy as np
import pytest
import torch

import anchorage
from anchorage.errors import AnchorageError, IntegrityError
from anchorage.store import names
from anchorage.store.prune import prune_staging
from anchorage.store.verify import repair, verify_cache
from stores import Store, build_store, flip_bit, tree


def test_a_cache_of_two_corpora_cannot_be_opened(tmp_path):
    # The text is not in the key: a kill between two parts' publications left shards of both texts under one manifest.
    build_store(tmp_path, n_parts=2)
    other = Store(tmp_path, n_parts=2)
    other.token_ids = other.token_ids[::-1].copy()
    other.build_part(0)
    with pytest.raises(IntegrityError, match="manifest"):
        anchorage.open_cache(other.cache)
    other.build_part(1)
    other.gather()
    assert np.array_equal(anchorage.open_cache(other.cache).tokens().numpy(), other.token_ids)


def test_a_shard_of_other_tokens_under_its_name_is_refused_by_a_read(tmp_path):
    store = build_store(tmp_path / "a")
    other = Store(tmp_path / "b")
    other.token_ids = other.token_ids[::-1].copy()
    other.build()
    name = names.published_shard("tokens", 0, 1)
    (store.cache / name).unlink()
    (store.cache / name).write_bytes((other.cache / name).read_bytes())
    cache = anchorage.open_cache(store.cache)  # key and size are the same
    with pytest.raises(IntegrityError, match="tokens_digest"):
        cache.read("embed", 9, tier="tokens")


def test_no_flipped_byte_of_a_header_passes_or_crashes(tmp_path):
    # A flip inside the word "sites" left valid JSON, and every later run, and every read, ended in a KeyError.
    store = build_store(tmp_path, n_rows=8)
    path = store.staging / names.staged_shard("pooled", 0)
    good, values = path.read_bytes(), store.values["pooled", "embed"][:8]
    for offset in range(8 + int.from_bytes(good[:8], "little")):
        flip_bit(path, offset, offset % 7)  # the published name shares its bytes
        staging = store.open_part(0)
        assert staging.accept(store.digest) == {}, offset
        staging.close()
        # A read looks at less (not at the shard's number, say), but gives the right values or refuses.
        with anchorage.open_cache(store.cache) as cache, contextlib.suppress(IntegrityError):
            assert torch.equal(cache.read("embed", tier="pooled"), values), offset
        flip_bit(path, offset, offset % 7)
    staging = store.open_part(0)
    assert list(staging.accept(store.digest)) == [0]  # control: unharmed it is accepted
    staging.close()


def test_a_damaged_part_list_is_found_and_made_anew(tmp_path):
    whole = tree(build_store(tmp_path / "whole").cache)
    store = build_store(tmp_path / "damaged")
    flip_bit(store.part_lists[0], 100)
    report = verify_cache(store.cache, store.part_lists, depth="full", log=store.lines.append)
    assert report["corrupt"] == ["part-0.jsonl"]
    repair(store.cache, store.staging, report=report, log=store.lines.append)
    assert not store.part_lists[0].exists()
    assert store.build_part(0) == (3, 0)
    store.gather()
    assert tree(store.cache) == whole


def test_gathering_removes_a_part_list_that_it_cannot_read(tmp_path):
    store = build_store(tmp_path, n_parts=2)
    flip_bit(store.part_lists[1], 100)
    with pytest.raises(IntegrityError):
        store.gather()
    assert [path.exists() for path in store.part_lists] == [True, False]


def test_pruning_one_run_leaves_other_runs_alone(tmp_path):
    import copy

    from anchorage.settings import load_settings
    from plans import CONFIG

    config = copy.deepcopy(CONFIG)
    config["capture"]["staging_dir"] = str(tmp_path)
    mine = load_settings(config | {"run": "mine"}).staging
    other = load_settings(config | {"run": "other"}).staging
    for folder in (mine, other):
        (folder / ("0" * 32)).mkdir(parents=True)
    prune_staging(mine, "f" * 32, lambda line: None)
    assert not (mine / ("0" * 32)).exists()
    assert (other / ("0" * 32)).exists()


def test_a_script_that_keeps_a_cache_open_ends_quietly(tmp_path):
    store = build_store(tmp_path)
    script = f"import anchorage; cache = anchorage.open_cache({str(store.cache)!r}); cache.read('embed', 0)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_rows_must_be_whole_numbers(tmp_path):
    with anchorage.open_cache(build_store(tmp_path).cache) as cache:
        with pytest.raises(AnchorageError, match="whole numbers"):
            cache.read("embed", [1.7])
        assert torch.equal(cache.read("embed", []), cache.read("embed", slice(0, 0)))
