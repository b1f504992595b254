"""The real engine process on its pipe: what it says when, and how it ends."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from bottega.device.engine_start import silent_reporter
from bottega.errors import ConfigError
from bottega.process.child import FramedPipe, open_pair
from bottega.process.engine_supervisor import EngineTimeouts, StartProgress
from bottega.v1 import error_pb2, fleet_pb2, tensor_pb2
from bottega.v1.engine_pb2 import EngineCancel, EngineCommand, EngineEvent, EngineReady, EngineStart
from bottega.v1.generation_pb2 import SAMPLER_EULER, GenerationSpec, Sampler
from bottega.v1.worker_pb2 import AttemptId, RunAttemptRequest
from bottega.worker.config import EngineConfig
from bottega.worker.engine.loop import run
from bottega.worker.engine_client import WorkerEngineClient

START_S = 90.0
ANSWER_S = 30.0
CONFIG = EngineConfig(threads=1, max_pixels=128 * 128, checkpoint_interval_s=0.2)

# One process for all tests here: it needs some seconds to load its model.
pytestmark = pytest.mark.asyncio(loop_scope="module")


class RunningEngine:
    """A worker's front of one engine, which keeps what that says. log: what the process wrote to stderr."""

    def __init__(self, front: WorkerEngineClient, log: Path) -> None:
        self.front = front
        self.log = log
        self.ready: EngineReady | None = None
        self.stages: dict[str, StartProgress] = {}
        self.heard: list[EngineEvent] = []
        self._news = asyncio.Condition()
        self._watching = asyncio.create_task(front.watch(self))

    async def stop(self) -> int | None:
        """Closes the pipe; returns the exit code. Harmless when it was closed before."""
        self._watching.cancel()
        with suppress(asyncio.CancelledError):
            await self._watching
        return await self.front.stop()

    async def on_engine_starting(self, progress: StartProgress) -> None:
        self.stages.setdefault(progress.stage, progress)

    async def on_engine_ready(self, ready: EngineReady) -> None:
        async with self._news:
            self.ready = ready
            self._news.notify_all()

    async def on_engine_event(self, event: EngineEvent) -> None:
        async with self._news:
            self.heard.append(event)
            self._news.notify_all()

    async def on_engine_lost(self, why: str) -> None:
        """See EngineListener."""

    async def until(self, condition: Callable[[], bool], timeout_s: float = ANSWER_S) -> None:
        """Waits for the engine to say what makes this true."""
        async with asyncio.timeout(timeout_s), self._news:
            await self._news.wait_for(condition)

    def start(self, job_id: str, spec: GenerationSpec, checkpoint: bytes = b"") -> None:
        request = RunAttemptRequest(attempt=AttemptId(job_id=job_id, number=1), spec=spec, checkpoint=checkpoint)
        self.front.send(EngineCommand(start=EngineStart(request=request)))

    def cancel(self, job_id: str) -> None:
        self.front.send(EngineCommand(cancel=EngineCancel(attempt=AttemptId(job_id=job_id, number=1))))

    def said_of(self, job_id: str) -> list[tuple[str, EngineEvent]]:
        """The events of an attempt by kind, in order."""
        events = [(str(event.WhichOneof("event")), event) for event in self.heard]
        return [(kind, event) for kind, event in events if kind != "beat" and attempt_in(kind, event) == job_id]

    def kinds_of(self, job_id: str) -> list[str]:
        return [kind for kind, _ in self.said_of(job_id)]

    def beats(self) -> list[EngineEvent]:
        return [event for event in self.heard if event.HasField("beat")]


def attempt_in(kind: str, event: EngineEvent) -> str:
    attempt: AttemptId = getattr(event, kind).attempt
    assert attempt.number == 1
    return attempt.job_id


def spec(**options: Any) -> GenerationSpec:
    """All that the gateway fills in."""
    said: dict[str, Any] = {"prompt": "a big red star", "num_inference_steps": 6, "guidance_scale": 4.0}
    said |= {"width": 64, "height": 64, "seed": 7, "num_images": 1}
    return GenerationSpec(**(said | options))


@contextmanager
def stderr_in(path: Path) -> Iterator[None]:
    """What is started meanwhile inherits the file as its stderr."""
    before = os.dup(2)
    try:
        with path.open("wb") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningEngine]:
    timeouts = EngineTimeouts(start_stall_s=START_S, hang_s=ANSWER_S, stall_s=ANSWER_S)
    front = WorkerEngineClient(CONFIG, timeouts=timeouts)
    log = tmp_path_factory.mktemp("engine") / "stderr"
    with stderr_in(log):
        await front.spawn()
    running = RunningEngine(front, log)
    try:
        await running.until(lambda: running.ready is not None, START_S)
        yield running
    finally:
        await running.stop()


async def test_its_first_word_is_that_it_is_ready_and_what_its_model_is(engine: RunningEngine) -> None:
    assert engine.ready is not None  # the front takes nothing else for a first word
    model = engine.ready.model
    assert engine.ready.device == "cpu"
    assert (model.name, model.dtype, len(model.model_hash)) == ("miniature", "float32", 64)
    assert (model.default_width, model.default_height, model.size_multiple, model.vae_scale_factor) == (64, 64, 8, 4)
    assert (model.default_steps, model.default_guidance_scale, model.default_sampler) == (30, 4.0, SAMPLER_EULER)
    assert model.max_pixels == 128 * 128
    offered = [(choice.sampler, choice.use_karras_sigmas, choice.is_default) for choice in model.sampler_choices]
    assert offered[:4] == [(1, False, True), (1, True, False), (2, False, True), (3, False, True)]
    assert {sampler for sampler, _, is_default in offered if is_default} == set(Sampler.values()) - {0}
    refused = {Sampler.Name(choice.sampler) for choice in model.sampler_choices if choice.refused_because}
    assert refused == {"SAMPLER_EDM_EULER", "SAMPLER_EDM_DPMPP_2M", "SAMPLER_FLOW_MATCH_EULER"}


