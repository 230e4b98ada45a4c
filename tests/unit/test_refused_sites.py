"""A site that names no place, or a place that gives no hidden states, is refused before any real forward pass.

Method: hand-made values and messages; tiny models with planted faults: shared modules, modules that never run.
"""

from __future__ import annotations

import pytest
import torch

from anchorage.architecture import find_trunk
from anchorage.errors import SiteError
from anchorage.sites import stable_names
from anchorage.trunk import find_sites, hidden_states, probe_sites, trimmed
from tiny_models import N_LAYERS, tiny_model


def probe(trunk, names):
    return probe_sites(trunk, find_sites(trunk, names), "cpu")


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(2, 4, 8),
        (torch.zeros(2, 4, 8), None),
        [torch.zeros(2, 4, 8)],
        torch.zeros(8, 8),
        (torch.zeros(8, 8, dtype=torch.bfloat16),),
    ],
)
def test_tensors_tuples_and_flat_tensors_are_hidden_states(value):
    assert hidden_states(value, n_rows=2, seq_len=4, site="x").shape == (2, 4, 8)


def test_flat_hidden_states_keep_rows_apart():
    value = torch.arange(12.0).reshape(6, 2)
    assert torch.equal(hidden_states(value, n_rows=2, seq_len=3, site="x")[1, 0], value[3])


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, "type NoneType"),
        ((), "type tuple"),
        ((None, torch.zeros(2, 4, 8)), "type NoneType"),
        (torch.zeros(2, 4), r"shape \[2, 4\]"),
        (torch.zeros(4, 2, 8), r"shape \[4, 2, 8\]"),
        (torch.zeros(1, 4, 8), r"shape \[1, 4, 8\]"),
        (torch.zeros(2, 2, 4, 4), r"shape \[2, 2, 4, 4\]"),
        (torch.zeros(7, 8), r"shape \[7, 8\]"),
        (torch.zeros(2, 4, 8, dtype=torch.int64), "torch.int64"),
    ],
)
def test_anything_else_is_refused_by_what_it_is(value, found):
    with pytest.raises(SiteError, match=f"'attn.7' gives .*{found}.*not hidden states"):
        hidden_states(value, n_rows=2, seq_len=4, site="attn.7")


def test_unknown_paths_are_refused_all_at_once_with_near_ones():
    trunk = find_trunk(tiny_model("gpt2"))
    with pytest.raises(SiteError) as caught:
        find_sites(trunk, ["block.0", "transformer.h.1.mlp.c_fcc", "h.0.mpl", "lm_head", "transformer.h.7"])
    message = str(caught.value)
    assert "no module 'transformer.h.1.mlp.c_fcc'; did you mean transformer.h.1.mlp.c_fc" in message
    assert "no module 'h.0.mpl'; did you mean h.0.mlp" in message
    assert "'lm_head' is outside the trunk 'transformer', and only the trunk runs" in message
    assert "no module 'transformer.h.7'" in message
    assert "'block.0'" not in message


def test_places_that_give_no_hidden_states_are_refused_all_at_once():
    trunk = find_trunk(tiny_model("gpt2"))
    with pytest.raises(SiteError) as caught:
        probe(trunk, ["block.0", "transformer.h", "transformer.wpe"])
    assert "'transformer.h' is passed 0 times" in str(caught.value)
    assert "'transformer.wpe' gives a tensor of shape [1, 4, 16]" in str(caught.value)


def test_a_module_that_runs_twice_is_refused():
    model = tiny_model("llama")
    model.model.layers[1].mlp.act_fn = model.model.layers[0].mlp.act_fn
    trunk = find_trunk(model)
    with pytest.raises(SiteError, match=r"'layers\.0\.mlp\.act_fn' is passed 2 times"):
        probe(trunk, ["layers.0.mlp.act_fn"])
    probe(trunk, stable_names(N_LAYERS))  # the places around it are fine


def test_a_shared_block_is_refused_under_both_names():
    model = tiny_model("gpt2")
    model.transformer.h[1] = model.transformer.h[0]
    trunk = find_trunk(model)
    with pytest.raises(SiteError, match=r"'embed' is passed 2 times.*'block\.0' is passed 2 times"):
        probe(trunk, ["embed", "block.0", "block.2"])
    with pytest.raises(SiteError, match=r"'block\.1': this block has no module 'h\.1' of its own"):
        find_sites(trunk, ["block.1"])


def test_a_trunk_that_does_not_run_is_a_site_error():
    trunk = find_trunk(tiny_model("gpt2"))
    trunk.module.h[2].forward = lambda *args, **kwargs: 1 / 0
    with pytest.raises(SiteError, match="ZeroDivisionError"):
        probe(trunk, ["embed"])
    with trimmed(trunk, 2):
        probe(trunk, ["embed", "block.1"])
