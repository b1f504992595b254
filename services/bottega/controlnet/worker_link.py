"""Connections of workers: their sessions, requests and answers. All sessions and requests of a connection end with it.

One of its two threads checks incoming messages and the other sends, so a worker that does not read its answers delays
no other worker.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bottega import kinds
from bottega.addons.controlnets.engine import (
    ControlImages,
    ControlNetLease,
    ControlRow,
    ControlSession,
    write_residuals,
)
from bottega.addons.controlnets.engine.messages import (
    ControlMessageKind,
    ControlStep,
    Opening,
    Refusal,
    SessionSpec,
    read_opening,
    read_step,
    refused_message,
    residuals_layout,
)
from bottega.controlnet.batch_executor import BatchExecutor, Residuals, StepRequest
from bottega.controlnet.config import ControlNetEngineConfig
from bottega.controlnet.model_registry import ControlNetReference, ModelRegistry
from bottega.device_links.tensor_messages import TensorMessage, tensor_at
from bottega.device_links.tensors import beside, keep_until_used
from bottega.engine.errors import to_job_failure
from bottega.errors import BottegaError, Draining, NoSharedMemory, TooLarge
from bottega.rpc.link_service import StoreLinks
from bottega.rpc.status import job_error_to_json
from bottega.transport import (
    MESSAGE_S,
    Connection,
    Deadline,
    DeviceLinks,
    Incoming,
    Limits,
    Link,
    LinkHandler,
    LinkServerSettings,
    kind_of,
    number_message,
    read_number,
)

# Upper bound on a worker's sessions. It runs some tens of requests with at most 17 sessions each: a union with eight
# images has one for each span of steps between their begins and ends.
_MAX_SESSIONS = 4096
# Upper bound on the rows of a step. A step of sixteen rows with eight ControlNets has 128.
_MAX_ROWS = 512
# Upper bound on the pixels of the drawn image, and of a control image.
_MAX_PIXELS = 16 << 20
# Allocated only as messages need it: eight control images of four megapixels are 96 MiB.
_LIMITS = Limits(slots=8, slot_bytes=128 << 20)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _SessionLease:
    """The sessions of one request, and the lease of the ControlNets that they need."""

    opening: Opening
    controlnets: ControlNetLease


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _OpenSession:
    """A session whose ControlNet is loaded, so that residuals can be computed."""

    control: ControlSession
    shape: tuple[int, int, int]
    """Shape of its samples, [channels, height, width]."""


class ControlNetWorkerLink(LinkHandler):
    """The server's side of a worker's connection.

    Args:
        draining: Returns whether new sessions are refused.
    """

    def __init__(
        self, connection: Connection, *, registry: ModelRegistry, executor: BatchExecutor, draining: Callable[[], bool]
    ) -> None:
        self._connection = connection
        self._registry = registry
        self._executor = executor
        self._draining = draining
        self._leases: dict[int, _SessionLease] = {}
        self._sessions: dict[int, _OpenSession] = {}
        self._changing = threading.Lock()  # guards leases and sessions, which both threads change

    @property
    def sessions(self) -> Counter[str]:
        """Number of sessions that are open or being opened, by ControlNet."""
        leases = list(self._leases.values())
        return Counter(control.name for lease in leases for control in lease.opening.controls)

    @property
    def progress(self) -> int:
        """A counter that rises while forward passes make progress."""
        return self._executor.progress

    def on_message(self, connection: Connection, incoming: Incoming) -> None:
        """Handle a message. A step keeps its receive buffer until it is answered, which bounds the memory for steps."""
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
                    raise ValueError(f"a worker must not send a {kind} message")

    def on_end(self, cause: BottegaError) -> None:
        """End all leases of the worker."""
        self._executor.drop_owner(self)
        for number in list(self._leases):
            self._give_back(number)

    def _open(self, opening: Opening) -> None:
        """Start a lease. Raise an error for an invalid message; refuse a lease that cannot be served."""
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
        # The loading thread calls this under its lock, so the sending thread does the work.
        nets.values.add_done_callback(lambda _: self._connection.post(lambda link: self._opened(link, opening.lease)))

    def _check(self, opening: Opening) -> None:
        numbers = {session.number for session in opening.sessions}
        if opening.lease in self._leases or len(numbers) < len(opening.sessions) or numbers & self._sessions.keys():
            raise ValueError("a lease or session must have a number that no other one has")
        if sum(len(lease.opening.sessions) for lease in self._leases.values()) + len(numbers) > _MAX_SESSIONS:
            raise ValueError(f"a worker must have at most {_MAX_SESSIONS} sessions")
        for session, control in zip(opening.sessions, opening.controls, strict=True):
            sizes = [image.shape[0] * image.shape[1] for image in control.images]
            if max(session.height * session.width, *sizes) > _MAX_PIXELS:
                raise ValueError(f"an image must have at most {_MAX_PIXELS} pixels")

    def _opened(self, link: Link, number: int) -> None:
        """Open the sessions of a lease whose ControlNets are loaded or have failed. Called by the sending thread."""
        lease = self._leases.get(number)
        if lease is None:
            return  # closed meanwhile
        try:
            nets = lease.controlnets.values.result(timeout=0)
            images: dict[Hashable, ControlImages] = {}
            sessions = [
                ControlSession(net, control, images) for net, control in zip(nets, lease.opening.controls, strict=True)
            ]
        except Exception as error:  # noqa: BLE001 - the boundary of a lease: its failure must not affect others
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
        """End a lease, if there is one. A refused lease is ended, too."""
        with self._changing:
            lease = self._leases.pop(number, None)
            for session in lease.opening.sessions if lease is not None else ():
                self._sessions.pop(session.number, None)
        if lease is not None:
            self._registry.cache.give_back(lease.controlnets)

    def _step(self, step: ControlStep, incoming: Incoming) -> None:
        """Check a step and queue it."""
        if len(step.entries) > _MAX_ROWS:
            raise ValueError(f"a step must have at most {_MAX_ROWS} rows")
        rows = []
        for entry in step.entries:
            session = self._sessions.get(entry.session)
            if session is None or entry.half not in session.control.halves:
                raise ValueError(f"a step is for session {entry.session}, which is not open for it")
            sample, timestep = step.samples[entry.sample], step.timesteps[entry.sample]
            if tuple(sample.shape) != session.shape:
                raise ValueError(f"a step's samples must have the shape {session.shape}, not {tuple(sample.shape)}")
            rows.append(ControlRow(session=session.control, half=entry.half, sample=sample, timestep=timestep))

        def done(outcome: Sequence[Residuals] | BottegaError) -> None:
            self._connection.post(lambda link: self._hand_out(link, step.number, rows, outcome, incoming))

        self._executor.submit(StepRequest(owner=self, rows=rows, done=done, alone=step.alone))

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
                except (NoSharedMemory, TooLarge) as error:  # nothing was sent, and the connection still works
                    outcome = error
            self._connection.send_now(link, refusal(outcome, step=number))


class ControlNetLinks(StoreLinks[ControlNetWorkerLink]):
    """The server of workers' connections. Raises ConfigError if an address cannot be bound."""

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
            config.links,
            kind=kinds.CONTROLNET,
            what="the ControlNet server",
            settings=LinkServerSettings(limits=_LIMITS, devices=devices),
        )

    def new_handler(self, connection: Connection) -> ControlNetWorkerLink:
        """Return the handler of one worker's connection."""
        return ControlNetWorkerLink(
            connection, registry=self._registry, executor=self._executor, draining=lambda: self.draining
        )

    @property
    def sessions(self) -> Counter[str]:
        """Number of sessions of all connections, by ControlNet."""
        return sum((link.sessions for link in self.handlers), Counter[str]())


