"""Ways of loading tensors from a file, a function each. To add one, write it and add a line to METHODS::

    def load_bytes(path, subject, names):
        from safetensors.torch import load

        return load(open(path, "rb").read())

    METHODS = {..., "bytes": Method(load_bytes)}

Libraries are imported by the functions: the workflow reads this table before anything runs, and must start fast. A
process that measures imports IMPORTS, and what the method needs, first: no measurement pays for an import.
"""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anchorage.errors import SettingsError, did_you_mean
from anchorage.loading.subject import Subject
from anchorage.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

IMPORTS = ("torch", "safetensors.torch", "anchorage.loading.raw", "anchorage.store.reader")


@dataclass(frozen=True)
class Method:
    """A way of loading.

    Attributes:
        load: from a path, a subject and the wanted names to tensors by name, with at least the wanted ones. They are
            used while the returned mapping lives, and hold what they need open.
        suffix: of the file it reads.
        lazy: only what is touched is read from the disk, and what the kernel reads ahead around it; else the whole file
            is.
        maps: its tensors are maps of the file; else copies.
        exact: it fetches the wanted tensors and next to nothing else, which every cold measurement must show.
        first_only: it is shown with the first wanted tensor only.
        needs: modules that it imports, of packages beyond those of the workflow; where one is missing it is "not run".
    """

    load: Callable[[str, Subject, Sequence[str]], Mapping[str, Tensor]]
    suffix: str = ".safetensors"
    lazy: bool = False
    maps: bool = False
    exact: bool = False
    first_only: bool = False
    needs: tuple[str, ...] = ()

    def wanted(self, subject: Subject) -> tuple[str, ...]:
        """Names of the tensors that are touched."""
        return subject.wanted[:1] if self.first_only else subject.wanted

    def reads_all(self, subject: Subject) -> bool:
        """Whether a cold measurement reads the whole file."""
        return not self.lazy or (subject.wants_all and not self.first_only)

    def gives_model(self, subject: Subject) -> bool:
        """Whether it gives all tensors of a whole model, which then can run."""
        return subject.model is not None and subject.wants_all and not self.first_only


def load_torch(path: str, subject: Subject, names: Sequence[str]) -> Mapping[str, Tensor]:
    """Unpickle the structure, copy every tensor's bytes."""
    import torch

    return torch.load(path, weights_only=True)


def map_torch(path: str, subject: Subject, names: Sequence[str]) -> Mapping[str, Tensor]:
    """Unpickle the structure, map every tensor's bytes."""
    import torch

    return torch.load(path, weights_only=True, mmap=True)


def load_file(path: str, subject: Subject, names: Sequence[str]) -> Mapping[str, Tensor]:
    """safetensors' own: maps the file, and touches the first page of every tensor (0.8)."""
    from safetensors.torch import load_file

    return load_file(path)


def load_file_pread(path: str, subject: Subject, names: Sequence[str]) -> Mapping[str, Tensor]:
    """safetensors' own, copying every tensor's bytes; an option since its 0.8."""
    from safetensors.torch import load_file

    return load_file(path, backend="pread")


