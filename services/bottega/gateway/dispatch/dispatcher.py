"""Runs attempts on workers: sends the job, follows its events, gathers its images and checkpoints.

Knows one worker call at a time; who gets which job, and what follows from a loss, is decided elsewhere. The
worker is behind a Protocol, so this module knows no gRPC.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from bottega.errors import (
    BottegaError,
    InternalError,
    ModelNotFound,
    NoLora,
    QueueFull,
    TooLarge,
    Unavailable,
    WorkerLost,
)
from bottega.gateway.addons.controlnets.placement import ControlNetPlacement
from bottega.gateway.addons.loras.resolver import LoraResolver
from bottega.gateway.dispatch.attempts import AttemptEvents, AttemptObserver, WorkerClient
from bottega.gateway.dispatch.background_calls import BackgroundCalls, gather_checkpoints
from bottega.gateway.fleet.members import Member
from bottega.gateway.jobs import log_lines
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.provenance import completed_provenance
from bottega.gateway.jobs.storage import Storage
from bottega.gateway.jobs.values import JobCheckpoint
from bottega.rpc.status import from_job_error
from bottega.v1 import worker_pb2
from bottega.v1.generation_pb2 import Provenance

_LIST_DEADLINE_S = 2.0
# Ample: one of a picture is under 1 MiB.
_MAX_CHECKPOINT_BYTES = 16 << 20

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class _Attempt:
    job: Job
    number: int
    member: Member
    task: asyncio.Task[None] | None = None
    images: dict[int, bytearray] = field(default_factory=dict)
    size_bytes: int = 0
    provenance: Provenance | None = None
    started: bool = False
    previewed: bool = False


@dataclass(slots=True, kw_only=True)
class _WorkerConnection:
    """The way to a worker, and what it runs by job. moves: counts what changed of that."""

    client: WorkerClient
    checkpoints: asyncio.Task[None]
    attempts: dict[str, _Attempt] = field(default_factory=dict)
    moves: int = 0


class Dispatcher:
    """All attempts that run. connect: makes the client for an address."""

    def __init__(
        self,
        *,
        connect: Callable[[str], WorkerClient],
        placement: ControlNetPlacement,
        loras: LoraResolver,
        storehouse: Storage,
        max_result_bytes: int,
    ) -> None:
        self._connect = connect
        self._placement = placement
        self._loras = loras
        self._storehouse = storehouse
        self._max_result_bytes = max_result_bytes
        self._lines: dict[Member, _WorkerConnection] = {}
        self._attempts: dict[str, _Attempt] = {}
        self._errands = BackgroundCalls()
        self._keeping: set[asyncio.Task[None]] = set()
        self.observer: AttemptObserver | None = None

    def open(self, member: Member) -> None:
        """Makes ready to call a worker. Harmless when ready."""
        if member not in self._lines:
            client = self._connect(member.registration.address)
            self._lines[member] = _WorkerConnection(client=client, checkpoints=self._watch_checkpoints(member, client))

    def running_on(self, member: Member) -> Sequence[Job]:
        """Jobs whose attempt is with that worker, first come first."""
        line = self._lines.get(member)
        return [attempt.job for attempt in line.attempts.values()] if line else ()

    def moves(self, member: Member) -> int:
        """A number that is another one whenever what runs with that worker has changed or denoised further."""
        line = self._lines.get(member)
        return line.moves if line else -1

    def run(self, job: Job, member: Member, *, free_at: float, alone: bool = False) -> None:
        """Begins an attempt at a queued job: the worker is called before this returns.

        free_at: when the worker could take it, on the monotonic clock. alone: whether it has nothing else.
        """
        line = self._lines[member]
        for other in line.attempts.values():
            other.job.mark_shared()
        job.start_attempt(member.name, free_at=free_at, exclusive=alone)
        self._call(job, member, line)
        if self.observer:
            self.observer.attempt_sent(job)

    def reaches(self, member: Member) -> bool:
        """Whether there is a way to a worker: from its joining until it is lost."""
        return member in self._lines

    async def attempts_at(self, member: Member) -> Sequence[worker_pb2.AttemptSummary]:
        """The attempts that a worker has, of earlier lives of the gateway too. Raises BottegaError."""
        line = self._lines.get(member)
        return await line.client.list_attempts(deadline_s=_LIST_DEADLINE_S) if line else ()

    def adopt(self, job: Job, member: Member) -> None:
        """Follows the attempt that a worker has brought along, which the job counts as its current one."""
        line = self._lines[member]
        self._call(job, member, line)
        # Its newest checkpoint came when nobody knew of the attempt; who watches anew is told it again.
        line.checkpoints.cancel()
        line.checkpoints = self._watch_checkpoints(member, line.client)

    def show(self, job: Job) -> None:
        """Previews of the job are wanted from now on, of an attempt that runs as well."""
        job.preview = True
        attempt = self._attempts.get(job.job_id)
        if attempt is not None:
            self._ask_for_previews(attempt)

    def drop(self, job: Job) -> None:
        """Stops the attempt at a job that has ended some other way, and tells its worker."""
        attempt = self._forget(job.job_id)
        if attempt is not None:
            self.stop_attempt(attempt.member, _name(attempt))

    def lose(self, member: Member) -> None:
        """A worker is lost, and all its attempts with it."""
        line = self._lines.pop(member, None)
        if line is None:
            return
        line.checkpoints.cancel()
        for attempt in list(line.attempts.values()):
            self._forget(attempt.job.job_id)
            self._lost(attempt, WorkerLost("the worker was cut off"))
        self._errands.close_client(line.client)

    def stop_attempt(self, member: Member, attempt: worker_pb2.AttemptId) -> None:
        """Tells a worker, as far as it can be reached, that nobody waits for an attempt."""
        line = self._lines.get(member)
        if line is not None:
            self._errands.stop_attempt(line.client, attempt)

    def stop_stale_attempt(self, member: Member, attempt: worker_pb2.AttemptId) -> None:
        """The same of one that the worker reports, now or when it reports it again."""
        line = self._lines.get(member)
        if line is not None:
            self._errands.stop_stale_attempt(line.client, attempt)

    def let_go(self) -> None:
        """Follows no attempt any more, and stops none: a later life of the gateway takes them up."""
        for attempt in list(self._attempts.values()):
            self._forget(attempt.job.job_id)
        for task in self._keeping:
            task.cancel()

    async def close(self) -> None:
        """Follows nothing and ends every call."""
        self.let_go()
        for member in list(self._lines):
            self.lose(member)
        await asyncio.gather(*self._keeping, return_exceptions=True)
        await self._errands.close()

    def _call(self, job: Job, member: Member, line: _WorkerConnection) -> None:
        attempt = _Attempt(job=job, number=job.number, member=member)
        self._attempts[job.job_id] = line.attempts[job.job_id] = attempt
        line.moves += 1
        hosts = self._placement.place(job, member)  # first: the checkpoint may be of no use with them
        request = _request(attempt, hosts, self._loras.stores() if job.bare.loras else ())
        attempt.previewed = request.preview
        events = line.client.run_attempt(request)
        attempt.task = asyncio.create_task(self._run(attempt, events))

    async def _run(self, attempt: _Attempt, events: AttemptEvents) -> None:
        try:
            await self._follow(attempt, events)
            await self._complete(attempt)
        except NoLora as error:  # another worker would not get it either
            self._over(attempt)
            if self.observer:
                self.observer.attempt_failed(attempt.job, attempt.number, error)
        except (Unavailable, QueueFull, ModelNotFound) as error:  # the last of a worker that has another model by now
            self._over(attempt)
            self._lost(attempt, error)
        except BottegaError as error:
            self._over(attempt)
            if self.observer:
                self.observer.attempt_failed(attempt.job, attempt.number, error)
        except Exception:  # noqa: BLE001 - the boundary of the task: whatever it is, the job must end
            _log.exception("attempt failed unexpectedly", extra=log_lines.job_fields(attempt.job))
            self._over(attempt)
            if self.observer:
                self.observer.attempt_failed(attempt.job, attempt.number, InternalError("an internal fault"))

    async def _follow(self, attempt: _Attempt, events: AttemptEvents) -> None:
        async with contextlib.aclosing(events):
            async for event in events:
                self._take(attempt, event)
                if attempt.provenance is not None:
                    return
        raise WorkerLost("the worker ended the attempt without a result")

    def _take(self, attempt: _Attempt, event: worker_pb2.RunAttemptResponse) -> None:
        job, number = attempt.job, attempt.number
        match event.WhichOneof("event"):
            case "started":
                started = event.started
                job.start_denoising(number, steps_total=started.steps_total, steps_resumed=started.steps_resumed)
                attempt.started = True
                self._moved(attempt)
                self._ask_for_previews(attempt)
            case "progress":
                self._take_progress(attempt, event.progress)
            case "decided":
                if job.set_decisions(number, event.decided) and self.observer:
                    self.observer.attempt_decided(job)
            case "image":
                self._take_chunk(attempt, event.image)
            case "completed":
                attempt.provenance = event.completed.provenance
            case "failed":
                raise from_job_error(event.failed)

    def _take_progress(self, attempt: _Attempt, progress: worker_pb2.AttemptProgress) -> None:
        attempt.job.set_steps_done(attempt.number, progress.steps_done)
        self._moved(attempt)
        if progress.preview_jpeg:
            attempt.job.set_preview(attempt.number, progress.preview_index, progress.preview_jpeg)
        if self.observer:
            self.observer.attempt_advanced(attempt.job)

    def _take_chunk(self, attempt: _Attempt, chunk: worker_pb2.AttemptImageChunk) -> None:
        attempt.size_bytes += len(chunk.chunk)
        if attempt.size_bytes > self._max_result_bytes:
            limit = str(self._max_result_bytes)
            raise TooLarge(f"the images are over {limit} bytes together", metadata={"max_result_bytes": limit})
        attempt.images.setdefault(chunk.index, bytearray()).extend(chunk.chunk)

    async def _complete(self, attempt: _Attempt) -> None:
        job, number, provenance = attempt.job, attempt.number, attempt.provenance
        assert provenance is not None
        if sorted(attempt.images) != list(range(job.spec.num_images)):
            raise WorkerLost("the worker did not send every image")
        encoded = [bytes(attempt.images[index]) for index in range(job.num_images)]
        # The worker has done its part: what becomes of it is of no matter from here on.
        self._over(attempt)
        with self._kept_going():
            pictures = await self._storehouse.store_images(encoded)
        if self.observer:
            self.observer.attempt_completed(job, number, pictures, completed_provenance(job, provenance))

    @contextlib.contextmanager
    def _kept_going(self) -> Iterator[None]:
        """In the block, the attempt whose task this is runs with no worker, and is ended with us at the latest."""
        task: asyncio.Task[None] | None = asyncio.current_task()
        assert task is not None
        self._keeping.add(task)
        try:
            yield
        finally:
            self._keeping.discard(task)

    def _watch_checkpoints(self, member: Member, client: WorkerClient) -> asyncio.Task[None]:
        take = functools.partial(self._take_checkpoint, member)
        return asyncio.create_task(gather_checkpoints(client, member.name, take))

    def _take_checkpoint(self, member: Member, news: worker_pb2.WatchCheckpointsResponse) -> None:
        attempt = self._attempts.get(news.attempt.job_id)
        if attempt is not None and attempt.member is member and len(news.checkpoint) <= _MAX_CHECKPOINT_BYTES:
            attempt.job.set_checkpoint(
                news.attempt.number, JobCheckpoint(steps_done=news.steps_done, data=news.checkpoint)
            )

    def _ask_for_previews(self, attempt: _Attempt) -> None:
        """Where they are wanted, and the worker has not been told. Not before it surely knows the attempt."""
        if attempt.job.preview and attempt.started and not attempt.previewed:
            attempt.previewed = True
            self._errands.preview_attempt(self._lines[attempt.member].client, _name(attempt), attempt.job)

    def _lost(self, attempt: _Attempt, error: BottegaError) -> None:
        if not self.observer:
            return
        if isinstance(error, WorkerLost) and not attempt.member.load.draining:
            self.observer.attempt_lost(attempt.job, attempt.number, error)
        else:
            self.observer.attempt_returned(attempt.job, attempt.number, error)

    def _over(self, attempt: _Attempt) -> None:
        """Takes out an attempt whose own task says that it is over."""
        if self._attempts.get(attempt.job.job_id) is attempt:
            self._take_out(attempt)

    def _forget(self, job_id: str) -> _Attempt | None:
        """Takes out an attempt and ends its task."""
        attempt = self._attempts.get(job_id)
        if attempt is None:
            return None
        self._take_out(attempt)
        if attempt.task is not None:
            attempt.task.cancel()
            attempt.task = None  # it keeps how it was cancelled, which leads here: a cycle that holds the job's request
        return attempt

    def _take_out(self, attempt: _Attempt) -> None:
        del self._attempts[attempt.job.job_id]
        self._placement.release(attempt.job)
        line = self._lines.get(attempt.member)
        if line is not None:
            del line.attempts[attempt.job.job_id]
            line.moves += 1

    def _moved(self, attempt: _Attempt) -> None:
        line = self._lines.get(attempt.member)
        if line is not None:
            line.moves += 1


def _name(attempt: _Attempt) -> worker_pb2.AttemptId:
    return worker_pb2.AttemptId(job_id=attempt.job.job_id, number=attempt.number)


def _request(
    attempt: _Attempt, hosts: Sequence[worker_pb2.ControlNetHosts], stores: Sequence[worker_pb2.LoraStore]
) -> worker_pb2.RunAttemptRequest:
    job = attempt.job
    request = worker_pb2.RunAttemptRequest(
        attempt=_name(attempt),
        spec=job.spec,
        checkpoint=job.checkpoint.data if job.checkpoint else b"",
        preview=job.preview,
        request_id=job.log_id,
        controlnets=hosts,
        lora_stores=stores,
        decisions=job.decisions,
    )
    if job.deadline is not None:
        request.deadline_s = max(0.0, job.deadline - job.clock.monotonic())
    return request
