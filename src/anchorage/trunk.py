"""Running the trunk, and reading what passes at a site.

Only the trunk is run, the model without its language-model head: activations need no logits, and with a vocabulary of
50,000 the head takes most of the time. Reading goes through nnsight (https://nnsight.net).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from nnsight import NNsight
from torch import Tensor

from anchorage.architecture import Trunk
from anchorage.errors import SiteError, did_you_mean
from anchorage.sites import explain_faults, stable_names

_ROOT = "model."  # nnsight's name for the module it wraps
_PROBE_ROWS, _PROBE_LEN = 2, 4

End = Literal["output", "input"]


@dataclass(frozen=True)
class Site:
    """A place in the trunk.

    Args:
        name: the stable name, or the raw path as the user wrote it.
        path: the module's path relative to the trunk.
        at: whether the module's output is meant, or its first input.
        depth: leading blocks that must be kept for this site to be computed.
    """

    name: str
    path: str
    at: End
    depth: int


Take = Callable[[Site, Tensor], None]


def find_sites(trunk: Trunk, names: Sequence[str]) -> list[Site]:
    """Find the modules of expanded names, in the order of the names.

    Args:
        trunk: of the model; it may be shortened, the whole list of blocks is meant all the same.
        names: from :func:`expand_sites`. A raw path is one of the full model, or relative to the trunk.

    Raises:
        SiteError: names every path that leads nowhere, with near ones, or out of the trunk.
    """
    stable = set(stable_names(trunk.n_layers))
    sites, faults = [], []
    for name in names:
        path = _stable_path(trunk, name) if name in stable else _raw_path(trunk, name)
        if path in trunk.paths:
            sites.append(Site(name, path, "input" if name == "embed" else "output", _depth(trunk, path)))
        elif name in stable:
            faults.append(f"site {name!r}: this block has no module {path!r} of its own")
        elif name in trunk.outside:
            faults.append(f"{name!r} is outside the trunk {trunk.prefix!r}, and only the trunk runs")
        else:
            faults.append(f"no module {name!r}{_near_paths(trunk, name)}")
    if faults:
        raise SiteError(explain_faults(faults, trunk.n_layers))
    return sites


def _stable_path(trunk: Trunk, name: str) -> str:
    kind, _, index = name.partition(".")
    part = {"attn": f".{trunk.attn_name}", "mlp": f".{trunk.mlp_name}"}.get(kind, "")
    return f"{trunk.layers_path}.{index or 0}{part}"


def _raw_path(trunk: Trunk, name: str) -> str:
    inner = name.removeprefix(f"{trunk.prefix}.")
    return inner if inner in trunk.paths else name


def _depth(trunk: Trunk, path: str) -> int:
    inner = path.removeprefix(f"{trunk.layers_path}.")
    return trunk.n_layers if inner == path else int(inner.partition(".")[0]) + 1


def _near_paths(trunk: Trunk, name: str) -> str:
    full = sorted(f"{trunk.prefix}.{path}" for path in trunk.paths)
    return did_you_mean(name, full if name.startswith(f"{trunk.prefix}.") else [*sorted(trunk.paths), *full])


def hidden_states(value: Any, *, n_rows: int, seq_len: int, site: str) -> Tensor:
    """What a module hands over, as hidden states.

    Args:
        value: a tensor, or a tuple whose first item is one: [n_rows, seq_len, width] or [n_rows * seq_len, width].
        n_rows, seq_len: of the batch.
        site: named in the error.

    Returns:
        [n_rows, seq_len, width], a view of what was given. Nothing is copied.

    Raises:
        SiteError: it is something else; the message says what.
    """
    first = value[0] if isinstance(value, tuple | list) and value else value
    if not isinstance(first, Tensor):
        found = f"a value of type {type(first).__name__}"
    elif not first.is_floating_point():
        found = f"a tensor of {first.dtype}"
    elif first.dim() == 3 and first.shape[:2] == (n_rows, seq_len):
        return first
    elif first.dim() == 2 and first.shape[0] == n_rows * seq_len:
        return first.unflatten(0, (n_rows, seq_len))
    else:
        found = f"a tensor of shape {list(first.shape)}"
    raise SiteError(f"site {site!r} gives {found}, not hidden states [{n_rows}, {seq_len}, width]")


@contextlib.contextmanager
def trimmed(trunk: Trunk, depth: int) -> Iterator[None]:
    """Keep only the first ``depth`` blocks, and put the others back at the end, also after an error.

    What the kept blocks compute does not change by a bit; what comes after them (the final norm) does. A
    :class:`SiteReader` works whether it was made before, inside or after, since each block stays the same object.
    """
    assert depth > 0, depth
    removed = list(trunk.layers[depth:])
    del trunk.layers[depth:]
    try:
        yield
    finally:
        trunk.layers.extend(removed)


class SiteReader:
    """Runs forward passes of a trunk and reads sites. The trunk is wrapped once, here.

    Args:
        trunk: in eval mode. It may be shortened by :func:`trimmed`, as long as the sites lie within.
        sites: in running order, as :func:`probe_sites` gives them.

    Attributes:
        inputs: what the trunk's forward pass takes by name.
    """

    def __init__(self, trunk: Trunk, sites: Sequence[Site]) -> None:
        self.sites = list(sites)
        self.inputs = frozenset(inspect.signature(trunk.module.forward).parameters)
        self._root = NNsight(trunk.module)
        envoys = {envoy.path.removeprefix(_ROOT): envoy for envoy in self._root.modules()}
        self._places = [(site, envoys[site.path]) for site in self.sites]

    def read(
        self, ids: Tensor, take: Take, *, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> None:
        """Run one forward pass, and hand each site's hidden states over at the moment they pass.

        Args:
            ids: [rows, seq_len] int64, on the model's device.
            take: called for each site in running order with [rows, seq_len, width], in the model's dtype, on its
                device. The tensor is the model's own and may be changed in place right after, so ``take`` must copy
                what it keeps (a cast to another dtype copies). Its exceptions end the pass and reach the caller as is.
            attention_mask: [rows, seq_len] int64, 1 at real tokens and 0 at pads; None means that all are real.
            position_ids: [rows, seq_len] int64; None leaves them to the model, which may count pads too.

        Raises:
            SiteError: the trunk does not take one that is given.
        """
        n_rows, seq_len = ids.shape
        optional = {"attention_mask": attention_mask, "position_ids": position_ids}
        given = {name: value for name, value in optional.items() if value is not None}
        # transformers takes any keyword, and passes over those that it does not know.
        if unknown := given.keys() - self.inputs:
            raise SiteError(f"the trunk's forward pass takes no {' and no '.join(sorted(unknown))}")
        with torch.no_grad(), self._root.trace(input_ids=ids, use_cache=False, **given):
            for site, envoy in self._places:
                # Reading the attribute waits until the forward pass gets there.
                take(site, hidden_states(getattr(envoy, site.at), n_rows=n_rows, seq_len=seq_len, site=site.name))

    def padding(self, ids: Tensor, lengths: Sequence[int]) -> dict[str, Tensor]:
        """What :meth:`read` must be told of rows padded on the right: the mask, and positions if the model takes them.

        Args:
            ids: [rows, seq_len] int64, on the model's device.
            lengths: real tokens of each row, the first ones.
        """
        places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        mask = (places < torch.tensor(lengths, device=ids.device)[:, None]).long()
        return {"attention_mask": mask} | ({"position_ids": places} if "position_ids" in self.inputs else {})

    def cache(self, ids: Tensor, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Run one forward pass and keep every site with nnsight's own cache: a second path, to compare the first with.

        Args:
            ids: [rows, seq_len] int64, on the model's device.
            dtype: what the cache casts to. None, or the model's own dtype, copies nothing: what comes back may then
                have been changed in place after it passed.

        Returns:
            [rows, seq_len, width] by site name, on the CPU.
        """
        n_rows, seq_len = ids.shape
        passed = self._record(ids, dtype)
        return {
            site.name: hidden_states(passed.value(site), n_rows=n_rows, seq_len=seq_len, site=site.name)
            for site in self.sites
        }

    def _record(self, ids: Tensor, dtype: torch.dtype | None) -> _Record:
        outputs = [envoy for site, envoy in self._places if site.at == "output"]
        inputs = [envoy for site, envoy in self._places if site.at == "input"]
        with torch.no_grad(), self._root.trace(input_ids=ids, use_cache=False) as tracer:
            # Two caches: one that keeps inputs and outputs has its keys in the order of entering, not of leaving.
            left = tracer.cache(modules=outputs, dtype=dtype)
            entered = tracer.cache(inputs, dtype=dtype, include_inputs=True, include_output=False)
        return _Record(left, entered)


