"""One forward pass of a batch: the blocks in order, with ControlNets' residuals added where the UNet expects them.

Rows whose residuals are late at the first block that needs them leave the forward pass, and the others go on.
A `ResidualProvider` asks for the residuals and receives them.

Rows that reuse blocks of an earlier step (`StepCache`) leave after the first block, with their predictions.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from bottega.device.device import Device
from bottega.device.devices import open_device
from bottega.engine.times import ForwardClock, ForwardTimes
from bottega.errors import Unavailable
from bottega.model.backbone import Activations, Backbone, Inputs, RowSpans
from bottega.model.operations import Operations
from bottega.model.packed import MixedBackbone, PackedBackbone, PaddedBackbone
from bottega.model.rows import Embeds, LoraSet, Row, arranged
from bottega.model.step_cache import StepCacheMemory


class ResidualProvider(Protocol):
    """Provides ControlNets' residuals for rows with ControlNets, at points of the backbone (`Block.needs`).

    All calls come from the engine's thread.
    """

    def ask(self, rows: list[Row]) -> None:
        """Send the inputs of the ControlNets for these rows' step, and return at once.

        Called when a forward pass with such rows begins. A row that was late is sent again, at the same step.
        """
        ...

    def ask_ahead(self, rows: list[Row]) -> None:
        """Send the inputs of the ControlNets for rows of a later forward pass, and return at once.

        The ControlNets then compute while this engine does other work. Called after a forward pass, with the next steps
        of its requests. It may do nothing, because `ask` is called in any case.
        """
        ...

    def ready(self, row: Row, points: tuple[int, ...]) -> bool:
        """Return whether all residuals of a row at these points have arrived."""
        ...

    def wait(self, rows: list[Row], points: tuple[int, ...], timeout_s: float) -> None:
        """Wait until one of the rows is ready at these points, or its sender has died, or until the timeout.

        When this is called, no row is ready, and no sender has died.
        """
        ...

    def is_void(self, row: Row) -> bool:
        """Return whether the sender of a row's residuals has died.

        The residuals that the row got in this forward pass are then useless, and the row must leave it. Its step is
        sent again when its sessions are open at another sender, which may have to start them first.
        """
        ...

    def take(self, row: Row, point: int) -> Sequence[Tensor | None]:
        """Return a row's residuals at one point, scaled and in the order of `row.controls`.

        A residual is [channels, height, width] or [tokens, width]; None if a ControlNet has none at the point.
        """
        ...

    def is_shared(self, row: Row) -> bool:
        """Return whether a row's residuals were not computed alone.

        Then the ControlNet's forward pass had more or fewer rows than those of the row's owner in one session.
        """
        ...


# How long a forward pass waits for residuals if none of its rows can go on without them: a server may be busy or slow.
# A server that is dead or computes nothing is noticed sooner, over its link. Shorter than stall_s, the time without a
# turn after which an engine counts as hung.
RESIDUAL_TIMEOUT_S = 90.0
# How long it waits at the first block if that is the second one of the network, as in a transformer: nothing has hidden
# the ControlNet's first block by then, but its residual comes after about a block's time.
FIRST_RESIDUAL_S = 0.05
# How long it waits at all later blocks together for rows whose first residuals were in time, while other rows could go
# on. Their residuals are on their way, or their ControlNet has died, and the other rows should not pay for that with
# more than a turn or two.
STRAGGLER_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prediction:
    """The result of a forward pass. Reading `seconds`, `waited_s` or `encoder_s` waits for the device."""

    noise: Mapping[Row, Tensor]
    """Predicted noise, [channels, height, width], of each row that was not late.

    A missing row must be predicted again, with all rows of its owner.
    """
    times: ForwardTimes
    shared: frozenset[Hashable] = frozenset()
    """Owners whose rows, or whose ControlNets' rows, were not computed alone.

    They ran with rows of others, with padding, or without some of their own rows, so that sums may round differently.
    """
    reused: frozenset[Row] = frozenset()
    """Rows that reused all blocks but the first from an earlier step."""
    blocks: int = 0
    """Number of blocks of the network."""
    load_waits_s: Mapping[Row, float] = field(default_factory=dict)
    """Seconds for which the thread waited for recorded activations of a row. `seconds` does not include them."""

    @property
    def seconds(self) -> float:
        return self.times.seconds

    @property
    def waited_s(self) -> float:
        return self.times.waited_s

    @property
    def encoder_s(self) -> float:
        return self.times.encoder_s


class RowWeights(Protocol):
    """Applies the LoRAs of rows during a forward pass, without changing the weights."""

    def enter(self, sets: Sequence[LoraSet | None], spans: RowSpans | None = None) -> None:
        """Begin a forward pass of rows with these LoRAs, or continue it with fewer rows.

        Args:
            sets: The LoRAs of each row.
            spans: Where rows lie in each call of a layer; None if every call has them in dimension 0.

        Raises:
            BottegaError: The add-on cannot apply them.
        """
        ...

    def leave(self) -> None:
        """End the forward pass."""
        ...


class ForwardStrategy(Protocol):
    """An add-on's own way to run some batches, for example only where an edit's mask is."""

    def backbone_for(self, rows: Sequence[Row]) -> Backbone | None:
        """Return the backbone that runs this batch, or None to leave it to the model's own one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Network:
    """The backbone, LoRA weights, residuals and device that forward passes use."""

    backbone: Backbone
    packed: MixedBackbone | None = None
    """Runs batches of rows with several sizes; None if the network cannot."""
    row_weights: RowWeights | None = None
    """None if no row has LoRAs."""
    residuals: ResidualProvider | None = None
    """Provider of ControlNets' residuals; None if no row has ControlNets."""
    strategies: Sequence[ForwardStrategy] = ()
    """Asked in this order, unless `fixed_rows` is set: other backbones would change the last bits."""
    fixed_rows: int = 0
    """Number of rows to which every batch is padded, so that results are equal byte for byte; 0 is no padding."""
    device: Device | None = None
    """Device of the rows; if None, the one that their tensors are on."""
    operations: Operations = field(default_factory=Operations)
    step_caches: StepCacheMemory = field(default_factory=StepCacheMemory)
    """Bounds what its rows keep of their steps."""

    @property
    def residual_provider(self) -> ResidualProvider:
        """The provider of residuals. Raise Unavailable if there is none."""
        if self.residuals is None:
            raise Unavailable("this worker has no ControlNets")
        return self.residuals

    def backbone_for(self, rows: Sequence[Row]) -> Backbone | MixedBackbone:
        """Return the backbone that runs a batch."""
        if self.packed is not None and len({row.size for row in rows}) > 1:
            return self.packed
        for strategy in () if self.fixed_rows else self.strategies:
            if (backbone := strategy.backbone_for(rows)) is not None:
                return backbone
        if self.reuses_steps(rows):
            return self.backbone  # Others may run all of their blocks at once.
        return self.operations.backbone or self.backbone

    def reuses_steps(self, rows: Sequence[Row]) -> bool:
        """Return whether rows of a batch may reuse blocks of earlier steps."""
        cached = any(row.step_cache is not None for row in rows)
        return cached and not self.fixed_rows and all(row.activations is None for row in rows)

    def device_of(self, rows: Sequence[Row]) -> Device:
        return self.device or open_device(rows[0].sample.device)


