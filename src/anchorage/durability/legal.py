"""Every state that POSIX lets a power cut leave of a save, by enumeration: no disk is cut, no rights are needed.

The model is that of ALICE (Pillai et al., "All File Systems Are Not Created Equal: On the Complexity of Crafting
Crash-Consistent Applications", OSDI'14), and as in it the weakest filesystem is assumed:

- Until an fsync of the file each write, and each change of its size, reaches the disk or not, one without the other and
  in any order. Space that a size covers and no write has reached reads as zeros. A write is cut in two at most.
- Until an fsync of the folder each of its entries made, replaced or removed reaches the disk or not. What is done to
  one name is done in order; a rename is one step. An fsync of a file says nothing of its name.
- An fsync that returned has brought all that was done before to the disk. (After one that *failed* nothing may be
  assumed: Rebello et al., "Can Applications Recover from fsync Failures?", ATC'20; the table of faults is about that.)

The steps of a save are those that its code takes (`durability.operations`), the states are made as files, and the
recipe's own reader judges them. A filesystem may promise more; one that keeps POSIX promises no less.
"""

from __future__ import annotations

import itertools
import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pandas as pd

from anchorage.durability.operations import Operation, watched
from anchorage.durability.recipes import Recipe, Verdict, judge
from anchorage.errors import MeasurementError

VERDICTS: list[Verdict] = ["old", "new", "torn", "gone"]
MOMENTS = ["before", "after"]
MAX_STATES = 100_000  # of one crash: beyond it a save has too many steps without an fsync
_N_VERSIONS = 2

COLUMNS = {
    "recipe": "name of the recipe",
    "case": "overwrite: every version under the same name; new name: each under its own",
    "ours": "one of this package's writers",
    "moment": "before: the save had not returned when the power went; after: it had, its version was acknowledged",
    "n_operations": "steps of the saves of version 0 into an empty folder and of version 1 after it",
    "n_states": "different legal states, of a crash after any step; each version starts from all before it on the disk",
    "old": "states in which the reader finds the version before; none, where there was none",
    "new": "states in which it finds the version being saved",
    "torn": "states in which something under its final name is no version ever saved",
    "gone": "states in which a version acknowledged before is lost",
}
# A state: bytes by name; a folder has None and a slash at the end.
State = frozenset[tuple[str, bytes | None]]
_NAMING = {"create", "rename", "link", "unlink", "mkdir"}


def legal_states(
    start: Mapping[str, bytes], operations: Sequence[Operation], *, folders: Iterable[str] = ()
) -> set[State]:
    """The states that a crash may leave after these steps were taken, however many of them reached the disk.

    Args:
        start: bytes on the disk by name, before the first step; file numbers count through its names in order.
        operations: the steps.
        folders: folders on the disk.

    Raises:
        MeasurementError: there are more than :data:`MAX_STATES`.
    """
    numbers = {name: number for number, name in enumerate(start)}
    contents = {
        file: _file_states(base, [step for step in operations if step.file == file])
        for file, base in _bases(start, operations).items()
    }
    states: set[State] = set()
    for names, made in _name_states(numbers, set(folders), operations):
        files = sorted(set(names.values()))
        if math.prod(len(contents[file]) for file in files) + len(states) > MAX_STATES:
            raise MeasurementError(f"a crash after {len(operations)} steps has over {MAX_STATES} legal states")
        for choice in itertools.product(*(contents[file] for file in files)):
            found = dict(zip(files, choice, strict=True))
            states.add(
                frozenset({(name, found[file]) for name, file in names.items()} | {(f"{f}/", None) for f in made})
            )
    return states


def _bases(start: Mapping[str, bytes], operations: Sequence[Operation]) -> dict[int, bytes]:
    return dict(enumerate(start.values())) | {step.file: b"" for step in operations if step.kind == "create"}


def _name_states(
    names: Mapping[str, int], folders: set[str], operations: Sequence[Operation]
) -> Iterator[tuple[dict[str, int], set[str]]]:
    """What the folders may hold: file numbers by name, and folders."""
    steps = [(place, step) for place, step in enumerate(operations) if step.kind in _NAMING]
    loose = [place for place, step in steps if not _is_entry_synced(step, operations[place + 1 :])]
    if 2 ** len(loose) > MAX_STATES:
        raise MeasurementError(f"{len(loose)} entries were changed without an fsync of their folder: too many to try")
    for lost in itertools.chain.from_iterable(itertools.combinations(loose, n) for n in range(len(loose) + 1)):
        found, made = dict(names), set(folders)
        for place, step in steps:
            if place not in lost:
                _apply(step, found, made)
        reached = {name for name in made if all(parent in made for parent in _parents(name))}
        yield {name: file for name, file in found.items() if all(p in reached for p in _parents(name))}, reached


