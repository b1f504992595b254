"""Workers' links: the sessions of each, what it asks for, and the answers. Everything of a link ends with it.

Of its two threads one checks what comes and one sends, so that a worker that does not take what it asked for delays
nobody else.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bottega.controlnet.batch_executor import BatchExecutor, Residuals, StepRequest
from bottega.controlnet.config import ControlNetEngineConfig
from bottega.controlnet.link_responses import refusal, send_residuals
from bottega.controlnet.model_registry import ControlNetReference, ModelRegistry
from bottega.diffusion.controlnets import ControlNetLease, ControlRow, ControlSession
from bottega.diffusion.controlnets.messages import (
    ControlMessageKind,
    ControlStep,
    Opening,
    SessionSpec,
    read_opening,
    read_step,
)
from bottega.diffusion.errors import to_job_failure
from bottega.errors import BottegaError, Draining, NoSharedMemory, TooLarge
from bottega.rpc.link_service import link_endpoints, tcp_endpoint
from bottega.transport import (
    Connection,
    DeviceLinks,
    Incoming,
    Limits,
    Link,
    LinkHandler,
    LinkServer,
    LinkServerSettings,
    kind_of,
    number_message,
    read_number,
)

# Of one worker at a time; a worker runs some tens of requests, with at most eight ControlNets each.
_MOST_SESSIONS = 512
# Rows of one step; a step of sixteen rows with eight ControlNets has 128.
_MOST_ROWS = 512
# Pixels of the picture that is drawn, and of a control image.
_MOST_PIXELS = 16 << 20
# Taken only as messages need it: eight control images of four megapixels are 96 MiB.
_LIMITS = Limits(slots=8, slot_bytes=128 << 20)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _SessionLease:
    """The sessions of one request, and the ControlNets in memory that they need."""

    opening: Opening
    controlnets: ControlNetLease


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _OpenSession:
    """A session that can be asked. shape: of its samples, [channels, height, width]."""

    control: ControlSession
    shape: tuple[int, int, int]


class ControlNetWorkerLink(LinkHandler):
    """draining: whether no sessions are begun any more."""

    def __init__(
        self, connection: Connection, *, registry: ModelRegistry, executor: BatchExecutor, draining: Callable[[], bool]
    ) -> None:
        self._connection = connection
        self._registry = registry
        self._executor = executor
        self._draining = draining
        self._leases: dict[int, _SessionLease] = {}
        self._sessions: dict[int, _OpenSession] = {}
        self._changing = threading.Lock()  # of leases and sessions, by the two threads

    @property
    def sessions(self) -> Counter[str]:
        """Sessions that are open or being opened, by ControlNet."""
        leases = list(self._leases.values())
        return Counter(control.name for lease in leases for control in lease.opening.controls)

    @property
    def progress(self) -> int:
        """Of the forwards."""
        return self._executor.progress

    def on_message(self, connection: Connection, incoming: Incoming) -> None:
        """A step is given back with its answer, so that its slots bound what is held here."""
        parts = connection.wait_all_parts(incoming)
        layout = incoming.layout
        kind = ControlMessageKind(kind_of(layout))
        if kind is ControlMessageKind.STEP:
            self._step(read_step(layout, parts), incoming)
            return
        with incoming:
            match kind:
                case ControlMessageKind.OPEN:
                    self._open(read_opening(layout, parts))
                case ControlMessageKind.CLOSE:
                    self._give_back(read_number(layout, parts))
                case _:
                    raise ValueError(f"a worker sends no {kind} message")

    def on_end(self, cause: BottegaError) -> None:
        """Whatever the worker has borrowed is given back."""
        self._executor.drop_owner(self)
        for number in list(self._leases):
            self._give_back(number)

    def _open(self, opening: Opening) -> None:
        """Begins a lease. What is wrong with the message is raised; what cannot be served is answered."""
        self._check(opening)
        wanted = [ControlNetReference(name=session.name, digest=session.digest) for session in opening.sessions]
        try:
            if self._draining():
                raise Draining("the ControlNet server is stopping")
            nets = self._registry.borrow(wanted, base=opening.base, dtype=opening.dtype)
        except BottegaError as error:
            self._connection.send(refusal(error, lease=opening.lease))
            return
        self._leases[opening.lease] = _SessionLease(opening=opening, controlnets=nets)
        # Called by the thread that loads, under its lock: the work is done by the thread that sends.
        nets.values.add_done_callback(lambda _: self._connection.post(lambda link: self._opened(link, opening.lease)))

    def _check(self, opening: Opening) -> None:
        numbers = {session.number for session in opening.sessions}
        if opening.lease in self._leases or len(numbers) < len(opening.sessions) or numbers & self._sessions.keys():
            raise ValueError("a lease or a session has the number of another one")
        if sum(len(lease.opening.sessions) for lease in self._leases.values()) + len(numbers) > _MOST_SESSIONS:
            raise ValueError(f"a worker has at most {_MOST_SESSIONS} sessions")
        for session, control in zip(opening.sessions, opening.controls, strict=True):
            if max(session.height * session.width, control.image.shape[0] * control.image.shape[1]) > _MOST_PIXELS:
                raise ValueError(f"a picture has at most {_MOST_PIXELS} pixels")

    def _opened(self, link: Link, number: int) -> None:
        """A lease's ControlNets are there, or never will be. In the thread that sends."""
        lease = self._leases.get(number)
        if lease is None:
            return  # closed meanwhile
        try:
            nets = lease.controlnets.values.result(timeout=0)
            sessions = [ControlSession(net, control) for net, control in zip(nets, lease.opening.controls, strict=True)]
        except Exception as error:  # noqa: BLE001 - the boundary of a lease: its failure is not the others'
            self._give_back(number)
            self._connection.send_now(link, refusal(to_job_failure(error), lease=number))
            return
        with self._changing:
            if number not in self._leases:
                return
            for opened, session in zip(lease.opening.sessions, sessions, strict=True):
                self._sessions[opened.number] = _OpenSession(control=session, shape=_latent_shape(opened, session))
        self._connection.send_now(link, number_message(ControlMessageKind.OPENED, number))

    def _give_back(self, number: int) -> None:
        """Ends a lease. Harmless when there is none: a refused one is closed too."""
        with self._changing:
            lease = self._leases.pop(number, None)
            for session in lease.opening.sessions if lease is not None else ():
                self._sessions.pop(session.number, None)
        if lease is not None:
            self._registry.cache.give_back(lease.controlnets)

    def _step(self, step: ControlStep, incoming: Incoming) -> None:
        """Has a step computed."""
        if len(step.entries) > _MOST_ROWS:
            raise ValueError(f"a step has at most {_MOST_ROWS} rows")
        rows = []
        for entry in step.entries:
            session = self._sessions.get(entry.session)
            if session is None or entry.half not in session.control.halves:
                raise ValueError(f"a step is for session {entry.session}, which is not open for it")
            sample, timestep = step.samples[entry.sample], step.timesteps[entry.sample]
            if tuple(sample.shape) != session.shape:
                raise ValueError(f"a step's samples are {tuple(sample.shape)}, not {session.shape}")
            rows.append(ControlRow(session=session.control, half=entry.half, sample=sample, timestep=timestep))

        def done(outcome: Sequence[Residuals] | BottegaError) -> None:
            self._connection.post(lambda link: self._hand_out(link, step.number, rows, outcome, incoming))

        self._executor.submit(StepRequest(owner=self, rows=rows, done=done))

    def _hand_out(
        self,
        link: Link,
        number: int,
        rows: Sequence[ControlRow],
        outcome: Sequence[Residuals] | BottegaError,
        incoming: Incoming,
    ) -> None:
        with incoming:
            if not isinstance(outcome, BottegaError):
                try:
                    send_residuals(link, number, rows, outcome)
                    return
                except (NoSharedMemory, TooLarge) as error:  # nothing of it was sent, and the link lives
                    outcome = error
            self._connection.send_now(link, refusal(outcome, step=number))


class ControlNetLinks(LinkServer[ControlNetWorkerLink]):
    """Raises ConfigError when an address cannot be bound."""

    def __init__(
        self,
        config: ControlNetEngineConfig,
        *,
        registry: ModelRegistry,
        executor: BatchExecutor,
        devices: DeviceLinks | None = None,
    ) -> None:
        self._registry = registry
        self._executor = executor
        super().__init__(
            link_endpoints(config.links_listen, config.links_socket, seal=config.links_seal),
            service="the ControlNet server",
            settings=LinkServerSettings(limits=_LIMITS, devices=devices),
            advertised=tcp_endpoint(config.links_advertised),
        )

    def new_handler(self, connection: Connection) -> ControlNetWorkerLink:
        """What serves one worker."""
        return ControlNetWorkerLink(
            connection, registry=self._registry, executor=self._executor, draining=lambda: self.draining
        )

    @property
    def sessions(self) -> Counter[str]:
        """Sessions of all links, by ControlNet."""
        return sum((link.sessions for link in self.handlers), Counter[str]())


def _latent_shape(opened: SessionSpec, session: ControlSession) -> tuple[int, int, int]:
    layout = session.net.layout
    return layout.latent_channels, opened.height // layout.latent_scale, opened.width // layout.latent_scale