class Forward:
    """A forward pass of rows that may share one.

    Rows with the same LoRAs are placed side by side, and among them those of one size.
    """

    def __init__(self, network: Network, rows: Sequence[Row]) -> None:
        blank = replace(rows[-1], owner=None, controls=(), loras=None, activations=None)
        self._network = network
        self._rows = rows
        self._device = network.device_of(rows)
        padding = 0 if rows[0].alone else network.fixed_rows - len(rows)
        self._group = [*arranged(rows), *[blank] * padding]
        self._backbone = network.backbone_for(self._group)
        self._late: set[Hashable] = set()
        """Owners of rows whose residuals were late."""
        network.step_caches.count(row.step_cache for row in rows)
        owners = {row.owner for row in self._group}
        self._shared = owners - {None} if len(owners) > 1 else set()
        """See `Prediction.shared`."""
        self._reuses_steps = network.reuses_steps(rows)
        self._first_steps: dict[Row, tuple[Tensor, Tensor]] = {}
        """The residual and the output of the first block, of rows that run in full and may be reused later."""
        self._reused: dict[Row, Tensor] = {}
        """Predictions of rows that have left after the first block."""
        self._clock = ForwardClock(self._device)
        blocks = self._backbone.blocks
        self._patience_s = FIRST_RESIDUAL_S if len(blocks) > 1 and blocks[1].needs else 0.0
        """For how long late rows may still hold up others."""
        self._controlled = [row for row in self._group if row.controls]

    def run(self) -> Prediction:
        """Run the forward pass. Raise Unavailable if residuals do not come within RESIDUAL_TIMEOUT_S."""
        network, group = self._network, self._group
        parts = [stack(list(part), self._device) for _, part in groupby(group, key=lambda row: row.size)]
        if self._controlled:
            with self._clock.waiting():  # ControlNets in this process run now.
                network.residual_provider.ask(self._controlled)
        self._enter()
        try:
            if isinstance(self._backbone, PackedBackbone | PaddedBackbone):
                activations: Activations = self._backbone.begin(parts)
            else:
                (inputs,) = parts
                activations = self._backbone.begin(inputs)
            predicted = self._run_blocks(activations)
        finally:
            if network.row_weights is not None:
                network.row_weights.leave()
        made = {**dict(zip(self._group, predicted, strict=True)), **self._reused}
        noise = {row: predicted for row, predicted in made.items() if row.owner not in self._late}
        load_waits_s = _load_waits(self._rows)
        return Prediction(
            noise={row: noise[row] for row in self._rows if row in noise},
            times=self._clock.times(sum(load_waits_s.values())),
            shared=frozenset(self._shared),
            reused=frozenset(self._reused),
            blocks=len(self._backbone.blocks),
            load_waits_s=load_waits_s,
        )

    def _run_blocks(self, activations: Activations) -> Sequence[Tensor]:
        """Return the prediction [channels, height, width] for each row that has not left."""
        self._clock.blocks_begin()
        for index, block in enumerate(self._backbone.blocks):
            if not self._control(block.needs, activations):
                return [activations.hidden] * len(self._group)
            before = activations.hidden
            block.run(activations)
            if index == 0 and self._reuses_steps:
                self._reuse_steps(before, activations)
                if not self._group:
                    return []
        if not self._control(self._backbone.finish_needs, activations):
            return [activations.hidden] * len(self._group)
        self._keep_steps(activations)
        return list(self._backbone.finish(activations))

    def _control(self, points: tuple[int, ...], activations: Activations) -> bool:
        """Add the residuals at some points. Return whether any rows remain in the forward pass."""
        if not points or not self._controlled:
            return True
        first = self._clock.residuals_needed()
        self._late |= self._wait_for_residuals(points)
        self._patience_s = STRAGGLER_S if first else self._patience_s
        if all(row.owner in self._late for row in self._group if row.owner is not None):
            return False
        if self._late and not self._network.fixed_rows:
            here = [place for place, row in enumerate(self._group) if row.owner not in self._late]
            self._select(here, activations)
        self._add_residuals(points, activations)
        return True

    def _reuse_steps(self, before: Tensor, activations: Activations) -> None:
        """Let the rows leave whose first block has changed little since a step that ran in full.

        Args:
            before: The input of the first block, which has just run.
        """
        group, rests = self._group, dict[int, Tensor]()
        for index, row in enumerate(group):
            if row.step_cache is None:
                continue
            after = activations.row_of(activations.hidden, index)
            first = after - activations.row_of(before, index)
            rest = row.step_cache.reused(first)
            if rest is None:
                self._first_steps[row] = first, after
            else:
                rests[index] = rest
        if not rests:
            return
        early = replace(activations, points={})
        self._select(list(rests), early)
        for index, rest in enumerate(rests.values()):
            early.row_of(early.hidden, index).add_(rest)  # `select` has copied it.
        self._reused = dict(zip(self._group, self._backbone.finish(early), strict=True))
        self._group = group
        self._select([index for index in range(len(group)) if index not in rests], activations)

    def _keep_steps(self, activations: Activations) -> None:
        """Let later steps reuse what the rows have computed."""
        for index, row in enumerate(self._group):
            if row.step_cache is not None and row in self._first_steps:
                first, after = self._first_steps[row]
                rest = activations.row_of(activations.hidden, index) - after
                self._network.step_caches.keep(row.step_cache, first, rest)

    def _wait_for_residuals(self, points: tuple[int, ...]) -> set[Hashable]:
        """Return the owners with a row that is late, or whose sender of residuals has failed.

        Where all owners would be late, it waits for one of them; else while `_patience_s` lasts.
        """
        provider = self._network.residual_provider
        owners = {row.owner for row in self._group if row.owner is not None} - self._late
        began_s = time.monotonic()
        while True:
            controlled = [row for row in self._group if row.controls and row.owner not in self._late]
            void = {row.owner for row in controlled if provider.is_void(row)}
            missing = [row for row in controlled if row.owner not in void and not provider.ready(row, points)]
            late = {row.owner for row in missing}
            holds_up = late != owners - void
            waits_s = time.monotonic()
            left_s = self._patience_s if holds_up else RESIDUAL_TIMEOUT_S - (waits_s - began_s)
            if not late or (left_s <= 0 and holds_up):
                return late | void
            if left_s <= 0:
                raise Unavailable(f"no ControlNet answered within {RESIDUAL_TIMEOUT_S:g} s")
            with self._clock.waiting():
                provider.wait(missing, points, left_s)
            if holds_up:
                self._patience_s -= time.monotonic() - waits_s

    def _select(self, kept: Sequence[int], activations: Activations) -> None:
        """Go on with some of the rows alone."""
        self._group = [self._group[index] for index in kept]
        if kept:
            activations.select(kept, self._device.to_device(torch.tensor(kept)))
            self._enter()

    def _enter(self) -> None:
        """Apply the rows' LoRAs to the next layers of the backbone."""
        if self._network.row_weights is not None:
            self._network.row_weights.enter([row.loras for row in self._group], self._backbone.spans)

    def _add_residuals(self, points: tuple[int, ...], activations: Activations) -> None:
        provider = self._network.residual_provider
        for index, row in enumerate(self._group):
            if not row.controls or row.owner in self._late:
                continue
            for point in points:
                # Summed first, in the request's order, and added once: Diffusers' order of sums.
                addends = [each for each in provider.take(row, point) if each is not None]
                if addends:
                    total = addends[0] if len(addends) == 1 else sum(addends[1:], start=addends[0])
                    # In place: all earlier blocks have read this tensor, and only the next one reads it again.
                    activations.row_of(activations.points[point], index).add_(total)
            if provider.is_shared(row):
                self._shared.add(row.owner)


def _load_waits(rows: Sequence[Row]) -> dict[Row, float]:
    """Return how long each row waited for recorded activations, for those that waited."""
    waits = ((row, row.activations.waited_s) for row in rows if row.activations is not None)
    return {row: waited_s for row, waited_s in waits if waited_s}


def stack(rows: Sequence[Row], device: Device | None = None) -> Inputs:
    """Return the inputs of one forward pass. If `device` is None, it is the one that the rows' tensors are on."""
    device = device or open_device(rows[0].sample.device)
    embeds = Embeds.stack([row.embeds for row in rows])
    return Inputs(
        sample=torch.stack([row.network_input for row in rows]),
        timestep=device.to_device(torch.stack([row.timestep.float() for row in rows])),
        prompt_embeds=embeds.prompt,
        prompt_lengths=[len(row.embeds.prompt) for row in rows] if embeds.any_length else (),
        added=embeds.added,
        activations=[row.activations for row in rows],
        controlled=any(row.controls for row in rows),
        origins=[(row.embeds.prompt, row.loras.key if row.loras is not None else None) for row in rows],
    )
