"""Copies to a device.

Goal: each way brings the file's bytes to the device, and without one the table says so. Method: the CPU plays the
device; pinned memory, which no CPU has, is played by a copy. Oracle: the digests of the tensors as they were written.
Control: a way that brings other bytes is an error. On a GPU this has not run.
"""

from __future__ import annotations

import pytest
import torch

from anchorage.errors import IntegrityError
from anchorage.loading import devicecopy
from anchorage.loading.devicecopy import COLUMNS, WAYS, Way, copy_to_device, measure_device_copies
from held import build_subject

MIB = 16


def quiet(line):
    pass


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    return build_subject(tmp_path_factory.mktemp("device"), MIB)


@pytest.fixture
def pinned(monkeypatch):
    """How often a tensor was pinned."""
    calls = []

    def pin(tensor):
        calls.append(tensor.nbytes)
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    return calls


@pytest.mark.parametrize("way", WAYS)
def test_each_way_brings_the_bytes_of_the_file(subject, way, pinned):
    found = copy_to_device(subject=subject.to_json(), way=way, device="cpu")
    assert set(found) < set(COLUMNS)
    assert found["tensor_bytes"] == MIB * 2**20
    assert found["total_s"] == pytest.approx(found["load_s"] + found["copy_s"], abs=1e-5)
    assert (found["load_s"] == 0) == (way == "load_file(device)")
    assert found["peak_mib"] >= found["base_mib"]
    assert found["device_peak_mib"] is None  # the device has no memory of its own
    assert pinned == ([MIB * 2**20 // 4] * 4 if "pin" in way else [])


def test_a_way_that_brings_other_bytes_is_an_error(subject, monkeypatch):
    to, change = WAYS["load_file, to"], lambda tensor, device: -tensor
    monkeypatch.setitem(WAYS, "changed", Way(to.suffix, to.load, change))
    with pytest.raises(IntegrityError, match="'t0'"):
        copy_to_device(subject=subject.to_json(), way="changed", device="cpu")


def test_every_way_is_measured_as_often_as_wanted_in_a_drawn_order(subject, monkeypatch):
    known = {name: way for name, way in WAYS.items() if "pin" not in name}  # the CPU pins nothing
    monkeypatch.setattr(devicecopy, "WAYS", known)
    monkeypatch.setattr(devicecopy, "find_device", lambda: "cpu")
    table = measure_device_copies("k", subject, repeats=2, seed=0, log=quiet)
    assert list(table.columns) == list(COLUMNS)
    assert list(table["way"]) == [way for way in known for _ in range(2)]
    assert list(table["repeat"]) == [0, 1] * len(known)
    assert list(table["position"]) != sorted(table["position"]) == list(range(2 * len(known)))
    assert set(table["status"]) == {"measured"}
    assert set(table["device"]) == {"cpu"}


def test_without_a_gpu_it_is_not_run(subject, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    table = measure_device_copies("k", subject, repeats=3, seed=0, log=quiet)
    assert list(table["way"]) == list(WAYS)
    assert set(table["status"]) == {"not run"}
    assert set(table["reason"]) == {"no CUDA device"}
    assert table["total_s"].isna().all()
