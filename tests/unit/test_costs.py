"""What the choices of a capture cost: the cases, the table of their rounds, the sentences it supports.

Goal: a case does and measures what it says, values are compared by every bit, no sentence says more than its numbers.
Method: a tiny model; a planted allocation, difference and end; made-up tables in which a claim holds, is reversed, and
is not shown. Oracle: torch.equal, and sizes and ratios worked out by hand.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from test_figures import draw

from anchorage.costs import cases, rounds
from anchorage.costs.cases import COMPARISONS, Subject
from anchorage.costs.comparison import COLUMNS, PEAK, SECONDS, Case
from anchorage.costs.process import describe_kept, measure_case
from anchorage.costs.rounds import measure_round, rotate, tabulate_rounds
from anchorage.costs.sentences import MIN_ROUNDS, describe_costs
from anchorage.errors import AnchorageError, MeasurementError
from anchorage.figures.costs import plot_costs
from cost_rounds import cost_round, cost_table
from plans import build_plan

CASES = [(name, case) for name, comparison in COMPARISONS.items() for case in comparison.cases]
ROWS, SEQ_LEN, WIDTH, VOCAB, FLOAT16 = 4, 16, 16, 96, 2  # of a batch of the tiny run


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    return Subject(build_plan(tmp_path_factory.mktemp("costs")))


def run(subject, comparison, case, n_batches=2):
    subject.held.clear()
    batches = subject.plan.layout.batches(range(subject.plan.layout.n_rows))[:n_batches]
    return COMPARISONS[comparison].cases[case].run(subject, batches)


@pytest.mark.parametrize(("comparison", "case"), CASES)
def test_every_case_runs_and_leaves_all_as_it_was(subject, comparison, case):
    run(subject, comparison, case)
    assert len(subject.trunk.layers) == subject.trunk.n_layers
    assert not list(subject.plan.settings.staging.glob("*"))


def test_cases_that_must_keep_the_same_values_do(subject):
    for name in ("reading", "depth", "cast"):
        assert COMPARISONS[name].same_values
        first, other = (run(subject, name, case) for case in COMPARISONS[name].cases)
        assert first.keys() == other.keys() == set(subject.plan.sites)
        assert all(torch.equal(first[site], other[site]) for site in first)
        assert describe_kept(first)["digests"] == describe_kept(other)["digests"]


def test_what_is_kept_is_counted(subject):
    wanted = describe_kept(run(subject, "modules", "wanted"))
    everything = describe_kept(run(subject, "modules", "everything"))
    assert wanted["n_modules"] == len(subject.plan.sites)
    assert wanted["kept_mib"] * 2**20 == len(subject.plan.sites) * ROWS * SEQ_LEN * WIDTH * FLOAT16
    run_ones = [module for module in subject.model.modules() if not isinstance(module, torch.nn.ModuleList)]
    assert everything["n_modules"] == len(run_ones)
    assert everything["kept_mib"] * 2**20 > ROWS * SEQ_LEN * VOCAB * FLOAT16 + wanted["kept_mib"] * 2**20


def test_autograd_and_holding_are_as_said(subject):
    graphs, held = {}, {}
    for case in COMPARISONS["autograd"].cases:
        kept = run(subject, "autograd", case, n_batches=3)
        graphs[case], held[case] = kept["block.2"].grad_fn is not None, len(subject.held)
    assert {case for case, graph in graphs.items() if graph} == {"grad-dropped", "grad-held"}
    assert held == {case: 3 if "held" in case else 0 for case in COMPARISONS["autograd"].cases}


@pytest.mark.parametrize(("case", "n_files"), [("with", 6), ("without", 0)])
def test_durable_shards_are_written_or_not(subject, monkeypatch, case, n_files):
    found = []

    def look_and_remove(folder, **options):
        found.extend(folder.glob("*.safetensors"))
        shutil.rmtree(folder, **options)

    monkeypatch.setattr(cases, "shutil", type("Shutil", (), {"rmtree": staticmethod(look_and_remove)}))
    run(subject, "disk", case, n_batches=4)
    assert len(found) == n_files  # of three tiers, two shards


@pytest.mark.skipif(sys.platform != "linux", reason="not run: the peak of a process can be forgotten on Linux alone")
def test_peak_memory_is_that_of_the_measured_batches(subject):
    def allocate(mib_warming_up, mib_measured):
        def step(subject, batches):
            return {"x": torch.ones((mib_measured if len(batches) > 1 else mib_warming_up) << 18)}

        return measure_case(subject, Case("a planted allocation", step), 3)

    large, small = allocate(1, 200), allocate(200, 1)
    assert large["peak_mib"] == pytest.approx(200, abs=10)
    assert small["peak_mib"] < 10
    assert (small["batches"], small["tokens"], small["kept_mib"]) == (3, 3 * ROWS * SEQ_LEN, 200)


def test_a_planted_difference_is_seen():
    value = torch.zeros(3, 4, 8, dtype=torch.float16)
    planted, unlike_zero = value.clone(), value.clone()
    planted[2, 3, 7] = 2**-24
    unlike_zero[0, 0, 0] = -0.0
    digests = [describe_kept({"site": tensor})["digests"]["site"] for tensor in (value, planted, unlike_zero)]
    assert len(set(digests)) == 3
    assert describe_kept({"site": value.clone()})["digests"]["site"] == digests[0]


def test_a_round_asks_for_each_case_and_compares_what_it_kept(subject, monkeypatch, tmp_path):
    asked = []

    def answer(request):
        asked.append(request["case"])
        digests = {"embed": "a", "block.0": "planted" if request["case"] == "full" else "b"}
        memory = {"peak_mib": 5.0, "cuda_peak_mib": None, "n_modules": 2, "kept_mib": 0.5}
        return {"batches": 4, "tokens": 256, "seconds": 2.0, "digests": digests} | memory

    monkeypatch.setattr(rounds, "_ask", answer)
    (tmp_path / "model.json").write_text(pd.Series(subject.plan.facts).to_json())
    table = measure_round(
        subject.plan.settings,
        tmp_path / "model.json",
        subject.plan.tokens_path,
        number=1,
        comparisons={name: COMPARISONS[name] for name in ("modules", "reading", "depth")},
        log=lambda line: None,
    )
    assert list(table) == COLUMNS
    assert set(table["key"]) == {subject.plan.key}
    assert asked == list(table["case"]) == ["everything", "wanted", "cache", "save", "full", "trunk"]
    assert list(table["position"]) == [0, 1] * 3
    assert set(table[SECONDS]) == {0.5}
    assert set(table["tokens_per_s"]) == {128}
    lines = table.set_index("case")
    assert lines.loc[["everything", "wanted"], "n_compared"].isna().all()
    assert lines.loc["cache", ["n_equal", "n_compared"]].tolist() == [2, 2]
    assert lines.loc["full", ["n_equal", "n_compared"]].tolist() == [1, 2]


def test_each_case_goes_first_in_turn():
    orders = [rotate(["a", "b", "c"], number) for number in range(4)]
    assert orders == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]


def test_a_case_that_fails_is_named_and_says_why(monkeypatch):
    request = {"comparison": "depth", "case": "full", "settings": {"run": "x"}}
    with pytest.raises(MeasurementError, match=r"case full of comparison depth ended with 1:[^$]*model: is missing"):
        rounds._ask(request)
    killed = subprocess.CompletedProcess([], -signal.SIGKILL, "", "the last it said")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: killed)
    with pytest.raises(MeasurementError, match=r"case full .*SIGKILL.*memory.*\nthe last it said"):
        rounds._ask(request)


def test_the_rounds_become_one_table(tmp_path):
    paths = [tmp_path / f"round-{number}.csv" for number in range(5)]
    for number, path in enumerate(paths):
        cost_round(number)[::-1].to_csv(path, index=False)
    table = tabulate_rounds(paths, key="k", comparisons=COMPARISONS)
    assert list(table) == COLUMNS
    assert list(table[["comparison", "case"]].drop_duplicates().itertuples(index=False, name=None)) == CASES
    assert table.groupby(["comparison", "case"])["round"].agg(set).map({0, 1, 2, 3, 4}.__eq__).all()
    with pytest.raises(AnchorageError, match="belongs to capture key k"):
        tabulate_rounds(paths, key="another", comparisons=COMPARISONS)
    for wrong in (cost_round(0)[1:], cost_round(0).iloc[[*range(len(CASES)), 0]], cost_round(0).replace("full", "x")):
        wrong.to_csv(paths[3], index=False)
        with pytest.raises(MeasurementError, match=r"round-3.*each case once"):
            tabulate_rounds(paths, key="k", comparisons=COMPARISONS)


def sentences(**columns) -> str:
    return describe_costs(cost_table(**columns), COMPARISONS)


@pytest.mark.parametrize(
    ("times", "ratio", "verdict"),
    [
        ([2.0, 2.1, 2.2, 2.3, 2.4], "2.200 (2 to 2.400)", "slower"),
        ([0.5, 0.5, 0.6, 0.7, 0.8], "0.600 (0.500 to 0.800)", "faster"),
        ([0.98, 1.1, 1.2, 1.3, 1.4], "1.200 (0.980 to 1.400)", "no difference was shown"),
        ([1.0, 1.1, 1.2, 1.3, 1.4], "1.200 (1 to 1.400)", "no difference was shown"),
        ([1.0] * 5, "1", "no difference was shown"),
        ([1.01, 1.011, 1.012, 1.02, 1.03], "1.012 (1.010 to 1.030)", "no difference was shown"),
    ],
)
def test_the_verdict_follows_from_the_rounds(times, ratio, verdict):
    text = sentences(full={SECONDS: times})
    against = "the trunk, ending at the deepest wanted site"
    assert f"- The whole model: {ratio} times the time of {against}: {verdict}.\n" in text


def test_what_is_kept_is_compared():
    text = sentences(everything={"kept_mib": 360.0, "n_modules": 330})
    assert "- Caching every module: 10 times the bytes kept of a batch of caching the wanted sites: more bytes." in text
    assert "- Caching every module: 10 times the number of modules kept of caching the wanted sites: more" in text
    assert "bytes kept of a batch of caching the wanted sites: no difference was shown." in sentences()


def test_ratios_are_of_one_round_not_of_medians():
    drift = np.array([1.0, 2.0, 4.0, 8.0, 16.0])  # the machine slows down; the cases' ratio stays
    text = sentences(trunk={SECONDS: drift}, full={SECONDS: 1.5 * drift})
    assert "The whole model: 1.500 times the time of the trunk" in text


@pytest.mark.parametrize(
    ("detached", "said", "not_said"),
    [
        (1000.0, "does not stand in for no_grad", "as well as no_grad"),
        (30.0, "`.detach()` does as well as no_grad", "stand in for"),
        ([90, 100, 110, 120, 130], "batches held: no difference was shown", "stand in for"),
    ],
)
def test_what_detaching_does_is_read_from_the_numbers(detached, said, not_said):
    text = sentences(
        **{
            "no_grad-held": {PEAK: 100.0},
            "grad-dropped": {PEAK: [880, 890, 900, 910, 920]},
            "grad-held-detached": {PEAK: detached},
        }
    )
    line = next(line for line in text.splitlines() if "detached" in line and "memory of no_grad, batches held" in line)
    assert said in line
    assert not_said not in line
    of_one_batch = next(line for line in text.splitlines() if "memory of autograd on, each batch dropped" in line)
    assert ("did not lower the peak" in of_one_batch) == (detached == 1000.0)


def test_too_few_rounds_show_nothing():
    table = cost_table(full={SECONDS: 9.0})
    text = describe_costs(table[table["round"] < MIN_ROUNDS - 1], COMPARISONS)
    assert "4 round(s) are too few to show a difference" in text
    assert not {"slower", "faster", "more memory", "less memory"} & set(text.replace(".", "").split())


def test_bits_are_said_to_be_equal_only_where_they_all_are():
    assert "trunk, ending at the deepest wanted site: bit-equal at all 33 sites in every round.\n" in sentences()
    text = sentences(full={"n_equal": [33, 33, 30, 33, 33]})
    assert "not bit-equal: in the worst round 30 of 33 sites were." in text
    assert text.count("bit-equal at all 33 sites") == 2  # of reading and cast
    assert "not bit-equal: in the worst round 0 of 0" in sentences(full={"n_equal": 0, "n_compared": 0})


def test_a_peak_that_was_not_measured_is_not_compared():
    for missing in (np.nan, 0.0):
        text = sentences(full={PEAK: [5.0, 5.0, missing, 5.0, 5.0]})
        assert "The whole model against the trunk, ending at the deepest wanted site: the peak memory could not" in text


def test_on_a_gpu_the_peak_is_that_of_the_gpu():
    table = cost_table(full={"cuda_peak_mib": 300.0}, trunk={"cuda_peak_mib": 100.0})
    assert "The whole model: 3 times the peak memory" in describe_costs(table, COMPARISONS)
    assert "GPU memory allocated" in describe_costs(table, COMPARISONS)


def test_the_figure_names_each_comparison_and_case(tmp_path):
    texts = draw(tmp_path / "all", plot_costs, cost_table())
    assert {name for name, _ in CASES} | {case for _, case in CASES} <= set(texts)
    assert "peak resident memory of the batches, MiB" in texts
    one_round = cost_round(0).assign(peak_mib=np.nan, cuda_peak_mib=7.0)
    assert "peak GPU memory of the batches, MiB" in draw(tmp_path / "one", plot_costs, one_round)
