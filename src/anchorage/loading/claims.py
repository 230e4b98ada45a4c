"""The claims of the lesson "What happens when you save a file?" on loading, and whether this machine's numbers bear
them out. A claim is judged case by case; where the ranges of two measurements touch, nothing is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pandas as pd

from anchorage.loading.methods import METHODS
from anchorage.loading.summary import LoadingTable, lower, mib, number, times

QUICK_SHARE = 0.1  # a load that takes so little of the copying one's has read nothing
SAME_PEAK = 1.25  # largest over smallest; above it nobody would call them the same
MOST, LITTLE = 0.9, 0.1  # of the tensors' bytes: held, not held
NEAR = 1.05  # bytes fetched over bytes wanted, to count as only these
HALF_PRIVATE = 0.5  # what a further worker adds, of what the first one took: 0 shared, 1 private
_MAPPING = ("torch.load-mmap", "load_file", "safe_open", "mmap-willneed", "mmap-sequential", "mmap-random")
_COPYING = ("torch.load", "load_file-pread", "readinto", "preadv-threads")
_CONSTANT = ("cold", "warm")


@dataclass(frozen=True)
class Finding:
    """One case of a claim.

    Attributes:
        text: the figures.
        holds: whether they bear it out; None where they do not say.
    """

    text: str
    holds: bool | None


@dataclass(frozen=True)
class Tables:
    """All tables of the lab."""

    loading: LoadingTable
    workers: pd.DataFrame
    pressure: pd.DataFrame
    device_copy: pd.DataFrame
    accident: pd.DataFrame
    refusals: pd.DataFrame


def verdict(findings: list[Finding]) -> str:
    """Of a claim: holds, does not hold, holds in part, not shown (no case says), not run (no case)."""
    outcomes = {finding.holds for finding in findings}
    if not outcomes:
        return "not run"
    if outcomes == {None}:
        return "not shown"
    if outcomes == {True}:
        return "holds"
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
    return _quick_load(tables, tuple(name for name in _MAPPING if name != "torch.load-mmap"))


def torch_maps_too(tables: Tables) -> Iterator[Finding]:
    table, method = tables.loading, "torch.load-mmap"
    yield from _quick_load(tables, (method,))
    for subject, state, _ in _cases(table, (method,)):
        held = table.spread(subject, method, state, "anonymous_mib")
        touched = table.any_state(subject, method, "touched_bytes")
        if held:
            text = f"{subject}, {state}: `{method}` holds {held} MiB of anonymous memory for {mib(touched)} of tensors"
            yield Finding(text, held.middle <= LITTLE * touched / 2**20)


def _faster(tables: Tables, state: str, first: tuple[str, ...], second: tuple[str, ...]) -> Iterator[Finding]:
    """Each mapping method against each copying one on whole files: does the first kind take less time?"""
    table = tables.loading
    for subject, _, mapping in _cases(table, _MAPPING, (state,)):
        for copying in _COPYING:
            mapped, copied = (table.spread(subject, name, state) for name in (mapping, copying))
            if not mapped or not copied:
                continue
            holds = lower(mapped, copied) if first is _MAPPING else lower(copied, mapped)
            relation = "" if holds is not None else ": no difference was shown"
            text = f"{subject}: `{mapping}` {mapped} s, `{copying}` {copied} s{relation}"
            yield Finding(text, holds)


def mapping_loses_cold(tables: Tables) -> Iterator[Finding]:
    return _faster(tables, "cold", _COPYING, _MAPPING)


def mapping_wins_warm(tables: Tables) -> Iterator[Finding]:
    return _faster(tables, "warm", _MAPPING, _COPYING)


def peaks_are_the_same(tables: Tables) -> Iterator[Finding]:
    """The rise of the peak over what the process held before, and of which kind the memory is."""
    table = tables.loading
    for subject in table.whole_subjects():
        methods = [method for method in table.whole(subject) if method in _MAPPING + _COPYING]
        rises = {
            method: table.any_state(subject, method, "peak_mib") - table.any_state(subject, method, "base_mib")
            for method in methods
        }
        if len(rises) > 1:
            least, most = min(rises, key=rises.__getitem__), max(rises, key=rises.__getitem__)
            text = (
                f"{subject}: the peak rises by {number(rises[least])} MiB (`{least}`) to {number(rises[most])} MiB "
                f"(`{most}`)"
            )
            yield Finding(text, rises[most] <= SAME_PEAK * rises[least])
        for method in methods:
            held = table.any_state(subject, method, "anonymous_mib")
            share = held * 2**20 / table.any_state(subject, method, "touched_bytes")
            text = f"{subject}: `{method}` holds {number(held)} MiB anonymous, {number(share)} of the tensors' bytes"
            yield Finding(text, share <= LITTLE if method in _MAPPING else share >= MOST)


def one_tensor_alone(tables: Tables) -> Iterator[Finding]:
    """What lazy methods fetch cold where they touch a part of the file."""
    table = tables.loading
    for subject in table.subjects:
        for method in table.in_part(subject):
            fetched = table.spread(subject, method, "cold", "bytes_from_disk")
            if fetched and method in METHODS and METHODS[method].lazy:
                wanted, file = (table.any_state(subject, method, name) for name in ("touched_bytes", "file_bytes"))
                text = (
                    f"{subject}: `{method}` wanted {mib(wanted)} of {mib(file)} and fetched {mib(fetched.middle)}, "
                    f"{times(fetched.middle, wanted)} as much"
                )
                yield Finding(text, fetched.high <= NEAR * wanted)


def workers_share(tables: Tables) -> Iterator[Finding]:
    """What further workers add to the sum of PSS, base taken off."""
    for (subject, method), lines in measured(tables.workers).groupby(["subject", "method"], sort=False):
        loaded = (lines["pss_mib"] - lines["base_pss_mib"]).groupby(lines["n_workers"]).median()
        most = int(loaded.index.max())
        if most == 1 or 1 not in loaded.index or method not in _MAPPING + _COPYING:
            continue
        each = (loaded[most] / loaded[1] - 1) / (most - 1)
        text = (
            f"{subject}: `{method}` takes {number(loaded[1])} MiB in one worker, {number(loaded[most])} MiB in {most} "
            f"together: each further one adds {number(each)} of the first"
        )
        yield Finding(text, each < HALF_PRIVATE if method in _MAPPING else each >= HALF_PRIVATE)


def measured(table: pd.DataFrame) -> pd.DataFrame:
    """The lines that were measured."""
    return table[table["status"] == "measured"]


def _cases(
    table: LoadingTable, methods: tuple[str, ...], states: tuple[str, ...] = _CONSTANT
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
}
