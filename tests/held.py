"""Small subjects of the loading lab, and what tests run in its fresh processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import torch
import xxhash
from safetensors.torch import save_file

from anchorage.loading import workers
from anchorage.loading.methods import METHODS, Method
from anchorage.loading.subject import Subject

TESTS = Path(__file__).parent


def build_subject(folder: Path, mib: int = 1, n_tensors: int = 4) -> Subject:
    """Equal bfloat16 tensors of so many MiB together, as .pt and .safetensors, forced to the disk."""
    draw = torch.Generator().manual_seed(0)
    words = mib * 2**20 // 8 // n_tensors
    tensors = {
        f"w{i}": torch.randint(-(2**62), 2**62, (words,), generator=draw).view(torch.bfloat16) for i in range(n_tensors)
    }
    files = {suffix: str(folder / f"subject{suffix}") for suffix in (".pt", ".safetensors")}
    torch.save(tensors, files[".pt"])
    save_file(tensors, files[".safetensors"])
    for path in files.values():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    return Subject(
        name="big",
        files=files,
        file_bytes={suffix: os.path.getsize(path) for suffix, path in files.items()},
        digests={name: xxhash.xxh3_64_hexdigest(t.view(torch.uint8).numpy()) for name, t in tensors.items()},
        tensor_bytes={name: tensor.nbytes for name, tensor in tensors.items()},
        wanted=tuple(tensors),
    )


def hold_and_look(**arguments: Any) -> dict[str, Any]:
    """hold_together; ``seen`` tells of each worker what psutil and its mappings, summed one by one, say, in bytes."""
    seen, measured = [], workers.kernel_fields

    def look(rollup: Path) -> dict[str, int]:
        lines = (rollup.parent / "smaps").read_text().splitlines()
        by_hand = sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
        info = psutil.Process(int(rollup.parent.name)).memory_full_info()
        seen.append({"by_hand": by_hand, "pss": info.pss, "rss": info.rss})
        return measured(rollup)

    workers.kernel_fields = look
    return workers.hold_together(**arguments) | {"seen": seen}


def hold_with_a_killed_worker(**arguments: Any) -> dict[str, Any]:
    """hold_together, of which the last worker is ended while it loads; ``left`` counts processes that it left."""
    started = []

    def load(path: str, subject: Subject, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        if len(started) == arguments["n_workers"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return METHODS["torch.load"].load(path, subject, names)

    start, METHODS["dies"] = workers._start_worker, Method(load, ".pt")

    def count(subject: Subject, method: str | None) -> Any:
        started.append(method)
        return start(subject, method)

    workers._start_worker = count
    found = workers.hold_together(**arguments | {"method": "dies"})
    return found | {"left": len(psutil.Process().children())}
