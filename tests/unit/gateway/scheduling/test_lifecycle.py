"""Whatever is lost, doubled, delayed, killed or frozen: every job ends once, and for a reason.

The gateway's own rules, fleet, queue and dispatcher face simulated workers that hold their attempts as real ones do.
Hypothesis chooses what happens on the wire and who dies; the clock is turned by hand. At the end messages flow
again, and everything must come to its end.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from bottega import kinds
from bottega.addons.interface.views import MAX_ATTEMPTS, Member
from bottega.errors import BottegaError, InvalidRequest, JobCancelled, Poisoned, StaleAttempt, Unavailable, WorkerLost
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.values import JobCheckpoint
from bottega.rpc.channel import Target
from bottega.v1 import fleet_pb2, image_pb2, worker_pb2
from bottega.v1.generation_pb2 import Provenance
from bottega.v1.trace_pb2 import Trace
from bottega.worker.attempts import Attempt, AttemptKey, Attempts, PictureEvent, ProgressEvent, StartedEvent
from bottega.worker.service import _responses
from tests.fakes.fake_time import FakeTime
from tests.fakes.gateway_rules import FakeClient, Shop
from tests.samples import controlnet_hosts
from tests.samples.jobs import sample_job

STEPS = 10
MOST_JOBS = 6
MOST_PILLS = 2
WORKERS = ("w1", "w2")
# Rounds in which everything flows, until everything must have ended: each gives every job some steps.
MOST_ROUNDS = 400
# In which anything that is called must have returned, on a busy machine too.
PATIENCE_S = 10.0


@dataclass(slots=True, eq=False)
class Call:
    """One RunAttempt: what is under way to the worker, and back."""

    process: Process
    request: worker_pb2.RunAttemptRequest
    arrived: bool = False
    heard: bool = False
    over: bool = False
    pending: deque[worker_pb2.RunAttemptResponse | BottegaError] = field(default_factory=deque)
    answers: asyncio.Queue[worker_pb2.RunAttemptResponse | BottegaError] = field(default_factory=asyncio.Queue)

    @property
    def key(self) -> AttemptKey:
        return AttemptKey.of(self.request.attempt)


class Process:
    """One life of a worker: its attempts, and the steps that its engine has made at each."""

    def __init__(self, name: str, address: str, time: FakeTime) -> None:
        self.name, self.address = name, address
        self.attempts = Attempts(max_attempts=8, result_grace_s=30, result_bytes=1 << 20, clock=lambda: time.now)
        self.engine: dict[AttemptKey, int] = {}
        self.member: Member | None = None
        self.alive, self.frozen = True, False

    @property
    def works(self) -> bool:
        return self.alive and not self.frozen

    def registration(self) -> fleet_pb2.Registration:
        port = int(self.address.rpartition(":")[2])
        return controlnet_hosts.worker(self.name, port=port, base="", vae_scale_factor=4)

    def load(self) -> fleet_pb2.Load:
        times = [fleet_pb2.StepTime(latent_height=16, latent_width=16, rows=n, seconds=1 + n / 100) for n in (1, 2)]
        running = [
            fleet_pb2.RunningAttempt(attempt=attempt.key.message(), steps_left=STEPS - attempt.steps_done)
            for attempt in self.attempts.active()
        ]
        return fleet_pb2.Load(step_times=times, max_rows=16, running=running)

    def run(self, request: worker_pb2.RunAttemptRequest) -> Attempt:
        key = AttemptKey.of(request.attempt)
        known = self.attempts.find(key)
        if known is not None:
            return known
        earlier = self.attempts.superseded(key)
        if earlier is not None:
            self.drop(earlier, StaleAttempt("superseded"))
        attempt = self.attempts.add(key)
        self.engine[key] = int(request.checkpoint or b"0")
        attempt.start(StartedEvent(steps_total=STEPS, steps_resumed=self.engine[key]))
        return attempt

    def drop(self, attempt: Attempt, error: BottegaError) -> None:
        self.engine.pop(attempt.key, None)
        attempt.fail(error, Trace())
        self.attempts.forget(attempt)

    def lose_engine(self) -> list[AttemptKey]:
        """As Worker.engine_lost; those that it had."""
        held = list(self.engine)
        self.engine.clear()
        for key in held:
            attempt = self.attempts.find(key)
            assert attempt is not None
            attempt.fail(
                WorkerLost("engine lost", metadata={"died": "engine", "held_together": str(len(held))}), Trace()
            )
        return held


class Line(FakeClient):
    """What the gateway calls a worker by. Nothing arrives before a rule says so."""

    def __init__(self, wire: Wire, process: Process) -> None:
        super().__init__()
        self._wire, self._process = wire, process

    def run_attempt(self, request: worker_pb2.RunAttemptRequest) -> AsyncGenerator[worker_pb2.RunAttemptResponse, None]:
        call = Call(self._process, request)
        self._wire.calls.append(call)
        self._wire.numbers.setdefault(call.key.job_id, []).append(call.key.number)
        return self._answers(call)

    async def _answers(self, call: Call) -> AsyncGenerator[worker_pb2.RunAttemptResponse, None]:
        try:
            while True:
                answer = await call.answers.get()
                if isinstance(answer, BottegaError):
                    raise answer
                yield answer
        finally:
            call.over = True

    async def cancel_attempt(self, attempt: worker_pb2.AttemptId, *, deadline_s: float) -> None:
        self._wire.cancels.append((self._process, AttemptKey.of(attempt)))

    async def list_attempts(self, *, deadline_s: float) -> Sequence[worker_pb2.AttemptSummary]:
        return [worker_pb2.AttemptSummary(attempt=attempt.key.message()) for attempt in self._process.attempts]


class Wire(Shop):
    """The gateway's side, and everything that is under way."""

    def __init__(self) -> None:
        super().__init__(max_attempts=10_000, hold_s=0.005)  # cut-offs happen at will here
        self.processes: dict[str, Process] = {}
        self.by_address: dict[str, Process] = {}
        self.calls: list[Call] = []
        self.cancels: list[tuple[Process, AttemptKey]] = []
        self.numbers: dict[str, list[int]] = {}
        self.followers: set[asyncio.Task[None]] = set()

    def boot(self, name: str) -> None:
        """A worker's process starts and joins."""
        address = f"127.0.0.1:{len(self.by_address) + 1}"
        process = self.processes[name] = self.by_address[address] = Process(name, address, self.time)
        self.speak(process)

    def speak(self, process: Process) -> None:
        """A worker reports, and joins where it has not; where its name is in use still, the next time."""
        if process.member is None or not process.member.connected:
            try:
                process.member = self.fleet.join(process.registration())
            except (InvalidRequest, Unavailable):
                holder = self.fleet._members[kinds.WORKER, process.name]
                assert holder.registration.address != process.address
                return
        self.fleet.report(process.member, process.load())

    def leave(self, process: Process) -> None:
        if process.member is not None:
            self.fleet.leave(process.member, process.member.stream)

    def deliver(self, call: Call) -> None:
        """What is next on a call arrives: the request, then one answer after the other, then the death."""
        if not call.arrived:
            if call.process.alive and call.process.frozen:
                return  # it is kept until somebody reads it
            call.arrived = True
            if call.process.alive:
                self._arrive(call)
            return
        if call.pending:
            call.heard = True
            call.answers.put_nowait(call.pending.popleft())
        elif not call.process.alive:
            facts = {"died": "worker"} if call.heard else None
            call.answers.put_nowait(WorkerLost("connection broke", metadata=facts))

    def _arrive(self, call: Call) -> None:
        try:
            attempt = call.process.run(call.request)
        except StaleAttempt:
            call.pending.append(WorkerLost("stale"))
        except BottegaError as error:
            call.pending.append(error)
        else:
            task = asyncio.create_task(_follow(attempt, call))
            self.followers.add(task)
            task.add_done_callback(self.followers.discard)

    def _connect(self, target: Target) -> Line:  # type: ignore[override]
        return Line(self, self.by_address[target.address])