def _latent_shape(opened: SessionSpec, session: ControlSession) -> tuple[int, int, int]:
    layout = session.net.layout
    return layout.latent_channels, opened.height // layout.latent_scale, opened.width // layout.latent_scale


def send_residuals(link: Link, number: int, rows: Sequence[ControlRow], residuals: Sequence[Residuals]) -> None:
    """Write the rows' scaled residuals into a send buffer, deepest first, and announce each point once written."""
    by_point = residuals[0].by_point
    layout = residuals_layout(len(rows), tuple(_shape(tensor[0]) for tensor in by_point), by_point[0].dtype)
    # In a CUDA stream of this thread, so that the next forward pass does not delay the answer.
    with beside(by_point[0].device), link.start_message(layout, Deadline.after(MESSAGE_S)) as outgoing:
        head = tensor_at(layout, outgoing.parts, 0)
        head[0], head[1] = number, int(any(row_residuals.shared for row_residuals in residuals))
        # After the head, the points come deepest first.
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
    """Return the message that a lease is refused, or a step was not computed."""
    return refused_message(Refusal(lease=lease, step=step, error=job_error_to_json(error)))


def _written(residuals: Residuals, row: ControlRow, slots: Sequence[Tensor]) -> Iterator[None]:
    """Write the residuals of one row, point by point, deepest first."""
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
