"""How PyTorch itself saves, as recipes: ``torch.save`` to the final name; distributed checkpoint (DCP) of one process.

``torch.save`` writes in place and forces nothing. DCP, in torch 2.13, writes its data file in place, under the same
name each time, and forces it; then it removes the old ``.metadata`` and renames the new one, and forces no folder. So
both may lose or tear what they had saved. Importing this module imports no torch; a recipe does when it is used.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from anchorage.durability.recipes import Recipe, check_named
from anchorage.errors import IntegrityError

_N_WEIGHTS = 64 * 1024 + 100  # bytes


def _weights(version: int) -> bytes:
    return random.Random(version).randbytes(_N_WEIGHTS)


def _state(version: int) -> dict[str, Any]:
    import torch

    return {
        "weights": torch.frombuffer(bytearray(_weights(version)), dtype=torch.uint8),
        "version": torch.tensor(version),
    }


def _check(path: Path, state: dict[str, Any]) -> int:
    version = int(state["version"])
    if state["weights"].numpy().tobytes() != _weights(version):
        remedy = "The recipe that saved it is not safe."
        raise IntegrityError(path, expected=f"the weights of version {version}", found="others", remedy=remedy)
    return version


def _save_torch(path: Path, version: int) -> None:
    import torch

    torch.save(_state(version), path)


def _load_torch(path: Path) -> int:
    import torch

    return _check(path, torch.load(path, weights_only=True))


def _save_dcp(path: Path, version: int) -> None:
    from torch.distributed import checkpoint

    with _one_process():
        checkpoint.save(_state(version), checkpoint_id=path, no_dist=True)


def _load_dcp(path: Path) -> int | None:
    from torch.distributed import checkpoint

    if not (path / ".metadata").exists():  # it is the commit record
        return None
    state = _state(0)
    with _one_process():
        checkpoint.load(state, checkpoint_id=path, no_dist=True)
    return _check(path, state)


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """Without the warning that there is only one; DCP's error, no Exception of Python's, becomes one."""
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            raise OSError(f"DCP: {type(cause).__name__}: {cause}") from error


def _both_cases(
    name: str, save: Callable[[Path, int], None], load: Callable[[Path], int | None], modules: tuple[str, ...]
) -> list[Recipe]:
    def overwrite(folder: Path, version: int) -> None:
        save(folder / "state", version)

    def make(folder: Path, version: int) -> None:
        save(folder / f"state-{version:06d}", version)

    def load_overwritten(folder: Path) -> int | None:
        return load(folder / "state") if (folder / "state").exists() else None

    def load_named(folder: Path) -> int | None:
        return check_named(folder, load)

    return [
        Recipe(name, "overwrite", overwrite, load_overwritten, modules=modules),
        Recipe(name, "new name", make, load_named, modules=modules),
    ]


TORCH: dict[str, Recipe] = {
    recipe.key: recipe
    for recipe in [
        *_both_cases("torch.save", _save_torch, _load_torch, ("torch",)),
        *_both_cases("dcp", _save_dcp, _load_dcp, ("torch.distributed.checkpoint",)),
    ]
}
