"""The keyword arguments of a request, and how they become the contract's GenerationSpec and come back.

The names are those of Diffusers' pipelines. Knows the contract's messages, not the network; ranges are
checked by the gateway, which knows the model.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict, cast

from bottega.client.picture import FORMATS, Format
from bottega.errors import InvalidRequest, Violation
from bottega.v1 import generation_pb2
from bottega.v1.generation_pb2 import Fidelity, GenerationSpec, Sampler

SamplerName = Literal["euler", "euler_ancestral", "ddim", "dpmpp_2m"]
FidelityName = Literal["exact", "balanced", "fast"]

SAMPLERS: dict[SamplerName, Sampler.ValueType] = {
    "euler": generation_pb2.SAMPLER_EULER,
    "euler_ancestral": generation_pb2.SAMPLER_EULER_ANCESTRAL,
    "ddim": generation_pb2.SAMPLER_DDIM,
    "dpmpp_2m": generation_pb2.SAMPLER_DPMPP_2M,
}
FIDELITIES: dict[FidelityName, Fidelity.ValueType] = {
    "exact": generation_pb2.FIDELITY_EXACT,
    "balanced": generation_pb2.FIDELITY_BALANCED,
    "fast": generation_pb2.FIDELITY_FAST,
}


class PillowImage(Protocol):
    """What the SDK uses of a Pillow image, so that it need not import Pillow."""

    def save(self, fp: Any, format: str | None = None) -> None: ...


ImageSource = bytes | str | os.PathLike[str] | PillowImage


class GenerationOptions(TypedDict, total=False):
    """How to draw. Everything is optional; what is absent takes the model's default.

    negative_prompt: what not to draw; absent and "" differ, as in Diffusers.
    prompt_2, negative_prompt_2: for the second text encoder; absent uses the first one's.
    num_inference_steps: 1 to 200.
    guidance_scale: 0 to 50; at most 1 switches guidance off.
    guidance_rescale: 0 to 1.
    width, height: pixels, multiples of the model's size_multiple.
    seed: of the first image; image i is drawn as a single one with seed + i.
    sampler: "euler", "euler_ancestral", "ddim" or "dpmpp_2m".
    use_karras_sigmas: with "euler" and "dpmpp_2m".
    image: source of image-to-image: encoded bytes, a path or a Pillow image.
    strength: how much of the source is redrawn, above 0 to 1.
    format: "png", "jpeg" or "webp".
    quality: of JPEG and WebP, 1 to 100.
    fidelity: "exact", "balanced" or "fast": how far approximate techniques may go.
    model: name of the model, as models() lists it.
    """

    model: str | None
    prompt_2: str | None
    negative_prompt: str | None
    negative_prompt_2: str | None
    num_inference_steps: int | None
    guidance_scale: float | None
    guidance_rescale: float | None
    width: int | None
    height: int | None
    seed: int | None
    sampler: SamplerName | None
    use_karras_sigmas: bool
    image: ImageSource | None
    strength: float | None
    format: Format | None
    quality: int | None
    fidelity: FidelityName | None


_NAMED: dict[str, Mapping[Any, int]] = {"sampler": SAMPLERS, "fidelity": FIDELITIES, "format": FORMATS}
_OPTIONS = tuple(GenerationOptions.__annotations__)


def spec_from(prompt: str, options: GenerationOptions, *, num_images: int = 1) -> GenerationSpec:
    """The request as the contract carries it. Reads the source image when it is a path.

    Raises InvalidRequest, listing every argument that cannot be sent.
    """
    spec = GenerationSpec()
    unknown = sorted(options.keys() - set(_OPTIONS))
    broken = [Violation(field=name, description="there is no such argument") for name in unknown]
    values: dict[str, object] = {"prompt": prompt, "num_images": num_images if num_images != 1 else None}
    for name, value in {**values, **{name: options.get(name) for name in _OPTIONS}}.items():
        if value is None:
            continue
        try:
            setattr(spec, name, _sendable(name, value))
        except (TypeError, ValueError, OSError) as error:
            broken.append(Violation(field=name, description=str(error)))
    if broken:
        raise InvalidRequest("the request cannot be sent", violations=broken)
    return spec


def options_from(spec: GenerationSpec) -> GenerationOptions:
    """The keyword arguments that make `spec`, without its prompt, number of images and source image.

    Raises InvalidRequest when the spec uses something that no keyword argument says.
    """
    said = {field.name for field, _ in spec.ListFields()} - {"prompt", "num_images", "image"}
    if beyond := sorted(said - set(_OPTIONS)):
        raise InvalidRequest(f"the client has no argument for {', '.join(beyond)}")
    values = {name: getattr(spec, name) for name in said - _NAMED.keys()}
    for name in said & _NAMED.keys():
        values[name] = next(key for key, number in _NAMED[name].items() if number == getattr(spec, name))
    return cast("GenerationOptions", values)


def _sendable(name: str, value: Any) -> object:
    if name == "image":
        return _encoded(value)
    if name not in _NAMED:
        return value
    if value not in _NAMED[name]:
        raise ValueError(f"must be one of {', '.join(_NAMED[name])}; got {value!r}")
    return _NAMED[name][value]


def _encoded(image: ImageSource) -> bytes:
    if isinstance(image, bytes):
        return image
    if isinstance(image, str | os.PathLike):
        return Path(image).read_bytes()
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()
