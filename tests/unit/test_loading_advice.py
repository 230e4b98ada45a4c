"""loading.md: uses, claims and checks that follow from the tables, and say nothing where these do not.

Goal: no sentence says more than its numbers; what is missing is told and never a crash. Method: made-up tables of a
machine on which every claim of the lesson holds, then with one number changed. Oracle: ratios worked out by hand.
Controls: tables that contradict a claim give "does not hold", ranges that touch "not shown".
"""

from __future__ import annotations

import math

import pandas as pd
import pytest

from anchorage.errors import AnchorageError
from anchorage.loading.advice import advise
from anchorage.loading.claims import Tables, read_tables
from anchorage.loading.summary import LoadingTable, Spread, apart, chance_apart, format_number, lower, spread_of
from anchorage.loading.uses import headline
from loading_tables import ALL, DEFAULT, MIB, loading_table, not_run, side_tables

CLAIMS = {  # of each claim the words by which it is found
    "quick": "Mapping a file returns at once",
    "cold": "Cold, mapping loses",
    "warm": "Warm, mapping is faster",
    "peak": "The peak is the same",
    "one": "One tensor of a file",
    "workers": "Workers that map share",
    "pressure": "Under memory pressure mapped",
    "accident": "A file just copied or just loaded",
    "pickle": "weights_only refuses",
    "liars": "A safetensors header that lies",
    "torch": "mmap=True gives",
}


def advice(table=None, **side: pd.DataFrame) -> str:
    found = side_tables() | side
    return advise(Tables(LoadingTable(loading_table() if table is None else table), **found))


def verdicts(text: str) -> dict[str, str]:
    """The verdict on each claim."""
    found = {}
    for name, words in CLAIMS.items():
        line = next(line for line in text.splitlines() if words in line and line.endswith("**."))
        found[name] = line.split("**")[-2]
    return found


def change(table, column, factor, **where) -> pd.DataFrame:
    """The table with a column multiplied where other columns have given values."""
    table = table.copy()
    match = pd.Series(True, index=table.index)
    for name, value in where.items():
        match &= table[name] == value
    table.loc[match, column] = table.loc[match, column] * factor
    return table


@pytest.mark.parametrize("methods", [DEFAULT, ALL], ids=len)
def test_every_claim_holds_on_a_machine_made_so(methods):
    assert set(verdicts(advice(loading_table(methods))).values()) == {"holds"}
    assert "NOT MET" not in advice(loading_table(methods))


MAPPERS = ["torch.load-mmap", "load_file"]
CONTRADICTED = [  # claim, column, factor, methods, where
    ("quick", "load_s", 2000, ["load_file"], {}),
    ("torch", "load_s", 2000, ["torch.load-mmap"], {}),
    ("torch", "anonymous_mib", 600, ["torch.load-mmap"], {}),
    ("cold", "total_s", 0.25, MAPPERS, {"state": "cold"}),
    ("warm", "total_s", 8, MAPPERS, {"state": "warm"}),
    ("peak", "peak_mib", 2, ["torch.load"], {}),
    ("peak", "anonymous_mib", 600, MAPPERS, {}),
    ("one", "bytes_from_disk", 1.06, ["one-tensor", *MAPPERS], {"state": "cold"}),
]


@pytest.mark.parametrize(("claim", "column", "factor", "methods", "where"), CONTRADICTED)
def test_a_claim_that_the_numbers_contradict_does_not_hold(claim, column, factor, methods, where):
    table = loading_table()
    for method in methods:
        table = change(table, column, factor, method=method, **where)
    changed = verdicts(advice(table))
    assert changed[claim] in ("does not hold", "holds in part")
    others = {name for name, verdict in changed.items() if verdict != "holds"} - {claim}
    assert not others - {"quick", "torch", "peak"}  # one number speaks to several claims


def test_wholly_contradicted_claims_say_so():
    table = loading_table()
    for method in MAPPERS:
        table = change(table, "total_s", 0.25, method=method, state="cold")
        table = change(table, "total_s", 8, method=method, state="warm")
        table = change(table, "load_s", 2000, method=method)
    found = verdicts(advice(table))
    assert [found[name] for name in ("cold", "warm", "quick")] == ["does not hold"] * 3


