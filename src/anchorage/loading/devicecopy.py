"""Copies to a GPU, with and without a copy on the CPU first.

On a GPU of its own memory ``.to(device)`` copies whatever was loaded; a mapped file saves the copy before that one. The
file is warm: the disk is measured elsewhere. This module has not run on a GPU; its control flow has, with the CPU in
the GPU's place.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import pandas as pd

from anchorage.loading.fresh import FreshProcesses
from anchorage.loading.methods import IMPORTS, METHODS
from anchorage.loading.pagecache import make_warm
from anchorage.loading.subject import MEASURED, NOT_RUN, Subject
from anchorage.loading.trial import check_tensors
from anchorage.memory import measure_memory

if TYPE_CHECKING:
    from torch import Tensor

# A line is a way and a repeat; where there is no GPU, a way.
COLUMNS = {
    "key": "key of the capture whose model is loaded",
    "subject": "what is loaded: weights",
    "way": "how the tensors come to the device",
    "device": "torch's name of it",
    "repeat": "number within the way, from 0",
    "position": "number in the order in which the job measured, drawn with the seed",
    "status": "measured, not run",
    "reason": "why not run",
    "load_s": "until the tensors are on the CPU, mapped ones untouched; 0 where they come to the device at once",
    "copy_s": "from there until they are on the device, and it is idle; a copy on the CPU before that is in it",
    "total_s": "sum of the two",
    "gb_s": "tensor_bytes / 1e9 / total_s",
    "tensor_bytes": "size of the tensors",
    "device_peak_mib": "rise of the device's allocated memory to its peak",
    "base_mib": "resident memory of the process before loading, with the device in use already",
    "peak_mib": "its highest resident memory (VmHWM) until the tensors are on the device",
}
# Empty in lines that are not run, which would make them fractions.
_WHOLE = ["repeat", "position", "tensor_bytes"]


@dataclass(frozen=True)
class Way:
    """How tensors come from a file to a device.

    Attributes:
        suffix: of the file.
        load: from a subject and a device's name to tensors.
        move: from those and the device's name to tensors on the device; None where they are there already.
    """

    suffix: str
    load: Callable[[Subject, str], Mapping[str, Tensor]]
    move: Callable[[Tensor, str], Tensor] | None


def _load_by(method: str) -> Callable[[Subject, str], Mapping[str, Tensor]]:
    def load(subject: Subject, device: str) -> Mapping[str, Tensor]:
        path = subject.files[METHODS[method].suffix]
        return METHODS[method].load(path, subject, tuple(subject.digests))

    return load


def _load_there(subject: Subject, device: str) -> Mapping[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(subject.files[".safetensors"], device=device)


def _move(tensor: Tensor, device: str) -> Tensor:
    return tensor.to(device)


def _clone_and_move(tensor: Tensor, device: str) -> Tensor:
    return tensor.clone().to(device)


def _pin_and_move(tensor: Tensor, device: str) -> Tensor:
    # The copy runs while the next tensor is pinned; torch keeps pinned memory until the copy from it has ended.
    return tensor.pin_memory().to(device, non_blocking=True)


WAYS = {
    "torch.load, to": Way(".pt", _load_by("torch.load"), _move),
    "load_file, to": Way(".safetensors", _load_by("load_file"), _move),
    "load_file, clone, to": Way(".safetensors", _load_by("load_file"), _clone_and_move),
    "load_file, pin, to": Way(".safetensors", _load_by("load_file"), _pin_and_move),
    "load_file(device)": Way(".safetensors", _load_there, None),
}


def measure_device_copies(
    key: str, subject: Subject, *, repeats: int, seed: int, log: Callable[[str], None]
) -> pd.DataFrame:
    """Run each of the WAYS as often as wanted, in an order drawn with the seed.

    Args:
        key: of the capture.
        subject: what is loaded.
        repeats: measurements of each way.
        seed: of the order.
        log: is told each row.

    Returns:
        The columns of :data:`COLUMNS`, by way and repeat; where there is no CUDA device a line a way, not run.

    Raises:
        MeasurementError: a way failed, or what came to the device is not what the file holds.
    """
    shared = {"key": key, "subject": subject.name}
    if (device := find_device()) is None:
        log("not run: no CUDA device")
        return _table([shared | {"way": way, "status": NOT_RUN, "reason": "no CUDA device"} for way in WAYS])
    cases = [(way, repeat) for way in WAYS for repeat in range(repeats)]
    rows = {}
    with FreshProcesses(*IMPORTS, "anchorage.loading.trial", __name__) as processes:
        for position, (way, repeat) in enumerate(random.Random(seed).sample(cases, len(cases))):
            make_warm(subject.files[WAYS[way].suffix])
            found = processes.call(copy_to_device, subject=subject.to_json(), way=way, device=device)
            place = {"way": way, "device": device, "repeat": repeat, "position": position, "status": MEASURED}
            rows[way, repeat] = shared | place | found
            log(f"{way}, {repeat}: {found['total_s']} s")
    return _table([rows[case] for case in cases])


def find_device() -> str | None:
    """The GPU to copy to, or None. Not to be called in a server of fresh processes: what has looked forks no users."""
    import torch

    return "cuda:0" if torch.cuda.is_available() else None


def copy_to_device(*, subject: dict[str, Any], way: str, device: str) -> dict[str, Any]:
    """In a fresh process: load, copy, and compare every tensor on the device with the file's.

    Args:
        subject: as JSON.
        way: a name of WAYS.
        device: torch's name of it.

    Returns:
        The measured columns.

    Raises:
        MeasurementError: a tensor is not what the file holds.
    """
    import torch

    facts, chosen = Subject.from_json(subject), WAYS[way]
    torch.zeros(1, device=device)  # start the device: its libraries take seconds and memory, once
    before = measure_memory(device)
    start = perf_counter()
    loaded = chosen.load(facts, device)
    middle = perf_counter()
    moved = {name: chosen.move(tensor, device) for name, tensor in loaded.items()} if chosen.move else loaded
    _synchronise(device)
    end = perf_counter()
    after = measure_memory(device)
    check_tensors(facts.files[chosen.suffix], facts, {name: moved[name].cpu() for name in facts.digests})
    n_bytes = sum(facts.tensor_bytes.values())
    # What is loaded there has no time of its own on the CPU.
    load_s = middle - start if chosen.move else 0.0
    return {
        "load_s": round(load_s, 6),
        "copy_s": round(end - start - load_s, 6),
        "total_s": round(end - start, 6),
        "gb_s": round(n_bytes / 1e9 / (end - start), 3),
        "tensor_bytes": n_bytes,
        "device_peak_mib": _rise(before["cuda_allocated_mib"], after["cuda_peak_mib"]),
        "base_mib": before["rss_mib"],
        "peak_mib": after["peak_mib"],
    }


def _table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype(dict.fromkeys(_WHOLE, "Int64"))


def _synchronise(device: str) -> None:
    """Wait until a GPU has done what it was given."""
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def _rise(before: float | None, peak: float | None) -> float | None:
    return None if before is None or peak is None else round(peak - before, 2)
