"""Capture against raw hooks, stopped and resumed, and fed what it must refuse.

Goal: what is stored is bit for bit what the model computes, in every tier and dtype; a stopped capture goes on where
it was; nothing that does not fit is stored. Method: tiny random models through the library. Oracle: raw hooks on the
transformers model.
"""

from __future__ import annotations

import collections
import errno
import json
import shutil
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from anchorage import capture as capture_module
from anchorage.capturer import Capturer, _check_fits
from anchorage.durable import read_lines
from anchorage.errors import AnchorageError, CaptureError, CorpusError, SettingsError, SiteError
from anchorage.memory import COLUMNS, write_memory_table
from anchorage.store.names import memory_log
from anchorage.store.staging import Staging
from plans import build_plan, capture, raw_hidden_states
from stores import tree

ALL_SITES = {"sites": ["embed", "attn.*", "mlp.*", "block.*"]}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_what_is_stored_is_what_raw_hooks_see(tmp_path, dtype):
    tiers = {
        "every": ALL_SITES,
        "mean": ALL_SITES | {"reduce": "mean"},
        "last": ALL_SITES | {"reduce": "last", "rows": 53},
        "raw": {"sites": ["model.layers.1.mlp.up_proj", "block.0"], "rows": 9},
    }
    plan = build_plan(tmp_path, capture={"tiers": tiers, "storage_dtype": dtype})
    cache = capture(plan, tmp_path / "cache")
    oracle, stored = raw_hidden_states(plan), getattr(torch, dtype)
    assert plan.layout.n_rows % 4  # a short last batch is among them
    assert len(oracle) == 10
    for site, value in oracle.items():
        assert torch.equal(cache.read(site, tier="every"), value.to(stored))
        assert torch.equal(cache.read(site, tier="mean"), value.mean(dim=1).to(stored))
        assert torch.equal(cache.read(site, tier="last"), value[:53, -1].to(stored))
    assert cache.read("model.layers.1.mlp.up_proj").shape == (9, 16, 32)  # as wide as it is, not as the trunk
    assert not torch.equal(oracle["block.0"], oracle["block.1"])  # control: the sites do differ
    assert (cache.tokens().numpy() == plan.corpus.rows(0, 86)).all()


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("stop_after", [0, 1, 5])
def test_a_stopped_capture_goes_on_where_it_was(tmp_path, monkeypatch, parts, stop_after):
    plan = build_plan(tmp_path, capture={"parts": parts})
    whole = tree((capture(plan, tmp_path / "whole")).folder)
    shutil.rmtree(tmp_path / "staging")
    commit, count = Staging.commit, collections.Counter()

    def stop(self, *arguments, **keywords):
        if count["commits"] == stop_after:
            raise KeyboardInterrupt
        count["commits"] += 1
        return commit(self, *arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(Staging, "commit", stop)
        with pytest.raises(KeyboardInterrupt):
            capture(plan, tmp_path / "stopped")
    lines: list[str] = []
    capture(plan, tmp_path / "stopped", lines)
    reused = sum(int(line.split("reused ")[1].split(",")[0]) for line in lines if ", captured" in line)
    captured = sum(int(line.split("captured ")[1].split(" ")[0]) for line in lines if ", captured" in line)
    assert (reused, captured) == (stop_after, plan.layout.n_shards - stop_after)
    assert tree(tmp_path / "stopped") == whole


def test_a_slow_writer_changes_no_byte(tmp_path, monkeypatch):
    plan = build_plan(tmp_path)
    whole = tree(capture(plan, tmp_path / "whole").folder)
    shutil.rmtree(tmp_path / "staging")
    write_files = Staging.write_files

    def slow(self, *arguments):
        time.sleep(0.05)  # the next shard is filled meanwhile, into the other buffers
        return write_files(self, *arguments)

    monkeypatch.setattr(Staging, "write_files", slow)
    assert tree(capture(plan, tmp_path / "slow").folder) == whole


def test_a_failed_write_ends_the_capture_and_keeps_what_was_durable(tmp_path, monkeypatch):
    plan, calls = build_plan(tmp_path), []
    write_files = Staging.write_files

    def full(self, shard, *arguments):
        calls.append(shard)
        if shard == 2:
            raise OSError(errno.ENOSPC, "planted")
        return write_files(self, shard, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Staging, "write_files", full)
        with pytest.raises(OSError, match="planted"):
            capture(plan, tmp_path / "cache")
    assert calls == [0, 1, 2]
    lines: list[str] = []
    capture(plan, tmp_path / "cache", lines)
    assert any("part 0: reused 2, captured 4 shards" in line for line in lines)


def scale_weights(folder, factor, name="model.layers.1.mlp.down_proj.weight"):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[name] *= factor
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_planted_overflow_stops_at_float16_and_passes_at_bfloat16(tmp_path):
    build_plan(tmp_path)
    scale_weights(tmp_path / "model", 1e7)
    plan = build_plan(tmp_path)
    with pytest.raises(CaptureError, match=r"site mlp\.1, row 0: maximum .* beyond float16's 65504.*bfloat16"):
        capture(plan, tmp_path / "cache")
    assert not list((tmp_path / "staging").rglob("*.safetensors*"))
    capture(build_plan(tmp_path, capture={"storage_dtype": "bfloat16"}), tmp_path / "cache")


def test_a_model_that_gives_nan_is_named(tmp_path):
    build_plan(tmp_path)
    scale_weights(tmp_path / "model", float("nan"))
    with pytest.raises(CaptureError, match=r"site mlp\.1, row 0: the model itself gives inf or NaN"):
        capture(build_plan(tmp_path, capture={"storage_dtype": "float32"}), tmp_path / "cache")


def test_the_largest_float16_is_stored(tmp_path):
    value, stored = torch.full((1, 1, 1), 65519.0), torch.empty((1, 1, 1), dtype=torch.float16)
    stored.copy_(value)
    _check_fits(value, stored, "embed", 0)  # rounds down: still finite
    assert stored.item() == 65504
    value += 1
    stored.copy_(value)
    with pytest.raises(CaptureError, match="row 7"):
        _check_fits(value, stored, "embed", 7)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"capture": {"tiers": {"a": {"sites": ["block.9"]}}}}, SiteError, "block.9"),
        ({"capture": {"tiers": {"a": {"sites": ["blok.1"]}}}}, SiteError, "did you mean"),
        ({"capture": {"tiers": {"a": {"sites": ["model.layers.1.mlp.upproj"]}}}}, SiteError, "up_proj"),
        ({"capture": {"tiers": {"a": {"sites": ["lm_head"]}}}}, SiteError, "lm_head"),
        ({"corpus": {"seq_len": 200, "rows": 2}}, SettingsError, "at most 128 positions"),
    ],
)
def test_what_does_not_fit_the_model_is_told_before_any_forward_pass(tmp_path, monkeypatch, changes, error, said):
    monkeypatch.setattr(Capturer, "fill", None)
    with pytest.raises(error, match=said):
        capture(build_plan(tmp_path, **changes), tmp_path / "cache")


