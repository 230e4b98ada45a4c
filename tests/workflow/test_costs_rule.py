"""The costs through the real workflow: a round in fresh processes, all rounds to table, sentences and figure.

Goal: the target's files come out of its rules. Method: the tiny configuration; one comparison is really measured, since
a fresh process a case takes seconds; whole rounds are made up.
"""

from __future__ import annotations

import pandas as pd
import pytest

from anchorage.costs.comparison import COLUMNS, ROUNDS
from anchorage.settings import load_settings
from anchorage.store.identity import key_of
from cost_rounds import cost_round


@pytest.fixture
def workflow(corpus_workflow, tmp_path):
    return corpus_workflow.copy(tmp_path)


def capture_key(workflow) -> str:
    return key_of(load_settings(workflow.config), workflow.report("model"))


def test_a_round_is_measured_in_fresh_processes(workflow):
    script = workflow.root / "workflow/scripts/measure_costs.py"
    text = script.read_text()
    assert "comparisons=COMPARISONS" in text
    script.write_text(text.replace("=COMPARISONS", '={"cast": COMPARISONS["cast"]}'))
    workflow.run("--", "results/tiny/costs/round-1.csv")
    table = pd.read_csv(workflow.results / "costs/round-1.csv")
    assert list(table) == COLUMNS
    assert list(table["case"]) == ["then-cast", "as-captured"]  # the second goes first in round 1
    assert set(table["key"]) == {capture_key(workflow)}
    assert (table[["seconds_per_batch", "tokens_per_s", "kept_mib"]] > 0).all(axis=None)
    assert (table["peak_mib"] >= 0).all()
    assert list(table["n_equal"]) == list(table["n_compared"]) == [10, 10]
    assert "round 1, cast, as-captured" in workflow.log("measure_costs_1")


def test_rounds_become_table_sentences_and_figure(workflow):
    folder, key = workflow.results / "costs", capture_key(workflow)
    folder.mkdir()
    for number in range(ROUNDS):
        cost_round(number, key).to_csv(folder / f"round-{number}.csv", index=False)
    wanted = [f"results/tiny/costs.{kind}" for kind in ("csv", "md", "svg", "png")]
    workflow.run("--", *wanted)
    assert len(pd.read_csv(workflow.root / wanted[0])) == ROUNDS * len(cost_round(0))
    assert "## depth: the whole model against its trunk" in (workflow.root / wanted[1]).read_text()
    assert all((workflow.root / name).stat().st_size > 1000 for name in wanted)