class _Record:
    """What nnsight's caches kept of one forward pass."""

    def __init__(self, outputs: Any, inputs: Any) -> None:
        self._views = {"output": outputs, "input": inputs}
        self._order = {path.removeprefix(_ROOT): i for i, path in enumerate(outputs.keys())}

    def n_visits(self, site: Site) -> int:
        view, key = self._views[site.at], f"{_ROOT}{site.path}"
        return len(view[key]) if key in set(view.keys()) else 0

    def value(self, site: Site) -> Any:
        return getattr(self._views[site.at][f"{_ROOT}{site.path}"], site.at)

    def position(self, site: Site) -> float:
        """When it passes: outputs in their order, an input just before the first output from within its module."""
        if site.at == "output":
            return self._order[site.path]
        return min(i for path, i in self._order.items() if f"{path}.".startswith(f"{site.path}.")) - 0.5


def probe_sites(trunk: Trunk, sites: Sequence[Site], device: torch.device | str) -> tuple[list[Site], dict[str, int]]:
    """Run one tiny forward pass, which tells what the sites are before any time is spent on them.

    Args:
        trunk: as :class:`SiteReader` takes it.
        sites: in any order.
        device: where the model lies.

    Returns:
        The sites in the order in which they pass, and the width of each by name.

    Raises:
        SiteError: the pass fails; or names every site that is not passed exactly once, or gives no hidden states.
    """
    # The first block's output shows when its input passed.
    first = Site("block.0", f"{trunk.layers_path}.0", "output", 1)
    ids = torch.arange(_PROBE_LEN, device=device).repeat(_PROBE_ROWS, 1)
    reader = SiteReader(trunk, [*sites, first])
    try:
        passed = reader._record(ids, None)
    except Exception as error:
        raise SiteError(f"the trunk does not run on token ids alone: {type(error).__name__}: {error}") from error
    widths, faults = {}, []
    for site in sites:
        try:
            widths[site.name] = _probe_width(passed, site)
        except SiteError as error:
            faults.append(str(error))
    if faults:
        raise SiteError("; ".join(faults))
    return sorted(sites, key=passed.position), widths


def _probe_width(passed: _Record, site: Site) -> int:
    if (n_visits := passed.n_visits(site)) != 1:
        raise SiteError(f"site {site.name!r} is passed {n_visits} times in a forward pass, not once")
    return hidden_states(passed.value(site), n_rows=_PROBE_ROWS, seq_len=_PROBE_LEN, site=site.name).shape[-1]
