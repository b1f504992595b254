"""What is gained by stages as roles, and by replicas of hot ControlNets, at equal devices?

Fleets of 8 to 1,000 devices are simulated with jobs as Katz' trace has them: ControlNets and LoRAs by their measured
popularity, which is as skewed as Zipf's law or more, and 20 to 50 guided steps of 1024x1024 pictures. Arrivals are
Poisson's. A job is in time if it takes at most five times its seconds alone. Each figure is the mean over several
seeds, with the half-width of its 95 % confidence interval; both sides get the same jobs.

Stages and ControlNets cost the operations that PyTorch counts on SDXL-base's networks, where a guided step takes .1 s.

- Roles: devices that only encode, denoise or decode, divided so that the scarcest stage can do most, against as many
  that do all. Goodput is the highest rate at which 95 % of the jobs are in time. Conditioning and latents cross a link.
  All serve one job at a time, first come first served. Where decoding is three times as slow (in float32, or by slower
  memory), and where few steps are drawn without guidance, the other stages weigh more.
- Replicas: each ControlNet at one server, against the gateway's ranking alone, by which jobs also load ControlNets at
  free servers, and against the ranking with the policy that makes replicas before jobs need them. Each session asks
  its server once in a step, so that no step is shorter than a round of the server's sessions. Goodput is the share of
  jobs in time, where .6 of what the workers can draw comes. There are as many servers as workers: most jobs have two
  ControlNets, each with nearly half the operations of a step.

A run takes four minutes on two cores.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import itertools
import math
import multiprocessing
import random
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from load.bench.framework import CORES, Bench, Option, Sheet
from load.bench.goodput_controlnets import Side, share_in_time
from load.bench.sdxl_costs import StageCosts, counted_costs
from load.replay.trace_shape import LORAS_B

DEVICES = (8, 64, 256, 1000)
# Seconds of a guided step, and multiple of a job's seconds alone within which it is in time.
STEP_S, IN_TIME = 0.1, 5.0
# What a LoRA beside the weights adds to a step.
LORA_SHARE = 0.05
# Share of the jobs that is in time at the goodput.
_ATTAINMENT = 0.95
# Seconds to send conditioning or a latent, each below 1 MB, to another host.
_LINK_S = 0.003
# Rates that are tried, over what devices that do all can draw, and how exactly.
_RATES, _EXACT = (0.5, 1.05), 0.005
# 97.5 % quantiles of Student's distribution, by degrees of freedom.
_STUDENT = (math.inf, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
BENCH = Bench(
    __file__,
    __doc__,
    Option("--devices", list(DEVICES), "that there are", smallest=[8]),
    Option("--jobs", 100, "for each device, in a run with roles", smallest=5),
    Option("--seconds", 120.0, "of a run with ControlNets", smallest=40.0),
    Option("--seeds", 5, "of each comparison, 2 to 10", smallest=2, choices=range(2, 11)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mix:
    """A kind of jobs."""

    name: str
    key: str
    steps: tuple[int, ...]
    rows: int
    decode_times: float = 1.0
    """How many times as long decoding takes as its operations say."""


_MIXES = (
    _Mix(name="20 to 50 guided steps", key="steps", steps=(20, 30, 50), rows=2),
    _Mix(name="the same, decoding 3 times as slow", key="slow", steps=(20, 30, 50), rows=2, decode_times=3.0),
    _Mix(name="4 to 8 steps, no guidance", key="few", steps=(4, 8), rows=1),
)
_Stages = tuple[float, float, float]
"""Seconds of encoding, denoising and decoding."""


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Count operations, and simulate all fleets with all seeds, as many at a time as there are cores."""
    del folder
    costs, seeds = counted_costs(STEP_S), range(options.seeds)
    encode_s, denoise_s, decode_s = costs.stages_s(30, 2)
    sheet.row("encoding, 30 guided steps, decoding", f"{encode_s:.4f} s, {denoise_s:.2f} s, {decode_s:.3f} s")
    sheet.row("a ControlNet's forward pass, over a step", f"{costs.controlnet_s / costs.row_s:.2f}")
    sheet.figure("weights of a device that denoises, over all", costs.denoiser_share, key="denoiser_weights")
    with ProcessPoolExecutor(CORES, mp_context=multiprocessing.get_context("spawn")) as pool:
        roles = {
            (mix, devices): pool.map(functools.partial(_roles, mix, devices, costs, options.jobs), seeds)
            for devices, mix in itertools.product(options.devices, _MIXES)
        }
        replicas = {
            (service, devices): pool.map(functools.partial(_replicas, service, devices, costs, options.seconds), seeds)
            for devices, service in itertools.product(options.devices, "AB")
        }
        for (mix, devices), found in roles.items():
            _add(sheet, f"roles, {mix.name}, {devices} devices", f"roles_{mix.key}_{devices}", list(found))
        for (service, devices), shares in replicas.items():
            one, ranking, replicas_too = zip(*shares, strict=True)
            what, key = f"service {service}, {devices} workers", f"{service}_{devices}"
            _add(sheet, f"ranking over one server, {what}", f"ranking_{key}", list(zip(one, ranking, strict=True)))
            _add(
                sheet,
                f"replicas over ranking, {what}",
                f"replicas_{key}",
                list(zip(ranking, replicas_too, strict=True)),
            )
    for key, what, bar in (
        ("ranking", "ranking over one server", "above 0"),
        ("replicas", "replicas over ranking", "at least 0"),
    ):
        gains = [gain for name, gain in sheet.values.items() if re.fullmatch(rf"{key}_.*_gain", name)]
        sheet.figure(f"{what}: least gain", min(gains), "{:+.3f}", key=f"{key}_least_gain", bar=bar)


