"""Bad input through the real workflow: a clear error, before any forward pass, and nothing lost.

Goal: a user who makes a mistake reads what is wrong and what to do, at once. Method: break one thing in a workflow
whose cache is finished; read the message; look at what is still there.
"""

from __future__ import annotations

import shutil

import pytest

from stores import tree


@pytest.fixture(scope="module")
def workflow(corpus_workflow, tmp_path_factory):
    workflow = corpus_workflow.copy(tmp_path_factory.mktemp("bad"))
    workflow.run("--", "cache")
    return workflow


def change(workflow, path, value):
    *sections, key = path.split(".")
    place = workflow.config
    for section in sections:
        place = place[section]
    place[key] = value


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"capture.shard_row": 8}, ["capture.shard_row: unknown key; did you mean shard_rows"]),
        ({"corpus.rows": "many", "modle": 1}, ["2 fault(s)", "corpus.rows: input should be a valid integer", "modle"]),
        ({"capture.shard_rows": 10}, ["capture.shard_rows: must be a multiple of batch_rows (4)"]),
        ({"model.source": "resources/models/tiny-lama"}, ["there is no resources/models/tiny-lama", "tiny-llama"]),
        ({"probe.tasks": ["duplicate-tokens"]}, ["unknown task 'duplicate-tokens'; did you mean duplicate-token"]),
        ({"probe.tier": "pooled"}, ["'pooled' keeps only the mean", "tiers that keep all tokens: few, residual"]),
        ({"capture.tiers": {"few": {"sites": ["blok.1", "block.0"]}}}, ["unknown site 'blok.1'; did you mean block.1"]),
        ({"probe.tir": "few"}, ["probe.tir: unknown key; did you mean tier"]),
        ({"corpus.source": "resources/corpora/tiny.json"}, ["there is no resources/corpora/tiny.json", "tiny.jsonl"]),
    ],
)
def test_told_before_any_job(workflow, values, said):
    config = workflow.config
    workflow.config = {key: dict(value) if isinstance(value, dict) else value for key, value in config.items()}
    for path, value in values.items():
        change(workflow, path, value)
    before = workflow.shards()
    output = workflow.run(ok=False)
    workflow.config = config
    for text in said:
        assert text in output
    assert "rule " not in output
    assert "Traceback" not in output
    assert workflow.shards() == before


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"capture.tiers": {"a": {"sites": ["blok.1"]}}, "probe": None}, ["blok.1", "did you mean", "block.1"]),
        ({"corpus.seq_len": 500, "corpus.rows": 2, "probe": None}, ["at most 128 positions"]),
        ({"corpus.rows": 1000}, ["1000", "rows"]),
        ({"model.source": "nobody/no-such-model"}, ["nobody/no-such-model", "HF_HUB_OFFLINE"]),
        ({"corpus.source": "nobody/no-such-corpus"}, ["nobody/no-such-corpus"]),
        ({"corpus.source": "empty.jsonl"}, ["empty.jsonl"]),
        ({"corpus.text_column": "txet"}, ["txet", "text"]),
    ],
)
def test_told_by_the_first_job_that_can_know(workflow, tmp_path, values, said):
    broken = workflow.copy(tmp_path)
    (broken.root / "empty.jsonl").write_text('{"text": "short"}\n')
    for path, value in values.items():
        change(broken, path, value)
    staged = tree(broken.results / "staging")
    output = broken.run(ok=False)
    for text in said:
        assert text in output, output
    assert "Traceback" not in output
    # Nothing is lost: another test runs the plain command on such a folder, and it captures nothing.
    assert staged.items() <= tree(broken.results / "staging").items()


def test_a_results_folder_that_cannot_be_written(workflow, tmp_path):
    broken = workflow.copy(tmp_path)
    shutil.rmtree(broken.results)
    broken.results.write_text("a file where a folder should be")
    output = broken.run(ok=False)
    assert "results/tiny cannot be written: results/tiny is a file" in output
    assert "Traceback" not in output