def test_ranges_that_touch_show_nothing():
    table = loading_table()
    slowest = (table["method"] == "torch.load") & (table["repeat"] == 2) & (table["state"] == "cold")
    table.loc[slowest, "total_s"] = 9.0
    text = advice(table)
    assert verdicts(text)["cold"] == "not shown"
    uses = next(line for line in text.splitlines() if "file is cold** (weights)" in line)
    assert "No difference from it was shown for" in uses
    part = (table["method"] == "load_file") & (table["repeat"] == 2) & (table["subject"] == "big")
    assert verdicts(advice(table.assign(total_s=table["total_s"].mask(part, 9.0))))["warm"] == "holds where shown"
    few = advice(loading_table(repeats=2))
    assert verdicts(few)["cold"] == verdicts(few)["warm"] == "not shown"
    assert "with 2 repeat(s), fewer than 3, none is" in few
    assert "6 repeats each lie so in 0.22 % of" in advice(loading_table(repeats=6))  # 2 / 924


def test_the_figures_are_those_of_the_table():
    text = advice()
    # 512 MiB: torch.load 2 s a GiB cold, 1 s warm, median repeat 1 % slower than the first
    assert "| `torch.load` | 1.01 (1.00 to 1.02) | 0.505 (0.500 to 0.510) | 2.00 | 0.532 | 1.06 | 712 | 512 |" in text
    assert "(weights): `torch.load`, 1.01 (1.00 to 1.02) s. It is 2.00 times as fast as `load_file`" in text
    # one tensor of 64, by mapping 4 s a GiB, after 1 ms: 4 * 8 / 1024 * 1.01 + 0.001
    assert "`one-tensor` takes 0.0326 (0.0323 to 0.0329) s. That is 31.0 times as fast as the whole file" in text
    # one site of 16: ours reads 12 of 192 MiB at the same speed
    assert "16.0 times as fast as `torch.load`, 0.379 (0.375 to 0.383) s; at least 6 times is demanded: met" in text
    assert "fetched 12.0 MiB for 12.0 MiB wanted of 192 MiB, 1.00 times as much: met" in text
    # three workers: 103 + 512 and 103 + 3 * 512
    assert "hold 615 MiB together (sum of PSS), 3 by `torch.load` 1,639 MiB: 0.375 of it" in text
    assert "`load_file` went on with less memory than the tensors take, and read up to 200 MiB again" in text
    assert "2.02 (2.00 to 2.04) s cold and 0.127 (0.126 to 0.129) s warm, 15.9 times as long" in text
    # mapped, nothing read when it returns; load and touch add up
    assert (
        "Cold, in the middle one of 3 repeats, `torch.load-mmap` of weights returns after 0.00100 s: it has read next "
        "to nothing, 2.00 % of the file is in the page cache by then. Touching every byte then takes 2.02 s, 2.02 s in "
        "all."
    ) in text
    # the model runs for 3 s, after 1.01 and 0.505 s of loading, or 1 ms
    assert "| `torch.load` | 1.01 (1.00 to 1.02) | 3.00 | 4.01 (4.00 to 4.02) | 0.505 (0.500 to 0.510) | 3.00 |" in text
    assert (
        "With a first forward pass of weights instead of the touch it takes 3.00 s cold and 3.00 s warm: no diff"
        in text
    )
    assert "In 24 of them a model ran for the first time instead" in text
    assert "waited for a processor, added up, for at most 2.00 % of a measurement's time." in text
    assert "## weights: 512 MiB wanted of a file of 512 MiB\n" in text


def test_a_noisy_forward_pass_changes_no_ranking_and_no_claim():
    table = loading_table()
    ran = table["use"] == "forward"
    noise = pd.Series([37.0 * (place % 7) for place in range(len(table))])
    noisy = table.copy()
    for name in ("total_s", "peak_mib", "anonymous_mib", "load_s"):
        noisy.loc[ran, name] += noise[ran]
    part = "## The first forward pass"
    (before, after), (noisy_before, noisy_after) = (advice(lines).split(part) for lines in (table, noisy))
    assert noisy_before == before
    assert noisy_after != after
    assert noisy_after.split("## The claims")[1] == after.split("## The claims")[1]
    assert headline(LoadingTable(noisy)) == headline(LoadingTable(table))
    slow = change(table, "total_s", 100, use="touch", method="torch.load", subject="weights", state="cold")
    assert advice(slow).split(part)[0] != before  # control


