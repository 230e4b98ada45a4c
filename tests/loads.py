"""Subjects of the loading lab to test with, and loading in a fresh process that counts what the disk gave."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from anchorage.loading.methods import METHODS
from anchorage.loading.subject import Subject, read_subjects
from anchorage.settings import LoadingSettings, Settings
from anchorage.tensorfile import TensorSpec, encode_header


def build_subjects(root: Path, *, big_mib: int = 1, **changes: Any) -> tuple[Settings, dict[str, Subject]]:
    """Capture a tiny model with tied embeddings, and write what is loaded of it; changes are build_plan's."""
    from anchorage.loading.subjects import write_subjects
    from plans import build_plan, capture  # fresh processes import this module, and need none of it

    plan = build_plan(root, weights={"tie_word_embeddings": True}, **changes)
    settings = plan.settings.model_copy(update={"loading": LoadingSettings(big_mib=big_mib)})
    capture(plan, root / "cache").close()
    write_subjects(settings, plan.facts, root / "cache", root / "loading", lambda line: None)
    return settings, read_subjects(root / "loading/subjects.json")[1]


def write_pair(folder: Path, n_tensors: int, tensor_bytes: int, *, wanted: Sequence[str]) -> Subject:
    """Equal tensors in both formats, written without the code that is tested."""
    specs = [TensorSpec(f"t{i}", "U8", (tensor_bytes,)) for i in range(n_tensors)]
    data = np.random.default_rng(3).integers(0, 256, (n_tensors, tensor_bytes), np.uint8)
    files = {".safetensors": folder / "pair.safetensors", ".pt": folder / "pair.pt"}
    files[".safetensors"].write_bytes(encode_header(specs, {})[0] + data.tobytes())
    torch.save({spec.name: torch.from_numpy(row.copy()) for spec, row in zip(specs, data, strict=True)}, files[".pt"])
    return Subject(
        name="pair",
        files={suffix: str(path) for suffix, path in files.items()},
        file_bytes={suffix: path.stat().st_size for suffix, path in files.items()},
        digests={spec.name: xxhash.xxh3_64_hexdigest(row.tobytes()) for spec, row in zip(specs, data, strict=True)},
        tensor_bytes={spec.name: tensor_bytes for spec in specs},
        wanted=tuple(wanted),
    )


def evict(path: Path | str) -> None:
    """Drop a file's pages from the page cache; nothing may have them mapped."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def digest_of(tensor: torch.Tensor) -> str:
    """xxh3_64 of a tensor's bytes: it touches them all."""
    return xxhash.xxh3_64_hexdigest(tensor.reshape(-1).view(torch.uint8).numpy())


def count_bytes(method: str, path: str, subject: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Load by a method and touch the named tensors. Returns their digests and the bytes that the disk gave for it."""
    before = read_bytes()
    tensors = METHODS[method].load(path, Subject.from_json(subject), names)
    digests = {name: digest_of(tensors[name]) for name in names}
    return {"digests": digests, "bytes": read_bytes() - before}


def read_bytes() -> int:
    """Bytes that this process has made the kernel read from the disk."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))
