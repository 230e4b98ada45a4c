"""A toy training that uses every kind of state a resume must bring back: what the checkpoint tests train."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


class Data:
    """Shuffled samples, drawn in order, shuffled anew when they run out."""

    def __init__(self, *, n_samples: int, width: int, batch: int) -> None:
        self.n_samples, self.batch = n_samples, batch
        self.generator = torch.Generator().manual_seed(5)
        self.samples = torch.randn(n_samples, width, generator=self.generator)
        self.order, self.position = torch.randperm(n_samples, generator=self.generator), 0

    def draw(self) -> torch.Tensor:
        if self.position == self.n_samples:
            self.order, self.position = torch.randperm(self.n_samples, generator=self.generator), 0
        self.position += self.batch
        return self.samples[self.order[self.position - self.batch : self.position]]

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "position": self.position, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.position = state["order"], state["position"]
        self.generator.set_state(state["generator"])


def train_step(training: dict[str, Any]) -> None:
    """One step, with noise of Python's and NumPy's global generators; the model's dropout takes torch's."""
    batch = training["data"].draw() * random.uniform(0.5, 1.5) + float(np.random.normal()) * 0.1
    loss = (training["model"](batch) - batch).square().mean()
    training["optimizer"].zero_grad()
    loss.backward()
    training["optimizer"].step()
    if scheduler := training.get("scheduler"):
        plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        scheduler.step(*[loss.item()] if plateau else [])
