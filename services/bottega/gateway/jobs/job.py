"""One job and its states: queued, running, then completed, failed or cancelled; queued again when its worker is lost.

Every attempt has a number, and only the newest attempt counts: a late event of an earlier one changes nothing. How a
job ends is decided first (`outcome`), which stops every other change, and published when it is durable (`finish`).

    state      what happens                                     next
    queued     it is new, and an identical job's result answers completed, before it is stored
               a worker is free for it                          running, with the next number
               its deadline passes, or cannot be met any more   failed
               no worker of its model within the grace          failed: NO_WORKER
               no server has one of its ControlNets             failed: NO_CONTROLNET, after the grace
    running    progress, checkpoint of the newest attempt       running
               all its images came, and are stored              completed
               the worker reports that it cannot be drawn       failed
               the worker refuses the attempt or returns it     queued, first; the worker is backed off; 60 times a
                                                                worker
               the worker reaches no server of a ControlNet     queued, first; these servers are backed off; as often
               the worker is cut off                            queued, first; max_attempts times
               the worker died, others were running beside it   queued, first; quarantined
               the worker died, and it ran exclusively          queued, first; quarantined; the second time failed:
                                                                POISONED
    live       somebody cancels                                 cancelled; its attempt is stopped
    ended      anything                                         unchanged

A quarantined job runs exclusively: it takes an idle worker, or one is cleared for it, and nothing joins it until it has
ended or got further than it was when the worker died. If another worker dies after that, the job stays quarantined
until it ends. So a job sees at most two deaths beside others, no job fails because of its neighbours, and a poison pill
fails after two more deaths.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bottega import rules
from bottega.addons.interface.views import MAX_ATTEMPTS, AddOnJob
from bottega.clocks import Clock
from bottega.errors import BottegaError, JobCancelled, WorkerLost
from bottega.gateway.jobs import specs
from bottega.gateway.jobs.store import LIVE
from bottega.gateway.jobs.values import JobCheckpoint, JobOutcome, JobPreview, JobTimes, QueuePosition, StoredImage
from bottega.v1.generation_pb2 import GenerationSpec, Provenance
from bottega.v1.image_pb2 import (
    JOB_STATE_CANCELLED,
    JOB_STATE_COMPLETED,
    JOB_STATE_FAILED,
    JOB_STATE_QUEUED,
    JOB_STATE_RUNNING,
    JobState,
)
from bottega.v1.worker_pb2 import AttemptDecisions

_COUNT_BITS = MAX_ATTEMPTS.bit_length()
# Deadlines that differ by less are the same: a repeated call gives its deadline a little later.
_SAME_DEADLINE_S = 0.5


@dataclass(slots=True, kw_only=True, eq=False)
class Job(AddOnJob):
    """A job of the gateway, from its acceptance until it has ended. The SDK has a class of the same name.

    Only its methods change it, and each returns whether it changed anything. It has many fields, because it holds
    everything that the gateway knows about a job, in three groups, by how long they live. AddOnJob has the rest.
    """

    # Stored when the job is accepted. Later they only lose data, when the job ends.

    spec: GenerationSpec
    """The complete spec. At the end its input images are removed, and if it is cancelled, long texts are shortened."""
    sequence: int = 0
    """Number of the job in the order of arrival of all jobs; 0 until it is stored."""
    created_wall: float = 0.0

    # Stored again at every change and when the job ends, as `losses.deaths` is.

    state: JobState.ValueType = JOB_STATE_QUEUED
    deadline: float | None = None
    """Time after which no caller wants the result, on the monotonic clock; None means no deadline."""
    started_wall: float | None = None
    ended_wall: float | None = None
    images: tuple[StoredImage, ...] = ()
    error: BottegaError | None = None

    # In memory only.

    clock: Clock
    life: int = 0
    """Number of times that the gateway was started before this process."""
    preview: bool = False
    """Whether a caller wants previews."""
    exclusive: bool = False
    """Whether the worker has run no other job since the current attempt started."""
    queue_position: QueuePosition | None = None
    times: JobTimes = field(default_factory=JobTimes)
    previews: dict[int, JobPreview] = field(default_factory=dict)
    checkpoint: JobCheckpoint | None = None
    outcome: JobOutcome | None = None
    """How the job ends, None while that is undecided. It is published once it is stored durably."""
    detached: BottegaError | None = None
    """The error for callers that watch the job if the gateway no longer follows it, else None."""
    listeners: set[Callable[[], None]] = field(default_factory=set)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        now, now_wall = self.clock.monotonic(), self.clock.wall()
        self.created_wall = self.created_wall or now_wall
        self.job_id = self.job_id or _new_job_id(self.created_wall)
        self.times.queued_at, self.times.created_at = now, now - max(0.0, now_wall - self.created_wall)
        self.num_images, self.rows = self.spec.num_images, specs.rows(self.spec)
        self.controlnets = tuple(net.name for net in self.bare.controlnets)
        self.loras = tuple(lora.digest for lora in self.bare.loras)
        self.lora_set = tuple(sorted((lora.digest, lora.scale) for lora in self.bare.loras if not lora.token))
        self.steps.total = specs.steps_to_run(self.spec, keeps_steps=self.request.keeps_steps) * self.num_images
        if self.losses.deaths:
            self.losses.quarantined_until = self.steps.total  # its steps before the restart are not stored

    @property
    def log_id(self) -> str:
        """The request ID in the log lines about the job, in the gateway and in workers; never empty."""
        return self.request.request_id or self.request.log_id or self.job_id

    @property
    def live(self) -> bool:
        """Whether the job has not ended."""
        return self.state in LIVE

    @property
    def open(self) -> bool:
        """Whether the outcome of the job is still undecided."""
        return self.live and self.outcome is None

    @property
    def age_s(self) -> float:
        """Seconds from the job's acceptance to its end, or until now."""
        return (self.clock.monotonic() if self.times.ended_at is None else self.times.ended_at) - self.times.created_at

    @property
    def quarantined(self) -> bool:
        """Whether the job must run alone, because a worker died while running it and it has made no new steps since."""
        return self.losses.quarantined_until is not None and self.steps.done <= self.losses.quarantined_until

    def is_current(self, number: int) -> bool:
        """Return whether `number` is the newest attempt of a running job. Events of other attempts are ignored."""
        return self.open and self.state == JOB_STATE_RUNNING and number == self.number

    def mark_durable(self) -> None:
        """Note that the job is stored durably. From now on it waits for a worker."""
        now = self.clock.monotonic()
        self.times.acknowledge_s, self.times.queued_at = now - self.times.queued_at, now

    def start_attempt(self, worker: str, *, free_at: float | None = None, exclusive: bool = False) -> int:
        """Assign the job to a worker, and return the number of the new attempt.

        Args:
            worker: Name of the worker.
            free_at: Time from which the worker could run the job, on the monotonic clock; None means now. The time
                before it counts as queueing, the time after it as routing.
            exclusive: Whether the worker runs no other job.
        """
        assert self.open
        assert self.state == JOB_STATE_QUEUED
        self._run(worker, self.life << _COUNT_BITS | (self.attempts + 1), exclusive=exclusive)
        self.times.routed_at = max(self.times.queued_at, self.clock.monotonic() if free_at is None else free_at)
        self.times.queue_s += self.times.routed_at - self.times.queued_at
        self._notify()
        return self.number

    def adopt_attempt(self, worker: str, number: int) -> bool:
        """Follow an attempt that a worker still runs after a restart of the gateway, unless a later one is known."""
        if not self.open or number < self.number:
            return False
        self.times.routed_at = self.clock.monotonic()
        if self.state == JOB_STATE_QUEUED:
            self.times.queue_s += self.times.routed_at - self.times.queued_at
        self._run(worker, number, exclusive=self.exclusive)
        self._notify()
        return True

    def mark_dispatched(self) -> float:
        """Note that the worker has been called, and return the seconds that routing this attempt took."""
        route_s = self.clock.monotonic() - self.times.routed_at
        self.times.route_s += route_s
        return route_s

    def start_denoising(self, number: int, *, steps_total: int, steps_resumed: int) -> bool:
        """Note that the attempt starts denoising. Its checkpoint spares it the first `steps_resumed` steps."""
        if not self.is_current(number):
            return False
        self.steps.repeated += max(0, self.steps.done - steps_resumed)
        self.steps.done, self.steps.total = steps_resumed, steps_total
        self._notify()
        return True

    def set_steps_done(self, number: int, steps_done: int) -> bool:
        """Set the number of denoising steps that the attempt has completed, over all images."""
        if not self.is_current(number):
            return False
        self.steps.done = steps_done
        self._notify()
        return True

    def set_preview(self, number: int, index: int, jpeg: bytes) -> bool:
        """Set the newest preview of the image with this index."""
        if not self.is_current(number) or not 0 <= index < self.num_images:
            return False
        newest = max((preview.version for preview in self.previews.values()), default=0)
        self.previews[index] = JobPreview(jpeg=jpeg, version=newest + 1)
        self._notify()
        return True

    @property
    def keeps_data(self) -> bool:
        """Whether workers keep data of the job's images, such as latents, for later edits of them."""
        return rules.keeps_data(self.bare)

    def set_checkpoint(self, number: int, checkpoint: JobCheckpoint) -> bool:
        """Store the newest checkpoint of the attempt.

        Jobs that keep data have no checkpoints: they must keep the latents of all steps, and a checkpoint lacks those
        of earlier steps. A later attempt draws the same images from the first step.
        """
        if not self.is_current(number) or self.keeps_data:
            return False
        self.checkpoint = checkpoint
        return True

    def adopt_checkpoint(self, checkpoint: JobCheckpoint, versions: Mapping[str, str]) -> bool:
        """Use a checkpoint that another scheduler stored, made with these versions of ControlNets, if there is none."""
        if not self.open or self.checkpoint is not None or self.versions or self.keeps_data:
            return False
        self.checkpoint, self.versions = checkpoint, versions
        return True

    def set_decisions(self, number: int, decisions: AttemptDecisions) -> bool:
        """Set all decisions that attempts have made so far, including earlier attempts."""
        if not self.is_current(number) or decisions == self.decisions:
            return False
        self.decisions = decisions
        return True

    def use_controlnets(self, versions: Mapping[str, str], *, servers: tuple[str, ...]) -> None:
        """Set a new attempt's ControlNet versions and servers. Drop a checkpoint made with other versions."""
        if any(digest != versions.get(name, digest) for name, digest in self.versions.items()):
            self.checkpoint = None
        self.versions, self.servers = versions, servers

    def mark_shared(self) -> None:
        """Note that the worker gets another job too. If it dies now, either job may be the cause."""
        self.exclusive = False

    def requeue_lost(self, number: int, *, died: bool = False, exclusive: bool = True) -> bool:
        """Queue the job again, because the attempt's worker died or disconnected.

        Args:
            number: Number of the attempt.
            died: Whether the worker process died, perhaps because of the job. False if it was only unreachable.
            exclusive: Whether the worker reported that it ran no other job.
        """
        if not self.is_current(number):
            return False
        if died:
            self.losses.quarantine(self.steps)
        if died and exclusive and self.exclusive:
            self.losses.deaths += 1
        else:
            self.losses.beside_others += 1
        self.losses.last_worker, self.losses.last_at = self.worker, self.clock.monotonic()
        self._requeue()
        return True

    def requeue_returned(self, number: int) -> bool:
        """Queue the job again, because the worker refused or returned the attempt. This does not count as a loss."""
        if not self.is_current(number):
            return False
        self.losses.returns += 1
        self._requeue()
        return True

    def extend_deadline(self, deadline: float | None) -> bool:
        """Set a later deadline, on the monotonic clock; None removes it. An earlier deadline is ignored."""
        if not self.open or self.deadline is None:
            return False
        if deadline is not None and deadline < self.deadline + _SAME_DEADLINE_S:
            return False
        self.deadline = deadline
        return True

    @property
    def due_s(self) -> float:
        """Seconds until the job is due, negative if it is late; inf if it has no due time. See JobTimes."""
        return self.times.due_at - self.clock.monotonic()

    def set_queue_position(self, place: int, estimate_s: float | None = None) -> None:
        """Set the job's position in the queue, and the estimated seconds until it completes; None if unknown."""
        position = QueuePosition(place=place, estimate_s=estimate_s)
        if self.open and self.state == JOB_STATE_QUEUED and position != self.queue_position:
            self.queue_position = position
            self._notify()

    def complete(self, number: int, images: tuple[StoredImage, ...], provenance: Provenance) -> bool:
        """Decide that the job completes with these images, which the attempt has sent and which are stored durably."""
        return self.is_current(number) and self._decide(JOB_STATE_COMPLETED, images=images, provenance=provenance)

    def answer(self, images: tuple[StoredImage, ...], provenance: Provenance) -> bool:
        """Decide that a new job, which is not stored yet, completes with the stored result of an identical job."""
        assert self.sequence == 0
        return self._decide(JOB_STATE_COMPLETED, images=images, provenance=provenance)

    def fail(self, error: BottegaError, number: int | None = None) -> bool:
        """Decide that the job fails. With the number of an attempt, do so only if that attempt is the current one."""
        return (number is None or self.is_current(number)) and self._decide(JOB_STATE_FAILED, error=error)

    def fail_if_exhausted(self) -> bool:
        """Decide that the job fails if no attempt numbers are left for it."""
        why = WorkerLost(f"{self.attempts} attempts at this job failed", retry_after_s=1.0)
        return self.attempts >= MAX_ATTEMPTS and self.fail(why)

    def cancel(self, why: str = "the job was cancelled") -> bool:
        """Decide that the job is cancelled."""
        return self._decide(JOB_STATE_CANCELLED, error=JobCancelled(why))

    def finish(self, outcome: JobOutcome) -> None:
        """Publish how the job ended: the decided outcome, or another one if the store already had one."""
        if not self.live:
            return
        self.state, self.error, self.ended_wall = outcome.state, outcome.error, outcome.ended_wall
        self.images, self.provenance = outcome.images, outcome.provenance
        if self.state == JOB_STATE_CANCELLED:
            self.spec = self.bare = specs.with_short_texts(self.bare)
        self.steps.done = self.steps.total if self.state == JOB_STATE_COMPLETED else outcome.steps_done
        self.ended.set()
        self._notify()

    def detach(self, why: BottegaError) -> None:
        """End all watches of the job with an error. The job itself goes on, now or after a restart."""
        self.detached = why
        self._notify()

    def _run(self, worker: str, number: int, *, exclusive: bool) -> None:
        self.started_wall = self.clock.wall() if self.started_wall is None else self.started_wall
        self.state, self.worker, self.number, self.exclusive = JOB_STATE_RUNNING, worker, number, exclusive

    def _requeue(self) -> None:
        self.state, self.worker, self.exclusive = JOB_STATE_QUEUED, "", False
        self.times.queued_at = self.clock.monotonic()
        self._notify()

    def _decide(
        self,
        state: JobState.ValueType,
        *,
        images: tuple[StoredImage, ...] = (),
        provenance: Provenance | None = None,
        error: BottegaError | None = None,
    ) -> bool:
        if not self.open:
            return False
        self.times.ended_at = self.clock.monotonic()
        if self.state == JOB_STATE_QUEUED:
            self.times.queue_s += self.times.ended_at - self.times.queued_at
        self.outcome = JobOutcome(
            state=state,
            ended_wall=self.clock.wall(),
            images=images,
            provenance=provenance,
            error=error,
            steps_done=0 if state == JOB_STATE_COMPLETED else self.steps.done,
        )
        self.spec, self.checkpoint = self.bare, None
        self.previews.clear()
        return True

    def _notify(self) -> None:
        for listener in tuple(self.listeners):
            listener()


def _new_job_id(wall: float) -> str:
    """Return 24 hex digits: the current Unix second, then 64 random bits.

    IDs of consecutive jobs are neighbours in the store's index, so that their rows share pages. With random IDs, nearly
    every new job would write a page of its own.
    """
    return f"{int(wall) & 0xFFFFFFFF:08x}{secrets.token_hex(8)}"
