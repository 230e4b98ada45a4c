"""Threads, device and environment are resolved by rule: whether two runs must agree to the last bit hangs on them.

Method: machines are played by replacing what is asked about processors, quotas and GPUs.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from anchorage import model as model_module
from anchorage.errors import ModelError
from anchorage.model import (
    describe_environment,
    load_trunk,
    resolve_model,
)
from anchorage.settings import ModelSettings
from tiny_models import resolve_tiny, save_tiny


@pytest.fixture
def folder(tmp_path):
    return save_tiny(tmp_path / "tiny-llama", "llama")


@pytest.mark.parametrize(
    ("threads", "n_cores", "processors", "expected"),
    [("auto", 4, 2, 2), ("auto", 2, 4, 2), ("auto", 1, 64, 1), (3, 1, 2, 3), (1, 4, 4, 1)],
)
def test_threads(folder, monkeypatch, threads, n_cores, processors, expected):
    monkeypatch.setattr(model_module, "available_processors", lambda: processors)
    assert resolve_tiny(folder, threads=threads, n_cores=n_cores)["threads"] == expected


@pytest.mark.parametrize(
    ("cuda", "mps", "device", "threads"),
    [(True, False, "cuda", None), (False, True, "mps", None), (False, False, "cpu", 2)],
)
def test_an_automatic_device_is_a_gpu_if_there_is_one(folder, monkeypatch, cuda, mps, device, threads):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    facts = resolve_model(ModelSettings(source=str(folder)), threads=2, n_cores=4)
    assert (facts["device"], facts["threads"]) == (device, threads)


def test_a_named_device_is_kept_and_must_be_there_to_load(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    settings = ModelSettings(source=str(folder), device="cuda:1")
    facts = resolve_model(settings, threads="auto", n_cores=4)
    assert (facts["device"], facts["threads"]) == ("cuda:1", None)
    with pytest.raises(ModelError, match=r"cuda:1.*set model.device to cpu"):
        load_trunk(facts, settings)


def test_the_environment_is_flat_json_and_the_same_each_time(folder):
    facts = resolve_tiny(folder)
    environment = describe_environment(facts)
    assert json.loads(json.dumps(environment)) == environment == describe_environment(facts)
    assert not any(isinstance(value, dict | list) for value in environment.values())
    assert environment["torch"] == torch.__version__
    assert environment["threads"] == torch.get_num_threads()
    assert (environment["dtype"], environment["attention"]) == ("float32", "sdpa")
    assert environment["device"] == "cpu"
    if Path("/proc/cpuinfo").exists():
        assert environment["device_name"] in Path("/proc/cpuinfo").read_text() or not environment["device_name"]


def test_the_environment_tells_threads_dtype_and_attention_apart(folder):
    facts, threads = resolve_tiny(folder), torch.get_num_threads()
    before = describe_environment(facts)
    try:
        torch.set_num_threads(threads + 1)
        assert describe_environment(facts) == before | {"threads": threads + 1}
    finally:
        torch.set_num_threads(threads)
    assert describe_environment(facts | {"dtype": "bfloat16"}) == before | {"dtype": "bfloat16"}
