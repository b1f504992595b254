"""The rows of a forward, and the key that the rows of one group have in common.

A row is the conditional or the unconditional half of one request at its current step. It contains everything that a
turn needs to know about the request.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

SetKey = tuple[tuple[str, float], ...]
"""Digests and scales of LoRAs, in the order in which their products are summed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """The share of one LoRA in the factors of a module."""

    rank: int
    scale: float
    """Strength times alpha / rank."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Factors:
    """The low-rank factors that the LoRAs of one request add to a module's weight: up @ down."""

    down: Tensor
    """[rank, in] or, for a convolution, [rank, in, kernel, kernel]."""
    up: Tensor
    """[out, rank]."""
    terms: tuple[Term, ...] = ()
    """LoRAs whose products are computed one by one, in this order; `up` does not contain their scales.

    Empty: `up` contains all scales, and the factors are one product.
    """

    @property
    def rank(self) -> int:
        """Rank of the product."""
        return int(self.up.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class LoraSet:
    """The LoRAs of a request, as factors on the model's device and in its data type."""

    key: SetKey
    components: Mapping[str, Mapping[str, Factors]] = field(repr=False)
    """Factors by component and module path; the set owns the tensors."""

    def of(self, component: str) -> Mapping[str, Factors]:
        """Return the factors of one component by module path; empty if no LoRA touches it."""
        return self.components.get(component, {})


class Half(Enum):
    """The two halves of classifier-free guidance, in the order in which Diffusers stacks them."""

    UNCONDITIONAL = 0
    CONDITIONAL = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Embeds:
    """The conditions of one half."""

    prompt: Tensor
    """[tokens, features]."""
    pooled: Tensor
    """[features]."""
    time_ids: Tensor
    """[6], SDXL's size and crop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupKey:
    """The properties that rows must share to run in one forward."""

    shape: tuple[int, int, int]
    """Shape of the latent, [channels, height, width]."""
    tokens: int
    """Length of the prompt embeddings."""
    dtype: torch.dtype
    weights: SetKey = ()
    """The LoRA set that is patched into the weights; empty for unchanged weights. Rows whose LoRAs are applied beside
    the weights need unchanged ones, so that they share groups with rows without LoRAs.
    """


class StepActivations(Protocol):
    """Outputs of blocks at one timestep, for one row, by the path of their module.

    Tensors are float16: tokens [tokens, channels] in row-major order, or feature maps [channels, height, width].
    """

    def get(self, name: str) -> Tensor | None:
        """Return a block's output on the model's device, or None if it was not recorded."""
        ...

    def put(self, name: str, output: Tensor) -> None:
        """Keep a copy of an output, if there is room for it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Projections:
    """Keys and values of a block's self-attention that follow from recorded activations, [tokens, channels] each."""

    keys: Tensor
    values: Tensor
    unknown: int
    """Tokens whose projections do not follow from the recording, as `TokenSet.bits`."""

    @property
    def size_bytes(self) -> int:
        """Bytes of both."""
        return self.keys.nbytes + self.values.nbytes


class KeptProjections(Protocol):
    """Projections of one recorded step, by the name of their block.

    They follow from the recording, and are kept only where memory is cheaper than computing them again.
    """

    def get(self, name: str) -> Projections | None:
        """Return the projections of a block, or None."""
        ...

    def has_room(self, name: str, size_bytes: int) -> bool:
        """Return whether `put` would keep so many bytes for a block."""
        ...

    def put(self, name: str, projections: Projections) -> None:
        """Keep projections, if there is room. They must not be changed from now on."""
        ...


class RecordedActivations(StepActivations, Protocol):
    """Recorded activations that a row reuses.

    `get` may wait for a pending load, and returns None for what has not come in time. It copies tensors to the row's
    device, so that each call may return another one.
    """

    def stored(self, name: str) -> Tensor | None:
        """Return the tensor that `get` copies from, the same for all steps and rows; None if it is not here."""
        ...

    @property
    def projections(self) -> KeptProjections | None:
        """Kept projections of the same step; None if none are kept."""
        ...

    @property
    def reused(self) -> Collection[str]:
        """Names of the outputs that the row has reused so far."""
        ...

    @property
    def waited_s(self) -> float:
        """Seconds that it has waited so far."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowActivations:
    """The activations that a row of an edit reads from a recording, and those that it writes to one."""

    computed: Tensor | None = None
    """bool [latent height, latent width], where blocks are computed; None to compute all."""
    share: float = 1.0
    """Share of the tokens that this is, at the finest level of attention."""
    recorded: RecordedActivations | None = None
    """Where the rest is read from; None if all is computed."""
    sink: StepActivations | None = None
    """Where outputs are written; None to keep none."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """A half of one request at one step."""

    owner: Hashable
    """The request that the row belongs to. Rows of one owner stay together."""
    step: int
    half: Half
    sample: Tensor
    """Scaled latent, [channels, height, width]."""
    timestep: Tensor
    """A scalar."""
    embeds: Embeds
    controls: tuple[Hashable, ...] = ()
    """Handles of the ControlNets that control this half at this step, in the request's order."""
    loras: LoraSet | None = None
    """Its LoRAs, whether they are patched into the weights or applied beside them."""
    activations: RowActivations | None = None
    """None for a row that is computed in full and not recorded."""
