"""Chooses where the ControlNets of requests run: on a server, or in this process.

When a server is lost, its sessions move to the next server of their list, then into this process if it has the weights.
If nothing is left, the session has an error. Only the engine's thread uses this module.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from bottega.addons.controlnets.engine import ControlLayout, LocalControlNets
from bottega.addons.controlnets.engine.messages import Opening, SessionSpec, open_message
from bottega.addons.controlnets.engine.provider import ControlInput, ControlServer
from bottega.addons.controlnets.worker.server_link import ChangeCondition, ControlLinkSettings, ServerLink
from bottega.addons.controlnets.worker.session import PlacedSession, SessionLease
from bottega.errors import BottegaError, ControlNetUnusable, NoControlNet, TooLarge
from bottega.transport import LinkCounters, OfferSource

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
            lease.link.close(lease.number)
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
                lease.opened = True
                for session in lease.sessions:
                    session.ran.append(link.server.name)
            elif any(session.refused for session in lease.sessions):
                link.close(lease.number)
                self._reassign(lease, NoControlNet(f"ControlNet server {link.server.name} could not compute a step"))
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
        session.lease = None
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
        for session in sessions:
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
        lease.answer = link.open(lease.number, open_message(opening))


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
