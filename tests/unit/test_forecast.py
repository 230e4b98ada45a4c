"""Forecasts of time and bytes are what the measured part implies, and say when they were off.

Goal: the first quarter of a run predicts the whole by simple, stated arithmetic; the forecast of a longer run follows;
the tutorial's plan for 50,000 rows takes the bytes it tells. Method: manifests and memory tables made by hand. Oracle:
numbers worked out here, scipy for Student's t.
"""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import yaml
from scipy import stats

from anchorage.corpusfile import RowWriter
from anchorage.errors import AnchorageError
from anchorage.extrapolation import extrapolate
from anchorage.forecast import Rates, Sample, forecast, student_t
from anchorage.plan import Plan
from anchorage.settings import load_settings
from anchorage.store.manifest import FileRecord, Manifest, ShardRecord

CONFIG = yaml.safe_load((Path(__file__).parents[2] / "config/test.yaml").read_text())
ROW_BYTES = {"all": 1000, "few": 9000}


def build_plan(root: Path, config: dict, *, n_layers: int = 3, width: int = 16) -> Plan:
    """A plan of which nothing but the shape of the corpus is real."""
    settings = load_settings(config)
    path = root / "tokens.safetensors"
    with open(path, "wb") as file:
        writer = RowWriter(file, "U16", n_rows=1, seq_len=settings.corpus.seq_len)
        writer.write(np.zeros((1, settings.corpus.seq_len), np.uint16), np.zeros(1, np.int64), np.zeros(1, np.int64))
        writer.finish()
    architecture = {"n_layers": n_layers, "width": width, "attention": "sdpa"}
    facts = dict.fromkeys(("weights_digest", "config_digest", "tokenizer_digest"), "0" * 32)
    return Plan(
        settings, facts | {"architecture": architecture, "dtype": "float32", "device": "cpu", "threads": 1}, path
    )


class Run:
    """A finished run of 8-row shards: tier ``all``, and ``few`` for the first ``few_rows``; times to be changed."""

    def __init__(self, root: Path, n_rows: int = 64, *, few_rows: int = 1000, parts: int = 1) -> None:
        config = copy.deepcopy(CONFIG)
        config["corpus"]["rows"], config["forecast_rows"], config["probe"] = n_rows, 800, None
        tiers = {"all": {"sites": ["block.1"]}, "few": {"sites": ["block.2"], "rows": few_rows}}
        config["capture"] |= {"tiers": tiers, "parts": parts}
        self.plan = build_plan(root, config)
        shards = range(self.plan.layout.n_shards)
        self.table = [self._line(shard) for shard in shards]
        self.shards = [self._record(shard) for shard in shards]

    def _line(self, shard: int) -> dict:
        times = {"forward_s": 2.0, "hash_s": 0.125, "write_s": 0.5, "shard_s": 2.125}
        return {"key": self.plan.key, "process": "1-1", "shard": shard} | times

    def _record(self, shard: int) -> ShardRecord:
        layout, rows = self.plan.layout, self.plan.layout.shard_rows_range(shard)
        # In the manifest's order, which is not the configuration's.
        tiers = {tier: len(layout.tier_shard_rows(tier, shard)) for tier in reversed(layout.shard_tiers(shard))}
        files = {tier: FileRecord(f"{tier}/{shard}", n * ROW_BYTES[tier], "", n, "") for tier, n in tiers.items()}
        return ShardRecord(shard, (rows.start, rows.stop), {}, files)

    def set(self, shards: range | list[int], **values: object) -> None:
        for shard in shards:
            self.table[shard] |= values
            self.table[shard]["shard_s"] = self.table[shard]["forward_s"] + self.table[shard]["hash_s"]

    def extrapolate(self, log: list[str] | None = None) -> dict:
        lines = [{name: str(value) for name, value in line.items()} for line in self.table]
        told = [] if log is None else log
        return extrapolate(self.plan, Manifest(self.plan.key, {}, self.shards), lines, told.append)


