"""What loading recorded activations costs an edit, by how it is planned and how fast it is.

One engine with the bench model of edits, and an activation store as a process of its own, behind a relay that lets only
so many bytes a second through: as slow as loading takes half as long as computing what the mask leaves to compute, as
long (then loading in sequence doubles the time), and three times as long. In turns, of the same template and mask:
without a recording, with one in memory (nothing to load), and from the store, with everything loaded in sequence before
each step, everything loaded while it is computed, InstGenIE's Algorithm 1, and the suite's plan. Medians of the steps.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import grpc

from bottega.client.suite.plan import free_ports
from bottega.v1.activations_pb2 import ListStoredTemplatesRequest
from bottega.v1.activations_pb2_grpc import ActivationServiceStub
from load.bench.bench_model import write_bench_model
from load.bench.edit_loading_engine import LOAD_FREE, NO_CACHE, RECORD, Loaded, LoadingAsk, LoadingEngine
from load.bench.edit_model import EDIT_SHAPE, RATIOS
from load.bench.report import report
from load.bench.scratch import scratch
from load.bench.throttle import Throttle
from tests.support.services import FREE_PORTS, Services
from tests.support.waiting import wait_until

# The other core is the relay's, the store's and that of the engine's link.
THREADS = 1
# What loading a step takes, in times of what the step takes without loading.
SPEEDS = {"fast": 0.5, "doubling": 1.0, "slow": 3.0}
WAYS = ("sequence", "pipeline", "one_by_one", "plan")
WANTED = {"plan_over_best": 1.03, "plan_over_loadfree": 1.05}
# That the relay passes on at once: of 128 KiB it took a third more of a processor.
_PIECE_BYTES = 256 << 10
_WIRE_BYTES_PER_S = 1e9
_RECORDED_S = 60.0


@dataclass(slots=True, kw_only=True)
class Measured:
    """Edits, one for each round. alone: without a store, by way. stored: by speed and way. step_bytes: of a step."""

    alone: dict[str, list[Loaded]] = field(default_factory=dict)
    stored: dict[str, dict[str, list[Loaded]]] = field(default_factory=dict)
    step_bytes: float = 0.0

    def seconds(self, way: str, speed: str = "") -> float:
        """Of the steps of an edit."""
        return median(each.steps_s for each in (self.stored[speed] if speed else self.alone)[way])

    def over_best(self, speed: str) -> float:
        """The plan's, over those of the best of the other ways, that of computing all included."""
        others = [self.seconds(way, speed) for way in WAYS[:-1]]
        return self.seconds("plan", speed) / min(*others, self.seconds(NO_CACHE))


def measure(folder: Path, options: argparse.Namespace) -> Measured:
    """Records a template, and edits it in turns."""
    measured = Measured()
    with ExitStack() as stack:
        throttle = stack.enter_context(Throttle(bytes_per_s=_WIRE_BYTES_PER_S, piece_bytes=_PIECE_BYTES))
        store = _start_store(stack.enter_context(Services(folder)), throttle)
        engine = stack.enter_context(LoadingEngine(folder / "model", options.threads, store))
        made_steps = options.steps - 1  # of an edit with Diffusers' own strength
        # Of the least mask: what is recorded is then the template, all but that.
        engine.edit(LoadingAsk(way=RECORD, share=min(RATIOS), steps=options.steps))
        measured.step_bytes = _recorded_bytes(store) / made_steps
        # Turns of all kinds, from which costs are fitted.
        for share in RATIOS:
            engine.edit(LoadingAsk(way=LOAD_FREE, share=share, steps=options.steps))
        assert engine.edit(_ask(LOAD_FREE, options, 0)).reused == 1.0, "it is recorded"
        for number in range(options.rounds):
            for way in (NO_CACHE, LOAD_FREE)[:: _turned(number)]:
                measured.alone.setdefault(way, []).append(engine.edit(_ask(way, options, number)))
            for speed, ratio in options.speeds.items():
                step_s = median(each.steps_s for each in measured.alone[LOAD_FREE]) / made_steps
                throttle.bytes_per_s = measured.step_bytes / (ratio * step_s)
                engine.edit(_ask("plan", options, number))  # the first one meets another speed than it counts with
                for way in WAYS[:: _turned(number)]:
                    edited = engine.edit(_ask(way, options, number))
                    measured.stored.setdefault(speed, {}).setdefault(way, []).append(edited)
                    _say(number, speed, way, edited)
    return measured


def _ask(way: str, options: argparse.Namespace, number: int) -> LoadingAsk:
    return LoadingAsk(way=way, share=options.share, steps=options.steps, seed=number)


def _turned(number: int) -> int:
    """By turns forwards and backwards, as the machine's speed drifts."""
    return -1 if number % 2 else 1


