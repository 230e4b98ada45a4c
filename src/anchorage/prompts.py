"""Prompts of uneven length from the run's own corpus, and padded batches of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from anchorage.plan import Plan

PAD_ID = 0  # every vocabulary has it, so that the table does not depend on what a tokenizer calls a pad
N_PROMPTS = 12
MIN_TOKENS = 3


@dataclass(frozen=True)
class Prompt:
    """The first tokens of a row of the corpus.

    Args:
        row: the row's number.
        ids: token ids int64 ``[length]``.
    """

    row: int
    ids: Tensor


@dataclass(frozen=True)
class Batch:
    """Prompts padded to the length of the longest.

    Args:
        prompts: in the order of the batch.
        side: left or right: where the pads are.
        ids, attention_mask: int64 ``[prompts, longest]``.
        position_ids: likewise; None leaves them to the model.
        real: where each prompt's tokens are.
    """

    prompts: Sequence[Prompt]
    side: str
    ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor | None
    real: list[slice]

    @property
    def given(self) -> str:
        """What the table says of position ids."""
        return "none" if self.position_ids is None else "explicit"


def draw_prompts(plan: Plan) -> list[Prompt]:
    """A seeded sample of rows, cut to lengths spread geometrically from 3 tokens to a whole row, shortest first.

    A row that has fewer real tokens than its turn asks for is taken whole.
    """
    n_rows, seq_len = plan.layout.n_rows, plan.corpus.seq_len
    lengths = plan.corpus.lengths(0, n_rows)
    rows = np.random.default_rng(plan.settings.seed).choice(n_rows, min(N_PROMPTS, n_rows), replace=False)
    rows = rows[np.argsort(lengths[rows], kind="stable")]
    # Turned round, so that a single prompt is a whole row.
    wanted = np.geomspace(seq_len, min(MIN_TOKENS, seq_len), len(rows)).round().astype(int)[::-1]
    ids = [plan.corpus.rows(row, row + 1)[0, : min(n, lengths[row])] for row, n in zip(rows, wanted, strict=True)]
    return [Prompt(int(row), torch.from_numpy(some.astype(np.int64))) for row, some in zip(rows, ids, strict=True)]


def pad_prompts(prompts: Sequence[Prompt], side: str, *, explicit: bool) -> Batch:
    """Put prompts together in one batch, with pads on one side.

    Args:
        prompts: in the order of the batch.
        side: left or right.
        explicit: whether the batch says which position each token has: a prompt's are counted from 0, pads have 0.
    """
    longest = max(len(prompt.ids) for prompt in prompts)
    starts = [longest - len(prompt.ids) if side == "left" else 0 for prompt in prompts]
    real = [slice(start, start + len(prompt.ids)) for start, prompt in zip(starts, prompts, strict=True)]
    ids = torch.full((len(prompts), longest), PAD_ID)
    attention_mask, position_ids = torch.zeros_like(ids), torch.zeros_like(ids)
    for index, (prompt, tokens) in enumerate(zip(prompts, real, strict=True)):
        ids[index, tokens] = prompt.ids
        attention_mask[index, tokens] = 1
        position_ids[index, tokens] = torch.arange(len(prompt.ids))
    return Batch(prompts, side, ids, attention_mask, position_ids if explicit else None, real)