def test_equal_shards_are_predicted_exactly(tmp_path):
    log: list[str] = []
    found = Run(tmp_path).extrapolate(log)
    assert (found["n_shards"], found["n_shards_logged"], found["n_shards_used"]) == (8, 8, 2)
    assert found["active_s"] == {"predicted": 17.5, "measured": 8 * 2.125 + 0.5, "relative_error": 0.0}
    assert found["bytes"] == {"predicted": 640_000, "measured": 640_000, "relative_error": 0.0}
    longer = found["forecast"]
    assert (longer["rows"], longer["n_shards"], longer["n_files"]) == (800, 100, 200)
    assert longer["hours"] == pytest.approx((100 * 2.125 + 0.5) / 3600)
    assert longer["hours_low"] == longer["hours_high"] == longer["hours"]  # equal shards have no spread
    assert longer["tiers"]["few"] == {"rows": 800, "gib": 800 * 9000 / 2**30}
    assert longer["gib"] == pytest.approx(800 * 10_000 / 2**30)
    # 16 tokens of width 16 in float16; 16 token ids of two bytes; digests of the site and of the ids.
    assert longer["one_layer_gib"] == 800 * (16 * 16 * 2 + 16 * 2 + 2 * 8) / 2**30
    assert any("predicted 17.5, measured 17.5 (+0.0 %)" in line for line in log)
    assert any("800 rows: 3.5 min (3.5 to 3.5)" in line for line in log)


def test_a_prediction_that_is_off_is_reported_as_off(tmp_path):
    run = Run(tmp_path)
    run.set(range(2, 8), forward_s=3.875)
    found = run.extrapolate()["active_s"]
    assert (found["predicted"], found["measured"]) == (17.5, 2 * 2.125 + 6 * 4 + 0.5)
    assert found["relative_error"] == pytest.approx(17.5 / 28.75 - 1)


@pytest.mark.parametrize("n_rows", [64, 96], ids=["two shards used", "three shards used"])
def test_a_slow_first_shard_counts_once(tmp_path, n_rows):
    run = Run(tmp_path, n_rows)
    run.set([0], forward_s=9.875)
    assert run.extrapolate()["active_s"]["relative_error"] == 0
    # Control: a slow shard in the midst of a process is no warm-up, and counts.
    run.set([0], forward_s=2.0)
    run.set([1], forward_s=9.875)
    assert run.extrapolate()["active_s"]["relative_error"] > 0.5


def test_a_resumed_run_has_two_first_shards(tmp_path):
    run = Run(tmp_path, 128, parts=2)  # 16 shards: the quarter is 0 to 3, killed after 1
    run.set(range(2, 16), process="2-2")
    run.set([0, 2], forward_s=8.0)
    found = run.extrapolate()
    assert found["n_shards_used"] == 4
    # Two last writes, since there are two parts.
    assert found["active_s"] == {"predicted": 47.0, "measured": 2 * 8.125 + 14 * 2.125 + 2 * 0.5, "relative_error": 0.0}


def test_a_slow_disk_is_waited_for(tmp_path):
    run = Run(tmp_path)
    run.set(range(8), write_s=5.0)
    for line in run.table[1:]:
        line["shard_s"] = 5.0  # the next shard is ready after 2.125 s, and waits for the disk
    found = run.extrapolate()["active_s"]
    assert found == {"predicted": 2.125 + 7 * 5 + 5, "measured": 2.125 + 7 * 5 + 5, "relative_error": 0.0}


def test_tiers_that_end_inside_the_run(tmp_path):
    run = Run(tmp_path, few_rows=28)  # shards 0 to 2 hold 8 rows of it, shard 3 holds 4, the others none
    run.set(range(4, 8), forward_s=1.0, hash_s=0.0625)
    found = run.extrapolate()
    assert found["bytes"] == {"predicted": 64 * 1000 + 28 * 9000, "measured": 316_000, "relative_error": 0.0}
    # The quarter cannot know that the later shards' forward passes are shorter: only the digests follow the bytes.
    hash_s = 0.125 / 80_000
    predicted = 3 * 2.125 + (2 + 44_000 * hash_s) + 4 * (2 + 8000 * hash_s) + 8000 * 0.5 / 80_000
    assert found["active_s"]["predicted"] == pytest.approx(predicted)
    assert found["active_s"]["measured"] == 4 * 2.125 + 4 * 1.0625 + 0.5
    # The forecast knows both kinds of shards.
    hash_s = (4 * 0.125 + 4 * 0.0625) / 316_000
    forward_s = 4 * 2.0 + 96 * 1.0
    last_write_s = 8000 * 8 * 0.5 / 316_000
    assert found["forecast"]["n_files"] == 104
    n_bytes = 800 * 1000 + 28 * 9000
    assert found["forecast"]["hours"] * 3600 == pytest.approx(forward_s + n_bytes * hash_s + last_write_s)


def test_a_log_with_holes_measures_nothing(tmp_path):
    run = Run(tmp_path)
    del run.table[5]
    found = run.extrapolate()
    assert found["n_shards_logged"] == 7
    assert found["active_s"] == {"predicted": 17.5, "measured": None, "relative_error": None}
    run.table.clear()
    log: list[str] = []
    found = run.extrapolate(log)
    assert found["n_shards_logged"] == 0
    assert found["active_s"]["predicted"] is found["forecast"]["hours"] is found["forecast"]["hours_low"] is None
    assert found["bytes"]["relative_error"] == 0
    assert any("predicted unknown, measured unknown" in line for line in log)