def _start_store(services: Services, throttle: Throttle) -> str:
    """Where an activation store is called whose links go through the throttle."""
    throttle.target = free_ports(1)[0]
    links = {
        "listen": f"127.0.0.1:{throttle.target}",
        "advertised": f"127.0.0.1:{throttle.port}",
        "socket": None,
    }
    config = {"gateway": "", "server": FREE_PORTS, "links": links, "min_free_bytes": 0, "waiting_bytes": 4 << 30}
    return services.start("activations", config).address


def _recorded_bytes(store: str) -> float:
    """Of the template, once the store has it."""
    with grpc.insecure_channel(store) as channel:
        stub = ActivationServiceStub(channel)

        def recorded() -> list[int]:
            answer = stub.ListStoredTemplates(ListStoredTemplatesRequest(), timeout=_RECORDED_S)
            return [each.size_bytes for each in answer.templates if not each.recording]

        wait_until(lambda: bool(recorded()), "the template to be recorded", within_s=_RECORDED_S)
        return float(recorded()[0])


def _say(number: int, speed: str, way: str, edited: Loaded) -> None:
    print(
        f"round {number}, {speed:8} {way:10} {edited.steps_s:7.2f} s, waited {edited.waited_s:6.2f} s, "
        f"{edited.loaded} blocks loaded, {edited.recomputed} computed, {edited.load_bytes / 2**20:.0f} MiB came",
        file=sys.stderr,
        flush=True,
    )


def values_of(measured: Measured, speeds: Sequence[str]) -> dict[str, float]:
    """What the line of JSON says."""
    values = {
        "no_cache_s": measured.seconds(NO_CACHE),
        "load_free_s": measured.seconds(LOAD_FREE),
        "step_mib": measured.step_bytes / 2**20,
    }
    for speed in speeds:
        for way in WAYS:
            values[f"{speed}_{way}_s"] = measured.seconds(way, speed)
        plan_s, greedy_s = measured.seconds("plan", speed), measured.seconds("one_by_one", speed)
        values[f"{speed}_plan_over_best"] = measured.over_best(speed)
        values[f"{speed}_plan_over_one_by_one"] = plan_s / greedy_s
        values[f"{speed}_plan_over_loadfree"] = plan_s / values["load_free_s"]
    values["plan_over_best"] = max(values[f"{speed}_plan_over_best"] for speed in speeds)
    if "doubling" in speeds:
        values["plan_over_loadfree"] = values["doubling_plan_over_loadfree"]
        values["sequence_over_loadfree"] = values["doubling_sequence_s"] / values["load_free_s"]
    values["fit_r2"] = median(each.r2 for ways in measured.stored.values() for each in ways["plan"])
    return values


def table_of(values: Mapping[str, float], speeds: Mapping[str, float]) -> Iterator[tuple[str, str, str]]:
    """What people read."""
    yield "no cache: all is computed", f"{values['no_cache_s']:.2f} s", ""
    yield "all in memory: nothing to load", f"{values['load_free_s']:.2f} s", ""
    for speed, ratio in speeds.items():
        yield f"{speed}: loading takes {ratio:g} x as long as computing", "", ""
        for way, title in zip(WAYS, ("in sequence", "pipeline", "Algorithm 1", "the suite's plan"), strict=True):
            yield f"    {title}", f"{values[f'{speed}_{way}_s']:.2f} s", ""
        yield "    plan over best of the others", f"{values[f'{speed}_plan_over_best']:.3f}", ""
    if "sequence_over_loadfree" in values:
        yield "doubling: in sequence over load-free", f"{values['sequence_over_loadfree']:.2f}", "about 2"
    for name, most in WANTED.items():
        if name in values:
            yield name, f"{values[name]:.3f}", f"at most {most:g}"
    yield "R^2 of turns by operations and bytes, held out (fit_r2)", f"{values['fit_r2']:.4f}", "at least 0.99"


def main() -> None:
    """Prints the table and the line of JSON."""
    parser = argparse.ArgumentParser(prog="make bench-edit-loading", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of all ways at all speeds (default: 5)")
    parser.add_argument("--steps", type=int, default=12, help="of each edit; one less runs (default: 12)")
    parser.add_argument("--share", type=float, default=0.19, choices=RATIOS, help="of the tokens (default: 0.19)")
    parser.add_argument("--threads", type=int, default=THREADS, help="of the engine (default: 1)")
    parser.add_argument("--speeds", nargs="+", choices=SPEEDS, default=list(SPEEDS), help="(default: all)")
    options = parser.parse_args()
    options.speeds = {speed: SPEEDS[speed] for speed in options.speeds}
    with scratch() as folder:
        write_bench_model(folder / "model", EDIT_SHAPE)
        measured = measure(folder, options)
    values = values_of(measured, list(options.speeds))
    report("edit-loading", list(table_of(values, options.speeds)), values)


if __name__ == "__main__":
    main()
