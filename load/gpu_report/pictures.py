"""A picture, and several at once: Diffusers eager, Diffusers compiled and ours, in one run.

The parts that compile stand alone, as compiling takes as long as all else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

from bottega.diffusion.acceleration.acceleration import AccelerationResult
from load.gpu_report.figures import Figure
from load.gpu_report.flops import peak_flops, picture_flops
from load.gpu_report.rig import Rig
from load.gpu_report.sides import DrawingSide, diffusers_side, drawing, our_runtime, our_side
from load.gpu_report.timing import Timed, timed

_SECONDS = "Seconds of one picture"
_RATES = "Pictures a second, by how many at once"
# Of ours over Diffusers eager at one picture, without loss.
WANTED_OVER_EAGER, WANTED_OVER_COMPILED = 1.24, 1.0
WANTED_KERNELS = 2

_Open = Callable[[Rig], AbstractContextManager[DrawingSide]]


def alone(rig: Rig) -> Sequence[Figure]:
    """Eager before and after: where they differ, so did the machine meanwhile. Ours with what its self-check kept, and
    without any of it.
    """
    eager, plain = _draw(rig, diffusers_side, 1), _draw(rig, _plain, 1)
    with our_runtime(rig) as runtime:
        found = runtime.engine.accelerations
        ours = timed(partial(drawing(rig, runtime), 1), rounds=rig.size.rounds, device=rig.device)
    again = _draw(rig, diffusers_side, 1)
    eager_s = (eager.seconds + again.seconds) / 2
    return [
        *_of(rig, "eager", "Diffusers eager", eager),
        *_of(rig, "plain", "ours, plain", plain),
        *_of(rig, "ours", "ours", ours),
        *_accelerations(rig, found),
        rig.wanted(
            Figure(
                name="ratio_vs_eager",
                label="Diffusers eager over ours",
                value=eager_s / ours.seconds,
                unit="x",
                group="Times as fast, one picture",
                at_least=WANTED_OVER_EAGER,
            )
        ),
        Figure(name="eager_drift", label="Diffusers eager, after over before", value=again.seconds / eager.seconds),
    ]


def alone_compiled(rig: Rig) -> Sequence[Figure]:
    """Ours again, next to it."""
    compiled, ours = _draw(rig, _compiled, 1), _draw(rig, our_side, 1)
    return [
        *_of(rig, "compiled", "Diffusers compiled", compiled),
        rig.wanted(
            Figure(
                name="ratio_vs_compiled",
                label="Diffusers compiled over ours",
                value=compiled.seconds / ours.seconds,
                unit="x",
                group="Times as fast, one picture",
                at_least=WANTED_OVER_COMPILED,
            )
        ),
    ]


def together(rig: Rig) -> Sequence[Figure]:
    """Eager and ours."""
    return [*_batches(rig, "eager", "Diffusers eager", diffusers_side), *_batches(rig, "ours", "ours", our_side)]


def together_compiled(rig: Rig) -> Sequence[Figure]:
    """Compiled for each of the numbers."""
    return _batches(rig, "compiled", "Diffusers compiled", _compiled)


def _accelerations(rig: Rig, found: Sequence[AccelerationResult]) -> list[Figure]:
    """What the worker's self-check has found on this device. Of what was refused, why is printed."""
    for each in found:
        print(f"{each.name}: {'kept' if each.kept else each.reason}")
    kept = [each for each in found if each.kept]
    kernels = sum(each.name.startswith("kernels.") for each in kept)
    return [
        Figure(name="accelerations_kept", label=f"accelerations kept, of {len(found)}", value=len(kept)),
        rig.wanted(Figure(name="kernels_kept", label="  of them kernels", value=kernels, at_least=WANTED_KERNELS)),
        *(
            Figure(
                name=f"acceleration_{each.name.replace('.', '_')}",
                label=f"  {each.name}, {'kept' if each.kept else 'refused'}",
                value=each.speedup,
                unit="x",
                group="What the self-check timed, times as fast as plain",
            )
            for each in found
            if each.speedup
        ),
    ]


def _plain(rig: Rig) -> AbstractContextManager[DrawingSide]:
    return our_side(rig, accelerations="off")


def _compiled(rig: Rig) -> AbstractContextManager[DrawingSide]:
    return diffusers_side(rig, compiled=True)


def _draw(rig: Rig, open_side: _Open, batch: int) -> Timed:
    with open_side(rig) as side:
        return timed(partial(side, batch), rounds=rig.size.rounds, device=rig.device)


def _of(rig: Rig, name: str, label: str, taken: Timed) -> list[Figure]:
    flops, (peak, about) = picture_flops(rig), peak_flops(rig)
    utilisation = flops / taken.seconds / peak
    figures = [
        Figure(name=f"{name}_s", label=label, value=taken.seconds, unit="s", group=_SECONDS),
        Figure(name=f"{name}_mfu", label=f"  FLOPs of its network, {about}", value=utilisation),
    ]
    if rig.on_gpu:
        figures.append(Figure(name=f"{name}_gib", label="  memory at the most", value=taken.peak_gib, unit="GiB"))
    return figures


def _batches(rig: Rig, name: str, label: str, open_side: _Open) -> list[Figure]:
    figures = []
    with open_side(rig) as side:
        for batch in rig.size.batches:
            taken = timed(partial(side, batch), rounds=rig.size.rounds, device=rig.device)
            said = f"{label}, {batch} at once"
            rate = batch / taken.seconds
            figures.append(Figure(name=f"{name}_{batch}_per_s", label=said, value=rate, unit="/s", group=_RATES))
            if rig.on_gpu:
                peak = taken.peak_gib
                figures.append(Figure(name=f"{name}_{batch}_gib", label="  memory at the most", value=peak, unit="GiB"))
    return figures
