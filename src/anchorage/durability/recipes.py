"""Ways of saving a state, as plug-ins: the textbook's, safe and unsafe, and this package's own writers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Case = Literal["overwrite", "new name"]
Verdict = Literal["old", "new", "torn", "gone"]


@dataclass(frozen=True)
class Recipe:
    """A way of saving.

    Attributes:
        name: as tables and command lines name it.
        case: every version under the same name, or each under a name of its own.
        save: makes a version, 0, 1, 2, ..., of the state in a folder. Once it has returned the version is acknowledged.
        load: what a reader finds there: the newest version that is whole, with all before it where each has its own
            name; None where there is nothing. Raises where something under its final name is no version.
        ours: one of this package's writers.
    """

    name: str
    case: Case
    save: Callable[[Path, int], None]
    load: Callable[[Path], int | None]
    ours: bool = False


def judge(recipe: Recipe, folder: Path, *, acknowledged: int | None, tried: int) -> Verdict:
    """Say what a crash has left.

    Args:
        acknowledged: newest version whose save had returned before the crash; None: none had.
        tried: newest version whose save had begun.

    Returns:
        ``torn``: something is no version that was ever saved. ``gone``: an acknowledged version is lost. ``new``: the
        newest is there. ``old``: the one before it.
    """
    try:
        found = recipe.load(folder)
    except Exception:  # a reader may stumble over torn bytes in any way
        return "torn"
    if (-1 if found is None else found) < (-1 if acknowledged is None else acknowledged):
        return "gone"
    return "new" if found == tried else "old"


RECIPES: dict[str, Recipe] = {}