async def _follow(attempt: Attempt, call: Call) -> None:
    async for event in attempt.follow():
        if not call.process.alive:
            return
        call.pending.extend(_responses(event))


@dataclass(frozen=True, slots=True)
class End:
    """How a job ended: it must stay so."""

    state: int
    error: BottegaError | None
    pictures: object


class Lifecycle(RuleBasedStateMachine):
    """The rules are what may happen."""

    workers: ClassVar[st.SearchStrategy[str]] = st.sampled_from(WORKERS)
    places: ClassVar[st.SearchStrategy[int]] = st.integers(0, 50)

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("bottega.gateway.jobs.storage._RETRY_S", 0)  # what waits for the disk asks at every turn
        self.patch.setattr("bottega.gateway.jobs.conversion._CLOSE_S", 0.001)
        self.loop = asyncio.new_event_loop()  # a Runner would ask for its signals at every call
        self.wire = self.do(self._open())
        self.jobs: list[Job] = []
        self.pills: dict[str, int] = {}
        self.blame: Counter[str] = Counter()
        self.ends: dict[str, End] = {}
        self.told: Counter[str] = Counter()

    async def _open(self) -> Wire:
        return Wire()

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs in the event loop until nothing moves by itself."""

        async def settled() -> Any:
            async with asyncio.timeout(PATIENCE_S):
                result = await work
            for _ in range(12):
                await asyncio.sleep(0)
            return result

        return self.loop.run_until_complete(settled())

    @property
    def writable(self) -> bool:
        """Whether the gateway has no reason to think that its disk cannot be written, and it can."""
        return self.wire.storage.trouble is None and not self.wire.shelf.full

    def pass_time(self, seconds: float = 0.02) -> None:
        self.wire.time.now += seconds

    # What may happen.

    @initialize(both=st.booleans(), pill=st.integers(1, STEPS))
    def begin(self, both: bool, pill: int) -> None:
        """Three jobs, one of them a poison pill, and one worker or two."""
        for name in WORKERS:
            self.do(self._boot(name))
        if not both:
            self.kill(WORKERS[0], noticed=True)
        for each in (None, pill, None):
            self.submit(each)

    @rule(pill=st.none() | st.integers(1, STEPS))
    def submit(self, pill: int | None) -> None:
        if len(self.jobs) == MOST_JOBS or not self.writable:
            return
        job = sample_job(self.wire.time)
        if pill is not None and len(self.pills) < MOST_PILLS:
            self.pills[job.job_id] = pill
        self.jobs.append(job)
        self.do(self._call(self.wire.take, job))

    @rule(place=places)
    def deliver(self, place: int) -> None:
        if self.wire.calls:
            self.do(self._call(self.wire.deliver, self.wire.calls[place % len(self.wire.calls)]))

    @rule(times=st.integers(1, 4))
    def deliver_all(self, times: int) -> None:
        for _ in range(times):
            for call in list(self.wire.calls):
                self.do(self._call(self.wire.deliver, call))

    @rule(place=places)
    def break_call(self, place: int) -> None:
        """What is under way on a call is lost, and sooner or later its caller sees that."""
        if self.wire.calls:
            call = self.wire.calls[place % len(self.wire.calls)]
            self.wire.calls.remove(call)
            error: BottegaError = WorkerLost("broke off") if call.arrived else Unavailable("not reached")
            self.do(self._call(call.answers.put_nowait, error))

    @rule(lost=st.booleans())
    def cancel_arrives(self, lost: bool) -> None:
        if self.wire.cancels:
            process, key = self.wire.cancels.pop(0)
            attempt = process.attempts.find(key)
            if attempt is not None and process.works and not lost:
                self.do(self._call(process.drop, attempt, JobCancelled("cancelled")))

    @rule(name=workers, times=st.integers(1, STEPS))
    def step(self, name: str, times: int) -> None:
        for _ in range(times):
            self.do(self._step(self.wire.processes[name]))

    @rule(name=workers)
    def report(self, name: str) -> None:
        process = self.wire.processes[name]
        if process.works:
            self.pass_time()
            self.do(self._call(self.wire.speak, process))

    @rule(name=workers)
    def stream_ends(self, name: str) -> None:
        self.do(self._call(self.wire.leave, self.wire.processes[name]))

    @rule(name=workers, noticed=st.booleans())
    def kill(self, name: str, noticed: bool) -> None:
        process = self.wire.processes[name]
        if process.alive:
            self.blame.update({key.job_id for key in self._with(process)})
            process.alive = False
            if noticed:
                self.do(self._call(self.wire.leave, process))

    @rule(name=workers)
    def restart(self, name: str) -> None:
        if not self.wire.processes[name].alive:
            self.do(self._boot(name))

    @rule(name=workers, frozen=st.booleans())
    def freeze(self, name: str, frozen: bool) -> None:
        self.wire.processes[name].frozen = frozen

    @rule(noticed=st.booleans())
    def restart_gateway(self, noticed: bool) -> None:
        """It dies and comes back; workers go on, and join again now or later."""
        self._count_told()
        self.do(self.wire.stop())
        self.wire.calls.clear()
        self.wire.cancels.clear()
        self.do(self._call(self.wire.open))
        self._look_up()
        for process in self.wire.processes.values():
            process.member = None
            if noticed and process.works:
                self.do(self._call(self.wire.speak, process))

    @rule()
    def disk_fills(self) -> None:
        """From now on nothing can be written; a gateway that starts then only reads."""
        self.wire.shelf.full = True

    @rule()
    def disk_heals(self) -> None:
        self.do(self._call(self.wire.heal))
        self._look_up()

    @rule(seconds=st.floats(0.05, 2.0))
    def wait(self, seconds: float) -> None:
        self.pass_time(seconds)
        self.do(self._call(self.wire.fleet.expire))

    @rule(place=places)
    def cancel(self, place: int) -> None:
        if self.jobs and place < 10 and self.wire.log.restored:
            self.do(self._call(self.wire.controller.cancel, self.jobs[place % len(self.jobs)]))

    @rule(place=places, back=st.integers(0, 3), steps=st.integers(1, STEPS - 1))
    def checkpoint(self, place: int, back: int, steps: int) -> None:
        """A checkpoint comes, perhaps of an earlier attempt; a poison pill is not resumed beyond where it kills."""
        if self.jobs:
            job = self.jobs[place % len(self.jobs)]
            steps = min(steps, job.steps.done, self.pills.get(job.job_id, STEPS) - 1)
            job.set_checkpoint(job.number - back, JobCheckpoint(steps_done=steps, data=b"%d" % steps))

    @rule(place=places, back=st.integers(1, 5))
    def late_answer(self, place: int, back: int) -> None:
        if not self.jobs:
            return
        job = self.jobs[place % len(self.jobs)]
        number, observer = job.number - back, self.wire.controller

        def answer() -> None:
            before = _all_of(job)
            job.start_denoising(number, steps_total=99, steps_resumed=99)
            job.set_steps_done(number, 99)
            job.set_checkpoint(number, JobCheckpoint(steps_done=99, data=b"99"))
            observer.attempt_completed(job, number, (), Provenance())
            observer.attempt_failed(job, number, Unavailable("late"))
            observer.attempt_returned(job, number, Unavailable("late"))
            observer.attempt_lost(job, number, WorkerLost("late", metadata={"died": "worker"}))
            assert _all_of(job) == before

        self.do(self._call(answer))

    # What must hold.

    @invariant()
    def an_end_is_an_end(self) -> None:
        outcomes: Counter[str] = Counter()
        for job in self.jobs:
            if not job.live:
                end = End(job.state, job.error, job.images)
                assert self.ends.setdefault(job.job_id, end) == end
                outcomes[image_pb2.JobState.Name(job.state).removeprefix("JOB_STATE_").lower()] += 1
        assert self._told() == outcomes

    @invariant()
    def numbers_rise(self) -> None:
        for numbers in self.wire.numbers.values():
            assert numbers == sorted(numbers)  # the same again is one that was adopted

    @invariant()
    def the_queue_holds_what_waits(self) -> None:
        if not self.wire.log.restored:
            return
        assert {job.job_id for job in self.wire.queue.line("m")} == {
            job.job_id for job in self.jobs if job.open and job.state == image_pb2.JOB_STATE_QUEUED
        }

    @invariant()
    def quarantined_jobs_are_exclusive(self) -> None:
        # What only waits for its outcome to be stored has left its worker.
        at_workers = self.wire.dispatcher._attempts
        running = [
            job
            for job in self.jobs
            if job.state == image_pb2.JOB_STATE_RUNNING and (job.open or job.job_id in at_workers)
        ]
        for job in running:
            if job.quarantined and job.number > job.life * (MAX_ATTEMPTS + 1):  # else it was adopted as it stood
                assert [other for other in running if other.worker == job.worker] == [job]

    @invariant()
    def only_deaths_count_and_two_make_a_poison_pill(self) -> None:
        for job in self.jobs:
            assert job.losses.deaths <= self.blame[job.job_id]
            assert isinstance(job.error, Poisoned) == (job.losses.deaths >= 2)

    def teardown(self) -> None:
        """Messages flow again: everything ends, the innocent well."""
        try:
            self.disk_heals()
            for _ in range(MOST_ROUNDS):
                if not any(job.live for job in self.jobs):
                    break
                self._flow()
            for job in self.jobs:
                assert not job.live, f"{job.job_id} did not end: {_all_of(job)}"
                self._check_end(job)
            self.an_end_is_an_end()
        finally:
            self.do(self.wire.stop())
            self.do(self._drop_followers())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()
            self.patch.undo()

    def _told(self) -> Counter[str]:
        """Ends that were counted, in all lives of the gateway."""
        told = Counter(self.told)
        for metric in self.wire.registry.restricted_registry(["bottega_jobs_total"]).collect():
            told.update({sample.labels["outcome"]: int(sample.value) for sample in metric.samples})
        return told

    def _count_told(self) -> None:
        self.told = self._told()

    def _check_end(self, job: Job) -> None:
        if job.state == image_pb2.JOB_STATE_CANCELLED:
            return
        if job.job_id in self.pills or self.blame[job.job_id] >= 2:
            assert job.state == image_pb2.JOB_STATE_COMPLETED or isinstance(job.error, Poisoned)
        else:
            assert job.state == image_pb2.JOB_STATE_COMPLETED, repr(job.error)
        if job.job_id in self.pills:
            assert isinstance(job.error, Poisoned)

    def _flow(self) -> None:
        for name, process in list(self.wire.processes.items()):
            process.frozen = False
            if not process.alive:
                self.do(self._boot(name))
        for process in self.wire.processes.values():
            self.do(self._step(process))
            self.pass_time(0.1)
            self.do(self._call(self.wire.speak, process))
        for call in list(self.wire.calls):
            self.do(self._deliver_rest(call))
        while self.wire.cancels:
            self.cancel_arrives(lost=False)
        self.do(self._call(self.wire.fleet.expire))
        self.wire.calls = [call for call in self.wire.calls if not call.over]

    def _with(self, process: Process) -> list[AttemptKey]:
        """Attempts that are at a worker, or under way to it."""
        called = [call.key for call in self.wire.calls if call.process is process]
        return [*process.engine, *called]

    def _look_up(self) -> None:
        self.jobs = [self.wire.log.find_live(job.job_id) or job for job in self.jobs]

    async def _boot(self, name: str) -> None:
        self.pass_time()
        self.wire.boot(name)

    async def _call(self, function: Any, *arguments: Any) -> Any:
        self.pass_time()
        return function(*arguments)

    async def _deliver_rest(self, call: Call) -> None:
        for _ in range(1 + len(call.pending)):
            await self._call(self.wire.deliver, call)

    async def _step(self, process: Process) -> None:
        if not process.works:
            return
        for key in list(process.engine):
            attempt = process.attempts.find(key)
            assert attempt is not None
            steps = process.engine[key] = process.engine[key] + 1
            if self.pills.get(key.job_id) == steps:
                held = process.lose_engine()
                if len(held) == 1:
                    self.blame[key.job_id] += 1
                self.wire.leave(process)
                return
            attempt.advance(ProgressEvent(steps_done=steps))
            if steps >= STEPS:
                del process.engine[key]
                attempt.add_picture(PictureEvent(index=0, data=b"picture"))
                attempt.complete(Provenance(worker=process.name), Trace())

    async def _drop_followers(self) -> None:
        for task in self.wire.followers:
            task.cancel()
        await asyncio.gather(*self.wire.followers, return_exceptions=True)


def _all_of(job: Job) -> tuple[object, ...]:
    return (
        job.state,
        job.attempts,
        job.worker,
        job.steps.done,
        job.checkpoint,
        job.losses.deaths,
        job.losses.beside_others,
        job.error,
    )


Lifecycle.TestCase.settings = settings(
    max_examples=20,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate,),  # to make what fails shorter takes longer than a test may take
    suppress_health_check=list(HealthCheck),
)
TestLifecycle = Lifecycle.TestCase
