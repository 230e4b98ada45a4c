"""Captures that leak on purpose, each to be run in a process of its own: what the leak tests judge."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from anchorage.capturer import Capturer
from anchorage.plan import Plan
from anchorage.trunk import SiteReader
from plans import build_plan, capture
from tiny_models import save_tiny
from workflows import write_corpus

BATCH_ROWS = 2
WEIGHTS = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
_OUTPUTS_MIB = 3 * BATCH_ROWS * 16 * 128 * 4 / 2**20  # embed and two blocks, 16 tokens a row, float32
KEPT_MIB = {"allocation": 1.0, "graph": _OUTPUTS_MIB, "list": _OUTPUTS_MIB}  # of a batch, at least
FILL, READ = Capturer.fill, SiteReader.read
KEPT: list[Any] = []


def build(root: Path, n_batches: int) -> Plan:
    """A plan of so many batches, in ten shards."""
    if not (root / "model").exists():
        save_tiny(root / "model", "llama", **WEIGHTS)
        write_corpus(root / "text.jsonl", n_texts=n_batches)  # a text is over 40 tokens, a batch 32
    n_rows = n_batches * BATCH_ROWS
    tiers = {"all": {"sites": ["embed", "block.*"]}}
    shape = {"batch_rows": BATCH_ROWS, "shard_rows": n_rows // 10, "parts": 1, "tiers": tiers}
    return build_plan(root, corpus={"rows": n_rows}, capture=shape)


def fill_and_allocate(self, *batch):
    FILL(self, *batch)
    KEPT.append(bytearray(b"x") * 2**20)  # touched: memory that was only asked for is not there yet


def fill_with_grad(self, *batch):
    self.trunk.module.requires_grad_(True)
    with mock.patch.object(torch, "no_grad", contextlib.nullcontext):
        FILL(self, *batch)


def read_and_keep_outputs(self, ids, take, **padding):
    def take_and_keep(site, value):
        assert value.requires_grad
        KEPT.append(value)
        take(site, value.detach())

    READ(self, ids, take_and_keep, **padding)


def read_and_keep_copies(self, ids, take, **padding):
    def take_and_keep(site, value):
        KEPT.append(value.clone())
        take(site, value)

    READ(self, ids, take_and_keep, **padding)


LEAKS: dict[str, dict[str, Any]] = {
    "clean": {},
    "allocation": {"fill": fill_and_allocate},
    "graph": {"fill": fill_with_grad, "read": read_and_keep_outputs},
    "list": {"read": read_and_keep_copies},
}


def run_case(root: Path, case: str, n_batches: int) -> None:
    """Capture with a leak planted, for the rest of this process."""
    Capturer.fill, SiteReader.read = LEAKS[case].get("fill", FILL), LEAKS[case].get("read", READ)
    capture(build(root, n_batches), root / "cache")
