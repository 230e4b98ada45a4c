"""The probe of one site, trained by Adam on rows streamed from the cache: for more tokens than memory holds.

A step takes the chosen tokens of one block of neighbouring rows. The blocks' order is drawn anew for each pass from
seed and pass number, so the step number alone is the position in the data. Training state is checkpointed
(:mod:`anchorage.checkpoint`): killed at any moment, the same call goes on, and ends with the same bits.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from anchorage.checkpoint import Checkpointer
from anchorage.digest import digest_bytes, digest_value
from anchorage.probe.design import Design
from anchorage.probe.labels import task_digest
from anchorage.probe.tokenstream import TokenStream
from anchorage.store.reader import Cache

_BLOCK_ROWS = 32
_MIN_STEPS, _MIN_PASSES = 2000, 3
_SAVE_EVERY = 200
_LEARNING_RATE = 1e-2  # falls linearly to 0
_PENALTY = 1e-3  # as of the full-batch solver: half the squared norm of the weights


class Probe(nn.Module):
    """Standardisation by fixed statistics, then two linear heads: the probe's, and that of its shuffled control."""

    mean: torch.Tensor
    scale: torch.Tensor

    def __init__(self, width: int, n_classes: int) -> None:
        super().__init__()
        self.n_outputs = 1 if n_classes == 2 else n_classes
        self.heads = nn.Linear(width, 2 * self.n_outputs)
        nn.init.zeros_(self.heads.weight)
        nn.init.zeros_(self.heads.bias)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("scale", torch.zeros(width))  # 0 until measured

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores ``[tokens, outputs]`` of both heads, for values ``[tokens, width]``."""
        probe, control = self.heads((values - self.mean) / self.scale).split(self.n_outputs, dim=1)
        return probe, control


def fit_adam(
    cache: Cache, tier: str, *, site: str, design: Design, seed: int, folder: Path, log: Callable[[str], object]
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Fit the probe of a site and its control on shuffled labels.

    Args:
        cache, tier, site: what to read.
        design: the task's tokens.
        seed: of the order of the blocks.
        folder: for the checkpoints of this task and site; those of another design or code are removed.
        log: takes a line of text.

    Returns:
        Test scores ``[test tokens, outputs]`` of both, and facts: penalty, penalty_at_end (None: no other is tried),
        n_iterations (steps), converged (None: a stream has no criterion, it ends after a stated number of steps).

    Raises:
        AnchorageError: a value is not finite, or another process trains in the folder.
        SystemExit: SIGTERM came; the state is saved.
    """
    stream, test = (
        TokenStream(cache, tier, site=site, side=side, block_rows=_BLOCK_ROWS) for side in (design.train, design.test)
    )
    n_steps = max(_MIN_STEPS, _MIN_PASSES * stream.n_blocks)
    identity = _identity(cache, tier, site=site, design=design) | {"seed": seed, "n_steps": n_steps}
    place = folder / digest_value(identity)
    for other in folder.glob("[0-9a-f]" * len(place.name)):
        if other != place:
            shutil.rmtree(other)
    probe = Probe(stream.block(0)[0].shape[1], len(design.classes))
    optimizer = torch.optim.Adam(probe.heads.parameters(), lr=_LEARNING_RATE)
    state = {"probe": probe, "optimizer": optimizer}
    with Checkpointer(place, state, every=_SAVE_EVERY, identity=identity, log=log) as checkpoints:
        if not probe.scale.any():
            _measure(probe, stream)
        steps = checkpoints.steps(n_steps)
        for step in tqdm(steps, f"{design.task} {site}", n_steps, initial=checkpoints.resumed, disable=None):
            passes, turn = divmod(step, stream.n_blocks)
            order = np.random.default_rng([seed, passes]).permutation(stream.n_blocks)
            optimizer.param_groups[0]["lr"] = _LEARNING_RATE * (1 - step / n_steps)
            _step(probe, optimizer, stream.block(int(order[turn])))
    with torch.no_grad():
        scores, control = zip(*(probe(values) for values, _, _ in test.blocks()), strict=True)
    facts = {"penalty": _PENALTY, "penalty_at_end": None, "n_iterations": n_steps, "converged": None}
    return torch.cat(scores), torch.cat(control), facts


def _identity(cache: Cache, tier: str, *, site: str, design: Design) -> dict[str, Any]:
    """What a training is of: the data, the tokens chosen from it, and the code. The key does not hold the text."""
    shards = cache.manifest.shards
    train = np.stack([design.train.rows, design.train.positions, design.train.labels, design.train.shuffled])
    return {
        "key": cache.key,
        "text": digest_value([shard.tiers[tier].tokens_digest for shard in shards if tier in shard.tiers]),
        "tier": tier,
        "task": design.task,
        "site": site,
        "tokens": digest_bytes(train.tobytes()),
        "code": task_digest(design.task),
    }


def _measure(probe: Probe, stream: TokenStream) -> None:
    """Set mean and scale of the training tokens, in one pass of the stream, summed in float64."""
    n_tokens, sums, squares = 0, torch.zeros(len(probe.mean)).double(), torch.zeros(len(probe.mean)).double()
    for values, _, _ in stream.blocks():
        n_tokens += len(values)
        sums += values.double().sum(0)
        squares += values.double().square().sum(0)
    mean = sums / n_tokens
    deviation = (squares / n_tokens - mean**2).clamp_min(0).sqrt()
    probe.mean.copy_(mean)
    # A constant dimension is brought to 0; rounding leaves it a trace of a deviation.
    probe.scale.copy_(torch.where(deviation > 1e-6 * mean.abs(), deviation, torch.inf))


def _step(
    probe: Probe, optimizer: torch.optim.Optimizer, block: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> None:
    values, *labels = block
    loss = _PENALTY / 2 * probe.heads.weight.square().sum()
    for scores, label in zip(probe(values), labels, strict=True):
        if probe.n_outputs == 1:
            loss = loss + nn.functional.binary_cross_entropy_with_logits(scores[:, 0], label.float())
        else:
            loss = loss + nn.functional.cross_entropy(scores, label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
