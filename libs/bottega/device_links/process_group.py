"""Links over process groups: one group of two processes for each direction, which lives as long as the link.

The sender enqueues its operation when the DATA frame is on its way, and the receiver when that frame has arrived, so a
device only waits for a peer that is there. If the peer dies in the middle, the connection of the frames reports it and
the group is aborted.
"""

from __future__ import annotations

import socket

import torch
from torch import Tensor

from bottega.device_links.ends import DeviceReceiver, DeviceSender, Inflow, pieces_of
from bottega.device_links.groups import PairGroup, Transfer
from bottega.device_links.streams import beside
from bottega.device_links.tensors import DeviceTensor
from bottega.errors import LinkError
from bottega.transport import Deadline

_NOW = Deadline(at=0.0)


class GroupSender(DeviceSender):
    """The sender's end of a process group."""

    def __init__(self, connection: socket.socket, device: torch.device, group: PairGroup) -> None:
        super().__init__(connection, device)
        self._group = group
        self._under_way: list[Transfer] = []

    def move(self, piece: DeviceTensor) -> None:
        self._under_way = [transfer for transfer in self._under_way if not transfer.done(_NOW)]
        with beside(self.device, piece.written):
            self._under_way += [self._group.send(part) for part in pieces_of(piece.tensor)]

    def shut_down(self, cause: LinkError) -> None:
        super().shut_down(cause)
        self._group.abort()

    def close(self) -> None:
        super().close()
        self._group.abort()
        self._under_way.clear()


class GroupReceiver(DeviceReceiver):
    """The receiver's end of a process group."""

    def __init__(self, connection: socket.socket, device: torch.device, group: PairGroup) -> None:
        super().__init__(connection, device)
        self._group = group

    def begin(self, index: int, target: Tensor, start: int) -> Inflow:
        return self._group.receive(target)

    def shut_down(self, cause: LinkError) -> None:
        super().shut_down(cause)
        self._group.abort()

    def close(self) -> None:
        super().close()
        self._group.abort()
