"""One forward of a ControlNet over rows of any of its sessions, and the way of its residuals into their places."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bottega.diffusion.controlnets.session import ControlSession
from bottega.diffusion.device.pick import open_device
from bottega.diffusion.model.backbone import Inputs
from bottega.diffusion.rows import Half


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ControlRow:
    """One half of one session at one step. sample: the scaled latent [channels, height, width]; timestep: scalar."""

    session: ControlSession
    half: Half
    sample: Tensor
    timestep: Tensor


@torch.inference_mode()
def run_group(rows: Sequence[ControlRow], *, fixed_rows: int = 0) -> list[Tensor]:
    """The residuals of rows that share ControlNet, shape and number of tokens, at scale 1.

    fixed_rows: pads the forward to so many rows, for results that are equal byte for byte; 0 is off.
    Returns by point [rows, channels, height, width], the rows of the padding included.
    """
    net = rows[0].session.net
    group = [*rows, *[rows[-1]] * (fixed_rows - len(rows))]
    embeds = [row.session.halves[row.half] for row in group]
    to_device = open_device(net.device).to_device
    inputs = Inputs(
        sample=to_device(torch.stack([row.sample for row in group]), net.dtype),
        timestep=to_device(torch.stack([row.timestep.float() for row in group])),
        prompt_embeds=torch.stack([each.prompt for each in embeds]),
        pooled_embeds=torch.stack([each.pooled for each in embeds]),
        time_ids=torch.stack([each.time_ids for each in embeds]),
    )
    embedded = torch.stack([row.session.embedded(len(group)) for row in group])
    return net.residuals(inputs, embedded)


@torch.inference_mode()
def write_residuals(
    residuals: Sequence[Tensor], rows: Sequence[ControlRow], slots: Sequence[Sequence[Tensor]]
) -> Iterator[int]:
    """Scales what run_group returned and writes it; yields each point as soon as all rows have it, deepest first.

    slots: by row and point, [channels, height, width], on the ControlNet's device.
    """
    for point in reversed(range(len(residuals))):
        for index, row in enumerate(rows):
            torch.mul(residuals[point][index], row.session.scales[point], out=slots[index][point])
        yield point
