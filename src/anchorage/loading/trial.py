"""One measurement, in the fresh process that it is made in, and the proof that its state was what it claims."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from mmap import PAGESIZE
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anchorage.diskio import bytes_from_disk
from anchorage.errors import IntegrityError, MeasurementError
from anchorage.loading.methods import METHODS
from anchorage.loading.pagecache import residency
from anchorage.loading.subject import Subject, digest_tensor
from anchorage.memory import measure_memory

if TYPE_CHECKING:
    from torch import Tensor

AS_FOUND, COLD, WARM = "as-found", "cold", "warm"
TOUCH, FORWARD = "touch", "forward"
EXACT, SPARE_BYTES = 1.05, 64 << 10  # what an exact method may fetch: so many times what was wanted, and a header
_DISK_TOLERANCE = 0.02
_SCHEDULED = Path("/proc/self/task")
_REMEDIES = {
    COLD: "Let nothing else read, write or map the file meanwhile; what lies on a filesystem with a cache of its own, "
    "or of which the kernel counts no bytes (FUSE), is never proved cold: put the results on another",
    WARM: "Give the machine more free memory than the file has bytes, and let nothing else run beside",
}


def measure(subject: dict[str, Any], method: str, state: str, use: str = TOUCH) -> dict[str, Any]:
    """Load and use a subject's tensors by one method. The asking process has set the state.

    Args:
        subject: ``Subject.to_json()``.
        method: its name in ``METHODS``.
        state: what to prove: ``as-found``, ``cold`` or ``warm``.
        use: ``touch``: every byte is read, and compared; ``forward``: the model runs once, of which the time counts,
            and then every byte is compared, of which it does not.

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
    tensors, load = _timed(lambda: chosen.load(path, facts, wanted))
    resident_loaded = residency(path).fraction
    forward = _time_forward(facts, tensors) if use == FORWARD else None
    _, touch = _timed(lambda: check_tensors(path, facts, {name: tensors[name] for name in wanted}))
    taken = None if disk is None else (bytes_from_disk() or 0) - disk
    major, minor = (after - before for after, before in zip(_faults(), faults, strict=True))
    row = {
        "state": state,
        "use": use,
        **_times(load, forward, touch, sum(facts.tensor_bytes[name] for name in wanted)),
        "file_bytes": facts.file_bytes[chosen.suffix],
        "bytes_from_disk": taken,
        "resident_before": resident.fraction,
        "resident_loaded": resident_loaded,
        "resident_after": residency(path).fraction,
        "residency_by": resident.by,
        **_memory(memory, measure_memory("cpu")),
        "major_faults": major,
        "minor_faults": minor,
    }
    prove(row, file=path, reads_all=chosen.reads_all(facts), exact=chosen.exact)
    return row


def prove(row: Mapping[str, Any], *, file: str, reads_all: bool, exact: bool = False) -> None:
    """Refuse a measurement whose state was not what it claims.

    Cold: no page was resident, and as many bytes came from the disk as the file has (within 2 %) or, where the method
    reads what it needs, at least 98 % of what was touched; where it is exact, at most 1.05 times that and 64 KiB. Warm:
    every page was, and none came. Where the kernel does not count the bytes from the disk (other than Linux) only
    residency is demanded. As found: nothing.

    Args:
        row: state, resident_before, bytes_from_disk, file_bytes and touched_bytes of a measurement.
        file: that was loaded, for the message.
        reads_all: whether the method reads the whole file.
        exact: whether it reads what is wanted and next to nothing else.

    Raises:
        MeasurementError: names the file, the state, what was expected and found, and the remedy.
    """
    state, disk = row["state"], row["bytes_from_disk"]
    faults = []
    if state != AS_FOUND and row["resident_before"] != (1 if state == WARM else 0):
        wanted = "the whole file" if state == WARM else "nothing of it"
        faults.append(f"{wanted} in the page cache before, found {row['resident_before']:.4%}")
    if disk is not None:
        faults += [f"{wanted} from the disk, found {disk}" for wanted in _unmet(row, disk, reads_all, exact)]
    if faults:
        raise MeasurementError(
            f"{file}: this was no {state} measurement and is not reported. Expected {'; '.join(faults)}. "
            f"{_REMEDIES[state]}. loading: null measures no loading"
        )


def _unmet(row: Mapping[str, Any], disk: int, reads_all: bool, exact: bool) -> list[str]:
    """What the bytes from the disk should have been, where they were not."""
    state = row["state"]
    if state == WARM and disk:
        return ["no bytes"]
    if state == COLD and reads_all:
        # The kernel reads whole pages: more than 2 % of a small file.
        least, most = (1 - _DISK_TOLERANCE) * row["file_bytes"], (1 + _DISK_TOLERANCE) * row["file_bytes"] + PAGESIZE
        told = f"{row['file_bytes']} bytes (within {_DISK_TOLERANCE:.0%}, and a page more)"
        return [] if least <= disk <= most else [told]
    if state == COLD and not reads_all and disk < (1 - _DISK_TOLERANCE) * row["touched_bytes"]:
        return [f"at least {1 - _DISK_TOLERANCE:.0%} of {row['touched_bytes']} bytes"]
    if state == COLD and exact and disk > EXACT * row["touched_bytes"] + SPARE_BYTES:
        return [f"at most {EXACT} times {row['touched_bytes']} bytes, and {SPARE_BYTES} more,"]
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


@dataclass(frozen=True)
class _Time:
    """Of a call: seconds, and those of them that its process, ready to run, waited for a processor."""

    seconds: float
    wait_s: float | None


def _timed(call: Callable[[], Any]) -> tuple[Any, _Time]:
    """What a call returns, and its time."""
    waits, started = _waits(), time.perf_counter()
    found = call()
    seconds = time.perf_counter() - started
    waited = [wait - waits.get(thread, 0) for thread, wait in _waits().items()]
    return found, _Time(seconds, sum(waited) / 1e9 if waited else None)


def _waits() -> dict[str, int]:
    """By thread: nanoseconds that it has waited for a processor. Empty where the kernel does not count them."""
    waits = {}
    for path in _SCHEDULED.glob("*/schedstat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            waits[path.parent.name] = int(path.read_text().split()[1])
    return waits


def _time_forward(subject: Subject, tensors: Mapping[str, Tensor]) -> _Time:
    """The time of a model's first forward pass."""
    from anchorage.loading.forward import build_empty, first_forward

    model = build_empty(subject, next(iter(tensors.values())).dtype)
    return _timed(lambda: first_forward(model, tensors))[1]


def _times(load: _Time, forward: _Time | None, touch: _Time, touched_bytes: int) -> dict[str, Any]:
    """Of loading and of the use after it; a touch after a forward pass is no part of the total."""
    use = forward or touch
    total_s = load.seconds + use.seconds
    known = load.wait_s is not None and use.wait_s is not None
    return {
        "load_s": round(load.seconds, 6),
        "first_forward_s": None if forward is None else round(forward.seconds, 6),
        "touch_s": round(touch.seconds, 6),
        "total_s": round(total_s, 6),
        "wait_s": round((load.wait_s or 0) + (use.wait_s or 0), 6) if known else None,
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
