"""`make chaos`: real processes are killed, frozen and restarted under load; what was promised is counted.

The last line is JSON; lost, double, different_images and client_errors must be 0.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from bottega.errors import BottegaError
from load.bench.framework import RECORD
from tests.chaos.activation_stores import kill_loading_stores, kill_recording_stores
from tests.chaos.caches import kill_cache_stores
from tests.chaos.cancels import flood_cancels
from tests.chaos.controlnets import kill_controlnets
from tests.chaos.edits import kill_editing_workers
from tests.chaos.floods import cancel_within_quota, flood_connections, flood_messages, flood_strangers, flood_streams
from tests.chaos.gateways import fill_disks, kill_gateways, lose_job_stores
from tests.chaos.loras import kill_lora_stores
from tests.chaos.masked_edits import kill_reusing_workers
from tests.chaos.peers import ENGINE, kill_peers
from tests.chaos.restarts import roll
from tests.chaos.results import record, show
from tests.chaos.rogues import join_rogues
from tests.chaos.scene import TENANTS, Scene
from tests.chaos.schedulers import IN_NAMESPACE, SharedScene, disturb_schedulers
from tests.chaos.stages import kill_stages
from tests.chaos.tally import Tally
from tests.chaos.webhooks import kill_delivering_gateways
from tests.chaos.workers import freeze_engines, freeze_fronts, freeze_workers, kill_workers
from tests.support.network_namespaces import configure, enter_own, why_none
from tests.support.warm_engines import warm_engines
from tests.support.worker_pair import WorkerPair

WORKERS = ("a", "b", "c")
# The part that has a pair of workers in place of a suite.
KILL_PEERS = "kill-peers"
PEER_KILLS = 20
INTERRUPTED = "it was interrupted"


class Play(Protocol):
    """Does something to a suite so many times."""

    def __call__(self, scene: Scene, *, times: int, rng: random.Random) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """times: unless it is said otherwise. workers: that the suite has. tenants: whether its gateway has some.

    shared: whether it has two gateways, which share their jobs.
    """

    play: Play
    times: int
    workers: int = 2
    tenants: bool = False
    shared: bool = False


PARTS: Mapping[str, Part] = {
    "kill-workers": Part(play=kill_workers, times=40, workers=3),
    "kill-editing-workers": Part(play=kill_editing_workers, times=50, workers=3),
    "kill-reusing-workers": Part(play=kill_reusing_workers, times=12, workers=0),
    "freeze-workers": Part(play=freeze_workers, times=10),
    "freeze-engines": Part(play=freeze_engines, times=5),
    "freeze-fronts": Part(play=freeze_fronts, times=5),
    "kill-stages": Part(play=kill_stages, times=24, workers=0),
    "kill-controlnets": Part(play=kill_controlnets, times=48, workers=1),
    "kill-lora-stores": Part(play=kill_lora_stores, times=24, workers=1),
    "kill-cache-stores": Part(play=kill_cache_stores, times=24, workers=1),
    "kill-loading-stores": Part(play=kill_loading_stores, times=50, workers=0),
    "kill-recording-stores": Part(play=kill_recording_stores, times=50, workers=0),
    "kill-gateways": Part(play=kill_gateways, times=60),
    "kill-delivering-gateways": Part(play=kill_delivering_gateways, times=20, workers=1),
    "schedulers": Part(play=disturb_schedulers, times=220, shared=True),
    "full-disks": Part(play=fill_disks, times=5),
    "lost-job-stores": Part(play=lose_job_stores, times=6),
    "rogue-joins": Part(play=join_rogues, times=5),
    "cancel-flood": Part(play=flood_cancels, times=2500),
    "idle-connections": Part(play=flood_connections, times=5),
    "watch-streams": Part(play=flood_streams, times=5),
    "large-messages": Part(play=flood_messages, times=3),
    "strangers": Part(play=flood_strangers, times=2, tenants=True),
    "cancels-within-quota": Part(play=cancel_within_quota, times=2, tenants=True),
    "restarts": Part(play=roll, times=10),
}


def main() -> int:
    """Runs the parts and reports; 1 when something was not as promised."""
    options = _options()
    if os.environ.get(IN_NAMESPACE):
        configure("link set lo up\n")
    elif not why_none():
        os.environ[IN_NAMESPACE] = "yes"
        enter_own("tests.chaos", sys.argv[1:])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    played: dict[str, Tally] = {}
    # Engines that import what they need took most of the time of the parts that kill them. A process with more threads
    # cannot be forked.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with warm_engines(os.environ) as environment:
        os.environ.update(environment)
        for name in dict.fromkeys(options.part or (*PARTS, KILL_PEERS)):
            print(f"{name} ...", flush=True)
            rng = random.Random(options.seed)
            tally = _play_pair(options.times, rng) if name == KILL_PEERS else _play(PARTS[name], options.times, rng)
            played[name] = tally
            print(f"{name}: {tally.zeros} {tally.figures}", *_told(tally.faults), sep="\n  ", flush=True)
            if INTERRUPTED in tally.faults:
                break
    show(played)
    if conditions := os.environ.get(RECORD):
        record({name: tally for name, tally in played.items() if INTERRUPTED not in tally.faults}, conditions)
    return 0 if all(tally.well for tally in played.values()) else 1


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End the part, so that what it has counted is reported. What was started is stopped; more signals change nothing.

    A time limit sends two of them: to the process, and to its group.
    """
    for handled in (signal.SIGTERM, signal.SIGINT):
        signal.signal(handled, signal.SIG_IGN)
    raise KeyboardInterrupt


def _play(part: Part, times: int, rng: random.Random) -> Tally:
    workers = WORKERS[: part.workers]
    with tempfile.TemporaryDirectory(prefix="bottega-chaos-") as folder:
        scene = _scene(part, Path(folder), workers)
        with _noting(scene.tally), scene:
            with _noting(scene.tally):
                part.play(scene, times=times or part.times, rng=rng)
            scene.count_ends()
        return scene.tally


@contextlib.contextmanager
def _noting(tally: Tally) -> Iterator[None]:
    """Add what ends the block early to the faults of a part, so that the parts before and after it are reported.

    A suite that does not start in time is a fault, too.
    """
    try:
        yield
    except AssertionError as error:  # something was waited for, and never was
        tally.faults.append(str(error))
    except (TimeoutError, BottegaError) as error:
        tally.faults.append(f"the part could not go on: {type(error).__name__} {error}".rstrip())
    except KeyboardInterrupt:
        tally.faults.append(INTERRUPTED)


def _scene(part: Part, folder: Path, workers: tuple[str, ...]) -> Scene:
    if part.shared:
        return SharedScene(folder, workers)
    return Scene(folder, workers, tenants=TENANTS if part.tenants else None)


def _play_pair(times: int, rng: random.Random) -> Tally:
    tally = Tally()
    with (
        tempfile.TemporaryDirectory(prefix="bottega-chaos-") as folder,
        _noting(tally),
        WorkerPair(Path(folder), ENGINE) as pair,
    ):
        kill_peers(pair, tally, times=times or PEER_KILLS, rng=rng)
    return tally


def _told(faults: Sequence[str]) -> list[str]:
    """Each of them once, and how often it was."""
    return [f"{fault} ({times} times)" if times > 1 else fault for fault, times in Counter(faults).items()]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--part", action="append", choices=[*PARTS, KILL_PEERS], help="only this one; may be given again"
    )
    parser.add_argument("--times", type=int, default=0, help="that each part does what it does; 0: as many as usual")
    parser.add_argument("--seed", type=int, default=1, help="of what happens when")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
