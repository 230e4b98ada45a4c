"""What pads do, measured.

Goal: the table's figures are those of the model itself; what is right is found right and what is wrong is found wrong.
Method: tiny models with learned and with rotary positions. Oracle: transformers' model called directly, padded by hand
and alone, its `output_hidden_states` reduced with numpy.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

from anchorage import padding
from anchorage.errors import SiteError
from anchorage.figures.padding import plot_padding
from anchorage.model import load_trunk
from anchorage.padding import COLUMNS, NORM_COLUMNS, TOLERANCES, judge_errors, measure_padding
from anchorage.prompts import N_PROMPTS, draw_prompts
from anchorage.trunk import SiteReader, find_sites
from plans import build_plan

TIERS = {"tiers": {"residual": {"sites": ["block.0"]}, "pooled": {"sites": ["embed", "block.*"], "reduce": "mean"}}}
TOLERANCE = TOLERANCES["float32"]


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    return {kind: build_plan(tmp_path_factory.mktemp(kind), kind=kind, capture=TIERS) for kind in ("gpt2", "llama")}


@pytest.fixture(scope="module")
def measured(plans):
    found = {}
    for kind, plan in plans.items():
        report, table, norms = measure_padding(plan, lambda line: None)
        assert all(list(line) == COLUMNS for line in table)
        assert all(list(line) == NORM_COLUMNS for line in norms)
        assert {line["key"] for line in [report, *table, *norms]} == {plan.key}
        found[kind] = (report, pd.DataFrame(table), pd.DataFrame(norms))
    return found


def hidden_states(plan, **inputs) -> np.ndarray:
    """Output of the first block, by transformers alone: float64 [rows, seq_len, width]."""
    model = AutoModelForCausalLM.from_pretrained(plan.settings.model.source, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(**inputs, output_hidden_states=True, use_cache=False).hidden_states[1].double().numpy()


def pick(table: pd.DataFrame, **wanted) -> pd.DataFrame:
    for name, value in wanted.items():
        table = table[table[name] == value]
    return table


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("given", ["explicit", "none"])
def test_figures_are_those_of_the_model_itself(plans, measured, kind, side, given):
    plan, (_, table, norms) = plans[kind], measured[kind]
    wanted = {"site": "block.0", "side": side, "position_ids": given}
    prompt, length, n_pads = pick(norms, **wanted).iloc[4][["prompt", "length", "n_pads"]].astype(int)
    assert n_pads > 0
    tokens = [int(token) for token in plan.corpus.rows(prompt, prompt + 1)[0][:length]]
    pads, alone = [0] * n_pads, hidden_states(plan, input_ids=torch.tensor([tokens]))[0]
    left = side == "left"
    ids, mask, positions = (pads + row if left else row + pads for row in (tokens, [1] * length, list(range(length))))
    inputs = {"input_ids": [ids], "attention_mask": [mask]} | (
        {"position_ids": [positions]} if given == "explicit" else {}
    )
    padded = hidden_states(plan, **{name: torch.tensor(value) for name, value in inputs.items()})[0]
    real = padded[n_pads:] if left else padded[:length]

    for name, reduce in {"mean": lambda x: x.mean(0), "last": lambda x: x[-1], "max": lambda x: x.max(0)}.items():
        expected = reduce(alone)
        for masked, value in (("no", padded), ("yes", real)):
            error = np.linalg.norm(reduce(value) - expected) / np.linalg.norm(expected)
            line = pick(table, **wanted, prompt=prompt, reduction=name, masked=masked)
            assert line["relative_error"].item() == pytest.approx(error, rel=1e-4, abs=1e-6), (name, masked)
    found = pick(norms, **wanted, prompt=prompt)
    sizes = np.linalg.norm(padded, axis=1)
    assert found["pad_norm"].item() == pytest.approx((sizes[:n_pads] if left else sizes[length:]).mean(), rel=1e-5)
    assert found["real_norm"].item() == pytest.approx(np.linalg.norm(real, axis=1).mean(), rel=1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_masked_is_right_and_unmasked_is_not(measured, kind):
    report, table, _ = measured[kind]
    assert report["ok"], report["faults"]
    explicit = pick(table, position_ids="explicit")
    assert (explicit[explicit["masked"] != "no"]["relative_error"] < TOLERANCE / 10).all()
    padded = table[table["n_pads"] > 0]
    assert (pick(padded, masked="no", reduction="mean")["relative_error"] > 100 * TOLERANCE).all()
    assert (pick(padded, masked="no", reduction="last", side="right")["relative_error"] > 100 * TOLERANCE).all()
    assert report["control"]["n_beyond_tolerance"] == report["control"]["n_unmasked_means"] > 0
    assert (table[table["n_pads"] == 0]["relative_error"] < TOLERANCE / 10).all()
    assert set(pick(table, masked="store")["side"]) == {"right"}
    assert (
        report["largest_masked_error"]["left"]["explicit"]
        == pick(explicit, side="left", masked="yes")["relative_error"].max()
    )


def test_pads_in_front_without_position_ids_move_learned_positions_and_not_rotary_ones(measured):
    def largest(kind):
        return measured[kind][0]["largest_masked_error"]

    assert largest("gpt2")["left"]["none"] > 100 * TOLERANCE
    assert largest("gpt2")["right"]["none"] < TOLERANCE / 10
    assert largest("llama")["left"]["none"] < TOLERANCE / 10


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["attention_mask", "position_ids", "real"])
def test_a_plan_shifted_by_one_is_found(plans, monkeypatch, name, side):
    pad_prompts = padding.pad_prompts

    def shifted(drawn, at, *, explicit):
        batch = pad_prompts(drawn, at, explicit=explicit)
        if at != side or not explicit:
            return batch
        if name == "real":
            step = 1 if at == "right" else -1
            moved = [slice(max(0, some.start + step), some.stop + step) for some in batch.real]
            return dataclasses.replace(batch, real=moved)
        return dataclasses.replace(batch, **{name: getattr(batch, name).roll(1, dims=1)})

    monkeypatch.setattr(padding, "pad_prompts", shifted)
    lines: list[str] = []
    report, _, _ = measure_padding(plans["gpt2"], lines.append)
    assert not report["ok"]
    assert all(f"pads on the {side}" in fault for fault in report["faults"])
    assert sum(line.startswith("WARNING") for line in lines) == 1 + len(report["faults"])
    assert report["largest_masked_error"][side]["explicit"] > 10 * TOLERANCE


def test_a_model_that_takes_no_position_ids_runs_without(tmp_path):
    plan = build_plan(tmp_path, kind="bloom", capture=TIERS)
    report, table, _ = measure_padding(plan, lambda line: None)
    assert report["ok"], report["faults"]
    assert {line["position_ids"] for line in table} == {"none"}
    assert report["control"]["n_beyond_tolerance"] > 0
    ids = torch.zeros(1, 4, dtype=torch.int64)
    trunk = load_trunk(plan.facts, plan.settings.model)
    with pytest.raises(SiteError, match="takes no position_ids"):
        SiteReader(trunk, find_sites(trunk, ["block.0"])).read(ids, lambda site, value: None, position_ids=ids)


@pytest.mark.parametrize(("rows", "seq_len"), [(1, 16), (5, 2), (86, 1)])
def test_small_corpora(tmp_path, rows, seq_len):
    plan = build_plan(tmp_path, corpus={"rows": rows, "seq_len": seq_len}, capture=TIERS)
    report, _, norms = measure_padding(plan, lambda line: None)
    assert report["ok"], report["faults"]
    assert report["lengths"] == [seq_len] * min(rows, N_PROMPTS)
    assert {line["pad_norm"] for line in norms} == {None}
    assert report["control"] == {"n_unmasked_means": 0, "n_beyond_tolerance": 0}


def test_prompts_are_rows_cut_to_lengths_spread_geometrically(plans):
    plan = plans["llama"]
    drawn = draw_prompts(plan)
    lengths = [len(prompt.ids) for prompt in drawn]
    assert len({prompt.row for prompt in drawn}) == N_PROMPTS == len(drawn)
    assert lengths == [3, 3, 4, 5, 6, 6, 7, 9, 10, 12, 14, 16]  # 3 * (16 / 3) ** (i / 11)
    for prompt in drawn:
        assert prompt.ids.tolist() == plan.corpus.rows(prompt.row, prompt.row + 1)[0][: len(prompt.ids)].tolist()
    assert [prompt.row for prompt in draw_prompts(plan)] == [prompt.row for prompt in drawn]


def test_rows_shorter_than_their_turn_are_taken_whole(plans, monkeypatch):
    lengths = np.random.default_rng(5).integers(1, 10, 86)
    monkeypatch.setattr(plans["llama"].corpus, "lengths", lambda start, stop: lengths[start:stop])
    drawn = draw_prompts(plans["llama"])
    turns = [3, 3, 4, 5, 6, 6, 7, 9, 10, 12, 14, 16]
    assert all(len(prompt.ids) == min(n, lengths[prompt.row]) for n, prompt in zip(turns, drawn, strict=True))
    assert len(drawn[-1].ids) == max(len(prompt.ids) for prompt in drawn)


def line_of(**changes):
    place = {"site": "block.0", "side": "left", "position_ids": "explicit", "prompt": 7, "length": 3, "n_pads": 5}
    return place | {"reduction": "mean", "masked": "yes", "relative_error": 0.0} | changes


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("masked", ["yes", "store"])
def test_the_tolerance_itself_is_within(dtype, masked):
    tolerance, unmasked = TOLERANCES[dtype], line_of(masked="no", relative_error=2.0)
    assert judge_errors([unmasked, line_of(masked=masked, relative_error=tolerance)], dtype)["ok"]
    for bad in (tolerance * 1.001, float("nan"), float("inf")):
        report = judge_errors([unmasked, line_of(masked=masked, relative_error=bad)], dtype)
        assert (report["ok"], report["n_faults"]) == (False, 1)
        assert report["faults"][0].startswith("prompt 7 (3 tokens, 5 pads on the left), site block.0: mean")
    assert judge_errors([unmasked, line_of(), line_of(position_ids="none", relative_error=9.0)], dtype)["ok"]


def test_a_tolerance_that_finds_nothing_is_a_fault():
    report = judge_errors([line_of(masked="no", relative_error=1e-5), line_of()], "float32")
    assert not report["ok"]
    assert judge_errors([line_of(masked="no", relative_error=0.0, n_pads=0), line_of(n_pads=0)], "float32")["ok"]


def test_the_figure_says_the_verdict(tmp_path, measured):
    report, table, norms = measured["gpt2"]
    path = tmp_path / "padding.svg"

    def draw(table, norms, report) -> str:
        plot_padding(table, norms, report, [path])
        return " ".join(re.findall(r">([^<>]+)</text>", path.read_text()))

    assert "over real tokens only: within tolerance" in draw(table, norms, report)
    no_pads = [lines[lines["prompt"] == table["prompt"].iloc[-1]] for lines in (table, norms)]
    many = [pd.concat([lines.assign(site=f"block.{i}") for i in range(5)]) for lines in no_pads]
    many[0] = many[0].assign(relative_error=many[0]["relative_error"].where(many[0]["masked"] != "yes"))
    text = draw(*many, report | {"ok": False, "n_faults": 3})
    assert "BEYOND TOLERANCE: 3 fault(s)" in text
    assert [f"block.{i}, mean" in text for i in range(5)] == [True, False, True, False, True]