def open_wanted(path: str, subject: Subject, names: Sequence[str]) -> Mapping[str, Tensor]:
    """safe_open, and the wanted tensors only."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in names}


def read_into(path: str, subject: Subject, names: Sequence[str]) -> Mapping[str, Tensor]:
    """Unbuffered reads of 8 MiB into one buffer; the tensors are views of it."""
    from anchorage.loading.raw import read_buffer

    return read_buffer(path)


def read_threads(path: str, subject: Subject, names: Sequence[str]) -> Mapping[str, Tensor]:
    """As :func:`read_into`, by as many threads as there are processors, and two at least."""
    from anchorage.loading.raw import read_parallel

    return read_parallel(path)


def map_ahead(path: str, subject: Subject, names: Sequence[str]) -> Mapping[str, Tensor]:
    """mmap, the whole file asked for beforehand (MADV_WILLNEED) in steps of the device's read-ahead.

    Of one call for a whole file the kernel takes one such step and no more. So the whole file is read, whatever is
    touched.
    """
    from anchorage.loading.raw import map_file, mapped_tensors, read_ahead_bytes

    mapping = map_file(path)
    step = read_ahead_bytes(path) // mmap.PAGESIZE * mmap.PAGESIZE
    for start in range(0, len(mapping), step):
        mapping.madvise(mmap.MADV_WILLNEED, start, min(step, len(mapping) - start))
    return mapped_tensors(path, mapping, names)


def map_sequential(path: str, subject: Subject, names: Sequence[str]) -> Mapping[str, Tensor]:
    """mmap, with the advice that pages are touched in order (MADV_SEQUENTIAL)."""
    from anchorage.loading.raw import map_file, mapped_tensors

    mapping = map_file(path)
    mapping.madvise(mmap.MADV_SEQUENTIAL)
    return mapped_tensors(path, mapping, names)


def map_random(path: str, subject: Subject, names: Sequence[str]) -> Mapping[str, Tensor]:
    """mmap, with the advice that pages are touched in no order (MADV_RANDOM): a request a page, nothing read ahead."""
    from anchorage.loading.raw import map_file, mapped_tensors

    mapping = map_file(path)
    mapping.madvise(mmap.MADV_RANDOM)
    return mapped_tensors(path, mapping, names)


def read_ours(path: str, subject: Subject, names: Sequence[str]) -> Mapping[str, Tensor]:
    """Anchorage's reader: the wanted bytes alone, without read-ahead; of a shard each row is checked by its digest.

    A shard is read as its users read it, through the cache that it belongs to: ``path`` is that of its published file.
    """
    from anchorage.loading.raw import read_tensors

    return read_tensors(path, names) if subject.cache is None else _read_sites(subject, names)


def _read_sites(subject: Subject, names: Sequence[str]) -> Mapping[str, Tensor]:
    """Sites of a shard as they are stored, copied."""
    import torch

    from anchorage.store.reader import open_cache

    assert subject.cache
    assert subject.rows
    rows, tier = range(*subject.rows), subject.tier
    with open_cache(subject.cache) as cache:
        if cache.padded and cache.identity["tiers"][tier]["reduce"] == "none":  # stored row after row, without pads
            return {name: torch.cat(cache.read_list(name, rows, tier=tier)) for name in names}
        return {name: cache.read(name, rows, tier=tier) for name in names}


def load_fastsafetensors(path: str, subject: Subject, names: Sequence[str]) -> Mapping[str, Tensor]:
    """fastsafetensors (tried: 0.5): threads read into one buffer.

    By default it reads past the page cache (O_DIRECT), so warm it is as slow as cold. It is told not to: what is
    compared here is reading through the page cache, and a warm measurement must read nothing from the disk.
    """
    os.environ["FASTSAFETENSORS_ODIRECT"] = "0"
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), "cpu", nogds=True)
    loader.add_filenames({0: [path]})
    buffer = loader.copy_files_to_device()
    return {name: buffer.get_tensor(name) for name in loader.get_keys()}


def stream_file(path: str, subject: Subject, names: Sequence[str]) -> Mapping[str, Tensor]:
    """runai-model-streamer (tried: 0.17): threads read into a ring of buffers, which the tensors keep.

    It is told to read through the page cache, as in :func:`load_fastsafetensors` and for the same reason.
    """
    os.environ["RUNAI_STREAMER_FS_STRATEGY"] = "sync_buffered"
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(path)
        return dict(streamer.get_tensors())


METHODS: dict[str, Method] = {
    "torch.load": Method(load_torch, ".pt"),
    "torch.load-mmap": Method(map_torch, ".pt", lazy=True, maps=True),
    "load_file": Method(load_file, lazy=True, maps=True),
    "load_file-pread": Method(load_file_pread),
    "one-tensor": Method(open_wanted, lazy=True, maps=True, first_only=True),
    "safe_open": Method(open_wanted, lazy=True, maps=True),
    "readinto": Method(read_into),
    "preadv-threads": Method(read_threads),
    "mmap-willneed": Method(map_ahead, maps=True),
    "mmap-sequential": Method(map_sequential, lazy=True, maps=True),
    "mmap-random": Method(map_random, lazy=True, maps=True),
    "fastsafetensors": Method(load_fastsafetensors, needs=("fastsafetensors",)),
    "runai-streamer": Method(stream_file, needs=("runai_model_streamer",)),
    "ours": Method(read_ours, lazy=True, exact=True),
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
