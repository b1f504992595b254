"""The control modes of ControlNet unions: what each image of a union shows, such as a pose or depth.

Names and numbers are those of the published unions for SDXL (xinsir's `controlnet-union-sdxl-1.0`, whose first form has
the modes up to `segment`). Other unions may give the numbers other meanings; a request can give the number itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from bottega.errors import Violation
from bottega.v1.generation_pb2 import ControlNet

# Bound on the modes of a union; published ones have 6 or 8.
MAX_MODES = 64
_NAMES: Sequence[tuple[str, ...]] = (
    ("openpose",),
    ("depth",),
    ("hed", "pidi", "scribble", "ted"),
    ("canny", "lineart", "anime_lineart", "mlsd"),
    ("normal",),
    ("segment",),
    ("tile",),
    ("repaint",),
)
_NUMBERS: Mapping[str, int] = MappingProxyType(
    {name: number for number, names in enumerate(_NAMES) for name in names}
    | {str(number): number for number in range(MAX_MODES)}
)


def mode_number(mode: str) -> int | None:
    """Return the number of a mode that is given by name or number; None if there is no such mode."""
    return _NUMBERS.get(mode)


def mode_name(number: int) -> str:
    """Return the first name of a mode, or its number if it has none."""
    return _NAMES[number][0] if number < len(_NAMES) else str(number)


def mode_names(count: int) -> str:
    """Return the first names of the modes of a union that has `count`, for lists."""
    names = [mode_name(number) for number in range(min(count, len(_NAMES)))]
    return ", ".join([*names, *_unnamed(count)])


def list_modes(count: int = len(_NAMES)) -> str:
    """Return the names and numbers of the first `count` modes, for errors."""
    named = [f"{number} ({', '.join(names)})" for number, names in enumerate(_NAMES[:count])]
    return ", ".join([*named, *_unnamed(count)])


def refused_mode(name: str, mode: int | None, modes: int) -> str:
    """Return why a ControlNet cannot be used with a mode; empty if it can.

    Args:
        name: Name of the ControlNet.
        mode: The mode of an image; None if the request gives none.
        modes: Number of modes that the ControlNet has; 0 if it is not a union.
    """
    if mode is None:
        return f"ControlNet {name} is a union and needs a control_mode: {list_modes(modes)}" if modes else ""
    if not modes:
        return (
            f"ControlNet {name} is not a union and has no control_mode {mode_name(mode)}; leave it out. "
            f"Unions have the modes {list_modes()}"
        )
    if mode >= modes:
        return f"ControlNet {name} has no control_mode {mode}; it has {list_modes(modes)}"
    return ""


def share_union(nets: Sequence[ControlNet]) -> bool:
    """Return whether these are the images of one union, which computes them together."""
    return len(nets) > 1 and all(net.control_mode and net.name == nets[0].name for net in nets)


def check_modes(nets: Sequence[ControlNet], path: str) -> list[Violation]:
    """Return the violations in the modes of a request's ControlNets.

    A union with one image may be combined with other ControlNets. Diffusers' union pipelines do not combine them; here
    the residuals of all are added, as its MultiControlNetModel does.

    Args:
        path: Name of the list in errors.
    """
    wrong = [
        Violation(field=f"{path}[{index}].control_mode", description=f"must be one of {list_modes()}")
        for index, net in enumerate(nets)
        if net.control_mode and mode_number(net.control_mode) is None
    ]
    if share_union(nets):
        return wrong + _check_images(nets, path)
    for index, net in enumerate(nets):
        if net.control_mode and any(other.name == net.name and other.control_mode for other in nets[:index]):
            rule = "several images of one union cannot be combined with another ControlNet"
            wrong.append(Violation(field=f"{path}[{index}].name", description=rule))
    return wrong


def _unnamed(count: int) -> Sequence[str]:
    """Return the numbers without names among the first `count`, as one range."""
    numbers = range(len(_NAMES), count)
    return [f"{numbers[0]} to {numbers[-1]}"] if len(numbers) > 1 else [str(number) for number in numbers]


def _check_images(nets: Sequence[ControlNet], path: str) -> list[Violation]:
    """Return the violations in the images of one union."""
    wrong = []
    for index, net in enumerate(nets):
        if net.guess_mode != nets[0].guess_mode:
            rule = "must be that of the first image: a union computes its images together"
            wrong.append(Violation(field=f"{path}[{index}].guess_mode", description=rule))
    return wrong
