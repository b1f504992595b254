"""A process at the other end of a link between GPUs: `python -m tests.support.gpu_peer ROLE DEVICE BACKEND OFFER`.

It needs CUDA of its own: one that is forked from a process that has used it has none.
"""

from __future__ import annotations

import base64
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import torch

from bottega.device_links.devices import device_links
from bottega.device_links.tensor_messages import tensor_at
from bottega.device_links.tensors import beside, keep_until_used, mark
from bottega.transport import Backend, Deadline, Layout, Limits, Link, Offer, connect, offer_from_wire, offer_to_wire
from bottega.v1.link_pb2 import LinkOffer

LIMITS = Limits(slots=2, slot_bytes=512 << 20)
_LIFE_S = 120.0


@contextlib.contextmanager
def gpu_peer(role: str, device: str, backend: Backend, offer: Offer) -> Iterator[subprocess.Popen[bytes]]:
    """The process, in that role: "echo" sends back what it receives, "hold" keeps it. It is killed in the end."""
    encoded = base64.b64encode(offer_to_wire(offer).SerializeToString()).decode()
    command = [sys.executable, "-m", "tests.support.gpu_peer", role, device, backend.value, encoded]
    process = subprocess.Popen(command)
    try:
        yield process
    finally:
        process.kill()
        process.wait(20)


def send(link: Link, layout: Layout, tensors: list[torch.Tensor]) -> None:
    """A message of a number and these, as a ControlNet server sends residuals; they may still be computed."""
    device = tensors[0].device
    with beside(device, mark(device)), link.start_message(layout, Deadline.after(_LIFE_S)) as outgoing:
        tensor_at(layout, outgoing.parts, 0)[0] = len(tensors)
        outgoing.ready(1)
        for index, tensor in enumerate(tensors, start=1):
            tensor_at(layout, outgoing.parts, index).copy_(tensor)
            outgoing.ready(index + 1)
            keep_until_used(tensor)


def receive(link: Link, layout: Layout) -> list[torch.Tensor]:
    """Copies of a message's tensors, behind its number, where they have come to lie."""
    with link.recv(Deadline.after(_LIFE_S), layout) as incoming:
        incoming.wait_all(Deadline.after(_LIFE_S))
        parts = [incoming.part(index) for index in range(len(layout.specs))]
        assert int(tensor_at(layout, parts, 0)[0]) == len(layout.specs) - 1
        return [tensor_at(layout, parts, index).clone() for index in range(1, len(layout.specs))]


def _play(role: str, device: str, backend: Backend, offer: Offer) -> None:
    devices = device_links("auto", torch.device(device))
    with connect(offer, Deadline.after(_LIFE_S), limits=LIMITS, backends=(backend,), devices=devices) as link:
        while True:
            incoming = link.recv(Deadline.after(_LIFE_S))
            layout = incoming.layout
            incoming.wait_all(Deadline.after(_LIFE_S))
            if role == "hold":
                time.sleep(_LIFE_S)
            parts = [incoming.part(index) for index in range(len(layout.specs))]
            tensors = [tensor_at(layout, parts, index).clone() for index in range(1, len(layout.specs))]
            incoming.release()
            send(link, layout, tensors)


if __name__ == "__main__":
    signal.alarm(int(_LIFE_S))
    offered = LinkOffer.FromString(base64.b64decode(sys.argv[4]))
    _play(sys.argv[1], sys.argv[2], Backend(sys.argv[3]), offer_from_wire(offered))
