"""The ControlNets of a request, by Diffusers' names, and how they become the contract's messages and come back."""

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

    name: as controlnets() lists it. image: the control image: encoded bytes, a path, a Pillow image or a Picture; it
    is resized to the picture's width and height. None where it is not known, as of a picture that was drawn before.
    controlnet_conditioning_scale: how strongly it counts; None is 1, in image-to-image .8, as in Diffusers.
    control_guidance_start, control_guidance_end: the fractions of the steps at which it begins and ends, 0 to 1.
    guess_mode: only the conditional half is controlled.
    measure_similarity: measure how similar its residuals are from step to step; the provenance has it.
    The engine's ControlNet has the same name: it is the loaded network that this one asks for.
    """

    name: str
    image: ImageSource | None = field(default=None, repr=False)
    controlnet_conditioning_scale: float | None = field(default=None, kw_only=True)
    control_guidance_start: float = field(default=0.0, kw_only=True)
    control_guidance_end: float = field(default=1.0, kw_only=True)
    guess_mode: bool = field(default=False, kw_only=True)
    measure_similarity: bool = field(default=False, kw_only=True)


_NUMBERS = ("controlnet_conditioning_scale", "control_guidance_start", "control_guidance_end")


def add_controlnets(spec: generation_pb2.GenerationSpec, nets: object) -> Iterator[Violation]:
    """Adds a request's ControlNets to its spec, and says what of them cannot be sent. Reads images that are paths."""
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
    """The ControlNet of a spec, without its image."""
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
        yield Violation(field=f"{path}.image", description="is missing: bytes, a path or a Pillow image")
    else:
        yield from set_image(message, net.image, path=f"{path}.image")