def _add(sheet: Sheet, what: str, key: str, found: Sequence[tuple[float, float]]) -> None:
    """Add the goodput of both sides and their difference, seed by seed."""
    without, having, gains = ([*side] for side in zip(*((a, b, b - a) for a, b in found), strict=True))
    sheet.row(f"{what}: goodput without, with", f"{_mean(without)}, {_mean(having)}")
    sheet.figure("    gained", fmean(gains), "{:+.3f}" + f" (+- {_half_width(gains):.3f})", key=f"{key}_gain")
    sheet.values |= {f"{key}_without": fmean(without), f"{key}_with": fmean(having), f"{key}_half": _half_width(gains)}


def _mean(values: Sequence[float]) -> str:
    return f"{fmean(values):.3f} (+- {_half_width(values):.3f})"


def _half_width(values: Sequence[float]) -> float:
    """Return half the width of the mean's 95 % confidence interval."""
    return _STUDENT[len(values) - 1] * stdev(values) / math.sqrt(len(values))


def _roles(mix: _Mix, devices: int, costs: StageCosts, jobs: int, seed: int) -> tuple[float, float]:
    """Return the goodput of devices that do all, and of roles, over what devices that do all can draw."""
    chance = random.Random(f"roles {mix.key} {devices} {seed}")
    stages = [
        _stages(mix, costs, len(loras), chance)
        for _, loras in zip(range(jobs * devices), LORAS_B.draw(chance, least=0), strict=False)
    ]
    gaps = list(itertools.accumulate(chance.expovariate(1.0) for _ in stages))
    mean_s = fmean(sum(stage) for stage in stages)
    divided = divide(devices, [fmean(stage) for stage in zip(*stages, strict=True)])

    def whole_s(at_s: Sequence[float]) -> list[float]:
        return served_s(at_s, [sum(stage) for stage in stages], devices)

    def roles_s(at_s: Sequence[float]) -> list[float]:
        for count, seconds in zip(divided, zip(*stages, strict=True), strict=True):
            at_s = [end_s + _LINK_S for end_s in served_s(at_s, seconds, count)]
        return [end_s - _LINK_S for end_s in at_s]

    def goodput(side: Callable[[Sequence[float]], list[float]]) -> float:
        low, high = _RATES
        while high - low > _EXACT:
            middle = (low + high) / 2
            at_s = [gap * mean_s / (devices * middle) for gap in gaps]
            ends_s = side(at_s)
            late = [end - at > IN_TIME * sum(stage) for at, end, stage in zip(at_s, ends_s, stages, strict=True)]
            kept = fmean(late[len(late) // 2 :]) <= 1 - _ATTAINMENT  # the first half fills the queue
            low, high = (middle, high) if kept else (low, middle)
        return low

    return goodput(whole_s), goodput(roles_s)


def _replicas(service: str, devices: int, costs: StageCosts, seconds: float, seed: int) -> list[float]:
    """Return the share of the jobs that is in time, for each side."""
    return [share_in_time(service, devices, costs, length_s=seconds, seed=seed, side=side) for side in Side]


def _stages(mix: _Mix, costs: StageCosts, loras: int, chance: random.Random) -> _Stages:
    encode_s, denoise_s, decode_s = costs.stages_s(chance.choice(mix.steps), mix.rows, 1.0 + LORA_SHARE * loras)
    return encode_s, denoise_s, mix.decode_times * decode_s


def divide(devices: int, seconds: Sequence[float]) -> list[int]:
    """Return how many devices each stage gets, at least one, so that the scarcest stage can do most.

    Args:
        devices: All devices.
        seconds: Seconds that a job takes in each stage.
    """
    counts = [1] * len(seconds)
    for _ in range(devices - len(seconds)):
        counts[min(range(len(counts)), key=lambda stage: counts[stage] / seconds[stage])] += 1
    return counts


def served_s(at_s: Sequence[float], seconds: Sequence[float], devices: int) -> list[float]:
    """Return when each job ends where so many devices serve one each, first come first served.

    Args:
        at_s: When each job comes, in any order.
        seconds: How long each takes.
        devices: Devices that serve.
    """
    free_s, ends_s = [0.0] * devices, [0.0] * len(at_s)
    for job in sorted(range(len(at_s)), key=at_s.__getitem__):
        ends_s[job] = max(at_s[job], free_s[0]) + seconds[job]
        heapq.heapreplace(free_s, ends_s[job])
    return ends_s


if __name__ == "__main__":
    sys.exit(BENCH.command())
