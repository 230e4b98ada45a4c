"""The legal states after a power cut: all of them, no others, and every recipe judged in them.

Goal: legal_states.csv can be believed. Method: small sequences whose states are written down by hand; the unsafe
recipes must fail in their expected column and the safe ones nowhere; a writer broken on purpose must be caught; the
steps that a save is seen to take are compared with those that strace sees.
"""

from __future__ import annotations

import os
import random

import pandas as pd
import pytest

from anchorage import checkpoint, durable
from anchorage.durability import legal
from anchorage.durability.legal import COLUMNS, VERDICTS, legal_states, tabulate_legal_states
from anchorage.durability.operations import Operation, watched
from anchorage.durability.ourrecipes import ALL_RECIPES, OURS
from anchorage.durability.recipes import RECIPES, by_case
from anchorage.durability.syscalls import LINKS, REMOVALS, RENAMES, SYNCS, strace_refusal, trace_saves
from anchorage.errors import MeasurementError
from anchorage.store.staging import Staging

TORN, GONE = {"torn"}, {"gone"}
EXPECTED = {
    "naive/overwrite": TORN | GONE,
    "naive/new name": TORN | GONE,
    "rename only/overwrite": TORN | GONE,
    "rename only/new name": TORN | GONE,
    "fsync, rename/overwrite": GONE,
    "fsync, rename/new name": GONE,
    "fsync before flush/overwrite": TORN,
    "fsync before flush/new name": TORN,
    "temp elsewhere, move/overwrite": TORN | GONE,
    "temp elsewhere, move/new name": TORN,
    "remove, rename/overwrite": GONE,
    "remove, rename/new name": set(),  # there is nothing to remove
    "full/overwrite": set(),
    "full/new name": set(),
}


def state(**names):
    return frozenset(names.items())


def bad_columns(recipe, tmp_path):
    table = tabulate_legal_states([recipe], tmp_path)
    return {column for column in ("torn", "gone") if table[column].sum()}


def test_of_an_unsynced_file_anything_may_be_left():
    steps = [Operation("create", "a", 0), Operation("append", "a", 0, data=b"xy")]
    left = [b"", b"x", b"\0", b"xy", b"x\0", b"\0y", b"\0\0"]
    assert legal_states({}, steps) == {state(), *(state(a=data) for data in left)}


def test_a_synced_file_is_whole_or_has_no_name():
    steps = [Operation("create", "a", 0), Operation("append", "a", 0, data=b"xy"), Operation("fsync", "a", 0)]
    assert legal_states({}, steps) == {state(), state(a=b"xy")}
    assert legal_states({}, [*steps, Operation("fsync folder", ".")]) == {state(a=b"xy")}


def test_what_is_written_after_the_fsync_is_not_covered():
    steps = [Operation("create", "a", 0), Operation("fsync folder", "."), Operation("fsync", "a", 0)]
    steps.append(Operation("append", "a", 0, data=b"x"))
    assert legal_states({}, steps) == {state(a=b""), state(a=b"x"), state(a=b"\0")}


def test_a_file_overwritten_in_place_may_be_old_cut_or_mixed():
    steps = [Operation("truncate", "a", 0, size=0), Operation("append", "a", 0, data=b"N")]
    assert legal_states({"a": b"OO"}, steps) == {state(a=data) for data in (b"OO", b"NO", b"", b"\0", b"N")}


def test_a_rename_is_one_step():
    steps = [Operation("rename", "b", 1, "a")]
    assert legal_states({"a": b"old", "b": b"new"}, steps) == {state(a=b"old", b=b"new"), state(a=b"new")}


def test_a_removal_may_come_without_the_rename_after_it():
    steps = [Operation("unlink", "a", 0), Operation("rename", "b", 1, "a")]
    found = legal_states({"a": b"old", "b": b"new"}, steps)
    assert found == {state(a=b"old", b=b"new"), state(b=b"new"), state(a=b"new")}


def test_two_names_share_one_file_s_bytes():
    steps = [Operation("append", "a", 0, data=b"x"), Operation("link", "a", 0, "b"), Operation("fsync folder", ".")]
    assert legal_states({"a": b""}, steps) == {state(a=data, b=data) for data in (b"", b"x", b"\0")}


def test_a_lost_folder_takes_its_files_with_it():
    steps = [Operation("mkdir", "f"), Operation("create", "f/a", 0), Operation("fsync folder", "f")]
    kept = frozenset({("f/", None), ("f/a", b"")})
    assert legal_states({}, steps) == {state(), kept}
    assert legal_states({}, [*steps, Operation("fsync folder", ".")]) == {kept}


def test_too_many_states_are_an_error(monkeypatch):
    monkeypatch.setattr(legal, "MAX_STATES", 100)
    with pytest.raises(MeasurementError, match="too many"):
        legal_states({}, [Operation("create", f"{n}", n) for n in range(20)])
    monkeypatch.setattr(legal, "MAX_STATES", 20)
    with pytest.raises(MeasurementError, match="over 20 legal states"):
        legal_states({"a": b"", "b": b""}, [Operation("append", n, i, data=b"xyz") for i, n in enumerate("abab")])


