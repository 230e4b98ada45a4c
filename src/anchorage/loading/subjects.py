"""Writing the files that are loaded, durably: the same tensors in two formats, and ``subjects.json``, which describes
them. The same input gives the same bytes of safetensors files, and the same digests."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from tqdm.utils import CallbackIOWrapper

from anchorage.durable import atomic_file, write_json
from anchorage.errors import MeasurementError
from anchorage.loading.raw import TORCH_DTYPES, map_file, mapped_tensors
from anchorage.loading.subject import Subject, digest_tensor
from anchorage.model import load_model
from anchorage.model_files import find_model_folder
from anchorage.plan import existing_folder
from anchorage.settings import Settings
from anchorage.store.manifest import Manifest, read_manifest
from anchorage.store.names import MANIFEST
from anchorage.tensorfile import ITEM_BYTES, TensorFile, TensorSpec, encode_header, fits_header

N_BIG_TENSORS = 64
_BIG_WIDTH = 1024
_HEADER_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_SPARE_BYTES = 16 << 20  # headers, the index of a .pt, folders


def write_subjects(
    settings: Settings, model_facts: Mapping[str, Any], cache_folder: Path, folder: Path, log: Callable[[str], None]
) -> None:
    """Write the files of the subjects ``weights``, ``big`` and ``shard``, and ``subjects.json``.

    All tensors of weights and big are wanted, and of the shard one site, the middle one in running order. The shard is
    the first of the tier with most sites, of the tiers that keep all tokens if there is one; its safetensors file is
    the cache's own. Beside the model's weights one tensor at a time is in memory: a ``.pt`` is written from the mapped
    safetensors file.

    Args:
        settings: the configuration, with a section ``loading``.
        model_facts: content of ``model.json``.
        cache_folder: the folder of the manifest.
        folder: where the files go.
        log: is handed a line a file.

    Raises:
        MeasurementError: the files, and the copy that is made of one later, do not fit on the disk; or the model has a
            tensor of a dtype that a header cannot name, or more tensors than a header holds. Then nothing is written.
        IntegrityError: the model, the manifest or the shard is damaged.
    """
    assert settings.loading
    manifest = read_manifest(cache_folder / MANIFEST)
    shard = _shard_facts(manifest, cache_folder)
    shard_path = cache_folder / manifest.shards[0].tiers[shard["tier"]].file
    weights = _unique_tensors(load_model(model_facts, settings.model)[0])
    weight_specs, big_specs = _specs_of(weights), _big_specs(settings.loading.big_mib)
    n_bytes = 2 * sum(spec.n_bytes for spec in weight_specs + big_specs) + shard_path.stat().st_size
    copy_bytes = sum(spec.n_bytes for spec in big_specs)  # loading.accident copies a file once
    _check_space(folder, n_bytes + copy_bytes, settings.loading.big_mib)
    with tqdm(total=n_bytes, desc="files to load", unit="B", unit_scale=True, disable=None) as bar:
        files = _Files(folder, bar, log)
        # A weight is let go as soon as it is written.
        weights_path = files.write("weights", weight_specs, (weights.pop(spec.name) for spec in weight_specs))
        big_path = files.write("big", big_specs, _draw(big_specs, settings.seed))
        model_folder, _ = find_model_folder(model_facts["source"], model_facts["commit"])
        subjects = [
            files.pickle("weights", weights_path, model=str(model_folder)),
            files.pickle("big", big_path),
            files.pickle("shard", shard_path, **shard),
        ]
    write_json(folder / "subjects.json", {"key": manifest.key, "subjects": [subject.to_json() for subject in subjects]})


def _shard_facts(manifest: Manifest, cache_folder: Path) -> dict[str, Any]:
    """What a Subject says of a shard and no other: its tier, rows, cache and wanted site."""
    tiers = manifest.identity["tiers"]
    candidates = [name for name in tiers if tiers[name]["reduce"] == "none"] or list(tiers)
    tier = max(candidates, key=lambda name: len(tiers[name]["sites"]))
    sites, start = tiers[tier]["sites"], manifest.shards[0].rows[0]
    rows = (start, start + manifest.shards[0].tiers[tier].n_rows)
    return {"tier": tier, "rows": rows, "cache": str(cache_folder), "wanted": (sites[len(sites) // 2],)}


def _unique_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """A model's parameters and persistent buffers; of tied ones the first name only."""
    names: dict[tuple[Any, ...], str] = {}
    tensors = model.state_dict()
    for name, tensor in tensors.items():
        names.setdefault((tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()), name)
    return {name: tensors[name] for name in names.values()}


