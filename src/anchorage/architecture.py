"""Where a transformers model keeps its trunk and its blocks: one answer for many architectures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from anchorage.errors import SiteError

# What transformers calls these sub-modules of a block. Where the feed-forward is no module (OPT), fc2 is its last map.
_ATTN_NAMES = ("attn", "self_attn", "attention", "self_attention")
_MLP_NAMES = ("mlp", "feed_forward", "ffn", "fc2")


@dataclass(frozen=True, eq=False)
class Trunk:
    """A model without its head. Made by :func:`find_trunk`.

    Args:
        module: the trunk itself; called as ``module(input_ids=..., use_cache=False)``.
        layers: its list of blocks, which :func:`trimmed` shortens for a while.
        n_layers: the number of blocks of the whole list.
        prefix: the trunk's path in the full model (``transformer``).
        layers_path: the list's path relative to the trunk (``h``, ``decoder.layers``).
        attn_name, mlp_name: the sub-modules of a block.
        paths: every module of the whole trunk, by path relative to it; a shared module is there once.
        outside: the full model's modules that are not in the trunk (``lm_head``).
    """

    module: nn.Module
    layers: nn.ModuleList
    n_layers: int
    prefix: str
    layers_path: str
    attn_name: str
    mlp_name: str
    paths: frozenset[str]
    outside: frozenset[str]


def find_trunk(hf_model: Any) -> Trunk:
    """Find the trunk, its blocks and their parts in a transformers causal language model.

    Args:
        hf_model: a ``PreTrainedModel``. Its weights are not looked at, so the meta device will do; it is not kept.

    Raises:
        SiteError: the architecture has no single list of blocks with an attention and a feed-forward module.
    """
    decoder = hf_model.get_decoder()
    # Llama 4's text model names a base model that it has not, and is then its own base model, head and all.
    module = hf_model.base_model if hf_model.base_model is not hf_model else getattr(hf_model, "model", hf_model)
    full = {found: path for path, found in hf_model.named_modules()}
    inside = {found: path for path, found in module.named_modules()}
    n_layers = hf_model.config.get_text_config().num_hidden_layers
    # Within the decoder only: a vision tower may have as many layers.
    found = _find_layers(decoder if decoder in inside else module, n_layers)
    if module is hf_model or len(found) != 1:
        raise SiteError(
            f"{type(hf_model).__name__} is not supported: it must have one list of {n_layers} blocks, each with an "
            f"attention ({', '.join(_ATTN_NAMES)}) and a feed-forward ({', '.join(_MLP_NAMES)}) module; "
            f"{len(found)} such lists were found."
        )
    layers, attn_name, mlp_name = found[0]
    return Trunk(
        module=module,
        layers=layers,
        n_layers=n_layers,
        prefix=full[module],
        layers_path=inside[layers],
        attn_name=attn_name,
        mlp_name=mlp_name,
        paths=frozenset(inside.values()) - {""},
        outside=frozenset(path for found, path in full.items() if found not in inside) - {""},
    )


def _find_layers(module: nn.Module, n_layers: int) -> list[tuple[nn.ModuleList, str, str]]:
    lists = [found for found in module.modules() if isinstance(found, nn.ModuleList) and len(found) == n_layers > 0]
    parts = [(layers, _part(layers[0], _ATTN_NAMES), _part(layers[0], _MLP_NAMES)) for layers in lists]
    return [(layers, attn, mlp) for layers, attn, mlp in parts if attn and mlp]


def _part(block: nn.Module, names: tuple[str, ...]) -> str | None:
    children = dict(block.named_children())
    return next((name for name in names if name in children), None)
