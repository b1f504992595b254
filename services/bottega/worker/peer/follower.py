"""The follower's side of a pair: accepts the leader's connection, and computes rows for it while the engine is idle.

A thread of the connection receives messages and passes computations on to the engine's thread. While the engine has
work of its own, the connection's thread declines at once, so that two engines that offload to each other never wait for
each other.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace

from bottega.engine.parallel.messages import (
    PairMessageKind,
    RemoteNoise,
    RemoteStep,
    noise_message,
    read_job,
    read_step,
)
from bottega.engine.parallel.remote_rows import ComputedRows, RemoteJob, RemoteJobs
from bottega.errors import BottegaError, PeerDead, Unavailable
from bottega.sampled_log import SampledLog
from bottega.transport import (
    Connection,
    DeviceLinks,
    Endpoints,
    Incoming,
    Limits,
    LinkCounters,
    LinkHandler,
    LinkServer,
    LinkServerSettings,
    Offer,
    WholeMessage,
    kind_of,
    number_message,
    read_number,
)

_log = logging.getLogger(__name__)

# Upper bound on the leader's jobs that are kept. A leader runs some tens.
_MAX_REMOTE_JOBS = 256
# Slots grow as messages need it: eight control images of four megapixels are 96 MiB. A living leader receives and sends
# messages at once, because its threads do nothing else.
_SETTINGS = LinkServerSettings(limits=Limits(slots=4, slot_bytes=128 << 20), send_s=1.0, receive_s=5.0)
_REFUSED = SampledLog(
    _log,
    "a job of the other worker of the pair cannot be computed here",
    more="more jobs of the other worker of the pair cannot be computed here",
    counted="jobs",
    level=logging.WARNING,
)


class LeaderLink(LinkHandler):
    """A connection from the leading worker. The follower serves the newest one."""

    def __init__(self, connection: Connection, follower: Follower) -> None:
        self.connection = connection
        self._follower = follower
        # The leader's numbers of its jobs, and whether the leader waits for an answer.
        self._remote_jobs: set[int] = set()
        self._stepping = False

    def on_open(self, connection: Connection) -> None:
        """Make this the connection that the follower serves, in place of an earlier one."""
        self._follower.begin(self)

    def on_end(self, cause: BottegaError) -> None:
        """Tell the follower that this connection has ended, so that it drops the connection's work."""
        self._follower.end(self)

    def on_message(self, connection: Connection, incoming: Incoming) -> None:
        """Handle a message. The engine's thread does the computations."""
        layout = incoming.layout
        with incoming:
            parts = connection.wait_all_parts(incoming)
            match PairMessageKind(kind_of(layout)):
                case PairMessageKind.STEP:
                    self._step(read_step(layout, parts))
                case PairMessageKind.JOB:
                    number, remote_job = read_job(layout, parts)
                    if number in self._remote_jobs or len(self._remote_jobs) >= _MAX_REMOTE_JOBS:
                        raise ValueError(f"job {number} was sent before, or more than {_MAX_REMOTE_JOBS} are open")
                    self._remote_jobs.add(number)
                    self._follower.admit(self, number, remote_job)
                case PairMessageKind.LEAVE:
                    left = read_number(layout, parts)
                    if left not in self._remote_jobs:
                        raise ValueError(f"the leader ended job {left}, which it never sent")
                    self._remote_jobs.remove(left)
                    self._follower.dismiss(left)
                case kind:
                    raise ValueError(f"a leader must not send a {kind} message")

    def decline(self, step: RemoteStep) -> None:
        """Decline to compute a step. The leader then computes it itself."""
        self._stepping = False
        self.connection.send(number_message(PairMessageKind.DECLINED, step.number))

    def answer(self, step: RemoteStep, computed: ComputedRows) -> None:
        """Send the computed rows of a step to the leader."""
        self._stepping = False
        noise = RemoteNoise(
            number=step.number, places=computed.places, noise=computed.noise, waited_s=computed.waited_s
        )
        self.connection.send(noise_message(noise))

    def _step(self, step: RemoteStep) -> None:
        if self._stepping:
            raise ValueError("the leader sent a step before the last one was answered")
        self._stepping = True
        if self._follower.busy:
            self.decline(step)
        else:
            self._follower.compute(self, step)


