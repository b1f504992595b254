"""The whole suite as real processes on the device, against its engine alone.

It measures what the suite adds, ControlNets on a server of their own, which share the device by turns, and what a hit
of the approximate cache saves.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from bottega import kinds
from bottega.addons.cache.starts import FRACTIONS
from bottega.client import CacheProfile, Client, ControlNet, LengthClass, Picture, SkipProfile
from load.bench.framework import GUIDANCE_SCALE, PROMPT, scratch
from load.bench.suites import stage_s
from load.gpu_report import sides
from load.gpu_report.controlnets import GROUP, control_image
from load.gpu_report.links import carried_by, transfer
from load.gpu_report.report import Figure
from load.gpu_report.rig import THREADS, Rig, need
from load.gpu_report.timing import timed
from tests.support.services import FREE_PORTS, Service, Services, gateway_config, worker_config
from tests.support.waiting import wait_until

# The self-check of a worker alone may take 120 s.
_START_S = 400.0
_JOIN_S = 60.0
_RECORDED_S = 60.0
_CALL_S = 300.0
# Of a request, beside the engine's own time.
WANTED_ADDED_MS = 20.0
_ALWAYS = -1.0
_LEAST_CACHE_STEPS = 30
# Of a hit, for one that is counted: with short steps some answers come too late.
_TRIES = 4


def measure(rig: Rig) -> Sequence[Figure]:
    """Measure the engine alone, then the suite. Raises LeftOutError without FAISS."""
    need("faiss", "FAISS")
    with sides.our_side(rig) as draw:
        alone = timed(lambda number: draw(1, number), rounds=rig.size.rounds, device=rig.device)
    with _running(rig) as (client, worker):
        bench = Bench(rig=rig, client=client)
        figures = [*bench.added(alone.seconds), *bench.controlnets()]
        return [*figures, *carried_by(rig, worker.events()), transfer(rig), *bench.cache()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A suite that is measured."""

    rig: Rig
    client: Client

    def added(self, alone_s: float) -> Sequence[Figure]:
        """Return what the suite adds to the seconds of a picture by the engine alone, encoding its file apart."""
        pictures: list[Picture] = []
        whole = timed(lambda number: pictures.append(self._draw(number)), rounds=self.rig.size.rounds, device="cpu")
        coded_s = median(stage_s(picture, "encode_image") for picture in pictures[1:])
        added_ms = (whole.seconds - alone_s - coded_s) * 1e3
        return [
            Figure("suite_s", "a picture by the suite", whole.seconds, "s"),
            Figure("engine_s", "  by its engine alone", alone_s, "s"),
            Figure("encode_image_ms", "  encoding its file", coded_s * 1e3, "ms"),
            self.rig.wanted(Figure("added_ms", "  added beside that", added_ms, "ms", at_most=WANTED_ADDED_MS)),
        ]

    def controlnets(self) -> Iterator[Figure]:
        """Yield the time of a step with each number of ControlNets."""
        steps = self.rig.size.edit_steps
        for count in range(1, self.rig.size.controlnets + 1):
            nets = [ControlNet(f"net{place}", control_image(self.rig)) for place in range(1, count + 1)]
            drawn = [
                self._draw(number, num_inference_steps=steps, controlnets=nets)
                for number in range(self.rig.size.rounds + 1)
            ][1:]
            name, label = f"step_{count}_controlnets_server", f"{count} ControlNets, ours on a server"
            yield Figure(f"{name}_ms", label, median(map(_step_s, drawn)) * 1e3, "ms", GROUP)
            waited_s = median(sum(net.waited_s for net in each.provenance.controlnets) / steps for each in drawn)
            yield Figure(f"{name}_waited_ms", "  waiting for them", waited_s * 1e3, "ms")

    def cache(self) -> Iterator[Figure]:
        """Yield the time of a hit for each number of steps that it may spare, and of the same request from noise."""
        prompt = f"{PROMPT}, again"
        for seed in (1_000, 1_001):  # what is asked for the first time is not recorded
            self._cached(seed, prompt, fidelity="exact")
        wait_until(lambda: self._recorded(prompt), "the prompt to be recorded", within_s=_RECORDED_S)
        (model,) = self.client.models()
        full = timed(
            lambda number: self._cached(number, prompt, approximate_cache=False),
            rounds=self.rig.size.rounds,
            device="cpu",
        )
        yield Figure("cache_off_s", "a request without the cache", full.seconds, "s", _CACHE)
        fractions = FRACTIONS if self.rig.size.wanted else FRACTIONS[-1:]
        late = 0
        for fraction in fractions:
            step = round(fraction * self._cache_steps)
            balanced = SkipProfile(classes=(LengthClass(max_words=math.inf, thresholds={fraction: _ALWAYS}),))
            self.client.set_cache_profile(
                CacheProfile(model_hash=model.model_hash, balanced=balanced, about="gpu-report")
            )
            seconds = self._hit_s(prompt)
            late += seconds is None
            if seconds is not None:
                yield Figure(f"cache_hit_{step}_s", f"a hit after {step} steps", seconds, "s", _CACHE)
        yield Figure("cache_late", "hits that came too late to be of use", late)

    @property
    def _cache_steps(self) -> int:
        """The steps of a picture: a hit comes in time where the steps that it saves take longer than asking."""
        return max(self.rig.size.steps, _LEAST_CACHE_STEPS)

    def _hit_s(self, prompt: str) -> float | None:
        """Return the median seconds of the requests that started from a latent; None where none did."""
        taken = []
        for number in range(_TRIES * self.rig.size.rounds):
            began_s = time.perf_counter()
            picture = self._cached(number, prompt, approximate_cache=True)
            if picture.provenance.cached_starts:
                taken.append(time.perf_counter() - began_s)
            if len(taken) > self.rig.size.rounds:
                break
        return median(taken[-self.rig.size.rounds :]) if taken else None

    def _cached(self, seed: int, prompt: str, **options: Any) -> Picture:
        steps = {"num_inference_steps": self._cache_steps, "fidelity": "balanced"}
        return self._draw(seed, prompt=prompt, **{**steps, **options})

    def _recorded(self, prompt: str) -> bool:
        return any(each.parameters.prompt == prompt for each in self.client.cache_entries())

    def _draw(self, seed: int, *, prompt: str = PROMPT, **options: Any) -> Picture:
        plain: Mapping[str, Any] = {**self.rig.picture, "guidance_scale": GUIDANCE_SCALE, "fidelity": "exact"}
        return self.client.generate(prompt, seed=seed, **{**plain, **options})


