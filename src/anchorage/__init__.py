"""Anchorage: durable, verified caches of language-model activations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anchorage.errors import AnchorageError, IntegrityError

if TYPE_CHECKING:
    from anchorage.store.reader import Cache, open_cache

__version__ = "0.1.0"
__all__ = ["AnchorageError", "Cache", "IntegrityError", "__version__", "open_cache"]


def __getattr__(name: str) -> Any:
    """Import the reader, and torch with it, only when it is asked for: the Snakefile imports this package too."""
    if name in {"Cache", "open_cache"}:
        from anchorage.store import reader

        return getattr(reader, name)
    raise AttributeError(name)
