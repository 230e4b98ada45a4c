"""Copies beside the forward pass: the same bytes, the same refusals.

Goal: with overlap_copies nothing is read before it has been copied. Method: capture the same plan both ways, on a GPU
kept busy meanwhile. Oracle: the bytes of the capture that waits for every copy. Not run where there is no GPU.
"""

from __future__ import annotations

import shutil

import pytest
import torch
from test_capture import scale_weights

from anchorage.capturer import Capturer
from anchorage.errors import CaptureError
from anchorage.model import load_trunk
from plans import build_plan, capture
from stores import tree

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="not run: there is no GPU here")


def test_without_a_gpu_the_key_changes_nothing(tmp_path):
    plan = build_plan(tmp_path, capture={"overlap_copies": True})
    assert not Capturer(load_trunk(plan.facts, plan.settings.model), ["embed"], "cpu", overlap=True).overlaps
    whole = tree(capture(plan, tmp_path / "one").folder)
    shutil.rmtree(tmp_path / "staging")
    assert tree(capture(build_plan(tmp_path), tmp_path / "other").folder) == whole


@needs_gpu
def test_copies_beside_a_busy_gpu_give_the_same_bytes(tmp_path):
    plans = [
        build_plan(tmp_path, model={"device": "cuda"}, capture={"overlap_copies": overlap}) for overlap in (False, True)
    ]
    waited = tree(capture(plans[0], tmp_path / "waited").folder)
    shutil.rmtree(tmp_path / "staging")
    busy, other = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(other):
        for _ in range(300):
            busy = torch.tanh(busy @ busy)
    assert tree(capture(plans[1], tmp_path / "overlapped").folder) == waited


@needs_gpu
def test_without_the_wait_bytes_would_differ(tmp_path, monkeypatch):
    """The control: copies held up by other work on their stream, and read at once."""
    plan = build_plan(tmp_path, model={"device": "cuda"}, capture={"overlap_copies": True})
    waited = tree(capture(plan, tmp_path / "waited").folder)
    shutil.rmtree(tmp_path / "staging")
    record, busy = torch.cuda.Stream.record_event, torch.randn(4096, 4096, device="cuda")
    wait_stream = torch.cuda.Stream.wait_stream

    def hold_up(self, stream):
        wait_stream(self, stream)
        with torch.cuda.stream(self):
            torch.tanh(busy @ busy)

    class NoWait:
        def synchronize(self):
            pass

    monkeypatch.setattr(torch.cuda.Stream, "wait_stream", hold_up)
    monkeypatch.setattr(torch.cuda.Stream, "record_event", lambda self: NoWait())
    assert tree(capture(plan, tmp_path / "read too early").folder) != waited
    monkeypatch.setattr(torch.cuda.Stream, "record_event", record)
    shutil.rmtree(tmp_path / "staging")
    assert tree(capture(plan, tmp_path / "held up").folder) == waited


@needs_gpu
def test_an_overflow_is_named_as_without(tmp_path):
    build_plan(tmp_path)
    scale_weights(tmp_path / "model", 1e7)
    plan = build_plan(tmp_path, model={"device": "cuda"}, capture={"overlap_copies": True})
    with pytest.raises(CaptureError, match=r"site mlp\.1, row 0: maximum .* beyond float16's 65504"):
        capture(plan, tmp_path / "cache")
