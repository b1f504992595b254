"""One forward over a group of rows: blocks in order, residuals where they are due.

Rows whose residuals are late at the first barrier leave the forward; the others go on. Knows no
samplers and no queues.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from bottega.diffusion.backbone import Activations, Backbone, Inputs
from bottega.diffusion.residuals import ResidualProvider
from bottega.diffusion.row import Row
from bottega.diffusion.side_path import SidePath
from bottega.errors import Unavailable

# How long a forward waits for residuals when nobody in it could go on without waiting, and for the
# shallower residuals of rows that passed the first barrier.
RESIDUAL_TIMEOUT_S = 10.0


class Denoiser:
    """Predicts noise for groups of rows."""

    def __init__(self, backbone: Backbone, side_path: SidePath, residuals: ResidualProvider | None = None) -> None:
        self._backbone = backbone
        self._side_path = side_path
        self._residuals = residuals

    @torch.inference_mode()
    def predict(self, rows: Sequence[Row], inputs: Inputs | None = None) -> dict[Row, Tensor]:
        """The prediction [channels, height, width] of every row that was not late.

        All rows share one GroupKey. inputs: `stack` of the rows, where the caller has it already.
        A row without a prediction is to be asked for again, with all rows of its owner.
        Raises Unavailable when residuals do not come within RESIDUAL_TIMEOUT_S.
        """
        group = list(rows)
        controlled = [row for row in group if row.controls]
        if controlled:
            self._provider().ask(controlled)
        self._side_path.enter([row.loras for row in group])
        try:
            activations = self._backbone.begin(inputs or stack(group))
            barrier = bool(controlled)
            for block in self._backbone.blocks:
                if block.needs and controlled:
                    if barrier:
                        group = self._leave_late(group, block.needs, activations)
                        barrier = False
                    self._add_residuals(group, block.needs, activations)
                block.run(activations)
            prediction = self._backbone.finish(activations)
        finally:
            self._side_path.leave()
        return dict(zip(group, prediction, strict=True))

    def _leave_late(self, group: list[Row], points: tuple[int, ...], activations: Activations) -> list[Row]:
        """Drops the rows of every owner that has a late row. Waits only when that would be all of them."""
        provider = self._provider()
        controlled = [row for row in group if row.controls]
        deadline = time.monotonic() + RESIDUAL_TIMEOUT_S
        while True:
            late: set[Hashable] = {row.owner for row in controlled if not provider.ready(row, points)}
            kept = [index for index, row in enumerate(group) if row.owner not in late]
            if kept:
                break
            left = deadline - time.monotonic()
            if left <= 0:
                raise Unavailable(f"no ControlNet answered within {RESIDUAL_TIMEOUT_S:.0f} s")
            provider.wait(controlled, points, left)
        if len(kept) < len(group):
            group = [group[index] for index in kept]
            activations.select(kept)
            self._side_path.enter([row.loras for row in group])
        return group

    def _add_residuals(self, group: list[Row], points: tuple[int, ...], activations: Activations) -> None:
        provider = self._provider()
        for index, row in enumerate(group):
            if not row.controls:
                continue
            if not provider.ready(row, points):
                provider.wait([row], points, RESIDUAL_TIMEOUT_S)
                if not provider.ready(row, points):
                    raise Unavailable(f"a ControlNet stopped answering within {RESIDUAL_TIMEOUT_S:.0f} s")
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


def stack(rows: Sequence[Row]) -> Inputs:
    """The inputs of one forward, row by row."""
    sample = torch.stack([row.sample for row in rows])
    return Inputs(
        sample=sample,
        timestep=torch.stack([row.timestep.float() for row in rows]).to(sample.device),
        prompt_embeds=torch.stack([row.embeds.prompt for row in rows]),
        pooled_embeds=torch.stack([row.embeds.pooled for row in rows]),
        time_ids=torch.stack([row.embeds.time_ids for row in rows]),
    )
