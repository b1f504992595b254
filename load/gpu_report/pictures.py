"""A picture, and several at once: Diffusers eager, Diffusers compiled and ours, in one run.

The parts that compile stand alone, as compiling takes as long as all else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

from bottega.engine.acceleration.acceleration import AccelerationResult
from load.gpu_report.device import peak_flops, picture_flops
from load.gpu_report.report import Figure
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
    """Draw with Diffusers eager before and after ours; where both differ, so did the machine meanwhile.

    Ours is drawn with what its self-check kept, and without any of it.
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
        _ratio(rig, "eager", eager_s / ours.seconds, WANTED_OVER_EAGER),
        Figure("eager_drift", "Diffusers eager, after over before", again.seconds / eager.seconds),
    ]


def alone_compiled(rig: Rig) -> Sequence[Figure]:
    """Draw with Diffusers compiled, and again with ours next to it."""
    compiled, ours = _draw(rig, _compiled, 1), _draw(rig, our_side, 1)
    return [
        *_of(rig, "compiled", "Diffusers compiled", compiled),
        _ratio(rig, "compiled", compiled.seconds / ours.seconds, WANTED_OVER_COMPILED),
    ]


def together(rig: Rig) -> Sequence[Figure]:
    """Draw several at once with Diffusers eager and with ours."""
    return [*_batches(rig, "eager", "Diffusers eager", diffusers_side), *_batches(rig, "ours", "ours", our_side)]


def together_compiled(rig: Rig) -> Sequence[Figure]:
    """Draw several at once with Diffusers compiled for each number."""
    return _batches(rig, "compiled", "Diffusers compiled", _compiled)


def _ratio(rig: Rig, side: str, value: float, at_least: float) -> Figure:
    label, group = f"Diffusers {side} over ours", "Times as fast, one picture"
    return rig.wanted(Figure(f"ratio_vs_{side}", label, value, "x", group, at_least=at_least))


def _accelerations(rig: Rig, found: Sequence[AccelerationResult]) -> list[Figure]:
    """Return what the worker's self-check found on this device, and print the reasons of what it refused."""
    for each in found:
        print(f"{each.name}: {'kept' if each.kept else each.reason}")
    kept = [each for each in found if each.kept]
    kernels = sum(each.name.startswith("kernels.") for each in kept)
    return [
        Figure("accelerations_kept", f"accelerations kept, of {len(found)}", len(kept)),
        rig.wanted(Figure("kernels_kept", "  of them kernels", kernels, at_least=WANTED_KERNELS)),
        *(
            Figure(
                f"acceleration_{each.name.replace('.', '_')}",
                f"  {each.name}, {'kept' if each.kept else 'refused'}",
                each.speedup,
                "x",
                "What the self-check timed, times as fast as plain",
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
    return [
        Figure(f"{name}_s", label, taken.seconds, "s", _SECONDS),
        Figure(f"{name}_mfu", f"  FLOPs of its network, {about}", flops / taken.seconds / peak),
        *_memory(rig, name, taken),
    ]


def _memory(rig: Rig, name: str, taken: Timed) -> list[Figure]:
    return [Figure(f"{name}_gib", "  memory at the most", taken.peak_gib, "GiB")] if rig.on_gpu else []


def _batches(rig: Rig, name: str, label: str, open_side: _Open) -> list[Figure]:
    figures = []
    with open_side(rig) as side:
        for batch in rig.size.batches:
            taken = timed(partial(side, batch), rounds=rig.size.rounds, device=rig.device)
            what, rate = f"{label}, {batch} at once", batch / taken.seconds
            figures.append(Figure(f"{name}_{batch}_per_s", what, rate, "/s", _RATES))
            figures += _memory(rig, f"{name}_{batch}", taken)
    return figures
