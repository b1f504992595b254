"""The dispatcher, which runs attempts on workers: it sends jobs, follows events, and collects images and checkpoints.

The scheduler decides which worker gets a job. The AttemptObserver decides what happens after a worker is lost.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

from bottega.addons.interface.gateway_addon import AddOn
from bottega.addons.interface.views import Member
from bottega.background_tasks import BackgroundTasks
from bottega.errors import BottegaError, InternalError, ModelNotFound, QueueFull, Unavailable, WorkerLost
from bottega.gateway.dispatch.connection import AttemptObserver, DispatchedAttempt, WorkerConnection
from bottega.gateway.dispatch.job_traces import AttemptTimes, JobTraces
from bottega.gateway.dispatch.worker_client import AttemptEvents, WorkerClient
from bottega.gateway.jobs import conversion
from bottega.gateway.jobs.conversion import completed_provenance
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.storage import Storage
from bottega.gateway.jobs.values import JobCheckpoint
from bottega.gateway.signing import SigningFiles
from bottega.rpc.channel import MAX_ATTEMPT_MIB, Target
from bottega.rpc.status import from_job_error
from bottega.rules import MAX_CHECKPOINT_BYTES
from bottega.v1 import worker_pb2

# Number of completed attempts that are remembered, because reports that are on their way may still list them.
_JUST_COMPLETED = 256
# Upper bound on a request to a worker: the message limit, less the size of the deadline and other small fields.
_MAX_REQUEST_BYTES = (MAX_ATTEMPT_MIB << 20) - (64 << 10)
# Upper bound on decisions, which are stored with the job; each is some numbers.
_MAX_DECISIONS_BYTES = 4 << 10

_log = logging.getLogger(__name__)


class Dispatcher:
    """Runs attempts on workers and holds all attempts that are running.

    Args:
        connect: Creates the client of a worker.
        observer: Receives the progress and the end of each attempt.
        traces: Collects the times of each attempt.
        max_result_bytes: Upper bound on the bytes of all images of a job.
        weigh: Returns the weight of a tenant.
        signing: Has the signer of pictures, which signs them before they are stored.
    """

    def __init__(
        self,
        connect: Callable[[Target], WorkerClient],
        storage: Storage,
        addons: Sequence[AddOn],
        observer: AttemptObserver,
        *,
        traces: JobTraces,
        max_result_bytes: int,
        weigh: Callable[[str], float],
        signing: SigningFiles,
    ) -> None:
        self._signing = signing
        self._connect = connect
        self._traces = traces
        self._addons = addons
        self._storage = storage
        self._max_result_bytes = max_result_bytes
        self._weigh = weigh
        self._observer = observer
        self.connections: dict[Member, WorkerConnection] = {}
        """The connections by worker. A worker has one from when it joins until it is lost."""
        self._attempts: dict[str, DispatchedAttempt] = {}
        self._by_tenant: dict[str, Counter[str]] = {}
        self._running = BackgroundTasks("attempts")
        self._calls = BackgroundTasks("calls to workers")
        self._completed: deque[tuple[str, int]] = deque(maxlen=_JUST_COMPLETED)

    @property
    def attempts(self) -> int:
        """Number of running attempts. Any thread may read it."""
        return len(self._attempts)

    def running(self, model: str) -> Mapping[str, int]:
        """Return the number of running attempts of a model's jobs, by tenant."""
        return self._by_tenant.get(model, {})

    def running_of(self, tenant: str) -> int:
        """Return the number of running attempts of a tenant's jobs."""
        return sum(by_tenant[tenant] for by_tenant in self._by_tenant.values())

    def add_worker(self, member: Member) -> None:
        """Open a connection to a worker, unless there is one."""
        if member not in self.connections:
            client = self._connect(member.target)
            self.connections[member] = WorkerConnection(member, client, self._calls, self._keep_checkpoint)

    def remove_worker(self, member: Member) -> None:
        """Close the connection to a worker that is lost, and report each of its attempts as lost."""
        connection = self.connections.pop(member, None)
        if connection is None:
            return
        for attempt in list(connection.attempts.values()):
            self._abandon(attempt, used_s=attempt.used_s)
            self._report_loss(attempt, WorkerLost("the worker did not reconnect within its lease"))
        connection.close()

    def has_completed(self, attempt: worker_pb2.AttemptId) -> bool:
        """Return whether an attempt has just completed. The worker's next report may still list it as running."""
        return (attempt.job_id, attempt.number) in self._completed

    def start_attempt(self, job: Job, member: Member, *, free_at: float, exclusive: bool = False) -> None:
        """Start an attempt of a queued job. The worker is called before this returns.

        Args:
            job: The job.
            member: The worker.
            free_at: Time from which the worker could have run the job, on the monotonic clock.
            exclusive: Whether the worker runs no other job.
        """
        connection = self.connections[member]
        for other in connection.attempts.values():
            other.job.mark_shared()
        job.start_attempt(member.name, free_at=free_at, exclusive=exclusive)
        self._call(job, connection)
        self._observer.attempt_sent(job)

    def adopt_attempt(self, job: Job, connection: WorkerConnection) -> None:
        """Continue to read the events of a job's current attempt, which a worker ran before the gateway restarted."""
        self._call(job, connection)
        # Its newest checkpoint came before the attempt was known here. A new stream sends it again.
        connection.watch_checkpoints()

    def enable_previews(self, job: Job) -> None:
        """Request previews of the job from now on, also from an attempt that runs."""
        job.preview = True
        attempt = self._attempts.get(job.job_id)
        if attempt is not None:
            attempt.request_previews()

    def cancel_attempt(self, job: Job) -> None:
        """Stop the running attempt of a job that no longer needs it, here and on the worker."""
        attempt = self._attempts.get(job.job_id)
        if attempt is not None:
            self._abandon(attempt, used_s=attempt.used_until_now_s)
            self._note_trace(attempt)
            attempt.connection.stop_attempt(attempt.id)

    def detach(self) -> None:
        """Stop reading events, but let the workers go on: after its restart the gateway reads the events again."""
        for attempt in list(self._attempts.values()):
            self._abandon(attempt, used_s=attempt.used_s)
        self._running.cancel_soon()

    async def close(self) -> None:
        """Stop reading events, and end every call."""
        self.detach()
        for member in list(self.connections):
            self.remove_worker(member)
        await self._running.join()
        await self._calls.join()

    def _call(self, job: Job, connection: WorkerConnection) -> None:
        attempt = DispatchedAttempt(
            job=job,
            number=job.number,
            connection=connection,
            queued_at=job.times.queued_at,
            sent_at=job.clock.monotonic(),
            reported_at=job.clock.monotonic(),
        )
        self._attempts[job.job_id] = attempt
        self._by_tenant.setdefault(job.bare.model, Counter())[job.request.tenant] += 1
        connection.add(attempt)
        request = self._request(attempt)
        attempt.previewed = request.preview
        if job.request.kept_digest:
            events = self._run_with_kept(job, connection.client, request)
        else:
            events = connection.client.run_attempt(request)
        attempt.task = self._running.start(self._run(attempt, events))

    async def _run_with_kept(
        self, job: Job, client: WorkerClient, request: worker_pb2.RunAttemptRequest
    ) -> AttemptEvents:
        """Yield the events of an edit that may use the kept data of its image. Without that data, edit without it.

        A checkpoint that was made with the data is useless without it. Then the edit starts from the first step.
        """
        kept = await self._storage.read_kept(job.request.kept_digest)
        checkpoint, request.checkpoint = request.checkpoint, b""
        room_bytes = _MAX_REQUEST_BYTES - request.ByteSize() - len(kept)
        if room_bytes < 0:  # earlier attempts were too large for it as well, so the checkpoint fits
            _log.warning("the request is too large to add the kept data of its image", extra=conversion.job_fields(job))
            request.checkpoint = checkpoint
        else:
            request.kept = kept
            if kept and len(checkpoint) <= room_bytes:
                request.checkpoint = checkpoint
        async with contextlib.aclosing(client.run_attempt(request)) as events:
            async for event in events:
                yield event

    def _request(self, attempt: DispatchedAttempt) -> worker_pb2.RunAttemptRequest:
        job = attempt.job
        request = worker_pb2.RunAttemptRequest(
            attempt=attempt.id,
            spec=job.spec,
            preview=job.preview,
            request_id=job.log_id,
            decisions=job.decisions,
            share=worker_pb2.TenantShare(tenant=job.request.tenant, weight=self._weigh(job.request.tenant)),
        )
        for addon in self._addons:
            release = addon.prepare_attempt(job, attempt.connection.member, request)
            if release is not None:
                attempt.releases.append(release)
        if job.checkpoint is not None:  # an add-on may have dropped it, because it no longer fits
            request.checkpoint = job.checkpoint.data
        if job.deadline is not None:
            request.deadline_s = max(0.0, job.deadline - job.clock.monotonic())
        return request

    async def _run(self, attempt: DispatchedAttempt, events: AttemptEvents) -> None:
        try:
            await self._follow(attempt, events)
            await self._complete(attempt)
        except BottegaError as error:
            self._remove_if_current(attempt)
            self._note_trace(attempt)
            # ModelNotFound means that the worker has another model by now.
            elsewhere = isinstance(error, (Unavailable, QueueFull, ModelNotFound))
            if elsewhere and not any(isinstance(error, addon.final_errors) for addon in self._addons):
                self._report_loss(attempt, error)
            else:
                self._observer.attempt_failed(attempt.job, attempt.number, error)
        except Exception:  # noqa: BLE001 - the boundary of the task: whatever it is, the job must end
            _log.exception("an attempt failed with an unexpected error", extra=conversion.job_fields(attempt.job))
            self._remove_if_current(attempt)
            self._note_trace(attempt)
            self._observer.attempt_failed(attempt.job, attempt.number, InternalError("an internal fault"))

    async def _follow(self, attempt: DispatchedAttempt, events: AttemptEvents) -> None:
        async with contextlib.aclosing(events):
            async for event in events:
                self._apply(attempt, event)
                if attempt.provenance is not None:
                    return
        raise WorkerLost("the worker ended the attempt without a result")

    def _apply(self, attempt: DispatchedAttempt, event: worker_pb2.RunAttemptResponse) -> None:
        job, number = attempt.job, attempt.number
        match event.WhichOneof("event"):
            case "started":
                started = event.started
                job.start_denoising(number, steps_total=started.steps_total, steps_resumed=started.steps_resumed)
                attempt.started = True
                attempt.connection.member.revision += 1
                attempt.request_previews()
            case "progress":
                self._apply_progress(attempt, event.progress)
            case "decided":
                event.decided.DiscardUnknownFields()  # it is stored with the job, so it needs a bound
                if event.decided.ByteSize() > _MAX_DECISIONS_BYTES:
                    raise InternalError(f"the worker's decisions are larger than {_MAX_DECISIONS_BYTES} bytes")
                if job.set_decisions(number, event.decided):
                    self._observer.attempt_decided(job)
            case "image":
                attempt.append_chunk(event.image, max_bytes=self._max_result_bytes)
            case "kept":
                attempt.append_kept(event.kept)
            case "trace":
                attempt.trace = event.trace
            case "completed":
                attempt.note_provenance(event.completed.provenance)
            case "failed":
                raise from_job_error(event.failed)

    def _apply_progress(self, attempt: DispatchedAttempt, progress: worker_pb2.AttemptProgress) -> None:
        attempt.job.set_steps_done(attempt.number, progress.steps_done)
        attempt.note_device_s(progress.device_s)
        attempt.connection.member.revision += 1
        if progress.preview_jpeg:
            attempt.job.set_preview(attempt.number, progress.preview_index, progress.preview_jpeg)
        self._observer.attempt_advanced(attempt.job)

    async def _complete(self, attempt: DispatchedAttempt) -> None:
        job, number, provenance = attempt.job, attempt.number, attempt.provenance
        assert provenance is not None
        encoded = attempt.encoded_images()
        kept = attempt.kept_data(max_bytes=self._max_result_bytes - attempt.size_bytes)
        # The worker has sent everything. From here on its death does not matter.
        self._remove_if_current(attempt)
        full = completed_provenance(job, provenance)
        if (signer := await self._signing.signer()) is not None:
            began_s = time.monotonic()
            encoded = await signer.sign(encoded, job.bare, full)
            full.times.add(stage="sign", seconds=time.monotonic() - began_s)
        images = await self._storage.store_images(encoded, kept, tenant=job.request.tenant, job_id=job.job_id)
        self._completed.append((job.job_id, number))
        self._note_trace(attempt)
        self._observer.attempt_completed(job, number, images, full)

    def _keep_checkpoint(self, member: Member, news: worker_pb2.WatchCheckpointsResponse) -> None:
        attempt = self._attempts.get(news.attempt.job_id)
        if attempt is not None and attempt.connection.member is member and len(news.checkpoint) <= MAX_CHECKPOINT_BYTES:
            checkpoint = JobCheckpoint(steps_done=news.steps_done, data=news.checkpoint)
            if attempt.job.set_checkpoint(news.attempt.number, checkpoint):
                self._observer.attempt_saved(attempt.job)

    def _note_trace(self, attempt: DispatchedAttempt) -> None:
        if attempt.traced:
            return
        attempt.traced = True
        times = AttemptTimes(
            number=attempt.job.attempts,
            worker=attempt.connection.member.name,
            queued_at=attempt.queued_at,
            sent_at=attempt.sent_at,
            ended_at=attempt.job.clock.monotonic(),
            trace=attempt.trace,
        )
        self._traces.add_attempt(attempt.job, times)

    def _report_loss(self, attempt: DispatchedAttempt, error: BottegaError) -> None:
        self._note_trace(attempt)
        if isinstance(error, WorkerLost) and not attempt.connection.member.load.draining:
            self._observer.attempt_lost(attempt.job, attempt.number, error)
        else:
            self._observer.attempt_returned(attempt.job, attempt.number, error)

    def _remove_if_current(self, attempt: DispatchedAttempt) -> None:
        """Remove an attempt whose task has ended, unless another attempt of the job has replaced it."""
        if self._attempts.get(attempt.job.job_id) is attempt:
            self._remove(attempt, used_s=attempt.used_s)

    def _abandon(self, attempt: DispatchedAttempt, *, used_s: float | None) -> None:
        """Remove an attempt and cancel its task. Charge `used_s` device seconds to its tenant; None if unknown."""
        self._remove(attempt, used_s=used_s)
        if attempt.task is not None:
            attempt.task.cancel()
            attempt.task = None  # a cancelled task refers back to here: a cycle that would keep the job's request

    def _remove(self, attempt: DispatchedAttempt, *, used_s: float | None) -> None:
        job = attempt.job
        del self._attempts[job.job_id]
        by_tenant = self._by_tenant[job.bare.model]
        by_tenant[job.request.tenant] -= 1
        if not by_tenant[job.request.tenant]:
            del by_tenant[job.request.tenant]
        if not by_tenant:
            del self._by_tenant[job.bare.model]
        attempt.connection.remove(attempt)
        for release in attempt.releases:
            release()
        self._observer.attempt_over(job, used_s)