def test_a_corpus_of_another_shape_is_refused(tmp_path):
    plan, other = build_plan(tmp_path), build_plan(tmp_path, corpus={"rows": 20})
    mixed = type(plan)(plan.settings, plan.facts, other.tokens_path)
    with pytest.raises(CorpusError, match=r"\(20, 16\).*\(86, 16\)"):
        capture(mixed, tmp_path / "cache")


def test_a_disk_too_full_is_told_before_the_model_is_loaded(tmp_path, monkeypatch):
    plan = build_plan(tmp_path)
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(capture_module, "load_trunk", None)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 300 << 10))
    with pytest.raises(CaptureError, match=r"needs another .* GiB.*are free.*make prune.*staging_dir"):
        capture(plan, tmp_path / "cache")


def test_a_changed_weight_is_another_key(tmp_path):
    plan = build_plan(tmp_path)
    scale_weights(tmp_path / "model", 1.5)
    with pytest.raises(AnchorageError, match="model"):  # the resolved facts no longer hold
        capture(plan, tmp_path / "cache")
    assert build_plan(tmp_path).key != plan.key


def test_the_memory_table_covers_all_parts_and_resumed_runs(tmp_path):
    plan = build_plan(tmp_path, capture={"parts": 2})
    capture(plan, tmp_path / "cache")
    (plan.staging / "pooled.shard-000003.safetensors").unlink()
    capture(plan, tmp_path / "cache")
    logs = sorted(plan.staging.glob(memory_log("*")))
    assert sum(len(read_lines(log)) for log in logs) == plan.layout.n_shards + 1
    write_memory_table(tmp_path / "memory.csv", tmp_path / "cache/manifest.jsonl", logs)
    header, *lines = (tmp_path / "memory.csv").read_text().splitlines()
    assert header.split(",") == COLUMNS
    rows = [dict(zip(COLUMNS, line.split(","), strict=True)) for line in lines]
    assert [int(row["shard"]) for row in rows] == list(range(plan.layout.n_shards))
    assert sum(int(row["tokens"]) for row in rows) == 86 * 16
    newest = max((json.loads(line) for log in logs for line in read_lines(log)), key=lambda line: line["time"])
    assert rows[3]["forward_s"] == str(newest["forward_s"])
    for row in rows:
        assert row["key"] == plan.key
        assert 10 < float(row["rss_mib"]) <= float(row["peak_mib"]) < 8000
