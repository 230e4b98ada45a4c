"""Rows, batches, shards and parts.

Goal: every row lies in just one batch, shard and part, whatever the numbers. Method and oracle: count them one by one.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from anchorage.store.layout import Layout


@st.composite
def layouts(draw):
    n_rows, batch_rows = draw(st.integers(1, 60)), draw(st.integers(1, 7))
    tiers = {f"t{i}": draw(st.integers(1, n_rows)) for i in range(draw(st.integers(0, 3)))}
    return Layout(
        n_rows, batch_rows, batch_rows * draw(st.integers(1, 4)), draw(st.integers(1, 9)), {"all": n_rows, **tiers}
    )


@given(layouts())
def test_every_row_has_one_shard_one_batch_one_part(layout):
    shards = [shard for part in layout.parts for shard in layout.part_shards(part)]
    assert shards == list(range(layout.n_shards))
    rows = [row for shard in shards for row in layout.shard_rows_range(shard)]
    assert rows == list(range(layout.n_rows))
    for shard in shards:
        here = layout.shard_rows_range(shard)
        assert [row for batch in layout.batches(here) for row in batch] == list(here)  # no batch crosses a shard
    for row in range(layout.n_rows):
        assert row in layout.batch(row)
        assert layout.batch(row) == layout.batch(layout.batch(row).start)


@given(layouts())
def test_tiers_hold_their_first_rows(layout):
    for tier, n_rows in layout.tier_rows.items():
        rows = [row for shard in range(layout.n_shards) for row in layout.tier_shard_rows(tier, shard)]
        assert rows == list(range(n_rows))
        holding = [shard for shard in range(layout.n_shards) if tier in layout.shard_tiers(shard)]
        assert holding == list(range(len(holding)))


@given(layouts())
def test_part_rules_cover_each_part_once_with_its_files(layout):
    rules = layout.part_rules()
    assert sorted(part for rule in rules for part in rule.parts) == list(layout.parts)
    assert rules[0].name == "capture_part"
    assert len({rule.name for rule in rules}) == len(rules) <= len(layout.tier_rows) + 2
    for rule in rules:
        for part in rule.parts:
            for tier, n_shards in rule.n_shards.items():
                assert n_shards == sum(tier in layout.shard_tiers(shard) for shard in layout.part_shards(part))


@given(layouts())
def test_parts_are_even(layout):
    sizes = [len(layout.part_shards(part)) for part in layout.parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_a_part_of_very_many_files_is_told():
    from anchorage.job import warn_of_slow_start

    many = Layout(20_000, 1, 1, 1, {"a": 20_000})
    assert "20000 files" in warn_of_slow_start(many)
    assert warn_of_slow_start(Layout(20_000, 1, 1, 100, {"a": 20_000})) is None
