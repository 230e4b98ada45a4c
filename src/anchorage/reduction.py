"""What a tier keeps of each row's hidden states: all tokens, their mean or the last one. Never a pad."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def reduce_rows(values: Tensor, reduce: str, lengths: Sequence[int] | None = None) -> Tensor:
    """Reduce hidden states over the tokens of each row.

    Args:
        values: ``[rows, seq_len, width]``.
        reduce: ``none``, ``mean`` (taken in float32 at least) or ``last``.
        lengths: real tokens of each row, the first ones, at least 1 each; None means all of them.

    Returns:
        ``[rows, width]``; of ``none`` all tokens: ``[rows, seq_len, width]`` where ``lengths`` is None, else the real
        ones, row after row, ``[sum(lengths), width]``.
    """
    if lengths is None:
        if reduce == "mean":
            return values.float().mean(dim=1)
        return values[:, -1] if reduce == "last" else values
    # Row by row, so that a row gives the same bits whatever the others' lengths are.
    rows = [value[:length] for value, length in zip(values, lengths, strict=True)]
    if reduce == "mean":
        return torch.stack([row.float().mean(dim=0) for row in rows])
    return torch.stack([row[-1] for row in rows]) if reduce == "last" else torch.cat(rows)
