"""A server's answers on a link: residuals that are written straight into its slots, refusals, and numbers.

Slots lie on this server's device or in host memory, depending on the link.
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
    """Write the rows' scaled residuals into a slot, deepest first, and announce each point when it is written."""
    by_point = residuals[0].by_point
    layout = residuals_layout(len(rows), tuple(_shape(tensor[0]) for tensor in by_point), by_point[0].dtype)
    # In a stream of this thread's own, so that the next forward does not delay the answer.
    with beside(by_point[0].device), link.start_message(layout, Deadline.after(MESSAGE_S)) as outgoing:
        tensor_at(layout, outgoing.parts, 0)[0] = number
        # After the number, the points come deepest first.
        slots = [tensor_at(layout, outgoing.parts, len(by_point) - point) for point in range(len(by_point))]
        writing = [
            _written(row_residuals, row, [slot[place] for slot in slots])
            for place, (row, row_residuals) in enumerate(zip(rows, residuals, strict=True))
        ]
        for count, _ in enumerate(zip(*writing, strict=True), start=2):
            outgoing.ready(count)
        for row_residuals in residuals:
            for tensor in row_residuals.by_point:
                keep_until_used(tensor)


def refusal(error: BottegaError, *, lease: int | None = None, step: int | None = None) -> TensorMessage:
    """Return the message that a lease is not opened, or a step not computed."""
    return refused_message(Refusal(lease=lease, step=step, error=job_error_to_json(error)))


def _written(residuals: Residuals, row: ControlRow, slots: Sequence[Tensor]) -> Iterator[None]:
    """Write one row's residuals point by point, deepest first."""
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