async def test_it_says_how_far_its_start_is(engine: RunningEngine) -> None:
    loaded = [f"loading {part}" for part in ("text_encoder", "text_encoder_2", "unet", "vae")]
    order = [
        "importing libraries",
        "choosing an element type",
        *loaded,
        "hashing its files",
        "preparing add-ons",
        "warming up",
    ]
    assert list(engine.stages) == order
    assert all(engine.stages[stage].total_bytes > 0 for stage in (*loaded, "hashing its files"))


async def test_an_idle_engine_goes_on_beating_and_says_what_its_turns_take(engine: RunningEngine) -> None:
    count = len(engine.beats())
    await engine.until(lambda: len(engine.beats()) > count)
    beat = engine.beats()[-1].beat
    assert not beat.running
    assert beat.fixed_s > 0
    assert {1, 2, 4, 8, 16} <= {turn.rows for turn in beat.step_times}
    assert all((turn.latent_height, turn.latent_width) == (16, 16) for turn in beat.step_times)


async def test_the_events_of_an_attempt_come_in_order(engine: RunningEngine) -> None:
    engine.start("whole", spec(prompt=" ".join(["a big red star on a blue background"] * 50)))
    await engine.until(lambda: "done" in engine.kinds_of("whole"))
    said = [(kind, event) for kind, event in engine.said_of("whole") if kind != "checkpoint"]
    steps = [event.progress.steps_done for kind, event in said if kind == "progress"]
    assert [kind for kind, _ in said] == ["started", *["progress"] * len(steps), "picture", "done"]
    assert said[0][1].started.steps_total == 6
    assert steps == sorted(set(steps))
    assert steps[-1] == 6
    picture = said[-2][1].picture
    assert (picture.index, picture.pixels.data_type) == (0, tensor_pb2.DATA_TYPE_UINT8)
    assert (tuple(picture.pixels.shape), len(picture.pixels.data)) == ((64, 64, 3), 64 * 64 * 3)
    assert len(set(picture.pixels.data)) > 50
    assert 0 < time.monotonic() - picture.handed_over_s < ANSWER_S
    provenance = said[-1][1].done.provenance
    assert engine.ready is not None
    assert provenance.model_hash == engine.ready.model.model_hash
    assert [stage.stage for stage in provenance.times] == ["encode", "denoise", "batch", "decode"]
    assert [(cut.field, len(cut.text.split())) for cut in provenance.truncations] == [("prompt", 378)]
    assert provenance.mean_group_requests == 1


async def test_a_command_that_makes_no_sense_ends_its_attempt_and_no_other(engine: RunningEngine) -> None:
    image = tensor_pb2.Tensor(data_type=tensor_pb2.DATA_TYPE_UINT8, shape=(64, 64, 3), data=b"too short")
    request = RunAttemptRequest(attempt=AttemptId(job_id="torn", number=1), spec=spec(strength=0.5))
    engine.front.send(EngineCommand(start=EngineStart(request=request, image=image)))
    await engine.until(lambda: bool(engine.kinds_of("torn")))
    [(kind, event)] = engine.said_of("torn")
    assert (kind, event.failed.error.reason) == ("failed", error_pb2.ERROR_REASON_INTERNAL)
    engine.start("next", spec())
    await engine.until(lambda: "done" in engine.kinds_of("next"))


async def test_a_cancelled_attempt_is_gone_and_its_checkpoint_goes_on(engine: RunningEngine) -> None:
    def running() -> list[fleet_pb2.RunningAttempt]:
        return list(engine.beats()[-1].beat.running)

    engine.start("long", spec(num_inference_steps=900))
    await engine.until(lambda: "checkpoint" in engine.kinds_of("long"))
    await engine.until(lambda: any(one.steps_left < 900 for one in running()))
    assert [one.attempt.job_id for one in running()] == ["long"]
    engine.cancel("long")
    await engine.until(lambda: not running())
    assert not {"picture", "done", "failed"} & set(engine.kinds_of("long"))
    left = next(event.checkpoint for kind, event in engine.said_of("long") if kind == "checkpoint")

    engine.start("again", spec(num_inference_steps=900), left.checkpoint)
    await engine.until(lambda: "started" in engine.kinds_of("again"))
    assert engine.said_of("again")[0][1].started.steps_resumed == left.steps_done > 0
    engine.cancel("again")
    await engine.until(lambda: not running())


async def test_it_ends_by_itself_when_the_pipe_closes_in_the_middle_of_a_job(engine: RunningEngine) -> None:
    """The last one here: it ends the engine of all."""
    engine.start("unfinished", spec(num_inference_steps=900))
    await engine.until(lambda: "progress" in engine.kinds_of("unfinished"))
    assert await engine.stop() == 0
    # Neither a warning nor a progress bar in all that it did; only what the torn picture brought about.
    assert [json.loads(line)["event"] for line in engine.log.read_text().splitlines()] == ["a job failed"]


async def test_a_folder_that_is_no_model_ends_it_with_a_line_that_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = open_pair()
    with ours, theirs:
        config = dataclasses.replace(CONFIG, model=str(tmp_path))
        assert run(FramedPipe(theirs), config, silent_reporter()) == ConfigError.exit_status
    (line,) = caplog.records
    assert (line.levelname, line.message) == ("ERROR", "the engine cannot start")
    assert line.__dict__["model"] == str(tmp_path)
    assert "model_index.json" in line.__dict__["why"]
