"""What is loaded: files that hold the same tensors in two formats, with the digest of every tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anchorage.digest import digest_row

if TYPE_CHECKING:
    from torch import Tensor

MEASURED, NOT_RUN = "measured", "not run"  # status of a line of the lab's tables


@dataclass(frozen=True)
class Subject:
    """Files of one set of tensors, and what is wanted of them. Plain facts: it travels to other processes as JSON.

    Attributes:
        name: ``weights`` (of the model), ``big`` (equal bfloat16 tensors), ``shard`` (of the cache).
        files: path by suffix, ``.pt`` and ``.safetensors``.
        file_bytes: size by suffix.
        digests: xxh3_64 of each tensor's bytes, 16 hexadecimal digits, by name, in the files' order.
        tensor_bytes: size of each tensor by name.
        wanted: names of the tensors that a user wants: all, or of a shard one site.
        model: folder with the model's ``config.json`` where the tensors are a whole model's, else None.
        cache: folder of the cache where the subject is a shard, else None; ``rows`` are then its global row numbers,
            first and one past the last, and ``tier`` its tier.
    """

    name: str
    files: Mapping[str, str]
    file_bytes: Mapping[str, int]
    digests: Mapping[str, str]
    tensor_bytes: Mapping[str, int]
    wanted: tuple[str, ...]
    model: str | None = None
    cache: str | None = None
    tier: str | None = None
    rows: tuple[int, int] | None = None

    @property
    def wants_all(self) -> bool:
        """Whether every tensor of the file is wanted."""
        return len(self.wanted) == len(self.digests)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Subject:
        rows = facts.get("rows")
        return cls(**{**facts, "wanted": tuple(facts["wanted"]), "rows": tuple(rows) if rows else None})


def read_subjects(path: Path) -> tuple[str, dict[str, Subject]]:
    """The capture key and the subjects of a ``subjects.json``, by name."""
    facts = json.loads(path.read_text())
    return facts["key"], {subject["name"]: Subject.from_json(subject) for subject in facts["subjects"]}


def digest_tensor(tensor: Tensor) -> str:
    """xxh3_64 of a tensor's bytes in order, 16 hexadecimal digits. NumPy has no bfloat16, so they are seen as bytes."""
    import torch

    return f"{digest_row(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()):016x}"
