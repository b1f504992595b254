"""Connections of workers: their sessions, requests and answers. All sessions and requests of a connection end with it.

One of its two threads checks incoming messages and the other sends, so a worker that does not read its answers delays
no other worker.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bottega import kinds
from bottega.addons.controlnets.engine import (
    ControlImages,
    ControlNetLease,
    ControlRow,
    ControlSession,
    LoadedControlNet,
)
from bottega.addons.controlnets.engine.messages import (
    ControlMessageKind,
    ControlStep,
    OpenedSession,
    Opening,
    Refusal,
    opened_message,
    point_of,
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
from bottega.errors import BottegaError, Draining, LinkError, NoSharedMemory
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
    read_number,
)

# Upper bound on a worker's sessions. It runs some tens of requests with at most 17 sessions each: a union with eight
# images has one for each span of steps between their begins and ends.
_MAX_SESSIONS = 4096
# Upper bound on the rows of a step. A step of sixteen rows with eight ControlNets has 128.
_MAX_ROWS = 512
# Upper bound on the pixels of the drawn image, and of a control image.
_MAX_PIXELS = 16 << 20
# How long the next residual of a running forward pass may take. A worker waits less for it (`stall_s`).
_RESIDUAL_S = 60.0
# Allocated only as messages need it: eight control images of four megapixels are 96 MiB.
_LIMITS = Limits(slots=8, slot_bytes=128 << 20)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _SessionLease:
    """The sessions of one request, and the lease of the ControlNets that they need."""

    opening: Opening
    controlnets: ControlNetLease


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
        self._sessions: dict[int, ControlSession] = {}  # those whose ControlNet is loaded
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
                self._sessions[opened.number] = session
        self._connection.send_now(link, opened_message(number, [_facts(session.net) for session in sessions]))

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
            if session is None or entry.half not in session.halves:
                raise ValueError(f"a step is for session {entry.session}, which is not open for it")
            sample, timestep = step.samples[entry.sample], step.timesteps[entry.sample]
            if (shape := tuple(sample.shape)) != session.sample_shape:
                raise ValueError(f"a step's samples must have the shape {session.sample_shape}, not {shape}")
            rows.append(ControlRow(session=session, half=entry.half, sample=sample, timestep=timestep))
        counts = [len(row.session.net.layout.points) for row in rows]
        if counts != sorted(counts, reverse=True):
            raise ValueError("a step's rows must be sorted by the number of their residuals")

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
                except BottegaError as error:
                    if isinstance(error, LinkError) and not isinstance(error, NoSharedMemory):
                        raise
                    outcome = error  # nothing was sent, or the message was aborted, and the connection still works
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


def _facts(net: LoadedControlNet) -> OpenedSession:
    layout = net.layout
    return OpenedSession(residuals=len(layout.points), reads_tokens=net.reads_tokens, singles=layout.singles)


def send_residuals(link: Link, number: int, rows: Sequence[ControlRow], residuals: Sequence[Residuals]) -> None:
    """Write the rows' scaled residuals into a send buffer, and announce each point once it is written.

    Residuals that are still being computed are waited for one by one. Raises BottegaError if one never comes; the
    message is then aborted.

    Args:
        rows: Those with most residuals first.
    """
    net = rows[0].session.net
    shapes = tuple(net.layout.shapes(*rows[0].session.latent_size))
    counts = tuple(len(row.session.net.layout.points) for row in rows)
    layout = residuals_layout(len(rows), shapes, net.dtype, counts=counts)
    for row_residuals in residuals:
        row_residuals.stream.wait(0, _RESIDUAL_S)  # The worker times the message, less the time of later residuals.
    # In a CUDA stream of this thread, so that the next forward pass does not delay the answer.
    with beside(net.device), link.start_message(layout, Deadline.after(MESSAGE_S)) as outgoing:
        head = tensor_at(layout, outgoing.parts, 0)
        head[0], head[1] = number, int(any(row_residuals.shared for row_residuals in residuals))
        for index, spec in enumerate(layout.specs[1:], start=1):
            slot = tensor_at(layout, outgoing.parts, index)
            if (point := point_of(spec)) is None:
                slot[0] = int(1e6 * max(row_residuals.stream.streamed_s for row_residuals in residuals))
            else:
                streamed = [row_residuals.stream.wait(point, _RESIDUAL_S) for row_residuals in residuals[: len(slot)]]
                for place, (row, row_residuals, computed) in enumerate(zip(rows, residuals, streamed, strict=False)):
                    _write(computed[row_residuals.place], row.session.scales[point], slot[place])
                    keep_until_used(computed)
            outgoing.extend(Deadline.after(MESSAGE_S))
            outgoing.ready(index + 1)


@torch.inference_mode()
def _write(residual: Tensor, scale: float | Tensor, slot: Tensor) -> None:
    """Write a scaled residual into a send buffer, which may be in host memory."""
    if residual.device == slot.device:
        torch.mul(residual, scale, out=slot)
    else:
        slot.copy_(torch.mul(residual, scale))


def refusal(error: BottegaError, *, lease: int | None = None, step: int | None = None) -> TensorMessage:
    """Return the message that a lease is refused, or a step was not computed."""
    return refused_message(Refusal(lease=lease, step=step, error=job_error_to_json(error)))
