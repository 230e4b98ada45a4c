"""The store, from commit to read, without a model.

Goal: what is read is what went in, whatever is damaged is noticed and named, and repair costs just what was damaged.
Method: build a store of known random values, damage it, reopen. Oracles: the plain arrays that went in, safetensors'
own reader, raw file bytes.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from safetensors import safe_open

import anchorage
from anchorage.errors import AnchorageError, CaptureError, IntegrityError
from anchorage.store import names
from anchorage.store.prune import prune_staging, superseded_keys
from anchorage.store.verify import verify_cache
from stores import SEQ_LEN, SITES, WIDTH, Store, build_store, flip_bit, tree, truncate


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_read_gives_what_went_in(tmp_path, dtype):
    store = build_store(tmp_path, storage_dtype=dtype)
    cache = anchorage.open_cache(store.cache)
    assert cache.n_rows == 22
    assert cache.sites == SITES
    for (tier, site), value in store.values.items():
        n_rows = store.tier_rows[tier]
        assert torch.equal(cache.read(site, tier=tier), value[:n_rows])
        for rows in (0, n_rows - 1, [7, 8], slice(5, 11), range(0, n_rows, 3), [9, 2, 2, 11], []):
            wanted = np.atleast_1d(np.arange(n_rows)[rows]).astype(int)
            assert torch.equal(cache.read(site, rows, tier=tier), value[wanted]), rows
        mask = np.arange(n_rows) % 5 == 0
        assert torch.equal(cache.read(site, mask, tier=tier), value[:n_rows][torch.from_numpy(mask)])
    assert np.array_equal(cache.tokens().numpy(), store.token_ids)
    assert np.array_equal(cache.tokens([21, 0]).numpy(), store.token_ids[[21, 0]])


def test_ids_of_a_vocabulary_over_65535_round_trip(tmp_path):
    store = build_store(tmp_path, token_dtype="uint32")
    assert store.token_ids.max() > 65_535
    assert np.array_equal(anchorage.open_cache(store.cache).tokens().numpy(), store.token_ids)


def test_read_without_a_tier_takes_all_tokens_of_most_rows(tmp_path):
    store = build_store(tmp_path)
    cache = anchorage.open_cache(store.cache)
    assert cache.tier_of("embed") == "tokens"
    assert torch.equal(cache.read("embed", 20), store.values["tokens", "embed"][20:21])


@pytest.mark.parametrize(
    ("site", "rows", "tier", "said"),
    [
        ("blok.0", 0, None, "did you mean block.0"),
        ("embed", 22, None, "row 22 is not in tier 'tokens'"),
        ("embed", 13, "few", "holds rows 0 to 12"),
        ("embed", -1, None, "row -1"),
        ("embed", 0, "none", "holds no site 'embed'"),
        ("embed", np.ones(3, dtype=bool), None, "mask of 3 rows"),
    ],
)
def test_a_wrong_question_gets_a_clear_error(tmp_path, site, rows, tier, said):
    cache = anchorage.open_cache(build_store(tmp_path).cache)
    with pytest.raises(AnchorageError, match=said):
        cache.read(site, rows, tier=tier)


def test_a_shard_opens_with_any_safetensors_reader(tmp_path):
    store = build_store(tmp_path)
    path = store.cache / names.published_shard("tokens", 0, 1)
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == {*SITES, "tokens", "row_digests"}
        for site in SITES:
            assert torch.equal(file.get_tensor(site), store.values["tokens", site][8:16])
        assert np.array_equal(file.get_tensor("tokens").numpy(), store.token_ids[8:16])


def test_reading_asks_for_no_more_than_it_returns(tmp_path, monkeypatch):
    store = build_store(tmp_path)
    cache = anchorage.open_cache(store.cache)
    asked = []
    preadv = os.preadv

    def counting(descriptor, buffers, offset):
        asked.append(sum(len(buffer) for buffer in buffers))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counting)
    cache.read("embed", [0])  # opens the shard's header, once
    asked.clear()
    value = cache.read("embed", [1, 2, 5])
    assert sum(asked) == value.numel() * value.element_size() + 3 * 8  # and a digest a row


@pytest.mark.parametrize("name", [*SITES, "tokens", "row_digests"])
def test_a_flipped_bit_in_any_tensor_is_noticed_by_a_read(tmp_path, name):
    store = build_store(tmp_path)
    path = store.cache / names.published_shard("pooled", 0, 0)
    cache = anchorage.open_cache(store.cache)
    entry = cache._file(cache.manifest.shards[0], "pooled").file.entries[name]
    for offset in (entry.start, entry.stop - 1):
        flip_bit(path, offset)
        cache = anchorage.open_cache(store.cache)
        with pytest.raises(IntegrityError, match="digest"):
            _ = [cache.read(site, tier="pooled") for site in SITES], cache.tokens()
        flip_bit(path, offset)  # and back: the control
    _ = [cache.read(site, tier="pooled") for site in SITES], cache.tokens()


@pytest.mark.parametrize("n_rows", [1, 4, 8, 9, 22])
@pytest.mark.parametrize("n_parts", [1, 2, 3, 7])
def test_parts_do_not_change_a_byte(tmp_path, n_rows, n_parts):
    one = build_store(tmp_path / "one", n_rows=n_rows)
    many = build_store(tmp_path / "many", n_rows=n_rows, n_parts=n_parts)
    staged = [{n: b for n, b in tree(store.staging).items() if n.endswith(".safetensors")} for store in (one, many)]
    assert staged[0] == staged[1]
    for tier in one.tier_rows:
        for site in SITES:
            a, b = (anchorage.open_cache(store.cache).read(site, tier=tier) for store in (one, many))
            assert torch.equal(a, b)


def test_a_changed_number_of_parts_reuses_all_and_leaves_no_orphan(tmp_path):
    build_store(tmp_path, n_parts=3)
    store = Store(tmp_path, n_parts=2)
    assert [store.build_part(part) for part in store.layout.parts] == [(2, 0), (1, 0)]
    removed = store.gather()
    assert "part-2.jsonl" in removed
    assert verify_cache(store.cache, store.part_lists, depth="full", log=store.lines.append)["ok"]


def test_a_longer_corpus_reuses_whole_shards_only(tmp_path):
    build_store(tmp_path, n_rows=20, tier_rows={"tokens": 20})
    # The same first rows: the shard of rows 16 to 19 ended in a short batch, and must be made anew.
    longer = Store(tmp_path, n_rows=30, tier_rows={"tokens": 30})
    shorter = Store(tmp_path, n_rows=20, tier_rows={"tokens": 20})
    longer.token_ids[:20] = shorter.token_ids
    assert longer.build_part(0) == (2, 2)
    assert any("shard 2 is not accepted" in line and "rows" in line for line in longer.lines)


@pytest.mark.parametrize(("staged", "wanted"), [(24, 22), (22, 24)])
def test_a_whole_shard_of_more_or_fewer_rows_is_not_accepted(tmp_path, staged, wanted):
    tiers = ("tokens", "pooled")
    build_store(tmp_path, n_rows=staged, tier_rows=dict.fromkeys(tiers, staged))
    store = Store(tmp_path, n_rows=wanted, tier_rows=dict.fromkeys(tiers, wanted))
    both = min(staged, wanted)
    store.token_ids[:both] = Store(tmp_path, n_rows=staged).token_ids[:both]
    assert store.build_part(0) == (2, 1)
    assert any("shard 2 is not accepted" in line and f"rows [16, {wanted}]" in line for line in store.lines)


def wreck_truncate(store, path):
    truncate(path, 4)


def wreck_flip(store, path):
    flip_bit(path, path.stat().st_size // 2)


def wreck_delete(store, path):
    path.unlink()


def wreck_other_key(store, path):
    other = build_store(store.root / "other", key_note="b")
    path.write_bytes((other.staging / path.name).read_bytes())


def wreck_more_rows(store, path):
    path.write_bytes(path.read_bytes() + b"\0" * 48)


@pytest.mark.parametrize(
    ("wreck", "said"),
    [
        (wreck_truncate, "bytes"),
        (wreck_flip, "xxh3_128"),
        (wreck_delete, "a file"),
        (wreck_other_key, "key"),
        (wreck_more_rows, "bytes"),
    ],
)
def test_wreckage_in_staging_is_named_and_made_anew(tmp_path, wreck, said):
    whole = tree(build_store(tmp_path / "whole").cache)
    store = build_store(tmp_path / "wrecked")
    path = store.staging / names.staged_shard("few", 1)
    path.unlink()  # so that the published name keeps its own bytes
    path.write_bytes((store.cache / names.published_shard("few", 0, 1)).read_bytes())
    wreck(store, path)
    store.lines.clear()
    assert store.build_part(0) == (2, 1)
    assert any("shard 1 is not accepted" in line and said in line and path.name in line for line in store.lines)
    store.gather()
    assert tree(store.cache) == whole
    assert store.build_part(0) == (3, 0)


def test_a_torn_last_journal_line_is_no_line(tmp_path):
    store = build_store(tmp_path)
    journal = store.staging / names.journal(0)
    whole = journal.read_bytes()
    for keep in (1, 20, len(whole.splitlines()[-1])):  # the last: all but the newline
        journal.write_bytes(whole[: whole[:-1].rfind(b"\n") + 1 + keep])
        assert store.build_part(0) == (2, 1)
        assert journal.read_bytes() == whole
    assert any("has no line in a journal" in line for line in store.lines)


def test_temps_of_killed_writers_are_swept_but_not_those_of_other_parts(tmp_path):
    store = build_store(tmp_path, n_parts=2)
    temps = [store.staging / f"{names.staged_shard('few', shard)}.tmp-1-0123abcd" for shard in (0, 2, 9)]
    for temp in temps:
        temp.write_bytes(b"torn")
    store.open_part(0).close()
    assert [temp.exists() for temp in temps] == [False, True, True]
    store.open_part(1).close()
    assert not any(temp.exists() for temp in temps)
    assert sum("left by a killed writer" in line for line in store.lines) == 3


def test_files_are_readable_by_others(tmp_path):
    store = build_store(tmp_path)
    for path in store.root.rglob("*"):
        if path.is_file():
            assert path.stat().st_mode & 0o777 == 0o644, path


def test_opening_names_a_missing_or_short_shard(tmp_path):
    store = build_store(tmp_path)
    path = store.cache / "few/part-0-shard-1.safetensors"
    truncate(path)
    with pytest.raises(IntegrityError, match=r"few/part-0-shard-1.*make verify"):
        anchorage.open_cache(store.cache)
    path.unlink()
    with pytest.raises(IntegrityError, match="no file"):
        anchorage.open_cache(store.cache)


def test_two_processes_cannot_hold_one_shard(tmp_path, monkeypatch):
    store = build_store(tmp_path, n_parts=2)
    held = store.open_part(0)
    if child := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    else:  # POSIX locks exclude processes, not threads: so a second process must try
        monkeypatch.setattr("anchorage.store.staging._LOCK_WAIT_S", 0.3)
        try:
            store.open_part(1).close()  # other shards: no obstacle
            Store(tmp_path, n_parts=3).open_part(0)
        except CaptureError:
            os._exit(0)
        os._exit(1)
    held.close()
    Store(tmp_path, n_parts=3).open_part(0).close()


def test_prune_removes_other_keys_only(tmp_path):
    old = build_store(tmp_path, key_note="old")
    new = build_store(tmp_path, key_note="new")
    (tmp_path / "staging/notes").mkdir()
    assert list(superseded_keys(tmp_path / "staging", new.key)) == [old.key]
    prune_staging(tmp_path / "staging", new.key, new.lines.append)
    assert sorted(path.name for path in (tmp_path / "staging").iterdir()) == sorted([new.key, "notes"])
    assert any(old.key in line and "GiB" in line for line in new.lines)


def test_the_worked_size_of_a_row():
    # 2 bytes x 3 sites x 4 tokens x 6 wide, 4 token ids of 2 bytes, 4 digests of 8 bytes
    assert Store(root=None).shape("tokens").n_bytes(1, SEQ_LEN) == 2 * 3 * 4 * WIDTH + 8 + 32  # type: ignore[arg-type]
