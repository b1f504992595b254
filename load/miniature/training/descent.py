"""The optimizer step of every stage: its loss, gradients of bounded length, AdamW, and the average that follows.

A step is determined by the state and its number: what is random in it is drawn from that.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from load.miniature.training.average import Average

Loss = Callable[[torch.Generator, random.Random], torch.Tensor]
"""Makes a batch of these random numbers, and says how wrong the networks are about it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Learner:
    """Parameters that learn at one rate."""

    parameters: Sequence[torch.nn.Parameter]
    rate: float


class Descent:
    """decay: of the average that is left behind instead of the last weights; None leaves those."""

    def __init__(
        self,
        learners: Sequence[Learner],
        *,
        decay: float | None,
        seed: int,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        self._learners, self._seed = learners, seed
        self._parameters = [parameter for learner in learners for parameter in learner.parameters]
        groups = [{"params": list(learner.parameters), "lr": learner.rate} for learner in learners]
        self._optimizer = torch.optim.AdamW(groups, weight_decay=weight_decay, betas=betas, fused=True)
        self._average = Average(self._parameters, decay) if decay is not None else None

    def step(self, number: int, rate: float, loss: Loss) -> float:
        """Step `number` (from 0) at `rate` times the learners' rates; returns the loss."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + number)
        for group, learner in zip(self._optimizer.param_groups, self._learners, strict=True):
            group["lr"] = learner.rate * rate
        found = loss(generator, random.Random(number))
        self._optimizer.zero_grad()
        torch.autograd.backward(found)
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        if self._average is not None:
            self._average.follow(number)
        return float(found.detach())

    def finish(self) -> None:
        """Leaves the averaged weights in the networks; no step follows."""
        if self._average is not None:
            self._average.apply()

    def state(self) -> dict[str, Any]:
        """The optimizer's moments and the averaged weights. The weights themselves are the stage's."""
        state = {"optimizer": self._optimizer.state_dict()}
        return state if self._average is None else {"average": self._average.state(), **state}

    def load_state(self, state: dict[str, Any]) -> None:
        """The reverse; a stage's own state may be beside it."""
        if self._average is not None:
            self._average.load_state(state["average"])
        self._optimizer.load_state_dict(state["optimizer"])
