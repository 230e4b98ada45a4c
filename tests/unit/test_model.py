"""A model is described once, by what decides its activations, and loaded only while it is still that model.

Method: tiny complete model folders; the loaded trunk is compared with the model that was saved. Files are changed by a
byte between resolving and loading.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import logging
import platform
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file

from anchorage import model as model_module
from anchorage.errors import IntegrityError, ModelError, SiteError
from anchorage.model import (
    load_tokenizer,
    load_trunk,
    resolve_model,
)
from tiny_models import (
    N_LAYERS,
    VOCAB_SIZE,
    WIDTH,
    flip_bit,
    resolve_tiny,
    save_tiny,
    settings_of,
    tiny_model,
    tiny_tokenizer,
)


@pytest.fixture
def folder(tmp_path):
    return save_tiny(tmp_path / "tiny-llama", "llama")


def test_facts_hold_what_the_model_is(folder):
    facts = resolve_tiny(folder, threads=3)
    digests = {name: facts.pop(name) for name in ("weights_digest", "config_digest", "tokenizer_digest")}
    assert all(len(digest) == 32 and int(digest, 16) for digest in digests.values())
    assert len(set(digests.values())) == 3
    assert facts == {
        "source": str(folder),
        "revision": None,
        "commit": None,
        "architecture": {
            "class": "LlamaForCausalLM",
            "model_type": "llama",
            "n_layers": N_LAYERS,
            "width": WIDTH,
            "vocab_size": VOCAB_SIZE,
            "max_positions": 128,
            "attention": "sdpa",
            "attn_module": "self_attn",
            "mlp_module": "mlp",
        },
        "dtype": "float32",
        "device": "cpu",
        "threads": 3,
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("anchorage", "torch", "transformers", "nnsight", "tokenizers")
        }
        | {"python": platform.python_version()},
    }


def test_facts_are_json_and_the_same_each_time(folder):
    assert json.loads(json.dumps(resolve_tiny(folder), allow_nan=False)) == resolve_tiny(folder)


def test_weights_are_neither_read_nor_made_to_resolve_a_model(folder, monkeypatch):
    devices, original = set(), model_module.find_trunk

    def find_trunk(hf_model):
        devices.update(parameter.device.type for parameter in hf_model.parameters())
        return original(hf_model)

    monkeypatch.setattr(model_module, "find_trunk", find_trunk)
    monkeypatch.setattr(model_module.AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: 1 / 0)
    resolve_tiny(folder)
    assert devices == {"meta"}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("gpt2", {"class": "GPT2LMHeadModel", "max_positions": 128, "attn_module": "attn", "mlp_module": "mlp"}),
        ("opt", {"class": "OPTForCausalLM", "attn_module": "self_attn", "mlp_module": "fc2"}),
        ("bloom", {"class": "BloomForCausalLM", "max_positions": None, "attention": "eager"}),
    ],
)
def test_facts_of_other_architectures(tmp_path, kind, expected):
    architecture = resolve_tiny(save_tiny(tmp_path, kind))["architecture"]
    assert {name: architecture[name] for name in expected} == expected
    assert (architecture["n_layers"], architecture["width"]) == (N_LAYERS, WIDTH)


def test_the_attention_asked_for_is_resolved_and_used(folder):
    settings = settings_of(folder, attention="eager")
    facts = resolve_model(settings, threads=1, n_cores=1)
    assert facts["architecture"]["attention"] == "eager"
    assert load_trunk(facts, settings).module.config._attn_implementation == "eager"
    with pytest.raises(ModelError, match=r"cannot be used.*no-such"):
        resolve_tiny(folder, attention="no-such")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_trunk_that_is_loaded_is_the_one_that_was_saved(folder, dtype):
    threads = torch.get_num_threads()
    try:
        facts = resolve_tiny(folder, dtype=dtype)
        trunk = load_trunk(facts, settings_of(folder, dtype=dtype))
        assert torch.get_num_threads() == facts["threads"] == 1
    finally:
        torch.set_num_threads(threads)
    assert (type(trunk.module).__name__, trunk.n_layers) == ("LlamaModel", N_LAYERS)
    assert not trunk.module.training
    saved = tiny_model("llama").model.state_dict()
    loaded = trunk.module.state_dict()
    assert list(loaded) == list(saved)
    for name, value in saved.items():
        assert torch.equal(loaded[name], value.to(getattr(torch, dtype))), name
    assert not any(parameter.requires_grad for parameter in trunk.module.parameters())


def test_the_head_is_let_go(folder, monkeypatch):
    heads = []

    def find_trunk(hf_model):
        heads.append(weakref.ref(hf_model.lm_head))
        return original(hf_model)

    original = model_module.find_trunk
    facts = resolve_tiny(folder)
    monkeypatch.setattr(model_module, "find_trunk", find_trunk)
    trunk = load_trunk(facts, settings_of(folder))
    gc.collect()
    assert len(heads) == 1
    assert heads[0]() is None
    assert trunk.outside == {"lm_head"}


def test_loading_is_silent(folder, capfd, caplog):
    facts = resolve_tiny(folder)
    capfd.readouterr()
    with caplog.at_level(logging.WARNING):
        load_trunk(facts, settings_of(folder))
        tokenizer = load_tokenizer(facts)
        tokenizer.model_max_length = 8
        assert len(tokenizer("The ship is at anchor. " * 20).input_ids) > 8
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_model_changed_since_it_was_resolved_is_refused(folder, file):
    facts = resolve_tiny(folder)
    data = (folder / file).read_bytes()
    (folder / file).write_bytes(data + b"\n")
    with pytest.raises(IntegrityError, match=r"expected .*_digest .*delete the run's model.json"):
        load_trunk(facts, settings_of(folder))
    load_tokenizer(facts)  # the corpus does not depend on it
    (folder / file).write_bytes(data)
    load_trunk(facts, settings_of(folder))


def test_a_tokenizer_changed_since_it_was_resolved_is_refused(folder):
    facts = resolve_tiny(folder)
    flip_bit(folder / "tokenizer.json", -3)
    with pytest.raises(IntegrityError, match="expected tokenizer_digest"):
        load_tokenizer(facts)
    load_trunk(facts, settings_of(folder))


@pytest.mark.parametrize("changed", [{"dtype": "float16"}, {"revision": "main"}])
def test_facts_of_another_configuration_are_refused(folder, changed):
    with pytest.raises(ModelError, match=f"resolved for {next(iter(changed))}.*Run the plain command"):
        load_trunk(resolve_tiny(folder), settings_of(folder, **changed))


def test_the_tokenizer_that_is_loaded_is_the_one_that_was_saved(folder):
    tokenizer = load_tokenizer(resolve_tiny(folder))
    text = "A ship at anchor rides out the storm."
    assert tokenizer(text).input_ids == tiny_tokenizer()(text).input_ids
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, VOCAB_SIZE)


def test_a_missing_tensor_is_an_error_and_not_random_numbers(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"lacks 1 of the model's tensors, such as model\.layers\.1\.mlp\.up_proj\.weight"
    ):
        load_trunk(resolve_tiny(folder), settings_of(folder))


def test_a_missing_head_is_no_fault(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    load_trunk(resolve_tiny(folder), settings_of(folder))


def test_torn_weights_are_a_model_error(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot be used"):
        load_trunk(resolve_tiny(folder), settings_of(folder))


def test_an_unknown_architecture_is_refused_when_resolved(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "no-such-model"}))
    with pytest.raises(ModelError, match=r"cannot be used.*no-such-model"):
        resolve_tiny(folder)
    mamba = {"model_type": "mamba", "vocab_size": VOCAB_SIZE, "hidden_size": WIDTH, "num_hidden_layers": N_LAYERS}
    (folder / "config.json").write_text(json.dumps(mamba))
    with pytest.raises(SiteError, match="MambaForCausalLM is not supported"):
        resolve_tiny(folder)


def test_code_that_comes_with_a_model_is_not_run(folder):
    config = json.loads((folder / "config.json").read_text())
    remote = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (folder / "config.json").write_text(json.dumps(config | remote))
    (folder / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    with pytest.raises(ModelError, match="cannot be used"):
        resolve_tiny(folder)
    assert not (folder / "ran").exists()
