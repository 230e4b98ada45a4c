"""Kill points of a save.

Goal: a kill at any system call or byte of our saves leaves the old or the new version, and saving again works. Method:
ptrace and RLIMIT_FSIZE end forks of a real save; here at a sample of the points, in the lab at all. Oracle: the mode of
dying (which folder exists, how long a file is) for the machinery; the recipe that saved for the rest. Controls: the
naive recipe must be torn, removing first must lose what was acknowledged, a recipe that cannot save again must be seen.
"""

from __future__ import annotations

import os

import pandas as pd
import pytest

from anchorage.durability import kills
from anchorage.durability.ourrecipes import ALL_RECIPES
from anchorage.durability.ptrace import kill_at_byte, kill_at_call, ptrace_refusal
from anchorage.durability.recipes import Recipe, content, load_overwritten
from anchorage.errors import MeasurementError

SAMPLED = ["naive/overwrite", "remove, rename/overwrite", "full/overwrite", "shard/new name", "checkpoint/new name"]


def need_ptrace():
    if reason := ptrace_refusal():
        pytest.skip(f"not run: {reason}")


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """Kills at a sample of points: all calls of the short recipes, each seventh of ours."""
    tables = [
        kills.kill_saves(
            [ALL_RECIPES[key] for key in SAMPLED if ALL_RECIPES[key].ours is ours],
            tmp_path_factory.mktemp("kills"),
            log=lambda line: None,
            every_call=7 if ours else 1,
            n_bytes=6,
        )
        for ours in (False, True)
    ]
    table = pd.concat(tables)
    assert list(table.columns) == kills.COLUMNS
    return table


def of(table, key, **values):
    rows = table[(table.recipe + "/" + table.case == key) & (table.status == "measured")]
    for name, value in values.items():
        rows = rows[rows[name] == value]
    return rows


@pytest.mark.parametrize("key", ["full/overwrite", "shard/new name", "checkpoint/new name"])
def test_a_safe_save_is_old_or_new_at_every_point_and_can_be_made_again(sample, key):
    rows = of(sample, key)
    assert set(rows.verdict) <= {"old", "new"}
    assert rows.resaved.all()
    assert not rows.n_temps.any()  # what the kill left is swept, or used again
    assert len(of(sample, key, how="byte")) == 12
    if not ptrace_refusal():
        assert set(of(sample, key, how="syscall").verdict) == {"old", "new"}  # the kills fell on both sides
        assert len(of(sample, key, how="syscall")) >= 25
        assert (rows.n_files > 0).any()


@pytest.mark.parametrize("version", [0, 1])
def test_the_naive_save_is_torn(sample, version):
    torn = of(sample, "naive/overwrite", version=version, how="byte")
    assert set(torn.verdict) == {"torn"}
    assert [*torn.file_bytes] == [*torn.point]  # it is as long as was allowed
    need_ptrace()
    calls = of(sample, "naive/overwrite", version=version, how="syscall")
    assert {"write"} <= set(calls[calls.verdict == "torn"].call)


def test_removing_first_loses_what_was_acknowledged(sample):
    need_ptrace()
    rows = of(sample, "remove, rename/overwrite", version=1, how="syscall")
    assert [*rows[rows.verdict == "gone"].call] == ["rename"]
    assert set(rows.verdict) == {"old", "new", "gone"}


def test_kills_are_counted_by_recipe(sample):
    counts = kills.count_kills(sample)
    assert list(counts.columns) == kills.COUNTS
    assert (counts.n_points == counts.old + counts.new + counts.torn + counts.gone).all()
    assert counts.n_points.sum() == (sample.status == "measured").sum()
    assert len(counts) == len(SAMPLED) * 4
    assert counts[counts.recipe == "naive"].torn.all()
    assert not counts[counts.ours].torn_or_gone_at.any()


def test_a_call_is_not_carried_out_when_killed_on_its_entry(tmp_path):
    need_ptrace()

    def save():
        os.mkdir(tmp_path / "a")
        os.mkdir(tmp_path / "b")

    found = []
    for nth in range(1, 4):
        killed = kill_at_call(save, nth)
        found.append((killed.call, sorted(os.listdir(tmp_path)), killed.acknowledged))
        for path in tmp_path.iterdir():
            path.rmdir()
    mkdir = found[0][0]
    assert mkdir.startswith("mkdir")
    assert found == [(mkdir, [], False), (mkdir, ["a"], False), ("write", ["a", "b"], False)]
    killed = kill_at_call(save, 1000)
    assert (killed.was_killed, killed.acknowledged) == (False, True)


@pytest.mark.parametrize("n_bytes", [0, 1, 9999])
def test_a_file_is_cut_at_the_byte(tmp_path, n_bytes):
    killed = kill_at_byte(lambda: (tmp_path / "a").write_bytes(bytes(10_000)), n_bytes)
    assert (killed.was_killed, killed.acknowledged) == (True, False)
    assert (tmp_path / "a").stat().st_size == n_bytes
    killed = kill_at_byte(lambda: (tmp_path / "a").write_bytes(bytes(10_000)), 10_000)
    assert (killed.was_killed, killed.acknowledged) == (False, True)


def test_a_save_that_fails_by_itself_is_an_error(tmp_path):
    with pytest.raises(MeasurementError, match="failed by itself"):
        kill_at_byte(lambda: (tmp_path / "none/a").write_bytes(b""), 100)


def save_once(folder, version):
    """Its temp name must not exist: after a kill it cannot save again."""
    with open(folder / "state.tmp", "xb") as file:
        file.write(content(version))
    os.replace(folder / "state.tmp", folder / "state")


def test_a_recipe_that_cannot_save_again_is_seen(tmp_path, monkeypatch):
    recipe = Recipe("once", "overwrite", save_once, load_overwritten)
    monkeypatch.setattr(kills, "ALL_RECIPES", {recipe.key: recipe})
    rows = kills.kill_save(recipe.key, 1, "byte", str(tmp_path / "work"), 4)
    assert [row["verdict"] for row in rows] == ["old"] * 4
    assert not any(row["resaved"] for row in rows)
    assert all(row["n_temps"] for row in rows)
    assert not (tmp_path / "work").exists()


def test_where_ptrace_is_refused_nothing_is_said_to_have_passed(tmp_path, monkeypatch):
    monkeypatch.setattr(kills, "ptrace_refusal", lambda: "not allowed")
    rows = kills.kill_save("full/overwrite", 0, "syscall", str(tmp_path), 1)
    counts = kills.count_kills(pd.DataFrame(rows, columns=kills.COLUMNS))
    assert counts[["status", "reason", "n_points", "old"]].values.tolist() == [["not run", "not allowed", 0, 0]]
