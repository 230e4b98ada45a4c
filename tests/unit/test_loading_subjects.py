"""The files that are loaded, and the first forward pass of a model loaded from one.

Goal: both formats hold the model's, the synthetic and the shard's tensors, and are described truly. Method: a tiny
captured model with tied embeddings. Oracle: transformers' own state dict, safetensors' and torch's loaders, xxhash.
Controls: another seed, a changed tensor, a missing one.
"""

from __future__ import annotations

import mmap
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

from anchorage.durable import is_temp
from anchorage.errors import MeasurementError
from anchorage.loading import forward
from anchorage.loading.methods import METHODS
from anchorage.loading.raw import mapped_tensors
from anchorage.loading.subject import Subject, read_subjects
from anchorage.loading.subjects import write_subjects
from anchorage.settings import LoadingSettings
from anchorage.store.reader import open_cache
from loads import build_subjects, digest_of
from plans import build_plan
from tiny_models import save_tiny


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("subjects")


@pytest.fixture(scope="module")
def built(root):
    return build_subjects(root, big_mib=2)


@pytest.fixture(scope="module")
def subjects(built):
    return built[1]


def real_model(root):
    return AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32).eval()


def write_again(root, folder, **loading):
    """What is loaded of the run below root, written anew."""
    plan = build_plan(root)
    seed = loading.pop("seed", 0)
    settings = plan.settings.model_copy(update={"loading": LoadingSettings(big_mib=2, **loading), "seed": seed})
    write_subjects(settings, plan.facts, root / "cache", folder, lambda line: None)
    return read_subjects(folder / "subjects.json")[1]


@pytest.mark.parametrize("name", ["weights", "big", "shard"])
def test_both_formats_hold_the_same_tensors_and_are_described(subjects, name):
    subject = subjects[name]
    copied, plain = torch.load(subject.files[".pt"]), safetensors.torch.load_file(subject.files[".safetensors"])
    assert list(copied) == list(subject.digests) == list(subject.tensor_bytes)
    for tensors in (copied, plain):
        assert {name: digest_of(tensor) for name, tensor in tensors.items()} == subject.digests
        assert {name: tensor.nbytes for name, tensor in tensors.items()} == subject.tensor_bytes
    assert subject.file_bytes == {suffix: Path(path).stat().st_size for suffix, path in subject.files.items()}
    # A .pt of tensors that share a buffer would hold the whole buffer each time.
    assert subject.file_bytes[".pt"] < sum(subject.tensor_bytes.values()) + 1024 * (len(plain) + 8)


def test_the_weights_are_the_models_with_tied_ones_once(root, subjects):
    state = real_model(root).state_dict()
    weights = safetensors.torch.load_file(subjects["weights"].files[".safetensors"])
    assert state.keys() - weights.keys() == {"lm_head.weight"}
    assert all(torch.equal(state[name], tensor) for name, tensor in weights.items())
    assert subjects["weights"].wants_all
    assert (Path(subjects["weights"].model) / "config.json").exists()


def test_the_synthetic_file_is_of_equal_finite_tensors_and_of_its_size(subjects):
    tensors = safetensors.torch.load_file(subjects["big"].files[".safetensors"])
    assert len(tensors) == 64
    assert {(tensor.dtype, tensor.nbytes) for tensor in tensors.values()} == {(torch.bfloat16, 2 * 2**20 // 64)}
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert len(set(subjects["big"].digests.values())) == 64
    assert subjects["big"].wants_all


def test_the_shard_is_the_caches_own_file_and_one_site_of_it_is_wanted(root, built, subjects):
    shard = subjects["shard"]
    with open_cache(root / "cache") as cache:
        record = cache.manifest.shards[0].tiers["few"]  # of the tiers that keep all tokens the one with most sites
        key, sites = cache.key, cache.tiers["few"]
        assert len(cache.tiers["pooled"]) > len(sites) > len(cache.tiers["residual"])
    assert (shard.tier, shard.rows) == ("few", (0, 8))
    assert Path(shard.files[".safetensors"]) == root / "cache" / record.file
    assert shard.wanted == (sites[3],)
    assert read_subjects(root / "loading/subjects.json")[0] == key
    assert {name: Subject.from_json(subject.to_json()) for name, subject in subjects.items()} == subjects


def test_the_tier_with_most_sites_serves_where_all_reduce(tmp_path):
    tiers = {"few": {"sites": ["embed"], "reduce": "last"}, "many": {"sites": ["block.*"], "reduce": "mean"}}
    _, subjects = build_subjects(tmp_path, corpus={"rows": 12}, capture={"tiers": tiers})
    assert subjects["shard"].tier == "many"


def test_the_same_input_gives_the_same_bytes(root, subjects, tmp_path):
    again, other = write_again(root, tmp_path / "again"), write_again(root, tmp_path / "other", seed=1)
    for name in ("weights", "big"):
        first, second = (Path(each[name].files[".safetensors"]).read_bytes() for each in (subjects, again))
        assert first == second
    assert {name: each.digests for name, each in again.items()} == {name: s.digests for name, s in subjects.items()}
    assert other["big"].digests != subjects["big"].digests
    assert not [path for path in tmp_path.rglob("*") if is_temp(path)]


def test_nothing_is_written_that_does_not_fit(root, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=20_000_000))
    with pytest.raises(
        MeasurementError, match=r"\d{8} bytes there, 20000000 are free.*big_mib lower than 2.*loading: null"
    ):
        write_again(root, tmp_path / "full")
    assert not (tmp_path / "full").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=30_000_000))
    write_again(root, tmp_path / "full")  # control


