"""One measurement, in the fresh process that it is made in, and the proof that its state was what it claims."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from mmap import PAGESIZE
from typing import TYPE_CHECKING, Any

from anchorage.digest import digest_row
from anchorage.diskio import bytes_from_disk
from anchorage.errors import IntegrityError, MeasurementError
from anchorage.loading.methods import METHODS, Method
from anchorage.loading.pagecache import residency
from anchorage.loading.subject import Subject
from anchorage.memory import measure_memory

if TYPE_CHECKING:
    from torch import Tensor

AS_FOUND, COLD, WARM = "as-found", "cold", "warm"
_DISK_TOLERANCE = 0.02
_REMEDIES = {
    COLD: "Let nothing else read, write or map the file meanwhile; a filesystem with a cache of its own is never cold",
    WARM: "Give the machine more free memory than the file has bytes, and let nothing else run beside",
}


def measure(subject: dict[str, Any], method: str, state: str) -> dict[str, Any]:
    """Load, use and touch a subject's tensors by one method. The asking process has set the state.

    Args:
        subject: ``Subject.to_json()``.
        method: its name in ``METHODS``.
        state: what to prove: ``as-found``, ``cold`` or ``warm``.

    Returns:
        The measured columns of ``measuring.COLUMNS``.

    Raises:
        MeasurementError: the state was not what it claims; nothing is reported then.
        IntegrityError: a tensor's bytes are not those that were written.
    """
    facts, chosen = Subject.from_json(subject), METHODS[method]
    path, wanted = facts.files[chosen.suffix], chosen.wanted(facts)
    resident, memory = residency(path), measure_memory("cpu")
    faults, disk = _faults(), bytes_from_disk()
    started = time.perf_counter()
    tensors = chosen.load(path, facts, wanted)
    loaded = time.perf_counter()
    forward_s = _first_forward(facts, chosen, tensors)
    touching = time.perf_counter()
    check_tensors(path, facts, {name: tensors[name] for name in wanted})
    touched = time.perf_counter()
    taken = None if disk is None else (bytes_from_disk() or 0) - disk
    major, minor = (after - before for after, before in zip(_faults(), faults, strict=True))
    row = {
        "state": state,
        **_times(loaded - started, forward_s, touched - touching, sum(facts.tensor_bytes[name] for name in wanted)),
        "file_bytes": facts.file_bytes[chosen.suffix],
        "bytes_from_disk": taken,
        "resident_before": resident.fraction,
        "resident_after": residency(path).fraction,
        "residency_by": resident.by,
        **_memory(memory, measure_memory("cpu")),
        "major_faults": major,
        "minor_faults": minor,
    }
    prove(row, file=path, reads_all=chosen.reads_all(facts))
    return row


def prove(row: Mapping[str, Any], *, file: str, reads_all: bool) -> None:
    """Refuse a measurement whose state was not what it claims.

    Cold: no page was resident, and as many bytes came from the disk as the file has (within 2 %) or, where the method
    reads what it needs, at least 98 % of what was touched. Warm: every page was, and none came. Where the kernel does
    not count the bytes from the disk (other than Linux) only residency is demanded. As found: nothing.

    Args:
        row: state, resident_before, bytes_from_disk, file_bytes and touched_bytes of a measurement.
        file: that was loaded, for the message.
        reads_all: whether the method reads the whole file.

    Raises:
        MeasurementError: names the file, the state, what was expected and found, and the remedy.
    """
    state, disk = row["state"], row["bytes_from_disk"]
    faults = []
    if state != AS_FOUND and row["resident_before"] != (1 if state == WARM else 0):
        wanted = "the whole file" if state == WARM else "nothing of it"
        faults.append(f"{wanted} in the page cache before, found {row['resident_before']:.4%}")
    if disk is not None:
        faults += [f"{wanted} from the disk, found {disk}" for wanted in _unmet(row, state, disk, reads_all)]
    if faults:
        raise MeasurementError(
            f"{file}: this was no {state} measurement and is not reported. Expected {'; '.join(faults)}. "
            f"{_REMEDIES[state]}"
        )


def _unmet(row: Mapping[str, Any], state: str, disk: int, reads_all: bool) -> list[str]:
    """What the bytes from the disk should have been, where they were not."""
    if state == WARM and disk:
        return ["no bytes"]
    # The kernel reads whole pages: more than 2 % of a small file.
    least, most = (1 - _DISK_TOLERANCE) * row["file_bytes"], (1 + _DISK_TOLERANCE) * row["file_bytes"] + PAGESIZE
    if state == COLD and reads_all and not least <= disk <= most:
        return [f"{row['file_bytes']} bytes (within {_DISK_TOLERANCE:.0%}, and a page more)"]
    if state == COLD and not reads_all and disk < (1 - _DISK_TOLERANCE) * row["touched_bytes"]:
        return [f"at least {1 - _DISK_TOLERANCE:.0%} of {row['touched_bytes']} bytes"]
    return []


def check_tensors(path: str, subject: Subject, tensors: Mapping[str, Tensor]) -> None:
    """Read every byte of some tensors, and compare them with what was written.

    Raises:
        IntegrityError: the first tensor that differs.
    """
    for name, tensor in tensors.items():
        if (found := digest_tensor(tensor)) != subject.digests[name]:
            raise IntegrityError(
                path,
                expected=f"tensor {name!r} with xxh3_64 {subject.digests[name]}",
                found=found,
                remedy="The method loads other bytes than were written, or the file is damaged: remove it, and run "
                "the command again.",
            )


def digest_tensor(tensor: Tensor) -> str:
    """xxh3_64 of a tensor's bytes in order, 16 hexadecimal digits. NumPy has no bfloat16, so they are seen as bytes."""
    import torch

    return f"{digest_row(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()):016x}"


def _first_forward(subject: Subject, method: Method, tensors: Mapping[str, Tensor]) -> float | None:
    """Seconds of a model's first forward pass, where the method gives the whole of one."""
    if not subject.model or not subject.wants_all or method.first_only:
        return None
    from anchorage.loading.forward import first_forward

    return first_forward(subject, tensors)


def _times(load_s: float, forward_s: float | None, touch_s: float, touched_bytes: int) -> dict[str, Any]:
    total_s = load_s + (forward_s or 0) + touch_s
    return {
        "load_s": round(load_s, 6),
        "first_forward_s": None if forward_s is None else round(forward_s, 6),
        "touch_s": round(touch_s, 6),
        "total_s": round(total_s, 6),
        "touched_bytes": touched_bytes,
        "gb_s": round(touched_bytes / 1e9 / total_s, 4),
    }


def _memory(before: Mapping[str, float | None], after: Mapping[str, float | None]) -> dict[str, float | None]:
    """Peak, level before, and the rise by kind, None where the kernel does not tell kinds apart."""
    base, anonymous, now, now_anonymous = (
        memory[name] for memory in (before, after) for name in ("rss_mib", "anonymous_mib")
    )
    told = None not in (base, anonymous, now, now_anonymous)
    rise = (now or 0) - (base or 0)
    rise_anonymous = (now_anonymous or 0) - (anonymous or 0)
    return {
        "peak_mib": after["peak_mib"],
        "base_mib": base,
        "anonymous_mib": round(rise_anonymous, 2) if told else None,
        "file_mib": round(rise - rise_anonymous, 2) if told else None,
    }


def _faults() -> tuple[int, int]:
    """Major and minor page faults of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_majflt, usage.ru_minflt
