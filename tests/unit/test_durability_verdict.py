"""The durability lab's verdict, its text and its figure.

Goal: the verdict is good only if ours is good everywhere and every control is bad where it must be; the text says what
the tables say. Method: tables of a good run, changed one cell at a time; numbers counted by hand.
"""

from __future__ import annotations

import pytest

from anchorage.durability.findings import describe_durability, layers, survival
from anchorage.durability.powercut import LYING
from anchorage.durability.verdict import judge_tables, read_tables
from anchorage.figures.durability import plot_durability
from durability_tables import build_tables, write_tables

DISK = {
    "filesystem": "ext4",
    "mount_options": "rw",
    "device": None,
    "write_cache": None,
    "system": "Linux",
    "kernel": "6",
}


@pytest.fixture
def judge(tmp_path):
    """Write tables, read them back, and judge them; a change is made to the first line that fits."""

    def run(table=None, where=None, change=None):
        tables = build_tables()
        if table:
            lines = tables[table].astype(object)
            fits = (lines[list(where)] == list(where.values())).all(axis=1)
            assert fits.any()
            lines.loc[fits, list(change)] = list(change.values())
            tables[table] = lines
        read = read_tables(write_tables(tables, tmp_path))
        return judge_tables(read, key="key"), read

    return run


def test_a_good_run_is_good(judge):
    verdict, _ = judge()
    assert verdict["ok"], verdict["faults"]
    assert verdict["not_run"] == {}
    assert verdict["judged"]["power_cuts"]["ours"] == 7 * 10
    assert verdict["judged"]["kill_points"] == {"ours": 7 * 3, "others": 14 * 3}


OURS = {"recipe": "shard"}


@pytest.mark.parametrize(
    ("table", "where", "change", "said"),
    [
        ("power_cuts", OURS, {"torn": 1}, "power_cuts: shard, new name, ext4, quiet: 1 of 11 points bad"),
        ("power_cuts", OURS, {"unmountable": 2}, "2 of 12 points bad"),
        ("power_cuts", {"recipe": "naive"}, {"torn": 0}, "ext4: the control 'naive', new name, is never torn"),
        ("power_cuts", {"recipe": "naive"}, {"mounted": 0}, "without mounting an image"),
        ("power_cuts", {"schedule": LYING}, {"gone": 0}, "with a lying drive nothing was lost"),
        ("kill_points", OURS, {"verdict": "gone"}, "kill_points: shard, new name, syscall: 3 of 3 points bad"),
        ("kill_points", OURS, {"resaved": False}, "saving again failed after 3 kills"),
        ("kill_points", {"recipe": "naive"}, {"verdict": "new"}, "control 'naive', overwrite, is never torn"),
        ("legal_states", {"recipe": "manifest"}, {"torn": 1}, "legal_states: manifest, overwrite, after: 1 of 11"),
        ("legal_states", {"recipe": "rename only"}, {"torn": 0}, "control 'rename only', overwrite, is never torn"),
        ("workflow_cuts", {"drive": "honest"}, {"torn": 1}, "a whole run: 1 of 10 cuts bad"),
        ("workflow_cuts", {"drive": "honest"}, {"reruns_identical": 1}, "1 of 2 runs resumed differ"),
        ("workflow_cuts", {"drive": "lying"}, {"gone": 0}, "a drive that lies lost nothing"),
        (
            "faults",
            OURS,
            {"acknowledged": True},
            "shard, new name, EIO at fsync 1: acknowledged in spite of it",
        ),
        ("faults", OURS, {"call": "rename"}, "no fsync of shard was made to fail"),
        ("faults", OURS, {"outcome": "torn"}, "found it torn"),
        ("faults", OURS, {"renamed_after_failed_fsync": True}, "its name after its fsync had failed"),
        ("faults", OURS, {"retry_ok": False}, "tried again, failed"),
        (
            "syscalls",
            OURS,
            {"faults": "rename before fsync"},
            "shard, new name, version 1: rename before fsync",
        ),
    ],
)
def test_a_bad_cell_is_a_fault(judge, table, where, change, said):
    verdict, _ = judge(table, where, change)
    assert not verdict["ok"]
    assert said in "\n".join(verdict["faults"])


def test_what_was_not_run_is_said_and_demands_nothing(judge):
    tables = build_tables()
    change = {"status": "not run", "reason": "needs root", "gone": 0, "torn": 0, "old": 0, "new": 0}
    for name in ("power_cuts", "workflow_cuts"):
        where = {"filesystem": "ext4"}
        assert (tables[name]["filesystem"] == "ext4").all()
        verdict, read = judge(name, where, change)
        assert verdict["ok"], verdict["faults"]
        assert verdict["not_run"] == {name: ["needs root"]}
        assert f"- {name}: needs root" in describe_durability(read, verdict, DISK)
    assert verdict["judged"]["power_cuts"]["ours"] > 0
    _, read = judge("power_cuts", {"filesystem": "ext4"}, change)
    assert list(layers(read)["power cut"]) == ["not run"] * 4
    assert set(survival(read)["ext4\noverwrite"].dropna()) == {"not run"}


def test_the_places_follow_from_what_recipes_lost(judge):
    _, read = judge()
    found = layers(read)
    assert found.loc["buffer in the process"].tolist() == ["wiped", "wiped"]
    assert found.loc["drive's own cache"].tolist() == ["kept", "wiped"]  # full survives but on the drive that lies
    assert found.loc["flash"].tolist() == ["kept", "kept"]
    _, read = judge("power_cuts", {"schedule": LYING}, {"gone": 0})
    assert layers(read).loc["drive's own cache", "power cut"] == "kept"


def test_text_and_figure_say_what_the_tables_say(judge, tmp_path):
    verdict, read = judge()
    text = describe_durability(read, verdict, DISK)
    assert "70 power cuts" in text
    assert "On this disk: filesystem ext4;" in text
    assert "| naive | 4 of 6 | 5 of 15 | 5 of 15 | 10 of 30 |" in text
    assert "| shard (ours) | 0 of 3 | - | 0 of 10 | 0 of 10 |" in text
    assert "2 times gave the uninterrupted run's bytes" in text
    assert "Nothing of it was torn" in text
    assert "| write 4 KiB | fsync | 9 | 80.0 | 160.0 |" in text
    bad, tables = judge("power_cuts", OURS, {"torn": 1})
    assert "Nothing of it was torn" not in (text := describe_durability(tables, bad, DISK))
    assert "**The lab found faults:**" in text
    plot_durability(layers(read), survival(read), [tmp_path / "a.svg", tmp_path / "b.png"])
    drawn = (tmp_path / "a.svg").read_text()
    assert all(f">{word}<" in drawn for word in ("wiped", "kept", "0 of 10", "temp elsewhere, move", "shard (ours)"))