def test_every_textbook_recipe_has_its_expectation():
    assert set(EXPECTED) == set(RECIPES)


@pytest.mark.parametrize("key", EXPECTED)
def test_a_recipe_fails_where_it_must_and_nowhere_else(key, tmp_path):
    assert bad_columns(RECIPES[key], tmp_path) == EXPECTED[key]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", OURS)
def test_our_writers_have_no_bad_legal_state(key, tmp_path):
    table = tabulate_legal_states([OURS[key]], tmp_path)
    assert list(table.columns) == list(COLUMNS)
    assert table["torn"].sum() == table["gone"].sum() == 0
    assert (table["n_states"] == table[VERDICTS].sum(axis=1)).all()
    before, after = table.iloc[0], table.iloc[1]
    assert before["old"] > 2  # a power cut was looked at where it hurts
    assert after["old"] == 0
    assert after["new"] > 0


def break_writer(monkeypatch, name):
    """Have one function of the writer do nothing, under every name that it has."""
    for module in (durable, checkpoint):
        monkeypatch.setattr(module, name, lambda place: None, raising=False)


@pytest.mark.parametrize("key", ["write_bytes/overwrite", "write_bytes/new name"])
def test_a_writer_without_fsync_is_caught(key, tmp_path, monkeypatch):
    break_writer(monkeypatch, "sync_descriptor")
    assert bad_columns(OURS[key], tmp_path) >= TORN


@pytest.mark.parametrize("key", ["write_bytes/overwrite", "write_bytes/new name", "checkpoint/new name"])
def test_a_writer_without_fsync_of_the_folder_is_caught(key, tmp_path, monkeypatch):
    break_writer(monkeypatch, "sync_folder")
    assert bad_columns(OURS[key], tmp_path) >= GONE


def test_a_journal_without_fsync_is_caught(tmp_path, monkeypatch):
    monkeypatch.setattr(durable, "sync_descriptor", lambda descriptor: None)
    assert bad_columns(OURS["journal/overwrite"], tmp_path) == GONE


def test_a_journal_line_before_its_shard_is_caught(tmp_path, monkeypatch):
    write, commit, waiting = Staging.write_files, Staging.commit, []

    def write_later(self, *words):
        waiting.append(words)
        folder, self.folder = self.folder, tmp_path / "elsewhere"
        tiers = write(self, *words)
        self.folder = folder
        return tiers

    def commit_first(self, *words, **named):
        record = commit(self, *words, **named)
        write(self, *waiting.pop())
        return record

    monkeypatch.setattr(Staging, "write_files", write_later)
    monkeypatch.setattr(Staging, "commit", commit_first)
    assert bad_columns(OURS["shard/new name"], tmp_path) == TORN


def test_a_wait_for_the_disk_that_covers_nothing_is_seen(tmp_path):
    """fsync before flush: the watch sees the bytes come after it."""

    def write(path, data):
        with open(path, "wb") as file:
            file.write(data[:10])
            os.fsync(file.fileno())

    with watched(tmp_path) as watch:
        write(tmp_path / "a", random.Random(0).randbytes(10))
    assert [step.kind for step in watch.operations] == ["create", "fsync", "append"]
    assert bad_columns(by_case("early", write)["early/new name"], tmp_path)


def test_the_watch_ends_with_its_block(tmp_path):
    before = os.fsync, os.replace, open
    with pytest.raises(AssertionError), watched(tmp_path):
        assert os.fsync is before[0]
    assert (os.fsync, os.replace, open) == before


@pytest.mark.parametrize(
    "key",
    [
        "full/overwrite",
        "remove, rename/overwrite",
        "write_bytes/new name",
        "journal/overwrite",
        "publication/overwrite",
    ],
)
def test_the_steps_are_those_that_strace_sees(key, tmp_path):
    if refusal := strace_refusal():
        pytest.skip(refusal)
    seen, traced = tmp_path / "seen", tmp_path / "traced"
    seen.mkdir()
    steps = []
    for version in (0, 1):
        with watched(seen) as watch:
            ALL_RECIPES[key].write(seen, version)
        steps += [step for step in watch.operations if step.kind not in {"create", "append", "truncate"}]
    saves = trace_saves([(ALL_RECIPES[key], traced, version) for version in (0, 1)], tmp_path / "log")
    events = [event for save in saves for event in save.events if event.path.startswith(str(traced))]
    assert [step.kind for step in steps] == [kind for event in events if (kind := kind_of(event))]


def kind_of(event):
    if event.error or event.issued:
        return None
    if event.call in SYNCS:
        return "fsync folder" if os.path.isdir(event.path) else "fsync"
    kinds = {RENAMES: "rename", LINKS: "link", REMOVALS: "unlink", frozenset({"mkdir", "mkdirat"}): "mkdir"}
    return next((kind for calls, kind in kinds.items() if event.call in calls), None)


def test_the_table_names_every_recipe(tmp_path):
    table = tabulate_legal_states([RECIPES["full/overwrite"], RECIPES["naive/new name"]], tmp_path)
    assert isinstance(table, pd.DataFrame)
    assert list(table["recipe"]) == ["full", "full", "naive", "naive"]
    assert list(table["moment"]) == ["before", "after"] * 2
