"""What shares a forward: rows, and the key that the rows of one group have in common.

A row is one request's conditional or unconditional half at its current step. This file fixes what
a turn sees of a request.
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
    """One half's conditions.

    prompt: [tokens, features]; pooled: [features]; time_ids: [6], SDXL's size and crop.
    """

    prompt: Tensor
    pooled: Tensor
    time_ids: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupKey:
    """What rows must share in one forward.

    shape: latent [channels, height, width]; tokens: length of the prompt embeddings;
    weights: the LoRA set patched into the weights; empty for untouched weights. Rows whose LoRAs go
    by the side path need untouched weights, so they share groups with rows that have none.
    """

    shape: tuple[int, int, int]
    tokens: int
    dtype: torch.dtype
    weights: SetKey = ()


class StepActivations(Protocol):
    """What blocks put out at one timestep and in one half, by the path of their module, for one row.

    Tensors are float16: tokens [tokens, channels] in row-major order, feature maps [channels, height, width].
    """

    def get(self, name: str) -> Tensor | None:
        """What a block put out, on the model's device; None where that was not recorded."""
        ...

    def put(self, name: str, output: Tensor) -> None:
        """Keeps a copy of it, or of what there is room for."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Projections:
    """Keys and values of a block's self-attention, [tokens, channels] each, as they follow from what was recorded.

    unknown: those of which they do not, as TokenSet.bits.
    """

    keys: Tensor
    values: Tensor
    unknown: int

    @property
    def size_bytes(self) -> int:
        """Of both."""
        return self.keys.nbytes + self.values.nbytes


class KeptProjections(Protocol):
    """Projections of one recorded step, by the name of their block. They are a recording's shadow: worth keeping where
    memory is cheaper than computing them again, and never needed."""

    def get(self, name: str) -> Projections | None:
        """Those of a block."""
        ...

    def has_room(self, name: str, size_bytes: int) -> bool:
        """Whether `put` would keep so much of a block."""
        ...

    def put(self, name: str, projections: Projections) -> None:
        """Keeps them, where there is room; nobody writes to them from now on."""
        ...


class RecordedActivations(StepActivations, Protocol):
    """Those that a row takes from. `get` may wait for what is on its way; None then is what has not come in time.

    It brings tensors to the row's device, so that each call may return another one.
    """

    def stored(self, name: str) -> Tensor | None:
        """Where `get` has it from: one tensor for all steps and rows that take it. None for what is not here."""
        ...

    @property
    def projections(self) -> KeptProjections | None:
        """Of the same step; None where none are kept."""
        ...

    @property
    def reused(self) -> Collection[str]:
        """Names that the row has taken so far."""
        ...

    @property
    def waited_s(self) -> float:
        """That it has waited so far."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowActivations:
    """What a row of an edit takes from a recording, and gives to one.

    computed: bool [latent height, latent width], where blocks are computed; None computes all. share: that this is of
    the tokens at the finest level of attention.
    recorded: where the rest comes from; None where all is computed. sink: where outputs go; None keeps none.
    """

    computed: Tensor | None = None
    share: float = 1.0
    recorded: RecordedActivations | None = None
    sink: StepActivations | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """One half of one request at one step.

    owner: who the row belongs to; rows of one owner stay together.
    sample: the scaled latent [channels, height, width]; timestep: scalar.
    controls: the request's ControlNets that control this half at this step, in the request's order: handles
    of whoever provides the residuals.
    loras: its LoRAs, whether they are in the weights or go beside them.
    activations: of an edit; None for a row that is computed in full and recorded nowhere.
    """

    owner: Hashable
    step: int
    half: Half
    sample: Tensor
    timestep: Tensor
    embeds: Embeds
    controls: tuple[Hashable, ...] = ()
    loras: LoraSet | None = None
    activations: RowActivations | None = None
