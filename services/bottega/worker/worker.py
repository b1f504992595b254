"""The worker without its gRPC service: starts attempts, handles the engine's events and reports its load to the fleet.

The worker owns the engine process, the codec processes and its membership of the fleet. `service.py` converts between
it and gRPC.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import secrets
from collections.abc import Mapping, Sequence

from bottega import kinds, rules
from bottega.addons.interface.front_addon import FrontAddOn
from bottega.background_tasks import BackgroundTasks
from bottega.clocks import seconds_until_tick
from bottega.codec.pool import CodecPool
from bottega.errors import (
    BottegaError,
    ConfigError,
    Draining,
    InternalError,
    JobCancelled,
    MethodNotServed,
    ModelNotFound,
    StaleAttempt,
    WorkerLost,
)
from bottega.fair_order import Share
from bottega.manifest import read_services
from bottega.process.engine_supervisor import StartProgress
from bottega.process.memory import MemoryMeter
from bottega.rpc.fleet_membership import FleetMembership, SchedulerFence, StartingServer, registration_of
from bottega.rpc.status import from_job_error
from bottega.v1 import engine_pb2, fleet_pb2, image_pb2
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.link_pb2 import LinkOffer, OpenLinkRequest
from bottega.v1.worker_pb2 import RunAttemptRequest
from bottega.worker.attempt_runner import AttemptRunner, PictureOrigin
from bottega.worker.attempts import Attempt, AttemptCheckpoint, AttemptKey, Attempts, CheckpointWatch
from bottega.worker.config import WorkerConfig
from bottega.worker.engine_client import StartMonitor, WorkerEngineClient, reported_at_once
from bottega.worker.image_codec import AttemptInputs, ImageCodec
from bottega.worker.link_resolver import LinkResolver, check_opener
from bottega.worker.metrics import WorkerMetrics

_log = logging.getLogger(__name__)

_SWEEP_INTERVAL_S = 1.0
# The same while no attempt is remembered.
_REST_SWEEP_INTERVAL_S = 5.0
_INSTANCE_BYTES = 16


class Worker:
    """The logic of a worker, without gRPC. Call `start` first, and `drain` and `stop` at the end.

    Args:
        engine: The engine process, spawned but not yet ready.
        pool: The codec processes, started.
        server: The server of the worker, whose health the worker sets.
        addons: Add-ons of the front process.
    """

    def __init__(
        self,
        config: WorkerConfig,
        *,
        engine: WorkerEngineClient,
        pool: CodecPool,
        metrics: WorkerMetrics,
        server: StartingServer,
        addons: Sequence[FrontAddOn] = (),
    ) -> None:
        self.name = config.name_in_fleet(server.identity)
        self.kind = config.engine.kind
        """The kind of service that it is in the fleet."""
        self.checkpoints = CheckpointWatch()
        self.fence = SchedulerFence()
        self.attempts = Attempts(
            max_attempts=config.max_attempts,
            result_grace_s=config.result_grace_s,
            result_bytes=config.result_bytes,
        )
        self._config = config
        self.engine = engine
        self._pool = pool
        self._metrics = metrics
        self._addons = addons
        self._link_resolver = LinkResolver(
            engine.send, server.channels, worker=self.name, names={config.engine.peer.address: config.engine.peer.name}
        )
        self._server = server
        self._version = importlib.metadata.version("bottega-services")
        self._runners: dict[AttemptKey, AttemptRunner] = {}
        self._membership: FleetMembership | None = None
        self._beat = engine_pb2.EngineBeat()
        self._accelerations: Sequence[fleet_pb2.Acceleration] = ()
        self._start_s = 0.0
        self._starting: StartMonitor | None = None
        self._instance = ""
        self._model: image_pb2.Model | None = None
        self._model_name: str | None = None  # kept while an engine is lost: the next one has the same
        self.failed: asyncio.Future[BottegaError] = asyncio.get_running_loop().create_future()
        """Done with an error when no engine can be started any more and the process has to exit."""
        self._first_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks = BackgroundTasks("work of the worker")
        self._memory = MemoryMeter(
            lambda: [os.getpid(), *self._pool.pids, *([self.engine.pid] if self.engine.pid else [])]
        )
        self._metrics.memory_bytes.set_function(lambda: self._memory.resident_bytes)
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self) -> None:
        """Wait until the engine is ready.

        Raises:
            ConfigError: The engine cannot use its configuration or the files that it names.
            InternalError: The first engine did not get ready for another reason.
        """
        self._begin_start()
        self._tasks.start(self._watch_engine())
        self._tasks.start(self._sweep())
        await self._first_ready

    def run(self, request: RunAttemptRequest, inputs: AttemptInputs) -> Attempt:
        """Start the attempt of a validated request, or return the attempt if the worker holds it already.

        Raises:
            MethodNotServed: The worker does not denoise.
            ModelNotFound: The request names a model that this worker does not serve.
            StaleAttempt: The worker holds a later attempt at the job.
            Draining: The worker is stopping.
            QueueFull: The worker runs the maximum number of attempts.
        """
        key = AttemptKey.of(request.attempt)
        if self.kind != kinds.WORKER:
            raise MethodNotServed(f"this worker has the role {self.kind} only; send attempts to one with denoise")
        self._check_model(request.spec)
        if (known := self.attempts.find(key)) is not None:
            return known
        earlier = self.attempts.superseded(key)
        if self._draining:
            raise Draining("the worker is stopping")
        if earlier is not None:
            self._abort(earlier, StaleAttempt(f"superseded by attempt {key.number}"))
        attempt = self.attempts.add(key)
        self._idle.clear()
        self._create_runner(request, inputs, attempt).start()
        self._report_load()
        return attempt

    def cancel(self, key: AttemptKey) -> bool:
        """Stop an attempt and remove it. Return whether the worker held it."""
        if (attempt := self.attempts.find(key)) is None:
            return False
        self._abort(attempt, JobCancelled("the attempt was cancelled"))
        return True

    def preview(self, key: AttemptKey) -> bool:
        """Send previews with the attempt's progress from now on. Return whether the worker holds it."""
        runner = self._runners.get(key)
        if runner is not None:
            runner.enable_previews()
        return self.attempts.find(key) is not None

    async def open_link(self, request: OpenLinkRequest, *, caller: str) -> LinkOffer:
        """Return an offer of a connection to the other worker of the pair, or to one for which this one has a role.

        Args:
            caller: Host of the other worker.

        Raises:
            Forbidden: The caller is not the configured peer.
            ModelMismatch: The two workers have different models.
            Draining: This worker is stopping.
            Unavailable: This worker has no peer or no engine yet, or it computes for another worker.
            LinksFull: The engine has too many connections.
        """
        check_opener(request, self._config.engine, worker=self.name, model=self._model, draining=self._draining)
        return await self.engine.open_link(request, caller=caller)

    def load(self) -> fleet_pb2.Load:
        """Return the load to report to the fleet."""
        denoising = {AttemptKey.of(running.attempt): running for running in self._beat.running}
        return fleet_pb2.Load(
            running=[denoising.get(key) or runner.report(self._model) for key, runner in self._runners.items()],
            step_times=self._beat.step_times,
            fixed_s=self._beat.fixed_s,
            draining=self._draining,
            max_rows=self._config.engine.group_rows,
            memory_bytes=self._memory.resident_bytes,
            hosted=self._beat.hosted,
            switch_times=self._beat.switch_times,
            mask_tokens=self._beat.mask_tokens if self._beat.HasField("mask_tokens") else None,
            masked_times=self._beat.masked_times,
            accelerations=self._accelerations,
            activity=self._metrics.activity(),
            start_s=self._start_s,
            starting=None if self._starting is None else self._starting.message,
        )

    async def drain(self) -> None:
        """Accept no new attempts, wait until the running ones have ended, and then end the checkpoint streams.

        If it is cancelled because the server's grace period is over, attempts that still run end with Draining.
        """
        self._draining = True
        self._report_load()
        try:
            await self._idle.wait()
        finally:
            self._hand_over()
            self.checkpoints.close()

    async def stop(self) -> None:
        """Leave the fleet and end the processes. Attempts that still run fail."""
        self.checkpoints.close()
        self._end_start()
        await self._leave()
        await self._tasks.cancel()
        self._hand_over()
        await asyncio.gather(self.engine.stop(), self._pool.stop(), self._link_resolver.stop())

    async def on_engine_starting(self, progress: StartProgress) -> None:
        if self._starting is not None:
            self._starting.note(progress)
            self._report_load()

    async def on_engine_ready(self, ready: engine_pb2.EngineReady) -> None:
        self._start_s = min(self.engine.age_s, rules.MAX_START_S)
        facts = {"model": ready.model.name, "device": ready.device, "pid": self.engine.pid}
        stages = {stage: round(seconds, 1) for stage, seconds in self._end_start().items()}
        _log.info("engine ready", extra={**facts, "start_s": round(self._start_s, 3), "stages_s": stages})
        self.engine.forget_fleet()
        self._model, self._model_name = ready.model, ready.model.name
        self._accelerations = ready.accelerations
        self._metrics.set_accelerations(ready.accelerations)
        self._metrics.start_s.set(self._start_s)
        await self._leave()
        self._join(ready)
        if self._first_ready.done():
            await self._server.set_serving(not self._draining)
        else:
            self._first_ready.set_result(None)

    async def on_engine_event(self, event: engine_pb2.EngineEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "beat":
            before, self._beat = self._beat, event.beat
            self._metrics.set_beat(event.beat)
            if reported_at_once(event.beat) != reported_at_once(before):
                self._report_load()
            return
        if kind == "link_request":
            self._link_resolver.request(event.link_request)
            return
        if self.engine.take_answer(event):
            return
        if kind is None or kind in {"ready", "compiling"}:
            return
        key = AttemptKey.of(getattr(event, kind).attempt)
        runner = self._runners.get(key)
        if runner is None:
            return  # the attempt was dropped meanwhile
        if kind == "failed":
            runner.fail(from_job_error(event.failed.error), event.failed.trace)
        elif kind == "checkpoint":
            saved = event.checkpoint
            self.checkpoints.put(AttemptCheckpoint(key=key, steps_done=saved.steps_done, data=saved.checkpoint))
        else:
            runner.on_engine_event(event)

    async def on_engine_lost(self, why: str) -> None:
        self._metrics.on_engine_lost()
        self._end_start()
        self.engine.on_lost(why)
        if not self._first_ready.done():
            self._first_ready.set_exception(InternalError(f"the engine process could not be started: {why}"))
            return
        await self._server.set_serving(False)
        await self._leave()  # leave first, so that the gateway does not send the lost jobs here again
        self._beat, self._model = engine_pb2.EngineBeat(), None
        held = [runner for runner in self._runners.values() if runner.in_engine]
        for runner in held:
            facts = {"died": "engine", "held_together": str(len(held))}
            runner.fail(WorkerLost(f"the worker's engine was lost: {why}", metadata=facts))
        self._begin_start()

    async def _watch_engine(self) -> None:
        try:
            await self.engine.watch(self)
        except (ConfigError, InternalError) as error:
            if self._first_ready.done():
                self.failed.set_result(error)
            else:
                self._first_ready.set_exception(error)

    def _check_model(self, spec: GenerationSpec) -> None:
        served = self._model_name
        if served is not None and spec.HasField("model") and spec.model != served:
            raise ModelNotFound(f"no such model; served: {served}", metadata={"served": served})

    def _hand_over(self) -> None:
        """End running attempts with Draining. Another worker draws them, or this one after its restart."""
        for runner in list(self._runners.values()):
            runner.abort(Draining("the worker is stopping; another worker draws the job"))

    def _create_runner(self, request: RunAttemptRequest, inputs: AttemptInputs, attempt: Attempt) -> AttemptRunner:
        share = Share(tenant=request.share.tenant, weight=request.share.weight)
        model_hash = self._model.model_hash if self._model else ""
        runner = self._runners[attempt.key] = AttemptRunner(
            request,
            inputs,
            attempt,
            engine=self.engine,
            images=ImageCodec(self._pool, share),
            metrics=self._metrics,
            origin=PictureOrigin(worker=self.name, version=self._version, model_hash=model_hash, addons=self._addons),
            on_end=self._on_ended,
        )
        return runner

    def _on_ended(self, runner: AttemptRunner) -> None:
        key = runner.attempt.key
        self._runners.pop(key, None)
        if not self._runners:
            self._idle.set()
        self.checkpoints.drop(key)
        self.attempts.sweep()
        self._report_load()

    def _abort(self, attempt: Attempt, error: BottegaError) -> None:
        runner = self._runners.get(attempt.key)
        if runner is not None:
            runner.abort(error)
        self.attempts.forget(attempt)

    def _begin_start(self) -> None:
        """Watch the start of an engine, and join the fleet as a worker that serves no model yet."""
        self._starting = StartMonitor(self._extend_start)
        self._instance = secrets.token_hex(_INSTANCE_BYTES)
        self._join(None)

    def _extend_start(self, status: str) -> None:
        if not self._first_ready.done():  # later starts do not concern systemd, which knows the worker as started
            self._server.extend_start(status, within_s=self._config.start_stall_s)

    def _end_start(self) -> Mapping[str, float]:
        """Stop watching the start of the engine. Return the seconds of its stages."""
        starting, self._starting = self._starting, None
        return {} if starting is None else starting.end()

    def _join(self, ready: engine_pb2.EngineReady | None) -> None:
        """Join the fleet with the model of a ready engine, or with no model while the engine starts."""
        if not self._config.gateway:
            return
        device = "" if ready is None else ready.device
        registration = registration_of(self._server, kind=self.kind, name=self.name, device=device)
        registration.instance = self._instance
        registration.models.extend([] if ready is None else [ready.model])
        if self.kind == kinds.WORKER:
            registration.uses.extend(service.kind for service in read_services() if service.engine_add_on)
            registration.uses.extend(self._config.engine.asks)
        self._membership = FleetMembership(
            self._config.gateway,
            registration,
            load=self.load,
            on_backlog=self.engine.set_backlog,
            on_services=self._pass_services,
            on_scheduler=self.fence.note,
            channels=self._server.channels,
        )
        self._membership.start()

    async def _leave(self) -> None:
        if self._membership:
            membership, self._membership = self._membership, None
            await membership.stop()

    def _report_load(self) -> None:
        if self._membership:
            self._membership.report_soon()

    def _pass_services(self, services: Sequence[fleet_pb2.ServiceAddress]) -> None:
        self._link_resolver.note_services(services)
        self.engine.set_services(services)

    async def _sweep(self) -> None:
        while True:
            try:
                self.attempts.sweep()
            except Exception:  # noqa: BLE001 - the boundary of the task, which must go on to forget results
                _log.exception("removing old results failed with an unexpected error")
            await asyncio.sleep(seconds_until_tick(_SWEEP_INTERVAL_S if any(self.attempts) else _REST_SWEEP_INTERVAL_S))
