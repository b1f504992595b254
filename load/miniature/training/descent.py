"""What the stages learn with: the optimizer step, the average of weights that follows, attention, and the device.

A step is determined by the state and its number: what is random in it is drawn from that. Random numbers are drawn on
the processor, so that they are the same everywhere.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from bottega.errors import ConfigError

# What a processor calls its bfloat16. On one without it, torch computes in float32 with conversions around every
# operator: many times slower.
_BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16")

Loss = Callable[[torch.Generator, random.Random], torch.Tensor]
"""Makes a batch of these random numbers, and returns how wrong the networks are about it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Learner:
    """Parameters that learn at one rate."""

    parameters: Sequence[torch.nn.Parameter]
    rate: float


class Average:
    """The moving average of weights that a training leaves behind instead of the last ones.

    The decay grows to `decay`, so that the first steps are soon forgotten.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], decay: float) -> None:
        self._live = list(parameters)
        self._kept = [parameter.detach().clone() for parameter in self._live]
        self._decay = decay

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Take the weights of a step in."""
        decay = min(self._decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._kept, [parameter.detach() for parameter in self._live], 1 - decay)

    @torch.no_grad()
    def apply(self) -> None:
        """Put the averaged weights into the parameters."""
        for parameter, kept in zip(self._live, self._kept, strict=True):
            parameter.copy_(kept)

    @torch.no_grad()
    def exchange(self) -> None:
        """Put the averaged weights into the parameters and keep theirs, until this is called again."""
        for parameter, kept in zip(self._live, self._kept, strict=True):
            last = parameter.clone()
            parameter.copy_(kept)
            kept.copy_(last)

    def state(self) -> list[torch.Tensor]:
        """Return the averaged weights."""
        return self._kept

    @torch.no_grad()
    def load_state(self, state: list[torch.Tensor]) -> None:
        """Take a state over."""
        for kept, tensor in zip(self._kept, state, strict=True):
            kept.copy_(tensor)


class Descent:
    """The optimizer step of a stage: its loss, gradients of bounded length, AdamW, and the average that follows.

    Args:
        learners: Parameters with their rates.
        decay: Of the average that is left behind instead of the last weights; None leaves those.
        seed: Of what is random in a step.
        weight_decay: AdamW's.
        betas: AdamW's.
    """

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
        """Take step `number` (from 0) at `rate` times the learners' rates; return the loss."""
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
        """Leave the averaged weights in the networks; no step follows."""
        if self._average is not None:
            self._average.apply()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Have the averaged weights in the networks until the block ends; no step may be taken in it."""
        exchange = self._average.exchange if self._average is not None else lambda: None
        exchange()
        try:
            yield
        finally:
            exchange()

    def state(self) -> dict[str, Any]:
        """Return the optimizer's moments and the averaged weights. The weights themselves are the stage's."""
        state = {"optimizer": self._optimizer.state_dict()}
        return state if self._average is None else {"average": self._average.state(), **state}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take a state over; a stage's own may be beside it."""
        if self._average is not None:
            self._average.load_state(state["average"])
        self._optimizer.load_state_dict(state["optimizer"])


class DescentStage(ABC):
    """A stage of training.loop: its loss, and the weights that it changes.

    Args:
        name: The stage's.
        descent: Of these weights.
    """

    draw_options: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Options of the stock pipeline that draws with the networks as they are in training."""

    def __init__(self, name: str, descent: Descent) -> None:
        self.name = name
        self._descent = descent

    def step(self, number: int, rate: float) -> float:
        """Learn from one batch; return the loss."""
        return self._descent.step(number, rate, self._loss)

    def finish(self) -> None:
        """Leave the averaged weights in the networks."""
        self._descent.finish()

    def averaged(self) -> AbstractContextManager[None]:
        """Have the averaged weights in the networks until the block ends; no step may be taken in it."""
        return self._descent.averaged()

    def state(self) -> dict[str, Any]:
        """Return weights, their average, and the optimizer's moments."""
        return {**self._weights(), **self._descent.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take a state over."""
        self._load_weights(state)
        self._descent.load_state(state)

    @abstractmethod
    def _loss(self, generator: torch.Generator, rng: random.Random) -> torch.Tensor: ...

    @abstractmethod
    def _weights(self) -> dict[str, Any]: ...

    @abstractmethod
    def _load_weights(self, state: dict[str, Any]) -> None: ...


class PlainAttention:
    """An attention processor of Diffusers, for blocks of SDXL's kind: no masks, no group norm, no spatial inputs.

    PyTorch's fused kernel takes four times as long backwards on a processor. This is the same function up to rounding.
    """

    def __call__(
        self, attn: Any, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None = None, **_: Any
    ) -> torch.Tensor:
        """Compute the attention.

        Args:
            attn: The block.
            hidden_states: (rows, elements, channels).
            encoder_hidden_states: (rows, tokens, channels), or none.
        """
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        rows, heads = hidden_states.shape[0], attn.heads
        query, key, value = (
            projected.reshape(rows, -1, heads, projected.shape[-1] // heads).transpose(1, 2).flatten(0, 1)
            for projected in (attn.to_q(hidden_states), attn.to_k(context), attn.to_v(context))
        )
        scores = torch.bmm(query * attn.scale, key.transpose(1, 2))
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
        mixed = torch.bmm(weights, value).reshape(rows, heads, *query.shape[1:]).transpose(1, 2).flatten(2)
        out: torch.Tensor = attn.to_out[0](mixed)
        return out


def pick_device(name: str) -> torch.device:
    """Return the device auto, cpu or cuda. Raises ConfigError for a device that is not there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: PyTorch finds no CUDA device here; cpu or auto trains on the processor")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def half_precision(device: torch.device) -> AbstractContextManager[object]:
    """Compute in bfloat16 where that loses nothing, if the device can."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    if device.type == "cpu" and not any(torch.cpu.get_capabilities().get(name) for name in _BFLOAT16):
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)
