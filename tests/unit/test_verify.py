"""Verification and repair.

Goal: every damage to a published cache is found and named, and repair costs just what was damaged. Method: build a
store of known random values, damage it, verify, build again. Oracle: the bytes of a store left alone.
"""

from __future__ import annotations

import pytest

import anchorage
from anchorage.errors import IntegrityError
from anchorage.store import names
from anchorage.store.manifest import read_manifest
from anchorage.store.verify import repair, verify_cache
from stores import Store, build_store, flip_bit, tree, truncate


def check(store: Store, depth: str = "full") -> dict:
    return verify_cache(store.cache, store.part_lists, depth=depth, log=store.lines.append)


def check_and_repair(store: Store) -> dict:
    report = check(store)
    repair(store.cache, store.staging, report=report, log=store.lines.append)
    return report


def test_a_flipped_bit_anywhere_in_a_file_fails_full_verification(tmp_path):
    store = build_store(tmp_path, n_rows=5)
    path = store.cache / names.published_shard("pooled", 0, 0)
    assert check(store)["ok"]
    for offset in range(0, path.stat().st_size, 37):
        flip_bit(path, offset, offset % 8)
        assert check(store)["corrupt"] == ["pooled/part-0-shard-0.safetensors"]
        assert check(store, "size")["ok"]  # sizes cannot tell
        flip_bit(path, offset, offset % 8)
    assert check(store)["ok"]


def test_a_flipped_bit_anywhere_in_the_manifest_is_noticed(tmp_path):
    store = build_store(tmp_path, n_rows=5)
    path = store.cache / names.MANIFEST
    read_manifest(path)
    size = path.stat().st_size
    for offset in range(size):
        flip_bit(path, offset, offset % 7)
        with pytest.raises(IntegrityError):
            read_manifest(path)
        flip_bit(path, offset, offset % 7)
    lines = path.read_bytes().splitlines(keepends=True)
    for torn in (b"", lines[0], b"".join(lines)[:-1], b"".join(lines[:-1]), lines[0] + lines[1][:9]):
        path.write_bytes(torn)
        with pytest.raises(IntegrityError):
            read_manifest(path)


def damage_flip(store):
    flip_bit(store.cache / "tokens/part-0-shard-1.safetensors", 3000 % 700)
    return "corrupt", "tokens/part-0-shard-1.safetensors"


def damage_truncate(store):
    truncate(store.cache / "few/part-0-shard-1.safetensors")
    return "corrupt", "few/part-0-shard-1.safetensors"


def damage_delete(store):
    (store.cache / "pooled/part-0-shard-2.safetensors").unlink()
    return "missing", "pooled/part-0-shard-2.safetensors"


def damage_manifest(store):
    truncate(store.cache / names.MANIFEST, 9)
    return "corrupt", names.MANIFEST


def damage_orphan(store):
    (store.cache / "tokens/part-7-shard-0.safetensors").write_bytes(b"orphan")
    return "orphans", "tokens/part-7-shard-0.safetensors"


@pytest.mark.parametrize(
    ("damage", "n_anew"),
    [(damage_flip, 1), (damage_truncate, 1), (damage_delete, 1), (damage_manifest, 0), (damage_orphan, 0)],
)
def test_damage_after_publication_is_named_and_only_that_is_made_anew(tmp_path, damage, n_anew):
    whole = tree(build_store(tmp_path / "whole").cache)
    store = build_store(tmp_path / "damaged")
    kind, name = damage(store)
    report = check_and_repair(store)
    assert not report["ok"]
    assert {k: report[k] for k in ("missing", "corrupt", "orphans")} == {
        "missing": [],
        "corrupt": [],
        "orphans": [],
        kind: [name],
    }
    assert any(name in fault for fault in report["faults"])
    assert not (store.cache / name).exists()
    with pytest.raises(IntegrityError):  # withdrawn, until it is true again
        anchorage.open_cache(store.cache)
    assert store.build_part(0) == (3 - n_anew, n_anew)
    store.gather()
    assert check_and_repair(store)["ok"]
    assert tree(store.cache) == whole


def test_damage_in_the_cache_is_damage_in_staging_so_both_are_removed(tmp_path):
    store = build_store(tmp_path)
    published, staged = (
        store.cache / "tokens/part-0-shard-0.safetensors",
        store.staging / names.staged_shard("tokens", 0),
    )
    assert published.stat().st_ino == staged.stat().st_ino
    flip_bit(published, 900)
    check_and_repair(store)
    assert not published.exists()
    assert not staged.exists()
