"""Has a worker that draws nothing now measure what the blocks of its model take."""

from __future__ import annotations

from dataclasses import dataclass

from bottega import kinds
from bottega.client.addons.templates.workers import WORKERS
from bottega.client.types.messages import build_message
from bottega.errors import ModelNotFound, NoWorker, Unavailable
from bottega.v1.activations_pb2 import BlockProfile, ProfileBlocksRequest
from bottega.v1.fleet_pb2 import ListMembersResponse, Member, Registration

PROFILE_S = 600.0
"""That a measurement may take: it is some hundred forwards, which are slow without a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredBlocks:
    """A profile, the worker that has measured it, the model's name, and the stores that keep it from now on."""

    profile: BlockProfile
    worker: str
    model: str
    stores: tuple[str, ...] = ()


async def measure_blocks(
    fleet: ListMembersResponse, *, model: str | None, worker: str | None, width: int, height: int, timeout_s: float
) -> MeasuredBlocks:
    """Waits for the worker's measurement, at most timeout_s; no store is told.

    model, worker: None leaves the choice. width, height: in pixels; 0 is the model's own.
    Raises ModelNotFound, NoWorker without one that may measure it, and Unavailable where that has no blocks to measure.
    """
    request = build_message(ProfileBlocksRequest(), width=width, height=height)
    chosen = _choose_worker(fleet, model, worker)
    async with WORKERS.open(chosen) as stub:
        answer = await stub.ProfileBlocks(request, timeout=timeout_s)
    if not answer.profile.blocks:
        raise Unavailable(f"worker {chosen.name} can measure no blocks of its model")
    name = next((each.name for each in chosen.models if each.model_hash == answer.profile.model_hash), "")
    return MeasuredBlocks(profile=answer.profile, worker=chosen.name, model=name or answer.profile.model_hash)


def _choose_worker(fleet: ListMembersResponse, model: str | None, worker: str | None) -> Registration:
    """Raises NoWorker where none is idle: what runs beside a measurement would be measured with it."""
    joined = [each for each in fleet.members if each.registration.kind == kinds.WORKER]
    workers = [each for each in joined if each.registration.models]  # others are starting
    served = sorted({each.name for one in workers for each in one.registration.models})
    if not workers:
        raise NoWorker("no worker has joined")
    if model is not None and model not in served:
        raise ModelNotFound(f"no such model: {model}", metadata={"served": ", ".join(served)})
    if model is None and worker is None and len(served) > 1:
        raise ModelNotFound(f"several models are served, say which: {', '.join(served)}")
    named = [each for each in workers if worker in (None, each.registration.name) and _serves(each, model)]
    if not named:
        whose = f"no worker {worker} has joined" if model is None else f"worker {worker} does not serve {model}"
        raise NoWorker(whose)
    idle = [each for each in named if not each.load.running and not each.load.draining]
    if not idle and worker is None:
        whose = "every worker" if len(named) > 1 else f"worker {named[0].registration.name}"
        raise NoWorker(f"{whose} draws now, and would measure that as well", metadata={"service": kinds.ACTIVATIONS})
    return (idle or named)[0].registration


def _serves(member: Member, model: str | None) -> bool:
    return model is None or any(each.name == model for each in member.registration.models)
