"""`make chaos`: real processes are killed, frozen and restarted under load; what was promised is counted.

The last line is JSON; lost, double, different_images and client_errors must be 0.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from load.bench.report import report
from tests.chaos.cancels import flood_cancels
from tests.chaos.controlnets import kill_controlnets
from tests.chaos.floods import flood_connections, flood_streams
from tests.chaos.gateways import fill_disks, kill_gateways
from tests.chaos.loras import kill_lora_stores
from tests.chaos.peers import ENGINE, kill_peers
from tests.chaos.restarts import roll
from tests.chaos.scene import Scene
from tests.chaos.strangers import join_strangers
from tests.chaos.tally import Tally
from tests.chaos.workers import MOST_REPEATED, freeze_engines, freeze_fronts, freeze_workers, kill_workers
from tests.support.worker_pair import WorkerPair

WORKERS = ("a", "b", "c")
CONTROLNET_SERVERS = ("x", "y", "z")
# The part that has a pair of workers in place of a suite.
KILL_PEERS = "kill-peers"
# A gateway that died is ready again within this time.
READY_S = 3.0

PARTS: Mapping[str, Callable[[Scene, argparse.Namespace, random.Random], None]] = {
    "kill-workers": lambda scene, options, rng: kill_workers(scene, times=options.kills, rng=rng),
    "freeze-workers": lambda scene, options, rng: freeze_workers(scene, times=options.freezes, rng=rng),
    "freeze-engines": lambda scene, options, rng: freeze_engines(scene, times=options.engine_freezes, rng=rng),
    "freeze-fronts": lambda scene, options, rng: freeze_fronts(scene, times=options.front_freezes, rng=rng),
    "kill-controlnets": lambda scene, options, rng: kill_controlnets(
        scene, times=options.controlnet_kills, servers=CONTROLNET_SERVERS, rng=rng
    ),
    "kill-lora-stores": lambda scene, options, rng: kill_lora_stores(scene, times=options.lora_kills, rng=rng),
    "kill-gateways": lambda scene, options, rng: kill_gateways(
        scene, times=options.gateway_kills, rng=rng, ready_s=READY_S
    ),
    "full-disks": lambda scene, options, rng: fill_disks(scene, times=options.full_disks, rng=rng),
    "stranger-joins": lambda scene, options, rng: join_strangers(scene, times=options.stranger_rounds, rng=rng),
    "cancel-flood": lambda scene, options, rng: flood_cancels(scene, jobs=options.cancels, rng=rng),
    "idle-connections": lambda scene, options, rng: flood_connections(scene, times=options.floods, rng=rng),
    "watch-streams": lambda scene, options, rng: flood_streams(scene, times=options.floods, rng=rng),
    "restarts": lambda scene, options, rng: roll(
        scene, cycles=options.cycles, workers=WORKERS[:2], servers=CONTROLNET_SERVERS[:2]
    ),
}


def main() -> int:
    """Runs the parts and reports; 1 when something was not as promised."""
    options = _options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was started is stopped
    whole = Tally()
    for name in dict.fromkeys(options.part or (*PARTS, KILL_PEERS)):
        print(f"{name} ...", flush=True)
        tally = _play(name, options)
        whole.add(name, tally)
        print(f"{name}: {tally.zeros} {tally.figures}", *_told(tally.faults), sep="\n  ", flush=True)
    _report(whole)
    return 0 if whole.well else 1


def _play(name: str, options: argparse.Namespace) -> Tally:
    if name == KILL_PEERS:
        return _play_pair(options)
    workers = WORKERS[: {"kill-workers": 3, "kill-controlnets": 1, "kill-lora-stores": 1}.get(name, 2)]
    with tempfile.TemporaryDirectory(prefix="bottega-chaos-") as folder, Scene(Path(folder), workers) as scene:
        try:
            PARTS[name](scene, options, random.Random(options.seed))
        except AssertionError as error:  # something was waited for, and never was
            scene.tally.faults.append(str(error))
        scene.count_ends()
        return scene.tally


def _play_pair(options: argparse.Namespace) -> Tally:
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="bottega-chaos-") as folder, WorkerPair(Path(folder), ENGINE) as pair:
        try:
            kill_peers(pair, tally, times=options.peer_kills, rng=random.Random(options.seed))
        except AssertionError as error:  # something was waited for, and never was
            tally.faults.append(str(error))
    return tally


def _told(faults: Sequence[str]) -> list[str]:
    """Each of them once, and how often it was."""
    return [f"{fault} ({times} times)" if times > 1 else fault for fault, times in Counter(faults).items()]


def _report(tally: Tally) -> None:
    rows = [(name.replace("_", " "), str(count), "0") for name, count in tally.zeros.items()]
    wanted = {"kill_workers_most_repeated_steps": f"at most {MOST_REPEATED}"}
    rows += [(name.replace("_", " "), f"{value:g}", wanted.get(name, "")) for name, value in tally.figures.items()]
    rows.append(("bounds that did not hold", str(len(tally.faults)), "0"))
    report("chaos", rows, {**tally.zeros, **tally.figures, "faults": len(tally.faults)})


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--part", action="append", choices=[*PARTS, KILL_PEERS], help="only this one; may be given again"
    )
    parser.add_argument("--kills", type=int, default=40, help="of workers, inside a request")
    parser.add_argument("--freezes", type=int, default=10, help="of workers")
    parser.add_argument("--engine-freezes", type=int, default=5, help="of engines")
    parser.add_argument("--front-freezes", type=int, default=5, help="of workers' fronts, without their engines")
    parser.add_argument("--controlnet-kills", type=int, default=48, help="of ControlNet servers, inside a session")
    parser.add_argument("--lora-kills", type=int, default=24, help="of the LoRA store, while a LoRA is loaded")
    parser.add_argument("--gateway-kills", type=int, default=60, help="around acknowledgement")
    parser.add_argument("--full-disks", type=int, default=5, help="of the gateway")
    parser.add_argument(
        "--stranger-rounds", type=int, default=5, help="of strangers that join as others, and in masses"
    )
    parser.add_argument("--cancels", type=int, default=2500, help="jobs with long prompts, submitted and cancelled")
    parser.add_argument("--floods", type=int, default=5, help="of idle connections, and as many of streams that wait")
    parser.add_argument("--cycles", type=int, default=10, help="of the rolling restart")
    parser.add_argument("--peer-kills", type=int, default=20, help="of a worker that computes rows of another one")
    parser.add_argument("--seed", type=int, default=1, help="of what happens when")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
