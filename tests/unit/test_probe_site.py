"""The probe of one site, in memory and streamed, and the table of all of them.

Goal: a probe finds what is planted at its site and nothing elsewhere, says so in full, reads what it needs, refuses
what is not finite, and goes on with the same bits after an interruption. Method: small stores with known values.
Oracle: those values as plain arrays; counts from the files. Controls: a site without the plant, shuffled labels, a
design that claims to be matched and is not.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sklearn.metrics
import torch
from sklearn.linear_model import LogisticRegression

from anchorage.errors import AnchorageError
from anchorage.probe import adam, fullbatch
from anchorage.probe.adam import fit_adam
from anchorage.probe.design import Side, design_task, make_design
from anchorage.probe.fullbatch import PENALTIES, at_end, choose_penalty, fit_full_batch, read_tokens, standardise
from anchorage.probe.intervals import row_intervals
from anchorage.probe.labels import Labels
from anchorage.probe.site import _merits, fit_site, fit_sites
from anchorage.probe.solver import Tokens, decide
from anchorage.probe.sweep import COLUMNS, control_designs, control_tasks, tabulate_sweep
from anchorage.settings import ProbeSettings
from anchorage.store.reader import Cache, open_cache
from stores import SITES, Store

SETTINGS = ProbeSettings(tier="tokens", tasks=["duplicate-token", "position"])
WIDTH, N_ROWS, SEQ_LEN = 12, 96, 16
RESULTS = (Path(__file__).parents[2] / "docs/results.md").read_text()


def store_of(root, *, plant: str | None = "attn.0", change=None) -> Store:
    """A store of noise in which one site tells whether a token is a repeat."""
    store = Store(root, n_rows=N_ROWS, seq_len=SEQ_LEN, width=WIDTH, n_ids=12, storage_dtype="float32")
    repeats = np.array([[token in row[:place] for place, token in enumerate(row)] for row in store.token_ids.tolist()])
    if plant:
        store.values["tokens", plant][:, :, 3] += 3 * torch.from_numpy(repeats)
    if change:
        change(store)
    return store.build()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return store_of(tmp_path_factory.mktemp("store"))


@pytest.fixture
def cache(store):
    with open_cache(store.cache) as cache:
        yield cache


@pytest.fixture
def quick(monkeypatch):
    torch.set_num_threads(1)
    for name, value in {"_MIN_STEPS": 120, "_SAVE_EVERY": 20, "_BLOCK_ROWS": 8}.items():
        monkeypatch.setattr(adam, name, value)


def accuracy(scores, labels) -> float:
    return float(np.mean(decide(scores).numpy() == labels))


def run_adam(cache, folder, *, site="attn.0", seed=0, log=None):
    design = design_task(cache, "duplicate-token", settings=SETTINGS, seed=seed)
    lines = [] if log is None else log
    return design, fit_adam(cache, "tokens", site=site, design=design, seed=seed, folder=folder, log=lines.append)


def documented_fields(section: str) -> set[str]:
    """The names in the first column of a section's table in docs/results.md."""
    table = RESULTS.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return {
        name
        for line in table.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(.+?)`", line[: line.index("|", 1)])
    }


@pytest.mark.parametrize("block_rows", [1, 7, 128])
def test_it_reads_the_tokens_it_asks_for_and_no_other_rows(store, cache, monkeypatch, block_rows):
    monkeypatch.setattr(fullbatch, "_BLOCK_ROWS", block_rows)
    asked, read = [], Cache.read
    monkeypatch.setattr(
        Cache, "read", lambda self, site, rows, **tier: asked.extend(rows) or read(self, site, rows, **tier)
    )
    rows, positions = np.array([0, 0, 5, 9, 9, 95]), np.array([1, 15, 0, 2, 3, 15])
    side = Side(rows, positions, np.zeros(6, int), np.zeros(6, int))
    values = read_tokens(cache, "tokens", site="block.0", side=side)
    assert torch.equal(values, store.values["tokens", "block.0"][rows, positions])
    assert sorted(asked) == [0, 5, 9, 95]


@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_a_value_that_is_not_finite_is_named(tmp_path, quick, bad):
    def spoil(store):
        store.values["tokens", "embed"][41] = bad

    store = store_of(tmp_path, change=spoil)
    with open_cache(store.cache) as cache:
        design = design_task(cache, "position", settings=SETTINGS, seed=0)
        for fit in (
            lambda: fit_full_batch(cache, "tokens", site="embed", design=design),
            lambda: fit_adam(cache, "tokens", site="embed", design=design, seed=0, folder=tmp_path, log=print),
        ):
            with pytest.raises(AnchorageError, match=r"site 'embed', tier 'tokens': row 41 .* not finite"):
                fit()
        fit_full_batch(cache, "tokens", site="attn.0", design=design)  # the control: another site of the same rows


def test_too_little_memory_is_told_before_it_is_taken(cache, monkeypatch):
    design = design_task(cache, "position", settings=SETTINGS, seed=0)
    needed = 4 * WIDTH * 3 * len(design.train)
    monkeypatch.setattr(fullbatch.psutil, "virtual_memory", lambda: SimpleNamespace(available=needed))
    fit_full_batch(cache, "tokens", site="embed", design=design)  # the control: as much as it takes
    monkeypatch.setattr(fullbatch.psutil, "virtual_memory", lambda: SimpleNamespace(available=needed - 1))
    monkeypatch.setattr(Cache, "_read_run", lambda *_: pytest.fail("it has read"))
    with pytest.raises(AnchorageError, match=r"probe\.max_tokens, or set probe\.solver to adam"):
        fit_full_batch(cache, "tokens", site="embed", design=design)


def test_standardise_uses_the_training_tokens_alone():
    train, test = torch.randn(50, 4) * 3 + 7, torch.randn(9, 4)
    train[:, 2] = test[:, 2] = 5.0
    ours, others = standardise(train, test)
    mean, deviation = train.numpy().mean(0), train.numpy().std(0)
    kept = [0, 1, 3]
    assert others.numpy()[:, kept] == pytest.approx((test.numpy() - mean)[:, kept] / deviation[kept], abs=1e-5)
    assert ours.mean(0).numpy() == pytest.approx(np.zeros(4), abs=1e-6)
    assert not ours[:, 2].any()  # a constant dimension says nothing
    assert not others[:, 2].any()


def test_a_planted_feature_is_found_where_it_is_and_nowhere_else(cache):
    design = design_task(cache, "duplicate-token", settings=SETTINGS, seed=0)
    found = {}
    for site in SITES:
        scores, control, facts = fit_full_batch(cache, "tokens", site=site, design=design)
        found[site] = accuracy(scores, design.test.labels)
        assert abs(accuracy(control, design.test.shuffled) - 0.5) < 0.15
        assert facts["converged"]
        best = max(line["validation_accuracy"] for line in facts["tried"])
        chosen = [line for line in facts["tried"] if line["penalty"] == facts["penalty"]]
        assert chosen[0]["validation_accuracy"] == best
        assert facts["penalty"] == max(
            line["penalty"] for line in facts["tried"] if line["validation_accuracy"] == best
        )
        # Both are what scikit-learn fits, one on the labels, one on the same in a random order.
        train, test = standardise(
            *(read_tokens(cache, "tokens", site=site, side=side) for side in (design.train, design.test))
        )
        for answered, labels in ((scores, design.train.labels), (control, design.train.shuffled)):
            oracle = LogisticRegression(C=1 / (facts["penalty"] * len(train)), tol=1e-8, max_iter=10_000)
            oracle.fit(train.numpy(), labels)
            assert answered[:, 0].numpy() == pytest.approx(oracle.decision_function(test.numpy()), abs=0.05)
    assert found["attn.0"] > 0.85
    assert abs(found["embed"] - 0.5) < 0.15
    assert abs(found["block.0"] - 0.5) < 0.15


@pytest.mark.parametrize("solver", ["full-batch", "adam"])
def test_a_leak_of_labels_shows_on_the_true_labels_alone(cache, tmp_path, quick, solver):
    settings = ProbeSettings(tier="tokens", solver=solver)
    design = design_task(cache, "duplicate-token", settings=settings, seed=0)
    leaky = dataclasses.replace(design, train=dataclasses.replace(design.train, shuffled=design.train.labels))
    found = {
        name: fit_site(
            cache, "attn.0", design=tokens, settings=settings, seed=0, folder=tmp_path / name, log=lambda line: None
        )
        for name, tokens in (("sound", design), ("leaky", leaky))
    }
    assert found["leaky"]["shuffled_true_accuracy"] == found["leaky"]["accuracy"] > 0.85
    assert abs(found["leaky"]["shuffled_accuracy"] - 0.5) < 0.15  # by construction
    assert abs(found["sound"]["shuffled_true_accuracy"] - 0.5) < 0.15


@pytest.mark.parametrize("best_is", ["strong", "weak"])
def test_the_penalty_is_the_one_that_does_best_on_tokens_not_fitted(best_is):
    random, n_tokens = np.random.default_rng(2), 400
    values = random.normal(size=(n_tokens, 40))
    signal = values[:, :20].mean(1) * 4  # faint, and spread over many
    if best_is == "weak":  # strong, in the small difference of two: only large weights get at it
        signal = 20 * values[:, 1].copy()
        values[:, 1] = values[:, 0] + 0.03 * values[:, 1]
    labels = (signal + random.logistic(size=n_tokens) > 0).astype(int)
    held_out = np.arange(n_tokens) >= n_tokens // 2
    (values,) = (array.numpy() for array in standardise(torch.from_numpy(values)))
    best, tried = choose_penalty(
        Tokens(torch.from_numpy(values)), torch.from_numpy(labels), held_out=torch.from_numpy(held_out), n_classes=2
    )
    accuracies = []
    for penalty in PENALTIES:
        oracle = LogisticRegression(C=1 / (penalty * np.sum(~held_out)), max_iter=10_000)
        accuracies.append(oracle.fit(values[~held_out], labels[~held_out]).score(values[held_out], labels[held_out]))
    assert [line["penalty"] for line in tried] == list(PENALTIES)
    # The search ends early: some tokens at the edge may fall to the other side.
    assert [line["validation_accuracy"] for line in tried] == pytest.approx(accuracies, abs=0.02)
    assert best.penalty == PENALTIES[int(np.argmax([line["validation_accuracy"] for line in tried]))]
    assert (best.penalty >= 0.01) == (best_is == "strong")


@pytest.mark.parametrize(
    ("penalty", "steps", "is_at_end"),
    [
        (0.1, [3, 3, 3], True),  # the strongest
        (0.01, [3, 3, 3], False),
        (0.001, [3, 3, 3], True),  # the weakest
        (0.01, [3, 3, 0], True),  # the weaker one is the same fit
        (0.01, [3, 0, 3], False),
    ],
)
def test_a_penalty_at_an_end_of_the_grid_is_said_to_be(penalty, steps, is_at_end):
    tried = [
        {"penalty": tried, "n_iterations": n_steps} for tried, n_steps in zip((0.1, 0.01, 0.001), steps, strict=True)
    ]
    assert at_end(penalty, tried) is is_at_end


def test_the_probes_files_and_their_table(cache, store, tmp_path):
    lines, paths = [], []
    designs = [design_task(cache, task, settings=SETTINGS, seed=4) for task in SETTINGS.tasks]
    for design in designs:
        of_task = [tmp_path / "run/probe" / design.task / f"{site}.json" for site in SITES]
        fit_sites(cache, of_task, design=design, settings=SETTINGS, seed=4, log=lines.append)
        paths += of_task
    assert all("bytes from disk" in line for line in lines)
    assert len(lines) == 6
    for path in paths:
        probe = json.loads(path.read_text())
        by_row, n = probe["by_test_row"], probe["n_test"]
        assert sum(by_row["n"]) == n
        assert sum(by_row["correct"]) / n == probe["accuracy"]
        assert sum(by_row["shuffled_correct"]) / n == probe["shuffled_accuracy"]
        assert min(by_row["row"]) >= 72  # the last quarter
        assert probe["low"] <= probe["accuracy"] <= probe["high"]
        assert (probe["auc"] is None) == (probe["task"] == "position") == (probe["macro_f1"] is not None)
        assert probe.keys() == documented_fields("probe/{task}/{site}.json")
        design = next(design for design in designs if design.task == probe["task"])
        assert (probe["n_train"], probe["n_test"]) == (len(design.train), len(design.test))
        assert probe["n_train_rows"] == len(set(design.train.rows.tolist()))
        assert probe["n_test_rows"] == len(set(design.test.rows.tolist())) == len(by_row["row"])
    controls = control_designs(designs, store.token_ids.astype(int), cache.key)
    said: list[str] = []
    table = tabulate_sweep(paths, controls, seed=4, log=said.append)
    assert list(table) == COLUMNS
    assert list(table["site"]) == SITES * 2
    assert list(table["site_index"]) == [0, 1, 2] * 2
    for line in table.itertuples():
        for name in ("position_only", "token_only"):
            assert getattr(line, f"{name}_accuracy") == controls["tasks"][line.task][name]["test"]
    assert controls["tasks"]["position"]["token_only"]["test"] != controls["tasks"]["position"]["token_only"]["train"]
    for task, line in zip(SETTINGS.tasks, said, strict=True):
        n_ends = sum(json.loads(path.read_text())["penalty_at_end"] for path in paths if path.parent.name == task)
        assert line.startswith(f"{task}: 3 sites, {n_ends} with a penalty at an end of the grid")
        assert table["penalty_at_end"][table["task"] == task].sum() == n_ends
    correct = np.array([json.loads(path.read_text())["by_test_row"]["correct"] for path in paths[:3]]).T
    counts = np.array(json.loads(paths[0].read_text())["by_test_row"]["n"])
    low, high = row_intervals(correct, counts, seed=4)
    assert list(table["low"][:3]) == list(low)
    alone = json.loads(paths[0].read_text())
    assert high[0] - low[0] > alone["high"] - alone["low"]  # of all sites at once: wider than of this one
    with pytest.raises(AnchorageError, match="belongs to capture key"):
        tabulate_sweep(paths, controls | {"key": "another"}, seed=4, log=said.append)


@pytest.fixture
def probe_files(cache, store, tmp_path):
    """The files of one task's probes at all sites, and the controls."""
    design = design_task(cache, "duplicate-token", settings=SETTINGS, seed=0)
    paths = [tmp_path / "run/probe/duplicate-token" / f"{site}.json" for site in SITES]
    fit_sites(cache, paths, design=design, settings=SETTINGS, seed=0, log=lambda line: None)
    return paths, control_designs([design], store.token_ids.astype(int), cache.key)


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_fits_that_did_not_converge_are_counted(probe_files):
    paths, controls = probe_files
    said: list[str] = []
    (warning,) = set(tabulate_sweep(paths, controls, seed=0, log=said.append)["warning"])
    assert "converged" not in warning
    edit(paths[1], converged=False)
    edit(paths[2], converged=None)  # Adam's
    (changed,) = set(tabulate_sweep(paths, controls, seed=0, log=said.append)["warning"])
    assert changed == "; ".join(filter(None, [warning, "the fits of 1 of 3 sites ended before they had converged"]))
    assert [line.rpartition(", ")[2] for line in said] == ["0 not converged", "1 not converged"]


@pytest.mark.parametrize("name", ["row", "n"])
def test_sites_tested_on_other_tokens_are_refused(probe_files, name):
    paths, controls = probe_files
    by_row = json.loads(paths[1].read_text())["by_test_row"]
    edit(paths[1], by_test_row=by_row | {name: [by_row[name][0] - 1, *by_row[name][1:]]})
    with pytest.raises(AnchorageError, match=r"attn\.0\.json was tested on other tokens"):
        tabulate_sweep(paths, controls, seed=0, log=print)


def test_the_controls_have_the_fields_that_are_documented_and_warn(cache):
    lines: list[str] = []
    controls = control_tasks(cache, SETTINGS, seed=0, log=lines.append)
    assert list(controls["tasks"]) == SETTINGS.tasks
    for task, facts in controls["tasks"].items():
        assert controls.keys() | facts.keys() == documented_fields("controls.json")
        assert [f"WARNING: task {task}: {warning}" in lines for warning in facts["warnings"]] == [True]  # one, told
    assert len(lines) == 2
    assert controls["ok"]
    assert controls["key"] == cache.key


def test_controls_pass_a_matched_design_and_no_other(store):
    tokens = store.token_ids.astype(int)
    design = make_design("duplicate-token", tokens, test_fraction=0.25, max_tokens=None, seed=0)
    report = control_designs([design], tokens, "key")
    assert report["ok"]
    assert report["tasks"]["duplicate-token"]["unmatched"]["position_only"]["test"] > 0.55
    train, test = design.unmatched
    report = control_designs([dataclasses.replace(design, train=train, test=test)], tokens, "key")
    assert not report["ok"]
    assert report["n_faults"] == len(report["faults"]) == 4
    assert "position_only alone scores" in report["faults"][0]


def test_controls_demand_of_a_task_what_its_cells_promise_and_no_more(store, monkeypatch):
    tokens = store.token_ids.astype(int)
    places = np.broadcast_to(np.arange(SEQ_LEN), tokens.shape)
    # The id decides the label, and the cells do not hold it: the example of docs/probes.md.
    labels = Labels((tokens < 4).astype(int), ("other", "few"), cells=places)
    monkeypatch.setattr("anchorage.probe.design.label_tokens", lambda *_: labels)
    design = make_design("few", tokens, test_fraction=0.25, max_tokens=None, seed=0)
    report = control_designs([design], tokens, "key")
    assert report["ok"]
    assert report["tasks"]["few"]["position_only"] == {"train": 0.5, "test": 0.5}
    assert report["tasks"]["few"]["token_only"] == {"train": 1.0, "test": 1.0}
    train, test = design.unmatched
    report = control_designs([dataclasses.replace(design, train=train, test=test)], tokens, "key")
    assert {fault.split(" alone")[0].split()[-1] for fault in report["faults"]} == {"position_only"}


def test_adam_finds_what_the_full_batch_finds(cache, tmp_path, quick, monkeypatch):
    asked, read = [], Cache.read
    monkeypatch.setattr(
        Cache, "read", lambda self, site, rows, **tier: asked.append(len(rows)) or read(self, site, rows, **tier)
    )
    design, (scores, control, facts) = run_adam(cache, tmp_path)
    assert max(asked) <= 8  # never more than a block
    full, _, _ = fit_full_batch(cache, "tokens", site="attn.0", design=design)
    assert accuracy(scores, design.test.labels) == pytest.approx(accuracy(full, design.test.labels), abs=0.06)
    assert abs(accuracy(control, design.test.shuffled) - 0.5) < 0.15
    assert (facts["n_iterations"], facts["converged"]) == (120, None)


@pytest.mark.parametrize("step", [0, 19, 20, 77, 119])
def test_adam_interrupted_goes_on_with_the_same_bits(cache, tmp_path, quick, monkeypatch, step):
    _, (whole, whole_control, _) = run_adam(cache, tmp_path / "whole")
    calls, train = [], adam._step

    def fail_once(*arguments):
        calls.append(1)
        if len(calls) == step + 1:
            raise RuntimeError("power cut")
        train(*arguments)

    monkeypatch.setattr(adam, "_step", fail_once)
    with pytest.raises(RuntimeError, match="power cut"):
        run_adam(cache, tmp_path / "cut")
    log: list[str] = []
    _, (scores, control, _) = run_adam(cache, tmp_path / "cut", log=log)
    assert torch.equal(scores, whole)
    assert torch.equal(control, whole_control)
    assert any(f"resumed at step {step // 20 * 20}" in line for line in log) == (step >= 20)
    assert len(calls) == step + 1 + 120 - step // 20 * 20  # no step that was saved was done again


def test_adam_on_another_text_starts_anew_though_key_and_chosen_tokens_are_the_same(tmp_path, quick):
    found = []
    for n_ids in (12, 13):
        store = Store(tmp_path / str(n_ids), n_rows=N_ROWS, seq_len=SEQ_LEN, width=WIDTH, n_ids=n_ids).build()
        with open_cache(store.cache) as cache:
            design = make_design("position", store.token_ids.astype(int), test_fraction=0.25, max_tokens=None, seed=0)
            log: list[str] = []
            fit_adam(cache, "tokens", site="embed", design=design, seed=0, folder=tmp_path / "state", log=log.append)
            assert not log  # nothing was resumed
            found.append((cache.key, design.train.labels.tolist()))
    assert found[0] == found[1]
    assert len(list((tmp_path / "state").iterdir())) == 1  # that of the first text was of no use


def test_adam_of_another_seed_starts_anew_and_the_old_state_goes(cache, tmp_path, quick):
    (tmp_path / "not ours").mkdir()
    _, (scores, _, _) = run_adam(cache, tmp_path)
    (old,) = {path.name for path in tmp_path.iterdir()} - {"not ours"}
    log: list[str] = []
    _, (others, _, _) = run_adam(cache, tmp_path, seed=1, log=log)
    assert not torch.equal(scores, others)
    assert not log
    (new,) = {path.name for path in tmp_path.iterdir()} - {"not ours"}
    assert new != old
    assert (tmp_path / "not ours").exists()


def test_a_single_token_too_many_fails_the_controls(store):
    tokens = store.token_ids.astype(int)
    design = make_design("duplicate-token", tokens, test_fraction=0.25, max_tokens=None, seed=0)
    for name in ("train", "test"):
        side = getattr(design, name)
        short = Side(*(getattr(side, field.name)[1:] for field in dataclasses.fields(Side)))
        report = control_designs([dataclasses.replace(design, **{name: short})], tokens, "key")
        assert not report["ok"]
        assert any(f"on {name} tokens" in fault for fault in report["faults"])


def test_adam_standardises_as_the_full_batch_does(cache, quick):
    design = design_task(cache, "duplicate-token", settings=SETTINGS, seed=0)
    stream = adam.TokenStream(cache, "tokens", site="attn.0", side=design.train, block_rows=8)
    probe = adam.Probe(WIDTH, 2)
    adam._measure(probe, stream)
    values = read_tokens(cache, "tokens", site="attn.0", side=design.train)
    assert torch.equal(torch.cat([block for block, _, _ in stream.blocks()]), values)
    for place, name in ((1, "labels"), (2, "shuffled")):
        assert torch.cat([block[place] for block in stream.blocks()]).tolist() == getattr(design.train, name).tolist()
    assert probe.mean.numpy() == pytest.approx(values.double().numpy().mean(0), abs=1e-6)
    assert probe.scale.numpy() == pytest.approx(values.double().numpy().std(0), rel=1e-6)
    constant = [(torch.tensor([[0.1, 1.0, 0.0], [0.1, 3.0, 0.0]]), None, None)] * 7
    probe = adam.Probe(3, 2)
    adam._measure(probe, SimpleNamespace(blocks=lambda: constant))
    assert probe.scale.tolist() == [torch.inf, 1.0, torch.inf]


@pytest.mark.parametrize("n_classes", [2, 3])
def test_the_merits_are_those_of_the_scores(n_classes):
    random = np.random.default_rng(n_classes)
    labels = random.choice(n_classes, 60, p=[0.8, 0.2] if n_classes == 2 else [0.6, 0.3, 0.1])  # uneven
    scores = torch.from_numpy(random.normal(size=(60, 1 if n_classes == 2 else 3)))
    answers = decide(scores).numpy()
    binary = {
        "balanced_accuracy": sklearn.metrics.balanced_accuracy_score(labels, answers),
        "auc": sklearn.metrics.roc_auc_score(labels, scores[:, 0]) if n_classes == 2 else None,
        "macro_f1": None,
    }
    several = {
        "balanced_accuracy": None,
        "auc": None,
        "macro_f1": sklearn.metrics.f1_score(labels, answers, average="macro"),
    }
    assert _merits(labels, answers, scores) == pytest.approx(binary if n_classes == 2 else several)


def test_adam_of_another_order_of_the_blocks_is_another_training(cache, tmp_path, quick):
    design = design_task(cache, "duplicate-token", settings=SETTINGS, seed=0)
    found = []
    for seed in (0, 1):
        log: list[str] = []
        scores, *_ = fit_adam(cache, "tokens", site="attn.0", design=design, seed=seed, folder=tmp_path, log=log.append)
        assert not log  # nothing was resumed
        found.append(scores)
    assert not torch.equal(*found)


@pytest.mark.parametrize("n_classes", [2, 3])
def test_a_step_of_adam_goes_down_the_stated_objective(n_classes):
    random, n_outputs = np.random.default_rng(0), 1 if n_classes == 2 else 3
    values, labels = random.normal(size=(20, 4)).astype(np.float32), random.integers(0, n_classes, (2, 20))
    probe = adam.Probe(4, n_classes)
    probe.scale.fill_(1.0)
    weights = torch.from_numpy(random.normal(size=(2 * n_outputs, 4)).astype(np.float32))
    probe.heads.weight.data.copy_(weights)
    optimizer = torch.optim.SGD(probe.heads.parameters(), lr=1.0)  # moves by the gradient itself
    adam._step(probe, optimizer, (torch.from_numpy(values), *map(torch.from_numpy, labels)))
    for head, of_head in enumerate(labels):
        rows = slice(head * n_outputs, (head + 1) * n_outputs)
        scores = values @ weights[rows].numpy().T
        if n_classes == 2:
            errors = 1 / (1 + np.exp(-scores)) - of_head[:, None]
        else:
            errors = np.exp(scores) / np.exp(scores).sum(1, keepdims=True) - np.eye(3)[of_head]
        slope = errors.T @ values / 20 + 1e-3 * weights[rows].numpy()
        assert (weights[rows] - probe.heads.weight[rows]).detach().numpy() == pytest.approx(slope, abs=1e-5)
        assert -probe.heads.bias[rows].detach().numpy() == pytest.approx(errors.mean(0), abs=1e-5)
