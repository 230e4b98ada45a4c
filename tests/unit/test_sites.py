"""Site names mean the same for every model, and a wrong one is refused with what would be right.

Method: expand names, globs and paths by hand-written expectations. No model is needed.
"""

from __future__ import annotations

import pytest

from anchorage.errors import SiteError
from anchorage.sites import expand_sites, stable_names


def test_stable_names_are_in_running_order():
    assert stable_names(2) == ["embed", "attn.0", "mlp.0", "block.0", "attn.1", "mlp.1", "block.1"]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["embed"], ["embed"]),
        (["block.2", "embed", "attn.0"], ["embed", "attn.0", "block.2"]),
        (["block.*"], ["block.0", "block.1", "block.2"]),
        (["block.[0-1]", "mlp.?"], ["mlp.0", "block.0", "mlp.1", "block.1", "mlp.2"]),
        (["*.1", "block.1", "block.1"], ["attn.1", "mlp.1", "block.1"]),
        (["*"], stable_names(3)),
        (["h.0.mlp.act", "block.0", "model.norm", "h.0.mlp.act"], ["block.0", "h.0.mlp.act", "model.norm"]),
        (["transformer.h.3", "layers.99.mlp", "h.3"], ["transformer.h.3", "layers.99.mlp", "h.3"]),
        ([], []),
    ],
)
def test_patterns_expand_without_duplicates_in_running_order(patterns, expected):
    assert expand_sites(patterns, 3) == expected


def test_a_glob_counts_numbers_of_two_digits_in_order():
    assert expand_sites(["block.*"], 12)[-3:] == ["block.9", "block.10", "block.11"]


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("block.3", ["'block.3'", "did you mean", "block.2", "block.0 to block.2"]),
        ("block.-1", ["'block.-1'"]),
        ("blok.1", ["'blok.1'", "did you mean block.1"]),
        ("attn.x", ["'attn.x'", "did you mean attn."]),
        ("mlp.0.act", ["'mlp.0.act'", "did you mean mlp.0"]),
        ("embedding", ["'embedding'", "did you mean embed"]),
        ("lm_head", ["'lm_head'", "head is not run"]),
        ("Block.0", ["'Block.0'", "did you mean block.0"]),
        ("block.[7-9]", ["'block.[7-9]' matches no stable site"]),
        ("model.layers.*.mlp", ["matches no stable site"]),
        ("", ["unknown site ''"]),
    ],
)
def test_a_wrong_name_is_refused_with_near_ones(pattern, words):
    with pytest.raises(SiteError) as caught:
        expand_sites(["embed", pattern], 3)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_names_without_globs_need_no_number_of_blocks():
    names = ["h.2.mlp", "block.10", "attn.10", "block.9", "embed", "model.norm", "block.9"]
    assert expand_sites(names, None) == ["embed", "block.9", "attn.10", "block.10", "h.2.mlp", "model.norm"]
    assert expand_sites([f"block.{10**15}"], None) == [f"block.{10**15}"]  # at once
    assert expand_sites([], None) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("embd", "unknown site 'embd'; did you mean embed"),
        ("blok.3", "unknown site 'blok.3'; did you mean block.3"),
        ("block.x", "'block.x'"),
        ("block.²", "'block.²'"),
        ("lm_head", "sites are embed, attn.{i}, mlp.{i}, block.{i}, globs"),
    ],
)
def test_a_misspelt_name_needs_no_number_of_blocks_to_be_found(name, said):
    with pytest.raises(SiteError) as caught:
        expand_sites(["block.1", name], None)
    assert said in str(caught.value)


def test_all_wrong_names_are_reported_at_once():
    with pytest.raises(SiteError, match=r"block\.99.*atn\.0.*mlp\.\[8\]"):
        expand_sites(["block.99", "embed", "atn.0", "mlp.[8]"], 3)
