"""A server's answers on a link: residuals written straight into its slots, refusals, and numbers.

Slots lie where the link has them: on this server's device, or in memory of the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bottega.controlnet.batch_executor import Residuals
from bottega.device_links import beside, keep_until_used
from bottega.diffusion.controlnets import ControlRow, write_residuals
from bottega.diffusion.controlnets.messages import Refusal, refused_message, residuals_layout
from bottega.diffusion.tensor_messages import TensorMessage, tensor_at
from bottega.errors import BottegaError
from bottega.rpc.status import job_error_to_json
from bottega.transport import MESSAGE_S, Deadline, Link


def send_residuals(link: Link, number: int, rows: Sequence[ControlRow], residuals: Sequence[Residuals]) -> None:
    """Writes the rows' residuals into a slot, scaled, deepest first, and says after each point that it is there."""
    by_point = residuals[0].by_point
    layout = residuals_layout(len(rows), tuple(_shape(tensor[0]) for tensor in by_point), by_point[0].dtype)
    # In a stream of this thread's own: what the next forward enqueues meanwhile does not hold the answer up.
    with beside(by_point[0].device), link.start_message(layout, Deadline.after(MESSAGE_S)) as outgoing:
        tensor_at(layout, outgoing.parts, 0)[0] = number
        # Behind the number the points come deepest first.
        slots = [tensor_at(layout, outgoing.parts, len(by_point) - point) for point in range(len(by_point))]
        writing = [
            _written(each, row, [slot[place] for slot in slots])
            for place, (row, each) in enumerate(zip(rows, residuals, strict=True))
        ]
        for count, _ in enumerate(zip(*writing, strict=True), start=2):
            outgoing.ready(count)
        for each in residuals:
            for tensor in each.by_point:
                keep_until_used(tensor)


def refusal(error: BottegaError, *, lease: int | None = None, step: int | None = None) -> TensorMessage:
    """Why a lease is not opened, or a step not computed."""
    return refused_message(Refusal(lease=lease, step=step, error=job_error_to_json(error)))


def _written(residuals: Residuals, row: ControlRow, slots: Sequence[Tensor]) -> Iterator[None]:
    """Writes one row's residuals point by point, deepest first."""
    alone = [tensor[residuals.place : residuals.place + 1] for tensor in residuals.by_point]
    in_place = alone[0].device == slots[0].device
    scaled = slots if in_place else [torch.empty_like(tensor[0]) for tensor in alone]
    for point in write_residuals(alone, [row], [scaled]):
        if not in_place:
            slots[point].copy_(scaled[point])
        yield


def _shape(tensor: Tensor) -> tuple[int, int, int]:
    channels, height, width = tensor.shape
    return channels, height, width
