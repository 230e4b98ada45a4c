"""The comparisons, a function a case. To measure something more, write a function and give it a place in the table.

They are those of NDIF's tutorial "Caching Activations Over a Dataset", with the configuration's model, sites, batch and
storage dtype. Cases run on the trunk, ending at the deepest wanted site as the capture does, unless they say otherwise.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from nnsight import NNsight
from torch import Tensor

from anchorage.capture import capture_shards
from anchorage.capturer import Capturer
from anchorage.costs.comparison import KEPT, MODULES, PEAK, SECONDS, Case, Comparison, Pair
from anchorage.model import load_model
from anchorage.plan import Plan
from anchorage.store.format import STORAGE_DTYPES
from anchorage.store.manifest import ShardRecord
from anchorage.store.staging import Staging
from anchorage.trunk import SiteReader, hidden_states, trimmed

Kept = Mapping[str, Any]


class Subject:
    """What all cases run: the loaded model with its head, its trunk, the wanted sites, the rows.

    Attributes:
        reader: reads the sites from the trunk.
        full_reader: reads the same sites from the whole model.
        root, full_root: trunk and model, each wrapped once for a case that traces them itself.
        held: batches that a case holds on to.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.model, trunk = load_model(plan.facts, plan.settings.model)
        self.capturer = Capturer(trunk, plan.sites, plan.facts["device"])
        self.trunk, sites = trunk, self.capturer.sites
        self.depth = max(site.depth for site in sites)
        self.dtype = STORAGE_DTYPES[plan.settings.capture.storage_dtype]
        self.reader = SiteReader(trunk, sites)
        in_full = [replace(site, path=f"{trunk.prefix}.{site.path}") for site in sites]
        self.full_reader = SiteReader(replace(trunk, module=self.model), in_full)
        self.root, self.full_root = NNsight(trunk.module), NNsight(self.model)
        self.held: list[Kept] = []

    def ids(self, batch: range) -> Tensor:
        """Token ids of a batch, int64 ``[rows, seq_len]``, on the model's device."""
        return torch.from_numpy(self.plan.batch_tokens(batch).astype(np.int64)).to(self.capturer.device)


def _each(step: Callable[[Subject, Tensor], Kept], subject: Subject, batches: Sequence[range]) -> Kept:
    """Run a step on each batch, and drop what it keeps before the next."""
    kept: Kept = {}
    for batch in batches:
        kept = {}
        kept = step(subject, subject.ids(batch))
    return kept


def _batchwise(label: str, step: Callable[[Subject, Tensor], Kept]) -> Case:
    return Case(label, partial(_each, step))


def cache_everything(subject: Subject, ids: Tensor) -> Kept:
    """nnsight's cache without ``modules=``, on the whole model."""
    with torch.no_grad(), subject.full_root.trace(input_ids=ids, use_cache=False) as tracer:
        cache = tracer.cache(dtype=subject.dtype)
    return {path: cache[path] for path in cache.keys()}  # noqa: SIM118 (not a dictionary)


def cache_wanted(subject: Subject, ids: Tensor) -> Kept:
    """nnsight's cache of the wanted sites, on the whole model."""
    return subject.full_reader.cache(ids, subject.dtype)


def cache_on_trunk(subject: Subject, ids: Tensor) -> Kept:
    """nnsight's cache of the wanted sites, cast as it captures."""
    with trimmed(subject.trunk, subject.depth):
        return subject.reader.cache(ids, subject.dtype)


def cache_then_cast(subject: Subject, ids: Tensor) -> Kept:
    """nnsight's cache in the model's own dtype, cast when the forward pass is over."""
    with trimmed(subject.trunk, subject.depth):
        cache = subject.reader.cache(ids, None)
    return {name: value.to(subject.dtype) for name, value in cache.items()}


def save_on_trunk(subject: Subject, ids: Tensor) -> Kept:
    """Each site read, cast and copied inside the trace, as the capture does."""
    with trimmed(subject.trunk, subject.depth):
        return _save(subject.reader, ids, subject.dtype)


def save_on_full(subject: Subject, ids: Tensor) -> Kept:
    """The same on the whole model, to its logits."""
    return _save(subject.full_reader, ids, subject.dtype)


def _save(reader: SiteReader, ids: Tensor, dtype: torch.dtype) -> Kept:
    kept: dict[str, Tensor] = {}
    # A copy also where nothing is cast: the tensor is the model's own.
    reader.read(ids, lambda site, value: kept.__setitem__(site.name, value.to("cpu", dtype, copy=True)))
    return kept


def keep_sites(subject: Subject, ids: Tensor, *, grad: bool, detach: bool = False, hold: bool = False) -> Kept:
    """The wanted sites as the model gives them, on its device, with autograd on or off.

    Autograd on means parameters that ask for gradients, as transformers loads them. The capture turns that off too.
    """
    subject.model.requires_grad_(grad)
    n_rows, seq_len = ids.shape
    kept: dict[str, Tensor] = {}
    envoys = {envoy.path.removeprefix("model."): envoy for envoy in subject.root.modules()}
    mode = contextlib.nullcontext() if grad else torch.no_grad()
    with trimmed(subject.trunk, subject.depth), mode, subject.root.trace(input_ids=ids, use_cache=False):
        for site in subject.reader.sites:
            value = getattr(envoys[site.path], site.at)
            value = hidden_states(value, n_rows=n_rows, seq_len=seq_len, site=site.name)
            kept[site.name] = value.detach() if detach else value
    if hold:
        subject.held.append(kept)
    return kept


