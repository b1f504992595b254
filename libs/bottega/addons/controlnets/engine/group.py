"""One forward pass of a ControlNet over rows of any of its sessions, and the scaling of the residuals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bottega.addons.controlnets.engine.session import ControlSession
from bottega.device.pick import open_device
from bottega.model.backbone import Inputs
from bottega.model.rows import Embeds, Half


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ControlRow:
    """A batch row: the conditional or the unconditional half of a session at one step."""

    session: ControlSession
    half: Half
    sample: Tensor
    """The scaled latent, [channels, height, width]."""
    timestep: Tensor
    """The timestep, a scalar."""


@torch.inference_mode()
def run_group(rows: Sequence[ControlRow], *, fixed_rows: int = 0) -> list[Tensor]:
    """Return the residuals of rows that share ControlNet, shape and number of tokens, at scale 1.

    Args:
        fixed_rows: Pads the batch to this many rows, so that results are the same in every batch; 0 for no padding.

    Returns:
        One tensor for each residual of the ControlNet, [rows, channels, height, width], including the padding.
    """
    net = rows[0].session.net
    group = [*rows, *[rows[-1]] * (fixed_rows - len(rows))]
    embeds = Embeds.stack([row.session.halves[row.half] for row in group])
    to_device = open_device(net.device).to_device
    inputs = Inputs(
        sample=to_device(torch.stack([row.sample for row in group]), net.dtype),
        timestep=to_device(torch.stack([row.timestep.float() for row in group])),
        prompt_embeds=embeds.prompt,
        added=embeds.added,
    )
    embedded = torch.stack([row.session.embedded(len(group)) for row in group])
    return net.residuals(inputs, embedded)


def computes_one_session(rows: Sequence[ControlRow]) -> bool:
    """Return whether the batch has exactly the rows of one session at one step, as in stock Diffusers.

    Otherwise sums are rounded differently in half precision.
    """
    session = rows[0].session
    return len(rows) == len(session.halves) and {(row.session, row.half) for row in rows} == {
        (session, half) for half in session.halves
    }


@torch.inference_mode()
def write_residuals(
    residuals: Sequence[Tensor], rows: Sequence[ControlRow], slots: Sequence[Sequence[Tensor]]
) -> Iterator[int]:
    """Scale the results of run_group into `slots`. Yield each residual's index when all rows have it, deepest first.

    Args:
        slots: Targets by row and residual, [channels, height, width], on the ControlNet's device.
    """
    for point in reversed(range(len(residuals))):
        for index, row in enumerate(rows):
            torch.mul(residuals[point][index], row.session.scales[point], out=slots[index][point])
        yield point
