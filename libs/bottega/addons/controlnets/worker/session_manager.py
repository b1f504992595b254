"""Chooses where the ControlNets of requests run: on a server, or in this process.

When a server is lost, its sessions move to the next server of their list, then into this process if it has the weights.
If nothing is left, the session has an error. Only the engine's thread uses this module.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch

from bottega.addons.controlnets.engine import ControlLayout, LocalControlNets
from bottega.addons.controlnets.engine.messages import OpenedSession, Opening, SessionSpec, open_message
from bottega.addons.controlnets.engine.provider import (
    ControlCall,
    ControlInput,
    ControlRecord,
    ControlServer,
    half_of_residuals,
    shared_images,
)
from bottega.addons.controlnets.worker.server_link import (
    ChangeCondition,
    ControlLinkSettings,
    LeaseStatus,
    ServerLink,
)
from bottega.addons.controlnets.worker.step_result import CallTimes, StepResult
from bottega.engine.spans import MAX_SPANS
from bottega.errors import BottegaError, ControlNetUnusable, NoControlNet, TooLarge
from bottega.model.rows import Half, Row
from bottega.transport import LinkCounters, OfferSource


@dataclass(slots=True, kw_only=True, eq=False)
class SessionLease:
    """The sessions that one request has, or is opening, at one server."""

    number: int
    link: ServerLink
    sessions: Sequence[PlacedSession]
    answer: LeaseStatus = field(default_factory=LeaseStatus)
    opened: bool = False
    """Whether the sessions know that the server has opened them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Answer:
    """A reference to the residuals of one batch row at one step, which may still be arriving."""

    step: int
    result: StepResult
    place: int
    """Index of the row in the result."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Answers:
    """The residuals for one image that a server sent or will send: of the newest step and of the step before.

    An object has the residuals of one half, conditional or unconditional.
    """

    newest: _Answer | None = None
    before: _Answer | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class PlacedSession:
    """The use of one ControlNet by one request, in this process or on a server. The engine gets it as a handle."""

    control: ControlInput
    number: int = 0
    """Number of the session within its lease."""
    tried: list[str] = field(default_factory=list)
    """Names of the servers that were asked to run the session, including lost ones."""
    lease: SessionLease | None = None
    local: Hashable | None = None
    """Handle of the session if it runs in this process; None otherwise."""
    opened: OpenedSession | None = None
    """Facts about its ControlNet from the server that runs the session; None before that has opened it."""
    error: BottegaError | None = None
    """Why nothing can run the session any more; None while something can."""
    pipelined: bool = False
    """Whether a step may use the residuals of the previous step instead of waiting for its own."""
    waited_s: float = 0.0
    """Seconds that forward passes waited for the session's residuals."""
    ran: list[str] = field(default_factory=list)
    """Names of the servers that have run the session; an empty name stands for this process."""
    _calls: dict[tuple[int, CallTimes], str] = field(default_factory=dict)
    _answers: dict[tuple[Hashable, Half], _Answers] = field(default_factory=dict)
    _stale: set[tuple[Hashable, int]] = field(default_factory=set)

    @property
    def next_server(self) -> ControlServer | None:
        """The best server that was not tried; None if all were."""
        return next((server for server in self.control.hosts.servers if server.name not in self.tried), None)

    @property
    def record(self) -> ControlRecord:
        """Waits, steps and servers of the session, for the provenance."""
        return ControlRecord(
            waited_s=self.waited_s,
            stale_steps=len(self._stale),
            pipelined=self.pipelined,
            servers=tuple(self.ran),
            calls=tuple(
                ControlCall(server=server, step=step, began_s=times.asked_s, seconds=times.seconds)
                for (step, times), server in self._calls.items()
                if times.seconds
            ),
        )

    @property
    def refused(self) -> bool:
        """Whether the server has refused a requested step."""
        return any(answers.newest is not None and answers.newest.result.refused for answers in self._answers.values())

    def asked(self, row: Row) -> bool:
        """Return whether the residuals for the row's step have arrived or are pending."""
        newest = self._of(row).newest
        return newest is not None and newest.step == row.step

    def expect(self, row: Row, result: StepResult, place: int) -> None:
        """Record that `result` will have the row's residuals, at index `place`."""
        result.use()
        if self.lease is not None and len(self._calls) < MAX_SPANS:
            self._calls[row.step, result.times] = self.lease.link.store.name
        answers = self._of(row)
        _drop(answers.before)
        answers.before = None
        if self.pipelined and answers.newest is not None and answers.newest.step == row.step - 1:
            answers.before = answers.newest
        else:
            _drop(answers.newest)
            self._stale.discard((row.owner, row.step))  # the step is computed anew after the loss of its server
        answers.newest = _Answer(step=row.step, result=result, place=place)

    def answer(self, row: Row) -> tuple[StepResult, int] | None:
        """Return the result with the row's residuals, and the row's index in it; None if there is none.

        In pipelined mode that is the result of the step before, if it was requested.
        """
        answers = self._of(row)
        if answers.before is not None:
            self._stale.add((row.owner, row.step))
            return answers.before.result, answers.before.place
        if answers.newest is not None and answers.newest.step == row.step:
            return answers.newest.result, answers.newest.place
        return None

    def forget_answers(self) -> None:
        """Drop received and pending residuals. Other sessions may still use the same results."""
        for answers in self._answers.values():
            _drop(answers.newest)
            _drop(answers.before)
        self._answers.clear()

    def give_up_answers(self) -> None:
        """Drop the residuals of a lost server.

        An incomplete result becomes void, because rows may have read some of its residuals.
        """
        for answers in self._answers.values():
            for answer in (answers.newest, answers.before):
                if answer is not None and not answer.result.whole:
                    answer.result.void = True
        self.forget_answers()

    def _of(self, row: Row) -> _Answers:
        return self._answers.setdefault((row.owner, half_of_residuals(self.control, row)), _Answers())