def capture_rows(subject: Subject, batches: Sequence[range], *, disk: bool) -> Kept:
    """The capture itself of the first rows, in two shards or more; with ``disk`` durable. Leaves no file behind."""
    plan, capture = subject.plan, subject.plan.settings.capture
    shard_rows = math.ceil(len(batches) / 2) * capture.batch_rows
    corpus = plan.settings.corpus.model_copy(update={"rows": batches[-1].stop})
    capture = capture.model_copy(update={"shard_rows": min(shard_rows, capture.shard_rows), "parts": 1})
    part = Plan(plan.settings.model_copy(update={"corpus": corpus, "capture": capture}), plan.facts, plan.tokens_path)
    folder = plan.settings.staging / "costs"
    shutil.rmtree(folder, ignore_errors=True)  # what a killed run left
    kind = Staging if disk else _NoDisk
    with contextlib.closing(kind(folder, part.key, layout=part.layout, part=0, log=_ignore)) as staging:
        shards = range(part.layout.n_shards)
        capture_shards(part, staging, shards=shards, capturer=subject.capturer, log=_ignore)
    shutil.rmtree(folder)
    return {}


class _NoDisk(Staging):
    """Staging that writes nothing."""

    def write_files(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {}

    def log_memory(self, *_: Any, **__: Any) -> None:
        pass

    def log_batches(self, *_: Any, **__: Any) -> None:
        pass

    def commit(self, shard: int, *_: Any, environment: Mapping[str, Any], **__: Any) -> ShardRecord:
        return ShardRecord(shard, (0, 0), environment, {})


def _ignore(_: str) -> None:
    pass


def _keep(label: str, **flags: Any) -> Case:
    return _batchwise(label, partial(keep_sites, **flags))


COMPARISONS = {
    "modules": Comparison(
        "tracer.cache() without and with modules=, on the whole model",
        {
            "wanted": _batchwise("caching the wanted sites", cache_wanted),
            "everything": _batchwise("caching every module", cache_everything),
        },
        tuple(Pair("everything", "wanted", column) for column in (SECONDS, PEAK, MODULES, KEPT)),
    ),
    "autograd": Comparison(
        "torch.no_grad() against autograd on, batches dropped and held",
        {
            "no_grad-dropped": _keep("no_grad, each batch dropped", grad=False),
            "grad-dropped": _keep("autograd on, each batch dropped", grad=True),
            "no_grad-held": _keep("no_grad, batches held", grad=False, hold=True),
            "grad-held": _keep("autograd on, batches held", grad=True, hold=True),
            "grad-held-detached": _keep("autograd on, batches held detached", grad=True, hold=True, detach=True),
        },
        (
            Pair("grad-dropped", "no_grad-dropped", SECONDS),
            Pair("grad-dropped", "no_grad-dropped", PEAK, {"more": "one batch's graph is kept for a backward pass"}),
            Pair("grad-held", "no_grad-held", SECONDS),
            Pair("grad-held", "no_grad-held", PEAK, {"more": "what is held keeps the graph behind it"}),
            Pair(
                "grad-held-detached",
                "grad-dropped",
                PEAK,
                # Less by a hundredth, as allocators have it, would be no help: that sentence is left to the next pair.
                {"more": "`.detach()` did not lower the peak of the forward pass"},
            ),
            Pair(
                "grad-held-detached",
                "no_grad-held",
                PEAK,
                {
                    "more": "`.detach()` lets go of a batch's graph, but the forward pass had built it: it does not "
                    "stand in for no_grad",
                    "less": "`.detach()` does as well as no_grad",
                },
            ),
        ),
    ),
    "reading": Comparison(
        "each site read inside the trace against tracer.cache(modules=[...])",
        {
            "save": _batchwise("reading each site inside the trace", save_on_trunk),
            "cache": _batchwise("nnsight's tracer.cache", cache_on_trunk),
        },
        (Pair("cache", "save", SECONDS), Pair("cache", "save", PEAK)),
        same_values=True,
    ),
    "depth": Comparison(
        "the whole model against its trunk, ending at the deepest wanted site",
        {
            "trunk": _batchwise("the trunk, ending at the deepest wanted site", save_on_trunk),
            "full": _batchwise("the whole model", save_on_full),
        },
        (Pair("full", "trunk", SECONDS), Pair("full", "trunk", PEAK)),
        same_values=True,
    ),
    "cast": Comparison(
        "casting to the storage dtype as nnsight captures, and after",
        {
            "as-captured": _batchwise("casting as it captures", cache_on_trunk),
            "then-cast": _batchwise("capturing in the model's dtype and casting then", cache_then_cast),
        },
        (Pair("then-cast", "as-captured", SECONDS), Pair("then-cast", "as-captured", PEAK)),
        same_values=True,
    ),
    "disk": Comparison(
        "the capture without and with durable shards: small ones, the write of the last not hidden by a next",
        {
            "without": Case("capturing without writing", partial(capture_rows, disk=False)),
            "with": Case("capturing with durable shards", partial(capture_rows, disk=True)),
        },
        (Pair("with", "without", SECONDS), Pair("with", "without", PEAK)),
        n_batches=4,
    ),
}