_CACHE = "A request and the approximate cache: seconds"


@contextmanager
def _running(rig: Rig) -> Iterator[tuple[Client, Service]]:
    """Run a gateway, a cache, and a worker and a ControlNet server on the device; give a client and the worker."""
    device = {"device": rig.device, "dtype": rig.size.dtype, "threads": THREADS}
    with scratch() as folder, Services(folder, start_s=_START_S) as services:
        gateway = services.start("gateway", gateway_config())
        named = {"gateway": gateway.fleet, "server": FREE_PORTS}
        # Only so does every question have the answer of the profile of the moment.
        exact = {"exploration": 0.0, "row_pictures": 1, "predictor": False}
        services.start("cache", {"name": "cache", **named, "folder": str(folder / "cache"), **exact})
        nets = {f"net{place}": str(rig.controlnet) for place in range(1, rig.size.controlnets + 1)}
        engine = {**device, "budget_bytes": 64 << 30}
        server = {**named, "engine": engine, "controlnets": nets, "catalogue": str(folder / "controlnets.db")}
        services.start("controlnet", {"name": "controlnet", **server})
        worker = services.start("worker", worker_config(gateway.fleet, name="worker", engine=sides.engine_config(rig)))
        with Client(gateway.address, fleet_address=gateway.fleet, timeout_s=_CALL_S) as client:
            wait_until(lambda: _all_here(client), "all to join", within_s=_JOIN_S)
            yield client, worker


def _all_here(client: Client) -> bool:
    here = {member.kind for member in client.fleet().members}
    return {kinds.CACHE, kinds.CONTROLNET} <= here and bool(client.models()) and bool(client.controlnets())


def _step_s(picture: Picture) -> float:
    """Return the seconds of all that the engine does in a step."""
    spent = sum(stage_s(picture, stage) for stage in ("denoise", "batch", "controlnets"))
    return spent / picture.provenance.parameters.num_inference_steps
