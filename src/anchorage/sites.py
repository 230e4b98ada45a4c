"""Stable names of places in a model: string work, without a model.

The names are the same for every architecture. ``embed`` is what block 0 receives; ``attn.{i}``, ``mlp.{i}`` and
``block.{i}`` are what the attention, the feed-forward and the whole of block ``i`` hand over: the module's own output,
*not* always what it adds to the residual stream (Gemma 2 normalises in between, BLOOM adds within the module). Any
other module inside the trunk has its path as name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from anchorage.errors import SiteError, did_you_mean

_LAYER_KINDS = ("attn", "mlp", "block")
_KINDS = ("embed", *_LAYER_KINDS)
_GLOB_CHARS = set("*?[")


def stable_names(n_layers: int) -> list[str]:
    """All stable site names of a model with so many blocks, in running order."""
    return _names_of(range(n_layers))


def _names_of(layers: Iterable[int]) -> list[str]:
    return ["embed", *(f"{kind}.{i}" for i in layers for kind in _LAYER_KINDS)]


def expand_sites(patterns: Sequence[str], n_layers: int | None) -> list[str]:
    """Turn site names, globs over the stable names, and raw module paths into names; no model is needed.

    Args:
        patterns: as in the configuration, such as ``["embed", "block.*", "model.layers.3.mlp.act_fn"]``.
        n_layers: the model's number of blocks; None is not known: any number will do then, and there can be no globs.

    Returns:
        Names without duplicates: the stable ones in running order, then the raw paths as they were given. Whether a raw
        path exists is *not* checked here; :func:`anchorage.trunk.find_sites` does.

    Raises:
        SiteError: names every unknown site and every glob that matches nothing.
    """
    stable = _names_of(_numbers(patterns) if n_layers is None else range(n_layers))
    wanted: set[str] = set()
    raw: dict[str, None] = {}
    faults = []
    for pattern in patterns:
        if matched := _match(pattern, stable):
            wanted.update(matched)
        elif is_glob(pattern):
            faults.append(f"{pattern!r} matches no stable site")
        elif _looks_stable(pattern):
            faults.append(f"unknown site {pattern!r}{did_you_mean(pattern, stable)}")
        else:
            raw[pattern] = None
    if faults:
        raise SiteError(explain_faults(faults, n_layers))
    return [name for name in stable if name in wanted] + list(raw)


def _numbers(names: Sequence[str]) -> list[int]:
    """All numbers in some names, in order."""
    return sorted({int(word) for name in names for word in name.split(".") if word.isdecimal()})


def is_glob(pattern: str) -> bool:
    """Whether a pattern can stand for several names."""
    return bool(_GLOB_CHARS & set(pattern))


def _match(pattern: str, stable: Sequence[str]) -> list[str]:
    if is_glob(pattern):
        return [name for name in stable if fnmatchcase(name, pattern)]
    return [pattern] if pattern in stable else []


def _looks_stable(name: str) -> bool:
    """Whether a name that is not stable is a misspelt one (``blok.3``, ``attn.x``) and no module path (``h.3.mlp``)."""
    head, _, rest = name.partition(".")
    return not rest or head in _KINDS or (rest.lstrip("-").isdigit() and bool(did_you_mean(head, _KINDS)))


def explain_faults(faults: Sequence[str], n_layers: int | None) -> str:
    """One message for several faults of site names, with what would be right."""
    ranges = (f"{kind}.{{i}}" if n_layers is None else f"{kind}.0 to {kind}.{n_layers - 1}" for kind in _LAYER_KINDS)
    known = ", ".join(ranges)
    return (
        f"{'; '.join(faults)} (sites are embed, {known}, globs over these, and paths of modules inside the trunk, "
        "with a dot, such as model.layers.0.mlp; the language-model head is not run)"
    )
