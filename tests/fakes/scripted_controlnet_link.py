"""A ControlNet server at the end of a link that follows a script: for what servers do wrong, and when.

It speaks the messages of a link and computes nothing itself; what it answers comes from the test.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from google.protobuf import json_format

from bottega.addons.controlnets.engine.messages import (
    ControlMessageKind,
    ControlStep,
    OpenedSession,
    Refusal,
    opened_message,
    read_opening,
    read_step,
    refused_message,
    residuals_layout,
)
from bottega.addons.controlnets.engine.provider import ControlServer
from bottega.device_links.tensor_messages import tensor_at
from bottega.errors import BottegaError, LinkError, PeerDead
from bottega.rpc.status import to_job_error
from bottega.transport import (
    Deadline,
    Endpoints,
    Incoming,
    Link,
    LinkListener,
    Offer,
    ServiceOffer,
    WholeMessage,
    kind_of,
    number_message,
)
from tests.support.offers import OffersAtOnce

LIFE_S = 30.0


@dataclass(kw_only=True)
class Script:
    """What the server does. refuses_loans, refuses_steps: why.

    dies_at_step: of all sessions, from 1, after so many points and seconds; 0 never. silent_at_step: says nothing
    from then on. hangs_at_step: answers no steps from then on, and everything else.
    lies: sends this in place of the first answer. opens_others: opens more sessions than it was asked for.
    """

    refuses_loans: BottegaError | None = None
    refuses_steps: BottegaError | None = None
    dies_at_step: int = 0
    dies_after_points: int = 0
    dies_after_s: float = 0.0
    silent_at_step: int = 0
    hangs_at_step: int = 0
    lies: Callable[[int], WholeMessage] | None = None
    opens_others: bool = False


class ScriptedServer(OffersAtOnce):
    """One server; an OfferSource for whoever connects to it. shapes: of the residuals, by point, which are all 0."""

    def __init__(self, name: str, folder: Path, script: Script, shapes: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        self.server = ControlServer(name=name, address=name)
        self.steps = 0
        self._script = script
        self._shapes = shapes
        self._listener = LinkListener(Endpoints(unix_path=folder / f"{name}.sock"))

    def answer(self, address: str, link_id: str) -> ServiceOffer:
        offer = self._listener.offer(link_id or None)
        threading.Thread(target=self._serve, args=(offer,), daemon=True).start()
        return ServiceOffer(offer=offer, service=address)

    def close(self) -> None:
        self._listener.close()

    def _serve(self, offer: Offer) -> None:
        with self._listener.accept(offer, Deadline.after(LIFE_S)) as link:
            try:
                while True:
                    self._answer(link, link.recv(Deadline.after(LIFE_S)))
            except LinkError as error:
                link.end(error)

    def _answer(self, link: Link, incoming: Incoming) -> None:
        with incoming:
            incoming.wait_all(Deadline.after(LIFE_S))
            layout = incoming.layout
            views = [incoming.view(index) for index in range(len(layout.specs))]
            if self._script.silent_at_step and self.steps >= self._script.silent_at_step:
                return
            kind = kind_of(layout)
            if kind == "ping":
                send(link, number_message("pong"))
                return
            match ControlMessageKind(kind):
                case ControlMessageKind.OPEN:
                    opening = read_opening(layout, views)
                    self._open(link, opening.lease, len(opening.sessions))
                case ControlMessageKind.STEP:
                    self._step(link, read_step(layout, views))

    def _open(self, link: Link, lease: int, sessions: int) -> None:
        if self._script.refuses_loans is not None:
            send(link, refused_message(Refusal(lease=lease, error=_packed(self._script.refuses_loans))))
        else:
            count = sessions + self._script.opens_others
            send(link, opened_message(lease, [OpenedSession(residuals=len(self._shapes))] * count))

    def _step(self, link: Link, step: ControlStep) -> None:
        self.steps += 1
        script = self._script
        if script.silent_at_step == self.steps or 0 < script.hangs_at_step <= self.steps:
            return
        if script.refuses_steps is not None:
            send(link, refused_message(Refusal(step=step.number, error=_packed(script.refuses_steps))))
            return
        if script.lies is not None:
            send(link, script.lies(step.number))
            return
        layout = residuals_layout(len(step.entries), self._shapes, torch.float32)
        dies = 0 < script.dies_at_step <= self.steps
        with link.start_message(layout, Deadline.after(LIFE_S)) as outgoing:
            tensor_at(layout, outgoing.views, 0).copy_(torch.tensor([step.number, 0]))
            for index in range(1, len(layout.specs)):
                tensor_at(layout, outgoing.views, index).zero_()
            if dies:
                outgoing.ready(1 + script.dies_after_points)
                time.sleep(script.dies_after_s)
                raise PeerDead("the script says so")
            outgoing.finish()


def send(link: Link, message: WholeMessage) -> None:
    """Sends a message as it is."""
    link.send(message.layout, message.buffers, Deadline.after(LIFE_S))


def _packed(error: BottegaError) -> bytes:
    return json_format.MessageToJson(to_job_error(error), indent=None).encode()
