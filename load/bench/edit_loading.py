"""What does loading recorded activations cost an edit, by how it is planned and how fast it is?

One engine with the bench model of edits, and an activation store as a process of its own, behind a relay that lets only
so many bytes a second through: as slow as loading takes half as long as computing what the mask leaves to compute, as
long (then loading in sequence doubles the time), and three times as long. In turns, of the same template and mask:
without a recording, with one in memory (nothing to load), and from the store, with everything loaded in sequence before
each step, everything loaded while it is computed, InstGenIE's Algorithm 1, and the suite's plan. Medians of the steps.

A run takes 25 minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import grpc

from bottega import kinds
from bottega.addons.edits.planning import BlockCost, StepPlan, follow
from bottega.v1.activations_pb2 import ListStoredTemplatesRequest
from bottega.v1.activations_pb2_grpc import ActivationServiceStub
from load.bench.bench_model import write_bench_model
from load.bench.edit_model import EDIT_SHAPE, RATIOS, SIZE, square_mask, template
from load.bench.framework import Bench, Option, Sheet
from load.bench.side_process import Answer, Side
from load.bench.suites import relayed
from load.bench.throttle import Throttle
from tests.support.offers import AskedOffers
from tests.support.services import FREE_PORTS, Services
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from bottega.addons.edits.engine.planner import EditReader, LoadPlanner, PlannedStep
    from bottega.addons.edits.engine.recordings.source import ActivationSource
    from bottega.addons.edits.engine.times import BlockTimes

# What loading a step takes, in times of what the step takes without loading.
SPEEDS = {"fast": 0.5, "doubling": 1.0, "slow": 3.0}
# From the store, by planner.
WAYS = {
    "sequence": "in sequence",
    "pipeline": "pipeline",
    "one_by_one": "Algorithm 1",
    "plan": "the suite's plan",
}
# Without it: computes all and records; computes all; has a recording in memory.
RECORD, NO_CACHE, LOAD_FREE = "record", "no_cache", "load_free"
WANTED = {"plan_over_best": 1.03, "plan_over_loadfree": 1.05}
# That the relay passes on at once: of 128 KiB it took a third more of a processor.
_PIECE_BYTES = 256 << 10
_WIRE_BYTES_PER_S = 1e9
_RECORDED_S = 60.0
# Of all recordings in the engine's process.
_ACTIVATIONS_BYTES = 4 << 30
_UPLOAD_BYTES = 2 << 30
_LINK_S = 30.0
# A relay holds up what keeps links alive behind all that is on its way.
_SILENCE_S = 60.0
# For a load that is waited for whatever happens.
_FOREVER = 1e4
_LONGEST_LOAD_S = 120.0
BENCH = Bench(
    __file__,
    __doc__,
    Option("--rounds", 5, "of all ways at all speeds", smallest=1),
    Option("--steps", 12, "of each edit; one less runs", smallest=3),
    Option("--share", 0.19, "of the tokens", choices=RATIOS),
    # The other core is the relay's, the store's and that of the engine's link.
    Option("--threads", 1, "of the engine"),
    Option("--speeds", list(SPEEDS), "of loading", choices=tuple(SPEEDS), smallest=["doubling"]),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """An edit of a template whose recording had to be loaded, or not."""

    steps_s: float
    """Seconds from the prompt's encoding to the last step's end."""
    reused: float = 0.0
    """Share of transformer blocks of which only masked tokens were computed."""
    loaded: float = 0
    """Blocks that took what had to be loaded."""
    recomputed: float = 0
    """Blocks that were recorded and computed."""
    waited_s: float = 0.0
    """Seconds of `steps_s` spent waiting for loads."""
    load_bytes: float = 0
    """Bytes that came."""
    r2: float = 0.0
    """Quality of the fit of turns, see WorkFit; 0 where there is none."""


@dataclass(slots=True, kw_only=True)
class Measured:
    """Edits, one for each round."""

    alone: dict[str, list[Loaded]] = field(default_factory=dict)
    """Without a store, by way."""
    stored: dict[str, dict[str, list[Loaded]]] = field(default_factory=dict)
    """By speed and way."""
    step_bytes: float = 0.0
    """Bytes of a step's recording."""

    def seconds(self, way: str, speed: str = "") -> float:
        """Return the seconds of an edit's steps."""
        return median(each.steps_s for each in (self.stored[speed] if speed else self.alone)[way])

    def over_load_free(self, speed: str) -> float:
        """Return the plan's seconds over those of an edit that has nothing to load."""
        return self.seconds("plan", speed) / self.seconds(LOAD_FREE)

    def over_best(self, speed: str) -> float:
        """Return the plan's seconds over those of the best of the other ways, that of computing all included."""
        others = [self.seconds(way, speed) for way in list(WAYS)[:-1]]
        return self.seconds("plan", speed) / min(*others, self.seconds(NO_CACHE))


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Record a template, and edit it in turns."""
    write_bench_model(folder / "model", EDIT_SHAPE.for_run(smallest=options.smallest))
    fill(sheet, load_by_turns(folder, folder / "model", options))


def load_by_turns(folder: Path, model: Path, options: argparse.Namespace) -> Measured:
    """Record a template, and edit it in turns.

    Args:
        folder: For the store.
        model: Folder of the model.
        options: Those of this bench.
    """
    measured, made_steps = Measured(), options.steps - 1  # of an edit with Diffusers' own strength
    with ExitStack() as stack:
        throttle = stack.enter_context(Throttle(bytes_per_s=_WIRE_BYTES_PER_S, piece_bytes=_PIECE_BYTES))
        config = {
            "gateway": "",
            "server": FREE_PORTS,
            "links": relayed(throttle),
            "min_free_bytes": 0,
            "waiting_bytes": 4 << 30,
        }
        store = stack.enter_context(Services(folder)).start("activations", config).address
        side = stack.enter_context(Side(engine, threads=options.threads, model=model, store=store))

        def edit(way: str, number: int = 0, share: float = options.share) -> Loaded:
            return Loaded(**side.ask(way=way, share=share, steps=options.steps, seed=number))

        # Of the least mask: what is recorded is then the template, all but that.
        edit(RECORD, share=min(RATIOS))
        measured.step_bytes = _recorded_bytes(store) / made_steps
        for share in RATIOS:  # turns of all kinds, from which costs are fitted
            edit(LOAD_FREE, share=share)
        assert edit(LOAD_FREE).reused == 1.0, "it is recorded"
        for number in range(options.rounds):
            turned = -1 if number % 2 else 1  # as the machine's speed drifts
            for way in (NO_CACHE, LOAD_FREE)[::turned]:
                measured.alone.setdefault(way, []).append(edit(way, number))
            for speed in options.speeds:
                step_s = measured.seconds(LOAD_FREE) / made_steps
                throttle.bytes_per_s = measured.step_bytes / (SPEEDS[speed] * step_s)
                edit("plan", number)  # the first one meets another speed than it counts with
                for way in list(WAYS)[::turned]:
                    edited = edit(way, number)
                    measured.stored.setdefault(speed, {}).setdefault(way, []).append(edited)
                    print(f"round {number}, {speed:8} {way:10} {edited}", file=sys.stderr, flush=True)
    return measured


def _recorded_bytes(store: str) -> float:
    """Return the bytes of the template, once the store has it."""
    with grpc.insecure_channel(store) as channel:
        stub = ActivationServiceStub(channel)

        def recorded() -> list[int]:
            answer = stub.ListStoredTemplates(ListStoredTemplatesRequest(), timeout=_RECORDED_S)
            return [each.size_bytes for each in answer.templates if not each.recording]

        wait_until(lambda: bool(recorded()), "the template to be recorded", within_s=_RECORDED_S)
        return float(recorded()[0])


def fill(sheet: Sheet, measured: Measured) -> None:
    """Report every way's seconds and the plan's ratios."""
    free_s = measured.seconds(LOAD_FREE)
    sheet.figure("no cache: all is computed", measured.seconds(NO_CACHE), "{:.2f} s", key="no_cache_s")
    sheet.figure("all in memory: nothing to load", free_s, "{:.2f} s", key="load_free_s")
    sheet.values["step_mib"] = measured.step_bytes / 2**20
    for speed in measured.stored:
        sheet.row(f"{speed}: loading takes {SPEEDS[speed]:g} x as long as computing", "")
        for way, title in WAYS.items():
            sheet.figure(f"    {title}", measured.seconds(way, speed), "{:.2f} s", key=f"{speed}_{way}_s")
        plan_s, best = measured.seconds("plan", speed), measured.over_best(speed)
        sheet.figure("    plan over best of the others", best, "{:.3f}", key=f"{speed}_plan_over_best")
        sheet.values[f"{speed}_plan_over_one_by_one"] = plan_s / measured.seconds("one_by_one", speed)
        sheet.values[f"{speed}_plan_over_loadfree"] = measured.over_load_free(speed)
    found = {"plan_over_best": max(map(measured.over_best, measured.stored))}
    if "doubling" in measured.stored:
        found["plan_over_loadfree"] = sheet.values["doubling_plan_over_loadfree"]
        sequence = measured.seconds("sequence", "doubling") / free_s
        sheet.figure("doubling: in sequence over load-free", sequence, key="sequence_over_loadfree", bar="about 2")
    for key, value in found.items():
        sheet.row(key, f"{value:.3f}", f"at most {WANTED[key]:g}")
        sheet.values[key] = value
    r2 = median(each.r2 for ways in measured.stored.values() for each in ways["plan"])
    what = "R^2 of turns by operations and bytes, held out"
    sheet.figure(what, r2, "{:.4f}", key="fit_r2", bar="at least 0.99")


def engine(*, model: str, store: str) -> Answer:
    """Make the engine: edits of one template, whose recording is in a store.

    Args:
        store: HOST:PORT of the activation store.
    """
    return EditLoading(Path(model), store).draw


class EditLoading:
    """Engines with recordings in memory, and in the store behind a link."""

    def __init__(self, model: Path, store: str) -> None:
        from bottega.addons.edits.engine.addon import EngineEdits
        from bottega.addons.edits.engine.recordings.source import MemoryActivations
        from bottega.addons.edits.worker import ActivationLinkSettings, ActivationSettings, StoreActivations
        from bottega.engine.engine import Engine
        from bottega.engine.limits import EngineLimits
        from bottega.transport import LinkCounters
        from bottega.v1.fleet_pb2 import ServiceAddress
        from load.bench.engine_runs import load_bench_model

        # Neither keeps what follows from recordings: the one's recordings would have it from edit to edit, and the
        # other's would make it in vain.
        class InMemory(MemoryActivations):
            spare_bytes = 0

        class InStore(StoreActivations):
            spare_bytes = 0

        loaded = load_bench_model(model)
        link = ActivationLinkSettings(upload_bytes=_UPLOAD_BYTES, silence_s=_SILENCE_S)
        settings = ActivationSettings(
            budget_bytes=_ACTIVATIONS_BYTES, model_name="bench", latent_scale=loaded.latent_scale, link=link
        )
        self._stores = InStore(settings, offers=AskedOffers(kinds.ACTIVATIONS), counters=LinkCounters())
        self._edits = {
            LOAD_FREE: EngineEdits(loaded, InMemory(_ACTIVATIONS_BYTES)),
            RECORD: EngineEdits(loaded, self._stores),
        }
        # The plans of the one count with what turns of the other take.
        self._edits[LOAD_FREE].times = self._edits[RECORD].times
        self._engines = {way: Engine(loaded, EngineLimits(), addons=(edits,)) for way, edits in self._edits.items()}
        self._engines[RECORD].warm_up()
        self._edits[RECORD].profile_blocks(self._engines[RECORD], SIZE, SIZE)
        self._planners = planners(self._stores, self._edits[RECORD].times)
        self._template, self._sampler = template(), loaded.defaults.sampler
        self._edits[RECORD].set_services([ServiceAddress(name="store", address=store)])
        wait_until(lambda: self._stores.linked > 0, "the link to the store", within_s=_LINK_S)

    def draw(self, *, way: str, share: float, steps: int, seed: int) -> dict[str, float]:
        """Draw one edit.

        Args:
            way: RECORD, NO_CACHE or LOAD_FREE, or one of `WAYS`, with a recording that is nowhere but in the store.
            share: Of tokens that its mask has, with its margin.
        """
        if way == RECORD:
            self._draw(LOAD_FREE, way, share, steps, seed)
            drawn = self._draw(RECORD, way, share, steps, seed)
            wait_until(lambda: self._stores.counts["uploaded"] > 0, "the recording", within_s=_LINK_S)
            return drawn
        if way in WAYS:
            self._stores.drop("")  # forgets what earlier edits have loaded
            self._edits[RECORD].planner = self._planners[way]
        return self._draw(RECORD if way in WAYS else LOAD_FREE, way, share, steps, seed)

    def _draw(self, place: str, way: str, share: float, steps: int, seed: int) -> dict[str, float]:
        from load.bench.engine_runs import edit_order, run_orders

        edits, before = self._edits[place], dict(self._edits[place].counts)
        mask = square_mask(share)
        order = edit_order(
            "edit", self._template, mask, steps=steps, seed=seed, masked=way != NO_CACHE, sampler=self._sampler
        )
        began_s = perf_counter()
        record = run_orders(self._engines[place], [order])["edit"]
        seconds = perf_counter() - began_s
        since = {name: count - before.get(name, 0) for name, count in edits.counts.items()}
        edited = record.provenance
        return {
            "steps_s": seconds - record.seconds["encode"] - record.seconds["decode"],
            "reused": edited.blocks_reused / edited.blocks_total if edited.blocks_total else 0.0,
            "loaded": since["blocks_loaded"],
            "recomputed": since["blocks_recomputed"],
            "waited_s": since["load_wait_ms"] / 1000,
            "load_bytes": since.get("load_bytes", 0),
            "r2": edits.times.fit.r2 or 0.0,
        }


def planners(source: ActivationSource, times: BlockTimes) -> Mapping[str, LoadPlanner]:
    """Return the planners of `WAYS`.

    plan: The suite's. one_by_one: Algorithm 1. pipeline: Loads everything, step after step, while it computes, and
    waits for each block. sequence: Loads everything of a step, then computes it.
    """
    from bottega.addons.edits.engine.planner import LoadPlanner, LoadPolicy

    class SequencePlanner(LoadPlanner):
        """Loads all of a step before it is computed, and nothing meanwhile."""

        def plan(self, readers: Sequence[EditReader], others: int) -> list[PlannedStep]:
            """Plan, and wait until all of the next step is here."""
            planned = super().plan(readers, others)
            for row in (row for reader in readers for row in reader.coming(0)[0]):
                for name in row.step.names:
                    row.step.wait(name, _LONGEST_LOAD_S)
            return planned

    def one_by_one(steps: Sequence[Sequence[BlockCost]], load_busy_s: float) -> list[StepPlan]:
        return follow(steps, decide_one_by_one(steps, load_busy_s=load_busy_s), load_busy_s=load_busy_s)

    def everything(steps: Sequence[Sequence[BlockCost]], load_busy_s: float) -> list[StepPlan]:
        return follow(steps, [True] * sum(map(len, steps)), load_busy_s=load_busy_s)

    return {
        "plan": LoadPlanner(source, times),
        "one_by_one": LoadPlanner(source, times, LoadPolicy(choose=one_by_one)),
        "pipeline": LoadPlanner(source, times, LoadPolicy(choose=everything, patience=_FOREVER)),
        "sequence": SequencePlanner(source, times, LoadPolicy(choose=everything, turns=1, patience=_FOREVER)),
    }


def decide_one_by_one(steps: Sequence[Sequence[BlockCost]], *, load_busy_s: float = 0.0) -> list[bool]:
    """Return whether each block, of all steps, takes what was recorded, by InstGenIE's Algorithm 1.

    It goes through the blocks in their order. Each takes its recording if it ends no later so than computed in full,
    after what was decided before; what its load costs the blocks behind it does not count. With small masks and loads
    as long as computing in full, every block takes and waits: twice the best.

    Args:
        load_busy_s: See `bottega.planning.plan_steps`.
    """
    compute_s, load_s, takes = 0.0, load_busy_s, []
    for block in (block for blocks in steps for block in blocks):
        here_s = load_s + block.load_s if block.load_s > 0.0 else block.ready_s
        full_end_s, masked_end_s = compute_s + block.full_s, max(compute_s, here_s) + block.masked_s
        takes.append(masked_end_s <= full_end_s)
        if takes[-1]:
            load_s += block.load_s
        compute_s = min(full_end_s, masked_end_s)
    return takes


if __name__ == "__main__":
    sys.exit(BENCH.command())