def _specs_of(tensors: Mapping[str, Tensor]) -> list[TensorSpec]:
    """The tensors' specs, wider elements first."""
    if foreign := [name for name, tensor in tensors.items() if tensor.dtype not in _HEADER_DTYPES]:
        raise MeasurementError(
            f"{foreign[0]} of the model is of dtype {tensors[foreign[0]].dtype}, which the files to be loaded cannot "
            f"hold (they hold {', '.join(_HEADER_DTYPES.values())}); set loading: null"
        )
    specs = [TensorSpec(name, _HEADER_DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()]
    specs.sort(key=lambda spec: -ITEM_BYTES[spec.dtype])
    if not fits_header(specs, {"subject": "weights"}):
        raise MeasurementError(
            f"the model has {len(specs)} tensors, more than a header of the files to be loaded can name; set "
            "loading: null to measure no loading"
        )
    return specs


def _big_specs(big_mib: int) -> list[TensorSpec]:
    rows = big_mib * 2**20 // N_BIG_TENSORS // _BIG_WIDTH // ITEM_BYTES["BF16"]
    return [TensorSpec(f"tensor.{index:02}", "BF16", (rows, _BIG_WIDTH)) for index in range(N_BIG_TENSORS)]


def _draw(specs: Iterable[TensorSpec], seed: int) -> Iterator[Tensor]:
    """Random bfloat16 tensors, each from the seed and its index. All values are finite."""
    for index, spec in enumerate(specs):
        bits = np.random.default_rng([seed, index]).integers(0, 2**16, spec.shape, np.uint16)
        bits &= 0xBFFF  # the exponent's highest bit: without it no value reaches 2
        yield torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def _check_space(folder: Path, n_bytes: int, big_mib: int) -> None:
    free_bytes = shutil.disk_usage(existing_folder(folder)).free
    if free_bytes < n_bytes + _SPARE_BYTES:
        raise MeasurementError(
            f"{folder}: the files to be loaded take {n_bytes + _SPARE_BYTES} bytes there, {free_bytes} are free. Free "
            f"some, set loading.big_mib lower than {big_mib}, or set loading: null to measure no loading"
        )


class _Files:
    """Writes files below a folder, and moves a bar by the bytes."""

    def __init__(self, folder: Path, bar: tqdm, log: Callable[[str], None]) -> None:
        self._folder, self._bar, self._log = folder, bar, log

    def write(self, name: str, specs: list[TensorSpec], tensors: Iterable[Tensor]) -> Path:
        """Write a safetensors file, and say where it is."""
        path = self._folder / f"{name}.safetensors"
        header, _ = encode_header(specs, {"subject": name})
        with atomic_file(path) as file:
            file.write(header)
            for tensor in tensors:
                data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                file.write(data.numpy().data)
                self._bar.update(len(data))
        self._log(f"{path}: {len(specs)} tensors, {path.stat().st_size} bytes")
        return path

    def pickle(self, name: str, source: Path, *, wanted: tuple[str, ...] = (), **facts: Any) -> Subject:
        """Write a safetensors file's tensors as a ``.pt``, and describe the two; nothing said of wanted means all."""
        path = self._folder / f"{name}.pt"
        with TensorFile(source) as opened:
            entries = opened.entries
        tensors = mapped_tensors(str(source), map_file(str(source)), list(entries))
        with atomic_file(path) as file:
            torch.save(tensors, cast(Any, CallbackIOWrapper(self._bar.update, file, "write")))
        self._log(f"{path}: {len(tensors)} tensors, {path.stat().st_size} bytes")
        files = {".pt": path, ".safetensors": source}
        return Subject(
            name=name,
            files={suffix: str(file) for suffix, file in files.items()},
            file_bytes={suffix: file.stat().st_size for suffix, file in files.items()},
            digests={name: digest_tensor(tensor) for name, tensor in tensors.items()},
            tensor_bytes={name: entry.spec.n_bytes for name, entry in entries.items()},
            wanted=wanted or tuple(entries),
            **facts,
        )
