"""A process that saves, and says before and after: ``python -m anchorage.durability.saver [RECIPE FOLDER VERSION]...``

RECIPE is a recipe's key, such as ``full/new name``. Before each save it prints ``saving RECIPE VERSION``, and after it
``saved RECIPE VERSION``: the acknowledgement. Each line is one write to the standard output, so that a trace of system
calls shows where a save begins and ends.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from anchorage.durability.ourrecipes import ALL_RECIPES
from anchorage.durability.recipes import Recipe


def save_aloud(recipe: Recipe, folder: Path, version: int) -> None:
    """Save, with a line before and after."""
    _say(f"saving {recipe.key} {version}")
    recipe.write(folder, version)
    _say(f"saved {recipe.key} {version}")


def _say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def main(words: list[str]) -> None:
    """Make the saves that the command line asks for, in order."""
    for key, folder, version in zip(words[::3], words[1::3], words[2::3], strict=True):
        save_aloud(ALL_RECIPES[key], Path(folder), int(version))


if __name__ == "__main__":
    main(sys.argv[1:])
