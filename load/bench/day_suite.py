"""The suite of a day: gateway, worker, ControlNet server and stores as processes, with all techniques or without some.

Every run has a suite of its own, which begins with the same state: a copy of what `prepare` left, as it is on the
morning after a day like this one.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bottega.addons.cache.client.types import profile_from
from bottega.client import AsyncClient, Client, Picture
from bottega.client.types.options import GenerationOptions
from bottega.v1.cache_pb2 import CacheProfile
from load.bench.accelerations import ACCELERATIONS, say_of_workers
from load.bench.closed_loop import closed_loop
from load.bench.day_reference import GUIDANCE_SCALE
from load.bench.day_techniques import ALL, Techniques
from load.bench.day_world import MODEL, World
from load.replay.gateway_sender import GatewaySender
from load.replay.requests import PlannedRequest
from load.replay.results import Outcome
from tests.support.services import FREE_PORTS, Services, gateway_config, worker_config
from tests.support.waiting import wait_until

# All services, while the cores are shared, with what the worker tries before.
JOIN_S = 300.0
# Rows of one guided request.
_ONE_REQUEST = 2
_GIB = 1 << 30
_CLIENTS = 8
_ACTIVATIONS_MIB = 2048
# Of what the day before left, all has been written by then.
_WRITTEN_S = 60.0
_STORES = ("loras", "cache", "activations")

Seen = Callable[[PlannedRequest, Picture], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DaySuite:
    """How it is started. folder: for configurations and logs; state: of the stores, which it changes. threads: of each
    engine. deadline_s: of a request.
    """

    world: World
    folder: Path
    state: Path
    threads: int
    deadline_s: float
    techniques: Techniques = ALL

    def configurations(self, fleet: str) -> dict[str, dict[str, object]]:
        """Of all services but the gateway, by kind. fleet: where they join it."""
        stores: dict[str, dict[str, object]] = {
            "loras": {"bases": {MODEL: str(self.world.model)}},
            # All is recorded, and nothing left to chance.
            "cache": {"exploration": 0.0, "min_free_bytes": 0},
            "activations": {"budget_bytes": 3 * _GIB, "disk_bytes": 8 * _GIB, "template_mib": 0, "min_free_bytes": 0},
        }
        if not self.techniques.cached_starts:
            del stores["cache"]
        if not self.techniques.stored_activations:
            del stores["activations"]
        found = {
            kind: {"name": kind, "gateway": fleet, "server": FREE_PORTS, "folder": str(self.state / kind), **settings}
            for kind, settings in stores.items()
        }
        if self.techniques.controlnet_server:
            found["controlnet"] = {
                "name": "controlnet",
                "gateway": fleet,
                "server": FREE_PORTS,
                "engine": {"threads": self.threads},
                "controlnets": self._controlnets(),
            }
        return found | {"worker": worker_config(fleet, name="worker", engine=self._engine())}

    def _engine(self) -> dict[str, object]:
        techniques = self.techniques
        engine: dict[str, object] = {
            "model": str(self.world.model),
            "model_name": MODEL,
            "threads": self.threads,
            # As the plain server's, which has no other engine beside it: here one of a ControlNet computes at times.
            "exclusive_cores": True,
            "accelerations": list(ACCELERATIONS),
            # LoRAs are not kept once nobody waits for them: of thousands, as in production, few are used again soon.
            "loras": {"budget_bytes": 1},
            # A template has 180 MiB, and as many are recorded at once as there are clients.
            "edits": {
                "activations_mib": _ACTIVATIONS_MIB,
                "upload_mib": _ACTIVATIONS_MIB,
                "sparse_convolutions": techniques.sparse_convolutions,
            },
        }
        if not techniques.controlnet_server:
            engine["controlnets"] = {"folders": self._controlnets()}
        if not techniques.batches:
            engine["max_rows"] = _ONE_REQUEST
        return engine

    def _controlnets(self) -> dict[str, str]:
        return {name: str(folder) for name, folder in self.world.controlnets.items()}

    def options(self) -> GenerationOptions:
        """Of all requests."""
        options: GenerationOptions = {
            "guidance_scale": GUIDANCE_SCALE,
            # Also of recordings of another prompt: nearly every edit's is a new one.
            "masked_blocks": self.techniques.masked_blocks,
        }
        if not self.techniques.cached_starts:
            options["approximate_cache"] = False
        if not self.techniques.late_residuals:
            options["stale_residuals"] = False
        if not self.techniques.late_loras:
            options["bounded_lora_loading"] = False
        return options


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningDay:
    """What runs. fleet: where the gateway lists its services."""

    address: str
    fleet: str


@contextmanager
def running(suite: DaySuite) -> Iterator[RunningDay]:
    """All of it has joined; it is stopped in the end."""
    suite.folder.mkdir(parents=True)
    with Services(suite.folder) as services:
        gateway = services.start("gateway", gateway_config(identical_results=suite.techniques.identical_answers))
        configurations = suite.configurations(gateway.fleet)
        for kind, configuration in configurations.items():
            services.start(kind, configuration)
        with Client(gateway.address, fleet_address=gateway.fleet) as client:
            wait_until(lambda: _all_joined(client, suite, configurations), "all to join", within_s=JOIN_S)
            say_of_workers(client)
        yield RunningDay(address=gateway.address, fleet=gateway.fleet)


@asynccontextmanager
async def sending(suite: DaySuite, where: RunningDay, seen: Seen) -> AsyncIterator[GatewaySender]:
    """How requests are sent to it. seen: is given every picture that comes."""
    async with AsyncClient(where.address, fleet_address=where.fleet) as client:
        yield GatewaySender(
            client,
            suite.world.pictures,
            deadline_s=suite.deadline_s,
            model=MODEL,
            options=suite.options(),
            seen=seen,
        )


async def warm_up(suite: DaySuite, where: RunningDay, requests: Sequence[PlannedRequest]) -> None:
    """Draws some that leave no latents behind for others to start from."""
    quiet = replace(suite, techniques=replace(suite.techniques, cached_starts=False))
    await _draw_all(quiet, where, requests)


def prepare(suite: DaySuite, before: Sequence[PlannedRequest], profile: CacheProfile) -> None:
    """Leaves in its state what a day leaves: LoRAs in the store, pictures in the cache, recordings of templates.

    before: the requests of that day. profile: of any model; it is set for this one.
    Raises RuntimeError where a picture does not come, and AssertionError where recordings do not come to be stored.
    """
    with running(suite) as where, Client(where.address, fleet_address=where.fleet) as client:
        for name, file in suite.world.loras.items():
            client.add_lora(name, file)
        (model,) = client.models()
        client.set_cache_profile(replace(profile_from(profile), model_hash=model.model_hash))
        asyncio.run(_draw_all(suite, where, before))
        templates = {request.template for request in before} - {None}
        wait_until(lambda: _stored(client) >= len(templates), "the templates to be stored", within_s=_WRITTEN_S)


def copy_state(prepared: Path, folder: Path) -> Path:
    """Of the stores, for a suite of its own. They must have ended."""
    for store in _STORES:
        shutil.copytree(prepared / store, folder / store)
    return folder


async def _draw_all(suite: DaySuite, where: RunningDay, requests: Sequence[PlannedRequest]) -> None:
    """A few at a time."""
    async with sending(suite, where, lambda *_: None) as sender:

        async def draw(number: int) -> None:
            result = await sender.send(requests[number])
            if result.outcome is not Outcome.ANSWERED:
                raise RuntimeError(f"the suite did not draw {requests[number]}: {result.outcome}, {result.reason}")

        if requests:
            await closed_loop(draw, requests=len(requests), clients=_CLIENTS)


def _all_joined(client: Client, suite: DaySuite, configurations: Iterable[str]) -> bool:
    kinds = {member.kind for member in client.fleet().members}
    nets = {net.name for net in client.controlnets()}
    return kinds >= set(configurations) and bool(client.models()) and nets >= set(suite.world.controlnets)


def _stored(client: Client) -> int:
    """Templates that the store has, whole."""
    templates = client.templates().templates
    return sum(bool(each.store) and not each.recording for each in templates)
