"""The LoRAs of a request, and how they become the contract's messages and come back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bottega.client.types.messages import describe, set_field
from bottega.errors import Violation
from bottega.v1 import generation_pb2


@dataclass(frozen=True, slots=True)
class Lora:
    """A LoRA to draw with: `Lora("outline", 0.8)`; a tuple of name and scale, or the name alone, means the same.

    name: as loras() lists it. scale: how strongly it counts.
    from_step: the step at which it goes in, the same for all of a request, and digest: the hash of its weights; a
    provenance says both, and with both the picture is the same again. A step after the first one that is made needs
    bounded_lora_loading=True beside fidelity="exact".
    max_step: the step that is not made without it, where from_step is not given; absent is what its profile says, or 0
    where the request is exact. More than 0 beside fidelity="exact" needs bounded_lora_loading=True.
    measure_similarity: draw everything once more without it, and say in the provenance how alike the latents are.
    """

    name: str
    scale: float = 1.0
    from_step: int | None = None
    digest: str | None = None
    max_step: int | None = None
    measure_similarity: bool = False


LoraLike = Lora | tuple[str, float] | str

_OPTIONAL = ("from_step", "digest", "max_step")


def add_loras(spec: generation_pb2.GenerationSpec, loras: object) -> Iterator[Violation]:
    """Adds a request's LoRAs to its spec, and says what of them cannot be sent."""
    if not isinstance(loras, list | tuple):
        yield Violation(field="lora", description=f"must be a list of LoRAs; got {type(loras).__name__}")
        return
    for index, given in enumerate(loras):
        path = f"lora[{index}]"
        lora = _as_lora(given)
        if lora is None:
            yield Violation(
                field=path, description=f"must be a Lora, a name, or a name and a scale; got {describe(given)}"
            )
        else:
            yield from _add(spec.loras.add(), lora, path)


def lora_from(message: generation_pb2.Lora) -> Lora:
    """The LoRA of a spec."""
    said = {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}  # type: ignore[arg-type]
    scale = message.scale if message.HasField("scale") else 1.0
    return Lora(message.name, scale, **said, measure_similarity=message.measure_similarity)


def _as_lora(given: object) -> Lora | None:
    match given:
        case Lora():
            return given
        case str():
            return Lora(given)
        case (str() as name, int() | float() as scale):
            return Lora(name, scale)
    return None


def _add(message: generation_pb2.Lora, lora: Lora, path: str) -> Iterator[Violation]:
    for name in ("name", "scale", *_OPTIONAL, "measure_similarity"):
        value = getattr(lora, name)
        if value is not None or name not in _OPTIONAL:
            yield from set_field(message, name, value, path=f"{path}.{name}")
