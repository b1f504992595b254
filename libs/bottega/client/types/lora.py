"""The LoRAs of a request, and their conversion to and from messages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bottega.client.types.messages import describe, set_field
from bottega.errors import Violation
from bottega.v1 import generation_pb2


@dataclass(frozen=True, slots=True)
class Lora:
    """A LoRA to draw with: `Lora("outline", 0.8)`. A tuple of name and scale, or the name alone, means the same."""

    name: str
    """Its name, as loras() and adapters() list it."""
    scale: float = 1.0
    """Strength."""
    from_step: int | None = None
    """Step from which it is used, the same for all LoRAs of a request. A provenance has it; with it and `digest` the
    same picture is drawn again. A step after the first one needs bounded_lora_loading=True with fidelity="exact"."""
    digest: str | None = None
    """Hash of its weights, as a provenance has it."""
    max_step: int | None = None
    """Latest step from which it must be used, if `from_step` is None. None for that of its profile, or 0 in an exact
    request. More than 0 needs bounded_lora_loading=True with fidelity="exact"."""
    measure_similarity: bool = False
    """Whether to draw everything once more without it, and record in the provenance how similar the latents are."""


LoraLike = Lora | tuple[str, float] | str

_OPTIONAL = ("from_step", "digest", "max_step")


def add_loras(spec: generation_pb2.GenerationSpec, loras: object) -> Iterator[Violation]:
    """Add a request's LoRAs to its spec, and yield what cannot be sent."""
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
    """Return the LoRA of a spec."""
    values = {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}  # type: ignore[arg-type]
    scale = message.scale if message.HasField("scale") else 1.0
    return Lora(message.name, scale, **values, measure_similarity=message.measure_similarity)


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
