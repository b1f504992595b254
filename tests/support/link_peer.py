"""Processes at the other end of a link, for the tests of bottega.transport.

`python -m tests.support.link_peer` imports once and then forks a child for each line of its stdin, "ROLE WAY OFFER",
where the role "fetch:DIGEST" is of a LoRA store's worker, and prints the child's process id. It has no threads, so that
forking is safe.
"""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from bottega.addons.loras.wire import messages
from bottega.transport import Backend, Deadline, Limits, Link, Offer, connect, offer_from_wire, offer_to_wire
from bottega.v1.link_pb2 import LinkOffer
from tests.support.transport_backends import LAYOUT, content, devices_for, read, sealed_file, write

LIMITS = Limits(slots=2, slot_bytes=1 << 20)
FILE_BYTES = 200_000
_LIFE_S = 120.0
_DEVICES = "--devices"


class Peers:
    """Starts children, each at the end of one link."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def start(self, role: str, offer: Offer, way: Backend) -> int:
        """Starts a child in that role; returns its process id."""
        assert self._process.stdin
        assert self._process.stdout
        encoded = base64.b64encode(offer_to_wire(offer).SerializeToString()).decode()
        self._process.stdin.write(f"{role} {way} {encoded}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@contextlib.contextmanager
def peers(*, devices: bool = False) -> Iterator[Peers]:
    """The process that starts children; they end with it at the latest. devices: whether they link devices, too."""
    command = [sys.executable, "-m", "tests.support.link_peer", *([_DEVICES] if devices else [])]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Peers(process)
    finally:
        process.communicate(timeout=20)


def end(pid: int) -> None:
    """Kills a child, also a stopped one. No role ends by itself while its link lives."""
    os.kill(pid, signal.SIGKILL)


def send_half(link: Link) -> None:
    """Sends two of four tensors, and nothing more."""
    outgoing = link.start_message(LAYOUT, _life())
    for view, part in zip(outgoing.views[:2], content(LAYOUT, 1)[:2], strict=True):
        view[:] = part
    outgoing.ready(2)
    time.sleep(_LIFE_S)


def send_always(link: Link) -> None:
    """Sends as long as it is taken."""
    for seed in range(1_000_000):
        write(link, LAYOUT, content(LAYOUT, seed % 100))


def pass_files(link: Link) -> None:
    """Sends messages with files, as long as they are taken."""
    for seed in range(1_000_000):
        with sealed_file(bytes([seed % 100]) * FILE_BYTES) as file:
            link.send(LAYOUT, content(LAYOUT, seed % 100), _life(), file=file)


def hold(link: Link) -> None:
    """Receives one message, says so, and keeps it."""
    incoming = link.recv(_life())
    incoming.wait_all(_life())
    write(link, LAYOUT, content(LAYOUT, 2))
    time.sleep(_LIFE_S)


def echo(link: Link) -> None:
    while True:
        write(link, LAYOUT, read(link, LAYOUT))


def idle(link: Link) -> None:
    time.sleep(_LIFE_S)


def scribble(link: Link) -> None:
    """Writes what it received, which no receiver can."""
    with link.recv(_life()) as incoming:
        incoming.wait_all(_life())
        incoming.view(0)[0] = 1
    write(link, LAYOUT, content(LAYOUT, 2))
    time.sleep(_LIFE_S)


def fetch(link: Link, digest: str) -> None:
    """Asks a LoRA store for the same LoRA again and again, and reads no answer."""
    for number in range(8):
        asked = messages.fetch_message(number, digest)
        link.send(asked.layout, asked.buffers, _life())
    time.sleep(_LIFE_S)


_ROLES: dict[str, Callable[[Link], None]] = {
    role.__name__: role for role in (send_half, send_always, pass_files, hold, echo, idle, scribble)
}


def _life() -> Deadline:
    return Deadline.after(_LIFE_S)


def _play(role: str, way: str, encoded: str) -> None:
    signal.alarm(int(_LIFE_S))
    offer = offer_from_wire(LinkOffer.FromString(base64.b64decode(encoded)))
    backend = Backend(way)
    devices = devices_for(backend)
    with connect(offer, _life(), limits=LIMITS, backends=(backend,), devices=devices) as link:
        name, _, digest = role.partition(":")
        if digest:
            fetch(link, digest)
        else:
            _ROLES[name](link)


def main() -> None:
    """Starts children until stdin ends."""
    if _DEVICES in sys.argv:
        devices_for(Backend.GLOO)  # imports torch, once for all children
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    children = []
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            sys.stdin.close()
            devnull = os.open(os.devnull, os.O_RDWR)
            os.dup2(devnull, 2)  # that its peer left is no news
            try:
                _play(*line.split())
            finally:
                os._exit(0)
        children.append(pid)
        print(pid, flush=True)
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
