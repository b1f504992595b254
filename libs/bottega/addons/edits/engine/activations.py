"""The activations that batch rows of edits read from recordings, and write to them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from bottega.model.rows import RowActivations


class StepActivations(Protocol):
    """Outputs of blocks in one forward pass, for one row, by the path of their module.

    Tensors are float16: tokens [tokens, channels] in row-major order, or feature maps [channels, height, width].
    """

    def get(self, name: str) -> Tensor | None:
        """Return a block's output on the model's device; None if it was not recorded."""
        ...

    def put(self, name: str, output: Tensor) -> None:
        """Store a copy of an output, if there is enough memory for it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Projections:
    """Keys and values of a block's self-attention, computed from recorded activations; [tokens, channels] each."""

    keys: Tensor
    values: Tensor
    unknown: int
    """Set of tokens whose projections the recording does not determine, in the format of `TokenSet.bits`."""

    @property
    def size_bytes(self) -> int:
        """Bytes of keys and values together."""
        return self.keys.nbytes + self.values.nbytes


class KeptProjections(Protocol):
    """Cached projections of one recorded step, by the name of their attention.

    They can be computed again from the recording, so they are cached only on devices where that is slow.
    """

    def get(self, name: str) -> Projections | None:
        """Return the projections of an attention; None if they are not cached."""
        ...

    def has_room(self, sizes_bytes: Mapping[str, int]) -> bool:
        """Return whether `put` would accept projections of these sizes, by their names."""
        ...

    def put(self, projections: Mapping[str, Projections]) -> None:
        """Cache the projections of one block by their names: all, or none if there is too little memory.

        They must not be changed from now on.
        """
        ...


class RecordedActivations(StepActivations, Protocol):
    """Recorded activations that a row reuses.

    `get` may wait for a pending load, and returns None for activations that did not arrive in time. It copies tensors
    to the row's device, so that each call may return another tensor.
    """

    def stored(self, name: str) -> Tensor | None:
        """Return the tensor that `get` copies from, the same for all steps and rows; None if it is not loaded."""
        ...

    @property
    def projections(self) -> KeptProjections | None:
        """Cached projections of the same step; None if they are not cached on this device."""
        ...

    @property
    def reused(self) -> Collection[str]:
        """Names of the outputs that the row has reused so far."""
        ...

    @property
    def waited_s(self) -> float:
        """Seconds that the row has waited for loads so far."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EditActivations:
    """The activations that a row of an edit reads from a recording, and those that it records."""

    computed: Tensor | None = None
    """Latent elements that are computed, bool [latent height, latent width]; None for all."""
    share: float = 1.0
    """Share of the tokens that are computed, at the finest attention level."""
    recorded: RecordedActivations | None = None
    """Recording with the outputs of the tokens that are not computed; None if all are computed."""
    sink: StepActivations | None = None
    """Recording to which the row's outputs are written; None to record nothing."""

    @property
    def reads(self) -> bool:
        return self.recorded is not None

    @property
    def waited_s(self) -> float:
        return 0.0 if self.recorded is None else self.recorded.waited_s


def edit_activations(activations: RowActivations | None) -> EditActivations | None:
    """Return a row's activations as EditActivations; None if the row does not belong to an edit."""
    return activations if isinstance(activations, EditActivations) else None