def test_measurements_that_waited_long_are_named():
    table = change(loading_table(), "wait_s", 30, subject="big", method="ours", state="cold")
    text = advice(table)
    assert (
        "at most 30.0 % of a measurement's time; in 3 for more than 10 %: big ours cold touch (3, up to 30.0 %)."
        in text
    )
    assert "the kernel does not tell" in advice(table.assign(wait_s=None))


def test_a_load_that_had_read_the_file_is_not_said_to_have_read_nothing():
    table = loading_table()
    table.loc[table["method"] == "torch.load-mmap", "resident_loaded"] = 0.6
    text = advice(table)
    assert "next to nothing" not in text
    assert "returns after 0.00100 s: 60.0 % of the file is in the page cache by then." in text


def test_the_first_page_states_no_ratio_of_ranges_that_touch():
    table = loading_table()
    table.loc[(table["method"] == "torch.load") & (table["repeat"] == 2), "total_s"] = 0.01
    told = headline(LoadingTable(table))
    assert told.count("no difference was shown") == 3
    assert "times" not in told


def test_checks_that_are_not_met_say_so():
    table = loading_table()
    slow = change(table, "total_s", 3, method="ours", subject="shard")
    assert "5.33 times as fast as `torch.load`" in advice(slow)
    assert advice(slow).count("NOT MET") == 2
    much = change(table, "bytes_from_disk", 1.06, method="ours", subject="shard")
    assert "1.06 times as much: NOT MET" in advice(much)
    short = change(table, "bytes_from_disk", 0.97, method="torch.load", subject="big")
    assert "(off by at most 3.00 %): NOT MET" in advice(short)
    warm = table.copy()
    warm.loc[warm["state"] == "warm", "bytes_from_disk"] = 1
    assert "Warm: nothing read from the disk: NOT MET" in advice(warm)
    workers = change(side_tables()["workers"], "pss_mib", 2, method="load_file")
    assert "less than 0.500 is demanded: NOT MET" in advice(workers=workers)
    few_sites = change(table, "file_bytes", 0.5, subject="shard")
    assert "nothing is demanded, the file holds 8.00 times what is wanted, not 15." in advice(few_sites)


def test_side_tables_can_contradict_too():
    side = side_tables()
    private = change(side["workers"], "pss_mib", 1, method="x")
    mapped = private["method"] == "load_file"
    private.loc[mapped, "pss_mib"] = 100 + 512 * private.loc[mapped, "n_workers"]
    assert verdicts(advice(workers=private))["workers"] == "holds in part"
    kept = change(side["pressure"], "second_bytes_from_disk", 0)
    assert verdicts(advice(pressure=kept))["pressure"] == "holds in part"  # the copy was killed all the same
    killed = side["pressure"].assign(status="killed")
    assert verdicts(advice(pressure=killed))["pressure"] == "holds in part"
    assert "limit 150% of the file: `torch.load` was killed: the limit left it no memory: the control, not" in advice(
        pressure=killed
    )
    assert "a plain copy: 0.0100 s, 0.250 of the cold time; 100 % in the page cache before, 0 MiB of 8.00" in advice()
    steps = side["accident"].assign(resident_before=[0.0, 0.0, 0.0])
    assert verdicts(advice(accident=steps))["accident"] == "does not hold"
    lies = side["refusals"]
    taken = lies.assign(refused=[False, False, True, False], side_effect=[True, True, False, False])
    found = verdicts(advice(refusals=taken))
    assert (found["pickle"], found["liars"]) == ("does not hold", "holds")
    assert "`safe_open` refused 0 of 1 headers that lie; it took: a gap: only looked on." in advice(refusals=taken)
    assert verdicts(advice(refusals=lies.assign(refused=False)))["liars"] == "does not hold"


