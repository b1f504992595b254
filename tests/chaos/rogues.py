"""What rogue clients do at the fleet's listener while pictures are drawn: join as workers that are here, and in masses.

They speak the contract with a thread of their own. Nothing of it may cost a picture, nor keep a worker out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import signal
import threading
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

import grpc

from bottega.rpc.channel import open_channel
from bottega.rpc.fleet_membership import FleetMembership
from bottega.v1 import fleet_pb2, fleet_pb2_grpc
from tests.chaos.scene import Drawing, Scene
from tests.chaos.workers import SEEDS, STEPS
from tests.support.waiting import wait_until

# More than the gateway takes of one host.
CROWD = 200
SILENT = 100
# Joins under a worker's name in a second.
PRESSES_PER_S = 20
# A kind that is given nothing to do.
_IDLE = "idle"
_STOP_S = 20.0


def join_rogues(scene: Scene, *, times: int, rng: random.Random) -> None:
    """So many rounds: pictures while others join as the workers, then a worker comes back to a fleet full of others.

    Needs two workers.
    """
    scene.look_first(SEEDS, STEPS)
    for _ in range(times):
        with _rogues(scene) as said:
            for _ in range(2):
                for drawing in [scene.draw(seed=seed, steps=STEPS) for seed in SEEDS[:2]]:
                    _expect_unhurt(scene, drawing)
            scene.tally.figures["joins_as_worker_refused"] = said["refused"]
            scene.tally.check("joins as a worker that is here", said["taken"], 0)
        with _rogues(scene, crowd=CROWD, silent=SILENT) as said:
            wait_until(lambda said=said: said["full"] > 0, "as many rogue members as may be")  # type: ignore[misc]
            _freeze_one(scene, rng)
            scene.tally.most("rogue_members", len(scene.members(_IDLE)))
        wait_until(lambda: not scene.members(_IDLE), "the rogue members to be gone")
        scene.tally.count("rounds")
    scene.tally.reached("rounds", times)
    scene.tally.reached("joins_as_worker_refused", PRESSES_PER_S)
    scene.tally.reached("rogue_members", CROWD / 2)


def _expect_unhurt(scene: Scene, drawing: Drawing) -> None:
    picture = scene.check(drawing)
    if picture is not None:
        scene.tally.count("pictures")
        scene.tally.check("attempts at a picture while rogue clients joined", picture.provenance.attempts, 1)


def _freeze_one(scene: Scene, rng: random.Random) -> None:
    """It is out of the fleet, and comes back though there is room for no other."""
    name = rng.choice(sorted(scene.joined()))
    drawing = scene.draw(seed=SEEDS[2], steps=STEPS)
    drawing.wait_for_step(1)
    process = scene.worker(name).process
    process.send_signal(signal.SIGSTOP)
    try:
        wait_until(lambda: name not in scene.joined(), "the silence to be noticed")
    finally:
        process.send_signal(signal.SIGCONT)
    back_s = wait_until(lambda: name in scene.joined(), f"{name} to come back among rogue members")
    scene.tally.most("back_among_rogues_s", back_s)
    scene.check(drawing)


@contextlib.contextmanager
def _rogues(scene: Scene, *, crowd: int = 0, silent: int = 0) -> Iterator[Counter[str]]:
    """In the block they join; without a crowd, under the names of the workers that are here. What came of it."""
    said: Counter[str] = Counter()
    here = [
        fleet_pb2.Registration(kind=member.kind, name=member.name, address=member.address, version=member.version)
        for member in ([] if crowd else scene.members())
    ]
    logging.getLogger("bottega.rpc.gateway_membership").setLevel(
        logging.ERROR
    )  # that each of them is refused is what is wanted
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=_run, args=(loop, _all(scene.fleet_address, here, crowd, silent, said, ready)))
    thread.start()
    try:
        ready.wait(_STOP_S)
        yield said
    finally:
        loop.call_soon_threadsafe(_cancel_all, loop)
        thread.join(_STOP_S)


def _run(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, None]) -> None:
    with contextlib.closing(loop), contextlib.suppress(asyncio.CancelledError):
        loop.run_until_complete(work)


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()


async def _all(
    address: str,
    here: Sequence[fleet_pb2.Registration],
    crowd: int,
    silent: int,
    said: Counter[str],
    ready: threading.Event,
) -> None:
    async with open_channel(address) as channel:
        fleet: fleet_pb2_grpc.FleetServiceAsyncStub = fleet_pb2_grpc.FleetServiceStub(channel)
        memberships = [_member(address, number) for number in range(crowd)]
        try:
            async with asyncio.TaskGroup() as group:
                for registration in here:
                    group.create_task(_press(address, registration, said))
                for _ in range(silent):
                    group.create_task(_stay_silent(fleet))
                for membership in memberships:
                    membership.start()
                if crowd:
                    group.create_task(_count_full(fleet, said))
                ready.set()
        finally:
            await asyncio.gather(*(membership.stop() for membership in memberships), return_exceptions=True)


async def _press(address: str, registration: fleet_pb2.Registration, said: Counter[str]) -> None:
    """Joins as that worker, at its address or another one, each time as another process and over another connection."""
    for number in range(1 << 30):
        rogue = fleet_pb2.Registration(instance=secrets.token_hex(16))
        rogue.MergeFrom(registration)
        if number % 2:
            rogue.address = "127.0.0.1:9"
        async with open_channel(address) as channel:
            said["refused" if await _is_refused(fleet_pb2_grpc.FleetServiceStub(channel), rogue) else "taken"] += 1
        await asyncio.sleep(1 / PRESSES_PER_S)


async def _count_full(fleet: fleet_pb2_grpc.FleetServiceAsyncStub, said: Counter[str]) -> None:
    """How often a newcomer hears that there is no room."""
    for number in range(1 << 30):
        rogue = fleet_pb2.Registration(instance=secrets.token_hex(16), kind=_IDLE, address="127.0.0.1:9")
        rogue.name = f"late {number}"
        said["full"] += await _is_refused(fleet, rogue, "max_members")
        await asyncio.sleep(0.5)


async def _is_refused(
    fleet: fleet_pb2_grpc.FleetServiceAsyncStub, registration: fleet_pb2.Registration, why: str = ""
) -> bool:
    call = fleet.Join(timeout=_STOP_S)
    try:
        await call.write(fleet_pb2.JoinRequest(registration=registration))
        return await call.read() is grpc.aio.EOF
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
        return why in str(error)
    finally:
        call.cancel()


async def _stay_silent(fleet: fleet_pb2_grpc.FleetServiceAsyncStub) -> None:
    while True:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await fleet.Join(timeout=_STOP_S).read()


def _member(address: str, number: int) -> FleetMembership:
    registration = fleet_pb2.Registration(kind=_IDLE, name=f"rogue {number}", address="127.0.0.1:9", version="none")
    return FleetMembership(address, registration, load=fleet_pb2.Load)
