"""loading.md: which method for which use, and which claims hold here, from the tables alone."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import pandas as pd

from anchorage.loading.claims import CLAIMS, COPYING, MAPPING, Finding, Tables, measured, verdict
from anchorage.loading.methods import METHODS
from anchorage.loading.puzzle import explain_puzzle, tabulate_forwards
from anchorage.loading.subject import MEASURED, NOT_RUN
from anchorage.loading.summary import (
    MIN_REPEATS,
    WHOLE,
    LoadingTable,
    chance_apart,
    format_number,
    format_ratio,
    joined,
    mib,
)
from anchorage.loading.trial import EXACT, SPARE_BYTES
from anchorage.loading.uses import describe_uses

ONE_SITE_TIMES = {"cold": 6, "warm": 10}  # as fast as torch.load of the same tensors, of a shard of SITES or more
SITES = 15
WHOLE_FILE_BYTES = 0.02  # how far what a cold measurement of a whole file reads may be off the file's size, and a page
WORKERS, WORKERS_SHARE = 3, 0.5  # so many that map hold less than this of what as many that copy do
_NONE = "-"
_LONG_WAIT = 10  # % of its time: a measurement that waited more for a processor is named
_CHECKED_HOW = (
    "A measurement whose state or bytes are not what they must be fails the run and is in no table. What is demanded "
    "of "
    "times and of workers informs, and never fails a run."
)


def advise(tables: Tables) -> str:
    """The whole of ``loading.md``.

    Args:
        tables: of one run.

    Returns:
        Markdown. What was not run is said to be so.
    """
    table = tables.loading
    lines = ["# What loading costs here, cold and warm", "", *(f"- {line}" for line in _measured_how(table))]
    for subject in table.subjects:
        lines += ["", f"## {table.title(subject)}", "", *_methods_table(table, subject)]
    lines += ["", "## Which method for which use", "", *(f"- {line}" for line in describe_uses(tables))]
    lines += ["", "## The first forward pass", "", *tabulate_forwards(table)]
    lines += ["", "## Why the same file loads in milliseconds today and in seconds on Monday", ""]
    lines += [" ".join(explain_puzzle(table))]
    lines += ["", '## The claims of the lesson "What happens when you save a file?"', ""]
    for number_, (claim, judge) in enumerate(CLAIMS.items(), 1):
        findings = list(judge(tables))
        lines += [f"{number_}. {claim}: **{verdict(findings)}**."]
        lines += [f"   - {finding.text}: {_outcome(finding)}." for finding in findings]
    lines += ["", "## Checks", "", _CHECKED_HOW, "", *(f"- {line}" for line in _checks(tables))]
    return "\n".join(lines) + "\n"


def _outcome(finding: Finding) -> str:
    if finding.only_looked_on:
        return "only looked on"
    if finding.control:
        return {True: "the control, as it must be", False: "THE CONTROL FAILS", None: "the control, not shown"}[
            finding.holds
        ]
    return {True: "holds", False: "does not hold", None: "not shown"}[finding.holds]


def _measured_how(table: LoadingTable) -> Iterator[str]:
    lines = table.measured
    if lines.empty:
        yield "Nothing was measured."
    else:
        yield (
            f"{len(lines) + len(table.forwards)} measurements, each in a fresh process that did nothing else, alone on "
            "the machine as far as this workflow goes, in an order drawn with the seed. Times are of loading and of "
            "touching every wanted byte, whose digests are compared. Medians, in brackets lowest to highest."
        )
        if len(table.forwards):
            yield (
                f"In {len(table.forwards)} of them a model ran for the first time instead: they are under "
                '"The first forward pass" and nowhere else.'
            )
        yield from _states(lines)
        set_ = lines[lines["state"] != "as-found"]
        n_repeats = int(set_.groupby(["subject", "method", "state"]).size().min()) if len(set_) else 1
        chance = (
            f"of two methods that are the same, {n_repeats} repeats each lie so in "
            f"{100 * chance_apart(n_repeats):.2g} % "
            "of comparisons if nothing but chance differs between jobs. Repeats of a method run one after another, "
            "so a "
            "drift of the machine can look like a difference"
        )
        few = f"with {n_repeats} repeat(s), fewer than {MIN_REPEATS}, none is"
        limit = few if n_repeats < MIN_REPEATS else chance
        yield f"A difference is stated where the ranges of two do not touch; {limit}."
        yield _waits(table)
        places = joined([str(name) for name in lines["filesystem"].unique()])
        yield f"File system {places}, kernel {joined([str(name) for name in lines['kernel'].unique()])}."
    missing = table.lines[table.lines["status"] != MEASURED]
    for reason, rows in missing.groupby("reason", sort=False, dropna=False):
        cases = [f"{row.subject} {row.method} {row.state if isinstance(row.state, str) else ''}".strip()
                 for row in rows.itertuples()]  # fmt: skip
        yield f"Not run: {joined(list(dict.fromkeys(cases)))}: {reason}."


def _states(lines: pd.DataFrame) -> Iterator[str]:
    """How each state was proved, from the lines themselves."""
    by = joined([str(name) for name in lines["residency_by"].dropna().unique()])
    found, cold, warm = (lines[lines["state"] == state] for state in ("as-found", "cold", "warm"))
    if len(found):
        n_warm, n_cold = (int((found["resident_before"] == share).sum()) for share in (1, 0))
        yield (
            f"As found, {len(found)} measurements, the first of each subject and method, nothing set: {n_warm} found "
            f"the whole file in the page cache, {n_cold} nothing of it. They are in loading.csv and nowhere below."
        )
    if len(cold):
        share, resident = (
            cold["bytes_from_disk"] / cold["touched_bytes"],
            format_number(100 * cold["resident_before"].max()),
        )
        yield (
            f"Cold, {len(cold)} measurements: at most {resident} % of the file was in the page cache before ({by}), "
            f"and {format_number(share.min())} to {format_number(share.max())} times the touched bytes were read "
            "from the disk."
        )
        if (cold["cold_kind"] == "guest-cold").any():
            yield (
                "Cold means guest-cold: a hypervisor was seen, and what it caches beneath cannot be emptied from here. "
                "Another machine's disk may be slower than these cold times say."
            )
    if len(warm):
        yield (
            f"Warm, {len(warm)} measurements: at least {format_number(100 * warm['resident_before'].min())} % of the "
            "file was "
            f"in the page cache before, and at most {format_number(warm['bytes_from_disk'].max())} bytes were read."
        )


def _waits(table: LoadingTable) -> str:
    """How long measurements whose state was set waited for a processor, and which of them long."""
    lines = pd.concat([table.measured, table.forwards])
    lines = lines[(lines["state"] != "as-found") & lines["wait_s"].notna()]
    if lines.empty:
        return "How long measurements waited for a processor the kernel does not tell."
    lines = lines.assign(share=100 * lines["wait_s"] / lines["total_s"])
    most = format_number(lines["share"].max())
    text = f"Threads ready to run waited for a processor, added up, for at most {most} % of a measurement's time"
    long = lines[lines["share"] > _LONG_WAIT]
    if long.empty:
        return f"{text}."
    cases = [
        f"{' '.join(map(str, case))} ({len(rows)}, up to {format_number(rows['share'].max())} %)"
        for case, rows in long.groupby(["subject", "method", "state", "use"])
    ]
    return f"{text}; in {len(long)} for more than {_LONG_WAIT} %: {joined(cases)}."


def _methods_table(table: LoadingTable, subject: str) -> list[str]:
    head = "| method | cold, s | warm, s | cold / warm | cold, GB/s | warm, GB/s | peak, MiB | anonymous, MiB |"
    lines = [head, "|---" * 8 + "|"]
    for method in table.asked_for(subject):
        cold, warm = (table.spread(subject, method, state) for state in ("cold", "warm"))
        rates = [table.spread(subject, method, state, "gb_s") for state in ("cold", "warm")]
        if method in table.methods(subject):
            memory = [format_number(table.any_state(subject, method, name)) for name in ("peak_mib", "anonymous_mib")]
        else:
            memory = [_NONE, _NONE]
        ratio = format_number(cold.middle / warm.middle) if cold and warm else _NONE
        speeds = [format_number(rate.middle) if rate else _NONE for rate in rates]
        cells = [f"`{method}`", cold or NOT_RUN, warm or NOT_RUN, ratio, *speeds, *memory]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def _checks(tables: Tables) -> Iterator[str]:
    """What the lab must show of its own: the states proved, one site of a shard, workers."""
    table = tables.loading
    cold, warm = (table.measured[table.measured["state"] == state] for state in ("cold", "warm"))
    yield _check("Cold: no page of any file in the page cache before", len(cold), (cold["resident_before"] == 0).all())
    lazy = cold["method"].map(lambda name: name in METHODS and METHODS[name].lazy).astype(bool)
    read_all = cold[~lazy | (cold["touched_bytes"] >= WHOLE * cold["file_bytes"])]
    read_all = read_all[read_all["bytes_from_disk"].notna()]  # there are kernels that do not count them
    off = (read_all["bytes_from_disk"] / read_all["file_bytes"] - 1).abs()
    told = f"Cold: methods that read the whole file read its size within {100 * WHOLE_FILE_BYTES:.0f} % and a page"
    told += f" (off by at most {format_number(100 * off.max())} %)" if len(off) else ""
    yield _check(told, len(read_all), (off <= WHOLE_FILE_BYTES + mmap.PAGESIZE / read_all["file_bytes"]).all())
    warm = warm[warm["bytes_from_disk"].notna()]
    yield _check("Warm: nothing read from the disk", len(warm), (warm["bytes_from_disk"] == 0).all())
    yield from _one_site(table)
    yield _three_workers(tables.workers)


def _check(told: str, n_cases: int, met: bool) -> str:
    if not n_cases:
        return f"{told}: not run."
    return f"{told}: {'met' if met else 'NOT MET'} ({n_cases} measurement(s))."


def _one_site(table: LoadingTable) -> Iterator[str]:
    """Our reader of one site of a shard against torch.load of the same tensors."""
    told, subject = "One site of a shard by `ours`", "shard"
    if not table.spread(subject, "ours", "cold") and not table.spread(subject, "ours", "warm"):
        yield f"{told}: not run."
        return
    wanted, file = (table.any_state(subject, "ours", name) for name in ("touched_bytes", "file_bytes"))
    if file < SITES * wanted:
        held = format_number(file / wanted)
        yield f"{told}: nothing is demanded, the file holds {held} times what is wanted, not {SITES}."
        return
    if fetched := table.spread(subject, "ours", "cold", "bytes_from_disk"):
        found = f"fetched {mib(fetched.middle)} for {mib(wanted)} wanted of {mib(file)}"
        told_bytes = f"{told}, cold: {found}, {format_ratio(fetched.middle, wanted)} as much"
        yield _check(told_bytes, fetched.n_repeats, fetched.high <= EXACT * wanted + SPARE_BYTES)
    for state, demanded in ONE_SITE_TIMES.items():
        ours, other = (table.spread(subject, method, state) for method in ("ours", "torch.load"))
        if not ours or not other:
            yield f"{told} against `torch.load`, {state}: not run."
            continue
        found = (
            f"{told}, {state}: {ours} s, {format_ratio(other.middle, ours.middle)} as fast as `torch.load`, {other} s"
        )
        told_times = f"{found}; at least {demanded} times is demanded"
        yield _check(told_times, ours.n_repeats, other.middle >= demanded * ours.middle)


def _three_workers(workers: pd.DataFrame) -> str:
    lines = measured(workers)
    sums = lines[lines["n_workers"] == WORKERS].set_index("method")["pss_mib"]
    mapping = [name for name in MAPPING if name in sums.index]
    copying = [name for name in COPYING if name in sums.index]
    if not mapping or not copying:
        return f"{WORKERS} workers that map against {WORKERS} that copy: not run."
    most, least = max(mapping, key=sums.__getitem__), min(copying, key=sums.__getitem__)
    ratio = sums[most] / sums[least]
    return _check(
        f"{WORKERS} workers by `{most}` hold {format_number(sums[most])} MiB together (sum of PSS), {WORKERS} by "
        f"`{least}` "
        f"{format_number(sums[least])} MiB: {format_number(ratio)} of it, less than {format_number(WORKERS_SHARE)} "
        "is demanded",
        1,
        ratio < WORKERS_SHARE,
    )
