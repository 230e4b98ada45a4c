"""The order of a save's system calls.

Goal: our writers force every byte and name before what states it, and a writer that does not is caught. Method: strace
of real saves; hand-written traces for what no writer here does. Oracle: which rules the unsafe recipes of the textbook
break is known (notes on crash consistency: OSDI'14); the broken writers are broken on purpose. Control: those.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from anchorage.durability import tracing
from anchorage.durability.order import check_order
from anchorage.durability.ourrecipes import ALL_RECIPES, OURS
from anchorage.durability.recipes import RECIPES
from anchorage.durability.syscalls import Event, cut_saves, parse_trace, strace_refusal

BROKEN = [sys.executable, str(Path(__file__).parents[1] / "broken_writers.py")]
EXPECTED = {  # a word of each fault, at the second save
    "naive/overwrite": ["truncates", "bytes", "name state", "final name"],
    "naive/new name": ["bytes", "name state", "final name"],
    "rename only/overwrite": ["not forced", "bytes", "name state"],
    "rename only/new name": ["not forced", "bytes", "name state"],
    "fsync, rename/overwrite": ["name state"],
    "fsync, rename/new name": ["name state"],
    "fsync before flush/overwrite": ["after its fsync", "bytes"],
    "fsync before flush/new name": ["after its fsync", "bytes"],
    "remove, rename/overwrite": ["removes"],
    "remove, rename/new name": [],
    "full/overwrite": [],
    "full/new name": [],
}


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """The table of all recipes, by key and version."""
    if reason := strace_refusal():
        pytest.skip(f"not run: {reason}")
    table = tracing.trace_recipes([*ALL_RECIPES.values()], tmp_path_factory.mktemp("traced"), log=lambda line: None)
    assert list(table.columns) == tracing.COLUMNS
    return {(f"{row.recipe}/{row.case}", row.version): row for row in table.itertuples()}


@pytest.mark.parametrize("key", EXPECTED)
def test_each_recipe_of_the_textbook_breaks_the_rules_it_is_known_to_break(traced, key):
    faults = list(filter(None, traced[key, 1].faults.split("; ")))
    assert len(faults) == len(EXPECTED[key])
    assert all(any(word in fault for fault in faults) for word in EXPECTED[key])


@pytest.mark.parametrize("case", ["overwrite", "new name"])
def test_a_temp_file_elsewhere_is_copied_in_place(traced, case):
    row = traced[f"temp elsewhere, move/{case}", 1]
    assert "writes under the final name" in row.faults
    assert ("truncates" in row.faults) is (case == "overwrite")
    if "EXDEV" in row.order:
        assert "another filesystem" in row.faults


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("key", OURS)
def test_our_writers_break_no_rule(traced, key, version):
    row = traced[key, version]
    assert row.faults == ""
    assert row.n_fsyncs > 0  # it was seen at work
    assert row.n_folder_fsyncs > 0 or key == "journal/overwrite"


def test_the_calls_of_the_full_recipe_are_those_of_the_seed(traced):
    expected = "truncate state.tmp > write state.tmp x2 > fsync state.tmp > rename state.tmp -> state > fsync ."
    row = traced["full/overwrite", 1]
    assert row.order == expected
    assert (row.n_writes, row.n_fsyncs, row.n_folder_fsyncs, row.n_renames) == (2, 1, 1, 1)


@pytest.mark.parametrize(
    ("fault", "key", "words"),
    [
        ("drop_fsync", "shard/new name", "but its bytes are not forced"),
        ("drop_fsync", "journal/overwrite", "ends before the bytes of journal"),
        ("drop_folder_fsync", "shard/new name", "journal-part-0.jsonl before"),
        ("drop_folder_fsync", "checkpoint/new name", "no fsync of its folder"),
        ("drop_folder_fsync", "manifest/overwrite", "no fsync of its folder"),
        ("fsync_before_flush", "shard/new name", "after its fsync"),
        ("fsync_before_flush", "checkpoint/new name", "after its fsync"),
        ("fsync_before_flush", "publication/overwrite", "after its fsync"),
        ("journal_before_shard", "shard/new name", "which states it"),
        ("publish_before_verify", "publication/overwrite", "without having verified"),
    ],
)
def test_a_writer_broken_on_purpose_is_caught(broken, fault, key, words):
    assert words in broken(fault)[key]


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """Faults found in the second saves of our recipes, by key, when a fault was put into their writers."""
    if reason := strace_refusal():
        pytest.skip(f"not run: {reason}")
    found = {}

    def trace(fault):
        if fault not in found:
            recipes = [recipe for recipe in OURS.values() if recipe.name != "write_bytes"]
            work = tmp_path_factory.mktemp(fault)
            table = tracing.trace_recipes(recipes, work, log=lambda line: None, command=[*BROKEN, fault])
            table = table[table.version == 1]
            found[fault] = dict(zip(table.recipe + "/" + table.case, table.faults, strict=True))
        return found[fault]

    return trace


def test_where_strace_is_missing_nothing_is_said_to_have_passed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    table = tracing.trace_recipes([RECIPES["full/overwrite"]], tmp_path, log=lambda line: None)
    assert set(table.status) == {"not run"}
    assert set(table.reason) == {"strace is not installed"}
    assert table.n_fsyncs.isna().all()


TRACE = """\
7 write(1<pipe:[1]>, "saving x/new name 3\\n", 20) = 20
7 openat(AT_FDCWD</w>, "/w/a.tmp", O_WRONLY|O_CREAT|O_TRUNC|O_CLOEXEC, 0666) = 3</w/a.tmp>
7 write(3</w/a.tmp>, "say \\"hi\\" <unfinished> = 3", 26) = 26
7 fsync(3</w/a.tmp> <unfinished ...>
8 write(4</w/a.tmp>, "late", 4)     = 4
7 <... fsync resumed>)              = 0
7 rename("/w/a.tmp", "/w/a")        = 0
7 --- SIGCHLD {si_signo=SIGCHLD} ---
7 openat(AT_FDCWD</w>, "/w", O_RDONLY|O_CLOEXEC) = 4</w>
7 fsync(4</w>)                      = 0
7 write(1<pipe:[1]>, "saved x/new name 3\\n", 19) = 19
7 +++ exited with 0 +++
"""


def test_a_write_while_an_fsync_runs_is_not_covered_by_it():
    (trace,) = cut_saves(parse_trace(TRACE.splitlines()))
    assert (trace.recipe, trace.version, trace.acknowledged) == ("x/new name", 3, True)
    (faults,) = check_order([trace], Path("/w"))
    assert faults == [
        "renames to a, but its last bytes are written after its fsync",
        "ends before the bytes of a are forced",
    ]
    quiet = [line for line in TRACE.splitlines() if "late" not in line]
    assert check_order([*cut_saves(parse_trace(quiet))], Path("/w")) == [[]]


def test_calls_are_read_as_strace_writes_them():
    lines = [
        '7 renameat2(AT_FDCWD</w>, "a", 5</v>, "b", 0) = -1 EXDEV (Invalid cross-device link)',
        '7 unlinkat(5</w>, "x y", 0) = 0',
        "7 sendfile(4</w/b>, 3</w/a>, [0] => [10], 10) = 10",
    ]
    assert list(parse_trace(lines)) == [
        Event("renameat2", "/w/a", "/v/b", value=-1, error="EXDEV"),
        Event("unlinkat", "/w/x y"),
        Event("sendfile", "/w/b", value=10),
    ]