class Follower(LinkServer[LeaderLink]):
    """The server to which the leading worker connects.

    Args:
        post: Runs a function in the engine's thread soon.

    Raises:
        ConfigError: An address cannot be bound.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        *,
        remote_jobs: RemoteJobs,
        counters: LinkCounters,
        post: Callable[[Callable[[], None]], None],
        devices: DeviceLinks | None = None,
    ) -> None:
        self.busy = False
        self._remote_jobs = remote_jobs
        self._post = post
        self._leader = ""  # name of the worker that is linked, or will be
        self._link: LeaderLink | None = None
        self._changing = threading.Lock()
        settings = replace(_SETTINGS, devices=devices)
        super().__init__(endpoints, service="the worker", peer="its peer", settings=settings, counters=counters)

    def new_handler(self, connection: Connection) -> LeaderLink:
        """Return the handler of a new connection."""
        return LeaderLink(connection, self)

    @property
    def linked(self) -> bool:
        """Whether a leader is connected."""
        return self._link is not None

    def offer(self, worker: str, link_id: str, *, caller: str) -> Offer:
        """Return an offer of a connection for the leading worker.

        Args:
            caller: Host of that worker.

        Raises:
            Unavailable: Another worker leads already.
            LinksFull: There are too many connections.
            InvalidRequest: The ID of the connection is malformed.
        """
        with self._changing:
            if self._leader not in ("", worker) and self.linked:
                raise Unavailable(f"this worker already computes for {self._leader}, so it cannot compute for {worker}")
            self._leader = worker
        return super().offer(worker, link_id, caller=caller)

    def report_busy(self, *, busy: bool) -> None:
        """Tell the leader whether the engine has work of its own. Called by the engine's thread."""
        with self._changing:
            if busy != self.busy:
                self.busy = busy
                self._send(number_message(PairMessageKind.STATE, int(busy)))

    def report_jobs(self) -> None:
        """Tell the leader for which of its jobs rows can be computed now. Called by the engine's thread."""
        for status in self._remote_jobs.changed_statuses():
            if status.error is not None:
                _REFUSED.log_event(details={"text": status.error.message})
            kind = PairMessageKind.READY if status.ready else PairMessageKind.REFUSED
            self._send(number_message(kind, status.remote_job))

    def begin(self, link: LeaderLink) -> None:
        """Serve a new connection."""
        with self._changing:
            before, self._link = self._link, link
            link.connection.send(number_message(PairMessageKind.STATE, int(self.busy)))
        if before is not None:
            before.connection.close(PeerDead("the other worker of the pair has connected again"))
        self._post(self._remote_jobs.clear)

    def end(self, link: LeaderLink) -> None:
        """Stop serving a connection that has ended."""
        with self._changing:
            if self._link is not link:
                return
            self._link = None
        self._post(self._remote_jobs.clear)

    def admit(self, link: LeaderLink, number: int, remote_job: RemoteJob) -> None:
        """Make the engine's thread prepare a job of the leader."""

        def admit() -> None:
            try:
                if link is self._link:
                    self._remote_jobs.admit(number, remote_job)
            except BottegaError as error:
                _REFUSED.log_event(details={"text": error.message})
                link.connection.send(number_message(PairMessageKind.REFUSED, number))

        self._post(admit)

    def dismiss(self, number: int) -> None:
        """Make the engine's thread end a job of the leader."""
        self._post(lambda: self._remote_jobs.dismiss(number))

    def compute(self, link: LeaderLink, step: RemoteStep) -> None:
        """Make the engine's thread compute the rows of a step and send them."""
        self._post(lambda: self._compute(link, step))

    def _compute(self, link: LeaderLink, step: RemoteStep) -> None:
        if link is not self._link:
            return  # nobody waits for it
        computed = None
        try:
            computed = self._remote_jobs.compute(step.rows, step.samples, step.timesteps)
        except Exception as error:  # noqa: BLE001 - the boundary of a step, which the leader then computes itself
            _log.warning(
                "batch rows of the leading worker could not be computed",
                extra={"why": f"{type(error).__name__}: {error}"},
            )
        self.report_jobs()  # before the answer, so that the leader does not offload rows again that have failed
        if computed is None:
            link.decline(step)
        else:
            link.answer(step, computed)

    def _send(self, message: WholeMessage) -> None:
        link = self._link  # read once, because the link's thread may end it meanwhile
        if link is not None:
            link.connection.send(message)