def _drop(answer: _Answer | None) -> None:
    if answer is not None:
        answer.result.drop()


# When to retry requests whose ControlNets no server runs: servers come back within some seconds.
_RETRY_AFTER_S = 3.0
# Refusals that stay the same at other servers and at other times.
_FINAL = (ControlNetUnusable, TooLarge)


class SessionManager:
    """The ControlNet sessions of one engine.

    Args:
        base: Layout that ControlNets must have to fit the model.
        dtype: Element type of the model.
        local: The ControlNets of this process, if it has any.
        counters: Metrics of all connections.
    """

    def __init__(
        self,
        *,
        base: ControlLayout,
        dtype: torch.dtype,
        offers: OfferSource,
        local: LocalControlNets | None,
        settings: ControlLinkSettings,
        counters: LinkCounters,
    ) -> None:
        self.counters = counters
        self.changes = ChangeCondition()
        self._base = base
        self._dtype = dtype
        self._offers = offers
        self._local = local
        self._settings = settings
        self._seen = -1
        self._links: dict[ControlServer, ServerLink] = {}
        self._before: dict[ControlServer, str] = {}  # ids of lost links, by server
        self._leases: list[SessionLease] = []
        self._numbers = itertools.count(1)

    @property
    def links(self) -> list[ServerLink]:
        """The connections to all servers that are used or were used."""
        return list(self._links.values())

    def assign(self, sessions: Sequence[PlacedSession], why: BottegaError | None = None) -> None:
        """Begin the sessions of one request at the best servers that were not tried, else in this process.

        Args:
            why: The error of the server that was tried last; None at first.
        """
        by_server: dict[ControlServer, list[PlacedSession]] = {}
        here: list[PlacedSession] = []
        for session in sessions:
            server = session.next_server
            if server is not None:
                session.tried.append(server.name)
                by_server.setdefault(server, []).append(session)
            elif self._is_local(session.control):
                here.append(session)
            else:
                session.error = why if isinstance(why, _FINAL) else _nobody(session, why)
        for server, together in by_server.items():
            self._open_lease(self._link_to(server), together)
        if here:
            self._assign_locally(here)

    def release(self, sessions: Sequence[PlacedSession]) -> None:
        """End sessions that are not needed any more."""
        for lease in dict.fromkeys(session.lease for session in sessions if session.lease is not None):
            lease.link.close_lease(lease.number)
            self._leases.remove(lease)
        for session in sessions:
            self._detach(session)

    def is_open(self, session: PlacedSession) -> bool:
        """Return whether a session is open. If it failed in this process, set its error."""
        if session.local is not None and self._local is not None:
            try:
                return self._local.opened([session.local])
            except BottegaError as error:
                self._detach(session)
                session.error = error
                return False
        return session.lease is not None and session.lease.opened

    def take_in_news(self) -> None:
        """Process the leases that opened or failed, and the connections that were lost, since the last call."""
        if self.changes.count == self._seen:
            return
        self._seen = self.changes.count
        for lease in list(self._leases):
            link = lease.link
            if link.lost is not None:
                self._reassign(lease, link.lost)
            elif lease.answer.refusal is not None:
                self._reassign(lease, lease.answer.refusal)
            elif not lease.opened and lease.answer.opened:
                if len(lease.answer.sessions) != len(lease.sessions):
                    link.close_lease(lease.number)
                    self._reassign(lease, NoControlNet(f"ControlNet server {link.store.name} opened other sessions"))
                    continue
                lease.opened = True
                for session, opened in zip(lease.sessions, lease.answer.sessions, strict=True):
                    session.opened = opened
                    session.ran.append(link.store.name)
            elif any(session.refused for session in lease.sessions):
                link.close_lease(lease.number)
                self._reassign(lease, NoControlNet(f"ControlNet server {link.store.name} could not compute a step"))
        for server, link in list(self._links.items()):
            if link.lost is not None:
                del self._links[server]
                self._before[server] = link.link_id

    def _reassign(self, lease: SessionLease, why: BottegaError) -> None:
        """Move the sessions of a lease that its server does not serve any more."""
        self._leases.remove(lease)
        for session in lease.sessions:
            session.give_up_answers()
            self._detach(session)
        self.assign(lease.sessions, why)

    def _detach(self, session: PlacedSession) -> None:
        session.lease = session.opened = None
        session.forget_answers()
        if session.local is not None and self._local is not None:
            self._local.close([session.local])
            session.local = None

    def _is_local(self, control: ControlInput) -> bool:
        digest = self._local.digests.get(control.name) if self._local is not None else None
        return digest is not None and control.hosts.digest in {"", digest}

    def _assign_locally(self, sessions: Sequence[PlacedSession]) -> None:
        """Open the sessions of one request in this process, all together.

        One by one, a request could hold memory of the cache while it waits for more of the same memory.
        """
        assert self._local is not None, "this process has the weights"
        try:
            handles = self._local.open([session.control for session in sessions])
        except BottegaError as error:
            for session in sessions:
                session.error = error
            return
        for session, handle in zip(sessions, handles, strict=True):
            session.local = handle
            session.ran.append("")

    def _link_to(self, server: ControlServer) -> ServerLink:
        link = self._links.get(server)
        if link is None or link.lost is not None:
            link = self._links[server] = ServerLink(
                server,
                offers=self._offers,
                changes=self.changes,
                settings=self._settings,
                counters=self.counters,
                link_id=self._before.pop(server, ""),
            )
            link.start()
        return link

    def _open_lease(self, link: ServerLink, sessions: list[PlacedSession]) -> None:
        lease = SessionLease(number=next(self._numbers), link=link, sessions=tuple(sessions))
        specs = []
        for session, images_of in zip(sessions, shared_images([session.control for session in sessions]), strict=True):
            session.lease, session.number = lease, next(self._numbers)
            control = session.control
            specs.append(
                SessionSpec(
                    number=session.number,
                    name=control.name,
                    digest=control.hosts.digest,
                    height=control.height,
                    width=control.width,
                    scale=control.scale,
                    guess_mode=control.guess_mode,
                    halves=tuple(control.halves),
                    images=len(control.images),
                    images_of=images_of,
                    modes=control.modes,
                    image_scales=control.image_scales,
                    latent_scaling=control.latent_scaling,
                )
            )
        opening = Opening(
            lease=lease.number,
            base=self._base,
            dtype=self._dtype,
            sessions=tuple(specs),
            controls=tuple(session.control for session in sessions),
        )
        self._leases.append(lease)
        lease.answer = link.open_lease(lease.number, open_message(opening))


def _nobody(session: PlacedSession, why: BottegaError | None) -> NoControlNet:
    name = session.control.name
    tried = ",".join(session.tried)
    last = f" (the last of {tried}: {why.message})" if why is not None else ""
    return NoControlNet(
        f"no server runs ControlNet {name} any more{last}, and this worker does not have it"
        if tried
        else f"no server hosts ControlNet {name}, and this worker does not have it",
        metadata={"controlnets": name, "servers": tried},
        retry_after_s=_RETRY_AFTER_S,
    )
