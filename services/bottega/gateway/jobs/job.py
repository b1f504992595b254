"""One job and its states: queued, running, then completed, failed or cancelled; queued again when its worker is lost.

Every attempt has a number, and only the newest attempt counts: a late event of an earlier one changes nothing. The end
of a job is decided first (`outcome`), which stops every other change, and published when it is durable (`finish`).

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
ended or got further than it was when the worker died. If another worker dies after that, it stays quarantined until it
ends. So a job sees at most two deaths beside others, no job fails because of its neighbours, and a poison pill is out
after two more deaths.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bottega.clocks import Clock
from bottega.errors import BottegaError, JobCancelled, WorkerLost
from bottega.gateway.jobs import specs
from bottega.gateway.jobs.store import LIVE
from bottega.gateway.jobs.values import (
    JobCheckpoint,
    JobLosses,
    JobOutcome,
    JobPreview,
    JobRequest,
    JobSteps,
    JobTimes,
    QueuePosition,
    StoredImage,
)
from bottega.lora.set_key import LoraSetKey, lora_set_key
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

# The low bits of an attempt's number count the job's attempts, those above them the lives of the gateway: so a later
# life outranks every earlier one, even where the last attempts of that were not written. An int32 has room for 500,000.
_COUNT_BITS = 12
MOST_ATTEMPTS = (1 << _COUNT_BITS) - 1
# A caller that attaches again states the same deadline, a little later for the time on the wire.
_SAME_DEADLINE_S = 0.5


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A job of the API; the SDK's handle on one has the same name. Only its methods change it; each returns whether it
    changed anything. It has many fields because it is all that the gateway knows of a job; they stand by how long they
    live.

    Stored when it is accepted, and the same from then on but for what goes when it ends:
    spec: complete; its input images go when the job ends. bare: the same without input images. Once the job is
    cancelled, both have short texts. sequence: its place among all jobs; 0 until it is stored.

    Stored again whenever they change, and when it ends; `losses.deaths` too:
    number: of the newest attempt. deadline: on the monotonic clock. decisions: what its attempts have decided so far,
    which later attempts keep to. The last four say how it ended, as it was published.

    Known only to this process:
    life: lives of the gateway before this one. preview: somebody wants previews. exclusive: nothing else has been at
    the worker since the current attempt started. versions: hashes of ControlNets, by name, that the newest attempt
    uses; servers: those that it was given for them. outcome: decided; published when it is durable. detached: why
    nobody here follows the job any further.

    Read from the spec once, because the scheduler needs them for every job at every pass:
    rows: that it puts into each turn. controlnets: their names, one for each in the spec. loras: digests, one for each
    in the spec; lora_set: with their scales.
    """

    request: JobRequest
    spec: GenerationSpec
    bare: GenerationSpec
    job_id: str = ""
    sequence: int = 0
    created_wall: float = 0.0

    state: JobState.ValueType = JOB_STATE_QUEUED
    number: int = 0
    deadline: float | None = None
    decisions: AttemptDecisions = field(default_factory=AttemptDecisions)
    started_wall: float | None = None
    ended_wall: float | None = None
    images: tuple[StoredImage, ...] = ()
    provenance: Provenance | None = None
    error: BottegaError | None = None

    clock: Clock
    life: int = 0
    preview: bool = False
    worker: str = ""
    exclusive: bool = False
    queue_position: QueuePosition | None = None
    steps: JobSteps = field(default_factory=JobSteps)
    losses: JobLosses = field(default_factory=JobLosses)
    times: JobTimes = field(default_factory=JobTimes)
    previews: dict[int, JobPreview] = field(default_factory=dict)
    checkpoint: JobCheckpoint | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    servers: tuple[str, ...] = ()
    outcome: JobOutcome | None = None
    detached: BottegaError | None = None
    listeners: set[Callable[[], None]] = field(default_factory=set)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    num_images: int = field(init=False)
    rows: int = field(init=False)
    controlnets: tuple[str, ...] = field(init=False)
    loras: tuple[str, ...] = field(init=False)
    lora_set: LoraSetKey = field(init=False)

    def __post_init__(self) -> None:
        now, now_wall = self.clock.monotonic(), self.clock.wall()
        self.created_wall = self.created_wall or now_wall
        self.job_id = self.job_id or _new_job_id(self.created_wall)
        self.times.queued_at, self.times.created_at = now, now - max(0.0, now_wall - self.created_wall)
        self.num_images, self.rows = self.spec.num_images, specs.rows(self.spec)
        self.controlnets = tuple(net.name for net in self.bare.controlnets)
        self.loras = tuple(lora.digest for lora in self.bare.loras)
        self.lora_set = lora_set_key(self.bare.loras)
        self.steps.total = specs.steps_to_run(self.spec) * self.num_images
        if self.losses.deaths:
            self.losses.quarantined_until = self.steps.total  # how far it was is not stored

    @property
    def log_id(self) -> str:
        """The request_id of its log lines, here and at the workers; never empty."""
        return self.request.request_id or self.request.log_id or self.job_id

    @property
    def live(self) -> bool:
        """Whether it has not ended."""
        return self.state in LIVE

    @property
    def open(self) -> bool:
        """Whether it is not decided yet how it ends."""
        return self.live and self.outcome is None

    @property
    def age_s(self) -> float:
        """Seconds from acceptance to its end, or until now."""
        return (self.clock.monotonic() if self.times.ended_at is None else self.times.ended_at) - self.times.created_at

    @property
    def attempts(self) -> int:
        """Attempts so far, in all lives of the gateway."""
        return self.number & MOST_ATTEMPTS

    @property
    def quarantined(self) -> bool:
        """Whether it runs exclusively or not at all: a worker died with it, and it has not got further since."""
        return self.losses.quarantined_until is not None and self.steps.done <= self.losses.quarantined_until

    def is_current(self, number: int) -> bool:
        """Whether attempt `number` is the one that counts."""
        return self.open and self.state == JOB_STATE_RUNNING and number == self.number

    def mark_durable(self) -> None:
        """It is stored: from now on it waits for a worker."""
        now = self.clock.monotonic()
        self.times.acknowledge_s, self.times.queued_at = now - self.times.queued_at, now

    def start_attempt(self, worker: str, *, free_at: float | None = None, exclusive: bool = False) -> int:
        """Gives the job to a worker; returns the attempt's number.

        free_at: when the worker could take it, on the monotonic clock (None: now). Until then the job was queued, from
        then on it is routed. exclusive: whether the worker has nothing else.
        """
        assert self.open
        assert self.state == JOB_STATE_QUEUED
        self._run(worker, self.life << _COUNT_BITS | (self.attempts + 1), exclusive=exclusive)
        self.times.routed_at = max(self.times.queued_at, self.clock.monotonic() if free_at is None else free_at)
        self.times.queue_s += self.times.routed_at - self.times.queued_at
        self._notify()
        return self.number

    def adopt_attempt(self, worker: str, number: int) -> bool:
        """A worker still has an attempt of an earlier life. Refused where a later one is known."""
        if not self.open or number < self.number:
            return False
        self.times.routed_at = self.clock.monotonic()
        if self.state == JOB_STATE_QUEUED:
            self.times.queue_s += self.times.routed_at - self.times.queued_at
        self._run(worker, number, exclusive=self.exclusive)
        self._notify()
        return True

    def mark_dispatched(self) -> float:
        """The worker has been called; returns the seconds that routing this attempt took."""
        route_s = self.clock.monotonic() - self.times.routed_at
        self.times.route_s += route_s
        return route_s

    def start_denoising(self, number: int, *, steps_total: int, steps_resumed: int) -> bool:
        """The attempt denoises, after the `steps_resumed` steps that a checkpoint brought."""
        if not self.is_current(number):
            return False
        self.steps.repeated += max(0, self.steps.done - steps_resumed)
        self.steps.done, self.steps.total = steps_resumed, steps_total
        self._notify()
        return True

    def set_steps_done(self, number: int, steps_done: int) -> bool:
        """Denoising steps of the attempt so far, over all images."""
        if not self.is_current(number):
            return False
        self.steps.done = steps_done
        self._notify()
        return True

    def set_preview(self, number: int, index: int, jpeg: bytes) -> bool:
        """A preview of image `index` came; it replaces the one before."""
        if not self.is_current(number) or not 0 <= index < self.num_images:
            return False
        newest = max((preview.version for preview in self.previews.values()), default=0)
        self.previews[index] = JobPreview(jpeg=jpeg, version=newest + 1)
        self._notify()
        return True

    def set_checkpoint(self, number: int, checkpoint: JobCheckpoint) -> bool:
        """A checkpoint came; it replaces the one before.

        One of pictures that are kept for editing is not taken: it has not the latents of the steps before it, which are
        kept as well. A later attempt draws the same pictures from the beginning.
        """
        if not self.is_current(number) or self.bare.keep_for_editing:
            return False
        self.checkpoint = checkpoint
        return True

    def set_decisions(self, number: int, decisions: AttemptDecisions) -> bool:
        """All that the attempt has decided so far, with what it was given of earlier ones."""
        if not self.is_current(number) or decisions == self.decisions:
            return False
        self.decisions = decisions
        return True

    def use_controlnets(self, versions: Mapping[str, str], *, servers: tuple[str, ...]) -> None:
        """The attempt that starts uses these versions: a checkpoint that others had a part in is dropped."""
        if any(digest != versions.get(name, digest) for name, digest in self.versions.items()):
            self.checkpoint = None
        self.versions, self.servers = versions, servers

    def mark_shared(self) -> None:
        """Another job goes to the same worker: if that dies from now on, this job need not be the cause."""
        self.exclusive = False

    def requeue_lost(self, number: int, *, died: bool = False, exclusive: bool = True) -> bool:
        """The attempt's worker is lost: the job waits again.

        died: the worker is dead and not just cut off; the job may have killed it. exclusive: as far as the worker knew.
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
        """The worker refused the attempt or returned it: the job waits again, and no loss is counted."""
        if not self.is_current(number):
            return False
        self.losses.returns += 1
        self._requeue()
        return True

    def extend_deadline(self, deadline: float | None) -> bool:
        """Somebody wants it until then, on the monotonic clock; None is without bound. Never shortens it."""
        if not self.open or self.deadline is None:
            return False
        if deadline is not None and deadline < self.deadline + _SAME_DEADLINE_S:
            return False
        self.deadline = deadline
        return True

    @property
    def due_s(self) -> float:
        """Seconds until it is due, negative after it was, endless where it is not; see JobTimes."""
        return self.times.due_at - self.clock.monotonic()

    def set_queue_position(self, place: int, estimate_s: float | None = None) -> None:
        """Says where the job is in the queue."""
        position = QueuePosition(place=place, estimate_s=estimate_s)
        if self.open and self.state == JOB_STATE_QUEUED and position != self.queue_position:
            self.queue_position = position
            self._notify()

    def complete(self, number: int, images: tuple[StoredImage, ...], provenance: Provenance) -> bool:
        """The attempt brought all images, and they are durable."""
        return self.is_current(number) and self._decide(JOB_STATE_COMPLETED, images=images, provenance=provenance)

    def answer(self, images: tuple[StoredImage, ...], provenance: Provenance) -> bool:
        """The stored result of an identical job is its own, before it is stored itself; no attempt is made."""
        assert self.sequence == 0
        return self._decide(JOB_STATE_COMPLETED, images=images, provenance=provenance)

    def fail(self, error: BottegaError, number: int | None = None) -> bool:
        """Fails the job; with a number, only if that attempt still counts."""
        return (number is None or self.is_current(number)) and self._decide(JOB_STATE_FAILED, error=error)

    def fail_if_exhausted(self) -> bool:
        """Fails a job for whose next attempt there is no number."""
        why = WorkerLost(f"{self.attempts} attempts at this job came to nothing", retry_after_s=1.0)
        return self.attempts >= MOST_ATTEMPTS and self.fail(why)

    def cancel(self, why: str = "the job was cancelled") -> bool:
        """Cancels the job."""
        return self._decide(JOB_STATE_CANCELLED, error=JobCancelled(why))

    def finish(self, outcome: JobOutcome) -> None:
        """Publishes how it ended: what was decided, or what is known to have been written."""
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
        """Sends away whoever follows it here; the job itself goes on, or will."""
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
    """24 hex digits: the second, and 64 random bits.

    Ids that are made one after the other lie beside each other in the store's index: with random ones nearly every job
    would write a page of its own.
    """
    return f"{int(wall) & 0xFFFFFFFF:08x}{secrets.token_hex(8)}"
