"""The claims of the lesson "What happens when you save a file?" on loading, and whether this machine's numbers bear
them out. A claim is judged case by case; where the ranges of two measurements touch, nothing is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import pandas as pd

from anchorage.loading.methods import METHODS
from anchorage.loading.subject import MEASURED, NOT_RUN
from anchorage.loading.summary import MIB, LoadingTable, Spread, format_number, format_ratio, joined, lower, mib
from anchorage.store.identity import check_key

QUICK_SHARE = 0.1  # a load that takes so little of the copying one's "returns at once"
SAME_PEAK = 1.25  # largest over smallest; above it nobody would call them the same
MOST, LITTLE = 0.9, 0.1  # of the tensors' bytes: held, not held
NEAR = 1.05  # bytes fetched over bytes wanted, to count as only these
HALF_PRIVATE = 0.5  # what a further worker adds, of what the first one took: 0 shared, 1 private
MAPPING = tuple(name for name, method in METHODS.items() if method.maps and not method.first_only)
COPYING = tuple(name for name, method in METHODS.items() if not method.maps)
_LAZY = tuple(name for name, method in METHODS.items() if method.maps and method.lazy)
_STATES = ("cold", "warm")


@dataclass(frozen=True)
class Finding:
    """One case of a claim.

    Attributes:
        text: the figures.
        holds: whether they bear it out; None where they do not say.
        control: it is no case of the claim, but must come out if the others are to mean anything.
        only_looked_on: it is no case of the claim either, and nothing is demanded of it.
    """

    text: str
    holds: bool | None
    control: bool = False
    only_looked_on: bool = False


@dataclass(frozen=True)
class Tables:
    """All tables of the lab."""

    loading: LoadingTable
    workers: pd.DataFrame
    pressure: pd.DataFrame
    device_copy: pd.DataFrame
    accident: pd.DataFrame
    refusals: pd.DataFrame


def read_tables(files: Mapping[str, Path], key: str) -> Tables:
    """Read all tables of one run.

    Args:
        files: the tables' CSV files by the names of :class:`Tables`.
        key: the capture key that every line must carry.

    Raises:
        AnchorageError: a line belongs to another capture.
    """
    found = {}
    for field in fields(Tables):
        table = found[field.name] = pd.read_csv(files[field.name])
        for other in table["key"].unique():
            check_key(str(files[field.name]), other, key)
    return Tables(loading=LoadingTable(found.pop("loading")), **found)


def verdict(findings: list[Finding]) -> str:
    """Of a claim: holds, does not hold, holds in part; holds where shown: some cases do not say; not shown: none does,
    or a control fails; not run."""
    outcomes = {finding.holds for finding in findings if not finding.control and not finding.only_looked_on}
    if not outcomes:
        return NOT_RUN
    if outcomes == {None} or any(finding.control and finding.holds is False for finding in findings):
        return "not shown"
    if outcomes == {True}:
        return "holds"
    if outcomes == {True, None}:
        return "holds where shown"
    return "holds in part" if True in outcomes else "does not hold"


def _quick_load(tables: Tables, mapping: tuple[str, ...]) -> Iterator[Finding]:
    """The load alone, nothing touched yet, against torch.load of the same tensors."""
    table = tables.loading
    for subject, state, method in _cases(table, mapping):
        mapped, copied = (table.spread(subject, name, state, "load_s") for name in (method, "torch.load"))
        if mapped and copied:
            text = f"{subject}, {state}: `{method}` returns after {mapped} s, `torch.load` after {copied} s"
            yield Finding(text, lower(mapped, copied, QUICK_SHARE))


def maps_quickly(tables: Tables) -> Iterator[Finding]:
    return _quick_load(tables, ("load_file", "safe_open"))


def torch_maps_too(tables: Tables) -> Iterator[Finding]:
    table, method = tables.loading, "torch.load-mmap"
    yield from _quick_load(tables, (method,))
    for subject, state, _ in _cases(table, (method,)):
        held = table.spread(subject, method, state, "anonymous_mib")
        touched = table.any_state(subject, method, "touched_bytes")
        if held:
            text = f"{subject}, {state}: `{method}` holds {held} MiB of anonymous memory for {mib(touched)} of tensors"
            yield Finding(text, held.middle <= LITTLE * touched / MIB)


def _against_copies(tables: Tables, state: str) -> Iterator[tuple[str, Spread, Spread]]:
    """Whole times of each mapping method and of the fastest copying one, with the figures as text."""
    table = tables.loading
    for subject, _, mapping in _cases(table, MAPPING, (state,)):
        mapped = table.spread(subject, mapping, state)
        whole = table.whole(subject)
        ranked = table.ranked(subject, state, [name for name in COPYING if name in whole])
        if mapped and ranked:
            copying, copied = ranked[0]
            yield f"{subject}: `{mapping}` {mapped} s, the fastest copy, `{copying}`, {copied} s", mapped, copied


def mapping_loses_cold(tables: Tables) -> Iterator[Finding]:
    for text, mapped, copied in _against_copies(tables, "cold"):
        yield Finding(text, lower(copied, mapped))


def mapping_wins_warm(tables: Tables) -> Iterator[Finding]:
    for text, mapped, copied in _against_copies(tables, "warm"):
        yield Finding(text, lower(mapped, copied))


def peaks_are_the_same(tables: Tables) -> Iterator[Finding]:
    """The rise of the peak over what the process held before, and of which kind the memory is."""
    table = tables.loading
    for subject in table.whole_subjects():
        methods = [method for method in table.whole(subject) if method in MAPPING + COPYING]
        rises = {
            method: table.any_state(subject, method, "peak_mib") - table.any_state(subject, method, "base_mib")
            for method in methods
        }
        if len(rises) > 1:
            least, most = min(rises, key=rises.__getitem__), max(rises, key=rises.__getitem__)
            text = (
                f"{subject}: the peak rises by {format_number(rises[least])} MiB (`{least}`) to "
                f"{format_number(rises[most])} MiB "
                f"(`{most}`)"
            )
            yield Finding(text, rises[most] <= SAME_PEAK * rises[least])
        yield from _kinds_of_memory(table, subject, methods)


def _kinds_of_memory(table: LoadingTable, subject: str, methods: list[str]) -> Iterator[Finding]:
    for kind, names in (("that map", MAPPING), ("that copy", COPYING)):
        shares = [
            MIB * table.any_state(subject, method, "anonymous_mib") / table.any_state(subject, method, "touched_bytes")
            for method in methods
            if method in names
        ]
        if shares:
            told = joined([f"`{method}`" for method in methods if method in names])
            text = (
                f"{subject}: of methods {kind} ({told}) anonymous memory is {format_number(min(shares))} to "
                f"{format_number(max(shares))} times the tensors' bytes"
            )
            yield Finding(text, max(shares) <= LITTLE if names is MAPPING else min(shares) >= MOST)


def one_tensor_alone(tables: Tables) -> Iterator[Finding]:
    """What methods that map fetch cold where they touch a part of the file."""
    table = tables.loading
    for subject in table.subjects:
        for method in table.in_part(subject):
            fetched = table.spread(subject, method, "cold", "bytes_from_disk")
            if fetched and method in _LAZY:
                wanted, file = (table.any_state(subject, method, name) for name in ("touched_bytes", "file_bytes"))
                text = (
                    f"{subject}: `{method}` wanted {mib(wanted)} of {mib(file)} and fetched {mib(fetched.middle)}, "
                    f"{format_ratio(fetched.middle, wanted)} as much"
                )
                yield Finding(text, fetched.high <= NEAR * wanted)


def workers_share(tables: Tables) -> Iterator[Finding]:
    """What further workers add to the sum of PSS, base taken off."""
    for (subject, method), lines in measured(tables.workers).groupby(["subject", "method"], sort=False):
        loaded = (lines["pss_mib"] - lines["base_pss_mib"]).groupby(lines["n_workers"]).median()
        most = int(loaded.index.max())
        if most == 1 or 1 not in loaded.index or method not in MAPPING + COPYING:
            continue
        each = (loaded[most] / loaded[1] - 1) / (most - 1)
        text = (
            f"{subject}: `{method}` takes {format_number(loaded[1])} MiB in one worker, "
            f"{format_number(loaded[most])} MiB in {most} "
            f"together: each further one adds {format_number(each)} of the first"
        )
        yield Finding(text, each < HALF_PRIVATE if method in MAPPING else each >= HALF_PRIVATE)


def pressure_drops_mapped_pages(tables: Tables) -> Iterator[Finding]:
    """Every byte touched twice, with less memory than the tensors take, and with enough."""
    for line in tables.pressure[tables.pressure["status"] != NOT_RUN].itertuples():
        tight = line.limit_mib - line.base_mib < line.file_bytes / MIB
        if line.status == "killed":
            # With room for the tensors a kill says nothing of them: the process took more than was reckoned.
            found, holds = "was killed: the limit left it no memory", line.method in COPYING if tight else None
        else:
            again = line.second_bytes_from_disk
            found = f"read {mib(line.first_bytes_from_disk)}, and {mib(again)} again for the second pass"
            swapped = f", {format_number(line.swap_mib)} MiB swapped out" if line.swap_mib > 0 else ""
            found, in_swap = found + swapped, line.swap_mib > 0
            holds = (again > 0 if line.method in MAPPING else in_swap) if tight else again == 0
        limit = "no limit" if pd.isna(line.limit_mib) else f"limit {line.limit_of}"
        text = f"{line.subject}, {limit}: `{line.method}` {found}"
        yield Finding(text, None if holds is None else bool(holds), control=not tight)


def accidents_are_warm(tables: Tables) -> Iterator[Finding]:
    """What a benchmark that dropped nothing would call cold. A step whose pages were dropped is the control."""
    for line in measured(tables.accident).itertuples():
        resident, read = format_number(100 * line.resident_before), mib(line.bytes_from_disk)
        text = (
            f"{line.what.rstrip('.')}: {format_number(line.total_s)} s, {format_number(line.of_cold_time)} of the "
            "cold time; "
            f"{resident} % in the page cache before, {read} of {mib(line.file_bytes)} read"
        )
        if line.step.startswith("dropped"):
            yield Finding(text, line.resident_before == 0 and line.bytes_from_disk > 0, control=True)
        else:
            yield Finding(text, line.resident_before == 1 and line.bytes_from_disk == 0)


def pickles_are_refused(tables: Tables) -> Iterator[Finding]:
    """Malicious pickles by each way of torch.load; the one that is told to trust them is the control."""
    lines = tables.refusals
    pickles = lines[(lines["kind"] == "pickle") & lines["reader"].astype(str).str.startswith("torch.load")]
    for reader, rows in pickles.groupby("reader", sort=False):
        n_refused, n_ran = (int(rows[name].map(_is_true).sum()) for name in ("refused", "side_effect"))
        control = not rows["expected_refused"].map(_is_true).any()
        text = f"`{reader}` refused {n_refused} of {len(rows)} malicious pickles, and {n_ran} wrote their file"
        holds = n_ran == len(rows) if control else n_refused == len(rows) and n_ran == 0
        yield Finding(text, holds, control)


def liars_are_refused(tables: Tables) -> Iterator[Finding]:
    """Shards whose header lies, by our reader, which must refuse all, and by safetensors', which
    knows no metadata and is only looked on."""
    lines = tables.refusals
    for reader, rows in lines[lines["kind"] == "header"].groupby("reader", sort=False):
        taken = list(rows.loc[~rows["refused"].map(_is_true), "what"])
        told = f"; it took: {'; '.join(taken)}" if taken else ""
        n_refused = len(rows) - len(taken)
        demanded = bool(rows["expected_refused"].map(_is_true).any())
        text = f"`{reader}` refused {n_refused} of {len(rows)} headers that lie{told}"
        yield Finding(text, not taken, only_looked_on=not demanded)


def _is_true(value: object) -> bool:
    """Of a cell of a column that has empty ones, which is no longer one of truth values."""
    return str(value) == "True"


def measured(table: pd.DataFrame) -> pd.DataFrame:
    """The lines that were measured."""
    return table[table["status"] == MEASURED]


def _cases(
    table: LoadingTable, methods: tuple[str, ...], states: tuple[str, ...] = _STATES
) -> Iterator[tuple[str, str, str]]:
    """Subject, state and method, where a method touches all of a whole subject."""
    for subject in table.whole_subjects():
        for method in methods:
            if method in table.whole(subject):
                for state in states:
                    yield subject, state, method


CLAIMS: dict[str, Callable[[Tables], Iterator[Finding]]] = {
    "Mapping a file returns at once: the cost is in touching it": maps_quickly,
    "Cold, mapping loses to big reads": mapping_loses_cold,
    "Warm, mapping is faster than copying": mapping_wins_warm,
    "The peak is the same for every full load; what differs is the kind of memory": peaks_are_the_same,
    "One tensor of a file brings in its own pages only": one_tensor_alone,
    "Workers that map share one copy, those that copy do not": workers_share,
    "Under memory pressure mapped pages are dropped and read again, copies are not": pressure_drops_mapped_pages,
    "A file just copied or just loaded is warm, and no benchmark of a cold one": accidents_are_warm,
    "weights_only refuses a malicious pickle, and its code does not run": pickles_are_refused,
    "A safetensors header that lies is refused": liars_are_refused,
    "mmap=True gives a .pt file the same lazy loading": torch_maps_too,
}
