"""The ControlNets of a request, with Diffusers' names, and their conversion to and from messages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from bottega.client.types.image_source import ImageSource, set_image
from bottega.client.types.messages import set_field
from bottega.errors import Violation
from bottega.v1 import generation_pb2


@dataclass(frozen=True, slots=True)
class ControlNet:
    """A ControlNet to draw with: `ControlNet("edges", "edges.png", controlnet_conditioning_scale=0.8)`.

    The engine has a class of the same name: the loaded network that this one asks for.
    """

    name: str
    """Its name, as controlnets() and adapters() list it."""
    image: ImageSource | None = field(default=None, repr=False)
    """Control image: encoded bytes, a path, a Pillow image or a Picture. It is resized to the picture's size. None in
    the parameters of an earlier picture, which do not contain it."""
    controlnet_conditioning_scale: float | None = field(default=None, kw_only=True)
    """Strength; None for 1, or .8 in image-to-image, as in Diffusers."""
    control_guidance_start: float = field(default=0.0, kw_only=True)
    """Fraction of the steps at which it begins, 0 to 1."""
    control_guidance_end: float = field(default=1.0, kw_only=True)
    """Fraction of the steps at which it ends, 0 to 1."""
    guess_mode: bool = field(default=False, kw_only=True)
    """Whether it controls only the conditional half of guidance."""
    measure_similarity: bool = field(default=False, kw_only=True)
    """Whether to measure how similar its residuals are from step to step, for the provenance."""


_NUMBERS = ("controlnet_conditioning_scale", "control_guidance_start", "control_guidance_end")


def add_controlnets(spec: generation_pb2.GenerationSpec, nets: object) -> Iterator[Violation]:
    """Add a request's ControlNets to its spec, and yield what cannot be sent. Images that are paths are read."""
    if not isinstance(nets, list | tuple):
        yield Violation(field="controlnets", description=f"must be a list of ControlNet; got {type(nets).__name__}")
        return
    for index, net in enumerate(nets):
        path = f"controlnets[{index}]"
        if isinstance(net, ControlNet):
            yield from _add(spec.controlnets.add(), net, path)
        else:
            yield Violation(field=path, description=f"must be a ControlNet; got {type(net).__name__}")


def controlnet_from(message: generation_pb2.ControlNet) -> ControlNet:
    """Return the ControlNet of a spec, without its image."""
    end = message.control_guidance_end if message.HasField("control_guidance_end") else 1.0
    scale = message.controlnet_conditioning_scale if message.HasField("controlnet_conditioning_scale") else None
    return ControlNet(
        message.name,
        controlnet_conditioning_scale=scale,
        control_guidance_start=message.control_guidance_start,
        control_guidance_end=end,
        guess_mode=message.guess_mode,
        measure_similarity=message.measure_similarity,
    )


def _add(message: generation_pb2.ControlNet, net: ControlNet, path: str) -> Iterator[Violation]:
    for name in ("name", "guess_mode", "measure_similarity", *_NUMBERS):
        if (value := getattr(net, name)) is not None:
            yield from set_field(message, name, value, path=f"{path}.{name}")
    if net.image is None:
        yield Violation(field=f"{path}.image", description="is missing: give bytes, a path or a Pillow image")
    else:
        yield from set_image(message, net.image, path=f"{path}.image")
