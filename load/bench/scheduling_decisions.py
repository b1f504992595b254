"""What a decision of the gateway's real scheduler takes, with many workers and 1,000 jobs queued: edits, or a trace's.

Measured is its own processor time, from the queue to the calls of workers. The controller is the gateway's, with all
its add-ons; its workers are calls that wait (tests.fakes.gateway_rules). All templates are in a store, so that a worker
without an edit's template has to load it. Between two looks some workers make a step, report, or complete an edit, and
another edit comes.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time

from prometheus_client import CollectorRegistry

from bottega import kinds
from bottega.addons.edits.gateway import ActivationsAddOn
from bottega.addons.interface.gateway_addon import AddOnMetrics
from bottega.addons.interface.views import JobRequest, Member
from bottega.gateway.fleet.registry import Fleet
from bottega.gateway.jobs.job import Job
from bottega.gateway.scheduling.policy import RunningShares
from bottega.gateway.tenants import TenantTerms
from bottega.planning.width import MAX_POINTS
from bottega.process.memory import tune_garbage_collector
from bottega.v1 import fleet_pb2, worker_pb2
from bottega.v1.activations_pb2 import (
    TEMPLATE_TIER_DISK,
    TEMPLATE_TIER_MEMORY,
    PrefetchTemplatesResponse,
    TemplateResidence,
)
from bottega.v1.generation_pb2 import ControlNet, GenerationSpec, Lora
from bottega.v1.hosted_pb2 import HOSTED_STATE_LOADED, Hosted
from load.replay.trace_shape import CONTROLNETS_B, LORAS_B, PUBLIC, TEMPLATES, TemplatePopularity
from tests.fakes.fake_time import FakeTime
from tests.fakes.gateway_rules import Shop
from tests.samples.controlnet_hosts import again, bounds, net
from tests.samples.controlnet_hosts import server as controlnet_server

WORKERS, QUEUED = 64, 1000
_SHAPE = (16, 16)
_STEPS = (20, 30, 50)
# Templates in a worker's memory, and in the store's: the most popular ones. The others are on its disk, at this speed.
_TEMPLATES, _IN_MEMORY = 32, 100
_TEMPLATE_BYTES, _DISK_BYTES_PER_S = 512 << 20, 1e9
# Share of tokens: an edit that computes more saves nothing that would be worth a load.
_MOST_SHARE = 0.9
# Requests of the trace whose LoRAs a worker has at hand, and workers for each ControlNet server.
_LORAS, _WORKERS_A_SERVER = 12, 8
# Looks that do not count.
_WARM_UP = 100
# Shares of the workers that make a step, that report and that complete an edit, between two looks.
_STEPPING, _REPORTING, _COMPLETING = 0.08, 0.03, 0.01


def decision_times_s(*, looks: int, workers: int = WORKERS, queued: int = QUEUED, trace: bool = False) -> list[float]:
    """Return the processor seconds of each look, over the jobs that it gave away where those were several.

    Args:
        looks: Looks that are measured.
        workers: Workers of the fleet.
        queued: Jobs that wait at each look.
        trace: Whether jobs are those of service B of Katz' trace, with ControlNets and LoRAs, and not edits.
    """
    return asyncio.run((_TraceDesk if trace else _Desk)(workers, queued).measure(looks))


class _Desk:
    """A controller, and the changes between its looks."""

    def __init__(self, workers: int, queued: int) -> None:
        self._workers, self._queued = workers, queued
        self._chance = random.Random("decisions")
        self._shares, self._templates = PUBLIC.draw(self._chance), TemplatePopularity().draw(self._chance)

    async def measure(self, looks: int) -> list[float]:
        clock = FakeTime().clock()
        fleet = Fleet(lease_s=60, model_grace_s=60, bounds=bounds(4), clock=clock)
        activations = ActivationsAddOn(fleet, AddOnMetrics(CollectorRegistry()), clock)
        activations._note_response("127.0.0.1:1", _answer())
        shop = Shop(addons=[activations], max_members=2 * self._workers)
        members = [shop.worker(f"w{number}") for number in range(self._workers)]
        self._join_others(shop)
        for member in members:
            self._report(shop, member)
        scheduler, taken, thresholds = shop.controller.scheduler, [], gc.get_threshold()
        try:
            while len(shop.queue) < self._queued:
                shop.take(self._job(shop))
            self._check(shop)
            tune_garbage_collector()  # as the gateway does
            for _ in range(_WARM_UP + looks):
                for member in members:
                    await self._change(shop, member)
                before = len(shop.queue)
                began_s = time.thread_time()
                scheduler.schedule("m")
                seconds = time.thread_time() - began_s
                taken.append(seconds / max(1, before - len(shop.queue)))
                shop.time.now += 0.015
                while len(shop.queue) < self._queued - 1:
                    shop.take(self._job(shop))
        finally:
            gc.unfreeze()
            gc.set_threshold(*thresholds)
            await shop.stop()
        return taken[_WARM_UP:]

    async def _change(self, shop: Shop, member: Member) -> None:
        """Let a worker make a step, report, or complete an edit, by chance."""
        if self._chance.random() < _REPORTING:
            self._report(shop, member)
        running = shop.running(member) if self._chance.random() < _STEPPING else []
        for job in running:
            job.set_steps_done(job.number, min(job.steps.total - 1, job.steps.done + 1))
        if running:
            member.revision += 1
        if self._chance.random() < _COMPLETING and (ending := shop.running(member)):
            await self._complete(shop, ending[0])

    async def _complete(self, shop: Shop, job: Job) -> None:
        """Complete a job without a look at the queue."""
        scheduler = shop.controller.scheduler
        scheduler.draining = True
        await shop.complete(job)
        scheduler.draining = False

    def _report(self, shop: Shop, member: Member) -> None:
        hosted = self._hosted()
        times = [
            fleet_pb2.StepTime(latent_height=16, latent_width=16, rows=rows, seconds=0.02 + 0.1 * rows)
            for rows in (1, 2, 4, 8, 16)
        ]
        running = [
            fleet_pb2.RunningAttempt(
                attempt=worker_pb2.AttemptId(job_id=job.job_id, number=job.number),
                steps_left=job.steps.total - job.steps.done,
                computed_share=job.request.computed_share,
            )
            for job in shop.running(member)
        ]
        # With loads beside them, rows take half as long again.
        planned = [fleet_pb2.PlannedTime(rows=rows, seconds=0.03 + 0.15 * rows) for rows in range(1, 1 + MAX_POINTS)]
        masked = [fleet_pb2.MaskedTimes(latent_height=16, latent_width=16, fixed_share=0.3, planned=planned)]
        load = fleet_pb2.Load(
            step_times=times,
            max_rows=16,
            running=running,
            hosted=hosted,
            masked_times=masked,
            mask_tokens=fleet_pb2.MaskTokens(token_elements=2, margin_tokens=1),  # as a worker that masks
        )
        shop.fleet.report(member, load)

    def _hosted(self) -> list[Hosted]:
        digests = {_digest(next(self._templates)) for _ in range(_TEMPLATES)}
        return [Hosted(kind=kinds.ACTIVATIONS, digest=digest, state=HOSTED_STATE_LOADED) for digest in digests]

    def _join_others(self, shop: Shop) -> None:
        """Let other services than workers join."""

    def _check(self, shop: Shop) -> None:
        """Assert that the add-ons have costs for the jobs."""
        _check_loads(shop)

    def _job(self, shop: Shop) -> Job:
        steps = self._chance.choice(_STEPS)
        spec = GenerationSpec(model="m", num_inference_steps=steps, num_images=1, guidance_scale=5.0, seed=1)
        share, template = min(1.0, next(self._shares) + 0.02), _digest(next(self._templates))
        request = JobRequest(fingerprint="f", shape=_SHAPE, edit_source=template, computed_share=share)
        return Job(clock=shop.time.clock(), spec=spec, bare=spec, request=request)


class _TraceDesk(_Desk):
    """A controller whose jobs have the ControlNets and LoRAs of the trace."""

    def __init__(self, workers: int, queued: int) -> None:
        super().__init__(workers, queued)
        self._nets, self._loras = (calls.draw(self._chance, least=0) for calls in (CONTROLNETS_B, LORAS_B))
        self._at_hand = LORAS_B.draw(self._chance)

    def _hosted(self) -> list[Hosted]:
        digests = {_digest(rank) for _ in range(_LORAS) for rank in next(self._at_hand)}
        return [Hosted(kind=kinds.LORAS, digest=digest, state=HOSTED_STATE_LOADED) for digest in digests]

    def _join_others(self, shop: Shop) -> None:
        nets = [net(f"net{rank}", base="") for rank in range(CONTROLNETS_B.unique)]
        for number in range(max(1, self._workers // _WORKERS_A_SERVER)):
            server = shop.fleet.join(again(controlnet_server(f"s{number}", port=10_000 + number)))
            shop.fleet.report(server, fleet_pb2.Load(hosted=nets))

    def _check(self, shop: Shop) -> None:
        assert any(job.controlnets and job.loras for job in shop.queue.line("m"))

    def _job(self, shop: Shop) -> Job:
        spec = GenerationSpec(
            model="m",
            num_inference_steps=self._chance.choice(_STEPS),
            num_images=1,
            guidance_scale=5.0,
            seed=1,
            controlnets=[ControlNet(name=f"net{rank}") for rank in next(self._nets)],
            loras=[Lora(name=f"lora{rank}", digest=_digest(rank), scale=1.0) for rank in next(self._loras)],
        )
        request = JobRequest(fingerprint="f", shape=_SHAPE)
        return Job(clock=shop.time.clock(), spec=spec, bare=spec, request=request)


def _digest(template: int) -> str:
    """Return the digest of a template by its rank."""
    return f"{template:064x}"


def _answer() -> PrefetchTemplatesResponse:
    """Return the answer of a store with all templates, the most popular ones in its memory."""
    near = [TemplateResidence(source=_digest(template), tier=TEMPLATE_TIER_MEMORY) for template in range(_IN_MEMORY)]
    far = [
        TemplateResidence(source=_digest(template), tier=TEMPLATE_TIER_DISK, disk_bytes=_TEMPLATE_BYTES)
        for template in range(_IN_MEMORY, TEMPLATES)
    ]
    return PrefetchTemplatesResponse(templates=[*near, *far], disk_bytes_per_s=_DISK_BYTES_PER_S)


def _check_loads(shop: Shop) -> None:
    """Assert that every edit that waits costs a load at workers without its template."""
    members = {member.name: member for member in shop.fleet.workers("m")}
    shares = RunningShares({}, (), TenantTerms().weight)
    line = [job for job in shop.queue.line("m") if job.request.computed_share < _MOST_SHARE]
    for job, pending in zip(line, shop.controller._snapshot.pending(line, members, shares), strict=True):
        template = job.request.edit_source
        having = {name for name, each in members.items() if template in each.hosts(kinds.ACTIVATIONS).digests}
        assert {name for name in members if pending.load_s[name]} == members.keys() - having