def _apply(step: Operation, names: dict[str, int], folders: set[str]) -> None:
    if step.kind == "mkdir":
        folders.add(step.name)
        return
    if step.kind in {"rename", "unlink"}:
        names.pop(step.name, None)
    if step.kind != "unlink":
        names[step.target or step.name] = step.file


def _is_entry_synced(step: Operation, later: Sequence[Operation]) -> bool:
    folder = Path(step.target or step.name).parent.as_posix()
    return any(other.kind == "fsync folder" and other.name == folder for other in later)


def _parents(name: str) -> list[str]:
    return [parent.as_posix() for parent in Path(name).parents if parent != Path(".")]


def _file_states(base: bytes, steps: Sequence[Operation]) -> list[bytes]:
    """What a file may hold after these steps."""
    synced = max((place for place, step in enumerate(steps) if step.kind == "fsync"), default=-1)
    for step in steps[: synced + 1]:
        base = base[: step.size] if step.kind == "truncate" else base + step.data
    # (size it sets, whether by a cut, bytes it writes there)
    changes: list[tuple[int, bool, bytes]] = []
    size = len(base)
    for step in steps[synced + 1 :]:
        if step.kind == "truncate":
            size = step.size
            changes.append((size, True, b""))
        for part in (step.data[: len(step.data) // 2], step.data[len(step.data) // 2 :]):
            if part:
                size += len(part)
                changes.append((size, False, part))
    states = set()
    for last in range(len(changes) + 1):  # the last change of size that reached the disk
        for reached in itertools.product((False, True), repeat=sum(not cut for _, cut, _ in changes)):
            states.add(_assemble(base, changes, last, iter(reached)))
    return sorted(states)


def _assemble(base: bytes, changes: list[tuple[int, bool, bytes]], last: int, reached: Iterator[bool]) -> bytes:
    size = changes[last - 1][0] if last else len(base)
    kept = min([len(base), *(cut_size for cut_size, is_cut, _ in changes[:last] if is_cut)])
    data = bytearray(base[:kept].ljust(size, b"\0"))
    for end, is_cut, part in changes:
        if not is_cut and next(reached):
            start = end - len(part)
            data[start:end] = part
    return bytes(data[:size].ljust(size, b"\0"))


def tabulate_legal_states(recipes: Iterable[Recipe], scratch: Path) -> pd.DataFrame:
    """Enumerate and judge the legal states of every recipe: ``legal_states.csv``, see :data:`COLUMNS`.

    Args:
        recipes: whose saves are watched.
        scratch: a folder for their files; everything made there is removed.
    """
    rows = [row for recipe in recipes for row in examine_recipe(recipe, scratch)]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def examine_recipe(recipe: Recipe, scratch: Path) -> list[dict[str, object]]:
    """The rows of one recipe: a state is judged with what was acknowledged when it arose."""
    n_operations, verdicts = 0, {moment: Counter[str]() for moment in MOMENTS}
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        home, trial = Path(folder) / "home", Path(folder) / "trial"
        home.mkdir()
        for version in range(_N_VERSIONS):
            with watched(home) as watch:
                start, folders = watch.contents(), set(watch.folders)
                recipe.write(home, version)
            n_operations += len(watch.operations)
            crashes = range(len(watch.operations) + 1)
            before = {s for n in crashes for s in legal_states(start, watch.operations[:n], folders=folders)}
            after = legal_states(start, watch.operations, folders=folders)
            for moment, states, acknowledged in (("before", before, version - 1), ("after", after, version)):
                for state in states:
                    known = acknowledged if acknowledged >= 0 else None
                    verdicts[moment][_judge_state(recipe, state, trial, known, version)] += 1
    return [
        {
            "recipe": recipe.name,
            "case": recipe.case,
            "ours": recipe.ours,
            "moment": moment,
            "n_operations": n_operations,
            "n_states": verdicts[moment].total(),
            **{verdict: verdicts[moment][verdict] for verdict in VERDICTS},
        }
        for moment in MOMENTS
    ]


def _judge_state(recipe: Recipe, state: State, folder: Path, acknowledged: int | None, tried: int) -> Verdict:
    folder.mkdir()
    for name, data in sorted(state, key=lambda entry: entry[0]):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if data is None:
            path.mkdir(exist_ok=True)
        else:
            path.write_bytes(data)
    verdict = judge(recipe, folder, acknowledged=acknowledged, tried=tried)
    shutil.rmtree(folder)
    return verdict
