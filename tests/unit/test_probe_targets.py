"""Which probes there will be, known before anything has run.

Goal: the sites of the probed tier, from the configuration and the model's config.json alone; clear errors otherwise.
Method: configurations and folders played. Oracle: lists written out here.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from anchorage.errors import SettingsError, SiteError
from anchorage.probe import targets
from anchorage.probe.design import make_design
from anchorage.probe.targets import check_probe, group_sites, probed_sites
from anchorage.random_model import make_random_model
from anchorage.resources import DEFAULT_MODEL, DEFAULT_MODEL_BLOCKS, RANDOM_MODEL
from anchorage.settings import load_settings
from stores import tree
from tiny_models import save_tiny

ROOT = Path(__file__).parents[2]
CONFIG = yaml.safe_load((ROOT / "config/test.yaml").read_text())
BLOCKS = [f"block.{i}" for i in range(4)]


def settings_of(source: str = "nowhere/at-all", sites: list[str] | None = None, **probe):
    config = copy.deepcopy(CONFIG)
    config["model"]["source"] = source
    config["capture"]["tiers"]["few"]["sites"] = sites or ["embed", "attn.0", "block.*"]
    config["probe"] |= probe
    return load_settings(config)


@pytest.mark.parametrize(
    "facts",
    [
        {"num_hidden_layers": 4},
        {"n_layer": 4},
        {"n_layers": 4},
        {"text_config": {"num_hidden_layers": 4}, "num_layers": 9},
        {"text_config": None, "num_hidden_layers": 4},
    ],
)
def test_a_glob_is_filled_from_the_models_own_config(tmp_path, facts):
    (tmp_path / "config.json").write_text(json.dumps(facts))
    assert probed_sites(settings_of(str(tmp_path))) == ["embed", "attn.0", *BLOCKS]


def test_sites_spelled_out_need_no_model():
    sites = ["model.layers.0.mlp.act_fn", "block.10", "attn.3", "embed", "block.3", "block.3"]
    in_order = ["embed", "attn.3", "block.3", "block.10", "model.layers.0.mlp.act_fn"]
    assert probed_sites(settings_of(sites=sites)) == in_order
    with pytest.raises(SiteError, match=r"'embd'; did you mean embed.*'blok\.3'; did you mean block\.3"):
        probed_sites(settings_of(sites=["embd", "blok.3", "h.0.mlp"]))


@pytest.mark.parametrize("name", ["gpt2-wikitext", "tiered-50k"])
def test_the_configurations_for_the_hub_are_planned_without_it(monkeypatch, name):
    monkeypatch.setattr(targets, "count_blocks", lambda model: pytest.fail("asked for the model"))
    settings = load_settings(yaml.safe_load((ROOT / f"config/{name}.yaml").read_text()))
    check_probe(settings)
    assert len(probed_sites(settings)) == len(set(probed_sites(settings)))


@pytest.mark.parametrize("source", [DEFAULT_MODEL, RANDOM_MODEL])
def test_the_models_that_are_yet_to_be_made_are_known(source, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert probed_sites(settings_of(source))[-1] == f"block.{DEFAULT_MODEL_BLOCKS - 1}"
    (tmp_path / source).mkdir(parents=True)  # as a killed fetch leaves it
    assert probed_sites(settings_of(source))[-1] == f"block.{DEFAULT_MODEL_BLOCKS - 1}"


def test_the_number_of_blocks_is_that_of_the_default_model():
    config = ROOT / DEFAULT_MODEL / "config.json"
    if not config.exists():
        pytest.skip("not run: the default model has not been fetched here")
    assert json.loads(config.read_text())["num_hidden_layers"] == DEFAULT_MODEL_BLOCKS


@pytest.mark.parametrize("content", [None, "{}", "no json", "[]", '"text"', "7", '{"text_config": [1]}'])
def test_a_number_that_cannot_be_had_is_an_error_with_a_remedy(tmp_path, content):
    source = "nowhere/at-all"
    if content:
        (tmp_path / "config.json").write_text(content)
        source = str(tmp_path)
    with pytest.raises(SettingsError, match=r"Spell out the sites of the probed tier"):
        probed_sites(settings_of(source))


@pytest.mark.parametrize(
    ("probe", "said"),
    [
        ({"tier": "fw"}, "there is no tier 'fw'; did you mean few"),
        ({"tier": "pooled"}, "keeps only the mean of each row's tokens"),
        ({"tasks": ["positon"]}, "unknown task 'positon'; did you mean position"),
        ({"tasks": ["position", "position"]}, "task 'position' is given twice"),
    ],
)
def test_probes_that_cannot_be_are_refused(probe, said):
    with pytest.raises(SettingsError, match=said):
        check_probe(settings_of(**probe))


@pytest.mark.parametrize(
    ("n_rows", "test_fraction", "n_train_rows"),
    [(1, 0.25, 1), (2, 0.25, 1), (3, 0.25, None), (3, 0.5, 1), (4, 0.5, None), (4, 0.75, 1), (20, 0.95, 1)],
)
def test_a_tier_of_too_few_rows_is_refused(n_rows, test_fraction, n_train_rows):
    config = copy.deepcopy(CONFIG)
    config["capture"]["tiers"]["few"]["rows"] = n_rows
    config["probe"]["test_fraction"] = test_fraction
    if n_train_rows is None:
        check_probe(load_settings(config))
        tokens = np.tile(np.arange(16), (n_rows, 1))
        make_design("position", tokens, test_fraction=test_fraction, max_tokens=None, seed=0)  # what it is to be for
    else:
        with pytest.raises(SettingsError, match=rf"{n_rows} row\(s\), of which {n_train_rows} would be for training"):
            check_probe(load_settings(config))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tir": "few"}, r"probe\.tir: unknown key; did you mean tier"),
        ({"test_fraction": 1.0}, r"probe\.test_fraction: input should be less than 1"),
        ({"test_fraction": 0.0}, r"probe\.test_fraction: input should be greater than 0"),
        ({"max_tokens": 1}, r"probe\.max_tokens: input should be greater than or equal to 2"),
        ({"solver": "sgd"}, r"probe\.solver"),
        ({"tasks": []}, r"probe\.tasks"),
    ],
)
def test_faults_of_the_section_have_their_path(change, said):
    with pytest.raises(SettingsError, match=said):
        settings_of(**change)


def test_no_section_no_probes():
    config = {key: value for key, value in CONFIG.items() if key != "probe"}
    check_probe(load_settings(config))
    assert probed_sites(load_settings(config)) == []
    assert group_sites([]) == []


@pytest.mark.parametrize(("n_sites", "sizes"), [(1, [1]), (12, [12]), (13, [6, 7]), (33, [11, 11, 11])])
def test_sites_are_shared_evenly_in_their_order(n_sites, sizes):
    sites = [f"block.{i}" for i in range(n_sites)]
    groups = group_sites(sites)
    assert [len(group) for group in groups] == sizes
    assert [site for group in groups for site in group] == sites


def test_a_random_model_is_like_its_source_but_for_the_weights(tmp_path):
    source = tmp_path / "source"
    save_tiny(source, "llama")
    (source / "LICENSE").write_text("as you like")
    before = torch.get_rng_state()
    for name in ("a", "b"):
        make_random_model(source, tmp_path / name, log=lambda line: None)
    assert torch.equal(torch.get_rng_state(), before)
    made = load_file(tmp_path / "a/model.safetensors")
    trained = load_file(source / "model.safetensors")
    assert {name: value.shape for name, value in made.items()} == {name: value.shape for name, value in trained.items()}
    matrices = [name for name, value in made.items() if value.ndim == 2]
    assert matrices
    assert not any(made[name].equal(trained[name]) for name in matrices)
    changed = {name for name, data in tree(source).items() if tree(tmp_path / "a")[name] != data}
    assert changed == {"model.safetensors"}  # not the configuration, nor the tokenizer
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "a").state_dict()
    assert all(opened[name].equal(value) for name, value in made.items())
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "a").get_vocab() == AutoTokenizer.from_pretrained(source).get_vocab()
    )