def test_a_claim_whose_control_fails_is_not_shown():
    side = side_tables()
    never_ran = side["refusals"].assign(side_effect=False)
    assert verdicts(advice(refusals=never_ran))["pickle"] == "not shown"
    assert "0 wrote their file: THE CONTROL FAILS." in advice(refusals=never_ran)
    warm = side["accident"].assign(resident_before=1.0, bytes_from_disk=0)
    assert verdicts(advice(accident=warm))["accident"] == "not shown"
    reads_anyway = side["pressure"].assign(second_bytes_from_disk=200 * MIB)
    assert verdicts(advice(pressure=reads_anyway))["pressure"] == "not shown"
    controls_only = side["pressure"][side["pressure"]["limit_of"] != "60% of the file"]
    assert verdicts(advice(pressure=controls_only))["pressure"] == "not run"


def test_what_was_not_run_is_said_and_nothing_fails():
    table = not_run(loading_table(ALL), "fastsafetensors not installed", method="fastsafetensors")
    table = not_run(table, "tmpfs is never cold", subject="big", state="cold")
    text = advice(table)
    assert (
        "Not run: weights fastsafetensors, big fastsafetensors and shard fastsafetensors: fastsafetensors not" in text
    )
    assert "| `fastsafetensors` | not run | not run | - | - | - | - | - |" in text
    assert "tmpfs is never cold." in text
    assert "**To a GPU**: not run: no CUDA device." in text
    side = {name: lines[:0] for name, lines in side_tables().items()}
    for few in (["ours"], ["one-tensor"], ["torch.load"], ["load_file"]):
        found = verdicts(advice(loading_table(few), **side))
        assert found["cold"] == found["workers"] == found["pressure"] == found["accident"] == "not run"
    nothing = loading_table(["ours"])
    nothing = pd.concat([not_run(nothing, "why", subject=name) for name in ("weights", "big", "shard")])
    nothing = nothing[nothing["status"] == "not run"]
    assert "Nothing was measured." in advice(nothing, **side)
    assert set(verdicts(advice(nothing, **side)).values()) == {"not run"}


def test_a_kernel_that_does_not_count_bytes_is_no_crash():
    table = loading_table().assign(bytes_from_disk=math.nan, anonymous_mib=math.nan)
    assert "Warm: nothing read from the disk: not run." in advice(table)


def test_a_table_of_another_capture_is_refused(tmp_path):
    tables = side_tables() | {"loading": loading_table()}
    files = {name: tmp_path / f"{name}.csv" for name in tables}
    for name, lines in tables.items():
        lines.to_csv(files[name], index=False)
    assert advise(read_tables(files, "k")) == advice()  # a table read again gives the same text
    with pytest.raises(AnchorageError, match="belongs to capture key k"):
        read_tables(files, "other")


def test_ranges_are_compared_by_their_ends():
    first, second = spread_of([1, 2, 3]), spread_of([4, 5, 6])
    assert first == Spread(1, 2, 3, 3)
    assert apart(first, second)
    assert not apart(first, spread_of([3, 5, 6]))  # touching
    assert not apart(first, spread_of([4, 5]))  # too few
    assert [lower(first, second), lower(second, first), lower(first, second, 0.5)] == [True, False, None]
    assert lower(first, spread_of([40, 50, 60]), 0.1) is True
    assert lower(first, spread_of([2, 5, 6])) is None
    assert spread_of([math.nan]) is None
    assert chance_apart(3) == 2 / 20
    assert [format_number(value) for value in (0, 1234.5, 12.34, 0.01234, 0.0000123)] == [
        "0",
        "1,234",
        "12.3",
        "0.0123",
        "0.000012",
    ]


def test_the_table_knows_who_touches_all_and_who_a_part():
    table = LoadingTable(loading_table())
    assert table.whole("big") == ["torch.load", "torch.load-mmap", "load_file", "ours"]
    assert table.in_part("big") == ["one-tensor"]
    assert set(table.in_part("shard")) == set(DEFAULT)
    assert table.whole_subjects() == ["weights", "big"]
    assert table.any_state("shard", "ours", "touched_bytes") == 12 * MIB
