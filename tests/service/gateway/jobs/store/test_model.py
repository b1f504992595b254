"""Any sequence of calls, over any number of lives and stores, does to a job store what it does to a dictionary."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from bottega.gateway.jobs.store import JobFilter, JobProgress, JobRecord, JobStore
from bottega.gateway.jobs.values import StoredImage
from bottega.v1.image_pb2 import (
    JOB_STATE_CANCELLED,
    JOB_STATE_COMPLETED,
    JOB_STATE_FAILED,
    JOB_STATE_QUEUED,
    JOB_STATE_RUNNING,
    JobState,
)
from tests.support.job_store_backends import BACKENDS, STEPS_DONE, answered, cancelled, completed, failed, record

# Whether bytes reach the disk is another test's; here are many more calls than a disk would take in the time.
_MEMORY = Path("/dev/shm")

LIVE = (JOB_STATE_QUEUED, JOB_STATE_RUNNING)
# Few of each, so that calls meet.
NAMES = ("j0", "j1", "j2")
JOB_IDS = st.sampled_from(NAMES)
KEYS = st.sampled_from(["k0", "k1", ""])
REQUEST_IDS = st.sampled_from(["r0", "r1", ""])
# From the newest attempt: mostly the one that counts, or would be next.
STEPS = st.sampled_from([0, 0, 1, 1, -1])
PEERS = st.sampled_from(["p0", "p1"])
TIMES = st.sampled_from([10.0, 20.5, 30.0])
BYTES = st.binary(max_size=40)
STORES = st.integers(0, 1)
ENDS = st.sampled_from([JOB_STATE_FAILED, JOB_STATE_CANCELLED])


class Machine(RuleBasedStateMachine):
    """Two stores of the same jobs, either of which may be closed and opened again, and a dictionary."""

    backend: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.folder = tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None)
        self.stores: list[JobStore] = []
        self.known: dict[str, JobRecord] = {}
        self.inputs: dict[str, bytes] = {}
        self.requests: dict[str, str] = {}
        self.sequence = 0
        self.generation = 0
        self.calls = 0

    def teardown(self) -> None:
        for store in self.stores:
            self.runner.run(store.close())
        self.runner.close()
        self.folder.cleanup()

    def _opened(self) -> JobStore:
        store = BACKENDS[self.backend](Path(self.folder.name))
        self.runner.run(store.open())
        assert store.generation > self.generation
        self.generation = store.generation
        return store

    @initialize()
    def open(self) -> None:
        self.stores = [self._opened(), self._opened()]
        for job_id, request_id in (("j0", "r0"), ("j1", "r1")):
            self._add(0, record(job_id, request_id=request_id), b"", "")

    @precondition(lambda self: self.calls > 10)
    @rule(which=STORES)
    def restart(self, which: int) -> None:
        self.calls = 0
        self.runner.run(self.stores[which].close())
        self.stores[which] = self._opened()

    @rule(
        which=STORES,
        replaces=JOB_IDS,
        inputs=BYTES,
        peer=PEERS,
        job_id=JOB_IDS,
        request_id=REQUEST_IDS,
        spec=BYTES,
        created_wall=TIMES,
    )
    def add(self, which: int, replaces: str, inputs: bytes, peer: str, **fields: Any) -> None:
        self._add(which, replace(record(**fields), peer=peer), inputs, replaces)

    @rule(which=STORES, replaces=JOB_IDS, peer=PEERS, job_id=JOB_IDS, request_id=REQUEST_IDS, key=KEYS, at=TIMES)
    def add_answered(self, which: int, replaces: str, peer: str, key: str, at: float, **fields: Any) -> None:
        new = answered(replace(record(**fields), peer=peer), ended_wall=at, result_key=key)
        self._add(which, new, b"", replaces)

    def _add(self, which: int, new: JobRecord, inputs: bytes, replaces: str) -> None:
        job_id, request_id = new.job_id, new.request_id
        added = self.runner.run(self.stores[which].add(new, inputs=inputs, replaces=replaces))
        holder = self.known.get(job_id)
        if holder is None and request_id in self.requests:
            holder = self.known[self.requests[request_id]]
            if holder.job_id == replaces and holder.state in (JOB_STATE_FAILED, JOB_STATE_COMPLETED):
                holder = None
        if holder is None:
            assert added.sequence > self.sequence
            self.sequence = added.sequence
            holder = self.known[job_id] = replace(new, sequence=added.sequence)
            self.inputs[job_id] = inputs
            if request_id:
                self.requests[request_id] = job_id
        assert added == holder

    @rule(
        which=STORES,
        job_id=JOB_IDS,
        step=STEPS,
        state=st.sampled_from(LIVE),
        deaths=st.integers(0, 3),
        decisions=BYTES,
        deadline_steady=st.none() | TIMES,
        started_wall=TIMES,
    )
    def progress(self, which: int, job_id: str, step: int, **fields: Any) -> None:
        job, attempt = self.known.get(job_id), self._attempt(job_id, step)
        now = JobProgress(attempt=attempt, **fields)
        right = job is not None and job.state in LIVE and attempt >= job.attempt
        assert self.runner.run(self.stores[which].update(job_id, lambda job: job.progressed(now))) is right
        if job is not None and right:
            if job.started_wall is not None:
                del fields["started_wall"]
            self.known[job_id] = replace(job, attempt=attempt, **fields)

    @rule(job_id=JOB_IDS, steps=st.lists(STEPS, min_size=1, max_size=3), provenance=BYTES, at=TIMES, key=KEYS)
    def complete_at_once(self, job_id: str, steps: list[int], provenance: bytes, at: float, key: str) -> None:
        attempts = [self._attempt(job_id, step) for step in steps]
        images = (StoredImage(digest="d", size_bytes=len(provenance)),)

        async def race() -> list[bool]:
            facts: dict[str, Any] = {"images": images, "provenance": provenance, "ended_wall": at, "result_key": key}
            ends = [completed(attempt, **facts) for attempt in attempts]
            return await asyncio.gather(*(self.stores[place % 2].update(job_id, end) for place, end in enumerate(ends)))

        right = any(self._current(job_id, attempt) for attempt in attempts)
        assert sum(self.runner.run(race())) == right
        if right:
            self._end(job_id, JOB_STATE_COMPLETED, at, images=images, provenance=provenance, result_key=key)

    @rule(which=STORES, job_id=JOB_IDS, state=ENDS, error=BYTES, at=TIMES)
    def fail(self, which: int, job_id: str, state: JobState.ValueType, error: bytes, at: float) -> None:
        job = self.known.get(job_id)
        right = job is not None and job.state in LIVE
        end = failed if state == JOB_STATE_FAILED else cancelled
        assert self.runner.run(self.stores[which].update(job_id, end(error=error, ended_wall=at))) is right
        if right:
            self._end(job_id, state, at, error=error, steps_done=STEPS_DONE)

    @rule(which=STORES, ended_before=st.just(0.0) | TIMES, max_jobs=st.integers(0, 4), limit=st.integers(1, 2))
    def forget(self, which: int, ended_before: float, max_jobs: int, limit: int) -> None:
        gone = 0
        while gone < limit and (job := self._goes_next(ended_before, max_jobs)) is not None:
            gone += 1
            del self.known[job.job_id], self.inputs[job.job_id]
            self.requests = {key: job_id for key, job_id in self.requests.items() if job_id != job.job_id}
        call = self.stores[which].forget(ended_before=ended_before, max_jobs=max_jobs, max_bytes=1 << 40, limit=limit)
        assert self.runner.run(call) == gone

    def _goes_next(self, ended_before: float, max_jobs: int) -> JobRecord | None:
        ended = [job for job in self.known.values() if job.ended_wall is not None]
        ended.sort(key=lambda job: (job.ended_wall, job.sequence))
        if ended and (ended[0].ended_wall or 0.0) < ended_before:
            return ended[0]
        if len(self.known) <= max_jobs or not ended:
            return None
        kind = [job for job in ended if job.state != JOB_STATE_COMPLETED] or ended
        held = Counter(job.peer for job in kind)
        loses = min(held, key=lambda peer: (-held[peer], peer))
        return next(job for job in kind if job.peer == loses)

    @rule(
        which=STORES,
        size=st.integers(1, 4),
        states=st.sets(st.sampled_from(JobState.values())),
        created_after=st.none() | TIMES,
        created_before=st.none() | TIMES,
    )
    def page(self, which: int, size: int, **fields: Any) -> None:
        wanted = JobFilter(**fields)
        states, after, before = wanted.states, wanted.created_after, wanted.created_before
        expected = [
            job
            for job in sorted(self.known.values(), key=lambda job: -job.sequence)
            if (not states or job.state in states)
            and (after is None or job.created_wall >= after)
            and (before is None or job.created_wall < before)
        ]
        found: list[JobRecord] = []
        while True:
            last = found[-1].sequence if found else None
            call = self.stores[which].page(wanted, size=size, before_sequence=last)
            more = self.runner.run(call)
            found += more
            if len(more) < size:
                break
        assert found == expected

    @invariant()
    def both_stores_know_the_same(self) -> None:
        """One after every call, the other after the next."""
        self.calls += 1
        self.runner.run(self._compare(self.stores[self.calls % 2]))

    async def _compare(self, store: JobStore) -> None:
        live = [job for job in sorted(self.known.values(), key=lambda job: job.sequence) if job.state in LIVE]
        assert await store.live() == live
        for job_id in NAMES:
            assert await store.get(job_id) == self.known.get(job_id)
            assert await store.inputs(job_id) == self.inputs.get(job_id, b"")
        for request_id in ("r0", "r1", ""):
            assert await store.of_request(request_id) == self.known.get(self.requests.get(request_id, ""))
        for key in ("k0", "k1"):
            same = [job for job in self.known.values() if job.result_key == key]
            expected = sorted(same, key=lambda job: -job.sequence)[:2]
            assert await store.with_result(key, limit=2) == expected
        assert await store.with_result("", limit=2) == []

    def _attempt(self, job_id: str, step: int) -> int:
        return (self.known[job_id].attempt if job_id in self.known else 0) + step

    def _current(self, job_id: str, attempt: int) -> bool:
        job = self.known.get(job_id)
        return job is not None and job.state == JOB_STATE_RUNNING and job.attempt == attempt

    def _end(self, job_id: str, state: JobState.ValueType, at: float, **fields: Any) -> None:
        self.known[job_id] = replace(self.known[job_id], state=state, ended_wall=at, ended_steady=at, **fields)
        self.inputs[job_id] = b""


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_store_does_what_a_dictionary_would(backend: str) -> None:
    class MachineOfBackend(Machine):
        pass

    MachineOfBackend.backend = backend
    run_state_machine_as_test(
        MachineOfBackend,
        settings=settings(
            max_examples=3 if backend == "postgresql" else 10,  # each call of it waits for another process
            stateful_step_count=60,
            deadline=None,
            phases=(Phase.generate,),  # shrinking would run thousands of machines; sixty steps are readable
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
