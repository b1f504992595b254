"""One job and its states: queued -> running -> completed | failed | cancelled, and back to queued when
a worker is lost.

Every attempt has a number, and only the newest one is listened to: a late answer of an abandoned attempt
changes nothing. An end is decided first (`outcome`), which closes the job to everything else, and told (`end`) when
it is durable. Knows no queue, no worker, no store and no wire.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bottega.errors import BottegaError, JobCancelled, WorkerLost
from bottega.gateway.addons.loras.lora_sets import LoraSetKey, lora_set
from bottega.gateway.clock import Clock
from bottega.gateway.jobs import work
from bottega.gateway.jobs.brief_specs import brief
from bottega.gateway.jobs.values import JobCheckpoint, JobOutcome, JobPreview, QueuePosition, StoredImage
from bottega.planning import Shape
from bottega.v1 import image_pb2
from bottega.v1.generation_pb2 import GenerationSpec, Provenance
from bottega.v1.image_pb2 import JobState

LIVE = frozenset({image_pb2.JOB_STATE_QUEUED, image_pb2.JOB_STATE_RUNNING})

# The low bits of an attempt's number count the job's attempts, those above them the lives of the gateway: so a later
# life outranks every earlier one, whatever of that was not written any more. An int32 has room for 500,000 lives.
_COUNT_BITS = 12
MOST_ATTEMPTS = (1 << _COUNT_BITS) - 1
# A caller that attaches again says the same deadline, a little later for the time on the wire.
_SAME_DEADLINE_S = 0.5


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A job. Change it by its methods only; each says whether it changed anything.

    spec: complete; its input images go when the job ends. bare: the same without input images. Once the job is
    cancelled, both are brief. peer: host that it came from.
    fingerprint: of the spec as the caller sent it. shape: of the latent. deadline: on the monotonic clock.
    size_bytes: of the request. rows: that it puts into each turn.
    deaths: workers that died while they ran it alone. losses: those that died beside others, or were cut off.
    returns: attempts that workers did not take, or gave back. alone: nobody else has been at the worker since the
    current attempt began. suspect_until: steps within which a worker died of it, perhaps.
    log_id: the request_id of its log lines, here and at the workers; never empty. ends_with_caller: nobody else can ask
    for it.
    controlnets: their names, one for each in the spec. versions: their hashes, by name, that the newest attempt uses;
    servers: those that it was given for them. loras: digests, one for each in the spec; lora_set: with their scales.
    loras_step: at which they went in, once an attempt has told it: later ones put them in at the same one.
    life: lives of the gateway before this one. number: of the newest attempt. created_wall: 0 is now.
    outcome: decided, and not to be told before it is durable. left: why nobody here follows the job any further.
    """

    clock: Clock
    spec: GenerationSpec
    bare: GenerationSpec
    shape: Shape
    fingerprint: str
    image_digest: str = ""
    size_bytes: int = 0
    request_id: str = ""
    log_id: str = ""
    ends_with_caller: bool = False
    peer: str = ""
    deadline: float | None = None
    preview: bool = False
    validate_s: float = 0.0
    job_id: str = ""
    sequence: int = 0
    life: int = 0

    state: JobState.ValueType = image_pb2.JOB_STATE_QUEUED
    number: int = 0
    worker: str = ""
    alone: bool = False
    deaths: int = 0
    suspect_until: int | None = None
    losses: int = 0
    lost_worker: str = ""
    lost_at: float = 0.0
    returns: int = 0
    standing: QueuePosition | None = None
    steps_done: int = 0
    steps_total: int = 0
    repeated_steps: int = 0
    previews: dict[int, JobPreview] = field(default_factory=dict)
    checkpoint: JobCheckpoint | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    servers: tuple[str, ...] = ()
    loras_step: int | None = None
    pictures: tuple[StoredImage, ...] = ()
    provenance: Provenance | None = None
    error: BottegaError | None = None
    outcome: JobOutcome | None = None
    left: BottegaError | None = None

    created_at: float = 0.0
    created_wall: float = 0.0
    started_wall: float | None = None
    ended_wall: float | None = None
    ended_at: float | None = None
    acknowledge_s: float = 0.0
    queued_at: float = 0.0
    queue_s: float = 0.0
    routed_at: float = 0.0
    route_s: float = 0.0

    num_images: int = field(init=False)
    rows: int = field(init=False)
    controlnets: tuple[str, ...] = field(init=False)
    loras: tuple[str, ...] = field(init=False)
    lora_set: LoraSetKey = field(init=False)

    listeners: set[Callable[[], None]] = field(default_factory=set)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.queued_at, now_wall = self.clock.monotonic(), self.clock.wall()
        self.created_wall = self.created_wall or now_wall
        self.job_id = self.job_id or _new_job_id(self.created_wall)
        self.log_id = self.request_id or self.log_id or self.job_id
        self.created_at = self.queued_at - max(0.0, now_wall - self.created_wall)
        # Asked for at every look of the scheduler, where a message would be too slow to ask.
        self.num_images, self.rows = self.spec.num_images, work.rows(self.spec)
        self.controlnets = tuple(net.name for net in self.bare.controlnets)
        self.loras = tuple(lora.digest for lora in self.bare.loras)
        self.lora_set = lora_set(self.bare.loras)
        self.steps_total = work.steps_to_run(self.spec) * self.num_images
        if self.deaths and self.suspect_until is None:
            self.suspect_until = self.steps_total  # how far it was is not remembered over a restart

    @property
    def live(self) -> bool:
        """Whether it has not ended."""
        return self.state in LIVE

    @property
    def age_s(self) -> float:
        """Seconds from acceptance to its end, or until now."""
        return (self.clock.monotonic() if self.ended_at is None else self.ended_at) - self.created_at

    @property
    def attempts(self) -> int:
        """How often it was given to a worker, in all lives of the gateway."""
        return self.number & MOST_ATTEMPTS

    @property
    def open(self) -> bool:
        """Whether nothing has decided yet how it ends."""
        return self.live and self.outcome is None

    def is_current(self, number: int) -> bool:
        """Whether attempt `number` is the one that counts."""
        return self.open and self.state == image_pb2.JOB_STATE_RUNNING and number == self.number

    def acknowledged(self) -> None:
        """It is durable: from now on it waits for a worker."""
        now = self.clock.monotonic()
        self.acknowledge_s, self.queued_at = now - self.queued_at, now

    @property
    def suspect(self) -> bool:
        """Whether it runs alone or not at all: a worker has died with it, and it has not got further since."""
        return self.suspect_until is not None and self.steps_done <= self.suspect_until

    def begin(self, worker: str, *, free_at: float | None = None, alone: bool = False) -> int:
        """Hands the job to a worker; returns the attempt's number.

        free_at: when the worker could take it, on the monotonic clock (None: now). Until then the job queued, from
        then on it is routed. alone: whether the worker has nothing else.
        """
        assert self.open
        assert self.state == image_pb2.JOB_STATE_QUEUED
        self.routed_at = max(self.queued_at, self.clock.monotonic() if free_at is None else free_at)
        self.queue_s += self.routed_at - self.queued_at
        if self.started_wall is None:
            self.started_wall = self.clock.wall()
        self.state, self.worker, self.alone = image_pb2.JOB_STATE_RUNNING, worker, alone
        self.number = self.life << _COUNT_BITS | (self.attempts + 1)
        self._tell()
        return self.number

    def adopt(self, worker: str, number: int) -> bool:
        """A worker brings an attempt of an earlier life along. Whether it is at least as new as what is known."""
        if not self.open or number < self.number:
            return False
        if self.state == image_pb2.JOB_STATE_QUEUED:
            self.queue_s += self.clock.monotonic() - self.queued_at
        self.started_wall = self.started_wall or self.clock.wall()
        self.state, self.worker, self.number = image_pb2.JOB_STATE_RUNNING, worker, number
        self.routed_at = self.clock.monotonic()
        self._tell()
        return True

    def sent(self) -> float:
        """The worker has been called; returns the seconds that routing this attempt took."""
        route_s = self.clock.monotonic() - self.routed_at
        self.route_s += route_s
        return route_s

    def resume(self, number: int, *, steps_total: int, steps_resumed: int) -> bool:
        """Denoising has begun, after the `steps_resumed` steps that a checkpoint brought."""
        if not self.is_current(number):
            return False
        self.repeated_steps += max(0, self.steps_done - steps_resumed)
        self.steps_done, self.steps_total = steps_resumed, steps_total
        self._tell()
        return True

    def advance(self, number: int, steps_done: int) -> bool:
        """Denoising goes on."""
        if not self.is_current(number):
            return False
        self.steps_done = steps_done
        self._tell()
        return True

    def look(self, number: int, index: int, jpeg: bytes) -> bool:
        """A preview of image `index` came; it replaces the one before."""
        if not self.is_current(number) or not 0 <= index < self.spec.num_images:
            return False
        newest = max((preview.version for preview in self.previews.values()), default=0)
        self.previews[index] = JobPreview(jpeg=jpeg, version=newest + 1)
        self._tell()
        return True

    def keep(self, number: int, checkpoint: JobCheckpoint) -> bool:
        """A checkpoint came; it replaces the one before."""
        if not self.is_current(number):
            return False
        self.checkpoint = checkpoint
        return True

    def dress(self, number: int, step: int) -> bool:
        """The LoRAs go in at that step."""
        if not self.is_current(number) or self.loras_step == step:
            return False
        self.loras_step = step
        return True

    def use(self, versions: Mapping[str, str], *, servers: tuple[str, ...]) -> None:
        """The attempt that begins uses ControlNets in these versions: what others had a part in is drawn again."""
        if any(digest != versions.get(name, digest) for name, digest in self.versions.items()):
            self.checkpoint = None
        self.versions, self.servers = versions, servers

    def meet(self) -> None:
        """Another job goes to the same worker: from now on its death would not surely be this one's doing."""
        self.alone = False

    def requeue(self, number: int, *, died: bool = False, alone: bool = True) -> bool:
        """The attempt is lost: the job waits again.

        died: its worker is dead and not just cut off; it may have died of this job. alone: as far as the worker knows.
        """
        if not self.is_current(number):
            return False
        if died:
            # It died again after it had been cleared: what kills may come late, and others must not be near it then.
            again = self.suspect_until is not None
            self.suspect_until = self.steps_total if again else self.steps_done
        if died and alone and self.alone:
            self.deaths += 1
        else:
            self.losses += 1
        self.lost_worker, self.lost_at = self.worker, self.clock.monotonic()
        self._wait_again()
        return True

    def take_back(self, number: int) -> bool:
        """The worker did not take the attempt, or gives it back: the job waits again, and holds it against nobody."""
        if not self.is_current(number):
            return False
        self.returns += 1
        self._wait_again()
        return True

    def give_until(self, deadline: float | None) -> bool:
        """Somebody wants it until then, on the monotonic clock; None is without bound. Less time changes nothing."""
        if not self.open or self.deadline is None:
            return False
        if deadline is not None and deadline < self.deadline + _SAME_DEADLINE_S:
            return False
        self.deadline = deadline
        return True

    def stand(self, standing: QueuePosition) -> None:
        """Says where the job stands in the queue."""
        if self.open and self.state == image_pb2.JOB_STATE_QUEUED and standing != self.standing:
            self.standing = standing
            self._tell()

    def complete(self, number: int, pictures: tuple[StoredImage, ...], provenance: Provenance) -> bool:
        """The attempt brought all images, and they are durable."""
        if not self.is_current(number):
            return False
        self._decide(image_pb2.JOB_STATE_COMPLETED, pictures=pictures, provenance=provenance)
        return True

    def fail(self, error: BottegaError, number: int | None = None) -> bool:
        """Fails the job; with a number, only if that attempt still counts."""
        if not self.open or (number is not None and not self.is_current(number)):
            return False
        self._decide(image_pb2.JOB_STATE_FAILED, error=error)
        return True

    def give_up(self) -> bool:
        """Fails a job for whose next attempt there is no number. Whether it did."""
        if self.attempts < MOST_ATTEMPTS:
            return False
        return self.fail(WorkerLost(f"{self.attempts} attempts at this job came to nothing", retry_after_s=1.0))

    def cancel(self, why: str = "the job was cancelled") -> bool:
        """Somebody does not want it any more."""
        if not self.open:
            return False
        self._decide(image_pb2.JOB_STATE_CANCELLED, error=JobCancelled(why))
        return True

    def end(self, outcome: JobOutcome) -> None:
        """Tells how it has ended: what was decided, or what is known to have been written."""
        if not self.live:
            return
        self.state, self.error, self.ended_wall = outcome.state, outcome.error, outcome.ended_wall
        self.pictures, self.provenance = outcome.pictures, outcome.provenance
        if self.state == image_pb2.JOB_STATE_CANCELLED:
            self.spec = self.bare = brief(self.bare)
        # Of steps that led to no picture nothing is left, nor is it remembered.
        self.steps_done = self.steps_total if self.state == image_pb2.JOB_STATE_COMPLETED else 0
        self.ended.set()
        self._tell()

    def leave(self, why: BottegaError) -> None:
        """Sends away who follows it here; the job itself goes on, or will."""
        self.left = why
        self._tell()

    def _decide(
        self,
        state: JobState.ValueType,
        *,
        pictures: tuple[StoredImage, ...] = (),
        provenance: Provenance | None = None,
        error: BottegaError | None = None,
    ) -> None:
        self.ended_at = self.clock.monotonic()
        if self.state == image_pb2.JOB_STATE_QUEUED:
            self.queue_s += self.ended_at - self.queued_at
        self.outcome = JobOutcome(
            state=state, ended_wall=self.clock.wall(), pictures=pictures, provenance=provenance, error=error
        )
        self.spec, self.checkpoint = self.bare, None
        self.previews.clear()

    def _wait_again(self) -> None:
        self.state, self.worker, self.alone = image_pb2.JOB_STATE_QUEUED, "", False
        self.queued_at = self.clock.monotonic()
        self._tell()

    def _tell(self) -> None:
        for listener in tuple(self.listeners):
            listener()


def _new_job_id(wall: float) -> str:
    """24 hex digits: the second, and 64 random bits.

    Ids that are made one after the other lie beside each other in the store's index: with random ones nearly every job
    would write a page of its own.
    """
    return f"{int(wall) & 0xFFFFFFFF:08x}{secrets.token_hex(8)}"
