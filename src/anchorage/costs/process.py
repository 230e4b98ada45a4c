"""A case in a process of its own: ``python -m anchorage.costs.process``, with a request as JSON on standard input.

The last line of standard output is the answer, JSON. See :mod:`anchorage.costs.rounds`, which asks.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anchorage.costs.cases import COMPARISONS, Subject
from anchorage.costs.comparison import Case
from anchorage.digest import digest_bytes
from anchorage.driver import die_with_driver
from anchorage.memory import measure_memory
from anchorage.plan import load_plan
from anchorage.settings import load_settings


def measure_case(subject: Subject, case: Case, n_batches: int) -> dict[str, Any]:
    """Measure a case in this process, which must be fresh: its peak would be that of whatever ran before.

    Args:
        subject: the loaded model.
        case: what to run: one batch, which warms up, then those that are measured.
        n_batches: measured batches; fewer where the corpus has no more.

    Returns:
        batches, tokens, seconds; ``peak_mib``, how far the process's resident memory rose above what it was before the
        first measured batch (VmHWM less VmRSS; None where that stayed below the peak of loading and the kernel cannot
        forget it); ``cuda_peak_mib``, the same of allocated GPU memory; what the case keeps of a batch: ``n_modules``,
        ``kept_mib`` and ``digests``, xxh3_128 of each value's bytes by name.
    """
    layout, device = subject.plan.layout, subject.capturer.device
    batches = layout.batches(range(layout.n_rows))[:n_batches]
    kept = describe_kept(case.run(subject, batches[:1]))
    subject.held.clear()
    _settle(device)
    before = measure_memory(device)
    started = time.perf_counter()
    case.run(subject, batches)
    _synchronise(device)
    seconds = time.perf_counter() - started
    after = measure_memory(device)
    return {
        "batches": len(batches),
        "tokens": sum(map(subject.plan.n_tokens, batches)),
        "seconds": seconds,
        "peak_mib": _rise(before, after, "rss_mib", "peak_mib"),
        "cuda_peak_mib": _rise(before, after, "cuda_allocated_mib", "cuda_peak_mib"),
        **kept,
    }


def describe_kept(kept: Mapping[str, Any]) -> dict[str, Any]:
    """How many things were kept, their bytes together, and the digest of the bytes of each tensor among them."""
    n_bytes = sum(tensor.nbytes for value in kept.values() for tensor in _tensors(value))
    digests = {
        name: digest_bytes(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        for name, value in kept.items()
        if isinstance(value, Tensor)
    }
    return {"n_modules": len(kept), "kept_mib": n_bytes / 2**20, "digests": digests}


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in what a module gave: a tensor, or tuples, lists, dictionaries and nnsight's entries of such."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "output"):
        yield from _tensors(value.output)


def _settle(device: str) -> None:
    """Give back what the warm-up left behind, and forget the peak until now."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # glibc alone keeps freed memory, and can be told to return it
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):  # Linux alone: VmHWM starts anew
        Path("/proc/self/clear_refs").write_text("5")
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    _synchronise(device)


def _synchronise(device: str) -> None:
    """Wait until the device has done what it was given."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    elif device.startswith("mps"):
        torch.mps.synchronize()


def _rise(before: Mapping[str, float | None], after: Mapping[str, float | None], level: str, peak: str) -> float | None:
    start, old, new = before[level], before[peak], after[peak]
    if start is None or old is None or new is None:
        return None
    if new == old > start + 1:  # MiB: an old peak that the kernel did not forget, and that was not reached again
        return None
    return round(new - start, 2)


def main() -> None:
    die_with_driver()
    request = json.load(sys.stdin)
    settings = load_settings(request["settings"])
    comparison = COMPARISONS[request["comparison"]]
    subject = Subject(load_plan(settings, Path(request["model"]), Path(request["tokens"])))
    answer = measure_case(subject, comparison.cases[request["case"]], comparison.n_batches)
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
