"""One forward over a group of rows: blocks in order, residuals where they are due.

Rows whose residuals are late at the first barrier leave the forward; the others go on.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from bottega.diffusion.device.device import Device
from bottega.diffusion.device.pick import open_device
from bottega.diffusion.editing.masked.backbone import MaskedBackbone
from bottega.diffusion.editing.masked.packing import RowSpans
from bottega.diffusion.editing.masked.rows import MaskedActivations
from bottega.diffusion.engine.residuals import ResidualProvider
from bottega.diffusion.engine.times import ForwardClock, ForwardTimes
from bottega.diffusion.model.backbone import Activations, Backbone, Inputs
from bottega.diffusion.operations import Operations
from bottega.diffusion.rows import LoraSet, Row
from bottega.errors import Unavailable

# How long a forward waits for residuals when none of its rows can go on without them: for a server that is busy or
# slow. One that is dead or computes nothing is noticed sooner, over its link. Below stall_s, the time without a turn
# after which an engine counts as hung.
RESIDUAL_TIMEOUT_S = 90.0
# How long it waits at a later block for rows whose first residuals were in time: they are on their way, or their
# ControlNet has died, and the others should not pay for that with more than a turn or two.
STRAGGLER_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prediction:
    """What a forward made, or what the device will have made of it.

    noise: [channels, height, width] of every row that was not late. A row that is missing is to be asked for
    again, with all rows of its owner. times: see there; `seconds`, `waited_s` and `encoder_s` wait for them.
    blocks_reused: of rows with activations, how many transformer blocks took what is unmasked from the recording. A row
    with activations that has none of it was computed in full and recorded nowhere: this network, or a fixed number of
    rows, does not allow more. load_waits_s: of such rows, how long the forward waited for what was on its way from
    recordings; `seconds` is without it, too.
    """

    noise: dict[Row, Tensor]
    times: ForwardTimes
    blocks_reused: Mapping[Row, int] = field(default_factory=dict)
    load_waits_s: Mapping[Row, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.times.seconds

    @property
    def waited_s(self) -> float:
        return self.times.waited_s

    @property
    def encoder_s(self) -> float:
        return self.times.encoder_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Needed:
    """Residuals that the next block needs. patience_s: with rows that have none; clock: of the forward."""

    points: tuple[int, ...]
    patience_s: float
    clock: ForwardClock


class RowWeights(Protocol):
    """What makes the LoRAs of rows count in a forward, beside the weights."""

    def enter(self, sets: Sequence[LoraSet | None], spans: RowSpans | None = None) -> None:
        """A forward of rows with these sets follows, or goes on with them. Raises what an add-on raises.

        spans: where rows lie in each call of a layer; None where every call has them in dimension 0.
        """
        ...

    def leave(self) -> None:
        """The forward is over."""
        ...


class Denoiser:
    """Predicts noise for groups of rows.

    row_weights: makes their LoRAs count; None where none has some. residuals: where those of their ControlNets are.
    fixed_rows: every forward has so many rows, whatever comes, for results that are equal byte for byte; 0 is off.
    masked: runs the groups in which a row has activations; never with fixed_rows, under which masks would change bits.
    device: of the rows; without it, what they lie on says. operations: of the model, see Operations.
    """

    def __init__(
        self,
        backbone: Backbone,
        row_weights: RowWeights | None = None,
        residuals: ResidualProvider | None = None,
        *,
        fixed_rows: int = 0,
        masked: MaskedBackbone | None = None,
        device: Device | None = None,
        operations: Operations | None = None,
    ) -> None:
        self._backbone = backbone
        self._operations = operations or Operations()
        self._masked = None if fixed_rows else masked
        self._row_weights = row_weights
        self._residuals = residuals
        self._fixed_rows = fixed_rows
        self._device = device

    @torch.inference_mode()
    def predict(self, rows: Sequence[Row]) -> Prediction:
        """One forward; all rows share one GroupKey. Its order of rows is its own: those of one LoRA set side by side.

        Raises Unavailable when residuals do not come within RESIDUAL_TIMEOUT_S.
        """
        group = self._padded(rows)
        masked = self._masked if any(row.activations for row in group) else None
        inputs = stack(group, self._device)
        controlled = [row for row in group if row.controls]
        clock = ForwardClock(self._device_of(group))
        if controlled:
            with clock.waiting():  # in this process, ControlNets run now
                self._provider().ask(controlled)
        backbone = masked or self._operations.backbone or self._backbone
        self._enter(group, backbone)
        try:
            activations = backbone.begin(inputs)
            group, late, prediction = self._run(group, backbone, activations, clock)
        finally:
            if self._row_weights is not None:
                self._row_weights.leave()
        noise = {row: predicted for row, predicted in zip(group, prediction, strict=True) if row.owner not in late}
        load_waits_s = _load_waits(rows)
        return Prediction(
            noise={row: noise[row] for row in rows if row in noise},
            times=clock.times(sum(load_waits_s.values())),
            blocks_reused=_reused(group, activations),
            load_waits_s=load_waits_s,
        )

    @torch.inference_mode()
    def ask_ahead(self, rows: Sequence[Row]) -> None:
        """These will be in a later forward: the ControlNets of those that have some may begin."""
        controlled = [row for row in rows if row.controls]
        if controlled:
            self._provider().ask_ahead(controlled)

    def _padded(self, rows: Sequence[Row]) -> list[Row]:
        """The rows, and as many without an owner as are missing."""
        blank = replace(rows[-1], owner=None, controls=(), loras=None, activations=None)
        return [*_by_set(rows), *[blank] * (self._fixed_rows - len(rows))]

    def _device_of(self, rows: Sequence[Row]) -> Device:
        return self._device or open_device(rows[0].sample.device)

    def _run(
        self, group: list[Row], backbone: Backbone, activations: Activations, clock: ForwardClock
    ) -> tuple[list[Row], set[Hashable], Tensor]:
        """The blocks. Returns the rows that went through, which of their owners were late, and the prediction."""
        late: set[Hashable] = set()
        patience_s = 0.0
        controlled = any(row.controls for row in group)
        clock.blocks_begin()
        for block in backbone.blocks:
            if block.needs and controlled:
                clock.residuals_needed()
                late |= self._late(group, late, _Needed(points=block.needs, patience_s=patience_s, clock=clock))
                patience_s = STRAGGLER_S
                if all(row.owner in late for row in group if row.owner is not None):
                    return group, late, activations.hidden  # nobody is left to go on for
                if late and not self._fixed_rows:
                    group = self._leave(group, late, activations)
                    self._enter(group, backbone)
                self._add_residuals(group, late, block.needs, activations)
            block.run(activations)
        return group, late, backbone.finish(activations)

    def _late(self, group: list[Row], gone: set[Hashable], needed: _Needed) -> set[Hashable]:
        """The owners that have a late row after some patience; longer only while that would be all of them.

        Those with a void row are not waited for. gone: owners that were late before.
        """
        provider = self._provider()
        owners = {row.owner for row in group if row.owner is not None} - gone
        began_s = time.monotonic()
        while True:
            controlled = [row for row in group if row.controls and row.owner not in gone]
            void = {row.owner for row in controlled if provider.is_void(row)}
            missing = [row for row in controlled if row.owner not in void and not provider.ready(row, needed.points)]
            late = {row.owner for row in missing}
            waited_s = time.monotonic() - began_s
            left_s = (RESIDUAL_TIMEOUT_S if late == owners - void else needed.patience_s) - waited_s
            if not late or (left_s <= 0 and late != owners - void):
                return late | void
            if left_s <= 0:
                raise Unavailable(f"no ControlNet answered within {RESIDUAL_TIMEOUT_S:g} s")
            with needed.clock.waiting():
                provider.wait(missing, needed.points, left_s)

    def _leave(self, group: list[Row], late: set[Hashable], activations: Activations) -> list[Row]:
        """Takes the rows of these owners out of the forward; returns the others."""
        kept = [index for index, row in enumerate(group) if row.owner not in late]
        activations.select(kept, self._device_of(group).to_device(torch.tensor(kept)))
        return [group[index] for index in kept]

    def _enter(self, group: Sequence[Row], backbone: Backbone) -> None:
        """Makes the LoRAs of these rows count in what the backbone runs next."""
        if self._row_weights is not None:
            spans = backbone.spans if isinstance(backbone, MaskedBackbone) else None
            self._row_weights.enter([row.loras for row in group], spans)

    def _add_residuals(
        self, group: list[Row], late: set[Hashable], points: tuple[int, ...], activations: Activations
    ) -> None:
        provider = self._provider()
        for index, row in enumerate(group):
            if not row.controls or row.owner in late:
                continue
            for point in points:
                # Summed first, in request order, and added once: Diffusers' order of sums.
                addends = provider.take(row, point)
                total = addends[0] if len(addends) == 1 else sum(addends[1:], start=addends[0])
                # Every block has read this tensor already: adding in place is seen by its taker alone.
                activations.points[point][index] += total

    def _provider(self) -> ResidualProvider:
        if self._residuals is None:
            raise Unavailable("this engine has no ControlNets")
        return self._residuals


def _by_set(rows: Sequence[Row]) -> list[Row]:
    """Rows of one LoRA set side by side, sets with equally many rows next to each other, rows without at the end."""
    counts = Counter(row.loras.key for row in rows if row.loras is not None)
    if not counts:
        return list(rows)
    return sorted(rows, key=lambda row: (-counts[row.loras.key], row.loras.key) if row.loras is not None else (1, ()))


def _reused(group: Sequence[Row], activations: Activations) -> dict[Row, int]:
    """By row of an edit, its transformer blocks that took what is unmasked from a recording."""
    if not isinstance(activations, MaskedActivations):
        return {}
    return {row: count for row, count in zip(group, activations.reused, strict=True) if row.activations is not None}


def _load_waits(rows: Sequence[Row]) -> dict[Row, float]:
    """By row that has waited for what was on its way from a recording."""
    recorded = ((row, row.activations.recorded) for row in rows if row.activations is not None)
    return {row: each.waited_s for row, each in recorded if each is not None and each.waited_s}


def stack(rows: Sequence[Row], device: Device | None = None) -> Inputs:
    """The inputs of one forward, row by row. device: of the rows; without it, what they lie on says."""
    device = device or open_device(rows[0].sample.device)
    return Inputs(
        sample=torch.stack([row.sample for row in rows]),
        timestep=device.to_device(torch.stack([row.timestep.float() for row in rows])),
        prompt_embeds=torch.stack([row.embeds.prompt for row in rows]),
        pooled_embeds=torch.stack([row.embeds.pooled for row in rows]),
        time_ids=torch.stack([row.embeds.time_ids for row in rows]),
        activations=[row.activations for row in rows],
        controlled=any(row.controls for row in rows),
        origins=[(row.embeds.prompt, row.loras.key if row.loras is not None else None) for row in rows],
    )
