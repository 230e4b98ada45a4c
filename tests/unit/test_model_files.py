"""A model's files are found in a folder or on the Hub, digested, and refused with the remedy when they will not do.

Method: tiny complete model folders, changed by a bit or short of a file. The Hub is played by a function, or cut off.
"""

from __future__ import annotations

import json
from fnmatch import fnmatch

import pytest

from anchorage import model_files
from anchorage.errors import ModelError
from anchorage.model import (
    find_model_folder,
    load_tokenizer,
    load_trunk,
    resolve_model,
)
from anchorage.settings import ModelSettings
from tiny_models import flip_bit, resolve_tiny, save_tiny

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def folder(tmp_path):
    return save_tiny(tmp_path / "tiny-llama", "llama")


def play_hub(monkeypatch, folder):
    """Let the Hub give a folder; returns the list of what it was asked for."""
    asked = []

    def snapshot_download(source, *, revision, **patterns):
        asked.append((source, revision))
        return str(folder)

    monkeypatch.setattr(model_files, "snapshot_download", snapshot_download)
    return asked


@pytest.mark.parametrize(
    ("file", "changed"),
    [
        ("model.safetensors", "weights_digest"),
        ("tokenizer.json", "tokenizer_digest"),
        ("tokenizer_config.json", "tokenizer_digest"),
    ],
)
def test_one_flipped_bit_changes_one_digest(folder, file, changed):
    before = resolve_tiny(folder)
    flip_bit(folder / file, -3)
    after = resolve_tiny(folder)
    assert {name for name in before if before[name] != after[name]} == {changed}


def test_a_changed_configuration_changes_its_digest(folder):
    before = resolve_tiny(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    assert {name for name in before if before[name] != resolve_tiny(folder)[name]} == {"config_digest"}


@pytest.mark.parametrize(
    "name", ["vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json", "spm.model"]
)
def test_every_tokenizer_file_is_in_the_digest(folder, name):
    before = resolve_tiny(folder)["tokenizer_digest"]
    (folder / name).write_text("{}")
    assert resolve_tiny(folder)["tokenizer_digest"] != before


def test_a_chat_template_is_not(folder):
    before = resolve_tiny(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "README.md").write_text("a model")
    assert resolve_tiny(folder) == before


def test_a_missing_folder_is_named_with_the_remedy(tmp_path):
    with pytest.raises(ModelError, match=r"no/such/model does not exist\. Set model\.source"):
        resolve_tiny("no/such/model")
    with pytest.raises(ModelError, match="does not exist"):
        resolve_tiny(tmp_path / "nothing")


def test_a_folder_without_config_weights_or_tokenizer_is_refused(folder):
    (folder / "config.json").rename(folder / "config.away")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve_tiny(folder)
    (folder / "config.away").rename(folder / "config.json")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ModelError, match="has no tokenizer"):
        resolve_tiny(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"has no \*\.safetensors file.*never read.*save_pretrained"):
        resolve_tiny(folder)


def test_a_hub_model_is_loaded_at_the_commit_that_was_resolved(tmp_path, monkeypatch):
    folder = save_tiny(tmp_path / "snapshots" / COMMIT, "gpt2")
    asked = play_hub(monkeypatch, folder)
    settings = ModelSettings(source="acme/tiny", revision="main", device="cpu")
    facts = resolve_model(settings, threads=1, n_cores=1)
    assert (facts["source"], facts["revision"], facts["commit"]) == ("acme/tiny", "main", COMMIT)
    load_trunk(facts, settings)
    load_tokenizer(facts)
    assert asked == [("acme/tiny", "main"), ("acme/tiny", COMMIT), ("acme/tiny", COMMIT)]


def test_the_hub_is_asked_for_neither_pickles_nor_other_formats(tmp_path, monkeypatch):
    patterns = {}
    folder = save_tiny(tmp_path / COMMIT, "gpt2")
    monkeypatch.setattr(model_files, "snapshot_download", lambda source, **asked: patterns.update(asked) or str(folder))
    assert find_model_folder("gpt2", None) == (folder, COMMIT)

    def is_fetched(file):
        allowed = any(fnmatch(file, pattern) for pattern in patterns["allow_patterns"])
        return allowed and not any(fnmatch(file, pattern) for pattern in patterns["ignore_patterns"])

    wanted = ["config.json", "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    wanted += ["tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "tokenizer.model"]
    assert [file for file in wanted if not is_fetched(file)] == []
    others = [
        "pytorch_model.bin",
        "onnx/config.json",
        "onnx/model.safetensors",
        "consolidated.safetensors",
        "tf_model.h5",
    ]
    assert [file for file in others if is_fetched(file)] == []


def test_a_hub_id_out_of_reach_is_a_model_error_at_once(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError) as caught:
        find_model_folder("acme/none", None)
    message = str(caught.value)
    assert "'acme/none' (revision default) is no local folder" in message
    assert "hf download acme/none" in message
    assert "HF_HUB_OFFLINE is 1" in message
    assert caught.value.__suppress_context__  # the message is all that is shown


@pytest.mark.parametrize("error", [OSError("no route to host"), ValueError(""), KeyError("x"), RuntimeError("a\nb")])
def test_whatever_the_hub_raises_is_a_model_error(monkeypatch, error):
    def snapshot_download(*args, **kwargs):
        raise error

    monkeypatch.setattr(model_files, "snapshot_download", snapshot_download)
    with pytest.raises(ModelError, match=rf"did not give it \({type(error).__name__}: "):
        find_model_folder("acme/none", "main")
