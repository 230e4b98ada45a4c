"""Ways of loading tensors from a file, a function each. To add one, write it and add a line to METHODS.

Libraries are imported by the functions: the workflow reads this table before anything runs, and must start fast.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anchorage.errors import SettingsError, did_you_mean
from anchorage.loading.subject import Subject
from anchorage.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Method:
    """A way of loading.

    Attributes:
        load: from a path, a subject and the wanted names to tensors by name, with at least the wanted ones. They are
            used while the returned mapping lives, and hold what they need open.
        suffix: of the file it reads.
        lazy: only what is touched is read from the disk; else the whole file is.
        first_only: it is shown with the first wanted tensor only.
        needs: packages that it imports, beyond those of the workflow; where one is missing it is "not run".
    """

    load: Callable[[str, Subject, Sequence[str]], Mapping[str, Tensor]]
    suffix: str = ".safetensors"
    lazy: bool = False
    first_only: bool = False
    needs: tuple[str, ...] = ()

    def wanted(self, subject: Subject) -> tuple[str, ...]:
        """Names of the tensors that are touched."""
        return subject.wanted[:1] if self.first_only else subject.wanted

    def reads_all(self, subject: Subject) -> bool:
        """Whether a cold measurement reads the whole file."""
        return not self.lazy or (subject.wants_all and not self.first_only)


def load_torch(path: str, subject: Subject, names: Sequence[str]) -> Mapping[str, Tensor]:
    """Unpickle the structure, copy every tensor's bytes."""
    import torch

    return torch.load(path, weights_only=True)


def map_torch(path: str, subject: Subject, names: Sequence[str]) -> Mapping[str, Tensor]:
    """Unpickle the structure, map every tensor's bytes."""
    import torch

    return torch.load(path, weights_only=True, mmap=True)


def load_file(path: str, subject: Subject, names: Sequence[str]) -> Mapping[str, Tensor]:
    """safetensors' own: maps the file."""
    from safetensors.torch import load_file

    return load_file(path)


def open_one(path: str, subject: Subject, names: Sequence[str]) -> Mapping[str, Tensor]:
    """safe_open, and the wanted tensors only."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in names}


METHODS: dict[str, Method] = {
    "torch.load": Method(load_torch, ".pt"),
    "torch.load-mmap": Method(map_torch, ".pt", lazy=True),
    "load_file": Method(load_file, lazy=True),
    "one-tensor": Method(open_one, lazy=True, first_only=True),
    "ours": Method(open_one, lazy=True),
}


def check_methods(settings: Settings) -> None:
    """Refuse a method that is not in the table; SettingsError names near ones."""
    for name in settings.loading.methods if settings.loading else []:
        if name not in METHODS:
            known = f"there are {', '.join(METHODS)}"
            raise SettingsError(f"loading.methods: there is no method {name!r}{did_you_mean(name, METHODS)} ({known})")


def draw_order(settings: Settings, subjects: Sequence[str]) -> dict[tuple[str, str], int]:
    """Priorities of the jobs, highest first, in an order drawn with the seed: by subject and method."""
    methods = settings.loading.methods if settings.loading else []
    pairs = [(subject, method) for subject in subjects for method in methods]
    ranks = random.Random(settings.seed).sample(range(1, len(pairs) + 1), len(pairs))
    return dict(zip(pairs, ranks, strict=True))
