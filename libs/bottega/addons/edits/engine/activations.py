"""The activations that rows of edits read from recordings, and write to them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from bottega.model.rows import RowActivations


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
    """Keys and values of a block's self-attention, computed from recorded activations; [tokens, channels] each."""

    keys: Tensor
    values: Tensor
    unknown: int
    """Tokens without projections, because the recording does not determine theirs; as `TokenSet.bits`."""

    @property
    def size_bytes(self) -> int:
        """Bytes of both."""
        return self.keys.nbytes + self.values.nbytes


class KeptProjections(Protocol):
    """Projections of one recorded step, by the name of their block.

    They can be computed again from the recording, so they are kept only on devices where that is slow.
    """

    def get(self, name: str) -> Projections | None:
        """Return the projections of a block, or None."""
        ...

    def has_room(self, name: str, size_bytes: int) -> bool:
        """Return whether `put` would keep `size_bytes` for a block."""
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
class EditActivations:
    """The activations that a row of an edit reads from a recording, and those that it writes to one."""

    computed: Tensor | None = None
    """bool [latent height, latent width], where blocks are computed; None to compute all."""
    share: float = 1.0
    """Share of the tokens that are computed, at the finest level of attention."""
    recorded: RecordedActivations | None = None
    """Recording that supplies the outputs of tokens that are not computed; None if all are computed."""
    sink: StepActivations | None = None
    """Recording that the row's outputs are written to; None to record nothing."""

    @property
    def reads(self) -> bool:
        return self.recorded is not None

    @property
    def waited_s(self) -> float:
        return 0.0 if self.recorded is None else self.recorded.waited_s


def edit_activations(activations: RowActivations | None) -> EditActivations | None:
    """Return a row's activations as EditActivations, or None if the row does not belong to an edit."""
    return activations if isinstance(activations, EditActivations) else None