def test_one_shard_predicts_without_an_interval(tmp_path):
    found = Run(tmp_path, 8).extrapolate()
    assert found["n_shards_used"] == 1
    assert found["active_s"]["relative_error"] == 0
    assert found["forecast"]["hours"] > 0
    assert found["forecast"]["hours_low"] is found["forecast"]["hours_high"] is None


def test_another_key_is_refused(tmp_path):
    run = Run(tmp_path)
    run.set([3], key="other")
    with pytest.raises(AnchorageError, match="other"):
        run.extrapolate()


def test_the_interval_is_that_of_students_t(tmp_path):
    run = Run(tmp_path)
    seconds = [2.0, 2.5, 2.25, 2.0, 3.0, 2.75, 2.5, 2.0]
    for shard, forward_s in enumerate(seconds):
        run.set([shard], forward_s=forward_s, hash_s=0.0)
    found = run.extrapolate()["forecast"]
    half = stats.t.ppf(0.975, 7) * np.std(seconds, ddof=1) * 100 * np.sqrt(1 / 8 + 1 / 100)
    assert found["hours"] * 3600 == pytest.approx(100 * np.mean(seconds) + 0.5)
    assert (found["hours_high"] - found["hours"]) * 3600 == pytest.approx(half, rel=1e-3)
    assert (found["hours"] - found["hours_low"]) * 3600 == pytest.approx(half, rel=1e-3)


def test_the_interval_holds_for_simulated_runs(tmp_path):
    # Coverage: of 200 runs of 100 shards, of which 8 were seen, some 95 % lie within.
    plan, random = Run(tmp_path).plan.with_rows(800), np.random.default_rng(0)
    inside = 0
    for _ in range(200):
        seen, whole = random.normal(2, 0.2, 8), random.normal(2, 0.2, 100).sum()
        samples = [Sample(frozenset(("all", "few")), 8, 80_000, second, 0.0, second) for second in seen]
        found = forecast(plan, ROW_BYTES, Rates(samples, 0.0))
        inside += found["hours_low"] <= whole / 3600 <= found["hours_high"]
    assert 0.91 < inside / 200 < 0.99


def test_students_t():
    for dof in (1, 2, 5, 10, 11, 20, 100, 10_000):
        assert student_t(dof) == pytest.approx(stats.t.ppf(0.975, dof), rel=1e-3)


def gpt2_plan(root: Path, change=lambda tiers: None) -> Plan:
    config = yaml.safe_load((Path(__file__).parents[2] / "config/tiered-50k.yaml").read_text())
    change(config["capture"]["tiers"])
    return build_plan(root, config | {"probe": None}, n_layers=12, width=768)


def planned_bytes(plan: Plan) -> dict[str, float]:
    row_bytes = {tier: shape.n_bytes(1, 64) for tier, shape in plan.shapes(dict.fromkeys(plan.sites, 768)).items()}
    found = forecast(plan, row_bytes, None)
    assert found["hours"] is None
    return {tier: value["gib"] * 2**30 for tier, value in found["tiers"].items()} | {
        "one": found["one_layer_gib"] * 2**30
    }


def test_the_bytes_of_the_plan_for_50000_rows(tmp_path):
    token, site = 768 * 2, 8  # float16; a digest a site and row
    ids = 64 * 2 + 8  # token ids with their digest
    assert planned_bytes(gpt2_plan(tmp_path)) == {
        "residual": 50_000 * (64 * token + site + ids),
        "pooled": 50_000 * (15 * (token + site) + ids),
        "sweep": 4096 * (15 * (64 * token + site) + ids),
        "one": 50_000 * (64 * token + site + ids),
    }


def test_the_tutorials_own_figures(tmp_path):
    # It counts the 12 layers, without embed, attn.0 and mlp.0, and its 10.7 are 10^9 bytes where the others are GiB.
    def layers_alone(tiers):
        for tier in ("pooled", "sweep"):
            tiers[tier]["sites"] = ["block.*"]

    found = planned_bytes(gpt2_plan(tmp_path, layers_alone))
    gib = {tier: round(n_bytes / 2**30, 1) for tier, n_bytes in found.items()}
    assert gib == {"residual": 4.6, "pooled": 0.9, "sweep": 4.5, "one": 4.6}
    assert round((found["residual"] + found["pooled"] + found["sweep"]) / 1e9, 1) == 10.7