def test_a_dtype_that_no_header_names_is_refused(root, tmp_path, monkeypatch):
    model = torch.nn.Linear(2, 2, dtype=torch.float64)
    monkeypatch.setattr("anchorage.loading.subjects.load_model", lambda *args: (model, None))
    with pytest.raises(MeasurementError, match=r"weight of the model is of dtype torch.float64.*loading: null"):
        write_again(root, tmp_path / "odd")
    assert not (tmp_path / "odd").exists()


def test_more_tensors_than_a_header_holds_are_refused(root, tmp_path, monkeypatch):
    model = torch.nn.ParameterList(torch.empty(1) for _ in range(20_000))
    monkeypatch.setattr("anchorage.loading.subjects.load_model", lambda *args: (model, None))
    with pytest.raises(MeasurementError, match=r"the model has 20000 tensors, more than a header.*loading: null"):
        write_again(root, tmp_path / "many")
    assert not (tmp_path / "many").exists()


def test_the_module_of_a_models_class_is_known_before_the_model_is_built(root, subjects):
    assert forward.find_model_module(subjects["weights"].model) == type(real_model(root)).__module__


def forward_of(subject, tensors):
    model = forward.build_empty(subject, torch.float32)
    forward.assign_tensors(model, tensors)
    return forward.run_row(model)


def real_logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(64)[None] % model.config.vocab_size, use_cache=False).logits


@pytest.mark.parametrize("method", ["torch.load", "mmap-random", "ours"])
def test_the_first_forward_pass_is_the_real_models(root, subjects, method):
    weights, line = subjects["weights"], METHODS[method]
    tensors = line.load(weights.files[line.suffix], weights, weights.wanted)
    assert torch.equal(forward_of(weights, tensors), real_logits(real_model(root)))
    model = forward.build_empty(weights, torch.float32)
    assert torch.equal(forward.first_forward(model, tensors), real_logits(real_model(root)))
    assert {name: digest_of(tensors[name]) for name in weights.wanted} == weights.digests


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_the_first_forward_pass_runs_on_memory_that_cannot_be_written(root, subjects):
    weights = subjects["weights"]
    path = weights.files[".safetensors"]
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    tensors = mapped_tensors(path, mapping, weights.wanted)
    assert torch.equal(forward_of(weights, tensors), real_logits(real_model(root)))


@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "gpt_neox", "bloom"])
@pytest.mark.parametrize("tied", [True, False])
def test_buffers_that_no_file_holds_are_computed(tmp_path, kind, tied):
    save_tiny(tmp_path, kind, tie_word_embeddings=tied)
    real = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    subject = Subject("weights", {}, {}, {}, {}, (), model=str(tmp_path))
    tensors = {name: tensor for name, tensor in real.state_dict().items() if not (tied and name.startswith("lm_head"))}
    assert torch.equal(forward_of(subject, tensors), real_logits(real))


def test_another_tensor_shows_in_the_forward_pass(root, subjects):
    tensors = safetensors.torch.load_file(subjects["weights"].files[".safetensors"])
    right = forward_of(subjects["weights"], tensors)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] += 1
    assert not torch.equal(forward_of(subjects["weights"], tensors), right)


def test_tensors_of_another_model_are_refused(subjects):
    weights, line = subjects["weights"], METHODS["load_file"]
    tensors = dict(line.load(weights.files[line.suffix], weights, weights.wanted))
    tensors["other.weight"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
    with pytest.raises(MeasurementError, match=r"1 are missing \(model.layers.0.mlp.up_proj.weight\), 1 unknown"):
        forward_of(weights, tensors)
